"""The domains of a level: the room in each of them, and upper bounds of the scores of gangs in them.

With these bounds the search for a gang's place skips levels and domains that cannot win.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import WHOLE_GPU, PlacementRequest
from fleetcast.fleet.topology import Level, Topology
from fleetcast.placement.machines.scorers import GANG_WEIGHT, LEVEL_SCORE, NodeScores

SAMPLE = 500  # numbers that stand for all of them
ROUNDING = 1e-9  # of sums of numbers of at most 1

Floats = NDArray[np.float64]  # an alias: an inner function would make the type at each call
Part = float | Floats
Bound = TypeVar("Bound", float, Floats)


class Room(msgspec.Struct, frozen=True):
    """The number of members that fit into each domain of one level."""

    level: Level | None
    domain: NDArray[np.integer[Any]]  # (c,) domain of each candidate, -1 unknown
    members: NDArray[np.int64]  # (domains,)

    @property
    def most_members(self) -> int:
        return self.members.item(self.members.argmax()) if len(self.members) else 0


def sum_room_by_domain(
    level: Level | None, topology: Topology, rows: NDArray[np.int64], room: NDArray[np.int64]
) -> Room:
    """Sum the room of the candidates by domain."""
    if level is None:
        return Room(level, np.zeros(len(rows), np.int64), room.sum(keepdims=True))
    if level is Level.NODE:
        return Room(level, np.arange(len(rows)), room)
    domain, count = topology.domain[level].take(rows), len(topology.domain_names[level])
    return Room(level, domain, sum_per_domain(domain, room, max(count, 1)))


def sum_per_domain(domain: NDArray[np.integer[Any]], room: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return (count,) sums by domain. Nodes without a domain (-1) do not count."""
    return np.bincount(domain + 1, room, count + 1)[1:].astype(np.int64)


@dataclass(frozen=True)
class GangBounds:
    """Upper bounds of the scores of gangs of `size` members."""

    request: PlacementRequest
    scores: NodeScores
    size: int

    @cached_property
    def _level_chances(self) -> float:
        """An upper bound of the weighted chances of any gang.

        The weighted sum of both logarithms is bounded over the best nodes, each logarithm by that of the best node.
        """
        span, scores = self.scores.count_fewest_nodes(self.size), self.scores
        both = float(np.partition(scores.weighted_logs, -span)[-span:].sum())
        best = (span * logs.item(logs.argmax()) for logs in (scores.survives, scores.keeps_pace))
        return self._bound_chances(both, *best)

    def bound_level_score(self, offer: Room) -> float:
        """Return an upper bound of the score of any gang on a level.

        A level whose bound is too low to win is not searched.
        """
        return float(self._bound_score(offer.level, self._level_chances, self._find_largest_share(offer)))

    def bound_domain_scores(
        self, offer: Room, feasible: NDArray[np.bool_], above: float = -np.inf
    ) -> NDArray[np.float64]:
        """Return (feasible domains,) upper bounds of the score of any gang in each domain.

        These bounds are mostly lower than the bound of the whole level, but cost more work.

        The nodes that survive best are seldom the nodes that keep their pace best. So the first step bounds the
        weighted sum of both logarithms over the best nodes of each domain. If a domain's bound reaches `above`, the
        second step also bounds each logarithm by itself.
        """
        tight: Part = self.size / offer.members[feasible] if self.request.milli == WHOLE_GPU else 1.0

        def bound_sums(logs: Floats) -> Floats:
            return _bound_highest_sums(logs, self.scores.count_fewest_nodes(self.size), offer.domain, feasible)

        both = bound_sums(self.scores.weighted_logs)
        found = np.asarray(self._bound_score(offer.level, self._bound_chances(both), tight))
        if found.max() < above:
            return found
        chances = self._bound_chances(both, bound_sums(self.scores.survives), bound_sums(self.scores.keeps_pace))
        return np.asarray(self._bound_score(offer.level, chances, tight))

    def _bound_chances(self, both: Bound, survives: Part = 0.0, keeps_pace: Part = 0.0) -> Bound:
        """Return upper bounds of the weighted sum of a gang's chances, from upper bounds of their logarithms.

        both: bounds of the weighted sum of both logarithms. The sum of the chances is convex in both logarithms. So
        it is highest where one of them is as high as it can be.
        """
        risk, slow = self.scores.weights["risk"], self.scores.weights["slow"]
        exp, least, most = (math.exp, min, max) if isinstance(both, float) else (np.exp, np.minimum, np.maximum)
        last_pace = least(keeps_pace, (both - risk * survives) / slow)
        last_survives = least(survives, (both - slow * keeps_pace) / risk)
        found: Bound = most(
            risk * exp(survives) + slow * exp(last_pace), risk * exp(last_survives) + slow * exp(keeps_pace)
        )
        return found

    def _bound_score(self, level: Level | None, chances: Part, tight: Part) -> Part:
        """Return an upper bound of a gang's score from its weighted chances and the share of its domain that it takes.

        All other parts of the score are assumed to be as good as they can be.
        """
        weights = self.scores.weights
        rest = self._best_rest + weights["packing"] * (0.5 * LEVEL_SCORE[level] + 0.5)
        return (chances + weights["fit"] * 0.5 * tight + rest) / self.scores.total_weight + ROUNDING

    @cached_property
    def _best_rest(self) -> float:
        """An upper bound of the weighted parts of the score that depend on neither the chances nor the domain.

        These are the mean fit of the gang's members, and the parts beyond `GANG_WEIGHTS`, which not every request
        has. The fit assumes that all but one of the gang's nodes are filled.
        """
        fit, _ = self.scores.score_filled_nodes(self.size)
        full = fit if isinstance(fit, float) else float(fit.max())
        mean_fit = full + (1 - full) * min(self.size, self.scores.most_room - 1) / self.size
        others = self.scores.total_weight - GANG_WEIGHT
        return others + self.scores.weights["fit"] * 0.5 * mean_fit

    def _find_largest_share(self, offer: Room) -> float:
        """Return the largest share of a domain's room that a gang can take. It is 1 for parts of GPUs."""
        if self.request.milli != WHOLE_GPU:
            return 1.0
        members = offer.members
        return self.size / int(members[0] if len(members) == 1 else members[members >= self.size].min())


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
