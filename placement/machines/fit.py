"""The search for the nodes of a whole gang, all or nothing.

One fit over c candidate nodes, each of which can host a member:

1. The size of an elastic gang is fixed beforehand (placement/machines/growth.py).
2. For each allowed level, from the tightest: a domain is feasible if the sum of its nodes' room holds the
   size.
3. All feasible domains are filled at once, best score first, until each has the size: one sort and one
   segmented cumulative sum, no loop over nodes. Scores are coarse here, so that nodes of one sub-domain
   stay together.
4. Each domain's gang is scored as a whole, with best fit of the domain itself. The best domain wins.
5. With a preferred level, the search stops at the first level with a feasible domain. Otherwise all levels
   compete by score.
6. In the winning domain, the last, partly filled node is exchanged for the node that fits the remainder
   best.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import WHOLE_GPU, Gang, PlacementRequest
from fleetcast.fleet.topology import Level, Topology
from fleetcast.placement.columns import find_run_begins, sort_rows_by_keys, sort_rows_descending
from fleetcast.placement.machines.scorers import GANG_WEIGHTS, LEVEL_SCORE, LEVELS, NodeScores

SCORE_BINS = 20
MOST_FITS = 3
FEW = 32  # domains that are filled together
AT_ONCE = 8  # of more, those of the highest bounds come first: mostly no other can win
SAMPLE = 500  # numbers that stand for all of them
ROUNDING = 1e-9  # of sums of numbers of at most 1

Floats = NDArray[np.float64]  # an inner function that wrote it out would make it anew at each call
Part = float | Floats


@dataclass(frozen=True, slots=True)
class Fit:
    """One feasible placement of a gang, with its score.

    rows: (k,) node rows. takes: (k,) members on each node. points: the contribution of each part to the
    score.
    """

    level: Level | None
    rows: NDArray[np.int64]
    takes: NDArray[np.int64]
    score: float
    points: dict[str, float]


@dataclass(frozen=True, slots=True)
class Room:
    """The number of members that fit into each domain of one level."""

    level: Level | None
    domain: NDArray[np.integer[Any]]  # (c,) domain of each candidate, -1 unknown
    members: NDArray[np.int64]  # (domains,)

    @property
    def most_members(self) -> int:
        return int(self.members.max(initial=0))


def sum_room_by_domain(
    level: Level | None, topology: Topology, rows: NDArray[np.int64], room: NDArray[np.int64]
) -> Room:
    """Sum the room of the candidates by domain."""
    if level is None:
        return Room(level, np.zeros(len(rows), np.int64), room.sum(keepdims=True))
    if level is Level.NODE:
        return Room(level, np.arange(len(rows)), room)
    domain, count = topology.domain[level][rows], len(topology.domain_names[level])
    return Room(level, domain, _sum_per_domain(domain, room, max(count, 1)))


def _sum_per_domain(domain: NDArray[np.integer[Any]], room: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return (count,) sums by domain. Nodes without a domain (-1) do not count."""
    each = room[0] if len(room) else 0
    alike = bool((room == each).all())  # as for whole nodes: then it is enough to count
    found = np.bincount(domain + 1, None if alike else room, count + 1)[1:]
    return found * each if alike else found.astype(np.int64)


def compute_largest_size(gang: Gang, room: int) -> int:
    """Return the size of the largest gang that fits if there is room for `room` members.

    Returns 0 if not even the smallest gang fits.

    >>> compute_largest_size(Gang(min=2, desired=8, step=2), 7)
    6
    """
    if room < gang.min:
        return 0
    return gang.min + (min(room, gang.desired) - gang.min) // gang.step * gang.step


def get_widest_level(request: PlacementRequest) -> Level | None:
    return request.required


def list_allowed_levels(request: PlacementRequest) -> list[Level | None]:
    """Return the levels to try, tightest first.

    They run from the preferred level (or the node) to the required one (or anywhere).
    """
    last = LEVELS.index(request.required)
    first = LEVELS.index(request.preferred) if request.preferred else 0
    return list(LEVELS[min(first, last) : last + 1])


def find_best_fits(request: PlacementRequest, topology: Topology, scores: NodeScores, size: int) -> list[Fit]:
    """Return the best placement of `size` members, then up to two runners-up.

    Empty if the gang fits nowhere.
    """
    if size == 0:
        return []
    search = GangSearch(request, topology, scores, size)
    found: list[Fit] = []
    for level in [Level.NODE] if size == 1 else list_allowed_levels(request):
        if size > scores.bound_room(level):
            continue
        offer = sum_room_by_domain(level, topology, scores.rows, scores.room)
        can_lose = scores.has_score_bounds and len(found) == MOST_FITS
        if offer.most_members < size or (can_lose and search.bound_level_score(offer) < found[-1].score):
            continue
        fits = search.find_level_fits(offer, found[-1].score if len(found) == MOST_FITS else -np.inf)
        if found:  # the domains of one level share no nodes
            fits = list(_drop_duplicates(sorted([*found, *fits], key=lambda fit: -fit.score)))[:MOST_FITS]
        found = fits  # stable: the tighter level, the earlier domain wins a tie
        if request.preferred:
            break
    return found


def _drop_duplicates(fits: list[Fit]) -> Iterator[Fit]:
    seen: set[bytes] = set()
    for fit in fits:
        key = np.sort(fit.rows).tobytes()
        if key not in seen:
            seen.add(key)
            yield fit


@dataclass(frozen=True)
class GangSearch:
    """A search for the best nodes for `size` members, level by level.

    Values that all levels share are computed once.
    """

    request: PlacementRequest
    topology: Topology
    scores: NodeScores
    size: int

    @cached_property
    def rank(self) -> NDArray[np.int64]:
        """(c,) rank of each candidate by score, the best first. Among equal scores the first comes first."""
        order = sort_rows_descending(self.scores.compute_node_scores(self.size))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return rank

    @cached_property
    def _best_chances(self) -> tuple[float, float]:
        """The highest chances that any gang can have of surviving, and of keeping its pace.

        They are the products over the best nodes.
        """
        span = self.scores.count_fewest_nodes(self.size)
        survives, keeps_pace = (
            float(np.exp(np.partition(logs, -span)[-span:].sum()))
            for logs in (self.scores.survives, self.scores.keeps_pace)
        )
        return survives, keeps_pace

    def bound_level_score(self, offer: Room) -> float:
        """Return an upper bound of the score of any gang on a level.

        A level whose bound is too low to win is not searched.
        """
        survives, keeps_pace = self._best_chances
        return float(self._bound_score(offer.level, survives, keeps_pace, self._find_largest_share(offer)))

    def bound_domain_scores(
        self, offer: Room, feasible: NDArray[np.bool_], above: float = -np.inf
    ) -> NDArray[np.float64]:
        """Return (feasible domains,) upper bounds of the score of any gang in each domain.

        These bounds are mostly lower than the bound of the whole level, but cost more work.

        The nodes that survive best are seldom the nodes that keep their pace best. So the first step bounds the
        weighted sum of both logarithms over the best nodes of each domain. If a domain's bound reaches `above`, the
        second step also bounds each logarithm by itself. The score is convex in both logarithms. So it is highest
        where one of them is as high as it can be.
        """
        risk, slow = self.scores.weights["risk"], self.scores.weights["slow"]
        tight: Part = self.size / offer.members[feasible] if self.request.milli == WHOLE_GPU else 1.0

        def bound_sums(logs: Floats) -> Floats:
            return _bound_highest_sums(logs, self.scores.count_fewest_nodes(self.size), offer.domain, feasible)

        def bound_scores(survives: Floats, keeps_pace: Floats) -> Floats:
            ends = (
                (survives, np.minimum(keeps_pace, (both - risk * survives) / slow)),
                (np.minimum(survives, (both - slow * keeps_pace) / risk), keeps_pace),
            )
            first, second = (self._bound_score(offer.level, np.exp(s), np.exp(p), tight) for s, p in ends)
            return np.asarray(np.maximum(first, second))

        both = bound_sums(risk * self.scores.survives + slow * self.scores.keeps_pace)
        none = np.zeros_like(both)
        found = bound_scores(none, none)
        if (found < above).all():
            return found
        return bound_scores(bound_sums(self.scores.survives), bound_sums(self.scores.keeps_pace))

    def _bound_score(self, level: Level | None, survives: Part, keeps_pace: Part, tight: Part) -> Part:
        """Return an upper bound of a gang's score from its chances and the share of its domain that it takes.

        All other parts of the score are assumed to be as good as they can be.
        """
        weights = self.scores.weights
        total = weights["risk"] * survives + weights["slow"] * keeps_pace + self._other_weights
        total = total + weights["fit"] * (0.5 * self._best_mean_fit + 0.5 * tight)
        total = total + weights["packing"] * (0.5 * LEVEL_SCORE[level] + 0.5)
        return total / self.scores.total_weight + ROUNDING

    @cached_property
    def _other_weights(self) -> float:
        """The total weight of the score's parts beyond `GANG_WEIGHTS`, which not every request has."""
        return self.scores.total_weight - sum(GANG_WEIGHTS.values())

    @cached_property
    def _best_mean_fit(self) -> float:
        """An upper bound of the mean fit of a gang's members.

        It assumes that all but one of the gang's nodes are filled.
        """
        full = float(self.scores.compute_node_parts(self.size)["fit"].max())
        return full + (1 - full) * min(self.size, self.scores.most_room - 1) / self.size

    def _find_largest_share(self, offer: Room) -> float:
        """Return the largest share of a domain's room that a gang can take. It is 1 for parts of GPUs."""
        least = int(offer.members[offer.members >= self.size].min())
        return self.size / least if self.request.milli == WHOLE_GPU else 1.0

    def find_level_fits(self, offer: Room, above: float = -np.inf) -> list[Fit]:
        """Return the best three domains of a level, each with its gang.

        Domains that score less than `above` may be missing.
        """
        feasible = offer.members >= self.size
        if offer.level is Level.NODE:
            return _find_best_nodes(self.scores, feasible.nonzero()[0], self.size)
        n = int(np.count_nonzero(feasible))
        if (n <= FEW and not np.isfinite(above)) or not self.scores.is_gang_score_independent:
            return self._fill_wanted_domains(np.ones(n, bool), offer, feasible)
        bounds = self.bound_domain_scores(offer, feasible, above)
        likely = bounds >= max(above, np.partition(bounds, -AT_ONCE)[-AT_ONCE] if n > FEW else -np.inf)
        found = self._fill_wanted_domains(likely, offer, feasible) if likely.any() else []
        needed = bounds >= max(above, found[-1].score if len(found) == MOST_FITS else -np.inf)
        return self._fill_wanted_domains(needed, offer, feasible) if (needed & ~likely).any() else found

    def _fill_wanted_domains(self, wanted: NDArray[np.bool_], offer: Room, feasible: NDArray[np.bool_]) -> list[Fit]:
        """Fill only the wanted domains, and return the best three with their gangs.

        wanted: (feasible domains,) bool.
        """
        chosen = feasible.nonzero()[0]
        number = np.full(len(feasible) + 1, -1)  # the last one stands for no domain
        number[chosen] = np.arange(len(chosen))
        domain = number[offer.domain]
        at = (domain >= 0).nonzero()[0]
        domain, sub_domain = domain[at], _rank_sub_domains(self.topology, self.scores, offer.level, at)
        if not wanted.all():
            mine = wanted[domain]
            at, sub_domain, domain = at[mine], sub_domain[mine], (wanted.cumsum() - 1)[domain[mine]]
        return self._fill_domains(offer.level, at, domain, sub_domain)

    def _fill_domains(
        self, level: Level | None, at: NDArray[np.int64], domain: NDArray[np.int64], sub_domain: NDArray[np.int64]
    ) -> list[Fit]:
        """Fill each domain with a gang, and return the best three gangs.

        at, domain, sub_domain: (k,) each. at: candidates. domain: numbers from 0 to n - 1. sub_domain:
        ranks of the candidates' sub-domains.
        """
        scores, size = self.scores, self.size
        at, domain = self._sort_candidates(at, domain, sub_domain)
        first = find_run_begins(domain).nonzero()[0]
        take = _fill_in_order(scores.room[at], domain, first, size)
        used = take > 0
        parts = scores.score_gangs(at[used], take[used], domain[used], level, len(first))
        tight = size * self.request.gpus_per_node / np.maximum(np.add.reduceat(scores.free[at], first), 1)
        parts["fit"] = 0.5 * parts["fit"] + 0.5 * np.minimum(tight, 1.0)
        total = scores.compute_total(parts)
        ends = [*first[1:].tolist(), len(at)]
        fits = []
        for best in _find_highest_scores(total, MOST_FITS):
            whole = slice(first[best], ends[best])
            mine = used[whole]
            rows, takes = _replace_last_node(scores, at[whole], at[whole][mine], take[whole][mine])
            fits.append(Fit(level, scores.rows[rows], takes, float(total[best]), scores.compute_points(parts, best)))
        return fits

    def _sort_candidates(
        self, at: NDArray[np.int64], domain: NDArray[np.int64], sub_domain: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (k,) the candidates in the order in which they are filled, and (k,) their domains.

        They are sorted by domain, coarse score, roomiest sub-domain, score and row.
        """
        coarse = SCORE_BINS - (self.scores.compute_node_scores(self.size)[at] * SCORE_BINS).astype(np.int64)
        filled = domain * (SCORE_BINS + 1) + coarse
        if (sub_domain[1:] > sub_domain[:-1]).all():
            order = sort_rows_by_keys(filled)  # the sort keeps the order of equals, so the other keys change nothing
        else:
            order = sort_rows_by_keys(self.rank[at], sub_domain, filled)
        return at[order], domain[order]


def _find_best_nodes(scores: NodeScores, at: NDArray[np.int64], size: int) -> list[Fit]:
    """Return the best three nodes that hold the whole gang.

    at: (k,) candidates that can hold it.
    """
    parts, total = scores.compute_node_parts(size), scores.compute_node_scores(size)
    found, takes = at[_find_highest_scores(total[at], MOST_FITS)].tolist(), np.array([size])
    return [
        Fit(Level.NODE, scores.rows[node : node + 1], takes, float(total[node]), scores.compute_points(parts, node))
        for node in found
    ]


def _bound_highest_sums(
    logs: NDArray[np.float64], count: int, domain: NDArray[np.integer[Any]], feasible: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return (feasible domains,) upper bounds of the sum of the highest `count` numbers of each domain.

    domain: (c,) the domain of each number, -1 for none.

    For any threshold t, that sum is at most `count * t` plus the amounts by which the domain's numbers
    exceed t. The bound is exact if t is the smallest of the highest numbers. All domains share one t, so the
    bound is tight if the domains are similar.
    """
    some = logs[:: 1 + len(logs) // SAMPLE]
    above = max(0, len(some) - 1 - count * int(np.count_nonzero(feasible)) * len(some) // len(logs))
    level = float(np.partition(some, above)[above])
    excess = np.bincount(domain + 1, np.maximum(logs, level) - level, len(feasible) + 1)[1:]
    return np.asarray(np.minimum(count * level + excess[feasible], 0.0))


def _find_highest_scores(total: NDArray[np.float64], count: int) -> list[int]:
    """Return the indices of the highest scores, the first of equal scores first."""
    if len(total) > 4 * count:
        edge = np.partition(total, -count)[-count]
        among = (total >= edge).nonzero()[0]
        order: list[int] = among[(-total[among]).argsort(kind="stable")][:count].tolist()
        return order
    order = (-total).argsort(kind="stable")[:count].tolist()
    return order


def _rank_sub_domains(
    topology: Topology, scores: NodeScores, level: Level | None, at: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return (k,) the rank of the sub-domain that each node is in.

    The roomiest sub-domain has the first rank. A sub-domain is the node's domain of the next tighter
    known level. Nodes without one come last.
    """
    tighter = LEVELS[1 : LEVELS.index(level)]
    for sub in reversed(tighter):
        assert sub is not None
        inner = topology.domain[sub][scores.rows[at]].astype(np.int64)
        if (inner >= 0).any():
            members = _sum_per_domain(inner, scores.room[at], len(topology.domain_names[sub]))
            if inner.min() >= 0 and (members[inner] == members[inner[0]]).all():
                return inner
            rank = np.full(len(members) + 1, len(members))
            rank[sort_rows_by_keys(members.max() - members)] = np.arange(len(members))
            return rank[inner]
    return np.zeros(len(at), np.int64)


def _fill_in_order(
    room: NDArray[np.int64], domain: NDArray[np.int64], first: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    """Return (k,) members taken from each node, in order, until every domain has `size`.

    first: the index at which each domain begins.
    """
    capped = np.minimum(room, size)
    before = capped.cumsum() - capped
    left = size + before[first][domain] - before
    takes: NDArray[np.int64] = np.minimum(np.maximum(left, 0), capped)
    return takes


def _replace_last_node(
    scores: NodeScores, pool: NDArray[np.int64], chosen: NDArray[np.int64], takes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Replace a partly filled last node with the unused node of `pool` that fits the remaining members best."""
    left = int(takes[-1])
    if len(chosen) < 2 or left == scores.room[chosen[-1]]:
        return chosen, takes
    spare = np.setdiff1d(pool[scores.room[pool] >= left], chosen[:-1])
    best = spare[np.argmax(scores.compute_node_scores(left)[spare])]
    return np.append(chosen[:-1], best), takes
