"""What node events (administrators, health checkers, kernel logs) say, as signals."""

from collections.abc import Mapping

from fleet.events import NodeEvent
from fleet.nodes import NodeRecord
from fleet.xids import HARD
from models.signals import Signal, Signals

FRESH_MS = 86_400_000
REPEAT_MS = 7 * FRESH_MS
FAULT_EVENTS = frozenset({"lost", "xid", "drain"})


def event_signals(
    nodes: Mapping[str, NodeRecord], rows: Mapping[str, int], faults: Mapping[str, int], now_ms: int
) -> Signals:
    """Signals of node events, and of faults that ended lately. faults: node -> when our rules last saw a hard one."""
    found: list[Signal] = []
    for record in nodes.values():
        row = rows.get(record.node)
        if row is not None:
            found += _of_record(record, row, now_ms)
    last = dict(faults)
    for record in nodes.values():
        times = [event.time_ms for event in record.events if event.type in FAULT_EVENTS and _is_fault(event)]
        if times:
            last[record.node] = max(times[-1], last.get(record.node, 0))
    found += [
        Signal(
            "recent_fault", rows[node], node, (now_ms - at) / 1000, strength=1 - (now_ms - at) / REPEAT_MS, since_ms=at
        )
        for node, at in last.items()
        if node in rows and 0 <= now_ms - at < REPEAT_MS
    ]
    return Signals.of(found)


def _of_record(record: NodeRecord, row: int, now_ms: int) -> list[Signal]:
    found = []
    if record.lost:
        found.append(Signal("node_lost", row, record.node, 1.0, since_ms=_last(record, "lost")))
    if record.drained:
        found.append(Signal("drain_requested", row, record.node, 1.0, since_ms=_last(record, "drain")))
    for event in record.events:
        if event.type == "xid" and _is_fault(event) and 0 <= now_ms - event.time_ms < FRESH_MS:
            entity = record.node if event.gpu is None else f"{record.node}/{event.gpu}"
            found.append(Signal("xid_reported", row, entity, float(event.code or 0), since_ms=event.time_ms))
    return found


def _is_fault(event: NodeEvent) -> bool:
    """A loss is; an XID is when it speaks of the hardware; a drain is an administrator's choice."""
    if event.type == "xid":
        return str(event.code).isdecimal() and int(str(event.code)) in HARD
    return event.type == "lost"


def _last(record: NodeRecord, type: str) -> int:
    return max((event.time_ms for event in record.events if event.type == type), default=0)
