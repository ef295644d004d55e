"""The laws of gangs that leave nodes, for the simulation of actions.

size         a gang shrinks by whole steps, and never below its least size; a replaced one keeps its size
leaves       a gang that runs without its lost nodes leaves all of them, and only nodes that it holds
domain       a replaced gang stays in the domain that it requires
borrowed     the jobs that leave nodes to a gang were sent before it, none is the gang, and it gets a node of each
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleetcast.placement.actions.action import ActionKind
from fleetcast.placement.actions.life import ActionRecord
from tests.service.placer_world import GPUS, RACK
from tests.simulation.actions.fleet import FleetJob
from tests.simulation.actions.growth_laws import list_nodes
from tests.simulation.oracle import Broken


@dataclass(slots=True)
class RecoveryLaws:
    """jobs: job → its attempt, as on the newest board. lost: nodes that this board shows as lost."""

    jobs: Mapping[str, FleetJob] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()

    def check_borrowing(self, row: ActionRecord, stops: Sequence[ActionRecord | None]) -> None:
        """Check a replacement that has just been proposed. stops: the actions that free nodes for it."""
        self.check_sending(row)
        for stop in stops:
            if stop is None or not stop.was_sent or stop.action.job == row.action.job:
                raise Broken("borrowed", f"{row.action_id} waits for {stop and stop.action_id}")
            if {rank.node for rank in stop.action.ranks}.isdisjoint(place.node for place in row.action.places):
                raise Broken("borrowed", f"{stop.action_id} frees no node that {row.action_id} gets")

    def check_sending(self, row: ActionRecord) -> None:
        """Check a shrink or a replacement that has just been sent, or planned with the jobs that leave their nodes."""
        action, job = row.action, self.jobs.get(row.action.job)
        if action.kind not in (ActionKind.SHRINK, ActionKind.REPLACE):
            return
        leaves = {int(rank.node[1:]) - 1 for rank in action.ranks}
        if job is None or job.attempt != action.attempt or not leaves <= set(job.nodes):
            raise Broken("leaves", f"{row.action_id} lets {action.job} leave {leaves}, not all of which it holds")
        if not action.payer and not self.lost & set(job.nodes) <= leaves:
            raise Broken("leaves", f"{row.action_id} leaves {self.lost & set(job.nodes) - leaves} under {job.name}")
        places = set(list_nodes(action))
        after = set(job.nodes) - leaves | places
        if action.kind is ActionKind.SHRINK:
            check_size(job, len(after), row.action_id)
        elif len(after) != len(job.nodes):
            raise Broken("size", f"{row.action_id} lets {job.name} run on {len(after)} of {len(job.nodes)} nodes")
        if action.gpus != GPUS * len(leaves):
            raise Broken("leaves", f"{row.action_id} counts {action.gpus:g} GPUs of {len(leaves)} nodes")
        if places and job.is_in_rack and len({node // RACK for node in after}) > 1:
            raise Broken("domain", f"{row.action_id} takes {job.name} out of its rack")


def check_size(job: FleetJob, size: int, why: str) -> None:
    """Check that an elastic gang may have a size. why: what gives it this size."""
    if job.gang is None:
        raise Broken("size", f"{why} changes the size of {job.name}, which is no elastic gang")
    least, most, step = job.gang
    if not least <= size <= most or (size - least) % step:
        raise Broken("size", f"{why} lets {job.name} run on {size} nodes, not {least} to {most} by {step}")
