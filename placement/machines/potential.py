"""The potential of nodes: the free GPUs that the demand could not use.

Placing members where the potential grows least packs nodes well. A shape of the recent demand can run on
a node that has enough free slots and CPUs, and a GPU model that the shape accepts. It can then use each slot
that has enough free for one of its GPUs. Otherwise it can use no slot. The free GPUs that it cannot use,
averaged over the demand, are *fragmented* (Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing
Workloads with Fragmentation Gradient Descent", ATC 2023). GPUs with too few CPUs on their node are
*stranded*: softplus(free GPUs - free CPUs / CPUs that a GPU of the demand wants). The potential is the sum
of both, in thousandths of GPUs.

Differences are rounded down to whole `BIN`s. Among equal nodes the first by name is taken. Both matter.
Noise below a bin would scatter work, and taking the first fills nodes one after the other.

Arrays are over k nodes with g slots. model: (k,) codes, -1 unknown. Unknown free CPUs (NaN) are
enough for any shape.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.shapes import MemberShape, ShapeDemand, make_member_shape
from fleetcast.placement.machines.slots import WHOLE
from fleetcast.placement.machines.view import ClusterView

BIN = 40.0  # thousandths of a GPU

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Slots = NDArray[np.int64] | NDArray[np.int16]


def count_usable_milli(demand: ShapeDemand, milli: Slots, cpus: Floats, model: Ints) -> Floats:
    """Return (k,) thousandths of GPUs that a random shape of the demand could use on each node."""
    enough = milli[:, None, :] >= demand.levels[None, :, None]
    count = np.count_nonzero(enough, axis=2)
    amount = np.einsum("kug,kg->ku", enough, milli, dtype=np.float64)
    runs = count[:, demand.level_of] >= demand.gpus
    runs &= ~(cpus[:, None] < demand.cpus)
    runs &= demand.hosts[model]
    return np.asarray(np.where(runs, amount[:, demand.level_of], 0.0) @ demand.weight)


def count_fragmented_milli(demand: ShapeDemand, milli: Slots, cpus: Floats, model: Ints) -> Floats:
    """Return (k,) thousandths of free GPUs that are of no use to a random shape of the demand."""
    return np.asarray(milli.sum(axis=1, dtype=np.int64) - count_usable_milli(demand, milli, cpus, model))


def count_stranded_milli(demand: ShapeDemand, milli: Slots, cpus: Floats) -> Floats:
    """Return (k,) thousandths of free GPUs for which a node has too few free CPUs.

    A softplus replaces the kink at zero, so the result is smooth.
    """
    if demand.cpus_per_gpu <= 0:
        return np.zeros(len(milli))
    over = milli.sum(axis=1, dtype=np.int64) / WHOLE - np.nan_to_num(cpus, nan=np.inf) / demand.cpus_per_gpu
    return np.asarray(WHOLE * np.logaddexp(0.0, over))


def compute_potential(demand: ShapeDemand, milli: Slots, cpus: Floats, model: Ints) -> Floats:
    """Return (k,) the potential of each node: its fragmented plus its stranded thousandths of GPUs."""
    return count_fragmented_milli(demand, milli, cpus, model) + count_stranded_milli(demand, milli, cpus)


@dataclass(frozen=True, slots=True)
class Ways:
    """The possible ways to place one member of a gang, one row each.

    at: (ways,) the member's node, an index into k. slot: (ways,) its GPU, -1 unless it takes a part of
    one GPU. milli: (ways, g) thousandths of GPUs that are free on the node afterwards.
    """

    at: Ints
    slot: Ints
    milli: Ints


def list_ways(shape: MemberShape, milli: Slots) -> Ways:
    """Return the ways to place one member of this shape on the nodes.

    A part of a GPU may take any slot on which it fits. Among equally full slots of a node only the first
    counts. Whole GPUs take the first free ones. A node with too few free GPUs offers no way.
    """
    if shape.gpus == 1 and shape.milli < WHOLE:
        alike = np.tril(milli[:, :, None] == milli[:, None, :], -1).any(axis=2)
        at, slot = np.nonzero((milli >= shape.milli) & ~alike)
        after = milli[at].astype(np.int64)
        after[np.arange(len(at)), slot] -= shape.milli
        return Ways(at, slot, after)
    at = np.flatnonzero(np.count_nonzero(milli >= WHOLE, axis=1) >= shape.gpus)
    return Ways(at, np.full(len(at), -1), remove_whole_gpus(milli[at], np.full(len(at), shape.gpus)))


def score_potential_growth(growth: Floats) -> Floats:
    """Return scores for how much the potential grows: minus the growth in bins, rounded down.

    growth: thousandths of GPUs.

    >>> score_potential_growth(np.array([1.0, 40.0, -39.0, -40.0])).tolist()
    [-1.0, -1.0, 0.0, 1.0]
    """
    return np.asarray(np.floor(-growth / BIN))


def find_best_slots(taken: Ways, good: Floats, nodes: int) -> tuple[Floats, Ints]:
    """Return (nodes,) the best score of any way on each node, and (nodes,) the slot of that way.

    Among equal scores the first way counts. A node without a way has the score -inf.
    """
    best = np.full(nodes, -np.inf)
    np.maximum.at(best, taken.at, good)
    equal = np.flatnonzero(good == best[taken.at])[::-1].copy()
    slot = np.full(nodes, -1, np.int64)
    slot[taken.at[equal]] = taken.slot[equal]  # of several the one written last stays, the first
    return best, slot


class PotentialGrowth:
    """A calculator of how much the potential grows when members of one request are placed on candidates.

    rows: the candidates' rows of the view.
    """

    def __init__(self, request: PlacementRequest, view: ClusterView, demand: ShapeDemand, rows: Ints) -> None:
        self._demand, self._shape = demand, make_member_shape(request)
        self._milli, self._cpus = view.milli[rows], view.free_cpus[rows]
        self._model = view.inventory.gpu_model[rows].astype(np.int64)
        self._before = compute_potential(demand, self._milli, self._cpus, self._model)

    def score_members(self, at: Ints, members: Ints) -> Floats:
        """Return (k,) scores in [0, 1] for placing members on candidates.

        A score of 0.5 means no growth of the potential. The score is higher where the potential grows less. Growth
        is counted in whole bins. at: (k,) candidates. If a node gets several parts of GPUs, the growth of the first
        counts for each of them.
        """
        shape = self._shape
        if 0 < shape.milli < WHOLE:
            found = list_ways(shape, self._milli[at])
            good, _ = find_best_slots(
                found, self._score_growth(at[found.at], found.milli, np.ones(len(found.at))), len(at)
            )
            good = np.where(np.isfinite(good), good * members, 0.0)
        else:
            good = self._score_growth(
                at, remove_whole_gpus(self._milli[at], shape.gpus * members), members.astype(np.float64)
            )
        return np.asarray(1 / (1 + np.exp(-good * BIN / WHOLE)))

    def _score_growth(self, at: Ints, milli: Ints, members: Floats) -> Floats:
        cpus = self._cpus[at] - members * self._shape.cpus
        return score_potential_growth(compute_potential(self._demand, milli, cpus, self._model[at]) - self._before[at])


def remove_whole_gpus(milli: Slots, gpus: Ints) -> Ints:
    """Return (k, g) the free thousandths after whole GPUs are taken from each node, the first free ones first.

    gpus: (k,) the number of whole GPUs to take.
    """
    enough = milli >= WHOLE
    first = enough & (np.cumsum(enough, axis=1) <= gpus[:, None])
    return np.where(first, 0, milli).astype(np.int64)
