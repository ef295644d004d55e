"""A converter of Kubernetes nodes into their specs, and into a node event for each change.

    cordoned, uncordoned                                     drain, undrain
    Ready False or Unknown, deleted; Ready again             lost, returned
    a condition of a health checker, a provider's label      health
    closed to new pods by a taint, deletion or maintenance   withhold, release

The event of a condition is numbered by the second of its transition. Any other event is numbered by the
object's version. So a repeated event has the same number and counts once.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.gpu_resources import is_unsupported_gpu_resource
from fleetcast.fleet.nodes import FAILURE_EXPECTED
from fleetcast.fleet.topology import NodeSpec
from fleetcast.ingest.kubernetes.asked_gpus import NodeGpus
from fleetcast.ingest.kubernetes.machines import PodPlace
from fleetcast.ingest.kubernetes.objects import Condition, Node, convert_to_ms, find_condition
from fleetcast.ingest.kubernetes.withheld import HARD, find_withheld_reasons
from fleetcast.ingest.topology.kubernetes_nodes import make_node_from_labels
from fleetcast.ingest.topology.physical_gpus import count_shares

Severity = Literal["ok", "warning", "fatal"]

READY = "Ready"
OWN = frozenset(  # the kubelet's, and ours: a forecast must not feed itself
    {"MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable", READY, FAILURE_EXPECTED}
)
MAX_GONE = 5_000
JOINING_MS = 600_000  # a new node may take so long to be ready for the first time
LABELS: dict[str, dict[str, Severity]] = {
    "sagemaker.amazonaws.com/node-health-status": {
        "Schedulable": "ok",
        "Unschedulable": "fatal",
        "UnschedulablePendingReplacement": "fatal",
        "UnschedulablePendingReboot": "fatal",
    },
    "gke.google.com/recommended-to-run-large-training-workload": {"true": "ok", "false": "warning"},
}
HOSTNAME = "kubernetes.io/hostname"
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
KINDS = ("drain", "undrain", "lost", "returned")
SLOTS = 64  # sequences a second, or a version
MESSAGE_LENGTH = 1_000


class KnownNode(msgspec.Struct, omit_defaults=True):
    """The facts already delivered about a node.

    deleted: it is gone from the cluster. bad: check → severity. spec: its hardware, or None.
    """

    cordoned: bool = False
    lost: bool = False
    deleted: bool = False
    was_ready: bool = False
    bad: dict[str, Severity] = {}
    spec: NodeSpec | None = None
    shares: int = 1  # jobs that may share one of its GPUs
    withheld: dict[str, str] = {}  # why → what Kubernetes says


class NodeConverter:
    """A converter of node objects into specs and events.

    `fatal`: patterns of conditions that require a drain. Other health conditions are warnings. `taints`: pattern of
    the site's taints → the reason why they withhold a node, empty if they do not. `places`: uid of a pod → the
    machine that it represents.
    """

    def __init__(
        self,
        states: dict[str, KnownNode],
        source: str,
        fatal: Sequence[str],
        taints: Mapping[str, str],
        places: dict[str, PodPlace],
    ) -> None:
        self.states = states
        self._source = source
        self._fatal = fatal
        self._taints = taints
        self.places = places
        self._specs: dict[str, NodeSpec] | None = None  # until a node changes
        self._least: NodeGpus | None = None  # likewise
        self.faults: list[RecordError] = []  # of nodes whose labels cannot be read; the source takes them away
        self.unread: Counter[str] = Counter()  # resources that look like GPUs and that nothing reads; likewise

    def list_lost_nodes(self) -> set[str]:
        return {name for name, state in self.states.items() if state.lost}

    def get_specs(self) -> Mapping[str, NodeSpec]:
        """Return node → spec, for the nodes of the cluster.

        The result is the same object until a node changes.
        """
        if self._specs is None:
            names: dict[str, list[str]] = {}
            lent: Counter[str] = Counter()
            for place in self.places.values():
                names.setdefault(place.node, []).extend(place.names)
                lent[place.node] += place.gpus
            self._specs = {
                name: self._complete_spec(_add_names(state.spec, names.get(name, ())), lent[name] // state.shares)
                for name, state in self.states.items()
                if state.spec is not None
            }
        return self._specs

    def _complete_spec(self, spec: NodeSpec, lent: int) -> NodeSpec:
        return replace(spec, lent_gpus=min(lent, spec.gpus), source=self._source)

    def record_place(self, uid: str, place: PodPlace | None) -> None:
        """Record which machine a pod represents. None: the pod is gone, or represents no machine."""
        if self.places.get(uid) != place:
            self.places.pop(uid, None) if place is None else self.places.update({uid: place})
            self._specs = None

    def get_node_gpus(self, node: str) -> NodeGpus:
        """Return how a node divides its GPUs.

        For an unknown node, the result has the smallest shares and memory of all nodes with GPUs.
        """
        state = self.states.get(node)
        if state is not None and state.spec is not None:
            return NodeGpus(state.shares, state.spec.gpu_memory_gib)
        if self._least is None:
            rows = [row for row in self.states.values() if row.spec is not None and row.spec.gpus]
            memory = min((row.spec.gpu_memory_gib for row in rows if row.spec and row.spec.gpu_memory_gib), default=0.0)
            self._least = NodeGpus(min((row.shares for row in rows), default=1), memory)
        return self._least

    def update_node(self, node: Node, now_ms: int) -> list[NodeEvent]:
        state = self.states.setdefault(node.metadata.name, KnownNode())
        self._update_spec(node, state)
        return [
            *self._make_cordon_events(node, state, now_ms),
            *self._make_ready_events(node, state, now_ms),
            *self._make_withheld_events(node, state, now_ms),
            *self._make_health_events(node, state, now_ms),
        ]

    def _update_spec(self, node: Node, state: KnownNode) -> None:
        """Update the spec of a node from its labels and capacity.

        If these cannot be read, adds an error to `faults` and does not change the spec.
        """
        name, labels = node.metadata.name, node.metadata.labels or {}
        capacity = {key: str(value) for key, value in (node.status.capacity or {}).items()}
        self.unread.update(key for key, text in capacity.items() if text != "0" and is_unsupported_gpu_resource(key))
        try:
            spec = make_node_from_labels(name, labels, capacity, node.metadata.annotations)
            spec = _add_names(spec, [*_list_node_addresses(node), labels.get(HOSTNAME, "")])
            shares = count_shares(name, labels)
        except ConfigError as error:
            self.faults.append(RecordError("kubernetes_object", str(error)))
            return
        if (spec, shares) != (state.spec, state.shares):
            state.spec, state.shares = spec, shares
            self._specs = self._least = None

    def drop_node(self, name: str, version: str, now_ms: int) -> list[NodeEvent]:
        """Return a `lost` event for a deleted node, unless it was lost before.

        `version`: the object's version when it was deleted.
        """
        state, self._specs, self._least = self.states.pop(name, None), None, None
        if state is None:
            return []
        gone = KnownNode(cordoned=state.cordoned, lost=True, deleted=True, was_ready=True, bad=state.bad)
        gone.withheld = state.withheld
        self.states[name] = gone
        self._drop_deleted_nodes()
        if state.lost:
            return []
        return [self._make_event(name, "lost", (_parse_version(version, now_ms), now_ms), "deleted from the cluster")]

    def _drop_deleted_nodes(self) -> None:
        """Forget the oldest deleted nodes beyond MAX_GONE.

        The others stay known, in case they return.
        """
        names = [name for name, state in self.states.items() if state.deleted]
        for name in names[: max(0, len(names) - MAX_GONE)]:
            del self.states[name]

    def _make_event(self, node: str, kind: str, number_and_time: tuple[int, int], message: str) -> NodeEvent:
        number, at_ms = number_and_time
        sequence = number * SLOTS + KINDS.index(kind)
        text = message[:MESSAGE_LENGTH]
        return NodeEvent(node=node, source=self._source, sequence=sequence, time_ms=at_ms, type=kind, message=text)  # type: ignore[arg-type]

    def _make_cordon_events(self, node: Node, state: KnownNode, now_ms: int) -> Iterator[NodeEvent]:
        taints = [taint for taint in node.spec.taints or () if taint.effect in HARD]
        cordoned = bool(node.spec.unschedulable) or any(taint.key == UNSCHEDULABLE for taint in taints)
        if cordoned == state.cordoned:
            return
        state.cordoned = cordoned
        since = next(
            (convert_to_ms(taint.time_added) for taint in taints if taint.key.endswith("/unschedulable")), None
        )
        others = ", ".join(taint.key for taint in taints if not taint.key.startswith("node.kubernetes.io/"))
        number = _parse_version(node.metadata.resource_version, now_ms)
        if cordoned:
            at_ms = min(since or now_ms, now_ms)
            yield self._make_event(
                node.metadata.name, "drain", (number, at_ms), "cordoned" + (f"; {others}" if others else "")
            )
        else:
            yield self._make_event(node.metadata.name, "undrain", (number, now_ms), "uncordoned")

    def _make_ready_events(self, node: Node, state: KnownNode, now_ms: int) -> Iterator[NodeEvent]:
        ready = find_condition(node.status.conditions, READY)
        if ready is None:
            return
        young = (convert_to_ms(node.metadata.creation_timestamp) or 0) > now_ms - JOINING_MS
        if not ready.is_true and young and not state.was_ready:
            return
        state.was_ready |= ready.is_true
        if state.lost is not ready.is_true:
            return
        state.lost = not ready.is_true
        kind = "lost" if state.lost else "returned"
        number = _parse_version(node.metadata.resource_version, now_ms), now_ms
        since = (
            number if state.deleted else _find_transition(ready, node, now_ms)
        )  # it may be as ready as before its deletion
        state.deleted = False
        yield self._make_event(node.metadata.name, kind, since, ready.text or kind)

    def _make_withheld_events(self, node: Node, state: KnownNode, now_ms: int) -> Iterator[NodeEvent]:
        """Yield an event for each reason to withhold the node, if the reason has begun, changed or ended.

        These events have a source name of their own. A lost node is not also withheld as not responding.
        """
        before, now = state.withheld, find_withheld_reasons(node, self._taints)
        if state.lost:
            now.pop("not_responding", None)
        state.withheld = now
        number = _parse_version(node.metadata.resource_version, now_ms) * SLOTS
        for check in sorted(before.keys() | now.keys()):
            if before.get(check) == now.get(check):
                continue
            yield NodeEvent(
                node=node.metadata.name,
                source=f"{self._source}/withheld",
                sequence=number + 2 * (zlib.crc32(check.encode()) % (SLOTS // 2)) + (check not in now),
                time_ms=now_ms,
                type="withhold" if check in now else "release",
                message=now.get(check, "")[:MESSAGE_LENGTH],
                check=check,
            )

    def _make_health_events(self, node: Node, state: KnownNode, now_ms: int) -> Iterator[NodeEvent]:
        rows = [row for row in node.status.conditions or () if row.type not in OWN and row.status in ("True", "False")]
        found = {row.type: (self._choose_severity(row), row.text, _find_transition(row, node, now_ms)) for row in rows}
        for label, meanings in LABELS.items():
            severity = meanings.get(node.metadata.get_label(label))
            if severity is not None:
                since = _parse_version(node.metadata.resource_version, now_ms), now_ms
                found[label] = severity, f"{label} is {node.metadata.get_label(label)}", since
        for check in state.bad.keys() - found.keys():
            found[check] = (
                "ok",
                "no longer reported",
                (_parse_version(node.metadata.resource_version, now_ms), now_ms),
            )
        for check, (severity, message, (number, at_ms)) in sorted(found.items()):
            if state.bad.get(check, "ok") == severity:
                continue
            state.bad.pop(check, None) if severity == "ok" else state.bad.update({check: severity})
            yield NodeEvent(
                node=node.metadata.name,
                source=self._source,
                sequence=number * SLOTS + _compute_slot(check, severity),
                time_ms=at_ms,
                type="health",
                message=message[:MESSAGE_LENGTH],
                check=check,
                severity=severity,
            )

    def _choose_severity(self, row: Condition) -> Severity:
        """Return the severity of a condition.

        A true condition is a problem, unless its type ends in "Ready".
        """
        if row.is_true == row.type.endswith(READY):
            return "ok"
        return "fatal" if any(fnmatchcase(row.type, pattern) for pattern in self._fatal) else "warning"


def _add_names(spec: NodeSpec, names: Iterable[str]) -> NodeSpec:
    """Return the spec with `names` added to the other names of the machine."""
    others = dict.fromkeys((*spec.other_names, *(name for name in names if name and name != spec.name)))
    return replace(spec, other_names=tuple(others)) if len(others) > len(spec.other_names) else spec


def _list_node_addresses(node: Node) -> Iterator[str]:
    for row in node.status.addresses or ():
        if row.type in ("Hostname", "InternalIP", "InternalDNS"):
            yield row.address


def _find_transition(row: Condition, node: Node, now_ms: int) -> tuple[int, int]:
    """Return the number and the time, in Unix ms, of a condition's last transition.

    If the condition states no time, returns the number of the object's version, and the present time.
    """
    at_ms = convert_to_ms(row.last_transition_time)
    if at_ms is None:
        return _parse_version(node.metadata.resource_version, now_ms), now_ms
    return at_ms // 1000, min(at_ms, now_ms)


def _parse_version(version: str, now_ms: int) -> int:
    return int(version) if version.isdecimal() and version.isascii() and len(version) < 15 else now_ms


def _compute_slot(check: str, severity: Severity) -> int:
    """Return the offset that a check and its severity add to a sequence number. It is below SLOTS.

    The lowest offsets are reserved for `KINDS`.
    """
    place = zlib.crc32(check.encode()) % 20
    return len(KINDS) + place * 3 + ("ok", "warning", "fatal").index(severity)
