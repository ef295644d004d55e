"""The view of the fleet on which one decision is made: consistent arrays over its nodes."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from operator import is_
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.topology import DOMAIN_LEVELS, Level, Topology
from fleetcast.placement.machines.slots import NO_PARTS, WHOLE, HeldParts, Milli, count_true_per_row

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The properties of the n nodes of a topology, as columns."""

    gpu_model: NDArray[np.int32]  # (n,) index into `gpu_models`, -1 unknown
    gpu_models: tuple[str, ...]
    gpu_memory_gib: NDArray[np.float64]  # (n,) NaN = unknown
    cpus: NDArray[np.float64]  # (n,) NaN = unknown
    host_memory_gib: NDArray[np.float64]  # (n,) NaN = unknown
    row: dict[str, int]
    power: NDArray[np.int32]  # (n,) number of the power domain, -1 unknown
    pool: NDArray[np.int32]  # (n,) index into `pools`
    pools: tuple[str, ...]

    @classmethod
    def from_topology(cls, topology: Topology) -> "Inventory":
        models: dict[str, int] = {"": -1}
        powers: dict[str, int] = {"": -1}
        pools: dict[str, int] = {}
        nodes = topology.nodes
        pool = np.array([pools.setdefault(node.pool, len(pools)) for node in nodes], np.int32)
        return cls(
            gpu_model=np.array([models.setdefault(node.gpu_model, len(models) - 1) for node in nodes], np.int32),
            gpu_models=tuple(models)[1:],
            gpu_memory_gib=_mask_unknown([node.gpu_memory_gib for node in nodes]),
            cpus=_mask_unknown([node.cpus for node in nodes]),
            host_memory_gib=_mask_unknown([node.host_memory_gib for node in nodes]),
            row={node.name: row for row, node in enumerate(nodes)},
            power=np.array([powers.setdefault(node.power_domain, len(powers) - 1) for node in nodes], np.int32),
            pool=pool,
            pools=tuple(pools),
        )


def _mask_unknown(values: list[float] | list[int]) -> NDArray[np.float64]:
    """Return the values as a column in which zero becomes NaN. Zero and NaN both mean unknown."""
    column = np.array(values, np.float64)
    return np.where(column > 0, column, np.nan)


POWER = "power"  # a node's power domain, which is no level of the topology
SHARED_LEVELS = {"rack": Level.RACK, "power": POWER, "rail": Level.RAIL_GROUP}  # shared hazard → level


class FleetDomains:
    """Facts that follow from the topology and the power domains of the n nodes.

    names: (n,) the names of the nodes, as objects. numbers: level → (n,) the domain of each node, -1 if unknown. Level
    None has one domain, with all nodes. ranges: level → the lowest and the highest of these numbers. The lowest is -1
    if any is unknown.
    """

    def __init__(self, topology: Topology, inventory: Inventory) -> None:
        size = len(topology)
        self.topology, self.inventory = topology, inventory
        self._gpus = topology.gpus
        self.names = np.array(topology.names, object)
        numbers: dict[str | None, Ints] = {level: topology.domain[level].astype(np.int64) for level in DOMAIN_LEVELS}
        numbers |= {POWER: inventory.power.astype(np.int64), None: np.zeros(size, np.int64)}
        self.numbers: Mapping[str | None, Ints] = numbers
        self.ranges = {
            level: (int(numbers.min(initial=0)), int(numbers.max(initial=-1)))
            for level, numbers in self.numbers.items()
        }
        self._within: dict[tuple[str | None, str], bool] = {}
        self._shares_all: dict[Level | None, bool] = {}
        self._by_row: dict[Level | None, bool] = {}

    @cached_property
    def fewest_gpus(self) -> int:
        """The GPUs of the smallest node, free or not. It is 0 without nodes."""
        return int(self._gpus.min()) if len(self._gpus) else 0

    @cached_property
    def common_gpus(self) -> int | None:
        """The GPUs of each node if all nodes have as many, otherwise None."""
        return self.fewest_gpus if len(self._gpus) and (self._gpus == self.fewest_gpus).all() else None

    @cached_property
    def most_nodes(self) -> dict[Level | None, int]:
        """Level → the nodes of its largest domain."""
        known = {level: np.bincount(self.numbers[level] + 1)[1:] for level in DOMAIN_LEVELS}
        found: dict[Level | None, int] = {level: int(count.max(initial=0)) for level, count in known.items()}
        return found | {None: len(self._gpus), Level.NODE: 1}

    @cached_property
    def shared_levels(self) -> dict[str, str]:
        """Shared hazard → level, for the levels of which any domain is known."""
        return {name: level for name, level in SHARED_LEVELS.items() if self.ranges[level][1] >= 0}

    @cached_property
    def place(self) -> Ints:
        """(n,) the place of each node in an order in which neighbours are near each other in the topology."""
        order = np.lexsort([np.arange(len(self._gpus)), *(self.numbers[level] for level in DOMAIN_LEVELS)])
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return place

    @cached_property
    def single_node_levels(self) -> frozenset[str]:
        """The levels at which each node has a domain of its own, numbered in the order of the nodes."""
        return frozenset(
            level
            for level in DOMAIN_LEVELS
            if self.ranges[level][0] >= 0 and (self.numbers[level][1:] > self.numbers[level][:-1]).all()
        )

    def is_within(self, level: Level | None, other: str) -> bool:
        """Return whether each domain of a level lies in one known domain of another level.

        level: a level above the node.
        """
        if (level, other) not in self._within:
            self._within[level, other] = self._lies_within(level, other)
        return self._within[level, other]

    def is_filled_by_row(self, level: Level | None) -> bool:
        """Return whether the next tighter known level has one node in each domain, in the order of the nodes.

        Then no sub-domain of this level is filled before another one.
        """
        if level not in self._by_row:
            tighter = reversed(DOMAIN_LEVELS[: DOMAIN_LEVELS.index(level)] if level else DOMAIN_LEVELS)
            sub = next((sub for sub in tighter if self.ranges[sub][1] >= 0), None)
            self._by_row[level] = sub in self.single_node_levels
        return self._by_row[level]

    def shares_all_hazards(self, level: Level | None) -> bool:
        """Return whether each domain of a level lies in one domain of each of the `shared_levels`."""
        if level not in self._shares_all:
            self._shares_all[level] = all(self.is_within(level, shared) for shared in self.shared_levels.values())
        return self._shares_all[level]

    def _lies_within(self, level: Level | None, other: str) -> bool:
        known = self.numbers[level] >= 0
        inner, outer = self.numbers[level][known], self.numbers[other][known]
        parent = np.full(int(inner.max(initial=-1)) + 1, -1)
        parent[inner] = outer
        return bool((outer >= 0).all() and (parent[inner] == outer).all())


NOT_GIVEN = cast(Inventory, None)
NO_ADVICE = cast(NDArray[np.int8], None)


class Advice(IntEnum):
    """The advice that a node's forecast gives to its operators."""

    NONE = 0
    AVOID = 1  # place nothing large here
    DRAIN = 2


class Hearing(IntEnum):
    """The freshness of the telemetry of a node's GPUs, as evidence of whether they are free.

    The numbers are those of the board's `node.hearing`.
    """

    FRESH = 0  # a GPU sample arrived lately
    STALE = 1  # none arrived lately
    UNHEARD = 2  # none ever arrived, though the site has exporters
    UNCONFIRMED = 3  # the site has no exporters: the word of its scheduler counts


def mask_placeable_nodes(state: NDArray[np.int8], hearing: NDArray[np.int8] | None) -> NDArray[np.bool_]:
    """Return (n,) whether a node is in service, and its telemetry is neither stale nor missing.

    hearing: (n,). None if telemetry does not matter.
    """
    serving = state == NodeState.IN_SERVICE
    found: NDArray[np.bool_] = serving if hearing is None else serving & ~np.isin(hearing, UNSURE)
    return found


UNSURE = (Hearing.STALE, Hearing.UNHEARD)


@dataclass(frozen=True, slots=True)
class RiskByTime:
    """The risk of nodes within several horizons.

    p_fail, p_slow: (horizon, n) probabilities within each of horizons_s, NaN if unknown. gpu_temp_c:
    (n,) temperature of each node's hottest GPU.
    """

    horizons_s: tuple[float, ...]
    p_fail: NDArray[np.float64]
    p_slow: NDArray[np.float64]
    gpu_temp_c: NDArray[np.float64]


MAX_REMEMBERED = 64


class ViewMemo:
    """A cache of results that are computed from parts of a view.

    A result is reused only for the same objects, not for equal ones. domains: the facts of the last topology.
    """

    def __init__(self) -> None:
        self.domains: FleetDomains | None = None
        self._known: dict[Hashable, tuple[tuple[object, ...], Any]] = {}

    def get_or_compute(self, key: Hashable, parts: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """Return the result of `make` for these parts, from the cache if it was computed before.

        key: names the result, the number of parts, and any other value that it depends on. Arrays among the parts
        become read-only.
        """
        known = self._known.get(key)
        if known is not None and all(map(is_, known[0], parts)):
            return known[1]
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        for part in parts:
            if isinstance(part, np.ndarray):
                part.flags.writeable = False  # who changed it would not be seen
        self._known[key] = parts, (made := make())
        return made


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The state of the fleet for one decision, as arrays over the n nodes of `topology`.

    The arrays never change. NaN means unknown, and counts neither as the worst value nor as the best.
    """

    topology: Topology
    milli: Milli  # (n, g) thousandths of the GPU that are usable and unoccupied
    usable: NDArray[np.bool_]  # (n, g) the GPU exists, answers and is in no unknown use
    state: NDArray[np.int8]  # (n,) NodeState
    p_fail: NDArray[np.float64]  # (n,) probability within `risk_horizon_s`
    p_slow: NDArray[np.float64]  # (n,) likewise
    reason: dict[int, str]  # row → first reason sentence, of risky nodes
    holders: NDArray[np.int32]  # (n, g) index into `jobs`, -1 nobody
    jobs: tuple[str, ...]
    free_cpus: NDArray[np.float64]
    free_host_memory_gib: NDArray[np.float64]
    risk_horizon_s: int = 3600
    risk: "RiskByTime | None" = None  # at more horizons; without it the hazard is even
    usual_run_s: Mapping[int, float] = field(default_factory=dict)  # GPUs of a job (0: any) → median run time
    as_of_ms: int = 0
    generation: int = 0
    models: tuple[tuple[str, str], ...] = ()
    unknown_use: NDArray[np.bool_] | None = None  # (n, g) at work, and no job event tells by what
    inventory: Inventory = NOT_GIVEN  # made from the topology when not given
    advice: NDArray[np.int8] = NO_ADVICE  # (n,) Advice; none when not given
    hearing: NDArray[np.int8] | None = None  # (n,) Hearing; None: nobody asks for it
    withheld: NDArray[np.bool_] | None = None  # (n,) a window or a reservation keeps the node now
    parts: HeldParts = NO_PARTS  # of GPUs that several jobs may share; such a GPU's holder is the first of them
    memo: ViewMemo = field(default_factory=ViewMemo, repr=False, compare=False)  # views made of this one share it
    free: NDArray[np.bool_] = field(init=False)  # (n, g) all of the GPU is; follows from `milli`
    free_gpus: NDArray[np.int64] = field(init=False)  # (n,) how many of them

    def __post_init__(self) -> None:
        object.__setattr__(self, "free", self.milli == WHOLE)
        object.__setattr__(self, "free_gpus", count_true_per_row(self.free))
        if self.inventory is NOT_GIVEN:
            object.__setattr__(self, "inventory", Inventory.from_topology(self.topology))
        if self.advice is NO_ADVICE:
            object.__setattr__(self, "advice", np.zeros(len(self.topology), np.int8))

    def __len__(self) -> int:
        return len(self.topology)

    @property
    def domains(self) -> FleetDomains:
        """The facts of the topology, which are computed once for each topology."""
        found = self.memo.domains
        if found is None or found.topology is not self.topology or found.inventory is not self.inventory:
            found = self.memo.domains = FleetDomains(self.topology, self.inventory)
        return found

    @property
    def in_service(self) -> NDArray[np.bool_]:
        """(n,) whether something may be placed on a node.

        The node is in service and, at a site with exporters, has sent telemetry lately.
        """
        return mask_placeable_nodes(self.state, self.hearing)

    @property
    def is_open(self) -> NDArray[np.bool_]:
        """(n,) whether a node is in service and not closed by a window or reservation.

        Any request may use its free GPUs.
        """
        return self.in_service if self.withheld is None else self.in_service & ~self.withheld
