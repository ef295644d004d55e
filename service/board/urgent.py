"""Hard signals. They are published at once, in the board section `doc.urgent`.

Readers apply them to older scores.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.xids import HARD, classify_severity, find_advice
from fleetcast.service.answers.risk import HardSignal, UrgentSignals
from fleetcast.service.board.board import Board, BoardWriter, Section
from fleetcast.service.disk_errors import log_disk_errors

XID = find_metric_row(EntityKind.GPU, "xid")
AWAY = {"drain": "drained", "lost": "lost"}  # event -> state of the node from then on
BACK = frozenset({"undrain", "returned"})
MESSAGE_SHOWN = 300
MAX_ROWS = 50

decode_urgent = msgspec.json.Decoder(UrgentSignals).decode


class HardSignalDetector:
    """A detector of new hard signals.

    It stores the last XID of each GPU, because exporters repeat the code in every scrape.
    """

    def __init__(self, entities: Entities) -> None:
        self._gpus = entities[EntityKind.GPU]
        self._last_xid = np.zeros(0)

    def detect_signals(self, fresh: Sequence[NodeEvent], samples: Sequence[SampleBatch]) -> list[HardSignal]:
        """Return the new hard signals of a batch, as rows of `doc.urgent`.

        fresh: the new node events of the batch. samples: all of its samples.
        """
        return [_make_event_row(event) for event in fresh if _is_hard(event)] + self._find_new_xids(samples)

    def _find_new_xids(self, batches: Sequence[SampleBatch]) -> list[HardSignal]:
        """Return the XIDs on GPUs whose previous scrape showed another code."""
        if len(self._last_xid) < len(self._gpus):
            grown = np.full(len(self._gpus) + 64, np.nan)
            grown[: len(self._last_xid)] = self._last_xid
            self._last_xid = grown
        rows: list[HardSignal] = []
        for samples in batches:
            if samples.kind is not EntityKind.GPU:
                continue
            at = np.flatnonzero((samples.metric == XID) & np.isfinite(samples.value))
            entity, value = samples.entity[at], samples.value[at]
            before = self._last_xid[entity]
            for index in np.flatnonzero((value > 0) & (value != before) & ~np.isnan(before)).tolist():
                node, _, gpu = self._gpus.names[entity[index]].rpartition("/")
                code = int(value[index])
                rows.append(
                    HardSignal(
                        node=node,
                        gpu=int(gpu),
                        type="xid",
                        code=code,
                        time_ms=int(samples.time_ms[at][index]),
                        sentence=f"XID {code} on GPU {gpu} of {node}",
                        fatal=code in HARD,
                        advice=find_advice(code),
                    )
                )
            self._last_xid[entity] = value
        return rows


def _is_hard(event: NodeEvent) -> bool:
    """Return whether an event is a hard signal.

    Hard signals are: a node is lost or comes back, an XID worse than an application's error, or a fatal
    health check.
    """
    if event.type == "health":
        return classify_severity(event) == "fatal"
    return event.type in AWAY or event.type in BACK or classify_severity(event) in ("fatal", "warning")


class UrgentRows:
    """The latest hard signals, as the board publishes them. `taken_ms`: when a signal was last published."""

    def __init__(self, board: BoardWriter) -> None:
        self._board = board
        self._rows: list[HardSignal] = []

    def __iter__(self) -> Iterator[HardSignal]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def publish(self, rows: Sequence[HardSignal], now_ms: int) -> None:
        """Publish rows with the time `now_ms`. A row that was published before moves to the end."""
        fresh = {row.identity: msgspec.structs.replace(row, taken_ms=now_ms) for row in rows}
        others = [row for row in self._rows if row.identity not in fresh]
        self._rows = [*others, *fresh.values()][-MAX_ROWS:]
        document = msgspec.json.encode(UrgentSignals(now_ms, self._rows))
        with log_disk_errors("publish a hard signal", "the next tick scores it"):
            self._board.publish_urgent([Section("doc.urgent", document, now_ms)], now_ms)


def _make_event_row(event: NodeEvent) -> HardSignal:
    what = f"XID {event.code}" if event.type == "xid" else event.check or event.type
    where = event.node if event.gpu is None else f"GPU {event.gpu} of {event.node}"
    where += f" ({event.device})" if event.device else ""
    code = str(event.code)
    known = find_advice(int(code)) if event.type == "xid" and code.isdecimal() else ""
    return HardSignal(
        node=event.node,
        gpu=event.gpu,
        type=event.type,
        code=event.code,
        time_ms=event.time_ms,
        sentence=f"{what} on {where}" + (f": {event.message[:MESSAGE_SHOWN]}" if event.message else ""),
        fatal=classify_severity(event) == "fatal",
        advice=event.advice[:MESSAGE_SHOWN] or known,
    )


def find_struck_nodes(board: Board) -> dict[str, list[HardSignal]]:
    """Return node → its rows of `doc.urgent` that are newer than the scores, oldest first.

    If a node has come back, its earlier rows are left out.
    """
    try:
        scored_ms, as_of_ms = board.meta("node.state")["as_of_ms"], board.meta("doc.urgent")["as_of_ms"]
    except KeyError:
        return {}
    if as_of_ms <= scored_ms:
        return {}
    found: dict[str, list[HardSignal]] = {}
    for row in decode_urgent(board.raw("doc.urgent")).rows:
        if (row.taken_ms or as_of_ms) < scored_ms:
            continue
        if row.type in BACK:
            found.pop(row.node, None)
        else:
            found.setdefault(row.node, []).append(row)
    return found


def forbids_placement(row: HardSignal) -> bool:
    """Return whether a hard signal forbids placements on its node.

    It does if the node is away or its hardware has failed.
    """
    return row.type in AWAY or row.fatal


def compute_node_state(state: str, rows: Sequence[HardSignal]) -> str:
    """Return the state of a node: the state in the scores, updated by the newer rows."""
    for row in reversed(rows):
        if row.type in AWAY:
            return AWAY[row.type]
    return "degraded" if state == "ok" and any(map(forbids_placement, rows)) else state
