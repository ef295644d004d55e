"""Kueue's order of victims: the lowest priority first, and of one priority the job that started last.

It is the peer of `fleetcast.placement.reclaim.victims` in plays. It knows nothing of lost work.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.engine import decide_screened, fits_now
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.reclaim.held import Floats
from fleetcast.placement.reclaim.room import HostAmounts
from fleetcast.placement.reclaim.victims import ChosenVictims, NoVictims, VictimSet


@dataclass(frozen=True, slots=True)
class YoungestFirst:
    """A search for victims in Kueue's order. rank: job → a key, the smallest is stopped first."""

    rank: Mapping[str, tuple[int, int, str]]

    @classmethod
    def of(cls, jobs: RunningJobs) -> "YoungestFirst":
        """Return the search among these running jobs."""
        keys = zip(jobs.priority.tolist(), (-jobs.started_ms).tolist(), jobs.names, strict=True)
        return cls({key[2]: key for key in keys})

    def __call__(
        self,
        request: PlacementRequest,
        view: ClusterView,
        cost_gpu_s: Floats,
        options: Options,
        host: HostAmounts | None = None,
    ) -> ChosenVictims | NoVictims:
        """Return the victims for a request: jobs join in order until it fits, then those that are not needed leave.

        The arguments are those of `find_victims`. The cost only says which jobs may be stopped.
        """
        if not request.gpus_per_node:
            return NoVictims("no_gpus")
        cost = {view.jobs[row]: float(cost_gpu_s[row]) for row in np.flatnonzero(np.isfinite(cost_gpu_s)).tolist()}
        order = sorted(cost, key=self.rank.__getitem__)

        def fits_without(names: Collection[str]) -> bool:
            return fits_now(request, remove_jobs(view, names), options)

        if not fits_without(order):
            return NoVictims("no_room", 0, request.members.min)
        victims = _fill_back(order[: _count_needed(order, fits_without)], fits_without)
        left = remove_jobs(view, victims)
        decision = decide_screened(request, left, options, screen(request, left, options))
        if decision.outcome != "placed":
            return NoVictims("refused", 0, request.members.min)
        names = tuple(sorted(victims))
        costs = tuple(cost[name] for name in names)
        return ChosenVictims(VictimSet("", names, sum(costs)), costs, 0.0, (), decision, left)


def _count_needed(order: list[str], fits_without: Callable[[Collection[str]], bool]) -> int:
    """Return how many jobs of the order must stop until the request fits. Room only grows, so bisection finds it."""
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if fits_without(order[:middle]):
            high = middle
        else:
            low = middle + 1
    return low


def _fill_back(victims: list[str], fits_without: Callable[[Collection[str]], bool]) -> list[str]:
    """Return the victims without those that are not needed. The last one is needed; the others are tried backwards."""
    for name in victims[-2::-1]:
        fewer = [other for other in victims if other != name]
        if fits_without(fewer):
            victims = fewer
    return victims
