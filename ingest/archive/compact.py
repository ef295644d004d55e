"""Compaction: it merges the many parts of an hour into one smaller file, and deletes old days.

The names of the files make a crash harmless (`fleetcast.ingest.archive.files`). Compaction needs
about 100 bytes of memory for each of `file_rows` rows.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fleetcast.fleet.entities import Entities
from fleetcast.ingest.archive.files import (
    DATASETS,
    DAY_MS,
    HOUR_MS,
    ArchiveFiles,
    FileName,
    drop_superseded_files,
    parse_day_ms,
)
from fleetcast.ingest.archive.rows import (
    KINDS,
    METRIC_NAMES,
    STATISTICS,
    ArchiveRows,
    NameLookups,
    decode_samples,
    encode_event_table,
    encode_samples,
    make_row_lookup,
    sort_unique_rows,
)

logger = logging.getLogger(__name__)

MANY = 8  # parts that came after an hour was compacted: then it is compacted again


@dataclass(frozen=True, slots=True)
class CompactionRun:
    """Files of one hour, block and writer that one file will replace."""

    names: tuple[FileName, ...]
    rows: int

    @property
    def merged_name(self) -> FileName:
        return replace(self.names[0], first=self.names[0].first, last=max(name.last for name in self.names))


def find_compaction_runs(
    files: ArchiveFiles,
    writer: str,
    closed_ms: int,
    *,
    most_rows: int,
    days: Sequence[str] | None = None,
) -> list[CompactionRun]:
    """Find the files worth compacting among a writer's files of hours that ended before `closed_ms`.

    days: search only these days, or all days if None. If days are given, an hour that was compacted before is
    included only if it has at least MANY files.
    """
    places: dict[Any, list[FileName]] = {}
    for dataset in DATASETS:
        for name in drop_superseded_files(files.list_files(dataset, days)):
            if name.writer == writer and name.first_ms + HOUR_MS <= closed_ms and not name.ready:
                places.setdefault(name.place, []).append(name)
    worth = [
        names
        for names in places.values()
        if days is None or len(names) >= MANY or not any(n.is_compacted for n in names)
    ]
    return [run for names in worth if len(names) > 1 for run in _group_files(files, names, most_rows)]


def _group_files(files: ArchiveFiles, names: Sequence[FileName], most_rows: int) -> Iterator[CompactionRun]:
    """Yield runs of files with consecutive numbers, each with at most `most_rows` rows.

    A file that cannot be read ends a run.
    """
    run: list[FileName] = []
    rows = 0
    for name in sorted(names, key=lambda name: name.first):
        try:
            count = _count_rows(files, name)
        except (OSError, ValueError) as error:
            logger.error("archive: %s cannot be read and stays as it is: %s", name.path, error)
            count = most_rows + 1
        if rows + count > most_rows:
            if len(run) > 1:
                yield CompactionRun(tuple(run), rows)
            run, rows = [], 0
        if count <= most_rows:
            run.append(name)
            rows += count
    if len(run) > 1:
        yield CompactionRun(tuple(run), rows)


def _count_rows(files: ArchiveFiles, name: FileName) -> int:
    import pyarrow.parquet as pq

    with files.open(name) as file:
        return int(pq.read_metadata(file).num_rows)


def compact(files: ArchiveFiles, run: CompactionRun) -> None:
    """Replace the files of a run by one file. The caller must be the hour's only writer.

    Raises OSError, or ValueError if a file is torn or the hour's files have changed. An error leaves the files
    unchanged.
    """
    files.replace_superseded_files(write_merged_file(files, run))


def write_merged_file(files: ArchiveFiles, run: CompactionRun) -> FileName:
    """Write the file that will replace the files of a run, and return its name, which ends in `.ready`.

    The caller must then give the file its final name. The writer may add files to the hour at the same time. Raises
    OSError, or ValueError if a file is torn or the hour's files have changed. An error leaves the files unchanged.
    """
    ready = replace(run.merged_name, ready=True)
    there = [
        name for name in drop_superseded_files(files.list_files(ready.dataset, [ready.day])) if ready.supersedes(name)
    ]
    if sorted(there) != sorted(run.names):
        raise ValueError(f"its hour has {len(there)} files now, not the {len(run.names)} that were found")
    merged = _merge_samples if ready.dataset == "samples" else _merge_events
    files.write_file(ready, merged(files, run.names))
    return ready


def _merge_samples(files: ArchiveFiles, names: Sequence[FileName]) -> Any:
    entities, metrics = Entities(), list(METRIC_NAMES)

    def find_or_add_metric(name: str) -> int:  # also those that the catalogue does not hold any more
        if name not in metrics:
            metrics.append(name)
        return metrics.index(name)

    parts = []
    for name in names:
        with files.open(name) as file:
            parts.append(decode_samples(file, NameLookups(make_row_lookup(entities), find_or_add_metric)))
    rows, _ = sort_unique_rows(ArchiveRows.concat(parts), names[0].first_ms)
    return encode_samples(rows, {kind: entities[kind].names for kind in KINDS}, metrics, STATISTICS)


def _merge_events(files: ArchiveFiles, names: Sequence[FileName]) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    for name in names:
        with files.open(name) as file:
            tables.append(pq.read_table(file, use_threads=False))
    return encode_event_table(pa.concat_tables(tables).sort_by("time_ms"))


def list_old_days(files: ArchiveFiles, now_ms: int, keep_days: int) -> list[str]:
    """Return the days that ended at least `keep_days` days ago."""
    days = {day for dataset in DATASETS for day in files.list_days(dataset)}
    return sorted(day for day in days if parse_day_ms(day) + DAY_MS <= now_ms - keep_days * DAY_MS)


def delete_days(files: ArchiveFiles, days: Sequence[str], note: Callable[[str], object] = lambda _: None) -> None:
    """Delete whole days, and call `note` with each one."""
    for day in days:
        for dataset in DATASETS:
            files.remove_day(dataset, day)
        note(day)
