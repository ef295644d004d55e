"""A renderer that turns the step times of real runs into GPU telemetry, with the true steps.

Each run is rendered at several sampling intervals.

ByteDance's trace gives activity: the share of an interval that a worker's operations fill.
Megatron's iterations are filled with the pattern of a step (forward, backward, exchange,
optimizer). The time of an iteration beyond 1.5 medians is a stall. Values are means over the
interval that ends at `time_s`, with a sensor's noise. The files are
`DIR/telemetry/rendered/SOURCE-SERIES-INTERVALs/telemetry.parquet` and `truth.json`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fleetcast.fleet.errors import ConfigError
from fleetcast.simulator.hardware.workload import CONTEXT_POWER_W

RENDERED = Path("telemetry") / "rendered"
MEGATRON = Path("faults") / "megatron_step_times" / "step_times.parquet"
BYTEDANCE = Path("faults") / "straggler_bytedance" / "trace-AR.parquet"
INTERVALS_S = (0.05, 0.5, 1.0, 15.0)
SHORTEST_S, LONGEST_S, FEWEST_STEPS = 600.0, 900.0, 30
LEAST_RUN = 20  # steps of a run that is worth rendering
STALL_RATIO = 1.5
SAMPLES_A_STEP = 4
GPUS = 8
NOISE, POWER_NOISE_W = 0.03, 8.0  # at 0.05 s; less for means over longer intervals

# Levels of a stretch of a step: activity (of the power above a held context), SM, tensor, NVLink, InfiniBand, PCIe.
LEVELS = {
    "forward": (0.85, 0.85, 0.45, 0.10, 0.00, 0.2),
    "backward": (1.00, 0.90, 0.55, 0.30, 0.20, 0.2),
    "exchange": (0.35, 0.30, 0.02, 1.00, 1.00, 0.3),
    "optimizer": (0.50, 0.70, 0.00, 0.05, 0.00, 0.1),
    "wait": (0.12, 0.03, 0.00, 0.02, 0.01, 0.05),
    "stall": (0.05, 0.02, 0.00, 0.00, 0.01, 1.0),
}
PATTERNS: dict[str, tuple[tuple[str, float], ...]] = {
    "data_parallel": (("forward", 0.28), ("backward", 0.5), ("exchange", 0.18), ("optimizer", 0.04)),
    "accumulation": (*((("forward", 0.07), ("backward", 0.14)) * 4), ("exchange", 0.12), ("optimizer", 0.04)),
    "pipeline": (("wait", 0.1), ("forward", 0.3), ("backward", 0.4), ("wait", 0.08), ("exchange", 0.12)),
}
FULL = {"power_w": 560.0, "nvlink": 4e10, "ib": 4e10, "pcie": 2e9}  # bytes/s a GPU at level 1
_COMPUTE = ("forward-compute", "backward-compute", "optimizer", "optimizer-clip-main-grad")

Values = NDArray[np.float64]
Say = Callable[[str], None]


class StepTruth(msgspec.Struct, frozen=True):
    start_s: float
    duration_s: float


class RenderedTruth(msgspec.Struct, frozen=True):
    """The truth about one rendered run.

    `period_s`: the median step. `aliased`: whether a step has fewer than four samples. `step_time_cv`: the
    standard deviation of step times divided by their mean.
    """

    name: str
    source: str
    series: str
    pattern: str
    interval_s: float
    period_s: float
    aliased: bool
    step_time_cv: float
    seed: int
    steps: tuple[StepTruth, ...]


@dataclass(frozen=True, slots=True)
class Stretches:
    """The piecewise constant levels of one GPU over time.

    `ends_s`: (k,) increasing. `levels`: (k, 6) the levels until each end, in the order of LEVELS.
    """

    ends_s: Values
    levels: Values

    def compute_means(self, edges_s: Values) -> Values:
        """Return (t, 6) exact means of the levels between successive edges (t + 1,)."""
        lengths = np.diff(self.ends_s, prepend=0.0)
        area = np.concatenate([np.zeros((1, self.levels.shape[1])), np.cumsum(self.levels * lengths[:, None], axis=0)])
        times = np.concatenate([[0.0], self.ends_s])
        at = np.stack([np.interp(edges_s, times, column) for column in area.T], axis=1)
        means: Values = np.diff(at, axis=0) / np.diff(edges_s)[:, None]
        return means


@dataclass(frozen=True, slots=True)
class Run:
    """One real run, ready to be rendered. stretches: one for each GPU or worker."""

    source: str
    series: str
    pattern: str
    durations_s: Values
    stretches: tuple[Stretches, ...]


def render_steps(
    data: Path,
    out: Path,
    seed: int = 1,
    series: int = 24,
    intervals_s: Sequence[float] = INTERVALS_S,
    say: Say = lambda _: None,
) -> list[Path]:
    """Render ByteDance's run and up to `series` Megatron runs at each interval. Returns the folders.

    Raises ConfigError if the data folder has neither.
    """
    rng = np.random.default_rng([seed, 24])
    written = []
    for run in _read_runs(data, series, rng):
        for interval_s in intervals_s:
            name = f"{run.source}-{run.series}-{interval_s:g}s"
            written.append(_write_run(out / RENDERED / name, run, interval_s, seed, rng))
        say(f"{run.source}-{run.series}: {len(run.durations_s)} steps of {np.median(run.durations_s):.3f} s")
    if not written:
        raise ConfigError(f"{data}: neither {MEGATRON} nor {BYTEDANCE}; set FLEETCAST_DATA")
    return written


def _read_runs(data: Path, series: int, rng: np.random.Generator) -> Iterator[Run]:
    if (data / BYTEDANCE).exists():
        yield read_bytedance_run(data / BYTEDANCE)
    if (data / MEGATRON).exists():
        yield from read_megatron_runs(data / MEGATRON, series, rng)


def make_pattern_stretches(durations_s: Values, pattern: str) -> Stretches:
    """Fill every step with the pattern. In a step, the time beyond 1.5 median steps is a stall.

    durations_s: (step,).
    """
    parts = PATTERNS[pattern]
    usual = np.minimum(durations_s, STALL_RATIO * np.median(durations_s))
    shares = np.array([share for _, share in parts]) / sum(share for _, share in parts)
    lengths = np.concatenate([usual[:, None] * shares, (durations_s - usual)[:, None]], axis=1)
    levels = np.array([LEVELS[name] for name, _ in parts] + [LEVELS["stall"]])
    return Stretches(np.cumsum(lengths.ravel()), np.tile(levels, (len(durations_s), 1)))


def read_megatron_runs(path: Path, series: int, rng: np.random.Generator) -> Iterator[Run]:
    """Yield up to `series` Megatron runs, evenly spaced by the logarithm of their step times.

    Each run is repeated or cut to about ten minutes.
    """
    columns = ["suite", "test_case", "platform", "step", "iteration_time_s"]
    table = _read_table(path, columns).to_pandas()
    grouped = table.sort_values("step").groupby(columns[:3], observed=True)["iteration_time_s"]
    runs = [values.to_numpy(np.float64)[1:] for _, values in grouped if len(values) > LEAST_RUN]
    runs = sorted((run[np.isfinite(run) & (run > 0)] for run in runs), key=lambda run: float(np.median(run)))
    medians = np.array([float(np.median(run)) for run in runs])
    wanted = np.geomspace(medians[0], medians[-1], max(series, 1)) if runs else medians
    chosen = np.unique([int(np.argmin(np.abs(np.log(medians / one)))) for one in wanted])
    for number, row in enumerate(chosen.astype(int).tolist()):
        durations_s = _fit_length(runs[row])
        pattern = str(rng.choice(list(PATTERNS)))
        stretches = make_pattern_stretches(durations_s, pattern)
        yield Run("megatron", f"{number:03d}", pattern, durations_s, (stretches,) * GPUS)


def _read_table(path: Path, columns: list[str]) -> pa.Table:
    """Read columns of a Parquet file. Raises ConfigError that names the file."""
    try:
        return pq.read_table(path, columns=columns)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no table of {', '.join(columns)} ({error})") from None


def _fit_length(durations_s: Values) -> Values:
    """Repeat or cut a run's step times to a length that suits every interval."""
    total_s = float(durations_s.sum())
    many = np.tile(durations_s, max(1, int(np.ceil(SHORTEST_S / total_s))))
    enough = max(FEWEST_STEPS, int(np.searchsorted(np.cumsum(many), LONGEST_S)) + 1)
    return many[:enough]


def read_bytedance_run(path: Path) -> Run:
    """Return the run in ByteDance's trace: each worker's own operations, one step after the other."""
    names = ["dp_rank", "stage", "step", "optype", "start_ts", "duration"]
    trace = _read_table(path, names).to_pandas()
    trace["end"] = trace["start_ts"].astype(float) + trace["duration"].astype(float)
    durations_s = trace.groupby("step")["end"].max().sort_index()
    begins_s = durations_s.cumsum() - durations_s
    offset = trace["step"].map(begins_s).to_numpy(np.float64)
    trace["from"], trace["until"] = trace["start_ts"] + offset, trace["end"] + offset
    total_s = float(durations_s.sum())
    workers = [_make_worker_stretches(rows, total_s) for _, rows in trace.groupby(["dp_rank", "stage"])]
    return Run("bytedance", "AR", "trace", durations_s.to_numpy(np.float64), tuple(workers))


def _make_worker_stretches(rows: "object", total_s: float) -> Stretches:
    """Convert the operations of one worker into levels over time.

    Where computing and communicating overlap, only computing counts. Time without operations is waiting.
    """
    from pandas import DataFrame

    assert isinstance(rows, DataFrame)
    kind = np.where(rows["optype"].isin(_COMPUTE), 2, 1)
    kind = np.where((rows["optype"] == "backward-compute").to_numpy(), 3, kind)
    begins, ends = rows["from"].to_numpy(np.float64), rows["until"].to_numpy(np.float64)
    edges = np.unique(np.concatenate([begins, ends, [0.0, total_s]]))
    busy = np.zeros((4, len(edges)))
    for what in (1, 2, 3):
        np.add.at(busy[what], np.searchsorted(edges, begins[kind == what]), 1)
        np.add.at(busy[what], np.searchsorted(edges, ends[kind == what]), -1)
    running = np.cumsum(busy, axis=1)[:, :-1] > 0
    chosen: NDArray[np.int64] = np.where(running[3], 3, np.where(running[2], 2, np.where(running[1], 1, 0)))
    levels = np.array([LEVELS[name] for name in ("wait", "exchange", "forward", "backward")])
    return Stretches(edges[1:], levels[chosen])


def _write_run(folder: Path, run: Run, interval_s: float, seed: int, rng: np.random.Generator) -> Path:
    """Write the files of one run at one interval, and return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(render_run(run, interval_s, rng), folder / "telemetry.parquet", compression="zstd")
    starts_s = np.cumsum(run.durations_s) - run.durations_s
    period_s = float(np.median(run.durations_s))
    truth = RenderedTruth(
        name=folder.name,
        source=run.source,
        series=run.series,
        pattern=run.pattern,
        interval_s=interval_s,
        period_s=period_s,
        aliased=period_s < SAMPLES_A_STEP * interval_s,
        step_time_cv=float(np.std(run.durations_s) / np.mean(run.durations_s)),
        seed=seed,
        steps=tuple(
            StepTruth(round(start, 6), round(lasts, 6))
            for start, lasts in zip(starts_s.tolist(), run.durations_s.tolist(), strict=True)
        ),
    )
    (folder / "truth.json").write_bytes(msgspec.json.encode(truth))
    return folder


def render_run(run: Run, interval_s: float, rng: np.random.Generator) -> pa.Table:
    """Return a table of all GPUs of a run in order of time, with one row for each GPU and interval.

    Column names and units are those of the recorded H100 runs.
    """
    edges_s = np.arange(0.0, float(run.durations_s.sum()), interval_s)
    whole: dict[int, Values] = {}  # GPUs of one pattern share their stretches
    for stretches in run.stretches:
        if id(stretches) not in whole:
            whole[id(stretches)] = stretches.compute_means(edges_s)
    means = np.stack([whole[id(stretches)] for stretches in run.stretches], axis=1)  # (t, GPU, 6)
    quiet = np.sqrt(INTERVALS_S[0] / max(interval_s, INTERVALS_S[0]))
    skew = rng.normal(1.0, 0.01, (1, means.shape[1], 1))
    means = np.maximum(means * skew * (1 + NOISE * quiet * rng.standard_normal(means.shape)), 0.0)
    activity, sm, tensor, nvlink, ib, pcie = (column.ravel() for column in np.moveaxis(means, 2, 0))
    power = CONTEXT_POWER_W + (FULL["power_w"] - CONTEXT_POWER_W) * activity
    power += POWER_NOISE_W * quiet * rng.standard_normal(len(power))
    gpus = means.shape[1]
    return pa.table(
        {
            "time_s": np.repeat(edges_s[1:], gpus),
            "gpu": np.tile(np.arange(gpus, dtype=np.int16), len(edges_s) - 1),
            "power_w": power.astype(np.float32),
            "sm_active": np.minimum(sm, 1.0).astype(np.float32),
            "tensor_active": np.minimum(tensor, 1.0).astype(np.float32),
            "nvlink_tx_bytes_s": (FULL["nvlink"] * nvlink).astype(np.float32),
            "nvlink_rx_bytes_s": (FULL["nvlink"] * nvlink).astype(np.float32),
            "pcie_tx_bytes_s": (FULL["pcie"] * pcie).astype(np.float32),
            "pcie_rx_bytes_s": (FULL["pcie"] * pcie).astype(np.float32),
            "gpu_util_pct": np.round(100 * np.minimum(sm * 1.1 + nvlink * 0.5, 1.0)).astype(np.float32),
            "ib_tx_bytes_s": (FULL["ib"] * ib).astype(np.float32),
        }
    )
