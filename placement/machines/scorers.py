"""Scorers for nodes (the order in which to fill a domain) and for whole gangs (which domain wins).

Each scorer has a name and gives a score in [0, 1].

risk     chance that nothing interrupts the gang: the product of (1 - p_fail) over its nodes, less the risk that
         shared racks, power domains and rails add if they hold two or more of its nodes (fleet/shared_domains.py)
slow     chance that no node slows down (a gang runs at the pace of its slowest member); a hot node starts
         slow
fit      how little usable room is broken: half best fit, half the change of the fragmentation of FGD (Weng
         et al., "Beware of Fragmentation", ATC 2023), with whole-GPU shapes of 1, 2, 4, ... GPUs, equally
         likely; where the newest requests are known, how little the potential grows over them
         (placement/machines/potential.py)
packing  how near the members are to each other: the level of the domain and the number of nodes
quiet    only for heavy host I/O: the node's other GPUs are idle (they share PCIe and disks)
"""

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import MAX_GPUS_PER_NODE, PlacementRequest
from fleetcast.fleet.shared_domains import compute_shared_hazard
from fleetcast.fleet.topology import Level
from fleetcast.placement.columns import compute_median, find_range, find_run_begins, is_ascending, sort_rows_by_keys
from fleetcast.placement.machines.chances import CHANCE_WEIGHTS, compute_node_chances, estimate_run_s
from fleetcast.placement.machines.filters import Screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.potential import PotentialGrowth
from fleetcast.placement.machines.slots import WHOLE
from fleetcast.placement.machines.view import ClusterView

WEIGHTS = {**CHANCE_WEIGHTS, "fit": 2.0, "packing": 2.0, "quiet": 2.0}
GANG_PARTS = ("risk", "slow", "fit", "packing")  # of every request
GANG_WEIGHTS = {name: WEIGHTS[name] for name in GANG_PARTS}
GANG_WEIGHT = sum(GANG_WEIGHTS.values())
PLUGIN_WEIGHT = 1.0

ALL = slice(None)
Candidates = NDArray[np.int64] | slice  # slice: all of them, in order
Floats = NDArray[np.float64]  # an alias: an inner function would make the type at each call

LEVELS: tuple[Level | None, ...] = (*Level, None)  # None: anywhere, nodes without topology included
LEVEL_SCORE = {level: 1 - index / (len(LEVELS) - 1) for index, level in enumerate(LEVELS)}
Part = float | NDArray[np.float64]
MOST_IN_TABLE = 64  # free GPUs of a node


@lru_cache(maxsize=64)
def compute_fragments(gpus: int) -> NDArray[np.float64]:
    """Return (gpus + 1,) the expected free GPUs that a random shape cannot use.

    Index k is for a node with k free GPUs.

    >>> compute_fragments(4).round(2).tolist()  # shapes 1, 2, 4: one free GPU serves only the first of them
    [0.0, 0.67, 0.67, 1.33, 0.0]
    """
    shapes = 2 ** np.arange(int(np.log2(max(gpus, 1))) + 1)
    left: NDArray[np.float64] = (np.arange(gpus + 1)[:, None] % shapes[None, :]).mean(axis=1)
    return left


def compute_node_fit(
    free: NDArray[np.int64], taken: NDArray[np.int64], gpus: NDArray[np.int64] | int
) -> NDArray[np.float64]:
    """Return (k,) scores in [0, 1] for taking `taken` of the `free` GPUs of nodes with `gpus` GPUs.

    free, taken: (k,). gpus: (k,), or one number for all nodes. The score is higher if less usable room is
    broken up.
    """
    if not len(free):
        return np.zeros(0)
    most, left = int(free.max()), free - taken
    if not isinstance(gpus, int) and (gpus == gpus[0]).all():
        gpus = int(gpus[0])
    if most <= MOST_IN_TABLE and isinstance(gpus, int):
        return _make_fit_table(most, gpus)[free * (most + 1) + left]
    return _compute_fit_score(compute_fragments(most), free, left, gpus)


def find_node_fit(free: int, taken: int, gpus: int) -> float:
    """Return the score of `compute_node_fit` for one node with at most `MOST_IN_TABLE` free GPUs."""
    return _make_fit_table(free, gpus).item(free * (free + 1) + free - taken)


def _compute_fit_score(
    broken: NDArray[np.float64], free: NDArray[np.int64], left: NDArray[np.int64], gpus: NDArray[np.int64] | int
) -> NDArray[np.float64]:
    size = np.maximum(gpus, 1)
    score: NDArray[np.float64] = 0.5 * (1 - left / size) + 0.25 + 0.25 * (broken[free] - broken[left]) / size
    return score.clip(0.0, 1.0)


@lru_cache(maxsize=64)
def _make_fit_table(most: int, gpus: int) -> NDArray[np.float64]:
    """Return ((most + 1) ** 2,) the scores of `compute_node_fit` for nodes with `gpus` GPUs.

    The score for `free` free GPUs of which `left` remain is at index free * (most + 1) + left.
    """
    free, left = np.divmod(np.arange((most + 1) ** 2), most + 1)
    return _compute_fit_score(compute_fragments(most), free, left, gpus)


def count_free_parts(view: ClusterView, milli: int) -> NDArray[np.int64]:
    """Return (n,) how many more parts of `milli` thousandths fit on partly taken GPUs.

    If `milli` is a whole GPU, the counts are 0.
    """
    if milli == WHOLE:
        return np.zeros(len(view), np.int64)
    return np.asarray(np.where(view.milli < WHOLE, view.milli // milli, 0).sum(axis=1, dtype=np.int64))


class NodeScores:
    """The scores of the candidates of one request, as arrays over c candidate rows.

    room: members that each candidate can host. most_room: the largest of these, at least 1. is_room_uniform: whether
    all candidates can host as many. gpus: (c,) the GPUs of each candidate, or one number if all nodes of the fleet have
    as many. extra: name → scores of further scorers. has_score_bounds: whether the score of a gang can be bounded. It
    cannot if a scorer of the operator replaces a built-in part. is_gang_score_independent: whether it can be bounded,
    and depends only on the gang's own nodes.
    """

    def __init__(self, request: PlacementRequest, view: ClusterView, options: Options, screened: Screen) -> None:
        rows = screened.passes.nonzero()[0]
        self.request = request
        self.domains = view.domains
        self.rows = rows
        self.room = screened.room.take(rows)
        self.free = screened.free_gpus.take(rows)
        least_room, self.most_room = find_range(self.room) if len(rows) else (1, 1)
        self.is_room_uniform = least_room == self.most_room
        self._least_free, self.most_free = find_range(self.free) if len(rows) else (MAX_GPUS_PER_NODE, 0)
        self.growth = PotentialGrowth(request, view, options.demand, rows) if options.demand is not None else None
        common = self.domains.common_gpus
        self.gpus = view.topology.gpus[rows].astype(np.int64) if common is None else common
        self.horizon_s = estimate_run_s(request, view)
        self.chances, self.passes = compute_node_chances(view, options, self.horizon_s), screened.passes
        self.extra: dict[str, Floats] = {}
        self.weights, self.total_weight = GANG_WEIGHTS, GANG_WEIGHT
        if options.scorers or request.host_offload:
            self._add_scorers(request, view, options)
        self.has_score_bounds = self.extra.keys().isdisjoint(GANG_PARTS)
        bits = [max(free, 1).bit_length() for free in (self._least_free, self.most_free)]
        alike = bits[0] == bits[1]  # `compute_fragments` has the same shapes for both
        self.is_gang_score_independent = self.has_score_bounds and self.growth is None and bool(len(rows)) and alike
        self._view, self.memo = view, view.memo
        self._of_nodes: dict[int, NDArray[np.float64]] = {}
        self._filled: dict[int, tuple[Part, Part]] = {}

    def _add_scorers(self, request: PlacementRequest, view: ClusterView, options: Options) -> None:
        """Add the parts that not every request has, with their weights."""
        for name, scorer in options.scorers:
            self.extra[name] = np.clip(np.nan_to_num(scorer(request, view, options)[self.rows], nan=0.5), 0, 1)
        if request.host_offload:
            held = np.count_nonzero(view.holders[self.rows] >= 0, axis=1)
            self.extra["quiet"] = 1 - held / np.maximum(self.gpus, 1)
        self.weights = GANG_WEIGHTS | {name: WEIGHTS.get(name, PLUGIN_WEIGHT) for name in self.extra}
        self.total_weight = sum(self.weights.values())

    @cached_property
    def survives(self) -> Floats:
        """(c,) the log probability that each candidate does not fail."""
        return np.asarray(self.chances.logs[0].take(self.rows))

    @cached_property
    def keeps_pace(self) -> Floats:
        """(c,) the log probability that each candidate does not slow down."""
        return np.asarray(self.chances.logs[1].take(self.rows))

    @cached_property
    def advice(self) -> NDArray[np.int8]:
        """(c,) the advice of each candidate's forecast to its operators, such as to drain it."""
        return self._view.advice[self.rows]

    @cached_property
    def free_part_counts(self) -> NDArray[np.int64]:
        """(c,) parts of the requested size that still fit on partly taken GPUs of each candidate."""
        return count_free_parts(self._view, self.request.milli)[self.rows]

    def compute_node_parts(self, size: int) -> dict[str, Part]:
        """Return the parts of each candidate's score if it hosts its share of `size` members.

        The result is name → (c,), higher is better. It is one number if it is the same for all candidates.
        """
        span, chances = self.count_fewest_nodes(size), self.chances
        if span == 1:
            risk, slow = chances.of_one_node.take(self.rows, 1)
        else:
            risk, slow = np.exp(span * chances.logs.take(self.rows, 1))
        fit, packing = self.score_filled_nodes(size)
        return {"risk": risk, "slow": slow, "fit": fit, "packing": packing, **self.extra}

    def score_filled_nodes(self, size: int) -> tuple[Part, Part]:
        """Return the fit and the packing of candidates that are filled with members of a gang of this size.

        They are numbers if they are the same for all candidates.
        """
        if size not in self._filled:
            self._filled[size] = self._score_uncached_filled_nodes(size)
        return self._filled[size]

    def _score_uncached_filled_nodes(self, size: int) -> tuple[Part, Part]:
        free = self.most_free
        uniform = self.is_room_uniform and self._least_free == free <= MOST_IN_TABLE and isinstance(self.gpus, int)
        if uniform and size > self.most_room and self.growth is None and self.request.milli == WHOLE:
            taken = self.most_room * self.request.gpus_per_node
            return find_node_fit(free, taken, int(self.gpus)), self.most_room / size
        members = np.minimum(self.room, size)
        return self.score_fit(ALL, members), members / size

    def score_fit(self, at: Candidates, members: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (k,) fit scores in [0, 1] for placing `members` on the candidates `at`.

        The score is higher if less usable room is broken up.
        """
        if self.growth is not None:
            return self.growth.score_members(np.arange(len(self.rows))[at], members)
        gpus = self.gpus if isinstance(self.gpus, int) else self.gpus[at]
        return compute_node_fit(self.free[at], self._count_whole_gpus(at, members), gpus)

    def _count_whole_gpus(self, at: Candidates, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (k,) how many wholly free GPUs of the candidates `at` these members would use, at least in part."""
        if self.request.milli == WHOLE:
            return members * self.request.gpus_per_node
        on_whole = WHOLE // self.request.milli
        return np.asarray(-(-np.maximum(members - self.free_part_counts[at], 0) // on_whole))

    def compute_node_scores(self, size: int) -> NDArray[np.float64]:
        """Return (c,) the weighted mean of `compute_node_parts`, in [0, 1]."""
        if size not in self._of_nodes:
            self._of_nodes[size] = self._compute_uncached_scores(size)
        return self._of_nodes[size]

    def _compute_uncached_scores(self, size: int) -> Floats:
        if not self.has_score_bounds:  # a scorer of the operator replaces a built-in part
            return self.compute_total(self.compute_node_parts(size))
        score = self.chances.weigh_for_span(self.count_fewest_nodes(size)).take(self.rows)
        return self.add_to_chances(score, *self.score_filled_nodes(size))

    def add_to_chances(self, score: Floats, fit: Part, packing: Part) -> Floats:
        """Add the other parts to the weighted chances of nodes, in place, and return their scores."""
        score += WEIGHTS["fit"] * fit
        score += WEIGHTS["packing"] * packing
        for name, part in self.extra.items():
            score += self.weights[name] * part
        score /= self.total_weight
        return score

    def bound_room(self, level: Level | None) -> int:
        """Return an upper bound of the members that any domain of this level hosts, by its number of nodes."""
        return self.most_room * self.domains.most_nodes[level]

    def count_fewest_nodes(self, size: int) -> int:
        """Return how many nodes `size` members need if each has as much room as the roomiest candidate."""
        return -(-size // self.most_room)

    def are_gangs_even(self, size: int) -> bool:
        """Return whether each gang of this size fills the same number of alike nodes."""
        filled = self.is_room_uniform and size % self.most_room == 0 and not self.extra
        return filled and isinstance(self.score_filled_nodes(size)[0], float)

    def score_even_gangs(self, rows: NDArray[np.int64], level: Level | None, size: int) -> dict[str, Part]:
        """Return what `score_gangs` returns, for gangs that `are_gangs_even`. A part is one number if all share it.

        rows: (n, nodes of a gang) node rows.
        """
        n, span = rows.shape
        survives, keeps_pace = self.chances.logs.take(rows, 1)
        domain = np.arange(n).repeat(span)
        if not self.domains.shares_all_hazards(level):
            shared = self.compute_shared_risk(rows.ravel(), domain, np.full(n, span), level)
        else:
            shared = self._sum_shared_hazards(survives.min(1))
        return {
            "risk": np.exp(np.bincount(domain, survives.ravel(), n) - shared),
            "slow": np.exp(np.bincount(domain, keeps_pace.ravel(), n)),
            "fit": self.score_filled_nodes(size)[0],
            "packing": 0.5 * LEVEL_SCORE[level] + 0.5,
        }

    def _sum_shared_hazards(self, least: Floats) -> Floats:
        """Return (n,) the additional hazard of gangs of which each shares all levels of `shared_levels`.

        least: (n,) the lowest log probability of not failing among the members.
        """
        worst, found = np.maximum(self._usual_survival - least, 0.0), np.zeros(len(least))
        for name in self.domains.shared_levels:
            found += compute_shared_hazard(name, worst, self.horizon_s)
        return found

    def score_gangs(
        self,
        at: NDArray[np.int64],
        take: NDArray[np.int64],
        domain: NDArray[np.integer[Any]],
        level: Level | None,
        n: int,
    ) -> dict[str, Part]:
        """Return the parts of the scores of gangs, one gang in each domain: name → (n,), unweighted.

        at: (k,) candidates. take: (k,) members on them. domain: (k,) domains of this level, 0 to n - 1, ascending.
        """
        size = max(1, int(take.sum()) // max(1, n))
        fit, used = self._score_taken_fit(at, take, size), np.bincount(domain, minlength=n)
        shared, span = self.compute_shared_risk(self.rows.take(at), domain, used, level), self.count_fewest_nodes(size)
        return {
            "risk": np.exp(np.bincount(domain, self.survives.take(at), n) - shared),
            "slow": np.exp(np.bincount(domain, self.keeps_pace.take(at), n)),
            "fit": np.bincount(domain, fit * take, n) / size,
            "packing": 0.5 * LEVEL_SCORE[level] + 0.5 * span / np.maximum(used, 1),
            **{name: np.bincount(domain, part[at] * take, n) / size for name, part in self.extra.items()},
        }

    def _score_taken_fit(self, at: NDArray[np.int64], take: NDArray[np.int64], size: int) -> Part:
        """Return (k,) fit scores of the nodes of gangs of this size.

        If each node is filled, these are the scores that the nodes already have as candidates.
        """
        filled = self.is_room_uniform and (size <= self.most_room or size % self.most_room == 0)
        if not filled or not self.is_gang_score_independent:
            return self.score_fit(at, take)
        fit = self.score_filled_nodes(size)[0]
        return fit if isinstance(fit, float) else fit.take(at)

    @cached_property
    def _usual_survival(self) -> float:
        """The median log probability that a candidate does not fail."""
        return compute_median(self.survives)

    @cached_property
    def weighted_logs(self) -> Floats:
        """(c,) the weighted sum of both log chances of each candidate."""
        return self.chances.weighted_logs.take(self.rows)

    def compute_shared_risk(
        self, rows: NDArray[np.int64], domain: NDArray[np.integer[Any]], used: NDArray[np.int64], level: Level | None
    ) -> NDArray[np.float64]:
        """Return (n,) the additional hazard of gangs with several members in one rack, power domain or rail.

        rows: (k,) node rows. domain: (k,) domains of this level, 0 to n - 1, ascending, one gang in each. used:
        (n,) the number of these nodes in each domain.
        """
        found = np.zeros(len(used))
        survives, usual = self.chances.logs[0].take(rows), self._usual_survival
        worst: NDArray[np.float64] | None = None
        for name, shared in self.domains.shared_levels.items():
            if not self.domains.is_within(level, shared):
                excess = np.maximum(usual - survives, 0.0)  # of the hazard above the usual one
                found += self._compute_hazard_by_parts(name, shared, rows, domain, excess, len(used))
                continue
            if worst is None:  # each gang lies in one domain, so that its worst member is the worst of the domain
                least = np.minimum.reduceat(survives, used.cumsum() - used)
                worst, several = np.maximum(usual - least, 0.0), used > 1
            found += compute_shared_hazard(name, worst, self.horizon_s) * several
        return found

    def _compute_hazard_by_parts(
        self,
        name: str,
        shared: str,
        rows: NDArray[np.int64],
        domain: NDArray[np.integer[Any]],
        excess: NDArray[np.float64],
        n: int,
    ) -> NDArray[np.float64]:
        """Return (n,) the additional hazard at a shared level of which a gang may use several domains.

        rows, domain, excess: (k,) each.
        """
        lowest, highest = self.domains.ranges[shared]
        own, gang, hazard = self.domains.numbers[shared].take(rows), domain, excess
        if lowest < 0:
            known = own >= 0
            own, gang, hazard = own[known], domain[known], excess[known]
        keys = gang * (highest + 1) + own
        if not is_ascending(keys):
            order = sort_rows_by_keys(keys)
            keys, gang, hazard = keys[order], gang[order], hazard[order]
        first = find_run_begins(keys).nonzero()[0]
        if not len(first):
            return np.zeros(n)
        more = np.concatenate((first[1:], [len(keys)])) - first > 1
        worst = np.maximum.reduceat(hazard, first)[more]
        return np.asarray(np.bincount(gang[first[more]], compute_shared_hazard(name, worst, self.horizon_s), n))

    def compute_total(self, parts: Mapping[str, Part]) -> NDArray[np.float64]:
        """Return (n,) the weighted mean of the parts, of which at least the first differs between the n."""
        first, *others = parts.items()
        score = np.asarray(self.weights[first[0]] * first[1])
        for name, part in others:
            score += self.weights[name] * part
        score /= self.total_weight
        return score

    def compute_points(self, parts: Mapping[str, Part], domain: int) -> dict[str, float]:
        """Return the contribution of each part to the score of one domain. They sum to the score."""
        return {
            name: round(
                self.weights[name] * (part if isinstance(part, float) else part.item(domain)) / self.total_weight, 4
            )
            for name, part in parts.items()
        }
