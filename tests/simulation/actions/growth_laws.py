"""The laws of gangs that grow, for the simulation of actions.

size         a gang grows by whole steps, and never above what it wants
domain       a gang never grows out of the domain that it requires
closed nodes a gang grows on no node on which no request would be placed
dwell        a gang whose size has just changed does not grow
asked once   an attempt that failed to grow is not asked again
nobody waits after a pass no request waits that would fit on GPUs of growth which no agent has accepted
seen         a gang whose growth is seen holds its new nodes
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fleetcast.placement.actions.action import ActionKind, JobAction
from fleetcast.placement.actions.life import ActionRecord, ActionState
from fleetcast.placement.elastic.grow import DWELL_MS
from tests.service.placer_world import GPUS, RACK
from tests.simulation.actions.fleet import FleetJob
from tests.simulation.oracle import Broken

FAILED = frozenset({ActionState.REFUSED, ActionState.EXPIRED})


@dataclass(slots=True)
class GrowthLaws:
    """jobs: job → its attempt, as on the newest board. closed: nodes on which that board lets no request be placed.

    failed: attempts that did not grow when they were asked.
    """

    jobs: Mapping[str, FleetJob] = field(default_factory=dict)
    closed: frozenset[int] = frozenset()
    failed: set[tuple[str, int]] = field(default_factory=set)

    def check_sending(self, row: ActionRecord, now_ms: int) -> None:
        """Check a growth that has just been sent."""
        action, job = row.action, self.jobs.get(row.action.job)
        if action.kind is not ActionKind.GROW:
            return
        if job is None or job.gang is None or job.attempt != action.attempt:
            raise Broken("size", f"{row.action_id} grows {action.job}, which is no elastic gang that runs")
        least, most, step = job.gang
        size = len(job.nodes) + len(action.places)
        if size > most or (size - least) % step or action.gpus != GPUS * len(action.places):
            raise Broken("size", f"{row.action_id} grows {job.name} to {size}, not {least} to {most} by {step}")
        racks = {node // RACK for node in list_nodes(action)} | {node // RACK for node in job.nodes}
        if job.is_in_rack and len(racks) > 1:
            raise Broken("domain", f"{row.action_id} grows {job.name} out of its rack")
        if self.closed & set(list_nodes(action)):
            raise Broken("closed nodes", f"{row.action_id} grows {job.name} on {self.closed & set(list_nodes(action))}")
        if job.placed_ms is not None and now_ms - job.placed_ms < DWELL_MS:
            raise Broken("dwell", f"{row.action_id} comes {now_ms - job.placed_ms} ms after the last change")
        if job.key in self.failed:
            raise Broken("asked once", f"{row.action_id} asks {job.name} again")

    def check_change(self, row: ActionRecord, running: Mapping[str, FleetJob]) -> None:
        """Check the last state of an action. running: the jobs in truth."""
        action = row.action
        if action.kind is not ActionKind.GROW:
            return
        job = running.get(action.job)
        if row.was_sent and row.state in FAILED:
            self.failed.add((action.job, action.attempt))
        if row.state is ActionState.SEEN and (job is None or not set(list_nodes(action)) <= set(job.nodes)):
            raise Broken("seen", f"{row.action_id} is seen, and {action.job} does not hold its new nodes")

    def check_pass(self, open_now: Iterable[ActionRecord], waiting: Iterable[tuple[str, int]]) -> None:
        """Check the growth that is open after a pass. waiting: requests, each with the nodes that it asks for."""
        requests = list(waiting)
        for row in open_now:
            nodes = list_nodes(row.action)
            if row.action.kind is not ActionKind.GROW or row.state is not ActionState.SENT or self.closed & set(nodes):
                continue
            for request_id, size in requests:
                if size <= len(nodes):
                    raise Broken("nobody waits", f"{request_id} waits, and {row.action_id} holds {len(nodes)} nodes")


def list_nodes(action: JobAction) -> Sequence[int]:
    """Return the rows of the nodes that a job gets."""
    return [int(place.node[1:]) - 1 for place in action.places]
