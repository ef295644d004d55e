"""Removal of evidence from before a repair, because it does not describe the node as it is now.

XID gauges keep their last code until the exporter restarts, and remapped rows stay for good. Error
counts stay in their windows for half an hour, and rules keep their state for minutes more.

All evidence that began before a repair is set aside in two cases. The first: an administrator gives the
node back (`undrain`), or it returns after a loss longer than a reboot takes. The second: a `health` event of
severity `ok` that names no check calls the node, or one GPU of it, healthy. The evidence stays void:

    a code or a row count    for as long as it would count as new, unless it changes
    a count of errors        until the repair has left its window, unless it grows
    a condition              until its rule would have cleared it. If samples still show it then, it was
                             not repaired

The history that the hazard is computed from stays.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeRecord
from fleetcast.models.risk.memory import HOLD_S
from fleetcast.models.risk.rules import CODE, COUNT, ROW, RULES, STANDING
from fleetcast.models.risk.signals import Signals
from fleetcast.models.stragglers.gang_signals import GangStreaks

REBOOT_MS = 120_000  # a node that was lost for less did not start anew
WINDOW_S = 1800.0
NEW_FOR_S = 86_400.0
PARDONED = np.array([rule.evidence is not STANDING for rule in RULES])
LASTING = np.array([rule.evidence in (CODE, COUNT) for rule in RULES])


class Pardon(msgspec.Struct, frozen=True, array_like=True):
    """The evidence of one signal that is void until `until_ms`, because of a repair.

    back_ms: when the node was given back, in Unix ms. value: the value of the evidence.
    """

    until_ms: int
    back_ms: int
    value: float


class RepairLog:
    """The nodes and GPUs that returned from repair, and the evidence that their repairs made void."""

    def __init__(self) -> None:
        self._honoured_ms: dict[str, int] = {}  # node or GPU -> its last return from repair, as the event said
        self._back_ms: dict[str, int] = {}  # node or GPU -> that return for a day, by the clock of what is seen
        self._looked: dict[str, tuple[int, NodeEvent, NodeEvent]] = {}  # node -> events it had: how many, first, last
        self._pardons: dict[tuple[str, str], Pardon] = {}  # (rule, entity)

    def drop_repaired_signals(
        self,
        signals: Signals,
        nodes: Mapping[str, NodeRecord],
        rows: Mapping[str, int],
        streaks: GangStreaks,
        now_ms: int,
    ) -> Signals:
        """Return the signals without those that a repair has made void.

        Also drops the signals of repaired nodes from `streaks`.
        """
        found = self._find_new_returns(nodes)
        for name, back_ms in found.items():
            node = name.partition("/")[0]
            if node in rows:
                self._void_old_evidence(signals, name, rows[node], back_ms)
                streaks.drop_node(node)
        oldest_ms = now_ms - int(NEW_FOR_S * 1000)
        self._back_ms = {name: ms for name, ms in (self._back_ms | found).items() if ms > oldest_ms}
        self._void_late_evidence(signals, rows, now_ms)
        if not self._pardons:
            return signals
        keep = np.ones(len(signals), bool)
        void = set()
        for at in np.flatnonzero(PARDONED[signals.rule]).tolist():
            if self._is_void(signals, at, now_ms):
                keep[at] = False
                void.add(_make_key(signals, at))
        self._pardons = {key: row for key, row in self._pardons.items() if now_ms < row.until_ms or key in void}
        return signals.select_rows(keep)

    def _find_new_returns(self, nodes: Mapping[str, NodeRecord]) -> dict[str, int]:
        """Return node or GPU -> when it returned from repair, in Unix ms, if reported since the last call."""
        found: dict[str, int] = {}
        for name, record in nodes.items():
            if not record.events:
                continue
            looked = len(record.events), record.events[0], record.events[-1]  # events come in at any place
            before = self._looked.get(name)
            if before is not None and before[0] == looked[0] and before[1] is looked[1] and before[2] is looked[2]:
                continue
            self._looked[name] = looked
            healthy = _find_healthy_times(record)
            healthy[name] = max(healthy.get(name, 0), _find_return_ms(record))
            for entity, back_ms in healthy.items():
                if back_ms > self._honoured_ms.get(entity, 0):
                    self._honoured_ms[entity] = found[entity] = back_ms
        return found

    def _void_old_evidence(self, signals: Signals, name: str, row: int, back_ms: int) -> None:
        """Declare void all evidence on a node, or on one GPU of it, that began before it returned from repair.

        row: the node's row.
        """
        is_node = "/" not in name
        self._pardons = {
            key: pardon
            for key, pardon in self._pardons.items()
            if (key[1].split("/")[0] if is_node else key[1]) != name
        }
        for at in np.flatnonzero((signals.node == row) & PARDONED[signals.rule]).tolist():
            if 0 < signals.since_ms[at] <= back_ms and (is_node or signals.entity[at] == name):
                self._pardons[_make_key(signals, at)] = _make_pardon(signals, at, back_ms)

    def _void_late_evidence(self, signals: Signals, rows: Mapping[str, int], now_ms: int) -> None:
        """Declare void the codes and counts that date from before a repair but arrive only now.

        They arrive late if the node was silent when it returned.
        """
        if not self._back_ms:
            return
        back_ms = np.zeros(len(rows), np.int64)
        for name, ms in self._back_ms.items():
            if name in rows:  # GPUs are not: what they showed at their return is all that was set aside
                back_ms[rows[name]] = ms
        old = LASTING[signals.rule] & (signals.since_ms > 0) & (signals.since_ms <= back_ms[signals.node])
        for at in np.flatnonzero(old).tolist():
            pardon = _make_pardon(signals, at, int(back_ms[signals.node[at]]))
            if now_ms < pardon.until_ms:
                self._pardons.setdefault(_make_key(signals, at), pardon)

    def _is_void(self, signals: Signals, at: int, now_ms: int) -> bool:
        """Return whether a repair has made this signal void.

        A count that has grown is not void. If a value has fallen, growth is measured from the lower value from then on.
        """
        key = _make_key(signals, at)
        pardon = self._pardons.get(key)
        if pardon is None:
            return False
        value = float(signals.value[at])
        is_late = now_ms >= pardon.until_ms and not 0 < signals.seen_ms[at] < pardon.until_ms
        if is_late or signals.since_ms[at] > pardon.back_ms:
            return False
        if RULES[signals.rule[at]].evidence is COUNT and value > pardon.value:
            self._pardons[key] = Pardon(pardon.until_ms, 0, value)  # spent: no later look pardons it again
            return False
        if value < pardon.value:
            self._pardons[key] = Pardon(pardon.until_ms, pardon.back_ms, value)
        return True

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy of the state for a snapshot."""
        pardons = [[*key, msgspec.to_builtins(pardon)] for key, pardon in self._pardons.items()]
        return {"honoured_ms": dict(self._honoured_ms), "back_ms": dict(self._back_ms), "pardons": pardons}, {}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Fill an empty object with the state that `dump` returned.

        Leaves out pardons of rules that no longer exist.
        """
        self._honoured_ms, self._back_ms = dict(about["honoured_ms"]), dict(about["back_ms"])
        self._pardons = {
            (rule, entity): msgspec.convert(row, Pardon) for rule, entity, row in about["pardons"] if rule in ROW
        }

    def shift_times(self, by_ms: int) -> None:
        """Shift the times that our own clock measured by `by_ms`.

        Times that came from events stay unchanged.
        """
        self._back_ms = {node: time_ms + by_ms for node, time_ms in self._back_ms.items()}
        self._pardons = {
            key: Pardon(row.until_ms + by_ms, row.back_ms + by_ms if row.back_ms else 0, row.value)
            for key, row in self._pardons.items()
        }


def _find_return_ms(record: NodeRecord) -> int:
    """Return when the node last returned from repair, in Unix ms.

    Returns 0 if it never did, or if it is drained or lost now.
    """
    if record.drained or record.lost:
        return 0
    lost_ms: int | None = None
    back_ms = 0
    for event in record.events:
        if event.type == "lost":
            lost_ms = event.time_ms if lost_ms is None else lost_ms
        elif event.type == "undrain":
            back_ms = event.time_ms
        elif event.type == "returned":
            if lost_ms is None or event.time_ms - lost_ms >= REBOOT_MS:
                back_ms = event.time_ms
            lost_ms = None
    return back_ms


def _find_healthy_times(record: NodeRecord) -> dict[str, int]:
    """Return node or GPU -> when a health event last called it healthy as a whole, in Unix ms."""
    found: dict[str, int] = {}
    for event in record.events:
        if event.type == "health" and event.severity == "ok" and not event.check and not event.code:
            if event.gpu is not None:
                name = f"{record.node}/{event.gpu}"
            elif event.device:
                continue
            else:
                name = record.node
            found[name] = max(found.get(name, 0), event.time_ms)
    return found


def _make_key(signals: Signals, at: int) -> tuple[str, str]:
    return RULES[signals.rule[at]].name, signals.entity[at]


def _make_pardon(signals: Signals, at: int, back_ms: int) -> Pardon:
    rule = RULES[signals.rule[at]]
    lasts_s = max(rule.clears_s, HOLD_S)
    if rule.evidence is CODE:
        lasts_s = NEW_FOR_S
    elif rule.evidence is COUNT:
        lasts_s += WINDOW_S
    return Pardon(back_ms + int(lasts_s * 1000), back_ms, float(signals.value[at]))
