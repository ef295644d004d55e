"""A converter of samples into columnar records, one for each node and time.

See `ingest/kafka/columnar.py` for the format.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.entities import NODE_OWNED, Entities
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.kafka.columnar import ColumnarRecord, Header, RecordNames
from fleetcast.ingest.source import Batch

MOMENT_MS = 50  # what one scrape reads within this time is one record
_Block = tuple[RecordNames, NDArray[np.float64]]


def make_node_records(batch: Batch, entities: Entities, models: Mapping[str, str]) -> list[ColumnarRecord]:
    """Convert a batch into one columnar record for each node and time.

    The first record carries the counts of bad records. The record of the node "" carries the entities that no
    node owns. models: node → GPU model.
    """
    found: dict[tuple[int, int], dict[str, _Block]] = defaultdict(dict)
    first = _find_first_times(batch, entities)
    for samples in batch.samples:
        for place, block in _make_blocks(samples, entities, first):
            found[place][samples.kind.value] = block
    bad = _count_bad_records(batch)
    records: list[ColumnarRecord] = []
    for (node, time_ms), blocks in found.items():
        name = entities[EntityKind.NODE].names[node] if node >= 0 else ""
        columns = {kind: names for kind, (names, _) in blocks.items()}
        header = Header(name, columns, models.get(name, ""), {} if records else bad)
        records.append(ColumnarRecord(header, time_ms, tuple(values for _, values in blocks.values())))
    return records


def _count_bad_records(batch: Batch) -> dict[str, int]:
    counts: dict[str, int] = {}
    for error in batch.bad:
        counts[error.reason] = counts.get(error.reason, 0) + error.count
    return counts


def _find_owners(samples: SampleBatch, entities: Entities) -> NDArray[np.int32]:
    """Return (n,) the node row of each sample, -1 if no node owns its entity."""
    owner: NDArray[np.int32] = entities[samples.kind].node[samples.entity]
    return owner


def _find_first_times(batch: Batch, entities: Entities) -> NDArray[np.int64]:
    """Return (nodes + 1,) int64, the earliest time of each node in the batch, in Unix ms.

    The last element is the earliest time of entities that no node owns.
    """
    first = np.full(len(entities[EntityKind.NODE]) + 1, np.iinfo(np.int64).max)
    for samples in batch.samples:
        np.minimum.at(first, _find_owners(samples, entities), samples.time_ms)
    return first


def _make_blocks(
    samples: SampleBatch, entities: Entities, first: NDArray[np.int64]
) -> Iterator[tuple[tuple[int, int], _Block]]:
    """Yield ((node row, time_ms), (names, values)) for each node and time.

    Samples up to MOMENT_MS after the node's first time get that time.
    """
    owner = _find_owners(samples, entities)
    begin = first[owner]
    time_ms = np.where(samples.time_ms - begin <= MOMENT_MS, begin, samples.time_ms)
    order = np.lexsort((samples.entity, samples.metric, time_ms, owner))
    edges = np.flatnonzero((np.diff(owner[order]) != 0) | (np.diff(time_ms[order]) != 0)) + 1
    for rows in np.split(order, edges) if len(order) else ():
        yield (int(owner[rows[0]]), int(time_ms[rows[0]])), _make_block(samples, rows, entities)


def _make_block(samples: SampleBatch, rows: NDArray[np.intp], entities: Entities) -> _Block:
    """Return the names and the (metrics, entities) values of the samples in `rows`, NaN where missing.

    The samples must belong to one node and time.
    """
    metrics, row = np.unique(samples.metric[rows], return_inverse=True)
    those, column = np.unique(samples.entity[rows], return_inverse=True)
    values = np.full((len(metrics), len(those)), np.nan)
    values[row, column] = samples.value[rows]
    catalogue = METRICS[samples.kind]
    names = tuple(catalogue[metric].name for metric in metrics.tolist())
    return RecordNames(names, _strip_node_names(samples.kind, those.tolist(), entities)), values


def _strip_node_names(kind: EntityKind, rows: Sequence[int], entities: Entities) -> tuple[str, ...]:
    """Return the names of entities without their node, as a record writes them."""
    if kind is EntityKind.NODE:
        return ("",)
    names = entities[kind].names
    if kind in NODE_OWNED:
        return tuple(names[row].partition("/")[2] for row in rows)
    return tuple(names[row] for row in rows)
