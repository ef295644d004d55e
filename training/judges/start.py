"""`fleetcast evaluate start`: forecasts of when a job will start, compared with the scheduler's own.

Each forecast is made when the job is submitted. The truth is the set's own jobs played through
`QueueSimulation`: conservative backfill that plans with the users' limits. If a set has no limits, the
simulation plans with medians of the train folder ("group"). A set is skipped if its jobs hardly wait at
that capacity.

Our forecast plays the same policy forward from the whole queue on `PATHS` paths. It uses the run times of
jobs that had ended by then. Quantiles are the middle path times ratios of actual to forecast waits. The ratios
are learned from earlier forecasts, first from those at the end of the train folder. Jobs that arrive later are
not played.

The results cover the whole test span, and its rolling windows by the time of submission.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleetcast.training.fits.run_pools import Key, RunPools, compute_normal_quantiles
from fleetcast.training.judges.queue_simulation import NEVER_S, QueuedJobs, QueueSimulation
from fleetcast.training.judges.wait_ratios import WaitRatios
from fleetcast.training.reports.results import ResultRow, Results, compute_interval
from fleetcast.training.reports.window_rows import make_window_rows
from fleetcast.training.sets.job_sets import HistoryJobs as History
from fleetcast.training.sets.job_sets import JobHistory, read_job_sets
from fleetcast.training.windows import find_window_numbers, make_rolling_windows

DAY_S = 86_400
WARM_UP_S, TRIED_S = (
    7 * DAY_S,
    21 * DAY_S,
)  # fill the queue, then forecast for calibration, before the train folder's end
LONGEST_S = 92 * DAY_S  # of a test span: three months
JUDGED, TRIED = 100, 50  # jobs that wait: about so many, and at most so many
CANDIDATES = 4  # times as many are looked at: those that must wait count
WAITS_S, LONG_S, WITHIN_S = 60, 600, 600
FEWEST = 20
PATHS = 3
RESERVED = 30  # jobs with a place in the plan of a path: several times as fast as all, and as near
BUSY = 0.85  # share of the capacity that the train folder's jobs use, where the largest job does not need more
LEVELS = (0.1, 0.5, 0.9)
ASKED = 0.93  # of the outcomes so far lie below the p90 bound
BLOCK = 10

Say = Callable[[str], None]
Ints = NDArray[np.int64]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StartScene:
    """The jobs of one set, prepared for a replay.

    kinds: (job, 4) numbers of user, group, size and limit. tried, judged: jobs that may be forecast,
    before and after the train folder's end. The numbers of these jobs are drawn at random.
    """

    dataset: str
    jobs: QueuedJobs
    run_s: Ints
    kinds: NDArray[np.int64]
    tried: Ints
    judged: Ints
    capacity: int
    planned_by: str
    history: History
    judged_s: float  # the train folder's end


@dataclass(frozen=True, slots=True)
class SubmitMoment:
    """The state of the cluster when a job is submitted.

    planned_s: the start time that the scheduler prints.
    """

    job: int
    state: QueueSimulation
    planned_s: int


@dataclass(frozen=True, slots=True)
class WaitForecast:
    """The forecast waits of one job in seconds: the scheduler's, and our quantiles at LEVELS."""

    job: int
    planned_s: float
    ours_s: tuple[float, float, float]
    actual_s: float


def evaluate(train: Path, test: Path, seed: int, say: Say) -> Results:
    """Evaluate start times on every job history that is in both folders and whose jobs have to wait."""
    results = Results("start")
    for one in read_job_sets(train, test, results.skipped):
        scene = make_scene(one.own_history, seed)
        if isinstance(scene, str):
            results.skipped.append(f"{one.dataset}: {scene}")
            continue
        say(f"{one.dataset}: replaying {len(scene.jobs):,} jobs on {scene.capacity:,} cores or GPUs")
        rows = forecast_scene(scene, seed, say)
        if len(rows) < FEWEST:
            results.skipped.append(f"{one.dataset}: hardly any job waits on {scene.capacity:,} cores or GPUs")
            continue
        _add_scores(results, scene, rows, seed)
    return results


def make_scene(one: JobHistory, seed: int, capacity: int | None = None) -> StartScene | str:
    """Return a set's jobs, prepared for a replay, or the reason why the set is skipped."""
    table = one.table
    limited = float(np.isfinite(table.limit_s).mean()) > 0.5
    if not limited and float(np.isfinite(table.start_s).mean()) < 0.5:
        return "neither limits nor waits are known: there is no queue to replay"
    since_s = one.train_end_s - WARM_UP_S - TRIED_S
    rows = np.flatnonzero((table.submit_s >= since_s) & (table.submit_s <= one.train_end_s + LONGEST_S))
    part = table.select_rows(rows)
    limit_s = _compute_planned_run_s(one.train_jobs, part, limited)
    run_s = np.minimum(part.run_s, limit_s) if limited else part.run_s
    jobs = QueuedJobs(*(np.ceil(column).astype(np.int64) for column in (part.submit_s, part.gpus, limit_s)))
    capacity = capacity or estimate_capacity(one.train_jobs)
    rng = np.random.default_rng(seed)
    before = np.flatnonzero((part.submit_s > one.train_end_s - TRIED_S) & ~one.is_judged[rows])
    after = np.flatnonzero(one.is_judged[rows])
    return StartScene(
        dataset=one.dataset,
        jobs=jobs,
        run_s=np.maximum(1, np.ceil(run_s)).astype(np.int64),
        kinds=_make_kinds(part, jobs),
        tried=_draw_rows(before, CANDIDATES * TRIED, rng),
        judged=_draw_rows(after, CANDIDATES * JUDGED, rng),
        capacity=capacity,
        planned_by="limit" if limited else "group",
        history=part,
        judged_s=one.train_end_s,
    )


def estimate_capacity(train: History) -> int:
    """Return the number of cores (or GPUs) at which the jobs of a set have to wait.

    At this capacity, the train folder's jobs use the share BUSY. The capacity is at least the size of the largest job.
    """
    known = np.isfinite(train.run_s)
    limit_s = np.where(np.isfinite(train.limit_s), train.limit_s, np.inf)
    used = float((train.gpus * np.minimum(train.run_s, limit_s))[known].sum())
    span_s = max(DAY_S, float(np.ptp(train.submit_s)))
    return int(max(np.ceil(used / span_s / BUSY), np.ceil(train.gpus.max())))


def _compute_planned_run_s(train: History, part: History, limited: bool) -> NDArray[np.float64]:
    """Return (job,) the run times in seconds that the scheduler plans with.

    They are the jobs' limits. In a set without limits, they are the medians of jobs of the same group and size in
    `train`.
    """
    frame = pd.DataFrame({"kin": np.where(train.group != "", train.group, train.queue), "gpus": train.gpus})
    frame["run_s"] = train.run_s
    ended = frame[np.isfinite(train.run_s)]
    medians = ended.groupby(["kin", "gpus"])["run_s"].median().to_dict()
    usual_s = float(ended["run_s"].median()) if len(ended) else 3600.0
    kin = np.where(part.group != "", part.group, part.queue)
    own = np.array([medians.get(key, usual_s) for key in zip(kin.tolist(), part.gpus.tolist(), strict=True)])
    return np.maximum(1.0, np.where(np.isfinite(part.limit_s), part.limit_s, own) if limited else own)


def _make_kinds(part: History, jobs: QueuedJobs) -> NDArray[np.int64]:
    kin = np.where(part.group != "", part.group, part.queue)
    user, group = (
        pd.factorize(names)[0].astype(np.int64) for names in (np.where(part.user != "", part.user, kin), kin)
    )
    return np.stack([user, group, jobs.cores, jobs.limit_s], axis=1)


def list_kind_keys(kinds: NDArray[np.int64]) -> tuple[Key, ...]:
    """Return the keys of the kinds that a job belongs to, the most specific first.

    kinds: (4,) one row of `StartScene.kinds`.
    """
    user, group, cores, limit_s = kinds.tolist()
    return ((0, user, cores, limit_s), (1, user, cores), (2, user), (3, group, cores), (4, cores, limit_s), (5,))


def _draw_rows(rows: Ints, count: int, rng: np.random.Generator) -> Ints:
    return np.asarray(np.sort(rng.choice(rows, count, replace=False)) if len(rows) > count else rows)


def forecast_scene(scene: StartScene, seed: int, say: Say) -> list[WaitForecast]:
    """Replay the scene, and forecast the starts of judged jobs that had to wait, in order of submission."""
    moments, start_s = replay_scene(scene)
    return forecast_waits(scene, moments, start_s, seed, say)


def forecast_waits(
    scene: StartScene, moments: Sequence[SubmitMoment], start_s: Ints, seed: int, say: Say = lambda line: None
) -> list[WaitForecast]:
    """Return the wait forecasts of the judged jobs, in order of submission.

    moments: the submissions at which the forecasts are made.
    """
    tried, judged = choose_jobs(scene, [moment.job for moment in moments], seed)
    say(f"{scene.dataset}: forecasting {len(judged):,} jobs that wait, and {len(tried):,} before, to calibrate")
    player = QueuePlayer(scene, start_s, seed)
    rows = [player.forecast_job(moment) for moment in moments if moment.job in tried | judged]
    return [row for row in rows if row.job in judged]


def choose_jobs(scene: StartScene, waiting: Sequence[int], seed: int) -> tuple[set[int], set[int]]:
    """Choose the jobs to forecast among the waiting ones.

    Returns two sets: jobs from before the train folder's end, and jobs from after it.
    """
    rng = np.random.default_rng(seed)
    tried = np.intersect1d(waiting, scene.tried)
    share = (len(tried) + 1) / (len(scene.tried) + 1)
    taken = _draw_rows(scene.judged, min(2 * JUDGED, round(JUDGED / share)), rng)
    return set(_draw_rows(tried, TRIED, rng).tolist()), set(np.intersect1d(waiting, taken).tolist())


def replay_scene(scene: StartScene) -> tuple[list[SubmitMoment], Ints]:
    """Replay the scene, and return the submissions of candidates that must wait, and all start times.

    Candidates are the jobs that may be forecast. Start times: (job,) seconds.
    """
    state = QueueSimulation(scene.jobs, scene.run_s.tolist(), scene.capacity)
    candidates = {*scene.tried.tolist(), *scene.judged.tolist()}
    moments = []
    for job, submit_s in enumerate(scene.jobs.submit_s.tolist()):
        state.advance(submit_s)
        state.submit(job)
        if job in candidates:
            planned_s = state.plan_starts().get(job, submit_s)
            if planned_s > submit_s + WAITS_S:
                moments.append(SubmitMoment(job, state.fork(state.run_s), planned_s))
    state.advance(NEVER_S)
    start_s = np.full(len(scene.jobs), NEVER_S, np.int64)
    start_s[list(state.start_s)] = list(state.start_s.values())
    return moments, start_s


class QueuePlayer:
    """A forecaster of waits that plays the queue forward from each submission, in order of time.

    The forecaster knows only the run times and waits of jobs that had ended by then.
    """

    def __init__(self, scene: StartScene, start_s: Ints, seed: int) -> None:
        self._scene, self._start_s, self._seed = scene, start_s, seed
        self._pools, self._ratios = RunPools(), WaitRatios()
        end_s = start_s + scene.run_s
        self._ends: Iterator[tuple[int, int]] = iter(sorted(zip(end_s.tolist(), range(len(end_s)), strict=True)))
        self._next = next(self._ends, None)

    def forecast_job(self, moment: SubmitMoment) -> WaitForecast:
        """Forecast the wait of one job."""
        scene, job = self._scene, moment.job
        now_s = int(scene.jobs.submit_s[job])
        self._record_ended_runs(now_s)
        planned_s = moment.planned_s - now_s
        middle_s = max(WAITS_S, float(np.median([path - now_s for path in self._play_paths(moment)])))
        (middle,) = (middle_s * ratio for ratio in self._ratios.compute_quantiles((LEVELS[1],), now_s))
        low, high = (middle_s * ratio for ratio in self._ratios.compute_quantiles((LEVELS[0], ASKED), now_s, middle_s))
        high = max(min(high, planned_s), middle)
        self._ratios.record_forecast(now_s, middle_s, int(self._start_s[job]))
        return WaitForecast(job, planned_s, (min(low, middle), middle, high), float(self._start_s[job] - now_s))

    def _record_ended_runs(self, now_s: int) -> None:
        while self._next is not None and self._next[0] < now_s:
            job = self._next[1]
            self._pools.record_end(list_kind_keys(self._scene.kinds[job]), float(self._scene.run_s[job]))
            self._next = next(self._ends, None)

    def _play_paths(self, moment: SubmitMoment) -> list[int]:
        """Play the queue along all paths, and return the job's start time on each."""
        state = moment.state
        until_s = state.now_s + 2 * (moment.planned_s - state.now_s)
        rng = np.random.default_rng((self._seed, moment.job))
        return [
            state.fork(run_s, RESERVED).play_until_start(moment.job, until_s)
            for run_s in self._draw_run_times(state, rng)
        ]

    def _draw_run_times(self, state: QueueSimulation, rng: np.random.Generator) -> list[dict[int, int]]:
        """Draw a run time on each path for every running or waiting job.

        Returns, for each path, job → run time in seconds.
        """
        running = sorted(state.list_running())
        jobs = [*running, *state.list_waiting()]
        ages_s = np.array([state.now_s - state.start_s[job] for job in running] + [0] * (len(jobs) - len(running)))
        kinds = self._scene.kinds[jobs]
        drawn = np.ones((PATHS, len(jobs)), np.int64)
        _, inverse = np.unique(kinds, axis=0, return_inverse=True)
        inverse = inverse.ravel()
        order = np.argsort(inverse, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(inverse[order])) + 1):
            key, limit_s = list_kind_keys(kinds[rows[0]]), self._get_limit_s(kinds[rows[0]])
            own = rng.standard_normal((PATHS, len(rows)))
            drawn[:, rows] = np.round(
                self._pools.draw_run_times(
                    key, limit_s, ages_s[rows].astype(float), own, compute_normal_quantiles(PATHS)
                )
            )
        return [dict(zip(jobs, row, strict=True)) for row in np.maximum(drawn, 1).tolist()]

    def _get_limit_s(self, kinds: NDArray[np.int64]) -> float:
        return float(kinds[3]) if self._scene.planned_by == "limit" else float("inf")


def _add_scores(results: Results, scene: StartScene, rows: Sequence[WaitForecast], seed: int) -> None:
    issued_s = scene.jobs.submit_s[[row.job for row in rows]]
    rolling = make_rolling_windows(scene.judged_s, float(issued_s.max()) + 1)
    within = find_window_numbers(rolling, issued_s)
    for method in ("ours", scene.planned_by):
        for metric, (top, below) in _compute_scores(rows, method).items():
            results.rows.append(_make_row(scene, method, metric, top, below, seed))
            for number, window in enumerate(rolling):
                own = within == number
                if own.any():
                    row = _make_row(scene, method, metric, top[own], None if below is None else below[own], seed)
                    results.windows += make_window_rows(window, [row])
    results.predictions += [_make_prediction_columns(scene, rows)]


def _compute_scores(rows: Sequence[WaitForecast], method: str) -> dict[str, tuple[Array, Array | None]]:
    """Return metric → (job,) numerator and denominator of the metric. Jobs with NaN do not count.

    A denominator of None means 1 for each job.
    """
    actual = np.array([row.actual_s for row in rows])
    point, bound = np.array(
        [row.ours_s[1:] if method == "ours" else (row.planned_s, row.planned_s) for row in rows], np.float64
    ).T
    near = np.where(actual > LONG_S, np.abs(point - actual) <= WITHIN_S, np.nan)
    return {
        "within_10min": (near, None),
        "bound_90_correct": ((actual <= bound).astype(float), None),
        "bound_90_width": (bound, actual),
    }


def _make_row(scene: StartScene, method: str, metric: str, top: Array, below: Array | None, seed: int) -> ResultRow:
    divisor = None if below is None else below.tolist()
    value, low, high = compute_interval(top.tolist(), divisor, block=BLOCK, seed=seed)
    fields: dict[str, Any] = {"value": value, "low": low, "high": high, "n": int(np.isfinite(top).sum())}
    return ResultRow(scene.dataset, "start", "all", None, method, _describe_model(method, scene), metric, **fields)


def _describe_model(method: str, scene: StartScene) -> str:
    """Describe how a method forecasts, and the capacity of the replay, in a short text."""
    return f"{'paths' if method == 'ours' else 'plan'}, {scene.capacity} at most"


def _make_prediction_columns(scene: StartScene, rows: Sequence[WaitForecast]) -> dict[str, Sequence[Any]]:
    """Return the columns of a table with one row for each job and quantile level of our forecasts.

    Waits are in seconds from the job's submission.
    """
    size = len(rows) * len(LEVELS)
    same = {"dataset": scene.dataset, "target": "start", "series": "all", "model": _describe_model("ours", scene)}
    job = np.array([row.job for row in rows])
    return {
        **{name: [word] * size for name, word in same.items()},
        "job": np.repeat(scene.history.job[job], len(LEVELS)).tolist(),
        "issued_ms": np.repeat(scene.jobs.submit_s[job] * 1000, len(LEVELS)).tolist(),
        "horizon_s": [None] * size,
        "quantile": LEVELS * len(rows),
        "value": [value for row in rows for value in row.ours_s],
        "actual": [row.actual_s for row in rows for _ in LEVELS],
    }
