"""The search for victims: the running jobs whose stop costs least and makes room for a whole gang.

1. The usual filters find the nodes that could host members if all stoppable jobs were gone.
2. The prices of slots give a lower bound for each domain of the required level.
3. In the domains with the lowest bounds, nodes are chosen by price.
4. Jobs that turn out not to be needed are restored, the dearest first. So every victim is needed.
5. The request is decided on the view without the victims, like any placement. If it is refused, no job is
   stopped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.placement.engine import decide_screened
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.reclaim.choice import choose_victims
from fleetcast.placement.reclaim.held import Floats, Ints, JobParts, Mask
from fleetcast.placement.reclaim.prices import NodePrices, bound_domains
from fleetcast.placement.reclaim.room import GangDomains, HostAmounts, VacatedRoom

MOST_DOMAINS = 12
MOST_CHEAPEST = 1000  # jobs with which a set begins where CPUs or memory are short
MOST_EXCHANGES = 64  # tried of each kind, fewer where a try costs more:
EXCHANGES = 600_000  # divided by the members times the nodes of the domain, or by ten times the nodes of the fleet
PASSES = 2
GOOD = 1.005  # times the lower bound: nothing is exchanged in a set that costs no more
PRICE_SPREAD = 0.4  # sigma of the logarithm of varied prices
LEAST_PRICE = 1e-6  # GPU-seconds: a job that costs nothing is still not yet stopped
CLOSE = 1e-9  # relative: sums of the same costs in another order

NoVictimsCode = Literal["no_gpus", "no_room", "refused", "unfair", "quota"]


@dataclass(frozen=True, slots=True)
class VictimSet:
    """Jobs whose stop makes room for a gang in one domain. jobs: sorted by name. domain: "" for anywhere."""

    domain: str
    jobs: tuple[str, ...]
    cost_gpu_s: float


@dataclass(frozen=True, slots=True)
class ChosenVictims:
    """The jobs to stop for one request, and its placement once they have stopped.

    chosen: the cheapest set found. It has no jobs if the request fits now. costs_gpu_s: the cost of each job of
    this set. bound_gpu_s: no set in any domain costs less. lost: dearer sets. view: the cluster without the
    victims.
    """

    chosen: VictimSet
    costs_gpu_s: tuple[float, ...]
    bound_gpu_s: float
    lost: tuple[VictimSet, ...]
    decision: Decision
    view: ClusterView


@dataclass(frozen=True, slots=True)
class NoVictims:
    """The reason why no set of victims lets a request in, as a code with numbers.

    no_gpus: the request needs none. no_room: `members` of `needed` fit once all jobs that may be stopped have.
    refused: the placement was refused on the view without the victims. unfair: `members` fit once all jobs
    have stopped that may fairly be, or each set that was found is unfair to a queue. quota: the request's
    queue may not hold so much even then.
    """

    code: NoVictimsCode
    members: int = 0
    needed: int = 0


def find_victims(
    request: PlacementRequest,
    view: ClusterView,
    cost_gpu_s: Floats,
    options: Options,
    host: HostAmounts | None = None,
) -> ChosenVictims | NoVictims:
    """Return the cheapest set of jobs whose stop makes room for the smallest gang of a request.

    cost_gpu_s: (j,) the cost of stopping each job of the view in GPU-seconds. It is inf or NaN for jobs that
    may not be stopped. host: CPUs and host memory that the jobs hold. The result depends only on the arguments,
    and not on the order of the view's jobs.
    """
    if not request.gpus_per_node:
        return NoVictims("no_gpus")
    search = VictimSearch(request, view, cost_gpu_s, options, host)
    if search.most_members < search.needed:
        return NoVictims("no_room", search.most_members, search.needed)
    return search.find_cheapest()


@dataclass(frozen=True, slots=True)
class _FoundSet:
    """A set of victims before its jobs are named. stopped: (j,) bool."""

    cost: float
    domain: str
    stopped: Mask


class VictimSearch:
    """The search for one request. `room` is the room without the jobs whose stop is being tried."""

    def __init__(
        self,
        request: PlacementRequest,
        view: ClusterView,
        cost_gpu_s: Floats,
        options: Options,
        host: HostAmounts | None = None,
    ) -> None:
        self.request, self.view, self.options = request, view, options
        self.needed = request.members.min
        self.parts = JobParts.of(view)
        self.cost = np.where(np.isnan(cost_gpu_s), np.inf, cost_gpu_s)[self.parts.order]
        self.live = np.maximum(self.cost, LEAST_PRICE)
        self.domains = GangDomains.of(request, view)
        self.room = VacatedRoom(request, view, self.parts, self.domains, host)
        emptied = self.room.copy()
        emptied.stop_only(np.isfinite(self.cost))
        candidates = screen(request, emptied.make_filter_view(), options).passes
        for room in (emptied, self.room):
            room.keep_candidates(candidates)
        self._tried: set[tuple[bytes, bytes, int]] = set()
        self.most_room, self.most_members = emptied.room, int(emptied.domain_room.max(initial=0))

    def find_cheapest(self) -> ChosenVictims | NoVictims:
        """Return the cheapest set that was found, with the placement of the request."""
        found, bound = [self._keep_set()], 0.0
        if self.room.domain_room.max() < self.needed:
            found, bound = self._list_sets()
        for at, best in enumerate(found):
            self.room.stop_only(best.stopped)
            left = self.room.make_view()
            decision = decide_screened(self.request, left, self.options, screen(self.request, left, self.options))
            if decision.outcome == "placed":
                costs = tuple(self.cost[best.stopped].tolist())
                chosen, *lost = map(self._name_set, found[at:])
                return ChosenVictims(chosen, costs, bound, tuple(lost), decision, left)
        return NoVictims("refused", 0, self.needed)

    def _list_sets(self) -> tuple[list[_FoundSet], float]:
        """Return the different sets that were found, the cheapest first, and a lower bound on the cost of any set."""
        rows = np.flatnonzero((self.most_room > 0) & (self.domains.domain >= 0))
        prices = self._price_nodes(rows)
        members, _ = prices.price_members(prices.bound_slots(self.cost))
        bounds = bound_domains(members, self.domains.domain[rows], len(self.domains.names), self.needed)
        found: list[_FoundSet] = []
        best = np.zeros(len(self.cost), bool)
        where, least = prices, np.inf
        for domain in np.argsort(bounds, kind="stable")[:MOST_DOMAINS].tolist():
            if bounds[domain] >= least * (1 - CLOSE):
                break
            inside = prices if len(bounds) == 1 else self._price_nodes(rows[self.domains.domain[rows] == domain])
            for one in self._try_domain(inside, float(bounds[domain])):
                found.append(one)
                if one.cost < least:
                    where, best, least = inside, self.room.stopped, one.cost
        if least > bounds.min() * GOOD:
            found += self._exchange(where, best)
        different = {one.stopped.tobytes(): one for one in found}.values()
        return sorted(different, key=lambda one: one.cost), float(bounds.min())

    def _price_nodes(self, rows: Ints) -> NodePrices:
        return NodePrices(self.request, self.parts, rows, self.most_room[rows], self.view.milli.shape[1])

    def _try_domain(self, prices: NodePrices, bound: float) -> Iterator[_FoundSet]:
        """Yield sets of victims for one domain, one for each way to spread a job's cost over its nodes.

        Prices count GPUs alone. If CPUs or memory were missing on the nodes that they chose, the last set begins with
        the cheapest jobs of the domain, wherever they run.
        """
        over_rows, over_node = prices.sum_by_rows(), prices.sum_by_node()
        is_short = False
        for spread, by_members in ((over_rows, True), (over_node, False)):
            found = choose_victims(prices, self.live, spread, self.needed, by_members)
            assert found is not None, "the domain has the room"
            is_short |= self._trim(*found, prices.rows)
            one = self._keep_set()
            yield one
            if one.cost <= bound * GOOD or not prices.spans.any():
                break
        if is_short and one.cost > bound * GOOD:
            self._trim(self._choose_cheapest(prices), np.zeros(len(prices.rows), np.int64), prices.rows)
            yield self._keep_set()

    def _choose_cheapest(self, prices: NodePrices) -> Mask:
        """Return (j,) bool: the cheapest jobs on these nodes that make room together, or all of them if many must."""
        jobs = np.flatnonzero(np.isfinite(self.cost) & (np.bincount(prices.job, minlength=len(self.cost)) > 0))
        jobs = jobs[np.argsort(self.cost[jobs], kind="stable")]
        chosen = np.zeros(len(self.cost), bool)
        for most in (MOST_CHEAPEST, len(jobs)):
            chosen[jobs[:most]] = True
            self.room.stop_only(chosen)
            if self.room.domain_room.max() >= self.needed:
                break
        return chosen

    def _exchange(self, prices: NodePrices, best: Mask) -> Iterator[_FoundSet]:
        """Yield cheaper and cheaper sets. In each, one job has joined or left, and others are adjusted."""
        work = max(self.needed * len(prices.rows), 10 * len(self.view))
        tries = min(MOST_EXCHANGES, EXCHANGES // work)
        for _ in range(PASSES):
            before = best
            for try_exchanges in (self._choose_again, self._let_join, self._let_leave):
                for better in try_exchanges(prices, best, tries):
                    best = better
                    yield self._keep_set()
            if best is before:
                return

    def _list_joining(self, prices: NodePrices, best: Mask, tries: int) -> list[int]:
        """Return the jobs on these nodes that are not in the set `best`, the cheapest per GPU first."""
        each = np.where(best, np.inf, self.cost / np.maximum(self.parts.total, 1))
        each[np.bincount(prices.job, minlength=len(best)) == 0] = np.inf
        joins = np.argsort(each, kind="stable")[:tries]
        found: list[int] = joins[np.isfinite(each[joins])].tolist()
        return found

    def _let_join(self, prices: NodePrices, best: Mask, tries: int) -> Iterator[Mask]:
        """Yield cheaper sets, in which one more job joins and the victims that it makes needless leave."""
        for job in self._list_joining(prices, best, tries):
            more = best.copy()
            more[job] = True
            if self._makes_cheaper_set(best, more, np.zeros(len(prices.rows), np.int64), prices.rows, stays=job):
                yield (best := self.room.stopped)

    def _let_leave(self, prices: NodePrices, best: Mask, tries: int) -> Iterator[Mask]:
        """Yield cheaper sets, in which one victim is replaced by the cheapest others. The dearest is tried first."""
        victims, spread = np.flatnonzero(best), prices.sum_by_node()
        for job in victims[np.argsort(-self.cost[victims], kind="stable")][:tries].tolist():
            live = np.where(best, 0.0, self.live)
            live[job] = np.inf
            found = choose_victims(prices, live, spread, self.needed) if best[job] else None
            if found is not None and self._makes_cheaper_set(best, *found, prices.rows):
                yield (best := self.room.stopped)

    def _choose_again(self, prices: NodePrices, best: Mask, tries: int) -> Iterator[Mask]:
        """Yield cheaper sets, in which a random part of the victims stays and others are chosen by varied prices.

        The random numbers are the same in each search.
        """
        rng, spread = np.random.default_rng(0), prices.sum_by_rows()
        for _ in range(2 * tries):
            live = self.live * rng.lognormal(0.0, PRICE_SPREAD, len(best))
            live[best & (rng.random(len(best)) < rng.random())] = 0.0
            found = choose_victims(prices, live, spread, self.needed, by_members=True)
            assert found is not None, "the domain has the room"
            if self._makes_cheaper_set(best, *found, prices.rows):
                yield (best := self.room.stopped)

    def _makes_cheaper_set(self, best: Mask, victims: Mask, members: Ints, rows: Ints, stays: int = -1) -> bool:
        """Stop these jobs, and restore those that are not needed. Returns whether this costs less than the set `best`.

        rows: always the same in one search. A set that was compared before is not trimmed again: it costs no less than
        the best one since.
        """
        tried = victims.tobytes(), members.tobytes(), stays
        if tried in self._tried:
            return False
        self._tried.add(tried)
        self._trim(victims, members, rows, stays)
        return bool(self.cost[self.room.stopped].sum() < self.cost[best].sum() * (1 - CLOSE))

    def _trim(self, victims: Mask, members: Ints, rows: Ints, stays: int = -1) -> bool:
        """Stop these jobs, and restore those that are not needed. Returns whether CPUs or memory were missing.

        members: the gang's members on the nodes of `rows`. If CPUs or memory are missing on such a node, first all
        stoppable jobs on it are stopped. Then the unneeded ones are restored.
        """
        self.room.stop_only(victims)
        is_short = bool(self.room.domain_room.max() < self.needed)
        if is_short:
            short = rows[self.room.room[rows] < members]
            more = np.isin(self.parts.row, short) & np.isfinite(self.cost[self.parts.job])
            victims[self.parts.job[more]] = True
            self.room.stop_only(victims)
        jobs = np.flatnonzero(victims)
        last = np.where(jobs == stays, 0.0, self.cost[jobs])
        self.room.restore_spare_jobs(jobs[np.argsort(-last, kind="stable")], self.needed)
        return is_short

    def _keep_set(self) -> _FoundSet:
        cost = float(self.cost[self.room.stopped].sum())
        return _FoundSet(cost, self.domains.names[int(self.room.domain_room.argmax())], self.room.stopped)

    def _name_set(self, found: _FoundSet) -> VictimSet:
        jobs = tuple(self.parts.names[job] for job in np.flatnonzero(found.stopped).tolist())
        return VictimSet(found.domain, jobs, found.cost)
