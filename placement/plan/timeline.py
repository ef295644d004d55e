"""Estimates of run times, and views of the cluster as running jobs end one after the other."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RUN_LEVELS, JobRun, RunningJobs
from fleetcast.placement.machines.slots import WHOLE, count_true_per_row, list_held_parts
from fleetcast.placement.machines.view import ClusterView

FALLBACK_S = 86_400.0
FEWEST_JOBS = 5
SPREAD_UNKNOWN = 1.0  # sigma of log seconds while only one number is known
SPREAD_LEAST = 0.05
SHORTEST_REST = 0.05  # a job past every estimate is given this share of its age more
RARE = 0.9  # a job longer than this share of its like is past what they tell
NORMAL = NormalDist()
Z90 = NORMAL.inv_cdf(0.9)


Levels = NDArray[np.float64]
Basis = Literal["runs", "limit", "prior"]  # of a run time: ended jobs or a fitted model; its time limit alone; neither


@dataclass(frozen=True, slots=True)
class RunTimeQuantiles:
    """Run times of finished jobs as log-normals by GPU count: count → (p50_s, p90_s).

    The count 0 stands for all counts.
    """

    by_gpus: Mapping[int, tuple[float, float]]
    levels_s: Mapping[int, Sequence[float]] = field(default_factory=dict)  # run times at `RUN_LEVELS`, where known
    seen: Mapping[int, int] = field(default_factory=dict)  # GPU count → finished jobs

    @classmethod
    def from_durations(cls, durations: Mapping[str, Any]) -> "RunTimeQuantiles":
        """Make the estimates from `{"by_gpus": {"8": {"p50", "p90", "n", "levels"}}, "all": …}`.

        GPU counts with too few jobs get the run times of all jobs.
        """
        sized = {int(gpus): row for gpus, row in (durations.get("by_gpus") or {}).items()}
        rows = sized | {0: durations.get("all") or {}}
        known = {
            gpus: row
            for gpus, row in rows.items()
            if (row.get("n") or 0) >= FEWEST_JOBS and row.get("p50") and row.get("p90")
        }
        return cls(
            {gpus: (float(row["p50"]), float(row["p90"])) for gpus, row in known.items()},
            {gpus: row["levels"] for gpus, row in known.items() if len(row.get("levels") or ()) == len(RUN_LEVELS)},
            {gpus: int(row.get("n") or 0) for gpus, row in sized.items() if gpus > 0},
        )

    def find_median_run_s(self) -> dict[int, float]:
        """Return GPU count → median run time in seconds. The count 0 stands for all counts."""
        return {gpus: median for gpus, (median, _) in self.by_gpus.items()}

    def find_basis(self, gpus: int, limit_s: float | None, age_s: float = 0.0) -> Basis:
        """Return what the run-time estimate of a job is based on: "runs", "limit" or "prior".

        gpus: GPUs of the job. age_s: seconds that it has already run.

        >>> RunTimeQuantiles({}).find_basis(8, None), RunTimeQuantiles({}).find_basis(8, 60.0)
        ('prior', 'limit')
        """
        if gpus in self.by_gpus or 0 in self.by_gpus:
            return "runs"
        return "limit" if limit_s is not None and age_s < limit_s else "prior"

    def estimate_run_s(self, gpus: int, q: float, *, age_s: float = 0.0, limit_s: float | None = None) -> float:
        """Return quantile `q` of the run time, in seconds, of a job of `gpus` GPUs that has run for `age_s`.

        The p90 comes from finished jobs of the same GPU count, or else from all jobs. If neither is known,
        it is the time limit, or a day without one. The result is at most the limit, but always above
        `age_s`.

        >>> RunTimeQuantiles({8: (100.0, 1000.0)}).estimate_run_s(8, 0.9, limit_s=600.0)
        600.0
        """
        return self._estimate_at_levels(gpus, [q], age_s, limit_s)[0]

    def _estimate_at_levels(
        self, gpus: int, levels: Sequence[float], age_s: float, limit_s: float | None
    ) -> list[float]:
        """Return the run time in seconds at each of these quantile levels."""
        mu, sigma = self._fit_log_normal(gpus, limit_s)
        passed = self._compute_ended_share(gpus, age_s, limit_s)
        shares = [passed + level * (1 - passed) for level in levels]
        runs_s = [math.exp(mu + sigma * NORMAL.inv_cdf(share)) if share < 1 - 1e-9 else 0.0 for share in shares]
        least_s = age_s * (1 + SHORTEST_REST)
        most_s = math.inf if limit_s is None else limit_s
        if least_s <= 0.0 and most_s == math.inf:
            return runs_s
        return [max(min(run_s, most_s), least_s) for run_s in runs_s]

    def compute_run_times(
        self, gpus: int, levels: Levels, age_s: float, limit_s: float | None, quantiles_s: Sequence[float] | None = None
    ) -> Levels:
        """Return (k,) run times in seconds at the quantiles `levels` (k,) in (0, 1), all longer than `age_s`.

        quantiles_s: run times at `RUN_LEVELS`, if a model knows them.

        A job may have run longer than nearly all similar jobs. Its run time is then Pareto: it doubles its age with
        a probability of one half, up to its limit.

        >>> run_times = RunTimeQuantiles({8: (100.0, 1000.0)})
        >>> run_times.compute_run_times(8, np.array([0.5]), 50_000.0, None).round(-3).tolist()
        [100000.0]
        """
        if quantiles_s is None and age_s <= 0 and limit_s is None:
            quantiles_s = self.levels_s.get(gpus) or self.levels_s.get(0)
        if limit_s is not None and age_s >= limit_s:
            limit_s = None  # past its limit the limit says nothing
        if quantiles_s is not None:
            known = np.maximum.accumulate(np.log(np.maximum(np.asarray(quantiles_s, np.float64), 1.0)))
            run_s = np.exp(np.interp(levels, RUN_LEVELS, known))
        else:
            run_s = np.array(self._estimate_at_levels(gpus, levels.tolist(), age_s, limit_s))
            passed = self._compute_ended_share(gpus, age_s, limit_s)
            if passed > RARE:
                faded = min(1.0, (passed - RARE) / (1 - RARE) * 2)
                run_s = np.maximum(run_s, age_s + faded * age_s * levels / (1 - levels))
        if limit_s is not None:
            run_s = np.minimum(run_s, limit_s)
        return np.asarray(np.maximum(run_s, age_s + 1.0))

    def _compute_ended_share(self, gpus: int, age_s: float, limit_s: float | None) -> float:
        """Return the share of similar jobs that have ended by this age."""
        if age_s <= 0:
            return 0.0
        mu, sigma = self._fit_log_normal(gpus, limit_s)
        return NORMAL.cdf((math.log(age_s) - mu) / sigma)

    def _fit_log_normal(self, gpus: int, limit_s: float | None) -> tuple[float, float]:
        known = self.by_gpus.get(gpus) or self.by_gpus.get(0)
        p90 = known[1] if known else limit_s or FALLBACK_S
        sigma = max(SPREAD_LEAST, math.log(p90 / known[0]) / Z90) if known else SPREAD_UNKNOWN
        return math.log(p90) - Z90 * sigma, sigma


def find_remaining_basis(run: JobRun, run_times: RunTimeQuantiles, now_ms: int) -> Basis:
    """Return what the estimate of a running job's remaining time is based on.

    It is "runs" if a model knows the quantiles of the remaining time. Otherwise it is the basis of
    similar jobs' run times.
    """
    if run.left_s is not None:
        return "runs"
    return run_times.find_basis(run.gpus, run.limit_s, run.compute_age_s(now_ms))


@dataclass(frozen=True, slots=True)
class Release:
    """The GPUs that become free when a job ends.

    gpus: (k,) flat indices into the (n, g) arrays of the view. milli: (k,) thousandths that become
    free.
    """

    job: str
    end_ms: int
    gpus: NDArray[np.int64]
    milli: NDArray[np.int64]


def estimate_releases(
    view: ClusterView, running: RunningJobs, run_times: RunTimeQuantiles, now_ms: int, first: int = 0
) -> list[Release]:
    """Estimate when each job that holds GPUs ends. The job that ends soonest comes first.

    The estimate is the p90 of the job's run time, given how long it has run. first: the index of the first job in
    the view that counts.
    """
    parts = list_held_parts(view.holders, view.parts)
    edges = np.searchsorted(parts.job, np.arange(len(view.jobs) + 1))
    found = []
    for index, job in enumerate(view.jobs[first:], first):
        own = slice(edges[index], edges[index + 1])
        gpus = parts.gpu[own]
        if len(gpus):
            row = running.find_run(job, now_ms, len(gpus))
            run_s = run_times.estimate_run_s(row.gpus, 0.9, age_s=row.compute_age_s(now_ms), limit_s=row.limit_s)
            found.append(Release(job, max(now_ms + 1000, row.started_ms + round(run_s * 1000)), gpus, parts.milli[own]))
    return sort_releases(found)


def sort_releases(releases: Iterable[Release]) -> list[Release]:
    """Sort releases by their ends."""
    return sorted(releases, key=lambda release: (release.end_ms, release.job))


@dataclass(frozen=True, slots=True)
class Hold:
    """The GPUs that a placed job holds. `cpus` and `host_memory_gib` are those of each rank."""

    job: str
    ranks: Sequence[RankPlacement]
    cpus: float = 0.0
    host_memory_gib: float = 0.0


def add_placements(view: ClusterView, holds: Sequence[Hold]) -> ClusterView:
    """Return the view with these placements added. Their jobs are appended to `jobs`.

    The view is copied once.
    """
    milli, holders = view.milli.copy(), view.holders.copy()
    free_cpus, free_memory = view.free_cpus.copy(), view.free_host_memory_gib.copy()
    g, known, left, held_by = milli.shape[1], view.inventory.row, milli.ravel(), holders.ravel()
    shared: list[tuple[int, int, int]] = []
    for job, hold in enumerate(holds, len(view.jobs)):
        ranks = [(known[rank.node], rank) for rank in hold.ranks if rank.node in known]
        slots = [(row * g + gpu, rank.milli) for row, rank in ranks for gpu in rank.gpus if gpu < g]
        gpus = np.array([gpu for gpu, _ in slots], np.int64)
        held_by[gpus[held_by[gpus] < 0]] = job
        left[[gpu for gpu, taken in slots if taken >= WHOLE]] = 0
        for gpu, taken in slots:
            if taken < WHOLE:
                left[gpu] = max(left[gpu] - taken, 0)
                shared.append((job, gpu, taken))
        rows = [row for row, _ in ranks]
        np.subtract.at(free_cpus, rows, hold.cpus)
        np.subtract.at(free_memory, rows, hold.host_memory_gib)
    return replace(
        view,
        milli=milli,
        holders=holders,
        jobs=(*view.jobs, *(hold.job for hold in holds)),
        parts=view.parts.append_parts(shared),
        free_cpus=free_cpus,
        free_host_memory_gib=free_memory,
    )


def add_request_placement(view: ClusterView, request: PlacementRequest, ranks: Sequence[RankPlacement]) -> ClusterView:
    """Return the view with the placement of a request added."""
    return add_placements(
        view, [Hold(request.job_name, ranks, float(request.cpus or 0), request.host_memory_gib or 0.0)]
    )


class Timeline:
    """A view of the cluster, and the releases to come. Step k is the cluster after the first k releases."""

    def __init__(self, view: ClusterView, ahead: Sequence[Release]) -> None:
        self.view = view
        self.ahead = ahead
        self._gpus = np.concatenate([release.gpus for release in ahead]) if ahead else np.zeros(0, np.int64)
        self._milli = np.concatenate([release.milli for release in ahead]) if ahead else np.zeros(0, np.int64)
        self._ends = np.cumsum([0, *(len(release.gpus) for release in ahead)])
        self._held = view.holders >= 0
        self._busy = np.maximum(count_true_per_row(self._held), 1)

    def make_view_after(self, step: int) -> ClusterView:
        """Return the view after the first `step` releases.

        CPUs and host memory become free in proportion to a node's GPUs.
        """
        if step == 0:
            return self.view
        view = self.view
        given = slice(self._ends[step])
        back = np.bincount(self._gpus[given], self._milli[given], view.milli.size).reshape(view.milli.shape)
        milli = np.minimum(view.milli + back, WHOLE).astype(np.int16)
        released = (back > 0) & (milli == WHOLE)
        share = count_true_per_row(released & self._held) / self._busy
        return replace(
            view,
            milli=np.where(view.usable, milli, view.milli),
            holders=np.where(released, np.int32(-1), view.holders),
            free_cpus=view.free_cpus + share * (view.inventory.cpus - view.free_cpus),
            free_host_memory_gib=view.free_host_memory_gib
            + share * (view.inventory.host_memory_gib - view.free_host_memory_gib),
        )

    def find_first_fit(self, request: PlacementRequest, options: Options) -> int | None:
        """Return the first step at which the request fits, or None if it never does.

        Bisection works because room only grows.
        """
        low, high = 0, len(self.ahead)
        if not fits_now(request, self.make_view_after(high), options):
            return None
        while low < high:
            middle = (low + high) // 2
            if fits_now(request, self.make_view_after(middle), options):
                high = middle
            else:
                low = middle + 1
        return low
