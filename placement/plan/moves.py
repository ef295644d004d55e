"""The cheapest moves of running jobs that let a waiting gang in: no job stops for good, and each gets another place.

1. The search for victims names the cheapest set of jobs without which the gang fits.
2. The gang and all jobs of the set are placed on the view without them. If all fit together, the set may move.
3. If a job finds no place, the search first bars all jobs of its size or more, until some set may move. Then it goes on
   with cheaper sets in which one of the jobs may not move, or one more job moves.

A move counts only if the moved job has a place in the final state.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import Decision, PlacementRequest, RankPlacement
from fleetcast.placement.engine import decide
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.timeline import add_request_placement
from fleetcast.placement.reclaim.held import JobParts
from fleetcast.placement.reclaim.room import GangDomains, HostAmounts, VacatedRoom
from fleetcast.placement.reclaim.victims import ChosenVictims, NoVictims, NoVictimsCode, find_victims

MOST_SEARCHES = 24  # for victims
MOST_JOINING = 6  # jobs that are tried as one more, the cheapest first

Places = dict[str, tuple[RankPlacement, ...]]


@dataclass(frozen=True, slots=True)
class FoundMoves:
    """The moves that let a gang in. places: job → its new place. decision: the gang's placement.

    bound_gpu_s: no set of moves costs less.
    """

    places: Places
    cost_gpu_s: float
    bound_gpu_s: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class NoMoves:
    """The reason why no moves let a gang in.

    no_place: the gang would fit, but some moved jobs would not. Other codes are those of `NoVictims`.
    """

    code: NoVictimsCode | str
    members: int = 0
    needed: int = 0


def find_moves(
    request: PlacementRequest,
    view: ClusterView,
    cost_gpu_s: NDArray[np.float64],
    shapes: Mapping[str, PlacementRequest],
    options: Options,
    host: HostAmounts | None = None,
) -> FoundMoves | NoMoves:
    """Return the cheapest moves that were found for a request that does not fit.

    cost_gpu_s: (j,) the cost of moving each job of the view. It is inf for jobs that may not move. shapes: job → the
    request by which the job is placed again. Jobs without one do not move. host: CPUs and memory that the jobs hold.
    """
    cost = np.where([name in shapes for name in view.jobs], cost_gpu_s, np.inf)
    return _MoveSearch(request, view, cost, shapes, options, host).find_cheapest()


class _MoveSearch:
    def __init__(
        self,
        request: PlacementRequest,
        view: ClusterView,
        cost_gpu_s: NDArray[np.float64],
        shapes: Mapping[str, PlacementRequest],
        options: Options,
        host: HostAmounts | None,
    ) -> None:
        self._request, self._view, self._shapes = request, view, shapes
        self._cost, self._options, self._host = cost_gpu_s, options, host
        self._cost_of = dict(zip(view.jobs, cost_gpu_s.tolist(), strict=True))
        parts = JobParts.of(view)
        self._room = VacatedRoom(request, view, parts, GangDomains.of(request, view), host)
        self._number = {name: at for at, name in enumerate(parts.names)}
        self._tried: dict[frozenset[str], FoundMoves | None] = {}
        self._bound = 0.0
        self._failed: PlacementRequest | None = None  # the job that found no place beside the gang, in the last try

    def find_cheapest(self) -> FoundMoves | NoMoves:
        first = self._find_victims(frozenset())
        if isinstance(first, NoVictims):
            return NoMoves(first.code, first.members, first.needed)
        self._bound = first.bound_gpu_s
        best = self._find_quickly(first)
        waiting, seen = [(first.chosen.cost_gpu_s, 0, frozenset[str](), first)], {frozenset[str]()}
        while waiting:
            cost, _, barred, found = heapq.heappop(waiting)
            if best is not None and cost >= best.cost_gpu_s:
                break
            chosen = frozenset(found.chosen.jobs)
            for jobs in self._list_sets(found):
                moves = self._try_set(jobs)
                if moves is not None and (best is None or moves.cost_gpu_s < best.cost_gpu_s):
                    best = moves
            if self._tried[chosen] is not None:
                continue
            for job in found.chosen.jobs:
                more = barred | {job}
                if more in seen or len(seen) >= MOST_SEARCHES:
                    continue
                seen.add(more)
                other = self._find_victims(more)
                if isinstance(other, ChosenVictims):
                    heapq.heappush(waiting, (other.chosen.cost_gpu_s, len(seen), more, other))
        return best or NoMoves("no_place")

    def _find_quickly(self, found: ChosenVictims | NoVictims) -> FoundMoves | None:
        """Return moves that need not be the cheapest. If a job finds no place, no job of its size or more moves."""
        barred = frozenset[str]()
        for _ in range(MOST_SEARCHES):
            if isinstance(found, NoVictims):
                return None
            moves = self._try_set(frozenset(found.chosen.jobs))
            if moves is not None:
                return moves
            least, more = self._failed, barred
            more |= {name for name, shape in self._shapes.items() if least is not None and _is_at_least(shape, least)}
            if more == barred:
                return None
            barred = more
            found = self._find_victims(barred)
        return None

    def _find_victims(self, barred: frozenset[str]) -> ChosenVictims | NoVictims:
        cost = np.where([name in barred for name in self._view.jobs], np.inf, self._cost)
        return find_victims(self._request, self._view, cost, self._options, self._host)

    def _list_sets(self, found: ChosenVictims) -> Iterator[frozenset[str]]:
        """Yield the chosen set. If it has no place, yield the dearer ones, and those in which one more job moves."""
        chosen = frozenset(found.chosen.jobs)
        yield chosen
        if self._tried[chosen] is not None:
            return
        yield from (frozenset(lost.jobs) for lost in found.lost)
        joining = sorted(
            (cost, name) for name, cost in self._cost_of.items() if np.isfinite(cost) and name not in chosen
        )
        yield from (chosen | {name} for _, name in joining[:MOST_JOINING])

    def _try_set(self, jobs: frozenset[str]) -> FoundMoves | None:
        """Return the moves of a set of jobs if all have places, without those jobs that need not move."""
        if jobs in self._tried:
            return self._tried[jobs]
        moves = self._tried[jobs] = self._place_all(jobs)
        if moves is None:
            return None
        for job in sorted(jobs, key=lambda name: (-self._cost_of[name], name)):
            fewer = self._place_all(moves.places.keys() - {job}) if len(moves.places) > 1 else None
            moves = fewer or moves
        self._tried[jobs] = moves
        return moves

    def _place_all(self, jobs: frozenset[str] | set[str]) -> FoundMoves | None:
        """Place the gang and the moved jobs together. The gang comes first, or last if that fails."""
        stopped = np.zeros(len(self._view.jobs), bool)
        stopped[[self._number[name] for name in jobs]] = True
        self._room.stop_only(stopped)
        left = self._room.make_view()
        largest_first = sorted(jobs, key=lambda name: (-_count_gpus(self._shapes[name]), name))
        moved = [self._shapes[name] for name in largest_first]
        self._failed = None
        for order in ([self._request, *moved], [*moved, self._request]):
            placed = self._place_in_order(order, left)
            if placed is not None:
                decision = placed.pop(self._request.request_id)
                places = dict(zip(largest_first, (placed[shape.request_id].ranks for shape in moved), strict=True))
                cost = sum(self._cost_of[name] for name in jobs)
                return FoundMoves(places, cost, self._bound, decision)
        return None

    def _place_in_order(self, requests: Sequence[PlacementRequest], view: ClusterView) -> dict[str, Decision] | None:
        found = dict[str, Decision]()
        for request in requests:
            decision = decide(request, view, self._options)
            if decision.outcome != "placed":
                if request is not self._request:
                    self._failed = self._failed or request
                return None
            view = add_request_placement(view, request, decision.ranks)
            found[request.request_id] = decision
        return found


def _count_gpus(request: PlacementRequest) -> int:
    return request.members.min * request.gpus_per_node


def _is_at_least(shape: PlacementRequest, other: PlacementRequest) -> bool:
    """Return whether a shape needs a place wherever the other one does."""
    sizes = shape.gpus_per_node >= other.gpus_per_node, shape.members.min >= other.members.min
    return all(sizes) and (shape.required, shape.pool) == (other.required, other.pool)
