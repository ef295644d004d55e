"""PoolInventory: the pools of machines of a fleet, and the pools in which an attempt runs or may run.

    it runs, and its nodes are known     the pools of its nodes, in proportion to its GPUs on them
    it waits and asks for a pool         that pool
    it asks for GPU models               the pool that has them, if only one has
    the fleet has one pool               that pool
    anything else                        UNASSIGNED

An attempt that waits for a quota is UNASSIGNED until it runs, because more machines would not start it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetcast.fleet.held_gpus import find_rank_share
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.topology import Topology
from fleetcast.fleet.wait_reasons import waits_for_quota

EVERYTHING = "all"
UNASSIGNED = "unassigned"
Weights = tuple[tuple[str, int], ...]  # pool, and how much of an attempt is in it


@dataclass(frozen=True, slots=True)
class PoolInventory:
    """The pools of machines of a topology.

    pools: node → pool. models: pool → GPU models of its nodes, in lower case. gpus: pool → number of
    GPUs.
    """

    pools: dict[str, str] = field(default_factory=dict)
    models: dict[str, list[str]] = field(default_factory=dict)
    gpus: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_topology(cls, topology: Topology) -> "PoolInventory":
        """Build the inventory of a topology's pools.

        A pool named "all" is skipped, because the name "all" stands for the whole fleet.
        """
        nodes = [node for node in topology.nodes if node.pool != EVERYTHING]
        models: dict[str, set[str]] = {node.pool: set() for node in nodes}
        gpus: Counter[str] = Counter()
        for node in nodes:
            models[node.pool].add(node.gpu_model.casefold())
            gpus[node.pool] += node.gpus
        pools = {node.name: node.pool for node in nodes}
        return cls(pools, {name: sorted(models[name]) for name in models}, dict(gpus))

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the fields as a list, for a snapshot."""
        return [dict(self.pools), dict(self.models), dict(self.gpus)]

    def list_allowed_pools(self, attempt: JobAttempt) -> tuple[str, ...]:
        """Return the pools in which an attempt may run, sorted. An empty tuple means any pool."""
        asks = attempt.submission
        if asks is not None and asks.pool in self.models:
            return (asks.pool,)
        wanted = {name.casefold() for name in (asks.gpu_model, *asks.gpu_models) if name} if asks is not None else set()
        found = [pool for pool, models in self.models.items() if wanted.intersection(models)]
        return tuple(sorted(found or (self.models if len(self.models) == 1 else ())))

    def weigh_pools(self, attempt: JobAttempt) -> Weights:
        """Return the pools among which an attempt's GPUs are divided, each with its weight.

        Returns () if no inventory is known.
        """
        if not self.models:
            return ()
        if attempt.started_ms is not None or attempt.ranks:
            ran = self._compute_pool_weights(attempt)
            if ran:
                return ran
        allowed = self.list_allowed_pools(attempt)
        is_over_quota = attempt.started_ms is None and waits_for_quota(attempt.queued_reason)
        return ((UNASSIGNED if len(allowed) != 1 or is_over_quota else allowed[0], 1),)

    def _compute_pool_weights(self, attempt: JobAttempt) -> Weights:
        amounts = [(rank.node, len(rank.gpus) * find_rank_share(attempt, rank)) for rank in attempt.ranks if rank.gpus]
        found: Counter[str] = Counter()
        for node, amount in amounts or [(node, 1) for node in attempt.hosts]:
            found[self.pools.get(node, UNASSIGNED)] += amount
        return () if set(found) == {UNASSIGNED} else tuple(sorted(found.items()))


def divide_by_weights(amount: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Divide a whole number in proportion to weights. The largest remainders are rounded up.

    >>> divide_by_weights(9, {"a": 1, "b": 3}), divide_by_weights(1, {"a": 1, "b": 1})
    ({'a': 2, 'b': 7}, {'a': 1, 'b': 0})
    """
    total = sum(weights.values())
    parts = {name: amount * weight // total for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: (-(amount * weights[name] % total), name))
    for name in by_remainder[: amount - sum(parts.values())]:
        parts[name] += 1
    return parts
