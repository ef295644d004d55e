"""A simulation that packs pods onto machines until they are full.

It measures which share of the GPUs a policy allocates. Pods arrive one by one, and no pod ever
leaves. A policy scores each way to place a pod. The scores are stored for each kind of pod. A node
gets new scores only if it has changed since that kind was last evaluated. So the cost of an arrival
depends only on the number of changed nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.machines.potential import Ways, find_best_slots, list_ways, score_potential_growth
from fleetcast.placement.machines.shapes import COMMON, MemberShape, RecentShapes, ShapeDemand, make_shape_demand
from fleetcast.placement.machines.slots import WHOLE
from fleetcast.training.sets.packing_sets import Machines, PodKind, PodList

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Measure = Callable[[ShapeDemand, Ints, Floats, Ints], Floats]
Score = Callable[[MemberShape, "PackedFleet", Ints, Ways], Floats]

SOON, LATE = 250, 2000  # arrivals between two looks at the demand: as many as there were, within these


class Policy(Protocol):
    """A policy that decides where a pod goes, by scoring the ways to place it.

    begin_arrival returns whether all stored scores must be computed again. score_ways returns (ways,),
    higher is better.
    """

    def begin_arrival(self, arrived: int, shape: MemberShape) -> bool: ...

    def score_ways(self, shape: MemberShape, rows: Ints, taken: Ways) -> Floats: ...

    def choose_row(self, good: Floats) -> int: ...


@dataclass(slots=True)
class PackedFleet:
    """The free resources of the machines while pods fill them.

    changed: rows of machines in the order of their changes.
    """

    machines: Machines
    milli: Ints = field(init=False)
    cpus: Floats = field(init=False)
    memory_mib: Floats = field(init=False)
    changed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.milli = self.machines.milli.astype(np.int64)
        self.cpus, self.memory_mib = self.machines.cpus.copy(), self.machines.memory_mib.copy()

    def find_hosting_models(self, kind: PodKind) -> NDArray[np.bool_]:
        """Return (models,) whether pods of this kind may run on each GPU model."""
        return np.array([kind.shape.is_hosted_by(model) for model in self.machines.models], bool)

    def place_pod(self, kind: PodKind, row: int, slot: int) -> None:
        """Place one pod on a machine, and reduce the machine's free resources."""
        free = self.milli[row]
        if slot >= 0:
            free[slot] -= kind.shape.milli
        else:
            free[np.flatnonzero(free >= WHOLE)[: kind.shape.gpus]] = 0
        self.cpus[row] -= kind.shape.cpus
        self.memory_mib[row] -= kind.memory_mib
        self.changed.append(row)


@dataclass(slots=True)
class _KindScores:
    """The stored scores of all machines for one kind of pod.

    good: (n,) the score of the best way, -inf if there is none. slot: (n,) the slot of that way.
    """

    good: Floats
    slot: Ints
    upto: int  # of the fleet's changes


def pack_pods(
    machines: Machines, kinds: Sequence[PodKind], order: Ints, make: Callable[[PackedFleet], Policy]
) -> float:
    """Pack the arriving pods, and return the share of all GPUs that is then allocated.

    order: (arrivals,) indices into `kinds`. make: function that creates the policy.
    """
    fleet = PackedFleet(machines)
    policy = make(fleet)
    hosts = [fleet.find_hosting_models(kind)[machines.model] for kind in kinds]
    seen: dict[int, _KindScores] = {}
    allocated = 0
    for arrived, number in enumerate(order.tolist()):
        kind = kinds[number]
        if policy.begin_arrival(arrived, kind.shape):
            seen.clear()
        known = _update_cached_scores(seen, number, kind, fleet, hosts[number], policy)
        row = policy.choose_row(known.good)
        if row >= 0:
            fleet.place_pod(kind, row, int(known.slot[row]))
            allocated += kind.shape.gpus * kind.shape.milli
    return allocated / WHOLE / machines.gpus


def _update_cached_scores(
    seen: dict[int, _KindScores],
    number: int,
    kind: PodKind,
    fleet: PackedFleet,
    hosts: NDArray[np.bool_],
    policy: Policy,
) -> _KindScores:
    n = len(fleet.cpus)
    known = seen.get(number)
    if known is None:
        known = seen[number] = _KindScores(np.full(n, -np.inf), np.full(n, -1, np.int64), len(fleet.changed))
        rows = np.arange(n)
    else:
        rows = np.array(sorted(set(fleet.changed[known.upto :])), np.int64)
        known.upto = len(fleet.changed)
    if not len(rows):
        return known
    known.good[rows] = -np.inf
    rows = rows[hosts[rows] & (fleet.cpus[rows] >= kind.shape.cpus) & (fleet.memory_mib[rows] >= kind.memory_mib)]
    taken = list_ways(kind.shape, fleet.milli[rows])
    if len(taken.at):
        good = policy.score_ways(kind.shape, rows, taken)
        known.good[rows], known.slot[rows] = find_best_slots(taken, good, len(rows))
    return known


def draw_arrivals(pods: PodList, machines: Machines, load: float, seed: int) -> Ints:
    """Return (arrivals,) int64 indices of the arriving pods' kinds, in random order.

    Each pod of the list arrives once. Copies of randomly drawn pods follow until the requested GPUs are
    `load` times those of the machines.
    """
    rng = np.random.default_rng(seed)
    each = pods.compute_milli_gpus()
    drawn = np.arange(len(each))
    short = load * machines.gpus * WHOLE - each.sum()
    if short > 0 and each.any():
        clones = rng.integers(0, len(each), 4 * int(np.ceil(short / each.mean())) + 100)
        drawn = np.append(drawn, clones[: 1 + int(np.searchsorted(np.cumsum(each[clones]), short))])
    return np.asarray(pods.kind[rng.permutation(drawn)])


def find_best_row(good: Floats) -> int:
    """Return the row with the highest score. The first one wins a tie. Returns -1 if no row has room."""
    row = int(np.argmax(good))
    return row if good[row] > -np.inf else -1


class GrowthPolicy:
    """A policy that places a pod where a measure of the unusable free GPUs grows least.

    The measure is the potential, or a part of it. learns: whether the demand is learned from the
    arrivals.
    """

    def __init__(
        self, fleet: PackedFleet, measure: Measure, demand: RecentShapes, learns: bool, common: float = COMMON
    ) -> None:
        self._fleet, self._measure, self._recent, self._learns = fleet, measure, demand, learns
        self._common = common
        self._demand: ShapeDemand | None = None
        self._now = np.zeros(len(fleet.cpus))
        self._upto = self._next = 0

    def begin_arrival(self, arrived: int, shape: MemberShape) -> bool:
        due = arrived == self._next
        if due:
            self._demand = make_shape_demand(self._recent.count_members(), self._fleet.machines.models, self._common)
            self._now = self._measure_rows(np.arange(len(self._now)))
            self._next = arrived + min(max(arrived, SOON), LATE) if self._learns else -1
        else:
            rows = np.array(sorted(set(self._fleet.changed[self._upto :])), np.int64)
            self._now[rows] = self._measure_rows(rows)
        self._upto = len(self._fleet.changed)
        if self._learns:
            self._recent.add(shape)
        return due

    def _measure_rows(self, rows: Ints) -> Floats:
        fleet = self._fleet
        if self._demand is None:
            return np.zeros(len(rows))
        return self._measure(self._demand, fleet.milli[rows], fleet.cpus[rows], fleet.machines.model[rows])

    def score_ways(self, shape: MemberShape, rows: Ints, taken: Ways) -> Floats:
        if self._demand is None:
            return np.zeros(len(taken.at))
        fleet, at = self._fleet, rows[taken.at]
        after = self._measure(self._demand, taken.milli, fleet.cpus[at] - shape.cpus, fleet.machines.model[at])
        return score_potential_growth(after - self._now[at])

    def choose_row(self, good: Floats) -> int:
        return find_best_row(good)


class ScorePolicy:
    """A baseline policy that scores a way by its node and slot alone, without the demand.

    score: (shape, fleet, rows, taken) → (ways,).
    """

    def __init__(self, fleet: PackedFleet, score: Score) -> None:
        self._fleet, self._score = fleet, score

    def begin_arrival(self, arrived: int, shape: MemberShape) -> bool:
        return False

    def score_ways(self, shape: MemberShape, rows: Ints, taken: Ways) -> Floats:
        return self._score(shape, self._fleet, rows, taken)

    def choose_row(self, good: Floats) -> int:
        return find_best_row(good)


class RandomPolicy(ScorePolicy):
    """A policy that chooses a node with room, and a slot on it, at random."""

    def __init__(self, fleet: PackedFleet, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        super().__init__(fleet, lambda shape, fleet, rows, taken: self._rng.random(len(taken.at)))

    def choose_row(self, good: Floats) -> int:
        rows = np.flatnonzero(good > -np.inf)
        return int(self._rng.choice(rows)) if len(rows) else -1


def score_best_fit(shape: MemberShape, fleet: PackedFleet, rows: Ints, taken: Ways) -> Floats:
    """Return (ways,) scores, higher if fewer GPUs and CPUs remain free on the node.

    On one node, the fullest slot has the highest score. GPUs and CPUs are counted as shares of those of
    the largest node.
    """
    gpus = taken.milli.sum(axis=1) / (fleet.milli.shape[1] * WHOLE)
    cpus = (fleet.cpus[rows[taken.at]] - shape.cpus) / fleet.machines.cpus.max()
    return np.asarray(-(gpus + cpus) - _count_left_milli(taken) / (100 * WHOLE))


def score_dot_product(shape: MemberShape, fleet: PackedFleet, rows: Ints, taken: Ways) -> Floats:
    """Return (ways,) scores, higher for a smaller dot product of requested and free resources.

    Each resource is counted as a share of that of the largest node.
    """
    whole = fleet.milli.shape[1] * WHOLE
    free = fleet.milli[rows].sum(axis=1)[taken.at] / whole
    asked = shape.gpus * shape.milli / whole
    cpus = fleet.cpus[rows[taken.at]] * shape.cpus / fleet.machines.cpus.max() ** 2
    return np.asarray(-(free * asked + cpus) - _count_left_milli(taken) / (1e6 * WHOLE))


def score_packing(shape: MemberShape, fleet: PackedFleet, rows: Ints, taken: Ways) -> Floats:
    """Return (ways,) scores: slots in use come first, then idle slots of nodes in use, then idle nodes."""
    used = (fleet.milli[rows].sum(axis=1) < fleet.machines.milli[rows].sum(axis=1, dtype=np.int64))[taken.at]
    shared = (taken.slot >= 0) & (_count_left_milli(taken) < WHOLE - shape.milli)
    return np.where(shared, 2.0, used.astype(np.float64)) - _count_left_milli(taken) / (100 * WHOLE)


def _count_left_milli(taken: Ways) -> Floats:
    """Return (ways,) the milli-GPUs that remain free in the slot of the way, 0 for whole GPUs."""
    return np.where(taken.slot >= 0, taken.milli[np.arange(len(taken.at)), taken.slot], 0).astype(np.float64)
