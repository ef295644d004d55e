"""The growth of elastic gangs: how many members a gang gets, and on which nodes they may be.

Above its minimum, a gang uses only nodes without the advice to avoid or drain them. It grows only
while its expected progress grows: size × probability that none of its nodes interrupts it. In each
domain of the widest allowed level, nodes join in order of the risk that one member on them brings.
The gang gets the size with the most expected progress over all domains. If no domain can hold the gang
without advised nodes, the gang stays at its minimum. It then competes for all candidates, as a gang of
fixed size does.

The risk that racks and power domains add is left to the scores. It is a tenth of the risk of their
worst member.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import Gang, PlacementRequest
from fleetcast.fleet.topology import Topology
from fleetcast.placement.machines.domains import sum_room_by_domain
from fleetcast.placement.machines.fit import compute_largest_size, get_widest_level
from fleetcast.placement.machines.scorers import NodeScores
from fleetcast.placement.machines.view import Advice

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]


class GangSize(msgspec.Struct, frozen=True):
    """The size of a gang, and the candidates that it may use.

    size: members, 0 if an elastic gang fits nowhere. keeps: (c,) the candidates that the gang may use. None
    means all. If the gang is smaller than it could be, `advised` and `risky` say why. advised: the advice
    about left-out nodes that have room. risky: whether it left out other nodes whose risk costs more
    progress than their members add.
    """

    size: int
    keeps: Mask | None = None
    advised: frozenset[Advice] = frozenset()
    risky: bool = False


def compute_gang_size(request: PlacementRequest, topology: Topology, scores: NodeScores) -> GangSize:
    """Return the size that a gang gets, and the candidates that it may use, before it is placed."""
    gang, level = request.members, get_widest_level(request)
    if gang.min == gang.desired:
        return GangSize(gang.min)
    offer = sum_room_by_domain(level, topology, scores.rows, scores.room)
    most = compute_largest_size(gang, offer.most_members)
    if most <= gang.min:
        return GangSize(most)
    healthy = scores.advice == Advice.NONE
    room = np.where(healthy, scores.room, 0)
    size, keeps = _choose_size_and_nodes(gang, offer.domain.astype(np.int64), room, -scores.survives)
    size = max(size, gang.min)
    out = scores.advice[~healthy & (scores.room > 0)] if size < most else np.zeros(0, np.int8)
    held = compute_largest_size(gang, sum_room_by_domain(level, topology, scores.rows, room).most_members)
    return GangSize(size, keeps if size > gang.min else None, frozenset(map(Advice, out.tolist())), risky=size < held)


def _choose_size_and_nodes(gang: Gang, domain: Rows, room: Rows, loss: NDArray[np.float64]) -> tuple[int, Mask]:
    """Return the size with the most expected progress, and (c,) the nodes that add progress.

    loss: (c,) hazard of each node.

    >>> gang, domain, room = Gang(min=1, desired=4), np.zeros(4, np.int64), np.ones(4, np.int64)
    >>> size, keeps = _choose_size_and_nodes(gang, domain, room, np.array([0.1, 0.6, 0.1, 0.1]))
    >>> size, keeps.tolist()  # the risky node costs a factor of exp(-0.6), more than the 4 / 3 that it adds
    (3, [True, False, True, True])
    """
    keeps = np.zeros(len(domain), bool)
    at = np.flatnonzero((room > 0) & (domain >= 0))
    if not len(at):
        return 0, keeps
    at = at[np.lexsort((loss[at] / room[at], domain[at]))]
    own = domain[at]
    members, lost = _cumsum_within_domains(own, room[at]), _cumsum_within_domains(own, loss[at])
    steps = (np.minimum(members, gang.desired) - gang.min) // gang.step
    sizes = np.where(members >= gang.min, gang.min + steps * gang.step, 0).astype(np.int64)
    progress = np.where(sizes > 0, np.log(np.maximum(sizes, 1)) - lost, -np.inf)
    last = _find_best_per_domain(own, progress)
    keeps[at] = (np.arange(len(at)) <= last[own]) & np.isfinite(progress[last[own]])
    return int(sizes[progress.argmax()]), keeps


def _cumsum_within_domains(domain: Rows, values: NDArray[np.int64] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (k,) running sums that start again with each domain. `domain` is sorted."""
    sums = np.cumsum(values, dtype=np.float64)
    first = np.flatnonzero(np.diff(domain, prepend=-1))
    before = np.repeat((sums - values)[first], np.diff(first, append=len(domain)))
    return np.asarray(sums - before)


def _find_best_per_domain(domain: Rows, progress: NDArray[np.float64]) -> Rows:
    """Return (domains,) the index of each domain's highest progress. Among equal values it is the first."""
    best = np.full(int(domain.max()) + 1, -np.inf)
    np.maximum.at(best, domain, progress)
    at = np.flatnonzero(progress == best[domain])[::-1]
    last = np.zeros(len(best), np.int64)
    last[domain[at]] = at  # of several the one written last stays, the first
    return last
