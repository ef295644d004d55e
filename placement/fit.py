"""Gang fit: where a whole gang goes, all or nothing. One fit over c candidate nodes (each can host a member):

1. The size of an elastic gang is known before (placement/growth.py).
2. For each allowed level, from the tightest: a domain is feasible if the sum of its nodes' room holds the size.
3. All feasible domains at once take nodes, best score first, until the size is reached: one sort and one segmented
   cumulative sum, no loop over nodes. Scores are coarse here, so that nodes of one sub-domain stay together.
4. Each domain's gang is scored as a whole, with best fit of the domain itself; the best domain wins.
5. A preferred level stops at the first level with a feasible domain; else all levels compete by score.
6. In the winning domain the last, partly filled node is exchanged for the one that its remainder fits best.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.requests import Gang, PlacementRequest
from fleet.topology import Level, Topology
from placement.scorers import LEVELS, NodeScores

SCORE_BINS = 20


@dataclass(frozen=True, slots=True)
class Fit:
    """One feasible placement. rows: (k,) node rows, takes: (k,) members on each; points sum to the score."""

    level: Level | None
    rows: NDArray[np.int64]
    takes: NDArray[np.int64]
    score: float
    points: dict[str, float]


@dataclass(frozen=True, slots=True)
class Room:
    """What a level offers: members that each domain can host."""

    level: Level | None
    domain: NDArray[np.int64]  # (c,) domain of each candidate, -1 unknown
    members: NDArray[np.int64]  # (domains,)

    @property
    def most(self) -> int:
        return int(self.members.max(initial=0))


def room_at(level: Level | None, topology: Topology, rows: NDArray[np.int64], room: NDArray[np.int64]) -> Room:
    """Sum the room of the candidates by domain."""
    if level is None:
        domain, count = np.zeros(len(rows), np.int64), 1
    elif level is Level.NODE:
        return Room(level, np.arange(len(rows)), room)
    else:
        domain, count = topology.domain[level][rows].astype(np.int64), len(topology.domain_names[level])
    known = domain >= 0
    members = np.bincount(domain[known], room[known], max(count, 1)).astype(np.int64)
    return Room(level, domain, members)


def largest_size(gang: Gang, room: int) -> int:
    """Members of the largest gang that `room` holds, 0 when not even the smallest does.

    >>> largest_size(Gang(min=2, desired=8, step=2), 7)
    6
    """
    if room < gang.min:
        return 0
    return gang.min + (min(room, gang.desired) - gang.min) // gang.step * gang.step


def widest_level(request: PlacementRequest) -> Level | None:
    return request.required


def allowed_levels(request: PlacementRequest) -> list[Level | None]:
    """Levels to try, tightest first: from the preferred (or the node) to the required one (or anywhere)."""
    last = LEVELS.index(request.required)
    first = LEVELS.index(request.preferred) if request.preferred else 0
    return list(LEVELS[min(first, last) : last + 1])


def best_fits(request: PlacementRequest, topology: Topology, scores: NodeScores, size: int) -> list[Fit]:
    """The best placement of `size` members first, then up to two that lost; empty when the gang fits nowhere."""
    widest = room_at(widest_level(request), topology, scores.rows, scores.room)
    if size == 0:
        return []
    levels = [Level.NODE] if size == 1 else allowed_levels(request)
    found: list[Fit] = []
    for level in levels:
        offer = widest if level is widest.level else room_at(level, topology, scores.rows, scores.room)
        if offer.most < size:
            continue
        found += _fits_of_level(request, topology, scores, offer, size)
        if request.preferred:
            break
    found.sort(key=lambda fit: -fit.score)  # stable: the tighter level, the earlier domain wins a tie
    return list(_distinct(found))[:3]


def _distinct(fits: list[Fit]) -> Iterator[Fit]:
    seen: set[bytes] = set()
    for fit in fits:
        key = np.sort(fit.rows).tobytes()
        if key not in seen:
            seen.add(key)
            yield fit


def _fits_of_level(
    request: PlacementRequest, topology: Topology, scores: NodeScores, offer: Room, size: int
) -> list[Fit]:
    """The best three domains of a level, each with its gang."""
    if offer.level is Level.NODE:
        return _fits_of_nodes(scores, np.flatnonzero(offer.members >= size), size)
    feasible = offer.members >= size
    index = np.cumsum(feasible) - 1  # domain -> place among the feasible ones
    n = int(feasible.sum())
    at = np.flatnonzero(feasible[offer.domain] & (offer.domain >= 0))
    domain = index[offer.domain[at]]
    order = _order(topology, scores, offer.level, at, domain, size)
    at, domain = at[order], domain[order]
    take = _greedy(scores.room[at], domain, size, n)
    used = take > 0
    chosen, taken, of = at[used], take[used], domain[used]
    parts = scores.of_gangs(chosen, taken, of, offer.level, n)
    tight = size * request.gpus_per_node / np.maximum(np.bincount(domain, scores.free[at], n), 1)
    parts["fit"] = 0.5 * parts["fit"] + 0.5 * np.minimum(tight, 1.0)
    total = scores.total(parts)
    fits = []
    for best in _best(total, 3):
        mine = of == best
        rows, takes = _tighten_last(scores, at[domain == best], chosen[mine], taken[mine])
        fits.append(Fit(offer.level, scores.rows[rows], takes, float(total[best]), scores.points(parts, best)))
    return fits


def _fits_of_nodes(scores: NodeScores, at: NDArray[np.int64], size: int) -> list[Fit]:
    """The same where every domain is one node; at: (k,) candidates that hold the whole gang."""
    parts = {name: part[at] for name, part in scores.node_parts(size).items()}
    total = scores.total(parts)
    return [
        Fit(Level.NODE, scores.rows[at[[best]]], np.array([size]), float(total[best]), scores.points(parts, best))
        for best in _best(total, 3)
    ]


def _best(total: NDArray[np.float64], count: int) -> list[int]:
    """Indices of the highest scores, the first of equals first."""
    if len(total) > 4 * count:
        edge = np.partition(total, -count)[-count]
        among = np.flatnonzero(total >= edge)
        order: list[int] = among[np.argsort(-total[among], kind="stable")][:count].tolist()
        return order
    order = np.argsort(-total, kind="stable")[:count].tolist()
    return order


def _order(
    topology: Topology,
    scores: NodeScores,
    level: Level | None,
    at: NDArray[np.int64],
    domain: NDArray[np.int64],
    size: int,
) -> NDArray[np.int64]:
    """(k,) fill order: by domain, coarse score, sub-domain with the most room, score, row."""
    score = scores.of_nodes(size)[at]
    by_score = np.argsort(-score, kind="stable")
    coarse = SCORE_BINS - np.floor(score * SCORE_BINS).astype(np.int64)
    rank, ranks = _sub_domain_rank(topology, scores, level, at)
    key = (domain * (SCORE_BINS + 1) + coarse) * ranks + rank
    order: NDArray[np.int64] = by_score[np.argsort(key[by_score], kind="stable")]
    return order


def _sub_domain_rank(
    topology: Topology, scores: NodeScores, level: Level | None, at: NDArray[np.int64]
) -> tuple[NDArray[np.int64], int]:
    """(k,) rank of each node's next tighter known domain, the roomiest first; nodes without one come last."""
    tighter = LEVELS[1 : LEVELS.index(level)]
    for sub in reversed(tighter):
        assert sub is not None
        inner = topology.domain[sub][scores.rows[at]]
        if (inner >= 0).any():
            members = np.bincount(inner[inner >= 0], scores.room[at][inner >= 0], len(topology.domain_names[sub]))
            rank = np.empty(len(members) + 1, np.int64)
            rank[np.argsort(-members, kind="stable")] = np.arange(len(members))
            rank[-1] = len(members)
            return rank[inner], len(members) + 1
    return np.zeros(len(at), np.int64), 1


def _greedy(room: NDArray[np.int64], domain: NDArray[np.int64], size: int, n: int) -> NDArray[np.int64]:
    """(k,) members taken from each node, in order, until every domain has `size`; `domain` is sorted."""
    capped = np.minimum(room, size)
    before = np.cumsum(capped) - capped
    start = np.zeros(n, np.int64)
    first = np.flatnonzero(np.diff(domain, prepend=-1))
    start[domain[first]] = before[first]
    return np.clip(size - (before - start[domain]), 0, capped)


def _tighten_last(
    scores: NodeScores, pool: NDArray[np.int64], chosen: NDArray[np.int64], takes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Exchange the last node, where it is not filled, for the unused one of `pool` that suits the remainder best."""
    left = int(takes[-1])
    if len(chosen) < 2 or left == scores.room[chosen[-1]]:
        return chosen, takes
    spare = np.setdiff1d(pool, chosen[:-1])
    spare = spare[scores.room[spare] >= left]
    best = spare[np.argmax(scores.of_nodes(left)[spare])]
    return np.append(chosen[:-1], best), takes
