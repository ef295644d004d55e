"""The fingerprints of running jobs. A pipeline makes them with a share of one CPU core.

New jobs and the jobs with the oldest evaluations come first.

    loop: copy the rings of some jobs ──> thread: periods, phases, use ──> again, until the budget of the pass is spent

A pass uses BUDGET_SHARE of the time until the next one, or one slice of jobs if this takes longer. Slices
of new and of known jobs alternate, so that many short jobs do not delay the others. Load peaks are summed
every SPIKES_S, or sooner once there are many more jobs. If the arithmetic fails on a job's numbers, its
fingerprint is unknown and states the reason. The other jobs are evaluated as usual.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs

from fleetcast.features.job_past import JobPast, extend_past
from fleetcast.features.job_window import JobRows, copy_window, find_job_rows
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import Topology
from fleetcast.models.jobs.spikes import Domain, JobLoad, Spike, predict_spikes
from fleetcast.service.answers.fingerprints import Fingerprint, UseRow
from fleetcast.service.board.board import Section
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.job_metrics import JobMetrics
from fleetcast.service.pipeline.jobs.fingerprint_answers import (
    IdleSpan,
    JobCopy,
    find_idle_time,
    make_fingerprint,
    make_use_row,
)
from fleetcast.service.pipeline.jobs.loads import compute_domain_shares, make_job_load, sum_rail_capacity
from fleetcast.service.pipeline.publish import encode
from fleetcast.service.pipeline.state import FleetState
from fleetcast.service.pipeline.tick import Tick
from fleetcast.service.thread_work import run_in_thread

logger = logging.getLogger(__name__)

PERIOD_S = 5.0
SHORTEST_PAUSE_WALL_S = 0.5
BUDGET_SHARE = 0.08  # of a core; publishing comes on top
SLICE_JOBS, SLICE_GPUS = 16, 512  # whose readings are copied at once: some milliseconds of the loop
REFRESH_S = 15.0  # a job that was looked at has nothing new before
SPIKES_S, MANY_MORE = 30.0, 1.25
ODD = "odd_fingerprint"
ODD_ERRORS = (ValueError, IndexError, KeyError, ZeroDivisionError, FloatingPointError, OverflowError)

Attempt = tuple[str, int]


@dataclass(frozen=True, slots=True)
class JobAnswers:
    """The answers about one job.

    idle, past: results that depend on more than the window of one evaluation. A restart loses both.
    """

    fingerprint: Fingerprint
    use: UseRow
    load: JobLoad
    idle: IdleSpan | None
    past: JobPast | None = None


class _NodeLookups:
    """Lookup tables of a topology by node name: rows, GPU models and GPU counts."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.rows = {name: row for row, name in enumerate(topology.names)}
        self.models = {node.name: node.gpu_model for node in topology.nodes}
        self.gpus = dict(zip(topology.names, topology.gpus.tolist(), strict=True))
        self.rails = sum_rail_capacity(topology)


class Fingerprints(Capability):
    """The capability that makes the fingerprints of the running jobs.

    `latest`: board sections about the jobs evaluated so far. `answers`: attempt → its answers, in the order
    of evaluation, the oldest first.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._metrics = JobMetrics()
        self.answers: dict[Attempt, JobAnswers] = {}
        self._rows: dict[Attempt, tuple[tuple[Any, ...], JobRows]] = {}
        self._sizes: Mapping[Attempt, int] = {}  # GPUs held in the occupancy, where events state another number
        self._odd: dict[Attempt, str] = {}  # of what runs: why nothing could be made of it
        self._places: _NodeLookups | None = None
        self._turn = 0  # whose slice is next: new jobs' or known ones'
        self._spikes: list[Spike] = []
        self._spiked = (-1, 0)  # when, and over how many jobs
        self.latest = self._encode_sections(clock.now_ms(), 0)

    def make_sections(self, tick: Tick) -> Sequence[Section]:
        self._sizes = tick.sizes
        return self.latest

    def make_page(self, tick: Tick) -> bytes:
        return self._metrics.renew_page(tick, self.latest, self._find_fingerprint)

    def _find_fingerprint(self, attempt: JobAttempt) -> Fingerprint | None:
        """Return the fingerprint of an attempt, or None if it has none.

        A thread may change the answers meanwhile. So this looks up one key instead of iterating.
        """
        found = self.answers.get((attempt.job, attempt.attempt))
        return None if found is None else found.fingerprint

    async def work(self, state: FleetState) -> None:
        while True:
            await self.run_pass(state)
            await asyncio.sleep(self._pause_wall_s)

    @property
    def _pause_wall_s(self) -> float:
        return max(SHORTEST_PAUSE_WALL_S, self._clock.convert_to_wall_s(PERIOD_S))

    async def run_pass(self, state: FleetState) -> None:
        """Run one pass: evaluate jobs until the budget is spent, and encode the sections."""
        now_ms = self._clock.now_ms()
        running = {(row.job, row.attempt): row for row in state.jobs.list_running()}
        self._drop_ended_jobs(running)
        if self._places is None or self._places.topology is not state.topology:
            self._places = _NodeLookups(state.topology)
        places, before = self._places, set(self._odd)
        left_s = BUDGET_SHARE * self._pause_wall_s
        for due in self._iterate_due_slices(running, now_ms):
            began = time.thread_time()
            seen = [await self._copy_job(state, row, places, now_ms) for row in due]
            left_s -= time.thread_time() - began
            left_s -= await run_in_thread(lambda seen=seen: self._compute_answers(seen, places))  # type: ignore[misc]
            if left_s <= 0:
                break
        self.latest = await run_in_thread(lambda: self._encode_sections(now_ms, len(running), places))
        for job, attempt in self._odd.keys() - before:
            why = self._odd[job, attempt]
            logger.warning("job %s, attempt %d has no fingerprint: %s", job, attempt, why)
            state.counts.bad[ODD] += 1

    def _drop_ended_jobs(self, running: Mapping[Attempt, JobAttempt]) -> None:
        """Drop the answers of jobs that no longer run."""
        self.answers = {key: row for key, row in self.answers.items() if key in running}
        self._odd = {key: why for key, why in self._odd.items() if key in running}
        self._rows = {key: row for key, row in self._rows.items() if key in running}

    def _iterate_due_slices(self, running: Mapping[Attempt, JobAttempt], now_ms: int) -> Iterator[list[JobAttempt]]:
        """Yield slices of new jobs and of jobs with the oldest evaluations, in turn.

        The next pass continues with the other kind. Jobs that were evaluated less than REFRESH_S ago are left
        out.
        """
        refresh_ms = REFRESH_S * 1000
        looked = [(key, answers.use.looked_ms) for key, answers in self.answers.items()]
        old = [key for key, then_ms in looked if not 0 <= now_ms - then_ms < refresh_ms]  # a clock may be set back
        kinds = [[row for key, row in running.items() if key not in self.answers], [running[key] for key in old]]
        waiting = [_split_into_slices(rows) for rows in kinds]
        while True:
            turn = self._turn
            self._turn = 1 - turn
            due = next(waiting[turn], None) or next(waiting[1 - turn], None)
            if due is None:
                return
            yield due

    async def _copy_job(self, state: FleetState, row: JobAttempt, places: _NodeLookups, now_ms: int) -> JobCopy:
        """Copy a job's data for the thread. This runs in the event loop, because the loop changes the data."""
        model = places.models.get(row.hosts[0], "") if row.hosts else ""
        window, trouble = None, ""
        try:
            window = await copy_window(state.store, row, self._find_job_rows(state, row, places))
        except ODD_ERRORS as error:
            trouble = self._odd[row.job, row.attempt] = f"its readings cannot be copied ({error})"
        before = self.answers.get((row.job, row.attempt))
        idle, past = (before.idle, before.past) if before else (None, None)
        return JobCopy(row.copy(), window, model, now_ms, trouble, idle, past)

    def _find_job_rows(self, state: FleetState, row: JobAttempt, places: _NodeLookups) -> JobRows:
        """Return the rows of the job's readings, from a cache.

        They are computed again if the job's GPUs, ports, nodes or ranks have changed.
        """
        tables = state.store.entities
        sizes = (len(tables[EntityKind.GPU]), len(tables[EntityKind.PORT]))
        stamp = (places, *sizes, row.ranks, row.nodes)
        known = self._rows.get((row.job, row.attempt))
        if known is None or known[0] != stamp:
            known = self._rows[row.job, row.attempt] = (stamp, find_job_rows(row, tables, places.gpus))
        return known[1]

    def _compute_answers(self, seen: Sequence[JobCopy], places: _NodeLookups) -> float:
        """Compute the answers for copied jobs in a thread. Returns the CPU seconds that this took."""
        began = time.thread_time()
        for one in seen:
            key = one.attempt.job, one.attempt.attempt
            shares = compute_domain_shares(one.attempt, places.topology, places.rows)
            try:
                answers = _make_answers(one, shares)
            except ODD_ERRORS as error:
                self._odd[key] = f"its readings or steps cannot be used ({error})"
                answers = _make_unknown_answers(one, shares, self._odd[key])
            self.answers.pop(key, None)
            self.answers[key] = answers
        return time.thread_time() - began

    def _encode_sections(self, now_ms: int, running: int, places: _NodeLookups | None = None) -> list[Section]:
        then_ms, jobs = self._spiked
        if places is not None and (
            not 0 <= now_ms - then_ms < SPIKES_S * 1000 or len(self.answers) >= MANY_MORE * jobs
        ):
            loads = [answers.load for answers in self.answers.values()]
            self._spikes = predict_spikes(loads, now_ms, places.rails, np.random.default_rng(now_ms))
            self._spiked = now_ms, max(len(loads), 1)
        documents = {
            "doc.fingerprints": {job: answers.fingerprint for (job, _), answers in self.answers.items()},
            "doc.utilisation": [
                structs.replace(answers.use, gpus=self._sizes.get(key, answers.use.gpus))
                for key, answers in self.answers.items()
            ],
            "doc.spikes": self._spikes,
            "doc.jobs_looked": {"jobs_looked": len(self.answers), "jobs_running": running},
        }
        return [Section(name, encode(body), now_ms) for name, body in documents.items()]


def _split_into_slices(rows: Iterable[JobAttempt]) -> Iterator[list[JobAttempt]]:
    """Yield slices of at most SLICE_JOBS jobs and SLICE_GPUS GPUs, but at least one job."""
    due: list[JobAttempt] = []
    gpus = 0
    for row in rows:
        if due and (len(due) == SLICE_JOBS or gpus + row.gpus > SLICE_GPUS):
            yield due
            due, gpus = [], 0
        due.append(row)
        gpus += row.gpus
    if due:
        yield due


def _make_answers(seen: JobCopy, shares: Mapping[Domain, float]) -> JobAnswers:
    """Make the answers about a job. Raises ODD_ERRORS if the arithmetic fails on its numbers.

    shares: domain → share of the job's nodes in this domain.
    """
    past = extend_past(seen.past, seen.whole_window) if seen.whole_window else seen.past
    load = make_job_load(seen.attempt, seen.whole_window, shares, seen.now_ms)
    use = make_use_row(seen)
    return JobAnswers(make_fingerprint(replace(seen, past=past)), use, load, find_idle_time(seen, use.idle_s), past)


def _make_unknown_answers(seen: JobCopy, shares: Mapping[Domain, float], why: str) -> JobAnswers:
    """Make answers from a job's submission and nodes alone, because its numbers are implausible.

    shares: domain → share of the job's nodes in this domain. why: the reason that its fingerprint states.
    """
    row = seen.attempt
    bare = JobAttempt(row.job, row.attempt, submission=row.submission, ranks=row.ranks, nodes=row.nodes)
    answers = _make_answers(replace(seen, attempt=bare, window=None), shares)
    return replace(answers, fingerprint=structs.replace(answers.fingerprint, period_reason=why))
