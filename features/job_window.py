"""What the GPUs of one job showed over the last half hour, copied off the rings, so that a thread may work on it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.ring import Ring
from features.store import WindowStore
from fleet.entities import Entities
from fleet.jobs import JobAttempt
from fleet.samples import EntityKind

Array = NDArray[np.float32]

GPU_METRICS = (
    "sm_active",
    "tensor_active",
    "gpu_util",
    "power_w",
    "fb_used_bytes",
    "nvlink_tx_bytes_per_s",
    "pcie_tx_bytes_per_s",
    "pcie_rx_bytes_per_s",
)


@dataclass(frozen=True, slots=True)
class JobWindow:
    """`gpu` (metric of GPU_METRICS, slot, GPU) and `sent` (slot,) bytes/s of its nodes' ports; NaN: nothing was heard.

    Slots are regular, oldest first, none before the job started; `first_ms`: when the first one begins.
    """

    interval_s: float
    first_ms: int
    gpu: Array
    sent: Array
    gpus: int

    def mean(self, metric: str) -> NDArray[np.float64]:
        """(slot,) mean over the GPUs that were heard of."""
        values = self.gpu[GPU_METRICS.index(metric)].astype(np.float64)
        known = np.isfinite(values)
        many = known.sum(axis=1)
        total = np.where(known, values, 0.0).sum(axis=1)
        means: NDArray[np.float64] = np.divide(total, many, out=np.full(len(many), np.nan), where=many > 0)
        return means


def gpu_rows_of(attempt: JobAttempt, entities: Entities) -> NDArray[np.intp]:
    """Rows of the GPUs that an attempt holds; of a node whose GPUs it does not name, all of them."""
    table = entities[EntityKind.GPU]
    rows = []
    for rank in attempt.ranks:
        rows += [table.row(f"{rank.node}/{gpu}") for gpu in rank.gpus]
    found = [row for row in rows if row is not None]
    whole = [rank.node for rank in attempt.ranks if not rank.gpus] or ([] if attempt.ranks else list(attempt.nodes))
    return np.unique(np.concatenate([np.array(found, np.intp), _of_nodes(entities, EntityKind.GPU, whole)]))


def window_of(store: WindowStore, attempt: JobAttempt) -> JobWindow | None:
    """The attempt's window up to the last whole slot; None where no GPU of it was ever heard of here."""
    rows = gpu_rows_of(attempt, store.entities)
    ring = store.rings.get(EntityKind.GPU)
    if ring is None or not len(rows) or ring.end < 0:
        return None
    rows = rows[rows < ring.size]
    interval_ms = ring.span.interval_ms
    last = ring.closed
    first = max(last - ring.span.fine_slots + 1, -(-(attempt.started_ms or 0) // interval_ms))
    if first > last or not len(rows):
        return None
    gpu = _copied(ring, GPU_METRICS, first, last, rows)
    sent = np.full(last - first + 1, np.nan, np.float32)
    ports = store.rings.get(EntityKind.PORT)
    port_rows = _of_nodes(store.entities, EntityKind.PORT, attempt.hosts)
    if ports is not None and len(port_rows := port_rows[port_rows < ports.size]):
        tx = _copied(ports, ("tx_bytes",), first, last, port_rows)[0]
        known = np.isfinite(tx)
        sent = np.where(known.any(axis=1), np.where(known, tx, 0.0).sum(axis=1), np.nan).astype(np.float32)
    return JobWindow(interval_ms / 1000, first * interval_ms, gpu, sent, len(rows))


def _of_nodes(entities: Entities, kind: EntityKind, nodes: Sequence[str]) -> NDArray[np.intp]:
    known = [row for name in nodes if (row := entities[EntityKind.NODE].row(name)) is not None]
    return np.flatnonzero(np.isin(entities[kind].node, known))


def _copied(ring: Ring, names: Sequence[str], first: int, last: int, rows: NDArray[np.intp]) -> Array:
    """(metric, slot, row) of the fine slots, copied; NaN for slots that the ring has not opened."""
    values = ring.layout.value[[ring.layout.metrics.index(name) for name in names]]
    slots = np.arange(first, last + 1)
    copied = ring.fine[np.ix_(values, slots % ring.span.slots, rows)]
    copied[:, (slots > ring.head) | (slots <= ring.head - ring.span.slots)] = np.nan
    return copied
