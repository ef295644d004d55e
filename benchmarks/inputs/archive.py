"""The archive: writing samples into window store and files, and the bytes of a sample on disk.

`alone`: columns of scrapes become sorted, compressed files. `decode, ring, archive`: the CPU time of
everything that a pipeline does with a sample, fsyncs included. `compact`: the CPU time to merge the parts of each
hour into one file. `bytes a sample`: the size of recorded H100 values in the files of hours, in our
units, with one scrape for each reading. `bytes a sample, parts`: the same in the parts of the hours.

The peers are pyarrow with its defaults and zstd, for speed and size, and DuckDB's own format, which is
measured in the same way.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import csv

from fleetcast.benchmarks.inputs.decode import FIELDS, GPUS, INTERVAL_MS, PAGES_A_BATCH, T0, make_round_pages
from fleetcast.benchmarks.kit.case import Peer, make_record, measure
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.archive.archive import Archive
from fleetcast.ingest.archive.compact import compact, find_compaction_runs
from fleetcast.ingest.archive.files import HOUR_MS, ArchiveFiles
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.source import Batch

SIZES = (1_000, 10_000)
SCRAPES_A_FLUSH = 4  # a snapshot a minute
RUNS = 3
HOUR_FIRST_MS = 1_699_999_200_000
NOWHERE = Topology.build([])

FOLDER = Path("telemetry") / "h100-phases"
SCRAPE_MS = 15_000
# column -> (metric, factor from the recording's unit to ours)
COLUMNS = {
    "power_w": ("power_w", 1.0),
    "temp_c": ("gpu_temp_c", 1.0),
    "mem_used_mib": ("fb_used_bytes", 2.0**20),
    "mem_total_mib": ("fb_total_bytes", 2.0**20),
    "gpu_util_pct": ("gpu_util", 0.01),
    "sm_util_pct": ("gpu_util", 0.01),
    "mem_util_pct": ("mem_copy_util", 0.01),
    "sm_active": ("sm_active", 1.0),
    "tensor_active": ("tensor_active", 1.0),
    "dram_active": ("dram_active", 1.0),
    "fp16_active": ("fp16_active", 1.0),
    "pcie_tx_bytes_s": ("pcie_tx_bytes_per_s", 1.0),
    "pcie_rx_bytes_s": ("pcie_rx_bytes_per_s", 1.0),
    "pcie_tx_kib": ("pcie_tx_bytes_per_s", 1024.0),
    "pcie_rx_kib": ("pcie_rx_bytes_per_s", 1024.0),
    "nvlink_tx_bytes_s": ("nvlink_tx_bytes_per_s", 1.0),
    "nvlink_rx_bytes_s": ("nvlink_rx_bytes_per_s", 1.0),
    "throttle_reasons": ("clock_event_reasons", 1.0),
    "energy_mj": ("energy_j", 0.001),
    "clock_sm_mhz": ("sm_clock_mhz", 1.0),
    "clock_mem_mhz": ("mem_clock_mhz", 1.0),
}


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield three records for each fleet size in GPUs, then the records of the recorded values."""
    for gpus in sizes:
        yield _measure_archive_alone(gpus)
        yield _measure_decode_and_archive(max(1, gpus // GPUS))
    yield from _measure_recorded_values()


class ArchiveFolder:
    """A maker of archives, each in a new folder on this disk."""

    def __init__(self, entities: Entities) -> None:
        self._entities = entities
        self._held: list[tempfile.TemporaryDirectory[str]] = []

    def open_archive(self) -> Archive:
        for held in self._held:
            held.cleanup()
        self._held = [tempfile.TemporaryDirectory(dir=os.environ.get("FLEETCAST_BENCH_DISK"))]
        return Archive(ArchiveFiles(self._held[0].name), self._entities)

    @property
    def path(self) -> Path:
        return Path(self._held[0].name)


def _measure_archive_alone(gpus: int) -> dict[str, Any]:
    entities = Entities()
    rows = [entities.add_to_node(EntityKind.GPU, f"n{gpu // GPUS:05d}", gpu % GPUS) for gpu in range(gpus)]
    rng = np.random.default_rng(1)
    metrics = np.arange(len(FIELDS), dtype=np.int16)
    values = np.round(rng.random((SCRAPES_A_FLUSH, gpus * len(FIELDS))) * 700, 3)
    folder = ArchiveFolder(entities)

    def make_batch(scrape: int) -> SampleBatch:
        return SampleBatch(
            EntityKind.GPU,
            np.tile(metrics, gpus),
            np.repeat(np.array(rows, np.int32), len(metrics)),
            np.full(gpus * len(metrics), T0 + scrape * INTERVAL_MS, np.int64),
            values[scrape],
        )

    batches = [make_batch(scrape) for scrape in range(SCRAPES_A_FLUSH)]
    sure = np.ones(len(batches[0]), np.bool_)

    def write_archive() -> int:
        archive = folder.open_archive()
        for one in batches:
            archive.add(one, sure)
        archive.prepare_flush(NOWHERE, T0)()
        archive.close()
        assert archive.counts.rows == sum(map(len, batches)), f"only {archive.counts.rows} rows came to be"
        return archive.counts.rows

    size = {"gpus": gpus, "series": gpus * len(FIELDS)}
    return measure("archive", "alone", size, write_archive, "samples/s", peer=_make_parquet_peer(batches), repeats=RUNS)


def _make_parquet_peer(batches: Sequence[SampleBatch]) -> Peer:
    """Return a peer that writes the same columns with pyarrow alone: unsorted and without fsync."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write_parquet() -> int:
        merged = SampleBatch.concat(list(batches))
        table = pa.table({name: getattr(merged, name) for name in ("metric", "entity", "time_ms", "value")})
        with tempfile.TemporaryDirectory() as name:
            pq.write_table(table, f"{name}/x.parquet", compression="zstd")
        return len(merged)

    return Peer("pyarrow zstd, long, unsorted", write_parquet)


def _measure_decode_and_archive(nodes: int) -> dict[str, Any]:
    """Measure the CPU time to decode samples, and to write them into window store and archive.

    A run is a minute of scrapes, and then the flush that a pipeline makes before each snapshot.
    """
    rng = np.random.default_rng(1)
    rounds = [make_round_pages(nodes, rng) for _ in range(2)]
    entities = Entities()
    resolver = ExporterResolver(entities)
    decoders = {node: PageDecoder(resolver, Target(node)) for node in rounds[0]}
    store, folder = WindowStore(entities), ArchiveFolder(entities)
    turn = iter(range(10**9))

    def ingest_minute() -> int:
        archive = folder.open_archive()
        for _ in range(SCRAPES_A_FLUSH):
            number = next(turn)
            now_ms = T0 + number * INTERVAL_MS
            pages = list(rounds[number % 2].items())
            for first in range(0, len(pages), PAGES_A_BATCH):
                part = pages[first : first + PAGES_A_BATCH]
                batch = Batch.merge([decoders[node].decode(page, now_ms) for node, page in part])
                for samples in batch.samples:
                    written = store.write(samples, now_ms)
                    assert written.taken is not None, "nothing was written"
                    archive.add(written.taken, written.sure)
        archive.prepare_flush(NOWHERE, now_ms)()
        archive.close()
        return archive.counts.rows

    ingest_minute()
    values, cpu_s = [], []
    for _ in range(RUNS):
        began = time.process_time()
        rows = ingest_minute()
        cpu_s.append(time.process_time() - began)
        values.append(rows / cpu_s[-1])
        assert rows == nodes * GPUS * len(FIELDS) * SCRAPES_A_FLUSH, f"only {rows} rows came to be"
    size = {"nodes": nodes, "gpus": nodes * GPUS, "series": nodes * GPUS * len(FIELDS)}
    return make_record("archive", "decode, ring, archive", size, values, "samples/s", cpu_s=min(cpu_s))


# -- recorded values ------------------------------------------------------------------------------------------------


def _measure_recorded_values() -> Iterator[dict[str, Any]]:
    """Yield the sizes on disk of recorded H100 values, and the speed of compaction.

    Yields nothing if the recording is missing.
    """
    entities = Entities()
    samples = read_h100_samples(entities, HOUR_FIRST_MS)
    if samples is None:
        return
    folder = ArchiveFolder(entities)
    archive = folder.open_archive()
    minute = samples.time_ms // 60_000
    began = time.process_time()
    for one in np.unique(minute).tolist():
        part = samples.select_samples(minute == one)
        archive.add(part, np.ones(len(part), np.bool_))
        archive.prepare_flush(NOWHERE, HOUR_FIRST_MS)()
    cpu_s = time.process_time() - began
    assert archive.counts.rows == len(samples), f"{archive.counts.rows} rows of {len(samples)} came to be"
    size = {
        "samples": len(samples),
        "series": len({*zip(samples.metric.tolist(), samples.entity.tolist(), strict=True)}),
    }
    yield make_record(
        "archive", "bytes a sample, parts", size, [_count_bytes(folder.path) / len(samples)], "B/sample", cpu_s=cpu_s
    )
    end_ms = int(samples.time_ms.max()) + HOUR_MS
    began = time.process_time()
    for run_ in find_compaction_runs(archive.files, archive.writer, end_ms, most_rows=8_000_000):
        compact(archive.files, run_)
    cpu_s = time.process_time() - began
    archive.close()
    yield make_record("archive", "compact", size, [len(samples) / cpu_s], "samples/s", cpu_s=cpu_s)
    value = _count_bytes(folder.path) / len(samples)
    for name, peer in (("pyarrow zstd, long", _measure_parquet_bytes), ("DuckDB", _measure_duckdb_bytes)):
        beside = (name, peer(samples, entities) / len(samples))
        yield make_record("archive", "bytes a sample", size, [value], "B/sample", cpu_s=cpu_s, peer=beside)


def read_h100_samples(entities: Entities, first_ms: int) -> SampleBatch | None:
    """Return the recorded readings as scrapes 15 s apart, with one node for each run.

    Returns None if the recording is not on this disk.
    """
    named = os.environ.get("FLEETCAST_DATA")
    data = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
    parts = []
    for number, path in enumerate(sorted((data / FOLDER).glob("*_telemetry.csv.gz"))):
        parts += _read_run(path, f"h{number:02d}", entities, first_ms + number * 1_733)
    return SampleBatch.concat(parts) if parts else None


def _read_run(path: Path, node: str, entities: Entities, first_ms: int) -> list[SampleBatch]:
    table = csv.read_csv(path)
    gpu = table["gpu"].to_numpy()
    parts = []
    for index in np.unique(gpu).tolist():
        own = gpu == index
        row = entities.add_to_node(EntityKind.GPU, node, index)
        time_ms = first_ms + np.arange(int(own.sum()), dtype=np.int64) * SCRAPE_MS
        for column in set(table.column_names) & COLUMNS.keys():
            name, factor = COLUMNS[column]
            value = table[column].to_numpy()[own].astype(np.float64)
            value = np.round(value / round(1 / factor), 12) if factor < 1 else value * factor
            known = np.isfinite(value)
            n = int(known.sum())
            metric = np.full(n, find_metric_row(EntityKind.GPU, name), np.int16)
            parts.append(SampleBatch(EntityKind.GPU, metric, np.full(n, row, np.int32), time_ms[known], value[known]))
    return parts


def _count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.parquet"))


def _make_long_table(samples: SampleBatch, entities: Entities) -> Any:
    """Return the samples, sorted by series and time, as a plain table with names instead of numbers."""
    import pyarrow as pa

    order = np.lexsort((samples.time_ms, samples.entity, samples.metric))
    names = np.array(entities[samples.kind].names, object)[samples.entity[order]]
    metrics = np.array([f"m{row}" for row in range(int(samples.metric.max()) + 1)], object)[samples.metric[order]]
    columns = {"metric": metrics, "entity": names, "time_ms": samples.time_ms[order], "value": samples.value[order]}
    return pa.table({name: pa.array(column) for name, column in columns.items()})


def _measure_parquet_bytes(samples: SampleBatch, entities: Entities) -> int:
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as name:
        pq.write_table(_make_long_table(samples, entities), f"{name}/x.parquet", compression="zstd")
        return _count_bytes(Path(name))


def _measure_duckdb_bytes(samples: SampleBatch, entities: Entities) -> int:
    import duckdb

    table = _make_long_table(samples, entities)
    with tempfile.TemporaryDirectory() as name:
        with duckdb.connect(f"{name}/x.duckdb") as connection:
            connection.register("long", table)
            connection.execute("CREATE TABLE samples AS SELECT * FROM long")
            connection.execute("CHECKPOINT")
        return Path(f"{name}/x.duckdb").stat().st_size
