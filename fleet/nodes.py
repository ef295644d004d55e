"""The state of nodes, made from node events. Neither their order nor repeated events change the result."""

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.sequences import SeenSequences

MAX_NODE_EVENTS = 64
MAX_CONDITIONS = 128  # conditions of one node
MAX_SOURCES_PER_NODE = 64
MAX_RUNS = 2048  # of the sequences of one node and source

FAILURE_EXPECTED = "GpuFailureExpected"  # our condition on Kubernetes nodes, which is no news to us

Order = tuple[int, str, int]


class NodeState(IntEnum):
    """The state of a node according to events. The numbers are those of the board's section `node.state`."""

    IN_SERVICE = 0
    DRAINED = 1
    LOST = 2
    MAINTENANCE = 3
    RESERVED = 4
    WITHHELD = 5  # for any other reason: powered down, not responding, to be deleted


OF_CHECK = {  # why a scheduler withholds a node -> its state
    "maintenance": NodeState.MAINTENANCE,
    "reboot": NodeState.MAINTENANCE,
    "reserved": NodeState.RESERVED,
    "planned": NodeState.RESERVED,
}
MOST_WITHHELD = 16  # reasons of one node and source


@dataclass(slots=True)
class NodeRecord:
    """The folded events of one node. A later drain or undrain (by time, then sequence) wins.

    withheld: "source|check" -> message, for schedulers that withhold the node from other work.
    """

    node: str
    drained: bool = False
    drain_message: str = ""
    lost: bool = False
    events: list[NodeEvent] = field(default_factory=list)
    written: dict[str, Order] = field(default_factory=dict)
    standing: dict[str, NodeEvent] = field(default_factory=dict)  # condition -> latest XID or health event
    withheld: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> NodeState:
        """The node's state by its events. Lost wins over drained, and both over withheld."""
        if self.lost or self.drained:
            return NodeState.LOST if self.lost else NodeState.DRAINED
        states = {OF_CHECK.get(key.rpartition("|")[2], NodeState.WITHHELD) for key in self.withheld}
        return min(states, default=NodeState.IN_SERVICE)

    @property
    def withheld_reason(self) -> str:
        """The reasons why schedulers withhold the node from other work, in one line. "" if none does."""
        return "; ".join(dict.fromkeys(said or key.rpartition("|")[2] for key, said in sorted(self.withheld.items())))

    def copy(self) -> "NodeRecord":
        """Return a copy that a thread may read while more events arrive."""
        events, standing = list(self.events), dict(self.standing)
        return NodeRecord(
            self.node, self.drained, self.drain_message, self.lost, events, {}, standing, dict(self.withheld)
        )


class NodeTable:
    """The records of all nodes with events."""

    def __init__(self) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self._seen: dict[tuple[str, str], SeenSequences] = {}
        self._sources: Counter[str] = Counter()  # by node
        self.position = 0

    def has_room(self, event: NodeEvent) -> bool:
        """Return whether the node already has a record of the event's source, or has room for another source."""
        return (event.node, event.source) in self._seen or self._sources[event.node] < MAX_SOURCES_PER_NODE

    def apply(self, event: NodeEvent) -> NodeRecord | None:
        """Fold one event and return the node's record, or None if it is a duplicate."""
        seen = self._seen.get((event.node, event.source))
        if seen is None:
            seen = self._seen[event.node, event.source] = SeenSequences()
            self._sources[event.node] += 1
        if not seen.add(event.sequence):
            return None
        seen.close_gaps(MAX_RUNS)
        record = self.nodes.setdefault(event.node, NodeRecord(event.node))
        if not record.events or event.time_ms > record.events[-1].time_ms:
            record.events.append(event)
        else:
            insort(record.events, event, key=_make_node_order)
        del record.events[:-MAX_NODE_EVENTS]
        if event.type in ("xid", "health"):
            _record_condition(record, event)
        elif event.type in ("withhold", "release"):
            _record_withholding(record, event)
        else:
            _record_service_state(record, event)
        self.position += 1
        return record

    def dump(self) -> list[tuple[NodeRecord, dict[str, SeenSequences]]]:
        """Return each record with the sequences received from each source, as a snapshot stores them."""
        sources: dict[str, dict[str, SeenSequences]] = {}
        for (node, source), seen in self._seen.items():
            sources.setdefault(node, {})[source] = seen
        return [(record, sources[node]) for node, record in self.nodes.items()]

    def load(self, rows: list[tuple[NodeRecord, dict[str, SeenSequences]]]) -> None:
        """Restore the result of `dump` into an empty table."""
        for record, sources in rows:
            self.nodes[record.node] = record
            self._seen |= {(record.node, source): seen for source, seen in sources.items()}
            self._sources[record.node] = len(sources)
            if not record.standing:  # of a snapshot that did not keep them
                for event in record.events:
                    if event.type in ("xid", "health"):
                        _record_condition(record, event)


def _record_service_state(record: NodeRecord, event: NodeEvent) -> None:
    """Record a drain, a loss, or the end of one, unless a later event is known."""
    group = "drain" if event.type in ("drain", "undrain") else "lost"
    if _make_node_order(event) < record.written.get(group, (-1, "", -1)):
        return
    record.written[group] = _make_node_order(event)
    if group == "drain":
        record.drained = event.type == "drain"
        record.drain_message = event.message if record.drained else ""
    else:
        record.lost = event.type == "lost"


def _record_withholding(record: NodeRecord, event: NodeEvent) -> None:
    """Fold an event that withholds the node for a reason, or that ends such a reason.

    A release without a check ends all reasons of its source.
    """
    of_source, order = f"{event.source}|", _make_node_order(event)
    key, everything = of_source + event.check, record.written.get(f"released {of_source}", (-1, "", -1))
    if event.type == "release" and not event.check:
        if order > everything:
            record.written[f"released {of_source}"] = order
            for name in [name for name in record.written if name.startswith(f"withheld {of_source}")]:
                if record.written[name] < order:
                    del record.written[name]
                    record.withheld.pop(name.removeprefix("withheld "), None)
        return
    before = record.written.get(f"withheld {key}")
    if before is None and sum(name.startswith(f"withheld {of_source}") for name in record.written) >= MOST_WITHHELD:
        return
    if order < max(everything, before or everything):
        return
    record.written[f"withheld {key}"] = order
    if event.type == "withhold":
        record.withheld[key] = event.message
    else:
        record.withheld.pop(key, None)


def _record_condition(record: NodeRecord, event: NodeEvent) -> None:
    key = event.condition
    known = record.standing.get(key)
    if known is not None and _make_node_order(event) < _make_node_order(known):
        return
    record.standing[key] = event
    if len(record.standing) > MAX_CONDITIONS:
        oldest = min(record.standing, key=lambda name: _make_node_order(record.standing[name]))
        del record.standing[oldest]


def _make_node_order(event: NodeEvent) -> Order:
    return event.time_ms, event.source, event.sequence
