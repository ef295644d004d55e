"""The telemetry of one job's GPUs over the last half hour.

It is copied from the rings, so that a thread may work on it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.ring import Ring
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.samples import EntityKind

Array = NDArray[np.float32]

GPU_METRICS = (
    "sm_active",
    "tensor_active",
    "gpu_util",
    "power_w",
    "energy_j",
    "fb_used_bytes",
    "nvlink_tx_bytes_per_s",
    "pcie_tx_bytes_per_s",
    "pcie_rx_bytes_per_s",
)


MOST_SILENT = 0.2  # of the GPUs: with more of them unheard nothing is said of the whole job
BLOCK_GPUS = 1024  # copied at once: some milliseconds of the loop


@dataclass(frozen=True)
class JobWindow:
    """The telemetry of one job by slot, oldest first, NaN if unknown. Properties are computed once."""

    interval_s: float
    first_ms: int  # begin of the first slot
    parts: list[Array]  # of `gpu`, as copied
    sent: Array  # (slot,) bytes/s of its share of its nodes' ports
    gpus: int  # that the job holds, heard or not

    @cached_property
    def gpu(self) -> Array:  # (metric of GPU_METRICS, slot, GPU)
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts, axis=2)

    @cached_property
    def reporting_gpus(self) -> int:  # how many GPUs reported
        return int(np.isfinite(self.gpu).any(axis=(0, 1)).sum())

    @cached_property
    def means(self) -> NDArray[np.float64]:  # (metric, slot) over the GPUs that reported
        known = np.isfinite(self.gpu)
        many = known.sum(axis=2)
        total = np.where(known, self.gpu, 0.0).sum(axis=2, dtype=np.float64)
        means: NDArray[np.float64] = np.divide(total, many, out=np.full(many.shape, np.nan), where=many > 0)
        return means

    def mean(self, metric: str) -> NDArray[np.float64]:
        """Return (slot,) a metric's mean over the GPUs that reported it, NaN if none did."""
        values: NDArray[np.float64] = self.means[GPU_METRICS.index(metric)]
        return values

    @property
    def end_ms(self) -> int:
        """The time at which the last slot ends, in Unix ms."""
        slots: int = self.gpu.shape[1]
        return self.first_ms + round(slots * self.interval_s * 1000)

    @property
    def is_representative(self) -> bool:
        """Return whether enough of the GPUs reported to represent the whole job."""
        return self.reporting_gpus > 0 and self.reporting_gpus >= (1 - MOST_SILENT) * self.gpus


@dataclass(frozen=True, slots=True)
class JobRows:
    """The rows of a job's GPUs, and of the ports of its nodes."""

    gpu: NDArray[np.intp]
    port: NDArray[np.intp]
    port_node: NDArray[np.int32]
    port_share: NDArray[np.float64]  # the job's part of each port's traffic, by GPUs of the node
    gpus: int  # that it holds, heard or not
    nodes: int


def find_gpu_rows(attempt: JobAttempt, entities: Entities) -> NDArray[np.intp]:
    """Return (gpu,) the sorted rows of the GPUs that an attempt holds.

    If the attempt does not name its GPUs on a node, it counts as holding all of the node's GPUs.
    """
    table = entities[EntityKind.GPU]
    rows = []
    for rank in attempt.ranks:
        rows += [table.find_row(f"{rank.node}/{gpu}") for gpu in rank.gpus]
    found = [row for row in rows if row is not None]
    whole = _list_whole_nodes(attempt)
    return np.unique(np.concatenate([np.array(found, np.intp), _find_rows_on_nodes(entities, EntityKind.GPU, whole)]))


def find_job_rows(attempt: JobAttempt, entities: Entities, gpus_of: Mapping[str, int]) -> JobRows:
    """Return the rows of an attempt's GPUs and ports. gpus_of: node -> its number of GPUs in the topology."""
    gpu = find_gpu_rows(attempt, entities)
    whole = _list_whole_nodes(attempt)
    named = sum(len(rank.gpus) for rank in attempt.ranks)
    gpus = max(named + sum(gpus_of.get(node, 0) for node in whole), len(gpu), 0 if whole else attempt.gpus)
    port = _find_rows_on_nodes(entities, EntityKind.PORT, attempt.hosts)
    node = entities[EntityKind.PORT].node[port]
    held = np.bincount(entities[EntityKind.GPU].node[gpu], minlength=len(entities[EntityKind.NODE]))
    share = np.ones(len(port))
    for at, row in enumerate(node.tolist()):
        of_node = gpus_of.get(entities[EntityKind.NODE].names[row], 0)
        if 0 < held[row] < of_node:
            share[at] = held[row] / of_node
    return JobRows(gpu, port, node, share, gpus, len(attempt.hosts))


async def copy_window(store: WindowStore, attempt: JobAttempt, rows: JobRows) -> JobWindow | None:
    """Copy a job's telemetry from the rings up to the last closed slot.

    Returns None if none of the job's GPUs has a row. Yields to the event loop between blocks of GPUs.
    """
    ring = store.rings.get(EntityKind.GPU)
    if ring is None or ring.end_slot < 0:
        return None
    gpu_rows = rows.gpu[rows.gpu < ring.size]
    interval_ms = ring.span.interval_ms
    last = ring.closed
    first = max(last - ring.span.fine_slots + 1, -(-(attempt.started_ms or 0) // interval_ms))
    if first > last or not len(gpu_rows):
        return None
    sent = _compute_sent_rate(store, rows, first, last)
    parts = []
    for at in range(0, len(gpu_rows), BLOCK_GPUS):
        if at:
            await asyncio.sleep(0)
        parts.append(_copy_slots(ring, GPU_METRICS, first, last, gpu_rows[at : at + BLOCK_GPUS]))
    return JobWindow(interval_ms / 1000, first * interval_ms, parts, sent, rows.gpus)


def _compute_sent_rate(store: WindowStore, rows: JobRows, first: int, last: int) -> Array:
    """Return (slot,) bytes/s that the whole job sends over the network, NaN if too few nodes report.

    Ports and nodes without samples in a slot count as if they sent as much as the others.
    """
    nothing = np.full(last - first + 1, np.nan, np.float32)
    ports = store.rings.get(EntityKind.PORT)
    there = rows.port < (ports.size if ports is not None else 0)
    if ports is None or not there.any():
        return nothing
    tx = _copy_slots(ports, ("tx_bytes",), first, last, rows.port[there])[0]
    known = np.isfinite(tx)
    has_reports = known.any(axis=0)
    reporting_nodes = len(np.unique(rows.port_node[there][has_reports])) / max(rows.nodes, 1)
    if not reporting_nodes or reporting_nodes < 1 - MOST_SILENT:
        return nothing
    share = rows.port_share[there] * has_reports
    weight = known @ share
    total = np.where(known, tx, 0.0) @ share * share.sum() / reporting_nodes
    np.divide(total, weight, out=nothing, where=weight > 0, casting="same_kind")
    return nothing


def _list_whole_nodes(attempt: JobAttempt) -> list[str]:
    """Return the attempt's nodes whose GPUs it does not name.

    The attempt counts as holding all GPUs of these nodes.
    """
    return [rank.node for rank in attempt.ranks if not rank.gpus] or ([] if attempt.ranks else list(attempt.nodes))


def _find_rows_on_nodes(entities: Entities, kind: EntityKind, nodes: Sequence[str]) -> NDArray[np.intp]:
    known = [row for name in nodes if (row := entities[EntityKind.NODE].find_row(name)) is not None]
    return np.flatnonzero(np.isin(entities[kind].node, known))


def _copy_slots(ring: Ring, names: Sequence[str], first: int, last: int, rows: NDArray[np.intp]) -> Array:
    """Copy some fine slots of a ring: (metric, slot, row), NaN for slots that the ring has not opened."""
    values = ring.layout.value[[ring.layout.metrics.index(name) for name in names]]
    opened = ring.list_open_slots(first, last)
    copied = np.full((len(values), last - first + 1, len(rows)), np.nan, np.float32)
    copied[:, opened - first] = ring.fine[np.ix_(values, opened % ring.span.slots, rows)]
    return copied
