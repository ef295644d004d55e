"""What a repair wipes away: evidence from before a node was given back says nothing of the node as it is now.

An XID gauge keeps its last code until the exporter restarts, remapped rows stay for good, error counts stay in their
windows for half an hour, and rules hold what they saw for minutes more. When an administrator gives a node back
(`undrain`), or it returns after it was lost for longer than a hiccup, all that began before is set aside:

    a code or a row count    for as long as it counts as new, unless it changes
    a count of errors        until its window is past it, unless it grows
    a condition              for as long as its rule remembers it: what is still so then was not repaired

The history that the hazard is computed from stays.
"""

from collections.abc import Mapping

import numpy as np

from fleet.nodes import NodeRecord
from models.memory import HOLD_S, Pardon, RiskMemory
from models.rules import RULES
from models.signals import Signals

REBOOT_MS = 120_000  # a node that was lost for less did not start anew
WINDOW_S = 1800.0
NEW_FOR_S = 86_400.0
CODES = frozenset({"xid_hard", "xid_part", "xid_soft", "row_remapped", "xid_reported", "xid_noted"})
COUNTS = frozenset(
    {
        "ecc_uncorrectable",
        "ecc_burst",
        "ecc_corrected_few",
        "pcie_replays",
        "nvlink_errors",
        "link_flap",
        "link_errors",
        "link_errors_few",
        "scrapes_lost",
        "link_timeouts",
    }
)
STANDING = frozenset({"node_lost", "drain_requested", "recent_fault", "health_failed", "health_degraded"})
PARDONED = np.array([rule.name not in STANDING for rule in RULES])
LASTING = np.array([rule.name in CODES | COUNTS for rule in RULES])


def since_repair(
    signals: Signals, nodes: Mapping[str, NodeRecord], rows: Mapping[str, int], memory: RiskMemory, now_ms: int
) -> Signals:
    """The signals less those that a repair has made void. Writes `memory`."""
    found = _given_back(nodes, memory)
    for name, back_ms in found.items():
        if name in rows:
            _pardon(signals, name, rows[name], back_ms, memory)
    oldest_ms = now_ms - int(NEW_FOR_S * 1000)
    memory.back_ms = {name: ms for name, ms in (memory.back_ms | found).items() if ms > oldest_ms}
    _pardon_late(signals, rows, memory, now_ms)
    if not memory.pardons:
        return signals
    keep = np.ones(len(signals), bool)
    for at in np.flatnonzero(PARDONED[signals.rule]).tolist():
        keep[at] = not _still_void(signals, at, memory, now_ms)
    memory.pardons = {key: row for key, row in memory.pardons.items() if now_ms < row.until_ms}
    return signals.where(keep)


def _given_back(nodes: Mapping[str, NodeRecord], memory: RiskMemory) -> dict[str, int]:
    """Nodes that came back by what was told since the last call, and when."""
    found: dict[str, int] = {}
    for name, record in nodes.items():
        if not record.events:
            continue
        looked = len(record.events), record.events[0], record.events[-1]  # events come in at any place
        before = memory.looked.get(name)
        if before is not None and before[0] == looked[0] and before[1] is looked[1] and before[2] is looked[2]:
            continue
        memory.looked[name] = looked
        back_ms = _back_ms(record)
        if back_ms > memory.told_ms.get(name, 0):
            memory.told_ms[name] = found[name] = back_ms
    return found


def _back_ms(record: NodeRecord) -> int:
    """When the node was last given back, 0 for never or if it is gone again."""
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


def _pardon(signals: Signals, name: str, row: int, back_ms: int, memory: RiskMemory) -> None:
    """Set aside all that began on the node before it came back, and what only gang comparisons remember."""
    memory.pardons = {key: kept for key, kept in memory.pardons.items() if key[1].split("/")[0] != name}
    for at in np.flatnonzero((signals.node == row) & PARDONED[signals.rule]).tolist():
        if 0 < signals.since_ms[at] <= back_ms:
            memory.pardons[_key(signals, at)] = _pardon_of(signals, at, back_ms)
    for key in [key for key in memory.streaks if key[1].split("/")[0] == name]:
        del memory.streaks[key]


def _pardon_late(signals: Signals, rows: Mapping[str, int], memory: RiskMemory, now_ms: int) -> None:
    """Set aside codes and counts from before a repair that show only now: the node was silent as it was given back."""
    if not memory.back_ms:
        return
    back_ms = np.zeros(len(rows), np.int64)
    for name, ms in memory.back_ms.items():
        if name in rows:
            back_ms[rows[name]] = ms
    old = LASTING[signals.rule] & (signals.since_ms > 0) & (signals.since_ms <= back_ms[signals.node])
    for at in np.flatnonzero(old).tolist():
        pardon = _pardon_of(signals, at, int(back_ms[signals.node[at]]))
        if now_ms < pardon.until_ms:
            memory.pardons.setdefault(_key(signals, at), pardon)


def _key(signals: Signals, at: int) -> tuple[str, str]:
    return RULES[signals.rule[at]].name, signals.entity[at]


def _pardon_of(signals: Signals, at: int, back_ms: int) -> Pardon:
    rule = RULES[signals.rule[at]]
    lasts_s = max(rule.clears_s, HOLD_S)
    if rule.name in CODES:
        lasts_s = NEW_FOR_S
    elif rule.name in COUNTS:
        lasts_s += WINDOW_S
    return Pardon(back_ms + int(lasts_s * 1000), back_ms, float(signals.value[at]))


def _still_void(signals: Signals, at: int, memory: RiskMemory, now_ms: int) -> bool:
    """Whether this is what was pardoned; a count that falls is remembered at its lowest."""
    key = _key(signals, at)
    pardon = memory.pardons.get(key)
    if pardon is None:
        return False
    value = float(signals.value[at])
    if now_ms >= pardon.until_ms or signals.since_ms[at] > pardon.back_ms:
        return False
    if key[0] in COUNTS and value > pardon.value:
        memory.pardons[key] = Pardon(pardon.until_ms, 0, value)  # spent: no later look pardons it again
        return False
    if value < pardon.value:
        memory.pardons[key] = Pardon(pardon.until_ms, pardon.back_ms, value)
    return True
