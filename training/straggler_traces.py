"""Judging traces of operations: is the worker that is slow named in every step, and nobody else?

Besides the trace as it was recorded the judge makes jobs whose answer is known: workers relabelled (the culprit
follows), the slow worker scaled back to its peers (nobody), and all workers slowed (a slow job, nobody to blame).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.events import Step
from fleet.jobs import JobAttempt
from models.operation_peers import slow_workers, worker_ratios
from models.steps import pace_of
from models.what_if import OP_TYPES, Attribution, attribute
from training.operation_traces import OperationTrace
from training.results import Results
from training.straggler_metrics import Table

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

RELABELLINGS = 20
ALL_SLOWED = 1.3
Z_LIMIT = 3.0
STATIC = 1.5


@dataclass(frozen=True, slots=True)
class Case:
    """A job and who is slow in it: (replica, stage), None: nobody."""

    series: str
    seconds: Array
    culprit: tuple[int, int] | None


def judge_trace(trace: OperationTrace, results: Results, rng: np.random.Generator) -> None:
    """Rows of one trace; nothing is judged whose truth is not known."""
    table = Table(results, f"straggler_bytedance/{trace.name}", "worker")
    if trace.answers is None:
        results.skipped.append(f"{table.dataset}: no result-{trace.name}.json tells who was slow")
        return
    cases = make_cases(trace, rng)
    for method, finder in FINDERS.items():
        for series in dict.fromkeys(case.series for case in cases):
            _judge(table, method, finder, [case for case in cases if case.series == series])
    job = Table(results, table.dataset, "job")
    for method, slow in (("ours", _slow_in_the_end(trace.whole_s)), ("static 1.5x", _static_job(trace.whole_s))):
        job.share("recall", method, slow, 1, "all slowed")
    _compare(Table(results, table.dataset, "what_if"), trace, attribute(trace.seconds, trace.order, trace.transfer_s))


def make_cases(trace: OperationTrace, rng: np.random.Generator) -> list[Case]:
    """The trace and its variants."""
    cases = [Case("as recorded", trace.seconds, trace.culprit)]
    cases += [_relabelled(trace, rng) for _ in range(RELABELLINGS)]
    if trace.culprit is not None:
        cases.append(Case("scaled back", _scaled_back(trace.seconds, trace.culprit), None))
        slowed = _scaled_back(trace.seconds, trace.culprit)
        slowed[len(slowed) // 2 :] *= ALL_SLOWED
        cases.append(Case("all slowed", slowed, None))
    return cases


def _relabelled(trace: OperationTrace, rng: np.random.Generator) -> Case:
    """Replicas change places within each stage."""
    seconds, culprit = trace.seconds.copy(), trace.culprit
    for stage in range(seconds.shape[2]):
        order = rng.permutation(seconds.shape[1])
        seconds[:, :, stage] = trace.seconds[:, order, stage]
        if culprit is not None and trace.culprit is not None and stage == culprit[1]:
            culprit = int(np.flatnonzero(order == trace.culprit[0])[0]), stage
    return Case("relabelled", seconds, culprit)


def _scaled_back(seconds: Array, culprit: tuple[int, int]) -> Array:
    """The culprit's operations of each type as long as its peers' on the median."""
    made = seconds.copy()
    replica, stage = culprit
    peers = np.delete(seconds[:, :, stage], replica, axis=1)
    factor = np.nanmedian(peers, axis=(0, 1, 3)) / np.nanmedian(seconds[:, replica, stage], axis=(0, 2))
    made[:, replica, stage] *= factor[None, :, None]
    return made


def fleet_wide_z(seconds: Array) -> Mask:
    """(step, replica, stage) compute time more than 3 standard deviations above all workers'."""
    busy = np.nansum(seconds, axis=(3, 4))
    mean, deviation = busy.mean(axis=(1, 2), keepdims=True), busy.std(axis=(1, 2), keepdims=True)
    return np.asarray(busy > mean + Z_LIMIT * np.maximum(deviation, 1e-9))


def minder_distance(seconds: Array) -> Mask:
    """(step, replica, stage) the worker farthest from all others, if its summed distance is 3 deviations out.

    Channels: time of each type, scaled to 0..1 over the workers of a step (Minder, Deng et al., NSDI 2025; without its
    autoencoder).
    """
    steps, replicas, stages = seconds.shape[:3]
    busy = np.nansum(seconds, axis=4).reshape(steps, replicas * stages, -1)
    low, high = busy.min(axis=1, keepdims=True), busy.max(axis=1, keepdims=True)
    scaled = (busy - low) / np.maximum(high - low, 1e-9)
    far = np.linalg.norm(scaled[:, :, None] - scaled[:, None], axis=-1).sum(axis=2)
    z = (far - far.mean(axis=1, keepdims=True)) / np.maximum(far.std(axis=1, keepdims=True), 1e-9)
    worst = (z >= Z_LIMIT) & (z == z.max(axis=1, keepdims=True))
    return np.asarray(worst.reshape(steps, replicas, stages))


def static_threshold(seconds: Array) -> Mask:
    """(step, replica, stage) compute time above 1.5 times all workers' median."""
    busy = np.nansum(seconds, axis=(3, 4))
    return np.asarray(busy > STATIC * np.median(busy, axis=(1, 2), keepdims=True))


Finder = Callable[[Array], Mask]
FINDERS: dict[str, Finder] = {
    "ours": slow_workers,
    "fleet-wide z": fleet_wide_z,
    "Minder-style distance": minder_distance,
    "static 1.5x": static_threshold,
}


def _judge(table: Table, method: str, finder: Finder, cases: list[Case]) -> None:
    """A finding is a worker in a step; top-1: in how many steps the worst one found is the culprit."""
    right = wrong = missed = first = steps = 0
    for case in cases:
        found = finder(case.seconds)
        hits = found[:, *case.culprit] if case.culprit is not None else np.zeros(len(found), bool)
        right += int(hits.sum())
        wrong += int(found.sum() - hits.sum())
        steps += len(found)
        if case.culprit is not None:
            missed += int((~hits).sum())
            ratios = np.where(found, worker_ratios(case.seconds), 0.0).reshape(len(found), -1)
            at = case.culprit[0] * case.seconds.shape[2] + case.culprit[1]
            first += int(((ratios.argmax(axis=1) == at) & hits).sum())
    series = cases[0].series
    if right + missed:
        table.found(method, right, wrong, missed, series)
        table.share("top1", method, first, steps, series)
    table.rate("false_culprits", method, wrong, steps, series)


def _slow_in_the_end(whole_s: Array) -> int:
    """Whether our pace says, in the end, that a job is slow whose last half takes 1.3 times as long."""
    attempt, pace, now_ms = JobAttempt("slowed", 1), None, 0
    for number, seconds in enumerate(_slowed(whole_s).tolist()):
        now_ms += int(seconds * 1000)
        attempt.fold(Step(job="slowed", sequence=number, time_ms=now_ms, step=number, duration_s=seconds))
        pace = pace_of(attempt, pace)
    return int(pace is not None and pace.slow)


def _static_job(whole_s: Array) -> int:
    slowed = _slowed(whole_s)
    return int(slowed[-1] > STATIC * np.median(slowed[: len(slowed) // 2]))


def _slowed(whole_s: Array) -> Array:
    slowed = whole_s.copy()
    slowed[len(slowed) // 2 :] *= ALL_SLOWED
    return slowed


def _compare(table: Table, trace: OperationTrace, ours: Attribution) -> None:
    """Our what-if slowdowns beside the authors'."""
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
        table.add("slowdown", "ours", value, (None, None), len(trace.seconds), series)
        if answer is not None:
            table.add("slowdown", "authors", float(answer), (None, None), len(trace.seconds), series)
    if trace.culprit is not None:
        table.add("share", "ours", float(ours.share[trace.culprit]), (None, None), len(trace.seconds), "culprit")
