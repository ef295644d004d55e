"""`fleetcast evaluate node_load`: how busy each node's GPUs are over the next ten minutes.

The command compares the served forecast with fair baselines. Simulated fleets (`faults/simulated`, from
`fleetcast simulate faults`) are replayed through the features that serve. A forecast is issued for
every node every two minutes. The windows are hours. Nothing is fitted.

    mae         of the median, against the mean use of those ten minutes
    pinball_90  of the p90, against each reading in them
    ours                the served forecast (fleetcast.models.node_load)
    last_value          the newest reading, for both levels
    last_value_spread   the newest reading, and a p90 above it by 1.28 standard deviations of half an hour
    mean_30m_spread     the same around the mean of half an hour
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.samples import EntityKind
from fleetcast.models.node_load import AHEAD_S, Z_90, GpuUse
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.training.reports.results import ResultRow, Results, WindowRow, compute_interval
from fleetcast.training.sets.fault_runs import FaultRun, read_fault_runs

Array = NDArray[np.float64]
Say = Callable[[str], None]

SIMULATED = "faults/simulated"
TARGET = "node_gpu_use"
EVERY_S = 120.0  # between forecasts
WARM_S = 1800.0  # nothing is judged before the longest window is full
HOUR_S = 3600.0
OURS = "ours"


@dataclass(frozen=True, slots=True)
class NodeLoadRun:
    """The GPU use in one run, and the forecasts of this use.

    use: (round, n) mean use of each node's GPUs. issued: number of a round → method → (level, n)
    forecasts.
    """

    time_ms: NDArray[np.int64]
    use: Array
    issued: dict[int, dict[str, Array]]


def evaluate(train: Path, test: Path, seed: int, say: Say) -> Results:
    """Evaluate every simulated run of the test folder. `train` is not read."""
    del train
    results = Results("node_load")
    runs = read_fault_runs(test, (SIMULATED,), results.skipped)
    if not runs:
        results.skipped.append(f"{SIMULATED}: no runs in {test}; `fleetcast simulate faults` makes some")
    losses: dict[tuple[str, str], list[Array]] = {}
    for run in runs:
        seen = replay_run(run)
        say(f"{run.name}: {len(seen.issued)} forecasts of {run.nodes} nodes")
        for key, by_origin in compute_losses(seen, run.interval_s).items():
            losses.setdefault(key, []).append(by_origin)
            results.windows += _make_hour_rows(run, key, seen, by_origin)
    for (method, metric), parts in losses.items():
        each = np.concatenate(parts)
        value, low, high = compute_interval(each, block=round(HOUR_S / EVERY_S), seed=seed)
        about = (SIMULATED, TARGET, "all", round(AHEAD_S), method, "", metric)
        results.rows.append(ResultRow(*about, value, low, high, len(each)))
    return results


def replay_run(run: FaultRun) -> NodeLoadRun:
    """Replay one run and issue forecasts of its GPU use."""
    fleet, topology = FleetWatch.from_topology(run.topology, run.interval_s), run.topology
    times, use, issued = [], [], {}
    every, warm = round(EVERY_S / run.interval_s), round(WARM_S / run.interval_s)
    for number, loads in enumerate(run.read_rounds(fleet.entities)):
        fleet.apply_batch(loads.batches, loads.events, loads.time_ms, loads.node_events)
        frame = fleet.extract_frames(topology, loads.time_ms).gpu
        rows = find_gpu_rows(fleet, topology.gpus)
        gpus = GpuUse.from_frame(
            frame, rows, compute_held_s(fleet.fold.jobs.list_running(), topology.names, rows.shape, loads.time_ms)
        )
        times.append(loads.time_ms)
        use.append(_average_known(gpus.newest))
        if number >= warm and number % every == 0:
            half_hour = _average_known(np.where(rows >= 0, frame.column("gpu_util_mean_30m")[rows], np.nan))
            issued[number] = make_forecasts(gpus, use[-1], half_hour)
    return NodeLoadRun(np.array(times, np.int64), np.array(use), issued)


def find_gpu_rows(fleet: FleetWatch, gpus: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return (n, g) the frame row of each GPU of each node, -1 if the GPU has never reported.

    gpus: (n,) number of GPUs of each node.
    """
    table = fleet.entities[EntityKind.GPU]
    rows = np.full((len(gpus), max(1, int(gpus.max(initial=1)))), -1, np.int32)
    index = np.array([int(name.rpartition("/")[2]) for name in table.names], np.intp)
    rows[table.node[: len(index)], index] = np.arange(len(index))
    return rows


def compute_held_s(running: list[JobAttempt], names: tuple[str, ...], shape: tuple[int, ...], now_ms: int) -> Array:
    """Return (n, g) the seconds for which the job on each GPU has run. NaN if the GPU is free."""
    held, row_of = np.full(shape, np.nan), {name: row for row, name in enumerate(names)}
    for attempt in running:
        for rank in attempt.ranks:
            held[row_of[rank.node], list(rank.gpus)] = (now_ms - (attempt.started_ms or now_ms)) / 1000
    return held


def make_forecasts(gpus: GpuUse, now: Array, half_hour: Array) -> dict[str, Array]:
    """Return method → (level, n) forecasts issued at one moment. The levels are p50 and p90.

    now, half_hour: (n,) the newest use of each node's GPUs, and its mean over half an hour.
    """
    spread = Z_90 * np.nan_to_num(_average_known(gpus.std_30m))
    found = {"last_value": [now, now], "last_value_spread": [now, now + spread]}
    found["mean_30m_spread"] = [half_hour, half_hour + spread]
    return {OURS: gpus.forecast_use(), **{method: np.clip(levels, 0.0, 1.0) for method, levels in found.items()}}


def compute_losses(seen: NodeLoadRun, interval_s: float) -> dict[tuple[str, str], Array]:
    """Return (method, metric) → (forecast,) mean loss over the nodes.

    Forecasts of the last ten minutes have no full outcome, so they are left out.
    """
    ahead = round(AHEAD_S / interval_s)
    found: dict[tuple[str, str], list[float]] = {}
    for number, methods in seen.issued.items():
        came = seen.use[number + 1 : number + 1 + ahead]
        for method, (middle, high) in methods.items() if len(came) == ahead else ():
            above = came - high
            for metric, losses in (
                ("mae", np.abs(middle - _average_known(came.T))),
                ("pinball_90", np.maximum(0.9 * above, -0.1 * above)),
            ):
                known = losses[np.isfinite(losses)]
                found.setdefault((method, metric), []).append(float(known.mean()) if len(known) else np.nan)
    return {key: np.array(losses) for key, losses in found.items()}


def _make_hour_rows(run: FaultRun, key: tuple[str, str], seen: NodeLoadRun, losses: Array) -> Iterator[WindowRow]:
    hour_ms, first_ms = round(HOUR_S * 1000), int(seen.time_ms[0])
    hour = (seen.time_ms[list(seen.issued)[: len(losses)]] - first_ms) // hour_ms
    for number in np.unique(hour[np.isfinite(losses)]).tolist():
        mine = (hour == number) & np.isfinite(losses)
        span = (first_ms + number * hour_ms, first_ms + (number + 1) * hour_ms)
        about = (SIMULATED, TARGET, "all", round(AHEAD_S), *key)
        yield WindowRow(*about, *span, float(losses[mine].mean()), int(mine.sum()))


def _average_known(values: Array) -> Array:
    """Return (n,) the mean of the known values of each row. NaN if no value is known."""
    known = np.isfinite(values)
    total: Array = np.where(known, values, 0.0).sum(axis=1)
    return np.where(known.any(axis=1), total / np.maximum(known.sum(axis=1), 1), np.nan)
