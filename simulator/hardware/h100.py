"""Recorded H100 runs as exporter pages: each run is a node, replayed in a loop from its first step on.

Only recorded values are shown (no SM clock, no error counters). Energy and InfiniBand bytes keep growing
from loop to loop. Files: `RUN_telemetry.csv.gz` (one row for each GPU and 0.1 s),
`RUN_ib.csv.gz` (port rates), `RUN_bmc.csv.gz` (chassis power).
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pyarrow import csv

from fleetcast.fleet.errors import ConfigError
from fleetcast.simulator.hardware.telemetry import (
    GPU_FIELDS,
    GPU_ROW,
    HOST_FIELDS,
    HOST_ROW,
    PORT_FIELDS,
    DcgmPage,
    Field,
    NodePage,
)

PORTS = 8
FOLDER = Path("telemetry") / "h100-phases"
_FP16 = Field("DCGM_FI_PROF_PIPE_FP16_ACTIVE", "gauge", "Ratio of cycles the fp16 pipes are active.", "%f")
_ENERGY = "energy_mj"
_USED, _TOTAL = "mem_used_mib", "mem_total_mib"

# Column of the recording -> field of the page; free memory follows from used and total.
_COLUMNS: dict[str, Field] = {
    column: GPU_FIELDS[GPU_ROW[f"DCGM_FI_{name}"]]
    for column, name in (
        ("power_w", "DEV_POWER_USAGE"),
        ("temp_c", "DEV_GPU_TEMP"),
        (_ENERGY, "DEV_TOTAL_ENERGY_CONSUMPTION"),
        ("gpu_util_pct", "DEV_GPU_UTIL"),
        ("mem_util_pct", "DEV_MEM_COPY_UTIL"),
        ("throttle_reasons", "DEV_CLOCKS_EVENT_REASONS"),
        (_USED, "DEV_FB_USED"),
        ("sm_active", "PROF_SM_ACTIVE"),
        ("tensor_active", "PROF_PIPE_TENSOR_ACTIVE"),
        ("dram_active", "PROF_DRAM_ACTIVE"),
        ("pcie_tx_bytes_s", "PROF_PCIE_TX_BYTES"),
        ("pcie_rx_bytes_s", "PROF_PCIE_RX_BYTES"),
        ("nvlink_tx_bytes_s", "PROF_NVLINK_TX_BYTES"),
        ("nvlink_rx_bytes_s", "PROF_NVLINK_RX_BYTES"),
    )
} | {"fp16_active": _FP16}
DCGM_FIELDS = (*_COLUMNS.values(), GPU_FIELDS[GPU_ROW["DCGM_FI_DEV_FB_FREE"]])
RECORDED_PORT_FIELDS = PORT_FIELDS[:4]  # bytes and packets, received and transmitted
_PORT_COLUMNS = ("rx_bytes_s", "tx_bytes_s", "rx_pkts_s", "tx_pkts_s")
NODE_FIELDS = (HOST_FIELDS[HOST_ROW["node_hwmon_power_average_watt"]],)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RecordedSeries:
    """A recorded series that repeats in a loop.

    `values`: (t, …) at `times_s` (t,) from the run's start. `grows`: (…) is added to the values with each
    further loop.
    """

    times_s: Array
    values: Array
    grows: Array

    @property
    def span_s(self) -> float:
        return float(self.times_s[-1]) + 0.1

    def find_values_at(self, age_s: float) -> Array:
        """Return the values (…) of the newest sample at an age. The recording repeats as often as needed."""
        loops, within_s = divmod(age_s, self.span_s)
        row = max(0, int(np.searchsorted(self.times_s, within_s, side="right")) - 1)
        now: Array = self.values[row] + loops * self.grows
        return now


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The recordings of one run. Any of the three may be missing."""

    node: str
    gpus: RecordedSeries | None = None  # (t, field, GPU)
    ports: RecordedSeries | None = None  # (t, field, port)
    power: RecordedSeries | None = None  # (t, 1)


class RecordedFleet:
    """A fleet of recorded runs, with the same methods for pages as a simulated fleet.

    It needs at least one run.
    """

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self.time_ms: int | None = None
        self.runs = {run.node: run for run in runs}
        self._start_ms: int | None = None
        self._dcgm = {run.node: DcgmPage(run.node, run.gpus.values.shape[2], DCGM_FIELDS) for run in runs if run.gpus}
        self._node = {run.node: _make_node_page(run) for run in runs if run.ports or run.power}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.runs)

    def list_targets(self) -> Iterable[tuple[str, str]]:
        """Return the (node, exporter) pair of every page. A run without GPU telemetry has no dcgm page."""
        return [(node, "dcgm") for node in self._dcgm] + [(node, "node") for node in self._node]

    def advance(self, now_ms: int) -> None:
        """Advance the fleet to a time. The first call starts all runs."""
        self._start_ms = now_ms if self._start_ms is None else self._start_ms
        self.time_ms = now_ms

    def render_page(self, node: str, exporter: str, now_ms: int | None = None) -> bytes:
        """Return the exposition text of one exporter at `now_ms`, by default the time of the last `advance`."""
        time_ms = self.time_ms if now_ms is None else now_ms
        assert time_ms is not None, "advance comes first"
        assert self._start_ms is not None
        age_s = max(0, time_ms - self._start_ms) / 1000
        run = self.runs[node]
        if exporter == "dcgm":
            assert run.gpus is not None
            values = run.gpus.find_values_at(age_s)
            return self._dcgm[node].render(values, np.ones(values.shape[1], bool))
        ports = run.ports.find_values_at(age_s) if run.ports else np.empty(0)
        power = run.power.find_values_at(age_s) if run.power else np.empty(0)
        return self._node[node].render(ports, np.empty(0), power)

    def is_answering(self, node: str, exporter: str) -> bool:
        return True

    def get_delay_s(self, node: str) -> float:
        return 0.0


def _make_node_page(run: RecordedRun) -> NodePage:
    ports = PORTS if run.ports else 0
    return NodePage(run.node, ports, RECORDED_PORT_FIELDS if ports else (), NODE_FIELDS if run.power else (), cpus=0)


def load_recorded_fleet(data: Path | None = None) -> RecordedFleet:
    """Load all runs below the data folder (default: FLEETCAST_DATA).

    Raises ConfigError that says which files are missing, and where.
    """
    folder = (data or Path(os.environ.get("FLEETCAST_DATA", "../shared/data"))) / FOLDER
    names = sorted(
        {path.name.rsplit("_", 1)[0] for path in folder.glob("*_*.csv.gz") if not path.name.startswith("old_")}
    )
    runs = [run for name in names if (run := _load_run(folder, name)).gpus or run.ports]
    if not runs:
        raise ConfigError(
            f"no recorded H100 runs in {folder}: expected files such as t2_telemetry.csv.gz; "
            "set FLEETCAST_DATA to the folder that holds telemetry/h100-phases, or use simulated runs"
        )
    return RecordedFleet(runs)


def _load_run(folder: Path, name: str) -> RecordedRun:
    def find_file(kind: str) -> Path | None:
        file = folder / f"{name}_{kind}.csv.gz"
        return file if file.exists() else None

    telemetry, ib, bmc = find_file("telemetry"), find_file("ib"), find_file("bmc")
    return RecordedRun(
        node=name.replace("_", "-"),
        gpus=_read_gpus(telemetry) if telemetry else None,
        ports=_read_ports(ib) if ib else None,
        power=_read_power(bmc) if bmc else None,
    )


def _read_gpus(path: Path) -> RecordedSeries:
    """Read a recording of the GPUs as (t, field, GPU) values, at the times of GPU 0's samples.

    A missing value repeats the value before it, as in DCGM's cache. It is 0 if there is none before it.
    """
    columns = _read_columns(path, ("timestamp", "gpu", _TOTAL, *_COLUMNS))
    per_gpu = [columns["gpu"] == gpu for gpu in np.unique(columns["gpu"])]
    samples = min(int(mask.sum()) for mask in per_gpu)
    free = columns[_TOTAL] - columns[_USED]
    values = np.stack(
        [
            np.stack([column[mask][:samples] for mask in per_gpu], axis=1)
            for column in (*(columns[name] for name in _COLUMNS), free)
        ],
        axis=1,
    )
    values = _fill_forward(values)
    times_s = columns["timestamp"][per_gpu[0]][:samples]
    grows = np.zeros(values.shape[1:])
    row = list(_COLUMNS).index(_ENERGY)
    grows[row] = values[-1, row] - values[0, row]
    return RecordedSeries(times_s - times_s[0], values, grows)


def _fill_forward(values: Array) -> Array:
    """Replace each NaN by the last number before it along axis 0, or by 0 if there is none.

    >>> _fill_forward(np.array([np.nan, 1.0, np.nan, 3.0])).tolist()
    [0.0, 1.0, 1.0, 3.0]
    """
    rows = np.arange(len(values)).reshape(-1, *[1] * (values.ndim - 1))
    last = np.maximum.accumulate(np.where(np.isnan(values), 0, rows), axis=0)
    return np.nan_to_num(np.take_along_axis(values, last, axis=0), nan=0.0)


def _read_ports(path: Path) -> RecordedSeries:
    """Read rates per second of the ports, and add them up to (t, field, port) counters."""
    names = [[f"ib{port}_{column}" for port in range(PORTS)] for column in _PORT_COLUMNS]
    columns = _read_columns(path, ("timestamp", *(name for row in names for name in row)))
    times_s = columns["timestamp"] - columns["timestamp"][0]
    rates = np.stack([np.stack([columns[name] for name in row], axis=1) for row in names], axis=1)
    counted = np.cumsum(rates * np.diff(times_s, prepend=0.0)[:, None, None], axis=0)
    return RecordedSeries(times_s, counted, counted[-1])


def _read_power(path: Path) -> RecordedSeries:
    columns = _read_columns(path, ("timestamp", "sys_power_w"))
    times_s = columns["timestamp"] - columns["timestamp"][0]
    return RecordedSeries(times_s, columns["sys_power_w"][:, None], np.zeros(1))


def _read_columns(path: Path, names: Sequence[str]) -> dict[str, Array]:
    """Read columns of a CSV file as floats. Raises ConfigError that names the file and the missing column."""
    table = csv.read_csv(path)
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise ConfigError(f"{path}: no column {missing[0]!r}")
    return {name: table.column(name).to_numpy().astype(np.float64) for name in names}
