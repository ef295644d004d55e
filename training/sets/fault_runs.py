"""Runs with injected faults and the truth about them, as `fleetcast simulate faults` writes them.

A folder below `faults/simulated` or `faults/recorded` holds `config.toml`, `topology.toml`,
`truth.jsonl` (a fault or decoy a line), `events.jsonl` (job events in order of time),
`node_events.jsonl` (drains and returns; may be missing) and `samples/KIND.parquet`. The columns of
a Parquet file are `time_ms`, `node` and `index`, then one for each metric of the catalogue. Values
have the metric's unit, and counters are raw. Null means not reported. Rows are in order of time. A
row group holds whole rounds, and the same ones in every file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.fleet.metrics import METRICS, Metric, find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.toml_text import read_toml
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.topology.load import load_topology

FOLDERS = ("faults/simulated", "faults/recorded")
KEYS = ("time_ms", "node", "index")
Line = TypeVar("Line")
Event = TypeVar("Event", bound=JobEvent | NodeEvent)


class RunTruth(msgspec.Struct, frozen=True):
    """One fault or decoy that was injected into a run.

    visible_ms: the time from which the work running on the node showed the fault. slowdown: the worst
    step factor of the job on the node. gpu, port: the culprit. Without either, the whole node is the culprit.
    lead_s: the seconds by which a precursor came before `start_ms`.
    """

    kind: str
    node: str
    start_ms: int
    end_ms: int | None
    visible_ms: int | None = None
    visible: bool = False
    benign: bool = False
    gpu: int | None = None
    port: int | None = None
    job: str | None = None
    precursor: bool = False
    lead_s: float = 0.0
    magnitude: dict[str, float] = {}
    slowdown: float = 1.0
    fault_id: str = ""


_TRUTHS = msgspec.json.Decoder(RunTruth)
_EVENTS = msgspec.json.Decoder(JobEvent)
_NODE_EVENTS = msgspec.json.Decoder(NodeEvent)


@dataclass(frozen=True, slots=True)
class Round:
    """One scrape of the whole fleet, and the job and node events received since the last round."""

    time_ms: int
    batches: tuple[SampleBatch, ...]
    events: tuple[JobEvent, ...]
    node_events: tuple[NodeEvent, ...] = ()


@dataclass(frozen=True)
class FaultRun:
    """The folder of one run. The samples of a day are a few hundred MB, so they are read only when needed.

    without: metrics that are left out of the samples.
    """

    folder: Path
    without: frozenset[Metric] = frozenset()

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def topology(self) -> Topology:
        """The topology of the run. Raises ConfigError if its file is missing or invalid."""
        return load_topology(self.folder / "topology.toml")

    @cached_property
    def truth(self) -> tuple[RunTruth, ...]:
        """The faults and decoys, in order of start. Raises ConfigError if a line is invalid."""
        rows = sorted(self._read_lines("truth.jsonl", _TRUTHS), key=lambda row: row.start_ms)
        strange = {row.node for row in rows} - set(self.topology.names)
        if strange:
            raise ConfigError(f"{self.folder}/truth.jsonl: nodes that are not in topology.toml: {sorted(strange)[:3]}")
        return tuple(rows)

    @cached_property
    def interval_s(self) -> float:
        """The seconds from one scrape to the next. Raises ConfigError if the run does not state them."""
        path = self.folder / "config.toml"
        try:
            interval_s = float(read_toml(path.read_text(encoding="utf-8"))["interval_s"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: no interval_s in seconds: {error}") from None
        if not interval_s > 0:
            raise ConfigError(f"{path}: interval_s = {interval_s:g}: must be greater than 0")
        return interval_s

    def find_problem(self) -> str:
        """Return the reason why the run cannot be judged.

        Returns "" if the run has samples and its small files are readable.
        """
        try:
            _ = self.topology, self.truth, self.interval_s
        except FleetcastError as error:
            return str(error)
        return "" if (self.folder / "samples").is_dir() else "it has no samples"

    @property
    def nodes(self) -> int:
        return len(self.topology)

    def read_rounds(self, entities: Entities) -> Iterator[Round]:
        """Yield every scrape in order of time. The samples refer to rows of `entities`."""
        events = _EventQueue(self._read_lines("events.jsonl", _EVENTS))
        node_events = _EventQueue(self._read_lines("node_events.jsonl", _NODE_EVENTS))
        for time_ms, batches in self._read_batches(entities):
            yield Round(time_ms, batches, events.pop_events_until(time_ms), node_events.pop_events_until(time_ms))

    def _read_lines(self, name: str, decoder: msgspec.json.Decoder[Line]) -> Iterator[Line]:
        """Yield the objects of a JSON Lines file. A missing file yields none.

        Raises ConfigError if a line is invalid.
        """
        path = self.folder / name
        if not path.exists():
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise ConfigError(f"{path}, line {number}: {explain_decode_error(error, decoder, line)}") from None

    def _read_batches(self, entities: Entities) -> Iterator[tuple[int, tuple[SampleBatch, ...]]]:
        paths = sorted((self.folder / "samples").glob("*.parquet"))
        try:
            files = [(EntityKind(path.stem), pq.ParquetFile(path)) for path in paths]
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.folder}/samples: {error}") from None
        if not files:
            raise ConfigError(f"{self.folder}: no samples/*.parquet")
        groups = {file.num_row_groups for _, file in files}
        if len(groups) != 1:
            raise ConfigError(f"{self.folder}: the files of samples/ differ in row groups: {sorted(groups)}")
        for group in range(groups.pop()):
            blocks = [
                _Block.from_table(kind, file.read_row_group(group), entities, self.without) for kind, file in files
            ]
            for time_ms in np.unique(np.concatenate([block.time_ms for block in blocks])).tolist():
                parts = (block.make_batch(time_ms) for block in blocks)
                yield time_ms, tuple(part for part in parts if len(part))


class _EventQueue(Generic[Event]):
    """A queue of events in order of time, from which a reader pops the events up to a given time."""

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self._ahead = next(events, None)

    def pop_events_until(self, time_ms: int) -> tuple[Event, ...]:
        events_of: list[Event] = []
        while self._ahead is not None and self._ahead.time_ms <= time_ms:
            events_of.append(self._ahead)
            self._ahead = next(self._events, None)
        return tuple(events_of)


@dataclass(frozen=True, slots=True)
class _Block:
    """The samples of one row group of a Parquet file, for one kind of entity.

    values: (metric, row).
    """

    kind: EntityKind
    metrics: NDArray[np.int16]
    time_ms: NDArray[np.int64]
    entity: NDArray[np.int32]
    values: NDArray[np.float64]

    @classmethod
    def from_table(cls, kind: EntityKind, table: pa.Table, entities: Entities, without: frozenset[Metric]) -> "_Block":
        shown = {metric.name for metric in METRICS[kind]} - {metric.name for metric in without if metric.kind is kind}
        names = [name for name in table.column_names if name in shown]
        columns = [table.column(name).to_numpy(zero_copy_only=False).astype(np.float64) for name in names]
        return cls(
            kind,
            np.array([find_metric_row(kind, name) for name in names], np.int16),
            table.column("time_ms").to_numpy(),
            _find_entity_rows(kind, table, entities),
            np.stack(columns) if columns else np.empty((0, table.num_rows)),
        )

    def make_batch(self, time_ms: int) -> SampleBatch:
        """Return the samples of one round, metric by metric."""
        first, last = np.searchsorted(self.time_ms, (time_ms, time_ms + 1)).tolist()
        values = self.values[:, first:last].ravel()
        metric = np.repeat(self.metrics, last - first)
        entity = np.tile(self.entity[first:last], len(self.metrics))
        batch = SampleBatch(self.kind, metric, entity, np.full(len(values), time_ms, np.int64), values)
        there = ~np.isnan(values)
        return batch if there.all() else batch.select_samples(there)


def _find_entity_rows(kind: EntityKind, table: pa.Table, entities: Entities) -> NDArray[np.int32]:
    """Return (row,) the row in `entities` of each row of the table."""
    nodes = table.column("node").combine_chunks().dictionary_encode()
    code, names = np.asarray(nodes.indices), nodes.dictionary.to_pylist()
    if kind is EntityKind.NODE:
        rows_of_nodes: NDArray[np.int32] = np.array([entities.find_or_add_node(name) for name in names], np.int32)[code]
        return rows_of_nodes
    index = table.column("index").to_numpy().astype(np.int64)
    width = int(index.max(initial=0)) + 1
    both, inverse = np.unique(code * width + index, return_inverse=True)
    rows = [_find_or_add_entity(kind, entities, names[key // width], key % width) for key in both.tolist()]
    found: NDArray[np.int32] = np.array(rows, np.int32)[inverse]
    return found


def _find_or_add_entity(kind: EntityKind, entities: Entities, node: str, index: int) -> int:
    """Return the row of a GPU or port of a node. Adds the entity if it is missing.

    GPU 3 of node n1 is named n1/3, and port 3 of this node is named n1/mlx5_3/1.
    """
    parts = (f"mlx5_{index}", 1) if kind is EntityKind.PORT else (index,)
    return entities.add_to_node(kind, node, *parts)


def read_fault_runs(
    data: Path,
    folders: Sequence[str] = FOLDERS,
    skipped: list[str] | None = None,
    without: frozenset[Metric] = frozenset(),
) -> list[FaultRun]:
    """Return every run below a data folder, by name.

    If `skipped` is given, runs that cannot be judged are left out, and their reasons are added to it.
    """
    paths = (path for folder in folders for path in sorted((data / folder).glob("*/truth.jsonl")))
    runs = [FaultRun(path.parent, without) for path in paths]
    if skipped is None:
        return runs
    problems = {run.folder: run.find_problem() for run in runs}
    skipped += [f"{folder.relative_to(data)}: {problem}" for folder, problem in problems.items() if problem]
    return [run for run in runs if not problems[run.folder]]
