"""Reports of repairs, as an operator's tools send them: a drain at the beginning, a return at the end.

Only visible faults that end by a repair are reported. The start of a fault is never reported, because
telemetry has to find it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fleetcast.fleet.events import NodeEvent
from fleetcast.simulator.faults.effects import ResetShape
from fleetcast.simulator.faults.faults import FaultPlan, Incident

Report = Literal["drain", "undrain", "returned"]

SOURCE = "operator"
WORK_MS = 300_000  # a repair takes at most so long; it begins no sooner than the fault was seen


@dataclass(slots=True)
class RepairReporter:
    """A reporter of repairs. The caller asks for due events after every advance of the fleet.

    names: the nodes, by row.
    """

    plan: FaultPlan
    names: Sequence[str]
    _under_way: dict[str, Incident] = field(default_factory=dict)
    _sequences: dict[str, int] = field(default_factory=dict)

    def make_due_events(self, now_ms: int) -> list[NodeEvent]:
        """Return the drains and returns that are due since the last call."""
        active = {row.fault_id: row for row in self.plan.list_incidents() if _is_repaired(row)}
        over = [row for name, row in self._under_way.items() if name not in active]
        self._under_way = {name: row for name, row in self._under_way.items() if name in active}
        held = {row.node for row in self._under_way.values()}
        events = [event for row in over if row.node not in held for event in self._make_return_events(row, now_ms)]
        for name, row in active.items():
            if name not in self._under_way and row.visible_ms is not None and now_ms >= row.end_ms - WORK_MS:
                self._under_way[name] = row
                events.append(self._make_event(row, "drain", now_ms, f"repair: {row.kind}"))
        return events

    def _make_return_events(self, row: Incident, now_ms: int) -> Iterable[NodeEvent]:
        if row.kind == "node_lost":
            yield self._make_event(row, "returned", now_ms, "rebooted")
        yield self._make_event(row, "undrain", now_ms, f"repaired: {row.kind}")

    def _make_event(self, row: Incident, type: Report, now_ms: int, message: str) -> NodeEvent:
        node = self.names[row.node]
        sequence = self._sequences[node] = self._sequences.get(node, -1) + 1
        return NodeEvent(node=node, source=SOURCE, sequence=sequence, time_ms=now_ms, type=type, message=message)


def _is_repaired(row: Incident) -> bool:
    return isinstance(row.shape, ResetShape)
