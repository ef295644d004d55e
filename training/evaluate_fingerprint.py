"""`fleetcast evaluate fingerprint`: periods, phases, workload classes and next checkpoints, beside fair baselines.

telemetry/rendered      step times of real runs as telemetry: period within 2 %, and "unknown" where it is aliased
telemetry/h100-phases   recorded runs with phases: macro-F1, what is learnt of phases left one run out
faults/simulated        jobs that tell of checkpoints: the next one, predicted half-way to it
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.metrics import f1_score

from features.fingerprint import class_of, shape_of
from features.period import SAMPLES_A_PERIOD, Period, find_period
from fleet.events import Checkpoint, JobEvent
from models.phases import PHASES, Levels, PhaseRule
from models.renewal import next_of
from training.results import Results, Row, interval

Array = NDArray[np.float64]
Say = Callable[[str], None]

RENDERED, RECORDED, SIMULATED = "telemetry/rendered", "telemetry/h100-phases", "faults/simulated"
WITHIN = 0.02
HIT_S, HIT_SHARE = 30.0, 0.05
GRID_S = 1.0  # phases are judged once a second
CHANNELS = (
    "sm_active",
    "tensor_active",
    "power_w",
    "nvlink_tx_bytes_s",
    "pcie_tx_bytes_s",
    "ib_tx_bytes_s",
)
CLASS_OF_NAME = {"t": "training", "i": "inference", "b": "idle"}  # of recorded runs, by their first letter
FEWEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded run on a grid of GRID_S: `phase` (second,) names; `channels` by column, means over GPUs."""

    name: str
    phase: NDArray[np.object_]
    channels: dict[str, Array]
    fine: Array
    fine_s: float

    def of(self, column: str) -> Array:
        return self.channels.get(column, np.full(len(self.phase), np.nan))

    @property
    def levels(self) -> Levels:
        memory = self.of("mem_used_mib") / 1024
        return Levels(GRID_S, self.of("sm_active"), memory, self.of("nvlink_tx_bytes_s"), self.host)

    @property
    def host(self) -> Array:
        return self.of("pcie_rx_bytes_s") + self.of("pcie_tx_bytes_s")


def evaluate(train: Path, test: Path, seed: int, say: Say) -> Results:
    """Judge what the test folder has; phases learn from the runs of both folders but the one they are judged on."""
    results = Results("fingerprint")
    for folder, judge in ((RENDERED, _judge_periods), (SIMULATED, _judge_checkpoints)):
        if (test / folder).is_dir():
            judge(results, test / folder, seed)
        else:
            results.skipped.append(f"{folder}: not in {test}")
    runs = {run.name: run for run in (*_recorded(train / RECORDED), *_recorded(test / RECORDED))}
    tested = {run.name for run in _recorded(test / RECORDED)}
    if tested and len(runs) > 1:
        say(f"{RECORDED}: {len(tested)} runs, each judged by what the others teach")
        _judge_phases(results, list(runs.values()), tested, seed)
    else:
        results.skipped.append(f"{RECORDED}: fewer than two runs with phases in {test}")
    return results


def _row(dataset: str, target: str, method: str, metric: str, values: Sequence[float], seed: int) -> Row:
    """The mean of `values` with its interval."""
    value, low, high = interval(values, seed=seed)
    model = "autocorrelation" if target == "period" else "rules" if target in ("phase", "class") else "renewal"
    return Row(dataset, target, "all", None, method, model if method == "ours" else method, metric, value, low, high,
               len(values))  # fmt: skip


# -- periods ------------------------------------------------------------------------------------------------------


class _Truth(msgspec.Struct):
    interval_s: float
    period_s: float


def _judge_periods(results: Results, folder: Path, seed: int) -> None:
    """Runs with enough samples a step count as found within 2 %, the others as "unknown"."""
    found: dict[str, list[float]] = defaultdict(list)
    unknown: dict[str, list[float]] = defaultdict(list)
    for path in sorted(folder.glob("*/truth.json")):
        truth = msgspec.json.decode(path.read_bytes(), type=_Truth)
        channels = _means(pd.read_parquet(path.parent / "telemetry.parquet"))
        said = {
            "ours": find_period(channels, truth.interval_s).period_s,
            "largest_line": _largest_line(channels, truth.interval_s),
        }
        for method, period_s in said.items():
            if truth.period_s < SAMPLES_A_PERIOD * truth.interval_s:
                unknown[method].append(float(period_s is None))
            else:
                near = period_s is not None and abs(period_s / truth.period_s - 1) <= WITHIN
                found[method].append(float(near))
    for metric, by_method in (("period_within_2pct", found), ("aliased_unknown", unknown)):
        for method, values in by_method.items():
            results.rows.append(_row(RENDERED, "period", method, metric, values, seed))


def _means(table: pd.DataFrame) -> Array:
    """(channel, sample) means over GPUs."""
    columns = [name for name in CHANNELS if name in table]
    means = table.groupby("time_s")[columns].mean()
    return np.asarray(means.to_numpy(np.float64).T)


def _largest_line(channels: Array, interval_s: float) -> float:
    """The baseline: the strongest line of the power spectrum, whatever it is."""
    first = channels[0] - channels[0].mean()
    power = np.abs(np.fft.rfft(first)) ** 2
    return float(len(first) * interval_s / (1 + int(np.argmax(power[1:]))))


# -- phases and classes -------------------------------------------------------------------------------------------


def _recorded(folder: Path) -> Iterator[Recorded]:
    """Runs that have phases and SM activity."""
    for path in sorted(folder.glob("*_telemetry.csv.gz")):
        table = pd.read_csv(path)
        name = path.name.removesuffix("_telemetry.csv.gz")
        if {"phase", "sm_active", "timestamp"} <= set(table) and len(table):
            yield _on_grid(name, table)


def _on_grid(name: str, table: pd.DataFrame) -> Recorded:
    since_s = table["timestamp"] - table["timestamp"].min()
    second = (since_s // GRID_S).astype(int)
    means = table.groupby(second).mean(numeric_only=True)
    whole = pd.RangeIndex(int(second.max()) + 1)
    phase = table.groupby(second)["phase"].last().reindex(whole).ffill()
    channels = {str(column): means[column].reindex(whole).to_numpy(np.float64) for column in means}
    fine_s = 0.1
    tenth = table.assign(time_s=(since_s / fine_s).round()).groupby("time_s").mean(numeric_only=True)
    columns = [column for column in CHANNELS if column in tenth]
    return Recorded(name, phase.to_numpy(object), channels, tenth[columns].to_numpy(np.float64).T, fine_s)


def _judge_phases(results: Results, runs: Sequence[Recorded], tested: set[str], seed: int) -> None:
    scores: dict[str, list[float]] = defaultdict(list)
    right: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.name not in tested:
            continue
        others = [other for other in runs if not _are_same(other, run)]
        if others:
            for method, said in _phases_said(run, others).items():
                macro = f1_score(run.phase, said, labels=sorted(set(run.phase)), average="macro", zero_division=0)
                scores[method].append(float(macro))
        actual = CLASS_OF_NAME.get(run.name.split("_")[-1][:1] if run.name.startswith("old_") else run.name[:1])
        if actual:
            for method, odds in _classes_said(run).items():
                right[method].append(float(odds == actual))
    for method, values in scores.items():
        results.rows.append(_row(RECORDED, "phase", method, "phase_f1", values, seed))
    for method, values in right.items():
        results.rows.append(_row(RECORDED, "class", method, "class_accuracy", values, seed))


def _are_same(one: Recorded, other: Recorded) -> bool:
    """Whether they are one run, or one is a longer cut of the other."""
    many = min(len(one.phase), len(other.phase), 30)
    return one.name == other.name or bool(np.array_equal(one.of("power_w")[:many], other.of("power_w")[:many]))


def _phases_said(run: Recorded, others: Sequence[Recorded]) -> dict[str, list[str]]:
    """Method -> a phase a second. The baselines: the most frequent phase, and the most frequent one at that time."""
    counts = Counter(phase for other in others for phase in other.phase)
    most = counts.most_common(1)[0][0]
    usual = []
    for second in range(len(run.phase)):
        there = Counter(other.phase[second] for other in others if second < len(other.phase))
        usual.append(there.most_common(1)[0][0] if there else most)
    ours = PhaseRule(_warmup_s(others)).phases(run.levels)
    return {
        "ours": [PHASES[code] for code in ours],
        "most_frequent": [most] * len(run.phase),
        "usual_at_that_time": usual,
    }


def _warmup_s(others: Sequence[Recorded]) -> float:
    """The usual time from the first computing to the steady phase."""
    lengths = []
    for run in others:
        active = np.flatnonzero(run.of("sm_active") > 0.02)
        steady = np.flatnonzero(run.phase == "steady")
        if len(active) and len(steady) and steady[0] > active[0]:
            lengths.append(float(steady[0] - active[0]) * GRID_S)
    return float(np.median(lengths)) if lengths else PhaseRule().warmup_s


def _classes_said(run: Recorded) -> dict[str, str]:
    period = find_period(run.fine, run.fine_s)
    shape = shape_of(run.of("sm_active"), run.of("tensor_active"), run.of("nvlink_tx_bytes_s"), run.host, period)
    odds = class_of(shape)
    return {"ours": max(odds, key=lambda name: odds[name]), "three_rules": _three_rules(run)}


def _three_rules(run: Recorded) -> str:
    """The classifier that came with the recordings: two of power > 400 W, tensor/SM > .25, NVLink repeats > .3."""
    power, sm, tensor = (float(np.nanmedian(run.of(name))) for name in ("power_w", "sm_active", "tensor_active"))
    nvlink = run.of("nvlink_tx_bytes_s")
    repeats = find_period(nvlink[None, :], GRID_S) if np.nanmax(nvlink) > 0 else Period(None)
    votes = (power > 400) + (sm > 0 and tensor / sm > 0.25) + (repeats.strength > 0.3)
    return "idle" if sm < 0.02 else "training" if votes >= 2 else "inference"


# -- checkpoints --------------------------------------------------------------------------------------------------


def _judge_checkpoints(results: Results, folder: Path, seed: int) -> None:
    """Of every checkpoint after the second, half-way to it: was it within max(30 s, 5 %) of its own time?"""
    hits: dict[str, list[float]] = defaultdict(list)
    inside: list[float] = []
    for path in sorted(folder.glob("*/events.jsonl")):
        for begins in _begins(path).values():
            for number in range(2, len(begins)):
                before, actual = begins[:number], int(begins[number])
                now_ms = (int(before[-1]) + actual) // 2
                told = next_of(before, now_ms)
                gap_s = (actual - int(before[-1])) / 1000
                said = {
                    "ours": told.p50_ms if told else None,
                    "mean_interval": int(before[-1] + np.diff(before).mean()),
                    "last_interval": int(2 * before[-1] - before[-2]),
                }
                for method, at in said.items():
                    near = at is not None and abs(at - actual) / 1000 <= max(HIT_S, HIT_SHARE * gap_s)
                    hits[method].append(float(near))
                inside.append(float(told is not None and told.p10_ms <= actual <= told.p90_ms))
    for method, values in hits.items():
        results.rows.append(_row(SIMULATED, "checkpoint", method, "checkpoint_hit", values, seed))
    if inside:
        results.rows.append(_row(SIMULATED, "checkpoint", "ours", "coverage_80", inside, seed))
    else:
        results.skipped.append(f"{SIMULATED}: no job with three checkpoints")


def _begins(path: Path) -> dict[tuple[str, int], NDArray[np.int64]]:
    """Attempt -> when its checkpoints began, ms, in order."""
    decoder = msgspec.json.Decoder(JobEvent)
    begins: dict[tuple[str, int], list[int]] = defaultdict(list)
    with path.open("rb") as file:
        for line in file:
            event = decoder.decode(line) if b'"checkpoint"' in line else None
            if isinstance(event, Checkpoint) and event.edge == "begin":
                begins[event.job, event.attempt].append(event.time_ms)
    return {key: np.unique(np.array(times, np.int64)) for key, times in begins.items()}
