"""The profile of a pass: which GPUs are free, for which request, and until when.

Its rows are the releases of running jobs, the claims of waiting requests, and the nodes that windows and spares reserve
(`fleetcast.placement.plan.reserved_nodes`). A claim reserves the GPUs on which a request that cannot start now should
start later, from its start until its estimated end. The first claim is that of the head of the queue. No later request
may use the GPUs of a claim while the claim holds them.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.engine import find_claimed_gpus, fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.reserved_nodes import ReservedNodes
from fleetcast.placement.plan.timeline import RunTimeQuantiles, Timeline, estimate_releases, sort_releases
from fleetcast.placement.plan.turns import QueueTurns


@dataclass(frozen=True, slots=True)
class Claim:
    """The resources that are reserved for one waiting request, from `start_ms` to `end_ms`.

    request: limited to its quota and to the nodes that are open to it then. blocker: the job or the window that it
    waits for. is_overdue: whether the request has waited too long. gpus: (n, g) bool. cpus, host_memory_gib:
    (n,) CPUs and GiB.
    """

    request: PlacementRequest
    start_ms: int
    end_ms: int
    blocker: str
    is_overdue: bool
    gpus: NDArray[np.bool_]
    cpus: NDArray[np.float64]
    host_memory_gib: NDArray[np.float64]

    @property
    def name(self) -> str:
        return self.request.job_name


def subtract_claims(view: ClusterView, claims: Iterable[Claim]) -> ClusterView:
    """Return the view without the resources of these claims."""
    for claim in claims:
        view = replace(
            view,
            milli=np.where(claim.gpus, np.int16(0), view.milli),
            free_cpus=view.free_cpus - claim.cpus,
            free_host_memory_gib=view.free_host_memory_gib - claim.host_memory_gib,
        )
    return view


@dataclass(slots=True)
class AvailabilityProfile:
    """The releases of running jobs, the claims of waiting requests and the reserved nodes, in one pass.

    turns: the queues and their reserved nodes. is_full: whether no further request may have a claim. Claims are
    numbered in their order. A set of claims is an int whose bit i stands for claim i.
    """

    run_times: RunTimeQuantiles
    options: Options
    turns: QueueTurns
    is_full: bool = False
    claims: list[Claim] = field(default_factory=list)
    _timeline: Timeline | None = None
    _in_the_way: dict[tuple[int, float | None], int] = field(default_factory=dict)
    _free: dict[int, tuple[ClusterView, ClusterView]] = field(default_factory=dict)  # claims → a view, and without them

    def find_delayed_claims(self, gpus: int, limit_s: float | None) -> int:
        """Return the claims that start before a job of this size would end if it started now.

        If the request of a claim is overdue and the job has a time limit, the limit counts instead of the estimate.
        When hundreds of jobs pass a large head, at least one of them runs longer than estimated.
        """
        found = self._in_the_way.get((gpus, limit_s))
        if found is None:
            likely_s, found = self.run_times.estimate_run_s(gpus, 0.9, limit_s=limit_s), 0
            for number, claim in enumerate(self.claims):
                run_s = limit_s if claim.is_overdue and limit_s is not None else likely_s
                if self.options.now_ms + 1000 * run_s > claim.start_ms:
                    found |= 1 << number
            self._in_the_way[gpus, limit_s] = found
        return found

    def make_free_view(self, view: ClusterView, chosen: int) -> ClusterView:
        """Return the view without the resources of the chosen claims."""
        if not chosen:
            return view
        cached = self._free.get(chosen)
        if cached is None or cached[0] is not view:
            cached = self._free[chosen] = view, subtract_claims(view, self._select_claims(chosen))
        return cached[1]

    def find_first_delayed(self, request: PlacementRequest, view: ClusterView, delayed: int) -> int | None:
        """Return the number of the first claim that keeps a request from starting now.

        delayed: the claims that the request would delay. It does not fit without their GPUs. Returns None if it does
        not fit with them either.
        """
        if not fits_now(request, view, self.options):
            return None
        numbers = [number for number in range(len(self.claims)) if delayed >> number & 1]
        for number in numbers[:-1]:
            if not fits_now(request, self.make_free_view(view, delayed & ((2 << number) - 1)), self.options):
                return number
        return numbers[-1]

    def update_timeline(self, view: ClusterView, running: RunningJobs) -> Timeline:
        """Return the timeline of the coming releases. It is computed again if the view has changed.

        running: the jobs that hold GPUs in the view. After the first call a view only gains jobs.
        """
        before = self._timeline
        if before is not None and before.view is view:
            return before
        seen, known = (0, ()) if before is None else (len(before.view.jobs), before.ahead)
        more = estimate_releases(view, running, self.run_times, self.options.now_ms, seen)
        self._timeline = found = Timeline(view, sort_releases([*known, *more]))
        return found

    def open_windows(self, request: PlacementRequest) -> PlacementRequest:
        """Return the request as it will be once all windows of the file of queues have ended."""
        ends = [row.end_ms for row in self.turns.find_reserved_nodes(request) if row.end_ms < math.inf]
        return self.turns.exclude_closed_nodes(request, int(max(ends))) if ends else request

    def add_claim(
        self, request: PlacementRequest, timeline: Timeline, step: int, is_overdue: bool, is_dropped: bool
    ) -> Claim:
        """Add the claim of a request to its earliest start that delays no earlier claim, and return it.

        request: without the nodes that are closed to it now. It fits once all jobs and windows have ended. step: the
        first step of the timeline at which it fits if no claim or reserved node is in the way. is_dropped: whether the
        claim reserves nothing.
        """
        gpus = request.members.desired * request.gpus_per_node
        run_ms = round(1000 * self.run_times.estimate_run_s(gpus, 0.9, limit_s=request.limit_s))
        start_ms, blocker, request, view = self._find_start(request, run_ms, timeline, step)
        held, members = find_claimed_gpus(request, view, self.options)
        if is_dropped:
            held, members = np.zeros_like(held), np.zeros_like(members)
        cpus = np.multiply(members, request.cpus or 0, dtype=np.float64)
        memory_gib = np.multiply(members, request.host_memory_gib or 0.0, dtype=np.float64)
        claim = Claim(request, start_ms, start_ms + run_ms, blocker, is_overdue, held, cpus, memory_gib)
        self.claims.append(claim)
        self.is_full = len(self.claims) >= self.turns.most_claims
        self._in_the_way.clear()
        return claim

    def _find_start(
        self, request: PlacementRequest, run_ms: int, timeline: Timeline, step: int
    ) -> tuple[int, str, PlacementRequest, ClusterView]:
        """Return the earliest start of a request that delays no claim and uses no nodes reserved for others.

        The result is the start, the job or window that ends then, and the request and the view as they are then. The
        claims and reserved nodes divide time into spans. Within a span the same of them are in the way, so room only
        grows.
        """
        reserved = self.turns.find_reserved_nodes(request)
        rows: list[Claim | ReservedNodes] = [*self.claims, *reserved]
        after = _list_ends(timeline, rows, 0 if reserved else step)
        start_ms = np.array([end_ms for end_ms, _, _ in after], np.int64)
        spans = np.array([(row.start_ms, row.end_ms) for row in rows], np.float64).reshape(-1, 2, 1)
        in_the_way = (spans[:, 0] < start_ms + run_ms) & (spans[:, 1] > start_ms)  # (row, start)

        def make_state_at(at: int) -> tuple[PlacementRequest, ClusterView]:
            claims = [claim for claim, blocks in zip(self.claims, in_the_way[:, at].tolist(), strict=False) if blocks]
            limited = self.turns.exclude_closed_nodes(request, after[at][0]) if reserved else request
            return limited, subtract_claims(timeline.make_view_after(after[at][1]), claims)

        def fits_at(at: int) -> bool:
            return not (reserved or in_the_way[:, at].any()) or fits_now(*make_state_at(at), self.options)

        low = 0
        changes = np.flatnonzero((in_the_way[:, 1:] != in_the_way[:, :-1]).any(axis=0))
        for high in [*changes.tolist(), len(after) - 1]:
            if fits_at(high):
                break
            low = high + 1
        at = low + bisect_left(range(low, high), True, key=fits_at)
        return after[at][0], after[at][2], *make_state_at(at)

    def _select_claims(self, chosen: int) -> list[Claim]:
        return [claim for number, claim in enumerate(self.claims) if chosen >> number & 1]


def _list_ends(timeline: Timeline, rows: Iterable[Claim | ReservedNodes], step: int) -> list[tuple[int, int, str]]:
    """Return the times from a step of the timeline on at which a job or one of the rows ends, in order.

    Each has the step of the timeline at that time, and the name of the job or window.
    """
    ahead = timeline.ahead
    found = [(row.end_ms, at, row.job) for at, row in enumerate(ahead[max(step - 1, 0) :], max(step, 1))]
    for row in rows:
        if row.end_ms < math.inf:
            done = bisect_right(ahead, row.end_ms, key=lambda release: release.end_ms)
            found += [(int(row.end_ms), done, row.name)] if done >= step else []
    return sorted(found, key=lambda row: row[:2])
