"""Reclaim in a play: the facts that a pass needs to propose stops, and the record of what the stops did."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.running_jobs import NOT_SAID, RunningJobs, make_running_jobs
from fleetcast.placement.plan.reclaiming import ReclaimInput
from fleetcast.placement.play.elastic import ElasticProgress
from fleetcast.placement.play.progress import FAULT, JobProgress
from fleetcast.placement.play.youngest import YoungestFirst
from fleetcast.placement.queues.tree import ANY, QueueTree, ReclaimPolicy
from fleetcast.placement.reclaim.victims import find_victims

DAY_MS = 86_400_000

HeldJob = tuple[PlacementRequest, int, int]  # a running job: its request, its GPUs, its start in ms


@dataclass(slots=True)
class PlayedReclaim:
    """Reclaim as a play carries it out: what a pass proposes happens at once, without grace.

    policy: with the mode "off", no job is stopped. Its `patience_s` counts from the arrival of a request: before, no
    job is stopped for it, even if none should end soon. youngest_first: choose victims as Kueue does, not by cost.
    entitled: jobs that were within the guarantee of their queue when they arrived. What waits ahead of them in
    their queue counts.
    """

    policy: ReclaimPolicy
    tree: QueueTree
    progress: JobProgress
    youngest_first: bool = False
    entitled: set[int] = field(default_factory=set)
    _wanted: Counter[str] = field(default_factory=Counter)  # queue → GPUs of its jobs that wait or run

    def record_arrival(self, job: int, request: PlacementRequest) -> None:
        """Record whether a job that arrives is within the guarantee of its queue."""
        queue, gpus = self._find_queue(request)
        self._wanted[queue] += gpus
        if self._wanted[queue] <= self.tree.find_node(queue).guaranteed.get(ANY, 0.0):
            self.entitled.add(job)

    def record_end(self, request: PlacementRequest) -> None:
        """Record that a job has done all its work."""
        queue, gpus = self._find_queue(request)
        self._wanted[queue] -= gpus

    def _find_queue(self, request: PlacementRequest) -> tuple[str, int]:
        return self.tree.list_path(self.tree.find_request_leaf(request))[0].name, request.members.min * (
            request.gpus_per_node
        )

    def make_input(self, held: Mapping[int, HeldJob], now_ms: int) -> ReclaimInput | None:
        """Return what a pass needs to propose stops. Returns None if the policy stops nothing."""
        if self.policy.mode == "off":
            return None
        jobs = self._make_table(held, now_ms)
        find = YoungestFirst.of(jobs) if self.youngest_first else find_victims
        return ReclaimInput(replace(self.policy, patience_s=0.0), self.tree, jobs, find)

    def _make_table(self, held: Mapping[int, HeldJob], now_ms: int) -> RunningJobs:
        requests = [request for request, _, _ in held.values()]
        gangs = [request.members for request in requests]
        resized_s = self.progress.resized_s if isinstance(self.progress, ElasticProgress) else {}
        written_s = np.array([self.progress.find_checkpoint_s(job, now_ms / 1000) for job in held], np.float64)
        return make_running_jobs(
            [request.job_name for request in requests],
            leaf=[self.tree.find_request_leaf(request) for request in requests],
            job_class=[request.class_ for request in requests],
            priority=[request.priority for request in requests],
            preemptible=[NOT_SAID if request.preemptible is None else int(request.preemptible) for request in requests],
            gpus=[gpus for _, gpus, _ in held.values()],
            members=[gpus // request.gpus_per_node for request, gpus, _ in held.values()],
            gang_min=[gang.min if gang.min < gang.desired else 0 for gang in gangs],
            gang_desired=[gang.desired if gang.min < gang.desired else 0 for gang in gangs],
            gang_step=[gang.step if gang.min < gang.desired else 0 for gang in gangs],
            gpus_per_member=[request.gpus_per_node for request in requests],
            required_level=[request.required or "" for request in requests],
            resized_ms=[round(1000 * resized_s[job]) if job in resized_s else -1 for job in held],
            speed_exponent=self.progress.exponent if isinstance(self.progress, ElasticProgress) else np.nan,
            started_ms=[started_ms for _, _, started_ms in held.values()],
            checkpoint_ms=np.where(np.isnan(written_s), -1, np.nan_to_num(written_s) * 1000).round(),
            stops=[self._count_stops_of_day(job, now_ms) for job in held],
        )

    def _count_stops_of_day(self, job: int, now_ms: int) -> int:
        """Return how often a job was stopped for a request within 24 hours. Faults do not count."""
        stops = self.progress.list_stops(job)
        return sum(stop.payer != FAULT and 1000 * stop.at_s > now_ms - DAY_MS for stop in stops)
