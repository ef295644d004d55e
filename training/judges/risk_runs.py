"""Node risk on simulated telemetry: how well it ranks nodes for the next hour, and how early it warns.

Every run is replayed through the code that serves. A row is a node at a minute, if the node has no
fault then and had none in the 10 minutes before. Its label is whether a fault begins within the
hour. Each number is computed three times: for all faults, for those with a precursor, and for those without.
Decoys do not count as faults. Only the alarm level is fitted: in the runs of the train folder, it is exceeded in
1 % of the moments that no fault follows.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.risk.scores import RISK_HORIZONS_S
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.training.judges.findings import AFTER_MS
from fleetcast.training.judges.risk_metrics import NodeDays, RankedScores, compute_metric_intervals
from fleetcast.training.reports.results import ResultRow, Results
from fleetcast.training.sets.dropped import find_dropped_metrics
from fleetcast.training.sets.fault_runs import FaultRun, RunTruth, read_fault_runs

Array = NDArray[np.float64]
Say = Callable[[str], None]

HORIZON_MS = 1000 * RISK_HORIZONS_S[0]
EVERY_MS = 60_000
BLOCK_MS = 600_000  # of moments that the bootstrap draws together, a few in a row
ALARM_SHARE = 0.01  # of the moments before no fault that may be above the alarm
ALARM_P = 0.01  # where the train folder has no run


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """The risk scores of n nodes at m moments of a run.

    p: (m, n) the probability of the likeliest kind of risk within the hour. signs: (m, n) whether there is any
    evidence.
    """

    time_ms: NDArray[np.int64]
    p: Array
    signs: NDArray[np.bool_]


def judge_runs(results: Results, train: Path, test: Path, seed: int, say: Say, drop: Collection[str] = ()) -> None:
    """Add the rows of every run of the test folder that has faults.

    drop: kinds of telemetry that are left out of the runs of both folders.
    """
    without = find_dropped_metrics(drop)
    runs = read_fault_runs(test, skipped=results.skipped, without=without)
    fitted = read_fault_runs(train, skipped=results.skipped, without=without) if runs and train != test else []
    alarm = find_alarm_level(fitted, say) if fitted else ALARM_P
    for run in runs:
        dataset = run.folder.relative_to(test).as_posix()
        faults = tuple(fault for fault in run.truth if not fault.benign)
        if not faults:
            results.skipped.append(f"{dataset}: it has no faults")
            continue
        say(f"{dataset}: replaying {run.nodes} nodes, {len(faults)} faults")
        add_run_rows(results, dataset, replay_run(run), run.topology.names, faults, alarm, seed)


def find_alarm_level(runs: Sequence[FaultRun], say: Say) -> float:
    """Return the probability that is exceeded in 1 % of the quiet moments of these runs.

    A moment of a node is quiet if the node has no active fault and gets none within the hour.
    """
    quiet = []
    for run in runs:
        say(f"{run.name}: replaying {run.nodes} nodes for the level of the alarm")
        seen = replay_run(run)
        row = {name: at for at, name in enumerate(run.topology.names)}
        active, before = _label_faults(seen, row, tuple(fault for fault in run.truth if not fault.benign))
        quiet.append(seen.p[~active & ~before])
    level = np.concatenate(quiet) if quiet else np.empty(0)
    return float(np.quantile(level, 1 - ALARM_SHARE)) if len(level) else ALARM_P


def replay_run(run: FaultRun) -> WatchedRun:
    """Replay a run, and return the scores that a service would have given each minute."""
    replay = FleetWatch.from_topology(run.topology, run.interval_s)
    times: list[int] = []
    p: list[Array] = []
    signs: list[NDArray[np.bool_]] = []
    for round in run.read_rounds(replay.entities):
        replay.apply_batch(round.batches, round.events, round.time_ms, round.node_events)
        frames = replay.extract_frames(run.topology, round.time_ms)
        risk = replay.score(replay.make_moment(frames, run.topology, round.time_ms)).risk
        if not times or round.time_ms - times[-1] >= EVERY_MS:
            times.append(round.time_ms)
            p.append(np.nan_to_num(risk.values[:, 0].max(axis=0)))
            signs.append(np.isin(np.arange(run.nodes), list(risk.reasons)))
    return WatchedRun(np.array(times, np.int64), np.array(p), np.array(signs))


def add_run_rows(
    results: Results,
    dataset: str,
    seen: WatchedRun,
    names: tuple[str, ...],
    faults: tuple[RunTruth, ...],
    alarm: float,
    seed: int,
) -> None:
    """Add AUROC, AP and lead times of warnings in one run.

    The numbers are added for all faults, for those with a precursor, and for those without one.
    """
    row = {name: at for at, name in enumerate(names)}
    active, before = _label_faults(seen, row, faults)
    groups = {
        "all": faults,
        "with precursor": tuple(fault for fault in faults if fault.precursor),
        "without precursor": tuple(fault for fault in faults if not fault.precursor),
    }
    share = len(groups["with precursor"]) / len(faults)
    results.rows.append(_make_row(dataset, "all", "truth", "precursor_share", share, None, None, len(faults)))
    above = float((seen.p[~active & ~before] > alarm).mean()) if (~active & ~before).any() else 0.0
    results.rows.append(_make_row(dataset, "all", "ours", "quiet_share_above_alarm", above, None, None, len(faults)))
    for series, own in groups.items():
        if not own:
            continue
        labels = _label_faults(seen, row, own)[1]
        counted = ~active & (labels | ~before)  # other faults' hours are neither
        _add_ranking_rows(results, dataset, series, seen, counted, labels, seed)
        leads = np.array([_measure_lead_s(seen, row[fault.node], active, fault, alarm) for fault in own])
        warned = leads[leads > 0]
        results.rows.append(
            _make_row(dataset, series, "ours", "warned_share", len(warned) / len(own), None, None, len(own))
        )
        if len(warned):
            low, middle, high = np.quantile(warned, (0.1, 0.5, 0.9)).tolist()
            results.rows.append(_make_row(dataset, series, "ours", "lead_s", middle, low, high, len(warned)))


def _add_ranking_rows(
    results: Results,
    dataset: str,
    series: str,
    seen: WatchedRun,
    counted: NDArray[np.bool_],
    labels: NDArray[np.bool_],
    seed: int,
) -> None:
    block = ((seen.time_ms - seen.time_ms[0]) // BLOCK_MS)[:, None] + np.zeros(labels.shape[1], np.int64)
    rows = NodeDays(block[counted], labels[counted], int(block.max()) + 1)
    for method, score in (("ours", seen.p), ("any_signal", seen.signs.astype(np.float64))):
        found = compute_metric_intervals(RankedScores(rows, score[counted]), rows.days, seed)
        for metric in ("auroc", "ap"):
            if metric in found:
                results.rows.append(_make_row(dataset, series, method, metric, *found[metric], int(rows.labels.sum())))


def _label_faults(
    seen: WatchedRun, row: dict[str, int], faults: tuple[RunTruth, ...]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return two (m, n) masks: whether a fault is or was just active, and whether one begins within the hour."""
    active, before = np.zeros(seen.p.shape, bool), np.zeros(seen.p.shape, bool)
    for fault in faults:
        lasts = np.ones(len(seen.time_ms), bool) if fault.end_ms is None else seen.time_ms < fault.end_ms + AFTER_MS
        active[:, row[fault.node]] |= (seen.time_ms >= fault.start_ms) & lasts
        comes = (seen.time_ms < fault.start_ms) & (seen.time_ms >= fault.start_ms - HORIZON_MS)
        before[:, row[fault.node]] |= comes
    return active, before


def _measure_lead_s(seen: WatchedRun, node: int, active: NDArray[np.bool_], fault: RunTruth, alarm: float) -> float:
    """Return how many seconds before a fault the first alarm of the last hour came.

    Returns 0 if there is no such alarm.
    """
    hour = (seen.time_ms < fault.start_ms) & (seen.time_ms >= fault.start_ms - HORIZON_MS) & ~active[:, node]
    at = np.flatnonzero(hour & (seen.p[:, node] > alarm))
    return float(fault.start_ms - seen.time_ms[at[0]]) / 1000 if len(at) else 0.0


def _make_row(
    dataset: str,
    series: str,
    method: str,
    metric: str,
    value: float,
    low: float | None,
    high: float | None,
    n: int,
) -> ResultRow:
    return ResultRow(dataset, "simulated fault", series, HORIZON_MS // 1000, method, "", metric, value, low, high, n)
