"""A reader of whole archived series, each in order of time."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.entities import Entities
from fleetcast.ingest.archive.files import ArchiveFiles
from fleetcast.ingest.archive.read import ArchiveSpan, log_damaged_file
from fleetcast.ingest.archive.rows import KINDS, METRIC_NAMES, ArchiveRows, NameLookups, decode_samples, make_row_lookup


@dataclass(frozen=True, slots=True)
class ArchivedSeries:
    """One archived series in order of time. time_ms, value: (n,), with n > 0."""

    kind: str
    metric: str
    entity: str
    time_ms: NDArray[np.int64]
    value: NDArray[np.float64]


def _pass_through(items: Iterable[Any]) -> Iterator[Any]:
    yield from items


def read_series(
    files: ArchiveFiles,
    span: ArchiveSpan,
    metric: str = "",
    entity: str = "",
    each: Callable[[Iterable[Any]], Iterator[Any]] = _pass_through,
) -> list[ArchivedSeries]:
    """Read series, ordered by kind, metric and entity. Raises OSError.

    metric, entity: only these series, or all if empty. `each` wraps the iteration over the files, for example
    with a progress bar.
    """
    filters: list[tuple[str, str, Any]] = [*span.filters]
    filters += [(key, "==", value) for key, value in (("metric", metric), ("entity", entity)) if value]
    entities, parts = Entities(), [ArchiveRows.empty()]
    for name in each(span.list_files(files, "samples")):
        with log_damaged_file(name), files.open(name) as file:
            parts.append(decode_samples(file, NameLookups(make_row_lookup(entities)), filters))
    return list(_split_series(ArchiveRows.concat(parts), entities))


def _split_series(rows: ArchiveRows, entities: Entities) -> Iterator[ArchivedSeries]:
    order = np.lexsort((rows.time_ms, rows.series))
    edges = np.flatnonzero(np.diff(rows.series[order], prepend=-1, append=-1))
    kinds, metrics, entity = rows.kind, rows.metric, rows.entity
    found = []
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        at = order[first:end]
        kind = KINDS[kinds[at[0]]]
        name = entities[kind].names[entity[at[0]]]
        found.append(ArchivedSeries(kind.value, METRIC_NAMES[metrics[at[0]]], name, rows.time_ms[at], rows.value[at]))
    yield from sorted(found, key=lambda one: (one.kind, one.metric, one.entity))
