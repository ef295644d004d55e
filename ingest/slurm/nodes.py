"""A Slurm node, and the events of what changed: drain, undrain, lost, returned.

A drain is dated by the time of its reason, so repeats have one identity. Slurm does not date its end: now.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fleet.events import NodeEvent
from fleet.requests import WHOLE_GPU
from ingest.inbox.job_events import FUTURE_LIMIT_MS
from ingest.slurm.fields import label
from ingest.slurm.gres import NO_GRES, Gres

Condition = Literal["drain", "lost"]
Conditions = dict[str, int]  # condition -> when it began, Unix ms

_DRAIN = ("DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "INVALID_REG", "INVAL", "POWERED_DOWN", "POWERING_DOWN")
_LOST = ("DOWN", "ERROR")
_UNKNOWN = ("UNKNOWN", "FUTURE")
_OVER: dict[str, Literal["undrain", "returned"]] = {"drain": "undrain", "lost": "returned"}
_NUMBER = {"drain": 0, "lost": 1, "undrain": 2, "returned": 3}
MESSAGE_LENGTH = 1000


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """states: the base state, then flags, in capitals. reason_ms: when the reason was set; None: unknown. gres: what it
    has."""

    name: str
    states: tuple[str, ...]
    reason: str = ""
    reason_ms: int | None = None
    gres: Gres = NO_GRES

    @property
    def gpus(self) -> int:
        """Physical GPUs as far as Slurm knows: MIG instances count by their slices."""
        return max(round(self.gres.milli / WHOLE_GPU), min(1, self.gres.gpus))

    @property
    def known(self) -> bool:
        """slurmctld has heard of it since it started."""
        return bool(self.states) and self.states[0] not in _UNKNOWN

    def conditions(self) -> list[Condition]:
        """
        >>> SlurmNode("n1", ("IDLE", "DRAIN")).conditions(), SlurmNode("n1", ("MIXED",)).conditions()
        (['drain'], [])
        """
        found: list[Condition] = []
        if any(state in _DRAIN for state in self.states):
            found.append("drain")
        if any(state in _LOST for state in self.states):
            found.append("lost")
        return found


def numbered_gpus(nodes: Iterable[SlurmNode]) -> dict[str, int]:
    """Return node → GPUs that the numbers of its jobs name; 0 where they count MIG instances."""
    return {node.name: 0 if node.gres.has_mig else node.gres.gpus for node in nodes if node.gres.gpus}


def shares_of_gpu(nodes: Iterable[SlurmNode]) -> dict[str, int]:
    """Return unit → parts of one GPU, as most nodes divide theirs."""
    found: dict[str, Counter[int]] = {}
    for node in nodes:
        if node.gres.shares and node.gres.gpus:
            found.setdefault(node.gres.unit, Counter())[max(1, node.gres.shares // node.gres.gpus)] += 1
    return {unit: sizes.most_common(1)[0][0] for unit, sizes in found.items()}


def changes(node: SlurmNode, before: Conditions, source: str, now_ms: int) -> tuple[list[NodeEvent], Conditions]:
    """The events that lead from `before` to the node's present conditions, and these."""
    if not node.known:
        return [], before
    now: Conditions = {}
    events = []
    for condition in node.conditions():
        told = node.reason_ms if node.reason_ms is not None and node.reason_ms <= now_ms + FUTURE_LIMIT_MS else None
        since_ms = told or before.get(condition) or now_ms
        now[condition] = since_ms
        if before.get(condition) != since_ms:
            message = label(node.reason)[:MESSAGE_LENGTH] or f"Slurm: {'+'.join(node.states).lower()}"
            events.append(_event(node.name, source, since_ms, condition, message))
    events += [_event(node.name, source, now_ms, _OVER[kind]) for kind in before if kind not in now]
    return events, now


def _event(
    node: str,
    source: str,
    time_ms: int,
    kind: Literal["drain", "lost", "undrain", "returned"],
    message: str = "",
) -> NodeEvent:
    sequence = time_ms * 4 + _NUMBER[kind]
    return NodeEvent(node=node, source=source, sequence=sequence, time_ms=time_ms, type=kind, message=message)
