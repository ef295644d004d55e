"""Signals from node events that administrators, health checkers and kernel logs report."""

import re
from collections.abc import Mapping

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeRecord
from fleetcast.fleet.xids import classify_severity
from fleetcast.models.risk.detectors import register_reporter
from fleetcast.models.risk.signals import Signal, Signals

FRESH_MS = 86_400_000
STANDS_MS = 7 * FRESH_MS  # health that nobody took back
REPEAT_MS = 7 * FRESH_MS
MESSAGE_SHOWN = 300
PORT = re.compile(r"[A-Za-z]\w*/\d+")


@register_reporter("recent_fault")
def make_event_signals(
    nodes: Mapping[str, NodeRecord], rows: Mapping[str, int], faults: Mapping[str, int], now_ms: int
) -> Signals:
    """Return the signals of node events, and of faults that ended recently.

    rows: node -> row. faults: node -> when our rules last saw a hard fault, in Unix ms.
    """
    found: list[Signal] = []
    for record in nodes.values():
        row = rows.get(record.node)
        if row is not None:
            found += _make_record_signals(record, row, now_ms)
    last = dict(faults)
    for record in nodes.values():
        times = [event.time_ms for event in record.events if _is_fault(event, record)]
        if times:
            last[record.node] = max(times[-1], last.get(record.node, 0))
    found += [
        Signal(
            "recent_fault", rows[node], node, (now_ms - at) / 1000, strength=1 - (now_ms - at) / REPEAT_MS, since_ms=at
        )
        for node, at in last.items()
        if node in rows and 0 <= now_ms - at < REPEAT_MS
    ]
    return Signals.from_signals(found)


@register_reporter("node_lost", "drain_requested")
def _make_record_signals(record: NodeRecord, row: int, now_ms: int) -> list[Signal]:
    found = []
    if record.lost:
        found.append(Signal("node_lost", row, record.node, 1.0, since_ms=_find_last_ms(record, "lost")))
    if record.drained:
        since_ms, said = _find_last_ms(record, "drain"), record.drain_message[:MESSAGE_SHOWN]
        found.append(Signal("drain_requested", row, record.node, 1.0, since_ms=since_ms, words=said))
    over = [event for event in record.standing.values() if event.severity == "ok"]
    for event in record.standing.values():
        if any(ok.withdraws(event) for ok in over):
            continue
        if now_ms - event.time_ms < (FRESH_MS if event.type == "xid" else STANDS_MS):
            signal = _make_xid_signal(event, row) if event.type == "xid" else _make_health_signal(event, row)
            if signal is not None:
                found.append(signal)
    return found


@register_reporter("xid_reported", "xid_noted")
def _make_xid_signal(event: NodeEvent, row: int) -> Signal | None:
    grave = classify_severity(event)
    if grave not in ("fatal", "warning"):
        return None
    rule = "xid_reported" if grave == "fatal" else "xid_noted"
    unplaced = event.device if event.gpu is None else ""  # which GPU that is, no exporter has told
    return Signal(rule, row, _name_entity(event), float(event.code or 0), since_ms=event.time_ms, words=unplaced)


@register_reporter("health_failed", "health_degraded", "link_predicted")
def _make_health_signal(event: NodeEvent, row: int) -> Signal | None:
    grave, since, said = classify_severity(event), event.time_ms, _describe_event(event)
    if grave not in ("fatal", "warning"):
        return None
    if event.probability is not None:
        p = event.probability
        return Signal("link_predicted", row, _name_entity(event), p, strength=p, since_ms=since, words=said)
    rule = "health_failed" if grave == "fatal" else "health_degraded"
    return Signal(rule, row, _name_entity(event), 1.0, since_ms=since, words=said)


def _name_entity(event: NodeEvent) -> str:
    """Return the name of the GPU or port that an event concerns, or else that of the node.

    A port has a name such as mlx5_0/1.
    """
    if event.gpu is not None:
        return f"{event.node}/{event.gpu}"
    return f"{event.node}/{event.device}" if PORT.fullmatch(event.device) else event.node


def _describe_event(event: NodeEvent) -> str:
    """Describe a health event in one line: its source, check, message and advice."""
    said = [text for text in (event.check, event.message[:MESSAGE_SHOWN]) if text]
    about = f"{event.source}: {': '.join(said)}" if said else event.source
    return f"{about}; advice: {event.advice[:MESSAGE_SHOWN]}" if event.advice else about


def was_drained_before(record: NodeRecord, time_ms: int) -> bool:
    """Return whether the node was drained at `time_ms`.

    The last drain or undrain event before that time decides.
    """
    drains = [event for event in record.events if event.type in ("drain", "undrain")]
    before = [event for event in drains if event.time_ms < time_ms]
    return before[-1].type == "drain" if before else record.drained and not drains and time_ms > 0


def _is_fault(event: NodeEvent, record: NodeRecord) -> bool:
    """Return whether an event is a fault.

    XIDs and health events are faults if they are fatal. A loss is a fault unless an administrator had drained
    the node.
    """
    if event.type == "lost":
        return not was_drained_before(record, event.time_ms)
    return event.type in ("xid", "health") and classify_severity(event) == "fatal"


def _find_last_ms(record: NodeRecord, type: str) -> int:
    return max((event.time_ms for event in record.events if event.type == type), default=0)
