"""The profile of a pass: which GPUs are free, for which request, and until when.

Its rows are the releases of running jobs and the claims of waiting requests. A claim reserves the GPUs on which a
request that cannot start now should start later, from its start until its estimated end. The first claim is that of
the head of the queue. No later request may use the GPUs of a claim while the claim holds them.
"""

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
from fleetcast.placement.plan.timeline import RunTimeQuantiles, Timeline, estimate_releases, sort_releases


@dataclass(frozen=True, slots=True)
class Claim:
    """The resources that are reserved for one waiting request, from `start_ms` to `end_ms`.

    request: limited to its quota. blocker: the job that it waits for. is_overdue: whether the request has waited too
    long. gpus: (n, g) bool. cpus, host_memory_gib: (n,) CPUs and GiB.
    """

    request: PlacementRequest
    start_ms: int
    end_ms: int
    blocker: str
    is_overdue: bool
    gpus: NDArray[np.bool_]
    cpus: NDArray[np.float64]
    host_memory_gib: NDArray[np.float64]


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
    """The releases of running jobs and the claims of waiting requests, in one pass.

    most: the number of requests that may have a claim. is_full: whether no further request may have one. Claims are
    numbered in their order. A set of claims is an int whose bit i stands for claim i.
    """

    run_times: RunTimeQuantiles
    options: Options
    most: int
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

    def add_claim(
        self, request: PlacementRequest, timeline: Timeline, step: int, is_overdue: bool, is_dropped: bool
    ) -> Claim:
        """Add the claim of a request to its earliest start that delays no earlier claim, and return it.

        step: the first step of the timeline at which the request fits if there is no claim. is_dropped: whether the
        claim reserves nothing.
        """
        gpus = request.members.desired * request.gpus_per_node
        run_ms = round(1000 * self.run_times.estimate_run_s(gpus, 0.9, limit_s=request.limit_s))
        start_ms, blocker, view = self._find_start(request, run_ms, timeline, step)
        held, members = find_claimed_gpus(request, view, self.options)
        if is_dropped:
            held, members = np.zeros_like(held), np.zeros_like(members)
        cpus = np.multiply(members, request.cpus or 0, dtype=np.float64)
        memory_gib = np.multiply(members, request.host_memory_gib or 0.0, dtype=np.float64)
        claim = Claim(request, start_ms, start_ms + run_ms, blocker, is_overdue, held, cpus, memory_gib)
        self.claims.append(claim)
        self.is_full = len(self.claims) >= self.most
        self._in_the_way.clear()
        return claim

    def _find_start(
        self, request: PlacementRequest, run_ms: int, timeline: Timeline, step: int
    ) -> tuple[int, str, ClusterView]:
        """Return the earliest start of a request that delays no claim, the job that ends then, and the view then.

        The claims divide time into spans. Within a span the same claims are in the way, so room only grows.
        """
        ahead = timeline.ahead
        after = [(row.end_ms, at, row.job) for at, row in enumerate(ahead[max(step - 1, 0) :], max(step, 1))]
        for claim in self.claims:
            done = bisect_right(ahead, claim.end_ms, key=lambda release: release.end_ms)
            after += [(claim.end_ms, done, claim.request.job_name)] if done >= step else []
        after.sort(key=lambda row: row[:2])
        times_ms = np.array([end_ms for end_ms, _, _ in after], np.int64)
        in_the_way = np.zeros(len(after), np.int64)
        for number, claim in enumerate(self.claims):
            overlaps = (claim.start_ms < times_ms + run_ms) & (claim.end_ms > times_ms)
            in_the_way |= overlaps.astype(np.int64) << number

        def make_view_at(at: int) -> ClusterView:
            return subtract_claims(timeline.make_view_after(after[at][1]), self._select_claims(int(in_the_way[at])))

        def fits_at(at: int) -> bool:
            return not in_the_way[at] or fits_now(request, make_view_at(at), self.options)

        low = 0
        for high in [*np.flatnonzero(np.diff(in_the_way)).tolist(), len(after) - 1]:
            if fits_at(high):
                break
            low = high + 1
        at = low + bisect_left(range(low, high), True, key=fits_at)
        return after[at][0], after[at][2], make_view_at(at)

    def _select_claims(self, chosen: int) -> list[Claim]:
        return [claim for number, claim in enumerate(self.claims) if chosen >> number & 1]
