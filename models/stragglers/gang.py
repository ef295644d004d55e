"""GangMembers: the GPUs and ports that work for each job, and the columns by which they are compared."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.models.risk.detectors import FeatureColumns
from fleetcast.models.risk.gpu_signals import GpuView, compute_cap_evidence
from fleetcast.models.risk.signals import Array

FEWEST_NODES, FEWEST_GPUS = 2, 4
GPU_CHANNELS = ("sm_clock_mhz", "usual_clock_mhz", "power_w", "power_limit_w", "sent_bytes_per_s", "cap", "model")
SETTLED_MS = 1_800_000
BEFORE = "before_bytes_per_s"  # the mean of half an hour, in `GangColumns.mean`
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class GangColumns:
    """Entities of one kind with the metrics by which gang members are compared.

    last, mean: metric -> (entity,) the newest value and the two-minute mean. node: (entity,) the row of
    the entity's node.
    """

    names: tuple[str, ...]
    node: NDArray[np.int32]
    last: dict[str, Array]
    mean: dict[str, Array]

    @classmethod
    def make_empty(cls) -> "GangColumns":
        last = dict.fromkeys((*GPU_CHANNELS, "bytes_per_s"), np.zeros(0))
        mean = dict.fromkeys(("sm_clock_mhz", "sent_bytes_per_s", "bytes_per_s", BEFORE), np.zeros(0))
        return cls((), np.zeros(0, np.int32), last, mean)

    @classmethod
    def from_gpus(cls, columns: FeatureColumns, view: GpuView, names: tuple[str, ...]) -> "GangColumns":
        """Build the columns of GPUs.

        Clocks count only while the GPU works, because an idle GPU lowers its clock.
        """
        clock = np.where(view.loaded, view.clock, np.nan)
        mean = np.where(view.loaded, columns["sm_clock_mhz_mean_2m"], np.nan)
        named = (columns[name] for name in ("power_w", "power_limit_w", "pcie_tx_bytes_per_s"))
        last = dict(
            zip(
                GPU_CHANNELS,
                (clock, view.usual_clock, *named, compute_cap_evidence(view), view.alike.trait),
                strict=True,
            )
        )
        sent, before = columns["pcie_tx_bytes_per_s_mean_2m"], columns["pcie_tx_bytes_per_s_mean_30m"]
        return cls(names, columns.node, last, {"sm_clock_mhz": mean, "sent_bytes_per_s": sent, BEFORE: before})

    @classmethod
    def from_ports(cls, columns: FeatureColumns, names: tuple[str, ...], best: Array | None = None) -> "GangColumns":
        """Build the columns of ports.

        best: (port,) the best speed that each port ever had, in bytes/s. Only ports of one speed are siblings.
        """
        last = np.nan_to_num(columns["rx_bytes_per_s"]) + np.nan_to_num(columns["tx_bytes_per_s"])
        mean = np.nan_to_num(columns["rx_bytes_per_s_mean_2m"]) + np.nan_to_num(columns["tx_bytes_per_s_mean_2m"])
        speed = np.zeros(len(names)) if best is None else np.nan_to_num(best)
        waits = {"bytes_per_s": last, "tx_wait_per_s": columns["tx_wait_per_s"], "best_bytes_per_s": speed}
        before = columns["rx_bytes_per_s_mean_30m"] + columns["tx_bytes_per_s_mean_30m"]
        waited = columns["tx_wait_per_s_mean_2m"]
        return cls(names, columns.node, waits, {"bytes_per_s": mean, "tx_wait_per_s": waited, BEFORE: before})

    def translate_nodes(self, rows: NDArray[np.int32]) -> "GangColumns":
        """Return the entities with the node rows of another table.

        rows: (old row,) -> new row, -1 to leave the entities of this node out.
        """
        if not len(self.node):
            return self
        node = rows[self.node]
        keep = node >= 0
        if keep.all():
            return replace(self, node=node)
        return GangColumns(
            tuple(name for name, stays in zip(self.names, keep.tolist(), strict=True) if stays),
            node[keep],
            {name: column[keep] for name, column in self.last.items()},
            {name: column[keep] for name, column in self.mean.items()},
        )

    @classmethod
    def concat(cls, parts: Sequence["GangColumns"]) -> "GangColumns":
        if len(parts) == 1:
            return parts[0]
        return cls(
            tuple(name for part in parts for name in part.names),
            np.concatenate([part.node for part in parts]),
            {name: np.concatenate([part.last[name] for part in parts]) for name in _list_common_metrics(parts)},
            {name: np.concatenate([part.mean[name] for part in parts]) for name in parts[0].mean},
        )


def _list_common_metrics(parts: Sequence[GangColumns]) -> list[str]:
    """Return the metrics that all pipelines have. A pipeline of an older version may lack the newest ones."""
    return [name for name in parts[0].last if all(name in part.last for part in parts)]


@dataclass(frozen=True, slots=True)
class GangMembers:
    """Running attempts, and the GPUs and ports that work for them.

    of_gpu, of_port: (entity,) index into `attempts`, -1 for none. together: (attempt,) whether the attempt is
    a gang of at least 2 nodes or 4 GPUs. nodes: (node,) names by row.
    """

    attempts: Sequence[JobAttempt]
    placements: RunningPlaces
    of_gpu: NDArray[np.int32]
    of_port: NDArray[np.int32]
    together: NDArray[np.bool_]
    nodes: tuple[str, ...]

    def has_run_half_hour(self, of: NDArray[np.int32], now_ms: int) -> NDArray[np.bool_]:
        """Return (entity,) whether the attempt of each entity has run for more than half an hour.

        After that time, the entity's means over half an hour contain no other job. of: (entity,) index of the attempt,
        -1 for none.
        """
        old = [now_ms - (attempt.started_ms or now_ms) >= SETTLED_MS for attempt in self.attempts]
        return np.array([*old, False], bool)[of]

    def find_jobs_on(self, node: str) -> Sequence[int]:
        """Return the indices of the attempts on a node."""
        return self.placements.jobs_on.get(node, ())

    def count_hosts(self, index: int) -> int:
        """Return the number of nodes that an attempt runs on. index: the index of the attempt."""
        return len(self.placements.hosts[index])

    @property
    def spans_nodes(self) -> NDArray[np.bool_]:
        """(attempt,) whether the attempt runs on several nodes."""
        return self.placements.host_counts >= FEWEST_NODES


class GangMemberCache:
    """A cache of the members of gangs.

    It is valid until the placements, the entities or their owners change.
    """

    def __init__(self) -> None:
        self._members: GangMembers | None = None
        self._names: tuple[tuple[str, ...], ...] = ()
        self._owners: tuple[NDArray[np.int32], ...] = ()

    def find_members(
        self,
        attempts: Sequence[JobAttempt],
        placements: RunningPlaces,
        gpu: GangColumns,
        port: GangColumns,
        nodes: tuple[str, ...],
    ) -> GangMembers:
        """Return the result of `match_gangs`, from the cache if it is valid.

        placements: the places of `attempts`.
        """
        names, owners, before = (nodes, gpu.names, port.names), (gpu.node, port.node), self._members
        if (
            before is not None
            and before.placements is placements
            and self._names == names
            and all(map(np.array_equal, self._owners, owners))
        ):
            return replace(before, attempts=attempts)
        self._names, self._owners = names, owners
        self._members = match_gangs(attempts, placements, gpu, port, nodes)
        return self._members


def match_gangs(
    attempts: Sequence[JobAttempt],
    placements: RunningPlaces,
    gpu: GangColumns,
    port: GangColumns,
    nodes: tuple[str, ...],
) -> GangMembers:
    """Find the GPUs and ports that work for each running attempt, by its placement."""
    rows = {name: row for row, name in enumerate(gpu.names)}
    of_gpu = np.full(len(gpu.names), -1, np.int32)
    whole: dict[str, int] = {}
    for index, attempt in enumerate(attempts):
        for rank in attempt.ranks:
            if not rank.gpus:
                whole[rank.node] = index
            for number in rank.gpus:
                row = rows.get(f"{rank.node}/{number}")
                if row is not None:
                    of_gpu[row] = index
        if not attempt.ranks:
            whole.update((node, index) for node in attempt.nodes)
    if whole:
        owner = np.array([whole.get(name, -1) for name in nodes], np.int32)
        by_node = owner[gpu.node]
        of_gpu = np.where((of_gpu < 0) & (by_node >= 0), by_node, of_gpu)
    hosts, gpus = placements.hosts, placements.gpus
    together = np.array(
        [len(on) >= FEWEST_NODES or count >= FEWEST_GPUS for on, count in zip(hosts, gpus, strict=True)], bool
    )
    of_port = _find_port_owners(of_gpu, gpu, port, len(nodes))
    silent = np.bincount(gpu.node, minlength=len(nodes))[port.node] == 0  # a node whose GPUs nobody reports
    if silent.any():
        of_port = np.where(silent, _find_only_attempts(placements, nodes)[port.node], of_port)
    return GangMembers(attempts, placements, of_gpu, of_port, together, nodes)


def _find_only_attempts(placements: RunningPlaces, nodes: tuple[str, ...]) -> NDArray[np.int32]:
    """Return (node,) the index of the only attempt on a node, -1 if there is none or more than one."""
    jobs = (placements.jobs_on.get(name, ()) for name in nodes)
    return np.array([on[0] if len(on) == 1 else -1 for on in jobs], np.int32)


def _find_port_owners(of_gpu: NDArray[np.int32], gpu: GangColumns, port: GangColumns, nodes: int) -> NDArray[np.int32]:
    """Return (port,) the index of the attempt that a port works for, -1 if unknown.

    A job alone on a node has all its ports. On a shared node with as many ports as GPUs, port i serves
    GPU i, as on rail-optimised hosts.
    """
    if not len(port.node) or not len(gpu.node):
        return np.full(len(port.node), -1, np.int32)
    least = np.full(nodes, np.iinfo(np.int32).max, np.int32)
    most = np.full(nodes, -1, np.int32)
    np.minimum.at(least, gpu.node, of_gpu)
    np.maximum.at(most, gpu.node, of_gpu)
    alone = np.where(least == most, most, -1)[port.node]
    gpus, ports = np.bincount(gpu.node, minlength=nodes), np.bincount(port.node, minlength=nodes)
    paired = (gpus == ports)[port.node]
    # Place of each entity within its node, then the GPU in the same place.
    gpu_order = np.lexsort((parse_places(gpu.names), gpu.node))
    port_order = np.lexsort((parse_places(port.names), port.node))
    first_gpu, first_port = np.cumsum(gpus) - gpus, np.cumsum(ports) - ports
    place = np.empty(len(port.node), np.int64)
    place[port_order] = np.arange(len(port.node)) - first_port[port.node[port_order]]
    peer = gpu_order[np.minimum(first_gpu[port.node] + place, len(gpu_order) - 1)]
    return np.where(alone >= 0, alone, np.where(paired, of_gpu[peer], -1)).astype(np.int32)


@lru_cache(maxsize=8)
def parse_places(names: tuple[str, ...]) -> NDArray[np.int64]:
    """Return (entity,) int64 the number of each entity on its node, from its name.

    The number is the last one before the port number: 3 for n1/3, and 10 for n1/mlx5_10/1.
    """
    return np.array([_parse_place(name) for name in names], np.int64)


def _parse_place(name: str) -> int:
    digits = _NUMBER.findall(name.split("/")[1]) if "/" in name else []
    return int(digits[-1]) if digits else 0
