"""Run-time forecasts: of new jobs within seconds, and of the remaining time of running jobs every minute.

    loop      features of new attempts, in slices          thread    predict all rows at once           loop   publish

A run time is forecast from the facts known at submission, as in training. The remaining time is forecast
from the facts known at present.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.ended_jobs import ENDED_RETENTION_MS
from fleetcast.features.job_peaks import JobPeaks
from fleetcast.features.past_runs import COLUMN, EMPIRICAL, FEATURES, ClosedRun, JobShape
from fleetcast.features.run_past import LEVELS
from fleetcast.features.similarity import make_job_shape
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.run_times.remaining import blend_with_all_jobs, estimate_left_s
from fleetcast.models.run_times.tracker import RunTracker
from fleetcast.models.versions.drift import RecentAccuracy
from fleetcast.service.board.board import Section
from fleetcast.service.board.kind_tables import PEAK, RUN, RUNS_SEEN, make_table_sections
from fleetcast.service.exposition import Page
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.run_times.model import BASELINE, ServedRunModel
from fleetcast.service.pipeline.run_times.record import (
    Attempt,
    IssuedRunTime,
    RunTimeRecord,
    issue_run_time,
    update_remaining_times,
)
from fleetcast.service.pipeline.state import FleetState
from fleetcast.service.pipeline.tick import Tick
from fleetcast.service.thread_work import run_in_thread

PERIOD_S = 60.0
NEW_S = 10.0
SHORTEST_PAUSE_WALL_S = 0.2
YOUNG_S = 300.0
LATE_S = 60.0  # from a submission to its arrival here: one that takes longer is late
SLICE = 50  # what is made in the loop is made some milliseconds at a time
MOST_DUE = 500  # kinds, a pass
FEWEST_ENDED = 20  # jobs of one size that speak for it
UNKNOWN_S = (np.nan,) * len(LEVELS)

_LIMIT, _SIMILAR = COLUMN["log_limit"], [COLUMN[name] for name in EMPIRICAL]

Array = NDArray[np.float32]
Floats = NDArray[np.float64]
Rows = Mapping[Attempt, JobAttempt]
T = TypeVar("T")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class UnforecastAttempt:
    """An attempt without a run-time forecast, with the features that a forecast needs.

    closed: the attempt's run, if it has already ended.
    """

    key: Attempt
    shape: JobShape
    features: Array
    in_time: bool
    closed: ClosedRun | None = None


@dataclass(frozen=True, slots=True)
class ForecastInputs:
    """The inputs of one forecasting pass.

    new: attempts that get a forecast of their run time. due, kinds: a shape for each job kind to forecast,
    and the features of each shape. aging, old: running attempts whose remaining time is forecast, and the
    features of each of these attempts.
    """

    new: Sequence[UnforecastAttempt]
    due: Sequence[JobShape]
    kinds: Sequence[Array]
    aging: Sequence[JobAttempt]
    old: Sequence[Array]
    ended: Mapping[str, Any]  # run times of finished jobs, by size


class RunForecasts(Capability):
    """The run-time forecasts of a pipeline.

    `issued` is for the tick, `latest` for the board, and `recent` for the model monitor. Hold the lock
    `free` to use the record.
    """

    def __init__(self, record: RunTimeRecord, model: ServedRunModel, clock: Clock, peaks: JobPeaks) -> None:
        self.free = asyncio.Lock()
        self.record = record
        self.model = model
        self.latest = self._make_kind_sections(clock.now_ms())
        self.metrics = b""
        self.recent = RecentAccuracy()
        self._peaks = peaks
        self._clock = clock
        self._polled_ms = clock.now_ms()  # when new ones were last polled
        self._all_ms = -(10**18)  # when all running ones were last forecast

    @property
    def issued(self) -> Mapping[Attempt, IssuedRunTime]:
        return self.record.issued

    def make_sections(self, tick: Tick) -> Sequence[Section]:
        return [*self.latest, *make_peak_sections(self._peaks, tick)]

    def make_page(self, tick: Tick) -> bytes:
        return self.metrics

    @contextlib.asynccontextmanager
    async def freeze_state(self) -> AsyncIterator[None]:
        async with self.free:
            yield

    async def work(self, state: FleetState) -> None:
        while True:
            began = time.monotonic()
            await self.forecast(state)
            period_s = self._clock.convert_to_wall_s(NEW_S)
            await asyncio.sleep(max(SHORTEST_PAUSE_WALL_S, period_s - (time.monotonic() - began)))

    async def forecast(self, state: FleetState) -> None:
        """Forecast new attempts and, once a minute, the remaining time of all running attempts."""
        async with self.free:
            now_ms, record = self._clock.now_ms(), self.record
            live = {_get_attempt_key(row): row for row in (*state.jobs.list_running(), *state.jobs.list_queued())}
            closed, retained = state.runs.pop_closed_runs(), self._find_retained_forecasts(state, live, now_ms)
            taken = {key: state.runs.pop_features(*key) for key in live if key not in retained}
            new = await _map_in_slices(
                [*taken], lambda key: self._make_forecast_inputs(state, live[key], taken[key], now_ms)
            )
            over = await _map_in_slices(closed, lambda run: self._score_ended_run(run, now_ms))
            new += [row for row in over if row is not None]
            self._polled_ms = now_ms
            due = record.pop_due_kinds(MOST_DUE)
            kinds = await _map_in_slices(due, lambda row: state.runs.compute_features(row[1], now_ms))
            aging = self._choose_running_attempts(live, retained, now_ms)
            old = await _map_in_slices(aging, lambda row: _find_features(state, row, now_ms))
            inputs = ForecastInputs(
                new, [shape for _, shape in due], kinds, aging, old, state.demand.compute_duration_quantiles()
            )
            run_s, issued = await run_in_thread(lambda: self._issue_forecasts(inputs, retained, now_ms))
            record.issued = issued
            record.use_model(self.model.name)
            record.update_kinds([key for key, _ in due], run_s)
            for row in new:
                if row.closed is not None:
                    self._score_forecast(issued[row.key], row.closed)
            if due:
                self.latest = self._make_kind_sections(now_ms)
            self.metrics = make_run_page(record, self.model, now_ms)
            self.recent = RecentAccuracy() if self.model.name == BASELINE else record.summarise_recent()

    def _make_kind_sections(self, now_ms: int) -> list[Section]:
        """Return the sections of run times by job kind. Returns no section before the first forecast."""
        keys, run_s, runs = self.record.make_table()
        if not len(keys):
            return []
        return [*make_table_sections(RUN, keys, run_s, now_ms, self.record.model), Section(RUNS_SEEN, runs, now_ms)]

    def _find_retained_forecasts(self, state: FleetState, live: Rows, now_ms: int) -> dict[Attempt, IssuedRunTime]:
        """Return the issued forecasts, without those of attempts that ended long ago."""
        retained = {}
        for key, issued in self.record.issued.items():
            row = live.get(key) or state.jobs.get(*key)
            if row is not None and (row.over_ms or now_ms) >= now_ms - ENDED_RETENTION_MS:
                retained[key] = issued if issued.is_over or row.over_ms is None else issued.drop_remaining_time()
        return retained

    def _make_forecast_inputs(
        self, state: FleetState, row: JobAttempt, features: Array | None, now_ms: int
    ) -> UnforecastAttempt:
        """Make the inputs for a forecast of a waiting or running attempt.

        features: the features at the attempt's submission, or None if unknown.
        """
        shape = make_job_shape(row)
        self.record.mark_kinds_due(shape)
        if features is None:
            return UnforecastAttempt(_get_attempt_key(row), shape, _find_features(state, row, now_ms), in_time=False)
        return UnforecastAttempt(_get_attempt_key(row), shape, features, self._is_in_time(shape))

    def _is_in_time(self, shape: JobShape) -> bool:
        """Return whether the job was submitted after the last poll. Only forecasts of such jobs are scored.

        The features of older jobs could contain later events. Short runs of such jobs would be missed.
        """
        return shape.submitted_ms >= self._polled_ms - LATE_S * 1000

    def _score_ended_run(self, run: ClosedRun, now_ms: int) -> UnforecastAttempt | None:
        """Score the forecast of an ended run.

        A run without a forecast cannot be scored. For such a run, returns the inputs for a late forecast, unless
        it ended long ago. Otherwise, returns None.
        """
        key = (run.job, run.attempt)
        self.record.mark_kinds_due(run.shape, is_over=True)
        issued, in_time = self.record.issued.get(key), self._is_in_time(run.shape)
        if issued is not None:
            self._score_forecast(issued, run)
        elif run.features is not None and (in_time or run.ended_ms >= now_ms - ENDED_RETENTION_MS):
            return UnforecastAttempt(key, run.shape, run.features, in_time, run)
        return None

    def _score_forecast(self, issued: IssuedRunTime, run: ClosedRun) -> None:
        self.record.record_outcome(issued, run.shape, run.run_s, run.ended_ms)

    def _choose_running_attempts(
        self, live: Rows, retained: Mapping[Attempt, IssuedRunTime], now_ms: int
    ) -> list[JobAttempt]:
        """Choose the running attempts to forecast: all of them once a minute, else those without a forecast."""
        is_all = now_ms - self._all_ms >= PERIOD_S * 1000
        if is_all:
            self._all_ms = now_ms
        return [
            row
            for key, row in live.items()
            if row.started_ms is not None and (is_all or key not in retained or retained[key].left_s is None)
        ]

    def _issue_forecasts(
        self, inputs: ForecastInputs, retained: Mapping[Attempt, IssuedRunTime], now_ms: int
    ) -> tuple[Array, dict[Attempt, IssuedRunTime]]:
        """Issue the forecasts of one pass. This runs in a thread.

        Returns the run times of kinds in seconds, not capped by limits: (kind, LEVELS) float32. Also returns all
        issued forecasts.
        """
        self.model.refresh()
        new, features = inputs.new, _stack_features([*(row.features for row in inputs.new), *inputs.kinds])
        similar = features[:, _SIMILAR].astype(np.float64)
        shapes = [*(row.shape for row in new), *inputs.due]
        tracker = self.record.tracker if self.model.name == self.record.model else RunTracker()
        log_run = tracker.correct_quantiles(
            self.model.predict_log_run(features), similar, [(shape.group_or_queue, shape.gpus) for shape in shapes]
        )
        run_s = np.exp(log_run).astype(np.float32)
        similar_s = np.exp(similar).astype(np.float32)
        issued = {
            row.key: issue_run_time(
                run_s[at], similar_s[at], row.shape.limit_s, self.model.name, row.in_time, row.closed is not None
            )
            for at, row in enumerate(new)
        }
        issued = {**retained, **issued}
        keys = [*map(_get_attempt_key, inputs.aging)]
        issued_s = np.array([issued[key].run_s for key in keys], np.float64).reshape(len(keys), len(LEVELS))
        elapsed_s = np.array([now_ms - (row.started_ms or now_ms) for row in inputs.aging], np.float64).clip(0) / 1000
        ended_s = np.array([_find_finished_run_times(inputs.ended, row.gpus) for row in inputs.aging]).reshape(
            len(keys), len(LEVELS)
        )
        left_s = self._predict_remaining_s(_stack_features(inputs.old), elapsed_s, issued_s, ended_s)
        return run_s[len(new) :], issued | update_remaining_times(issued, keys, left_s, now_ms)

    def _predict_remaining_s(self, features: Array, elapsed_s: Floats, issued_s: Floats, ended_s: Floats) -> Array:
        """Predict the remaining seconds, at most those until the limit: (attempt, LEVELS) float32.

        issued_s, ended_s: seconds of the whole run, by the issued forecast and by finished jobs.
        """
        left_s = self.model.predict_remaining_s(features, elapsed_s, LEVELS)
        if self.model.name == BASELINE:
            log_s = np.log(np.maximum(ended_s, 1.0))
            everybody_s = np.stack([estimate_left_s(log_s, elapsed_s, level) for level in LEVELS], axis=1)
            left_s = blend_with_all_jobs(left_s, everybody_s, elapsed_s)
        left_s = correct_young_runs(left_s, issued_s, elapsed_s)
        ahead_s = (np.exp(features[:, _LIMIT].astype(np.float64)) - elapsed_s)[:, None]
        return np.where(ahead_s > 0, np.minimum(left_s, ahead_s), left_s).astype(np.float32)


def _find_finished_run_times(ended: Mapping[str, Any], gpus: int) -> Sequence[float]:
    """Return the run times of finished jobs of this size in seconds: (LEVELS,), NaN if there are none.

    If few jobs of this size have finished, return the run times of all finished jobs.
    """
    own, everybody = ended["by_gpus"].get(str(gpus)), ended["all"]
    row = own if own is not None and own["n"] >= FEWEST_ENDED else everybody
    return UNKNOWN_S if row is None else row["levels"]


def correct_young_runs(left_s: Floats, issued_s: Floats, elapsed_s: Floats) -> Floats:
    """Return the remaining seconds, corrected for runs younger than YOUNG_S: (attempt, LEVELS).

    Models are not fitted on such young runs. The younger a run, the higher the weight of its forecast at
    submission (`issued_s`).
    """
    rows = np.flatnonzero((elapsed_s < YOUNG_S) & np.isfinite(issued_s).all(axis=1))
    if not len(rows):
        return left_s
    known = np.log(np.maximum(issued_s[rows], 1.0))
    issued_left_s = np.stack([estimate_left_s(known, elapsed_s[rows], level) for level in LEVELS], axis=1)
    share = (elapsed_s[rows] / YOUNG_S)[:, None]
    left_s = left_s.copy()
    left_s[rows] = share * left_s[rows] + (1 - share) * issued_left_s
    return left_s


def _find_features(state: FleetState, row: JobAttempt, now_ms: int) -> Array:
    """Return the features of a waiting or running attempt, even without its submission: (feature,)."""
    found = state.runs.compute_open_job_features(*_get_attempt_key(row), now_ms)
    return state.runs.compute_features(make_job_shape(row), now_ms) if found is None else found


async def _map_in_slices(rows: Sequence[T], make: Callable[[T], Made]) -> list[Made]:
    """Return the results of `make` for all rows. Between two slices of rows, the event loop applies events."""
    made = []
    for at, row in enumerate(rows):
        made.append(make(row))
        if at % SLICE == SLICE - 1:
            await asyncio.sleep(0)
    return made


def _stack_features(rows: Sequence[Array]) -> Array:
    """Stack rows of features: (row, feature) float32."""
    return np.array(rows, np.float32).reshape(len(rows), len(FEATURES))


def make_peak_sections(peaks: JobPeaks, tick: Tick) -> list[Section]:
    """Record the peaks of jobs at this tick, and return the sections with the peaks by job kind."""
    peaks.store_finished(tick.events.ended)
    memory, power = tick.frames.gpu.column("fb_used_bytes"), tick.frames.gpu.column("power_w")
    readings = tick.occupancy.holder, tick.gpu_rows, memory, power
    peaks.observe(tick.events.running, tick.now_ms, *readings, tick.events.placements)
    return make_table_sections(PEAK, *peaks.make_table(), tick.now_ms)


def make_run_page(record: RunTimeRecord, model: ServedRunModel, now_ms: int) -> bytes:
    """Make the metrics page of run times: how often the bounds held, and which model forecasts."""
    page = Page()
    page.add_gauge(
        "duration_coverage_ratio",
        f"Share of the last runs (up to {record.outcomes.maxlen}) that lasted no longer than predicted at submission.",
        [({"bound": bound}, share) for bound, share in record.compute_coverage().items()],
    )
    page.add_number("duration_scored_runs", "Runs that this coverage is of.", len(record.outcomes))
    page.add_gauge("duration_model_info", "The model that run times come from.", [({"model": model.name}, 1)])
    page.add_number(
        "duration_model_trouble",
        "1 while the version that should serve cannot, and similar jobs do.",
        bool(model.trouble),
    )
    fitted_ms = model.fitted_until_ms
    age_s = None if fitted_ms is None else (now_ms - fitted_ms) / 1000
    page.add_number("duration_fit_age_seconds", "Fleet time since the end of the history that was fitted on.", age_s)
    return page.encode()


def _get_attempt_key(attempt: JobAttempt) -> Attempt:
    return attempt.job, attempt.attempt
