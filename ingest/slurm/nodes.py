"""A Slurm node, and the events of its changes: drain, undrain, lost, returned, withhold, release.

A drain has the time of its reason, so a repeated record gives the same event. Other changes get the present
time, because Slurm states no time for them. These are the end of a drain, and maintenance, reservations, plans
and power saving, which withhold a healthy node.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.node_names import is_node_name
from fleetcast.fleet.requests import WHOLE_GPU
from fleetcast.fleet.topology import Level, NodeSpec
from fleetcast.ingest.inbox.job_events import FUTURE_LIMIT_MS
from fleetcast.ingest.slurm.fields import clean_name, parse_model_name
from fleetcast.ingest.slurm.gres import MAX_GPUS, NO_GRES, Gres, strip_mig_profile

Conditions = dict[str, int]  # condition -> when it began, Unix ms

_UNKNOWN = ("UNKNOWN", "FUTURE")
_OF_STATE = {  # state or flag -> condition; drain and lost are faults, the others only keep the node from other work
    **dict.fromkeys(("DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "INVALID_REG", "INVAL"), "drain"),
    **dict.fromkeys(("DOWN", "ERROR"), "lost"),
    **dict.fromkeys(("MAINT", "MAINTENANCE"), "maintenance"),
    **dict.fromkeys(("RESERVED", "RESV"), "reserved"),
    **dict.fromkeys(("PLANNED", "PLND"), "planned"),
    **dict.fromkeys(("REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED"), "reboot"),
    **dict.fromkeys(("POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "POWER_DRAIN"), "powered_down"),
    **dict.fromkeys(("POWERING_UP", "POWER_UP"), "powering_up"),
    **dict.fromkeys(("NOT_RESPONDING", "NO_RESPOND"), "not_responding"),
    "BLOCKED": "blocked",
}
Kind = Literal["drain", "undrain", "lost", "returned", "withhold", "release"]
_FAULTS: dict[str, tuple[Kind, Kind]] = {"drain": ("drain", "undrain"), "lost": ("lost", "returned")}
_NUMBER = {
    **{"drain": 0, "lost": 1, "undrain": 2, "returned": 3, "maintenance": 4, "reserved": 6, "planned": 8},
    **{"reboot": 10, "powered_down": 12, "powering_up": 14, "not_responding": 16, "blocked": 18},
}
NUMBERS = 32  # of events of one node in one millisecond; the end of a condition that withholds has the next number
MESSAGE_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node as Slurm reports it.

    states: the base state, then flags, in capitals. reason_ms: when the reason was set, None if unknown.
    gres: the generic resources that the node has. other_names: its host name and the address that Slurm
    uses.
    """

    name: str
    states: tuple[str, ...]
    reason: str = ""
    reason_ms: int | None = None
    gres: Gres = NO_GRES
    reservation: str = ""
    other_names: tuple[str, ...] = ()
    cpus: int = 0
    memory_gib: float = 0.0

    @property
    def gpus(self) -> int:
        """The number of physical GPUs that Slurm knows. MIG instances count by their slices."""
        return max(round(self.gres.milli / WHOLE_GPU), min(1, self.gres.gpus))

    @property
    def has_reported(self) -> bool:
        """Return whether the node has reported to slurmctld since slurmctld started."""
        return bool(self.states) and self.states[0] not in _UNKNOWN

    def make_spec(self) -> NodeSpec:
        """Return the hardware of the node. Slurm knows no NVLink domain beyond the node itself."""
        kind = strip_mig_profile(self.gres.kind)
        others = (name for name in self.other_names if name != self.name and is_node_name(name))
        return NodeSpec(
            name=self.name,
            gpus=min(self.gpus, MAX_GPUS),
            gpu_model=parse_model_name(kind) if kind else "",
            cpus=self.cpus,
            host_memory_gib=self.memory_gib,
            domains={Level.NVLINK_DOMAIN: self.name},
            counts_resources=self.gres.has_mig,
            other_names=tuple(dict.fromkeys(others)),
        )

    def list_conditions(self) -> list[str]:
        """Return the conditions that apply to the node, in a fixed order.

        >>> SlurmNode("n1", ("IDLE", "DRAIN")).list_conditions(), SlurmNode("n1", ("MIXED",)).list_conditions()
        (['drain'], [])
        """
        found = dict.fromkeys(_OF_STATE[state] for state in self.states if state in _OF_STATE)
        if "lost" in found:
            found.pop("not_responding", None)
        return sorted(found, key=_NUMBER.__getitem__)


def make_node_specs(nodes: Iterable[SlurmNode]) -> dict[str, NodeSpec]:
    """Return node → spec, for nodes with GPUs that are not in state FUTURE."""
    return {node.name: node.make_spec() for node in nodes if node.gres.gpus and node.states[:1] != ("FUTURE",)}


def count_numbered_gpus(nodes: Iterable[SlurmNode]) -> dict[str, int]:
    """Return node → how many GPUs a job record can refer to by number.

    It is 0 for a node whose job records number MIG instances instead of GPUs.
    """
    return {node.name: 0 if node.gres.has_mig else node.gres.gpus for node in nodes if node.gres.gpus}


def find_shares_per_gpu(nodes: Iterable[SlurmNode]) -> dict[str, int]:
    """Return unit (shard or mps) → the number of parts into which most nodes divide one GPU."""
    found: dict[str, Counter[int]] = {}
    for node in nodes:
        if node.gres.shares and node.gres.gpus:
            found.setdefault(node.gres.unit, Counter())[max(1, node.gres.shares // node.gres.gpus)] += 1
    return {unit: sizes.most_common(1)[0][0] for unit, sizes in found.items()}


def find_changes(node: SlurmNode, before: Conditions, source: str, now_ms: int) -> tuple[list[NodeEvent], Conditions]:
    """Return the events from `before` to the node's current conditions, and these conditions.

    If the node has not reported since slurmctld started, its conditions stay unchanged. If such a node is in state
    UNKNOWN and has no conditions, it counts as not responding.
    """
    if not node.has_reported:
        if before or node.states[:1] != ("UNKNOWN",):
            return [], before
        return [_make_begin_event(node, source, now_ms, "not_responding")], {"not_responding": now_ms}
    now: Conditions = {}
    events = []
    for condition in node.list_conditions():
        is_dated = condition in _FAULTS and node.reason_ms is not None
        stated_ms = node.reason_ms if is_dated and (node.reason_ms or 0) <= now_ms + FUTURE_LIMIT_MS else None
        since_ms = stated_ms or before.get(condition) or now_ms
        now[condition] = since_ms
        if before.get(condition) != since_ms:
            events.append(_make_begin_event(node, source, since_ms, condition))
    events += [_make_end_event(node.name, source, now_ms, condition) for condition in before if condition not in now]
    return events, now


def _make_begin_event(node: SlurmNode, source: str, time_ms: int, condition: str) -> NodeEvent:
    """Return the event for the beginning of a condition."""
    states, said = "+".join(node.states).lower(), clean_name(node.reason)
    if condition in _FAULTS:
        return _make_event(node.name, source, time_ms, _FAULTS[condition][0], said or f"Slurm: {states}")
    reservation = f"reservation {clean_name(node.reservation)}" if clean_name(node.reservation) else ""
    message = ": ".join(filter(None, (f"Slurm: {states}", reservation, said)))
    return _make_event(node.name, source, time_ms, "withhold", message, condition)


def _make_end_event(node: str, source: str, time_ms: int, condition: str) -> NodeEvent:
    """Return the event for the end of a condition."""
    if condition in _FAULTS:
        return _make_event(node, source, time_ms, _FAULTS[condition][1])
    return _make_event(node, source, time_ms, "release", check=condition)


def _make_event(node: str, source: str, time_ms: int, kind: Kind, message: str = "", check: str = "") -> NodeEvent:
    number = _NUMBER[check or kind] + (kind == "release")
    return NodeEvent(
        node=node,
        source=source,
        sequence=time_ms * NUMBERS + number,
        time_ms=time_ms,
        type=kind,
        message=message[:MESSAGE_LENGTH],
        check=check,
    )
