"""A recorder of the scrapes of a whole fleet as columns: the numbers of the pages without their text.

It converts numbers to the catalogue's metrics and units, as the decoders of pages do.
`fleetcast.training.sets.fault_runs` reads the files.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import Target
from fleetcast.ingest.series import Conversion, Series
from fleetcast.simulator.hardware.cluster import SimulatedFleet
from fleetcast.simulator.hardware.telemetry import CPU_MODES, GPU_FIELDS, HOST_FIELDS, PORT_FIELDS, Field

KINDS = (EntityKind.GPU, EntityKind.PORT, EntityKind.NODE)
SCRAPE_METRICS = ("scrape_up", "scrape_duration_s", "gpus_reported", "ports_reported")
CPU_DECIMALS = 2
SCRAPE_TAKES_S = (0.01, 0.03)
VALUES_HELD = 12_000_000  # numbers kept in memory until a row group is written

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Columns:
    """A mapping from rows of raw numbers to metrics of the catalogue.

    names: metric names. rows: the row of each metric.
    """

    names: tuple[str, ...]
    rows: NDArray[np.intp]
    conversion: Conversion
    whole: NDArray[np.bool_]  # printed without decimals

    @classmethod
    def from_fields(cls, fields: Sequence[Field], labels: dict[str, str], kind: EntityKind) -> "Columns":
        resolve = ExporterResolver(Entities())
        target = Target("n1", fixed=True)
        found: list[tuple[Series, int]] = []
        for row, one in enumerate(fields):
            series = resolve(one.name, labels, target)
            if isinstance(series, Series) and series.kind is kind:
                found.append((series, row))
        rows = np.array([row for _, row in found], np.intp)
        return cls(
            tuple(METRICS[kind][series.metric].name for series, _ in found),
            rows,
            Conversion.from_fields(
                *([getattr(one, name) for one, _ in found] for name in ("scale", "form", "ceiling"))
            ),
            np.array([fields[row].format == "%d" for row in rows.tolist()], bool),
        )

    def convert(self, raw: Values) -> Values:
        """Convert (row, cell) raw numbers to (metric, cell) values in our units, NaN if missing."""
        chosen = raw[self.rows]
        chosen[self.whole] = np.trunc(chosen[self.whole])
        many = chosen.shape[1]
        out = np.empty_like(chosen)
        scale, ratio = self.conversion.scale, self.conversion.ratio
        np.multiply(chosen, scale[:, None], out=out)
        if many and ratio.size:
            out[ratio] = np.minimum(out[ratio], 1.0)
        for row in self.conversion.sticky.tolist():
            out[row, chosen[row] == self.conversion.ceiling[row]] = np.nan
        return out


_PORT_LABELS = {"device": "mlx5_0", "port": "1"}
_HOST_LABELS = {"chip": "platform_power_meter", "sensor": "power1"}
_CPU_FIELD = Field("node_cpu_seconds_total", "counter", "", "%f")


def _list_cpu_columns() -> tuple[tuple[str, int], ...]:
    """Return (metric name, row of CPU_MODES) for each CPU mode that is a metric of the catalogue."""
    found = []
    for row, mode in enumerate(CPU_MODES):
        columns = Columns.from_fields([_CPU_FIELD], {"cpu": "0", "mode": mode}, EntityKind.NODE)
        found += [(name, row) for name in columns.names]
    return tuple(found)


@dataclass(slots=True)
class Recorder:
    """A recorder of a fleet's scrapes, deterministic by `seed`.

    The caller records a scrape after every advance of the fleet. `close` writes the remaining rows.
    """

    fleet: SimulatedFleet
    folder: Path
    seed: int = 0
    lost_share: float = 0.0
    _times: list[int] = field(default_factory=list)
    _parts: dict[EntityKind, list[tuple[Values, NDArray[np.bool_]]]] = field(default_factory=dict)
    _frozen: dict[int, Values] = field(default_factory=dict)
    _rng: np.random.Generator = field(init=False)
    _gpu: Columns = field(init=False)
    _port: Columns = field(init=False)
    _host: Columns = field(init=False)
    _cpu: tuple[tuple[str, int], ...] = field(init=False)
    _writers: "dict[EntityKind, SampleFile]" = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng([self.seed, 21])
        self._gpu = Columns.from_fields(GPU_FIELDS, {"gpu": "0"}, EntityKind.GPU)
        self._port = Columns.from_fields(PORT_FIELDS, _PORT_LABELS, EntityKind.PORT)
        self._host = Columns.from_fields(HOST_FIELDS, _HOST_LABELS, EntityKind.NODE)
        self._cpu = _list_cpu_columns()
        node_names = (*SCRAPE_METRICS, *self._host.names, *(name for name, _ in self._cpu))
        names = dict(zip(KINDS, (self._gpu.names, self._port.names, node_names), strict=True))
        self._writers = {kind: SampleFile(self.folder, kind, self.fleet.names, names[kind]) for kind in KINDS}
        self._parts = {kind: [] for kind in KINDS}

    @property
    def max_rounds(self) -> int:
        cells = self.fleet.spec.nodes * self.fleet.spec.gpus
        return max(1, VALUES_HELD // (cells * (len(self._gpu.names) + len(self._port.names))))

    def record_scrape(self, now_ms: int) -> None:
        """Record the present answers of all exporters, with the time `now_ms`."""
        fleet = self.fleet
        lost = self._rng.random((2, fleet.spec.nodes)) < self.lost_share
        up = ~(fleet.effects.page_down.T | lost)  # (exporter, node)
        gpu = fleet.sensors.gpu.copy()
        for row in np.flatnonzero(fleet.effects.frozen).tolist():
            gpu[:, row] = self._frozen.setdefault(row, gpu[:, row].copy())
        self._frozen = {row: page for row, page in self._frozen.items() if fleet.effects.frozen[row]}
        present = fleet.effects.present & up[0][:, None]
        self._times.append(now_ms)
        self._parts[EntityKind.GPU].append((self._gpu.convert(gpu.reshape(len(gpu), -1)), present.ravel()))
        port = fleet.sensors.port
        ports_up = np.repeat(up[1], fleet.spec.gpus)
        self._parts[EntityKind.PORT].append((self._port.convert(port.reshape(len(port), -1)), ports_up))
        self._parts[EntityKind.NODE].append(self._make_node_values(up, present))
        if len(self._times) >= self.max_rounds:
            self._flush()

    def close(self) -> None:
        self._flush()
        for writer in self._writers.values():
            writer.close()

    def _make_node_values(self, up: NDArray[np.bool_], present: NDArray[np.bool_]) -> tuple[Values, NDArray[np.bool_]]:
        fleet = self.fleet
        late_s = fleet.effects.page_delay_s + self._rng.uniform(*SCRAPE_TAKES_S, fleet.spec.nodes)
        count = np.where(up[0], present.sum(axis=1), np.nan)
        ports = np.where(up[1], fleet.spec.gpus, np.nan)
        host = self._host.convert(fleet.sensors.host)
        cpu = np.round(fleet.sensors.cpu[[row for _, row in self._cpu]], CPU_DECIMALS)
        from_node = np.concatenate([host, cpu])
        from_node[:, ~up[1]] = np.nan
        values = np.concatenate([np.stack([up[0].astype(float), late_s, count, ports]), from_node])
        return values, np.ones(fleet.spec.nodes, bool)

    def _flush(self) -> None:
        if not self._times:
            return
        for kind, parts in self._parts.items():
            self._writers[kind].write_rounds(self._times, parts)
            parts.clear()
        self._times.clear()


class SampleFile:
    """A writer of the file `KIND.parquet` with a fleet's samples of one kind.

    `nodes` are its nodes, each with the same number of cells (GPUs or ports).
    """

    def __init__(self, folder: Path, kind: EntityKind, nodes: Sequence[str], metrics: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._nodes, self._metrics = pa.array(nodes, pa.string()), tuple(metrics)
        self._rows = len(nodes)
        self._kind = kind
        counters = {metric.name for metric in METRICS[kind] if metric.is_counter}
        self._types = {name: pa.float64() if name in counters else pa.float32() for name in metrics}
        self._schema = pa.schema(
            [
                ("time_ms", pa.int64()),
                ("node", pa.dictionary(pa.int32(), pa.string())),
                ("index", pa.int16()),
                *self._types.items(),
            ]
        )
        self._writer = pq.ParquetWriter(folder / f"{kind.value}.parquet", self._schema, compression="zstd")

    def write_rounds(self, times_ms: Sequence[int], rounds: Sequence[tuple[Values, NDArray[np.bool_]]]) -> None:
        """Write one row group with several rounds of scrapes.

        rounds: for each round, (metric, cell) values, and (cell,) whether the cell answered, node by node.
        """
        cells = len(rounds[0][1])
        each = cells // self._rows
        there = np.concatenate([mask for _, mask in rounds])
        values = np.concatenate([part for part, _ in rounds], axis=1)[:, there]
        cell = np.tile(np.arange(cells), len(rounds))[there]
        node = pa.DictionaryArray.from_arrays(pa.array((cell // each).astype(np.int32)), self._nodes)
        index = (cell % each).astype(np.int16)
        columns = [pa.array(np.repeat(np.asarray(times_ms, np.int64), cells)[there]), node, pa.array(index)]
        columns += [
            pa.array(column, from_pandas=True).cast(self._types[name])
            for name, column in zip(self._metrics, values, strict=True)
        ]
        self._writer.write_table(pa.table(columns, schema=self._schema), row_group_size=len(cell) or 1)

    def close(self) -> None:
        self._writer.close()
