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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import Gang, PlacementRequest
from fleetcast.fleet.topology import Level, Topology
from fleetcast.placement.columns import sort_rows_by_keys, sort_rows_descending
from fleetcast.placement.machines.domains import GangBounds, Room, sum_per_domain
from fleetcast.placement.machines.scorers import LEVELS, NodeScores, Part

SCORE_BINS = 20
MOST_NARROW = 1_000  # domains whose keys fit into 16 bits, for which numpy has a much faster sort
MOST_FITS = 3
Choose = Callable[[int], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""A function from the number of a gang to its node rows, and the members on each of them."""
FEW = 32  # domains that are filled together
AT_ONCE = 8  # of more, those of the highest bounds come first: mostly no other can win


class Fit(msgspec.Struct, frozen=True):
    """One feasible placement of a gang, with its score.

    rows: (k,) node rows. takes: (k,) members on each node. points: the contribution of each part to the
    score.
    """

    level: Level | None
    rows: NDArray[np.int64]
    takes: NDArray[np.int64]
    score: float
    points: dict[str, float]


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
        offer = search.sum_room(level)
        if offer.most_members < size:
            continue
        above = found[-1].score if len(found) == MOST_FITS else -np.inf
        if len(found) == MOST_FITS and scores.has_score_bounds and search.bounds.bound_level_score(offer) < above:
            continue
        fits = search.find_level_fits(offer, above)
        if not fits:
            continue
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
    def bounds(self) -> GangBounds:
        return GangBounds(self.request, self.scores, self.size)

    def sum_room(self, level: Level | None) -> Room:
        """Sum the room of the candidates by domain, as `sum_room_by_domain` does."""
        scores = self.scores
        if level is Level.NODE:
            return Room(level, np.arange(len(scores.rows)), scores.room)
        lowest, highest = scores.domains.ranges[level]
        if lowest == highest == 0:  # one domain with all nodes
            return Room(level, *self._all_room)
        domain = scores.domains.numbers[level].take(scores.rows)
        if lowest >= 0 and scores.is_room_uniform:  # then it is enough to count
            return Room(level, domain, np.bincount(domain, minlength=highest + 1) * scores.most_room)
        return Room(level, domain, sum_per_domain(domain, scores.room, max(highest + 1, 1)))

    @cached_property
    def _all_room(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(c,) zeros, the domains of a level with one domain, and (1,) its room."""
        scores = self.scores
        room = len(scores.rows) * scores.most_room if scores.is_room_uniform else int(scores.room.sum())
        return np.zeros(len(scores.rows), np.int64), np.array([room])

    @cached_property
    def rank(self) -> NDArray[np.int64]:
        """(c,) rank of each candidate by score, the best first. Among equal scores the first comes first."""
        order = sort_rows_descending(self.scores.compute_node_scores(self.size))
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return rank

    def find_level_fits(self, offer: Room, above: float = -np.inf) -> list[Fit]:
        """Return the best three domains of a level, each with its gang.

        Domains that score less than `above` may be missing.
        """
        feasible = offer.members >= self.size
        if offer.level is Level.NODE:
            return _find_best_nodes(self.scores, feasible.nonzero()[0], self.size)
        n = int(np.count_nonzero(feasible))
        if (n <= FEW and not np.isfinite(above)) or not self.scores.is_gang_score_independent:
            return self._fill_wanted_domains(None, offer, feasible)
        bounds = self.bounds.bound_domain_scores(offer, feasible, above)
        if bounds.item(bounds.argmax()) < above:
            return []
        likely = bounds >= max(above, np.partition(bounds, -AT_ONCE)[-AT_ONCE] if n > FEW else -np.inf)
        found = self._fill_wanted_domains(likely, offer, feasible) if likely.any() else []
        needed = bounds >= max(above, found[-1].score if len(found) == MOST_FITS else -np.inf)
        return self._fill_wanted_domains(needed, offer, feasible) if (needed & ~likely).any() else found

    def _fill_wanted_domains(
        self, wanted: NDArray[np.bool_] | None, offer: Room, feasible: NDArray[np.bool_]
    ) -> list[Fit]:
        """Fill only the wanted domains, and return the best three with their gangs.

        wanted: (feasible domains,) bool. None means all.
        """
        scores, level = self.scores, offer.level
        if scores.are_gangs_even(self.size) and scores.domains.is_filled_by_row(level):
            chosen = feasible.nonzero()[0]
            return self._fill_evenly(offer, chosen if wanted is None else chosen[wanted])
        if scores.domains.ranges[level][0] >= 0 and np.count_nonzero(feasible) == len(feasible):
            at, domain = np.arange(len(offer.domain)), offer.domain
        else:
            chosen = feasible.nonzero()[0]
            number = np.full(len(feasible) + 1, -1)  # the last one stands for no domain
            number[chosen] = np.arange(len(chosen))
            domain = number[offer.domain]
            at = (domain >= 0).nonzero()[0]
            domain = domain[at]
        sub_domain = _rank_sub_domains(self.topology, scores, level, at)
        if wanted is not None and not wanted.all():
            mine = wanted[domain]
            at, domain = at[mine], (wanted.cumsum() - 1)[domain[mine]]
            sub_domain = None if sub_domain is None else sub_domain[mine]
        return self._fill_domains(level, at, domain, sub_domain, len(feasible))

    def _fill_domains(
        self,
        level: Level | None,
        at: NDArray[np.int64],
        domain: NDArray[np.integer[Any]],
        sub_domain: NDArray[np.int64] | None,
        most: int,
    ) -> list[Fit]:
        """Fill each domain with a gang, and return the best three gangs.

        at, domain, sub_domain: (k,) each. at: candidates. domain: numbers from 0 to n - 1. sub_domain:
        ranks of the candidates' sub-domains. None if they do not change the order. most: at least n.
        """
        at, domain = self._sort_candidates(at, domain, sub_domain, most)
        begins = domain.searchsorted(np.arange(int(domain[-1]) + 2))
        scores, size = self.scores, self.size
        first = begins[:-1]
        used, takes = _fill_in_order(scores.room.take(at), domain, first, size, scores.is_room_uniform)
        chosen, gang = at.take(used), domain.take(used)
        parts = scores.score_gangs(chosen, takes, gang, level, len(first))
        tight = size * self.request.gpus_per_node / np.maximum(np.add.reduceat(scores.free.take(at), first), 1)
        parts["fit"] = 0.5 * parts["fit"] + 0.5 * np.minimum(tight, 1.0)
        ends = gang.searchsorted(np.arange(len(begins)))

        def choose(best: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            mine, pool = slice(ends[best], ends[best + 1]), at[begins[best] : begins[best + 1]]
            found, members = _replace_last_node(scores, pool, chosen[mine], takes[mine])
            return scores.rows.take(found), members

        return self._list_fits(level, parts, choose)

    def _sort_alike_candidates(self, level: Level | None) -> NDArray[np.int64]:
        """Return the rows of the candidates for gangs that `are_gangs_even`, by domain, coarse score and row.

        The order of all nodes depends on their risk and domains alone, so decisions share it.
        """
        scores, domains = self.scores, self.scores.domains
        span, parts = scores.count_fewest_nodes(self.size), scores.score_filled_nodes(self.size)

        def sort() -> NDArray[np.int64]:
            score = scores.add_to_chances(scores.chances.weigh_for_span(span).copy(), *parts)
            keys = _make_fill_keys(domains.numbers[level], score, domains.ranges[level][1])
            return np.asarray(keys.argsort(kind="stable"))

        key = ("order", level, span, *parts)
        order: NDArray[np.int64] = scores.memo.get_or_compute(key, (scores.chances, domains), sort)
        return order.take(scores.passes.take(order).nonzero()[0])

    def _list_fits(self, level: Level | None, parts: dict[str, Part], choose: Choose) -> list[Fit]:
        """Return the best three gangs, from the parts of the scores of all gangs."""
        total, fits = self.scores.compute_total(parts), []
        for best in _find_highest_scores(total, MOST_FITS):
            points = self.scores.compute_points(parts, best)
            fits.append(Fit(level, *choose(best), total.item(best), points))
        return fits

    def _fill_evenly(self, offer: Room, chosen: NDArray[np.int64]) -> list[Fit]:
        """Fill domains with gangs that `are_gangs_even`, as `_fill_domains` would.

        chosen: (n,) domains that can hold a gang, ascending.
        """
        scores, size, level = self.scores, self.size, offer.level
        rows = self._sort_alike_candidates(level)
        first = scores.domains.numbers[level].take(rows).searchsorted(chosen)
        nodes = rows.take(first[:, None] + np.arange(scores.count_fewest_nodes(size)))
        parts = scores.score_even_gangs(nodes, level, size)
        free = offer.members.take(chosen) // scores.most_room * scores.most_free
        parts["fit"] = 0.5 * parts["fit"] + size * self.request.gpus_per_node * 0.5 / free
        takes = scores.room[: nodes.shape[1]]  # all have the same room
        return self._list_fits(level, parts, lambda best: (nodes[best], takes))

    def _sort_candidates(
        self, at: NDArray[np.int64], domain: NDArray[np.integer[Any]], sub_domain: NDArray[np.int64] | None, most: int
    ) -> tuple[NDArray[np.int64], NDArray[np.integer[Any]]]:
        """Return (k,) the candidates in the order in which they are filled, and (k,) their domains.

        They are sorted by domain, coarse score, roomiest sub-domain, score and row. most: at least the number of
        domains.
        """
        score, whole = self.scores.compute_node_scores(self.size), len(at) == len(self.scores.rows)
        filled = _make_fill_keys(domain, score if whole else score.take(at), most)
        if sub_domain is None or (sub_domain[1:] > sub_domain[:-1]).all():
            order = filled.argsort(kind="stable")  # keeps the order of equals, so the other keys change nothing
        else:
            order = sort_rows_by_keys(self.rank[at], sub_domain, filled + SCORE_BINS)
        return order if whole else at.take(order), domain.take(order)


def _make_fill_keys(domain: NDArray[np.integer[Any]], score: NDArray[np.float64], highest: int) -> NDArray[Any]:
    """Return (k,) keys in whose order domains are filled: by domain, then by coarse score, the best first.

    Scores are coarse, so that nodes of one sub-domain stay together. highest: at least the highest domain.
    """
    kind = np.int16 if highest < MOST_NARROW else np.int64
    keys: NDArray[Any] = domain.astype(kind)
    keys *= SCORE_BINS + 1
    keys -= (score * SCORE_BINS).astype(kind)
    return keys


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
) -> NDArray[np.int64] | None:
    """Return (k,) the rank of the sub-domain that each node is in. None if the ranks are the nodes' own order.

    The roomiest sub-domain has the first rank. A sub-domain is the node's domain of the next tighter
    known level. Nodes without one come last.
    """
    tighter = LEVELS[1 : LEVELS.index(level)]
    for sub in reversed(tighter):
        assert sub is not None
        if scores.is_room_uniform and sub in scores.domains.single_node_levels:
            return None
        inner = topology.domain[sub][scores.rows[at]].astype(np.int64)
        if (inner >= 0).any():
            members = sum_per_domain(inner, scores.room[at], len(topology.domain_names[sub]))
            if inner.min() >= 0 and (members[inner] == members[inner[0]]).all():
                return inner
            rank = np.full(len(members) + 1, len(members))
            rank[sort_rows_by_keys(members.max() - members)] = np.arange(len(members))
            return rank[inner]
    return np.zeros(len(at), np.int64)


def _fill_in_order(
    room: NDArray[np.int64], domain: NDArray[np.integer[Any]], first: NDArray[np.int64], size: int, uniform: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (u,) the nodes that are used if nodes are filled in order until each domain has `size` members.

    The nodes are indices into k. The second array is (u,) the members on each of them. first: the index at which
    each domain begins. uniform: whether all nodes have the same room.
    """
    if uniform:  # then each domain uses equally many nodes
        each = int(room[0])
        span = -(-size // each)
        takes = np.full((len(first), span), each)
        takes[:, -1] = size - each * (span - 1)
        return (first[:, None] + np.arange(span)).ravel(), takes.ravel()
    capped = np.minimum(room, size)
    before = capped.cumsum() - capped
    left = (before.take(first) + size).take(domain) - before
    take = np.minimum(np.maximum(left, 0), capped)
    used = take.nonzero()[0]
    return used, take.take(used)


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
