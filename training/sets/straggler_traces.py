"""An evaluation on traces of operations: whether a rule names the slow worker, and no other.

Every step is evaluated. A trace becomes the step events that its job's ranks would have sent.
These events go through the code that serves. In addition to the recorded trace, the evaluation makes jobs
whose culprit is known. In some, workers are relabelled, and the culprit follows. In others, the slow
worker is scaled back to its peers, so there is no culprit. In the last, all workers are slowed: the
job is slow, without a culprit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import Started, Step, StepParts
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import RankPlacement
from fleetcast.models.stragglers.step_peers import find_blame
from fleetcast.models.stragglers.steps import StepPace, measure_pace
from fleetcast.models.stragglers.what_if import OP_TYPES, Attribution, attribute_slowdown, simulate_step_time
from fleetcast.training.judges.straggler_metrics import Table
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.operation_traces import OperationTrace

Array = NDArray[np.float64]

RELABELLINGS = 20
ALL_SLOWED = 1.3
Z_LIMIT = 3.0
MAD_TO_SIGMA = 1.4826
FLOOR = 0.02  # of the median: near-equal workers do not make outliers of their noise
STATIC = 1.5


@dataclass(frozen=True, slots=True)
class TraceCase:
    """A recorded or changed trace, with its slow worker.

    culprit: (replica, stage), None if no worker is slow.
    """

    series: str
    seconds: Array
    culprit: tuple[int, int] | None


def judge_trace(trace: OperationTrace, results: Results, rng: np.random.Generator) -> None:
    """Add the rows of one trace. A trace whose truth is unknown is skipped."""
    table = Table(results, f"straggler_bytedance/{trace.name}", "worker")
    if trace.answers is None:
        results.skipped.append(f"{table.dataset}: no result-{trace.name}.json says who was slow")
        return
    try:
        attribution = attribute_slowdown(trace.seconds, trace.order, trace.transfer_s)
    except ValueError as error:
        results.skipped.append(f"{table.dataset}: {error}")
        return
    cases = make_cases(trace, rng)
    for method, finder in FINDERS.items():
        for series in dict.fromkeys(case.series for case in cases):
            _judge_finder(table, method, finder, [case for case in cases if case.series == series])
    _judge_answers(Table(results, table.dataset, "job"), trace, cases)
    _add_slowdowns(Table(results, table.dataset, "what_if"), trace, attribution)


def make_cases(trace: OperationTrace, rng: np.random.Generator) -> list[TraceCase]:
    """Return the recorded trace and variants of it whose culprit is known."""
    cases = [TraceCase("as recorded", trace.seconds, trace.culprit)]
    cases += [_shuffle_replicas(trace, rng) for _ in range(RELABELLINGS)]
    if trace.culprit is not None:
        cases.append(TraceCase("scaled back", _scale_back_culprit(trace.seconds, trace.culprit), None))
        slowed = _scale_back_culprit(trace.seconds, trace.culprit)
        slowed[len(slowed) // 2 :] *= ALL_SLOWED
        cases.append(TraceCase("all slowed", slowed, None))
    return cases


def _shuffle_replicas(trace: OperationTrace, rng: np.random.Generator) -> TraceCase:
    """Return a variant of the trace in which the replicas of each stage are shuffled."""
    seconds, culprit = trace.seconds.copy(), trace.culprit
    for stage in range(seconds.shape[2]):
        order = rng.permutation(seconds.shape[1])
        seconds[:, :, stage] = trace.seconds[:, order, stage]
        if culprit is not None and trace.culprit is not None and stage == culprit[1]:
            culprit = int(np.flatnonzero(order == trace.culprit[0])[0]), stage
    return TraceCase("relabelled", seconds, culprit)


def _scale_back_culprit(seconds: Array, culprit: tuple[int, int]) -> Array:
    """Return the operation times without the slowness of the culprit.

    The culprit's times of each type of operation are scaled to the median of its peers.
    """
    made = seconds.copy()
    replica, stage = culprit
    peers = np.delete(seconds[:, :, stage], replica, axis=1)
    factor = np.nanmedian(peers, axis=(0, 1, 3)) / np.nanmedian(seconds[:, replica, stage], axis=(0, 2))
    made[:, replica, stage] *= factor[None, :, None]
    return made


def score_by_fleet_z(seconds: Array) -> Array:
    """Return (step, replica, stage) the robust z of each worker's compute time if it is above 3, else 0.

    The usual z is of no use here, because it never exceeds (n - 1) / sqrt(n).
    """
    busy = np.nansum(seconds, axis=(3, 4))
    flat = busy.reshape(len(busy), -1)
    z = _compute_robust_z(flat, np.median(flat, axis=1, keepdims=True)).reshape(busy.shape)
    return np.where(z > Z_LIMIT, z, 0.0)


def score_by_minder_distance(seconds: Array) -> Array:
    """Return (step, replica, stage) the robust z of the farthest worker's distance, 0 for all other workers.

    The distance is the mean distance from the other workers. It counts if its z is at least 3. Channels
    are the time of each type of operation, divided by the workers' median (Minder, Deng et al., NSDI
    2025, without the autoencoder).
    """
    steps, replicas, stages = seconds.shape[:3]
    busy = np.nansum(seconds, axis=4).reshape(steps, replicas * stages, -1)
    scaled = busy / np.maximum(np.median(busy, axis=1, keepdims=True), 1e-9)
    far = np.linalg.norm(scaled[:, :, None] - scaled[:, None], axis=-1).mean(axis=2)
    z = _compute_robust_z(far, np.ones((steps, 1)))
    worst = np.where((z >= Z_LIMIT) & (z == z.max(axis=1, keepdims=True)), z, 0.0)
    return np.asarray(worst.reshape(steps, replicas, stages))


def _compute_robust_z(values: Array, usual: Array) -> Array:
    """Return (step, worker) each value's deviation from the step's median, in robust sigmas.

    The sigma has a floor, which is a share of `usual` (step, 1).
    """
    median = np.median(values, axis=1, keepdims=True)
    mad = np.median(np.abs(values - median), axis=1, keepdims=True)
    return np.asarray((values - median) / np.maximum(MAD_TO_SIGMA * mad + FLOOR * usual, 1e-9))


def score_by_static_ratio(seconds: Array) -> Array:
    """Return (step, replica, stage) each worker's compute time divided by the median, 0 if not above 1.5."""
    busy = np.nansum(seconds, axis=(3, 4))
    ratio = busy / np.maximum(np.median(busy, axis=(1, 2), keepdims=True), 1e-9)
    return np.where(ratio > STATIC, ratio, 0.0)


class TracedJob:
    """A job whose workers report their steps, replayed from a trace one step at a time."""

    def __init__(self, seconds: Array, whole_s: Array | None = None) -> None:
        """Start the job.

        whole_s: (step,) the time of each step. By default it is the time of the slowest worker, because a step
        cannot be shorter.
        """
        _, replicas, self.stages = seconds.shape[:3]
        self.attempt = JobAttempt("traced", 1)
        ranks = tuple(RankPlacement(rank, f"n{rank}") for rank in range(replicas * self.stages))
        self.attempt.fold(Started(job="traced", sequence=0, time_ms=0, ranks=ranks))
        self.busy = np.nansum(seconds, axis=(3, 4))
        self.whole_s = self.busy.max(axis=(1, 2)) if whole_s is None else whole_s
        self.now_ms = 0

    def apply_step(self, number: int) -> JobAttempt:
        """Apply the events of one step."""
        whole_s = float(self.whole_s[number])
        self.now_ms += round(whole_s * 1000)
        for rank, compute in enumerate(self.busy[number].ravel().tolist()):
            parts = StepParts(compute=compute, communication=max(0.0, whole_s - compute))
            sequence = (rank + 1) * len(self.busy) + number
            step = Step(
                job="traced", sequence=sequence, time_ms=self.now_ms, step=number, rank=rank, stage=rank % self.stages,
                duration_s=whole_s, parts=parts,
            )  # fmt: skip
            self.attempt.fold(step)
        return self.attempt

    def locate_rank(self, rank: int) -> tuple[int, int]:
        """Return (replica, stage) of a rank."""
        return rank // self.stages, rank % self.stages


def score_by_serving_rule(seconds: Array) -> Array:
    """Return (step, replica, stage) the ratio of each worker that the service's rule blames, else 0.

    The rule is evaluated after each step.
    """
    found, job = np.zeros(seconds.shape[:3]), TracedJob(seconds)
    for number in range(len(seconds)):
        for row in find_blame(job.apply_step(number).rank_steps).ranks:
            found[number, *job.locate_rank(row.rank)] = row.ratio
    return found


Finder = Callable[[Array], Array]
FINDERS: dict[str, Finder] = {
    "ours": score_by_serving_rule,
    "fleet-wide z": score_by_fleet_z,
    "Minder-style distance": score_by_minder_distance,
    "static 1.5x": score_by_static_ratio,
}


def _judge_finder(table: Table, method: str, finder: Finder, cases: list[TraceCase]) -> None:
    """Add the rows of one method over cases of one series. A finding is a worker in a step.

    Top-1 is the share of steps in which the worker with the highest score is the culprit.
    """
    right = wrong = missed = first = steps = 0
    for case in cases:
        found = finder(case.seconds)
        is_found = found > 0
        hits = is_found[:, *case.culprit] if case.culprit is not None else np.zeros(len(found), bool)
        right += int(hits.sum())
        wrong += int(is_found.sum() - hits.sum())
        steps += len(found)
        if case.culprit is not None:
            missed += int((~hits).sum())
            at = case.culprit[0] * case.seconds.shape[2] + case.culprit[1]
            first += int(((found.reshape(len(found), -1).argmax(axis=1) == at) & hits).sum())
    series = cases[0].series
    if right + missed:
        table.add_detection(method, right, wrong, missed, series)
        table.add_share("top1", method, first, steps, series)
    table.add_rate("false_culprits", method, wrong, steps, series)


def _judge_answers(table: Table, trace: OperationTrace, cases: list[TraceCase]) -> None:
    """Evaluate the pace of each case's job after its last step.

    The pace says whether the job is slow, and which worker is slow. The static rule says only whether the job is
    slow.
    """
    for series in dict.fromkeys(case.series for case in cases):
        rows = [case for case in cases if case.series == series]
        slow = [row for row in rows if row.culprit is not None or series == "all slowed"]
        paces = [(row, *_compute_pace(trace, row.seconds)) for row in rows]
        if slow:
            table.add_share("recall", "ours", sum(pace.slow for _, pace, _ in paces), len(slow), series)
        else:
            table.add_rate("false_alarms", "ours", sum(pace.slow for _, pace, _ in paces), len(rows), series)
        named = sum(_find_named_worker(pace, trace.seconds.shape[2]) == row.culprit for row, pace, _ in paces)
        table.add_share("top1", "ours", named, len(rows), series)
        if series == "all slowed":
            halves = [(whole_s[-1], np.median(whole_s[: len(whole_s) // 2])) for _, _, whole_s in paces]
            table.add_share(
                "recall", "static 1.5x", sum(bool(last > STATIC * usual) for last, usual in halves), len(rows), series
            )


def _compute_pace(trace: OperationTrace, seconds: Array) -> tuple[StepPace, Array]:
    """Return the job's pace after its last step, and (step,) the seconds of each simulated step."""
    whole_s = simulate_step_time(seconds, trace.order, trace.transfer_s)
    job, pace = TracedJob(seconds, whole_s), StepPace(0)
    for number in range(len(seconds)):
        pace = measure_pace(job.apply_step(number), pace)
    return pace, whole_s


def _find_named_worker(pace: StepPace, stages: int) -> tuple[int, int] | None:
    """Return (replica, stage) of the worker that the pace names, or None.

    If the pace names a stage, the replica is -1.
    """
    if pace.ranks:
        return pace.ranks[0] // stages, pace.ranks[0] % stages
    return None if pace.stage is None else (-1, pace.stage)


def _add_slowdowns(table: Table, trace: OperationTrace, ours: Attribution) -> None:
    """Add the slowdowns that our what-if analysis attributes to each part, and those of the authors."""
    answers = trace.answers or {}
    ours_by: dict[str, dict[Any, float]] = {
        "dp_rank": dict(enumerate(ours.by_replica.tolist())),
        "stage": dict(enumerate(ours.by_stage.tolist())),
        "optype": dict(zip(OP_TYPES, ours.by_type.tolist(), strict=True)),
    }
    pairs = [("job", ours.slowdown, answers.get("blocking_slowdown"))]
    for unit, values in ours_by.items():
        known = answers.get(f"blocking_decompose_by_{unit}") or {}
        pairs += [(f"{unit} {name}", value, known.get(str(name))) for name, value in values.items()]
    for series, value, answer in pairs:
        table.add_number("slowdown", "ours", value, (None, None), len(trace.seconds), series)
        if answer is not None:
            table.add_number("slowdown", "authors", float(answer), (None, None), len(trace.seconds), series)
    if trace.culprit is not None:
        table.add_number("share", "ours", float(ours.share[trace.culprit]), (None, None), len(trace.seconds), "culprit")
