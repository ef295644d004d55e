"""`fleetcast evaluate fingerprint`: periods, phases, classes and checkpoints, compared with baselines.

telemetry/rendered      step times of real runs as telemetry: period within 2 %, and "unknown" if aliased
telemetry/h100-phases   recorded runs with phases: macro-F1, with the phases of all other runs known
faults/simulated        jobs that report checkpoints: the next one, predicted half-way from the last one
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleetcast.features.episodes import find_episodes
from fleetcast.features.fingerprint import compute_shape, estimate_class_odds
from fleetcast.features.period import Period, find_period
from fleetcast.fleet.checkpoint_edges import CheckpointEdges
from fleetcast.fleet.events import Checkpoint, JobEvent
from fleetcast.models.jobs.phases import PHASES, JobLevels, PhaseRule
from fleetcast.models.jobs.renewal import predict_next_beginning
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.fingerprint_sets import CHANNELS, convert_to_numbers, make_mean_row, read_files
from fleetcast.training.sets.rendered_runs import RENDERED, judge_rendered_runs

Array = NDArray[np.float64]
Say = Callable[[str], None]

RECORDED, SIMULATED = "telemetry/h100-phases", "faults/simulated"
HIT_S, HIT_SHARE = 30.0, 0.05
GRID_S, FINE_S = 1.0, 0.1  # phases are judged once a second
LONGEST_S = 86_400.0
CLASS_OF_NAME = {"t": "training", "i": "inference", "b": "idle"}  # of recorded runs, by their first letter


@dataclass(frozen=True, slots=True)
class RunRecording:
    """A recorded run, resampled to a grid of GRID_S seconds.

    phase: (second,) the name of the phase. channels: column → (second,) means over GPUs.
    """

    name: str
    phase: NDArray[np.object_]
    channels: dict[str, Array]
    fine: Array  # (channel, tenth of a second)

    def get_channel(self, column: str) -> Array:
        return self.channels.get(column, np.full(len(self.phase), np.nan))

    @property
    def levels(self) -> JobLevels:
        memory = self.get_channel("mem_used_mib") / 1024
        return JobLevels(
            GRID_S, self.get_channel("sm_active"), memory, self.get_channel("nvlink_tx_bytes_s"), self.host_traffic
        )

    @property
    def host_traffic(self) -> Array:
        return self.get_channel("pcie_rx_bytes_s") + self.get_channel("pcie_tx_bytes_s")


def evaluate(train: Path, test: Path, seed: int, say: Say) -> Results:
    """Evaluate fingerprints on those of the three sets that the test folder has.

    The phases of a run are predicted with the help of all other runs of both folders.
    """
    results = Results("fingerprint")
    for folder, judge in ((RENDERED, judge_rendered_runs), (SIMULATED, _judge_checkpoints)):
        if (test / folder).is_dir():
            judge(results, test / folder, seed)
        else:
            results.skipped.append(f"{folder}: not in {test}")
    paths = sorted((test / RECORDED).glob("*_telemetry.csv.gz"))
    tested = {run.name: run for run in read_files(results, RECORDED, paths, _read_recorded_run)}
    paths = [
        path for path in sorted((train / RECORDED).glob("*_telemetry.csv.gz")) if _parse_run_name(path) not in tested
    ]
    runs = {
        **{run.name: run for run in read_files(results, f"{RECORDED} of {train}", paths, _read_recorded_run)},
        **tested,
    }
    if tested and len(runs) > 1:
        say(f"{RECORDED}: {len(tested)} runs, each judged by what the others teach")
        _judge_phases(results, list(runs.values()), set(tested), seed)
    else:
        results.skipped.append(f"{RECORDED}: fewer than two runs with phases in {test}")
    return results


# -- phases and classes -------------------------------------------------------------------------------------------


def _parse_run_name(path: Path) -> str:
    return path.name.removesuffix("_telemetry.csv.gz")


def _read_recorded_run(path: Path) -> RunRecording | None:
    """Read a recorded run. Returns None if it has no phases or no SM activity. Raises one of UNREADABLE."""
    table = pd.read_csv(path, low_memory=False)
    if not {"phase", "sm_active", "timestamp"} <= set(table):
        return None
    phase = table["phase"].where(table["phase"].isin(PHASES))
    table = convert_to_numbers(table, [str(name) for name in table if name != "phase"])
    known = np.isfinite(table["timestamp"]) & phase.notna()
    if not known.any():
        raise ValueError(f"no row has a timestamp and a phase ({', '.join(PHASES)})")
    table, phase = table[known], phase[known]
    since_s = table["timestamp"] - table["timestamp"].min()
    if float(since_s.max()) > LONGEST_S:
        raise ValueError(f"its timestamps span {float(since_s.max()):.0f} s, a run has {LONGEST_S:.0f} s at most")
    second = (since_s // GRID_S).astype(int)
    means = table.groupby(second).mean()
    whole = pd.RangeIndex(int(second.max()) + 1)
    phases = phase.groupby(second).last().reindex(whole).ffill()
    channels = {str(column): means[column].reindex(whole).to_numpy(np.float64) for column in means}
    columns = [column for column in CHANNELS if column in table]
    tenth = (since_s / FINE_S).round().astype(int)
    fine = table[columns].groupby(tenth).mean().reindex(pd.RangeIndex(int(tenth.max()) + 1))
    return RunRecording(_parse_run_name(path), phases.to_numpy(object), channels, fine.to_numpy(np.float64).T)


def _judge_phases(results: Results, runs: Sequence[RunRecording], tested: set[str], seed: int) -> None:
    from sklearn.metrics import f1_score

    scores: dict[str, list[float]] = defaultdict(list)
    right: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if run.name not in tested:
            continue
        others = [other for other in runs if not _is_same_run(other, run)]
        if others:
            for method, said in _predict_phases(run, others).items():
                macro = f1_score(run.phase, said, labels=sorted(set(run.phase)), average="macro", zero_division=0)
                scores[method].append(float(macro))
        actual = CLASS_OF_NAME.get(run.name.split("_")[-1][:1] if run.name.startswith("old_") else run.name[:1])
        if actual:
            for method, odds in _predict_classes(run).items():
                right[method].append(float(odds == actual))
    for method, values in scores.items():
        results.rows.append(make_mean_row(RECORDED, "phase", method, "phase_f1", values, seed))
    for method, values in right.items():
        results.rows.append(make_mean_row(RECORDED, "class", method, "class_accuracy", values, seed))


def _is_same_run(one: RunRecording, other: RunRecording) -> bool:
    """Return whether two recordings have the same name or the same beginning.

    One of them may be longer than the other.
    """
    many = min(len(one.phase), len(other.phase), 30)
    return one.name == other.name or bool(
        np.array_equal(one.get_channel("power_w")[:many], other.get_channel("power_w")[:many])
    )


def _predict_phases(run: RunRecording, others: Sequence[RunRecording]) -> dict[str, list[str]]:
    """Return method → the phase that the method predicts for each second of a run.

    One baseline predicts the most frequent phase of the other runs. The second predicts their most
    frequent phase at the same second.
    """
    counts = Counter(phase for other in others for phase in other.phase)
    most = counts.most_common(1)[0][0]
    usual = []
    for second in range(len(run.phase)):
        there = Counter(other.phase[second] for other in others if second < len(other.phase))
        usual.append(there.most_common(1)[0][0] if there else most)
    ours = PhaseRule(_measure_warmup_s(others)).classify_phases(run.levels)
    return {
        "ours": [PHASES[code] for code in ours],
        "most_frequent": [most] * len(run.phase),
        "usual_at_that_time": usual,
    }


def _measure_warmup_s(others: Sequence[RunRecording]) -> float:
    """Return the median seconds from the first computation to the steady phase."""
    lengths = []
    for run in others:
        active = np.flatnonzero(run.get_channel("sm_active") > 0.02)
        steady = np.flatnonzero(run.phase == "steady")
        if len(active) and len(steady) and steady[0] > active[0]:
            lengths.append(float(steady[0] - active[0]) * GRID_S)
    return float(np.median(lengths)) if lengths else PhaseRule().warmup_s


def _predict_classes(run: RunRecording) -> dict[str, str]:
    period = find_period(run.fine, FINE_S)
    shape = compute_shape(
        run.get_channel("sm_active"),
        run.get_channel("tensor_active"),
        run.get_channel("nvlink_tx_bytes_s"),
        run.host_traffic,
        period,
    )
    odds = estimate_class_odds(shape)
    return {"ours": max(odds, key=lambda name: odds[name]), "three_rules": _classify_by_rules(run)}


def _classify_by_rules(run: RunRecording) -> str:
    """Classify a run by the rules that were published with the recordings: idle, training or inference.

    A run is training if at least two of three hold: power above 400 W, tensor/SM above 0.25, and a
    repetition of NVLink traffic stronger than 0.3.
    """
    power, sm, tensor = (_compute_median(run.get_channel(name)) for name in ("power_w", "sm_active", "tensor_active"))
    nvlink = run.get_channel("nvlink_tx_bytes_s")
    repeats = find_period(nvlink[None, :], GRID_S) if _compute_median(nvlink) > 0 else Period(None)
    votes = (power > 400) + (sm > 0 and tensor / sm > 0.25) + (repeats.strength > 0.3)
    return "idle" if sm < 0.02 else "training" if votes >= 2 else "inference"


def _compute_median(values: Array) -> float:
    """Return the median of the known values, or 0 if none is known."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else 0.0


# -- checkpoints --------------------------------------------------------------------------------------------------


def _judge_checkpoints(results: Results, folder: Path, seed: int) -> None:
    """Evaluate the predicted time of every checkpoint after the second one.

    A prediction is made half-way between the last checkpoint and the next. It is a hit if it is within
    max(30 s, 5 % of the interval) of the real time.
    """
    hits: dict[str, list[float]] = defaultdict(list)
    inside: list[float] = []
    for attempts in read_files(results, SIMULATED, sorted(folder.glob("*/events.jsonl")), _read_checkpoint_begins):
        for begins in attempts.values():
            for number in range(2, len(begins)):
                before, actual = begins[:number], int(begins[number])
                now_ms = (int(before[-1]) + actual) // 2
                predicted = predict_next_beginning(before, now_ms)
                gap_s = (actual - int(before[-1])) / 1000
                said = {
                    "ours": predicted.p50_ms if predicted else None,
                    "mean_interval": int(before[-1] + np.diff(before).mean()),
                    "last_interval": int(2 * before[-1] - before[-2]),
                }
                for method, at in said.items():
                    near = at is not None and abs(at - actual) / 1000 <= max(HIT_S, HIT_SHARE * gap_s)
                    hits[method].append(float(near))
                inside.append(float(predicted is not None and predicted.p10_ms <= actual <= predicted.p90_ms))
    for method, values in hits.items():
        results.rows.append(make_mean_row(SIMULATED, "checkpoint", method, "checkpoint_hit", values, seed))
    if inside:
        results.rows.append(make_mean_row(SIMULATED, "checkpoint", "ours", "coverage_80", inside, seed))
    else:
        results.skipped.append(f"{SIMULATED}: no job with three checkpoints")


def _read_checkpoint_begins(path: Path) -> dict[tuple[str, int], NDArray[np.int64]]:
    """Read when the checkpoints of each attempt began. Returns (job, attempt) → (k,) ms, ascending.

    Raises one of UNREADABLE.
    """
    decoder = msgspec.json.Decoder(JobEvent)
    edges: dict[tuple[str, int], list[CheckpointEdges]] = defaultdict(list)
    with path.open("rb") as file:
        for line in file:
            event = decoder.decode(line) if b'"checkpoint"' in line else None
            if isinstance(event, Checkpoint):
                edges[event.job, event.attempt].append(CheckpointEdges.from_event(event))
    return {
        key: np.array([one.begin_ms for one in find_episodes(predicted)], np.int64) for key, predicted in edges.items()
    }
