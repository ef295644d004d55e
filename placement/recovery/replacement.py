"""The search for the step by which a gang runs again after some of its nodes failed.

The healthy members stay where they are ("pinned"). Only the members on failed nodes get new places. These lie in
the domain of the level that the gang requires, and among those in the tightest domain that also holds the pinned
members and has room.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest, RankPlacement, TopologyConstraint
from fleetcast.fleet.topology import DOMAIN_LEVELS, Level
from fleetcast.placement.engine import decide
from fleetcast.placement.machines.options import Filter, Options
from fleetcast.placement.machines.slots import WHOLE
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.recovery.steps import PricedStep, RecoveryStep, RecoveryTimes, choose_step, price_step

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BrokenGang:
    """A running gang with its present places.

    request: its job, the filters that its nodes must pass, and the required level. Its gang is elastic if the job
    can run with fewer members. ranks: one rank for the GPUs that it holds on a node. gpus_per_member: 0 unknown.
    """

    request: PlacementRequest
    ranks: tuple[RankPlacement, ...]
    gpus_per_member: int = 0

    @property
    def gpus(self) -> int:
        return sum(len(rank.gpus) for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class BorrowedNodes:
    """Nodes that running jobs would leave for the lost members of a gang.

    places: those of the lost members. jobs: those that stop or give up members. cost_gpu_s: their losses. after_s:
    seconds until they may be asked.
    """

    places: tuple[RankPlacement, ...]
    jobs: tuple[str, ...]
    cost_gpu_s: float
    after_s: float = 0.0


BorrowSearch = Callable[[PlacementRequest, Options], BorrowedNodes | None]
"""A search for the nodes of a request for the lost members. Its options allow only healthy nodes of one domain."""


@dataclass(frozen=True, slots=True)
class GangRecovery:
    """The chosen step. lost: the ranks on failed nodes. pinned: the ranks that stay.

    places: the new places of the lost members, or of all members for `ELSEWHERE`. It is empty if none gets a new
    place. victims: jobs that stop. costs: GPU-seconds of every possible step. leaving: healthy ranks that a smaller
    gang gives up, so that its size is one of its steps.
    """

    step: PricedStep
    lost: tuple[RankPlacement, ...]
    pinned: tuple[RankPlacement, ...]
    places: tuple[RankPlacement, ...] = ()
    victims: tuple[str, ...] = ()
    costs: tuple[tuple[RecoveryStep, float], ...] = ()
    leaving: tuple[RankPlacement, ...] = ()


@dataclass(frozen=True, slots=True)
class _Possible:
    """A possible step with the places and the stopped jobs that belong to it."""

    priced: PricedStep
    places: tuple[RankPlacement, ...] = ()
    victims: tuple[str, ...] = ()
    leaving: tuple[RankPlacement, ...] = ()


def find_recovery(
    gang: BrokenGang,
    view: ClusterView,
    failed: Mask,
    options: Options,
    times: RecoveryTimes,
    spares: Mask | None = None,
    borrow: BorrowSearch | None = None,
) -> GangRecovery:
    """Return the cheapest step that lets a gang run again.

    failed: (n,) bool, the failed nodes. spares: (n,) bool, nodes that are held ready. borrow: the search for nodes
    that other jobs leave. Without it none does. Any number of nodes may have failed.
    """
    search = _RecoverySearch(gang, view, failed, options, times, borrow)
    possible = [*search.list_possible(np.zeros(len(view), bool) if spares is None else spares)]
    chosen = choose_step(one.priced for one in possible)
    found = next(one for one in possible if one.priced is chosen)
    costs = tuple((one.priced.step, one.priced.cost_gpu_s) for one in possible)
    return GangRecovery(chosen, search.lost, search.pinned, found.places, found.victims, costs, found.leaving)


class _RecoverySearch:
    """The search for one gang."""

    def __init__(
        self,
        gang: BrokenGang,
        view: ClusterView,
        failed: Mask,
        options: Options,
        times: RecoveryTimes,
        borrow: BorrowSearch | None,
    ) -> None:
        row = view.inventory.row
        self.gang, self.view, self.failed, self.options, self.times = gang, view, failed, options, times
        self.borrow = borrow
        self.lost = tuple(rank for rank in gang.ranks if rank.node not in row or failed[row[rank.node]])
        self.pinned = tuple(rank for rank in gang.ranks if rank.node in row and not failed[row[rank.node]])
        self.rows = np.array([row[rank.node] for rank in self.pinned], np.int64)

    def list_possible(self, spares: Mask) -> Iterator[_Possible]:
        """Yield the possible steps in the order of the ladder. The last one is always possible."""
        if not self.lost:
            yield _Possible(self._price(RecoveryStep.IN_PLACE))
            return
        if self.pinned and all(rank.milli == WHOLE for rank in self.gang.ranks):
            yield from self._list_replacements(spares)
            members = self._count_members_after_shrink()
            if members:
                slower = sum(len(rank.gpus) for rank in self.lost) * self.times.free_after_s
                yield _Possible(self._price(RecoveryStep.SHRINK, slower), leaving=self._list_leaving(members))
        yield from self._move()
        yield _Possible(self._price(RecoveryStep.WAIT))

    def _price(self, step: RecoveryStep, others_gpu_s: float = 0.0, after_s: float = 0.0) -> PricedStep:
        return price_step(step, self.times, self.gang.gpus, others_gpu_s, after_s)

    def _list_replacements(self, spares: Mask) -> Iterator[_Possible]:
        """Yield each way to fill the missing places: with spares, with free nodes, and else with borrowed ones.

        Borrowed nodes never cost less than nodes that no job holds.
        """
        request, needs_jobs = self._make_missing_request(), self.borrow is not None
        for step, allowed in ((RecoveryStep.SPARE, spares), (RecoveryStep.FREE, ~self.failed)):
            for inside in self._list_domains() if allowed.any() else ():
                decision = decide(request, self.view, self._restrict(inside & allowed))
                if decision.outcome == "placed":
                    yield _Possible(self._price(step), self._number(decision.ranks))
                    needs_jobs = False
                    break
        for inside in self._list_domains() if needs_jobs else ():
            assert self.borrow is not None
            found = self.borrow(request, self._restrict(inside & ~self.failed))
            if found is not None:
                priced = self._price(RecoveryStep.BORROW, found.cost_gpu_s, found.after_s)
                yield _Possible(priced, self._number(found.places), found.jobs)
                break

    def _list_domains(self) -> Iterator[Mask]:
        """Yield (n,) bool, the domains that hold all pinned members, from the tightest to the required one."""
        required, everywhere = self.gang.request.required, np.ones(len(self.view), bool)
        if required is Level.NODE:
            yield np.isin(np.arange(len(self.view)), self.rows)
            return
        for level in DOMAIN_LEVELS:
            domain = self.view.topology.domain[level]
            own = domain[self.rows]
            if own[0] >= 0 and (own == own[0]).all():
                yield np.asarray(domain == own[0])
            if level is required:
                return
        yield everywhere

    def _restrict(self, allowed: Mask) -> Options:
        """Return the options with a filter that rejects all nodes but these."""
        reject: Filter = lambda request, view, options: ~allowed  # noqa: E731
        return replace(self.options, filters=(*self.options.filters, ("not_beside_the_gang", reject)))

    def _make_missing_request(self) -> PlacementRequest:
        """Return the request for the missing members alone."""
        sizes = [len(rank.gpus) for rank in self.lost]
        each = self.gang.gpus_per_member
        if not each or any(size % each for size in sizes):
            each = math.gcd(*sizes)
        return msgspec.structs.replace(
            self.gang.request, gang=sum(sizes) // each, gpus_per_node=each, topology=TopologyConstraint()
        )

    def _number(self, places: Sequence[RankPlacement]) -> tuple[RankPlacement, ...]:
        """Return the new places with numbers that no pinned rank has."""
        taken = {rank.rank for rank in self.pinned}
        numbers = (number for number in range(len(taken) + len(places)) if number not in taken)
        return tuple(
            RankPlacement(number, place.node, place.gpus) for number, place in zip(numbers, places, strict=False)
        )

    def _count_members_after_shrink(self) -> int:
        """Return the members that an elastic gang keeps without the lost ones. 0 if those are too few."""
        sizes, each = self.gang.request.members, self.gang.gpus_per_member
        if sizes.min == sizes.desired or not each:
            return 0
        left = sum(len(rank.gpus) for rank in self.pinned) // each
        return 0 if left < sizes.min else sizes.min + (left - sizes.min) // sizes.step * sizes.step

    def _list_leaving(self, members: int) -> tuple[RankPlacement, ...]:
        """Return the last of the pinned ranks, so that a number of members stays."""
        left = sum(len(rank.gpus) for rank in self.pinned) - members * self.gang.gpus_per_member
        leaving: list[RankPlacement] = []
        for rank in reversed(self.pinned):
            gpus = rank.gpus[-left:] if left > 0 else ()
            if gpus:
                leaving.append(msgspec.structs.replace(rank, gpus=gpus))
            left -= len(gpus)
        return tuple(reversed(leaving))

    def _move(self) -> Iterator[_Possible]:
        """Yield the move of the whole gang to healthy nodes, if they have room."""
        if any(rank.milli != WHOLE for rank in self.gang.ranks):
            return
        sizes = {len(rank.gpus) for rank in self.gang.ranks}
        each = self.gang.gpus_per_member or math.gcd(*sizes)
        request = msgspec.structs.replace(self.gang.request, gang=max(1, self.gang.gpus // each), gpus_per_node=each)
        left = remove_jobs(self.view, {self.gang.request.job_name})
        decision = decide(request, left, self._restrict(~self.failed))
        if decision.outcome == "placed":
            yield _Possible(self._price(RecoveryStep.ELSEWHERE), decision.ranks)
