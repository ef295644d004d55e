"""Run times beside a running pipeline: told of new jobs within seconds, what is left of all running ones every minute.

    loop      features of what is new, in slices           thread    predict all rows at once           loop   publish

What has ended is held against what was told. The features of a job are those of its submission for as long as it lives.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.job_peaks import JobPeaks
from features.run_history import FEATURES, JobShape
from features.run_past import LEVELS
from features.similarity import shape_of
from fleet.clock import Clock
from fleet.jobs import JobAttempt
from models.remaining import beyond
from service.board import Section
from service.exposition import Page
from service.kind_tables import PEAK, RUN, table_sections
from service.publish import ENDED_KEPT_MS, Tick
from service.run_book import Attempt, RunBook, ToldRun, with_left
from service.run_model import ServedRunModel
from service.state import FleetState
from service.thread_work import in_thread

PERIOD_S = 60.0
NEW_S = 10.0
SHORTEST_PAUSE_WALL_S = 0.2
YOUNG_S = 300.0
SLICE = 50  # features are made in the loop, some milliseconds at a time
MOST_DUE = 500  # kinds, a pass

Array = NDArray[np.float32]
Rows = Mapping[Attempt, JobAttempt]


@dataclass(frozen=True, slots=True)
class Asked:
    """A pass's question. features: (row, feature) of new attempts, then of kinds; old: of running attempts."""

    features: Array
    limits_s: NDArray[np.float64]
    old: Array
    elapsed_s: NDArray[np.float64]
    old_limits_s: NDArray[np.float64]


class RunForecasts:
    """The latest ones: `told` for the tick, `sections` for the board, `page` for Prometheus.

    Who holds `free` has the book to himself between two passes.
    """

    def __init__(self, book: RunBook, model: ServedRunModel, clock: Clock) -> None:
        self.free = asyncio.Lock()
        self.book = book
        self.model = model
        self.sections = self._table(clock.now_ms())
        self.page = b""
        self._clock = clock
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
            kept = self._settled(state, live, now_ms)
            fresh = {key: row for key, row in live.items() if key not in kept}
            for row in fresh.values():
                book.touch(shape_of(row))
            due = book.due(MOST_DUE)
            shapes = [*map(shape_of, fresh.values()), *(shape for _, shape in due)]
            features = await _features(state, shapes, now_ms)
            known = {key: kept[key].features for key in kept} | dict(zip(fresh, features, strict=False))
            aging = self._aging(live, kept, now_ms)
            asked = _question(shapes, features, aging, known, now_ms)
            changed, run_s, told = await in_thread(lambda: self._tell(asked, kept, [*fresh], [*aging], now_ms))
            book.told, book.model = told, self.model.name
            book.say([key for key, _ in due], run_s[len(fresh) :])
            if changed:
                book.touch_all()
            if due:
                self.sections = self._table(now_ms)
            self.page = run_page(book, self.model, now_ms)

    def _table(self, now_ms: int) -> list[Section]:
        """What is known by kind; none before anything is."""
        keys, run_s = self.book.table()
        return table_sections(RUN, keys, run_s, now_ms, self.book.model) if len(keys) else []

    def _settled(self, state: FleetState, live: Rows, now_ms: int) -> dict[Attempt, ToldRun]:
        """What was told, without what is long over; runs that ended since the last pass are scored."""
        kept = {}
        for key, told in self.book.told.items():
            row = live.get(key) or state.jobs.get(*key)
            if row is not None and row.over_ms is not None and not told.is_over:
                told = self._ended(row, told)
            if row is not None and (row.over_ms or now_ms) >= now_ms - ENDED_KEPT_MS:
                kept[key] = told
        return kept

    def _ended(self, row: JobAttempt, told: ToldRun) -> ToldRun:
        shape = shape_of(row)
        self.book.touch(shape)
        if row.run_s is not None and row.outcome in ("finished", "failed"):
            self.book.score(told, min(row.run_s, shape.limit_s or row.run_s), row.ended_ms or 0)
        return ToldRun(told.features, told.run_s, told.model, is_over=True)

    def _aging(self, live: Rows, kept: Mapping[Attempt, ToldRun], now_ms: int) -> dict[Attempt, JobAttempt]:
        """Running attempts to look at: all of them once a minute, else those that nothing was told of yet."""
        is_all = now_ms - self._all_ms >= PERIOD_S * 1000
        if is_all:
            self._all_ms = now_ms
        return {
            key: row
            for key, row in live.items()
            if row.started_ms is not None and (is_all or key not in kept or kept[key].left_s is None)
        }

    def _tell(
        self,
        asked: Asked,
        kept: dict[Attempt, ToldRun],
        fresh: Sequence[Attempt],
        aging: Sequence[Attempt],
        now_ms: int,
    ) -> tuple[bool, Array, dict[Attempt, ToldRun]]:
        """Whether another model serves now; (row, LEVELS) run times; what is told from now on. In a thread."""
        changed, run_s, left_s = self._ask(asked)
        model = self.model.name
        told = kept | {key: ToldRun(asked.features[at], run_s[at], model) for at, key in enumerate(fresh)}
        told_s = np.array([told[key].run_s for key in aging], np.float64).reshape(left_s.shape)
        return changed, run_s, with_left(told, aging, young(left_s, told_s, asked.elapsed_s), now_ms)

    def _ask(self, asked: Asked) -> tuple[bool, Array, Array]:
        """Whether another model serves now; (row, LEVELS) run times; (old, LEVELS) what is left."""
        changed = self.model.refresh()
        run_s = self.book.tracked(self.model.run_s(asked.features, LEVELS))
        run_s = np.minimum(run_s, asked.limits_s[:, None])
        left_s = self.model.remaining_s(asked.old, asked.elapsed_s, LEVELS)
        ahead_s = asked.old_limits_s - asked.elapsed_s
        left_s = np.where(ahead_s[:, None] > 0, np.minimum(left_s, ahead_s[:, None]), left_s)
        return changed, run_s.astype(np.float32), left_s.astype(np.float32)


def _question(
    shapes: Sequence[JobShape],
    features: Array,
    aging: Rows,
    known: Mapping[Attempt, Array],
    now_ms: int,
) -> Asked:
    old = np.array([known[key] for key in aging], np.float32).reshape(len(aging), len(FEATURES))
    elapsed_ms = [max(0, now_ms - (row.started_ms or now_ms)) for row in aging.values()]
    limits_s = _limits(shapes), _limits([shape_of(row) for row in aging.values()])
    return Asked(features, limits_s[0], old, np.array(elapsed_ms, np.float64) / 1000, limits_s[1])


def young(left_s: Array, told_s: NDArray[np.float64], elapsed_s: NDArray[np.float64]) -> Array:
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


def _limits(shapes: Sequence[JobShape]) -> NDArray[np.float64]:
    """(job,) limits in seconds, infinite where there are none."""
    return np.array([np.inf if shape.limit_s is None else shape.limit_s for shape in shapes], np.float64)


async def _features(state: FleetState, shapes: Sequence[JobShape], now_ms: int) -> Array:
    """(shape, feature), made in slices: events are folded in between."""
    rows = np.zeros((len(shapes), len(FEATURES)), np.float32)
    for at, shape in enumerate(shapes):
        rows[at] = state.runs.features(shape, now_ms)
        if at % SLICE == SLICE - 1:
            await asyncio.sleep(0)
    return rows


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
        f"Share of the last runs (up to {book.hits.maxlen}) that lasted no longer than told at their submission.",
        [({"bound": bound}, share) for bound, share in book.coverage().items()],
    )
    page.number("duration_scored_runs", "Runs that this coverage is of.", len(book.hits))
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
