"""Run times beside a running pipeline: told of new jobs within seconds, what is left of all running ones every minute.

    loop      features of what is new, in slices           thread    predict all rows at once           loop   publish

What a run will take is told from what was known at its submission, what is left of it from what is known now: as
training has it. What has ended is held against what was told of it, also where it ended before the next look.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from features.job_peaks import JobPeaks
from features.run_history import COLUMN, EMPIRICAL, FEATURES, ClosedRun, JobShape
from features.run_past import LEVELS
from features.similarity import shape_of
from fleet.clock import Clock
from fleet.jobs import JobAttempt
from models.drift import Recent
from models.remaining import beyond
from models.run_tracker import RunTracker
from service.board import Section
from service.exposition import Page
from service.kind_tables import PEAK, RUN, RUNS_SEEN, table_sections
from service.publish import ENDED_KEPT_MS, Tick
from service.run_book import Attempt, RunBook, ToldRun, told_run, with_left
from service.run_model import BASELINE, ServedRunModel
from service.state import FleetState
from service.thread_work import in_thread

PERIOD_S = 60.0
NEW_S = 10.0
SHORTEST_PAUSE_WALL_S = 0.2
YOUNG_S = 300.0
LATE_S = 60.0  # from a submission to its arrival here: one that takes longer was told late
SLICE = 50  # what is made in the loop is made some milliseconds at a time
MOST_DUE = 500  # kinds, a pass

_LIMIT, _SIMILAR = COLUMN["log_limit"], [COLUMN[name] for name in EMPIRICAL]

Array = NDArray[np.float32]
Rows = Mapping[Attempt, JobAttempt]
T = TypeVar("T")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class New:
    """An attempt that nothing was told of yet. closed: where it has ended since."""

    key: Attempt
    shape: JobShape
    features: Array
    in_time: bool
    closed: ClosedRun | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A pass's question. due, kinds: kinds by a shape that stands for them, and features of each; aging, old: running
    attempts and their features, as of now."""

    new: Sequence[New]
    due: Sequence[JobShape]
    kinds: Sequence[Array]
    aging: Sequence[JobAttempt]
    old: Sequence[Array]


class RunForecasts:
    """The latest ones: `told` for the tick, `sections` for the board, `page` for Prometheus, `recent` for the watch.

    Who holds `free` has the book to himself between two passes.
    """

    def __init__(self, book: RunBook, model: ServedRunModel, clock: Clock) -> None:
        self.free = asyncio.Lock()
        self.book = book
        self.model = model
        self.sections = self._table(clock.now_ms())
        self.page = b""
        self.recent = Recent()
        self._clock = clock
        self._looked_ms = clock.now_ms()  # when new ones were last looked for
        self._all_ms = -(10**18)  # when all running ones were last looked at

    @property
    def told(self) -> Mapping[Attempt, ToldRun]:
        return self.book.told

    async def forecast_forever(self, state: FleetState) -> None:
        while True:
            began = time.monotonic()
            await self.forecast(state)
            period_s = self._clock.wall_s(NEW_S)
            await asyncio.sleep(max(SHORTEST_PAUSE_WALL_S, period_s - (time.monotonic() - began)))

    async def forecast(self, state: FleetState) -> None:
        """Tell of what is new and, once a minute, of what is left of everything that runs."""
        async with self.free:
            now_ms, book = self._clock.now_ms(), self.book
            live = {_key(row): row for row in (*state.jobs.running(), *state.jobs.queued())}
            closed, kept = state.runs.closed(), self._kept(state, live, now_ms)
            taken = {key: state.runs.taken(*key) for key in live if key not in kept}
            new = await _sliced([*taken], lambda key: self._came(state, live[key], taken[key], now_ms))
            over = await _sliced(closed, lambda run: self._over(run, now_ms))
            new += [row for row in over if row is not None]
            self._looked_ms = now_ms
            due = book.due(MOST_DUE)
            kinds = await _sliced(due, lambda row: state.runs.features(row[1], now_ms))
            aging = self._aging(live, kept, now_ms)
            old = await _sliced(aging, lambda row: _features_now(state, row, now_ms))
            asked = Asked(new, [shape for _, shape in due], kinds, aging, old)
            run_s, told = await in_thread(lambda: self._tell(asked, kept, now_ms))
            book.told = told
            book.spoken_by(self.model.name)
            book.say([key for key, _ in due], run_s)
            for row in new:
                if row.closed is not None:
                    self._score(told[row.key], row.closed)
            if due:
                self.sections = self._table(now_ms)
            self.page = run_page(book, self.model, now_ms)
            self.recent = Recent() if self.model.name == BASELINE else book.recent()

    def _table(self, now_ms: int) -> list[Section]:
        """What is known by kind; none before anything is."""
        keys, run_s, runs = self.book.table()
        if not len(keys):
            return []
        return [*table_sections(RUN, keys, run_s, now_ms, self.book.model), Section(RUNS_SEEN, runs, now_ms)]

    def _kept(self, state: FleetState, live: Rows, now_ms: int) -> dict[Attempt, ToldRun]:
        """What was told, without what is long over."""
        kept = {}
        for key, told in self.book.told.items():
            row = live.get(key) or state.jobs.get(*key)
            if row is not None and (row.over_ms or now_ms) >= now_ms - ENDED_KEPT_MS:
                kept[key] = told if told.is_over or row.over_ms is None else told.over()
        return kept

    def _came(self, state: FleetState, row: JobAttempt, features: Array | None, now_ms: int) -> New:
        """An attempt that waits or runs, and was not told of. features: as of its submission, where these are known."""
        shape = shape_of(row)
        self.book.touch(shape)
        if features is None:
            return New(_key(row), shape, _features_now(state, row, now_ms), in_time=False)
        return New(_key(row), shape, features, self._in_time(shape))

    def _in_time(self, shape: JobShape) -> bool:
        """Whether it came since the last look: long and short runs alike are scored, and no features knew of later."""
        return shape.submitted_ms >= self._looked_ms - LATE_S * 1000

    def _over(self, run: ClosedRun, now_ms: int) -> New | None:
        """A run that is over tells of its kinds, and is scored, now or, where nothing was told of it yet, after that.

        Of what came late and ended long ago nothing need be told.
        """
        key = (run.job, run.attempt)
        self.book.touch(run.shape, is_over=True)
        told, in_time = self.book.told.get(key), self._in_time(run.shape)
        if told is not None:
            self._score(told, run)
        elif run.features is not None and (in_time or run.ended_ms >= now_ms - ENDED_KEPT_MS):
            return New(key, run.shape, run.features, in_time, run)
        return None

    def _score(self, told: ToldRun, run: ClosedRun) -> None:
        self.book.score(told, run.shape, run.run_s, run.ended_ms)

    def _aging(self, live: Rows, kept: Mapping[Attempt, ToldRun], now_ms: int) -> list[JobAttempt]:
        """Running attempts to look at: all of them once a minute, else those that nothing was told of yet."""
        is_all = now_ms - self._all_ms >= PERIOD_S * 1000
        if is_all:
            self._all_ms = now_ms
        return [
            row
            for key, row in live.items()
            if row.started_ms is not None and (is_all or key not in kept or kept[key].left_s is None)
        ]

    def _tell(self, asked: Asked, kept: Mapping[Attempt, ToldRun], now_ms: int) -> tuple[Array, dict[Attempt, ToldRun]]:
        """(kind, LEVELS) run times, no limit caps these; what is told from now on. In a thread."""
        self.model.refresh()
        new, features = asked.new, _stacked([*(row.features for row in asked.new), *asked.kinds])
        similar = features[:, _SIMILAR].astype(np.float64)
        shapes = [*(row.shape for row in new), *asked.due]
        tracker = self.book.tracker if self.model.name == self.book.model else RunTracker()
        log_run = tracker.served(self.model.log_run(features), similar, [(shape.kin, shape.gpus) for shape in shapes])
        run_s = np.exp(log_run).astype(np.float32)
        similar_s = np.exp(similar).astype(np.float32)
        told = {
            row.key: told_run(
                run_s[at], similar_s[at], row.shape.limit_s, self.model.name, row.in_time, row.closed is not None
            )
            for at, row in enumerate(new)
        }
        told = {**kept, **told}
        keys = [*map(_key, asked.aging)]
        told_s = np.array([told[key].run_s for key in keys], np.float64).reshape(len(keys), len(LEVELS))
        elapsed_s = np.array([now_ms - (row.started_ms or now_ms) for row in asked.aging], np.float64).clip(0) / 1000
        left_s = self._left_s(_stacked(asked.old), elapsed_s, told_s)
        return run_s[len(new) :], told | with_left(told, keys, left_s, now_ms)

    def _left_s(self, features: Array, elapsed_s: NDArray[np.float64], told_s: NDArray[np.float64]) -> Array:
        """(attempt, LEVELS) seconds from now, no more than what a limit leaves. told_s: as told of the whole run."""
        left_s = young(self.model.remaining_s(features, elapsed_s, LEVELS), told_s, elapsed_s)
        ahead_s = (np.exp(features[:, _LIMIT].astype(np.float64)) - elapsed_s)[:, None]
        return np.where(ahead_s > 0, np.minimum(left_s, ahead_s), left_s).astype(np.float32)


def young(
    left_s: NDArray[np.float64], told_s: NDArray[np.float64], elapsed_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(attempt, LEVELS) what is left; of those that began just now it is what was told of the whole run.

    Models of what is left are fitted on jobs that have run for YOUNG_S and longer.
    """
    rows = np.flatnonzero((elapsed_s < YOUNG_S) & np.isfinite(told_s).all(axis=1))
    if not len(rows):
        return left_s
    known = np.log(np.maximum(told_s[rows], 1.0))
    told_left_s = np.stack([beyond(known, elapsed_s[rows], level) for level in LEVELS], axis=1)
    share = (elapsed_s[rows] / YOUNG_S)[:, None]
    left_s = left_s.copy()
    left_s[rows] = share * left_s[rows] + (1 - share) * told_left_s
    return left_s


def _features_now(state: FleetState, row: JobAttempt, now_ms: int) -> Array:
    """Of an attempt that waits or runs, also where nobody told of its submission."""
    found = state.runs.features_of(*_key(row), now_ms)
    return state.runs.features(shape_of(row), now_ms) if found is None else found


async def _sliced(rows: Sequence[T], make: Callable[[T], Made]) -> list[Made]:
    """What is made of each row; events are folded in between."""
    made = []
    for at, row in enumerate(rows):
        made.append(make(row))
        if at % SLICE == SLICE - 1:
            await asyncio.sleep(0)
    return made


def _stacked(rows: Sequence[Array]) -> Array:
    """(row, feature)"""
    return np.array(rows, np.float32).reshape(len(rows), len(FEATURES))


def peak_sections(peaks: JobPeaks, tick: Tick) -> list[Section]:
    """What telemetry has seen of jobs, this tick included, by their kind."""
    peaks.finish(tick.ended)
    if tick.gpu is not None:
        memory, power = tick.gpu.column("fb_used_bytes"), tick.gpu.column("power_w")
        peaks.see(tick.running, tick.now_ms, tick.occupancy.holder, tick.gpu_rows, memory, power)
    return table_sections(PEAK, *peaks.table(), tick.now_ms)


def run_page(book: RunBook, model: ServedRunModel, now_ms: int) -> bytes:
    """Metrics: how often what was told held, and who tells it."""
    page = Page()
    page.gauge(
        "duration_coverage_ratio",
        f"Share of the last runs (up to {book.outcomes.maxlen}) that lasted no longer than told at their submission.",
        [({"bound": bound}, share) for bound, share in book.coverage().items()],
    )
    page.number("duration_scored_runs", "Runs that this coverage is of.", len(book.outcomes))
    page.gauge("duration_model_info", "The model that run times come from.", [({"model": model.name}, 1)])
    page.number(
        "duration_model_trouble",
        "1 while the version that should serve cannot, and similar jobs do.",
        bool(model.trouble),
    )
    fitted_ms = model.fitted_until_ms
    age_s = None if fitted_ms is None else (now_ms - fitted_ms) / 1000
    page.number("duration_fit_age_seconds", "Fleet time since the end of the history that was fitted on.", age_s)
    return page.encode()


def _key(attempt: JobAttempt) -> Attempt:
    return attempt.job, attempt.attempt
