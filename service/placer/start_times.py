"""Start times. A background task samples futures of the queue, and estimates use the latest sample.

    sample      view, queue, jobs that wait elsewhere, forecast arrivals → `paths`, in a thread. It runs when a job
                has come, started or ended, and every REFRESH_S of fleet time, for at most a fifth of the time
    estimate    in a thread, on the present paths

One queue holds the placer's requests and the jobs that wait in Slurm's and Kubernetes' queues
according to job events, each once. The rules of those systems are unknown. So all jobs, including held
ones, start by their reported priority, then by submission.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fleetcast.features.past_runs import make_request_shape
from fleetcast.fleet.errors import StaleError
from fleetcast.fleet.event_wait import wait_for_event
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.models.start_record import LOOKS_S, StartRecord, StartShares
from fleetcast.placement.ahead.paths import Timelines, sample_timelines
from fleetcast.placement.ahead.reservation import (
    JobRelease,
    compute_hold_probability,
    describe_claim,
    estimate_job_releases,
    find_free_windows,
)
from fleetcast.placement.ahead.start_time import (
    LEVELS,
    Blocker,
    Quantiles,
    RoomForecast,
    StartEstimate,
    choose_start_basis,
    clip_to_now,
    compute_start_times,
    describe_unknown_jobs,
    estimate_start,
    forecast_room,
    is_behind_unknown,
    list_blockers,
)
from fleetcast.placement.ahead.stops import NO_STOPS
from fleetcast.placement.ledger.ledger import Ledger, LedgerError
from fleetcast.service.answers.placements import AnswersAtAge, FirstAnswers, Queue, QueueRow, StartTimesRecord
from fleetcast.service.board.board import Board
from fleetcast.service.board.kind_tables import find_expected_run_time
from fleetcast.service.placer.arrivals import forecast_arrivals
from fleetcast.service.placer.failures import START_TIMES
from fleetcast.service.placer.queue_rows import StartNotes
from fleetcast.service.placer.resumed_runs import ResumedRuns, read_resumed_runs
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.placer.stops_ahead import make_stops_ahead
from fleetcast.service.placer.view import merge_waiting_jobs

logger = logging.getLogger(__name__)

REFRESH_S = 60.0  # of the fleet
CHECK_INTERVAL_S = 0.5  # wall, the least time between two checks
RETRY_S = 5.0  # wall, after a failure
SHARE = 0.2  # of the time, at most, that sampling may take
MOST_FOLLOWED = 1000  # decisions, at a time
NEWCOMER = "a newcomer, whose needs are stated"
MOST_PLAYED = 20_000  # entries, from the first; who stands behind them is told when he would start right after them


class StartTimeSampler:
    """A background task that samples `paths`, one sampling at a time, until `stop` is called."""

    def __init__(self, service: PlacementService) -> None:
        self.service = service
        self.paths: Timelines | None = None
        self._lock = asyncio.Lock()
        self._stopped, self._changed = asyncio.Event(), asyncio.Event()
        self._took_s = 0.0
        self._at_s = -1e9
        self._at_ms = 0
        self._room: RoomForecast | None = None
        self.record = load_start_record(service.ledger)
        self._seen: tuple[Any, ...] = ()
        self._releases: tuple[JobRelease, ...] = ()
        service.metrics.starts.age_s.set_function(self._compute_age_s)

    def stop(self) -> None:
        self._stopped.set()
        self._changed.set()

    async def run(self) -> None:
        """Sample the paths after each board, after each change of the ledger, and when they are old."""
        self.service.ledger.on_change = self.service.view.on_board = self._changed.set
        while not self._stopped.is_set():
            checked_s, rest_s = time.monotonic(), RETRY_S
            self._changed.clear()
            try:
                self.record_outcomes()
                await self._refresh_paths(self._is_due)
                rest_s = self._compute_rest_s()
            except (StaleError, LedgerError):
                pass
            except Exception as error:  # start times grow old, and requests are placed all the same
                self.service.failures.record(START_TIMES, error)
                self._at_s = time.monotonic()
            await wait_for_event(self._changed, max(rest_s, CHECK_INTERVAL_S))
            await wait_for_event(self._stopped, checked_s + CHECK_INTERVAL_S - time.monotonic())

    def _compute_rest_s(self) -> float:
        """Return the wall seconds until the paths must be sampled again, if nothing changes."""
        clock = self.service.clock
        pause_s = self._at_s + self._took_s / SHARE - time.monotonic()
        if self._make_change_stamp() != self._seen:
            return pause_s
        return max(pause_s, clock.convert_to_wall_s(REFRESH_S - (clock.now_ms() - self._at_ms) / 1000))

    async def refresh(self) -> Timelines:
        """Sample the paths now. Raises StaleError if there is no board, or if the board is stale."""
        return await self._refresh_paths(lambda: True)

    async def _refresh_paths(self, is_due: Callable[[], bool]) -> Timelines:
        """Sample the paths again if `is_due()` says so, and return them. Concurrent callers share one sampling."""
        if self.paths is None or is_due():
            async with self._lock:
                if self.paths is None or is_due():
                    return await self._sample_paths()
        assert self.paths is not None
        return self.paths

    async def _sample_paths(self) -> Timelines:
        began = time.monotonic()
        observed, options = self.service.view.observe_fleet(), self.service.make_options()
        seen = self._make_change_stamp()
        ledger, board = self.service.ledger, self.service.view.board
        own, turns = ledger.list_queue_entries(), self.service.queues.make_turns(observed)
        self.record_outcomes()
        promised = [intent.job for intent in ledger.list_active_intents()]
        tree = self.service.queues.tree
        acts = tree is not None and tree.policy.reclaim.mode == "act"
        stops = make_stops_ahead(self.service, observed) if acts else NO_STOPS

        def sample() -> tuple[Timelines, tuple[JobRelease, ...], StartEstimate]:
            queue = turns.sort_entries(merge_waiting_jobs(board, own, promised))[:MOST_PLAYED]
            resumed = read_resumed_runs(board) if acts and board is not None else ResumedRuns()
            running = resumed.add_earlier_runs(observed.running)
            find_run_times = resumed.wrap_finder(RunTimeLookup(board), observed.run_times)
            coming = forecast_arrivals(board, observed.run_times) if board is not None else None
            paths = sample_timelines(
                queue, observed.view, running, observed.run_times, options, find_run_times, coming, turns, stops
            )
            lowest = min([0, *(entry.request.priority for entry in queue)])
            newcomer = PlacementRequest(request_id=NEWCOMER, gpus_per_node=1, priority=lowest)
            return paths, estimate_job_releases(paths), estimate_start(newcomer, paths)

        paths, self._releases, newcomer = await asyncio.to_thread(sample)
        self.paths = paths
        self._record_claim_shares(paths)
        self._end_finished_waits(paths)
        known = compute_start_times(paths)
        unknown = [name for name in paths.starts_s if name not in known]
        starts = self.service.backlog.starts = self.record.issue_starts(known, options.now_ms, unknown)
        self.service.backlog.start_notes = explain_start_times(paths, starts)
        self._room = forecast_room(paths, starts, newcomer)
        ledger.record_marks(start_times=self.record.dump())
        self.service.metrics.starts.set_record(self.record)
        self._at_s, self._at_ms, self._seen = time.monotonic(), options.now_ms, seen
        self._took_s = self._at_s - began
        return paths

    def _record_claim_shares(self, paths: Timelines) -> None:
        """Record the share of sampled futures in which each request with a claim starts as reserved."""
        planned = self.service.backlog.planned
        if planned is not None:
            holds_p = {claim.request.request_id: compute_hold_probability(claim, paths) for claim in planned.claims}
            self.service.backlog.dropped_claims.record_hold_probabilities(holds_p)

    async def estimate(self, request: PlacementRequest) -> StartEstimate:
        """Estimate when a request would start.

        If there are no paths for the present fleet, they are sampled first. Raises StaleError as `refresh` does.
        """
        generation = self.service.view.observe_fleet().view.generation
        self.service.check_names(request)

        def are_old() -> bool:
            assert self.paths is not None
            return self.paths.view.generation != generation or (self._is_due() and self._are_paths_old(4 * REFRESH_S))

        paths = await self._refresh_paths(are_old)
        now_ms = self.service.clock.now_ms()
        return await asyncio.to_thread(estimate_start, request, paths, now_ms, self._adjust_start_times)

    def find_blockers(self, request: PlacementRequest) -> tuple[Blocker, ...]:
        """Return the jobs that a waiting request waits for, according to the latest sampled futures."""
        if self.paths is None:
            return ()
        now_ms = self.service.clock.now_ms()
        start_ms = self.service.backlog.find_start_ms(request.request_id, now_ms)
        return list_blockers(request, self.paths, now_ms, start_ms, self._adjust_start_times)

    def _adjust_start_times(self, waiting: str | None, start_ms: Quantiles) -> Quantiles:
        """Return the start times that the queue shows for a waiting request.

        For a new request that cannot start now, correct `start_ms` by the record of past start times.
        """
        start = self.service.backlog.starts.get(waiting) if waiting is not None else None
        if start is None and start_ms["p50"] > self.service.clock.now_ms():
            start = self.record.correct_start((start_ms["p10"], start_ms["p50"], start_ms["p90"]), self._at_ms)
        return dict(zip(start_ms, start, strict=True)) if start is not None else start_ms

    def record_outcomes(self) -> None:
        """Record the outcomes of requests for which a start time was issued.

        Raises LedgerError if the ledger cannot be read.
        """
        ledger, record = self.service.ledger, self.record
        while record.cursor < ledger.cursor:
            rows = ledger.read_decisions_after(record.cursor, MOST_FOLLOWED)
            for row in rows:
                if row.outcome == "placed":
                    record.record_start(row.request_id, row.time_ms)
                else:
                    record.record_withdrawal(row.request_id, row.time_ms)
            record.cursor = rows[-1].cursor if rows else ledger.cursor
        record.advance_to(self.service.clock.now_ms())

    def _compute_age_s(self) -> float:
        return 0.0 if self.paths is None else max(0, self.service.clock.now_ms() - self._at_ms) / 1000

    def _end_finished_waits(self, paths: Timelines) -> None:
        """Record the end of the wait of each entry that no longer waits, such as another scheduler's job.

        A job that disappeared without a start has waited at least until the last sampling.
        """
        running = self.service.view.observe_fleet().running
        for name in [one for one in self.record.waiting if one not in paths.starts_s]:
            row = running.row.get(name.removeprefix("\n"), -1)
            if name.startswith("\n") and row >= 0 and running.started_ms[row] >= 0:
                self.record.record_start(name, int(running.started_ms[row]))
            elif not self.service.ledger.is_queued(name):
                self.record.record_withdrawal(name, self._at_ms)

    def make_queue_answer(self, rows: Sequence[QueueRow]) -> Queue:
        """Make the answer to `GET /queue`.

        It has the rows, the reservations of the first requests, the room for backfill, and the GPUs that will
        become free.
        """
        planned, paths = self.service.backlog.planned, self.paths
        view = planned.view if planned else paths.view if paths else None
        claims, now_ms = planned.claims if planned else (), self.service.clock.now_ms()
        reservations = [describe_claim(claim, planned.view, paths) for claim in claims] if planned else []
        return Queue(
            as_of_ms=now_ms,
            rows=rows,
            reservation=reservations[0] if reservations else None,
            reservations=reservations,
            backfill=find_free_windows(view, claims) if view else (),
            releases=[
                replace(row, ends_ms=clip_to_now(now_ms, row.ends_ms)) if row.ends_ms else row for row in self._releases
            ],
            room=self._room,
            record=make_record_answer(self.record),
            starts_as_of_ms=self.service.backlog.start_notes.as_of_ms,
        )

    def _is_due(self) -> bool:
        """Return whether to sample the paths again: a job has changed, or enough fleet time has passed.

        Sampling uses at most SHARE of the time.
        """
        if time.monotonic() - self._at_s < self._took_s / SHARE:
            return False
        return self._are_paths_old(REFRESH_S) or self._make_change_stamp() != self._seen

    def _are_paths_old(self, most_s: float) -> bool:
        return abs(self.service.clock.now_ms() - self._at_ms) >= most_s * 1000

    def _make_change_stamp(self) -> tuple[Any, ...]:
        """Return a value that changes when any job arrives, starts or ends, and when jobs are asked to stop."""
        board = self.service.view.board
        waits = hash(bytes(board.raw("jobs.queued"))) if board is not None and "jobs.queued" in board else 0
        sets = self.service.view.promised_sets.read()
        return self.service.ledger.version, self.service.view.get_running_attempts(), waits, sets


def explain_start_times(paths: Timelines, starts: Mapping[str, tuple[int, int, int]]) -> StartNotes:
    """Explain the start times of one sampling: the basis of each, or why it is unknown.

    starts: request_id → issued start times at LEVELS, in Unix ms.
    """
    by = {
        name: choose_start_basis(dict(zip(LEVELS, times, strict=True)), paths, paths.now_ms)
        for name, times in starts.items()
    }
    missing = [one.request for one in paths.entries if one.request.request_id not in starts]
    behind = [one for one in missing if is_behind_unknown(one, paths.starts_s[one.request_id], paths)]
    unknown = set(paths.unknown_jobs)
    own = {one.request_id: one.job_name if one.job_name in unknown else "" for one in behind}
    return StartNotes(paths.now_ms, by, {name: describe_unknown_jobs(paths, job) for name, job in own.items()})


def make_record_answer(record: StartRecord) -> StartTimesRecord:
    """Convert the record of start times into the API's answer.

    It has the mean over all ages, the first answers, and the answers at each age.
    """
    mean, by_age, since_ms = record.evaluate_answers()
    first = FirstAnswers(**_make_shares_answer(by_age[0]), unanswered=by_age[0].unanswered)
    ages = [
        AnswersAtAge(age_s, **_make_shares_answer(at))
        for age_s, at in zip(LOOKS_S, by_age, strict=True)
        if at.requests[0]
    ]
    return StartTimesRecord(**_make_shares_answer(mean), since_ms=since_ms, first=first, by_age=ages)


def _make_shares_answer(found: StartShares) -> dict[str, Any]:
    """Return the counts and shares under their API names. A share is None if no request counts for it."""
    n, n_p50, n_p90 = found.requests.tolist()
    shares = [
        round(share, 4) if count else None
        for share, count in zip(found.shares.tolist(), (n, n_p50, n_p90), strict=True)
    ]
    return {"n": n, "n_p50": n_p50, "n_p90": n_p90} | dict(zip(("by_p10", "by_p50", "by_p90"), shares, strict=True))


def load_start_record(ledger: Ledger) -> StartRecord:
    """Load the record that is stored in the ledger. Returns a new record if none can be read."""
    record, stored = StartRecord(), ledger.find_mark("start_times")
    record.cursor = ledger.cursor
    if stored is not None:
        try:
            found = StartRecord()
            found.load(stored)
            return found
        except (LookupError, TypeError, ValueError) as error:
            logger.warning("the record of start times cannot be read (%r): it starts empty", error)
    return record


class RunTimeLookup:
    """A callable that returns a request's run-time quantiles in seconds.

    They come from the table of job kinds on a board. It returns None if the table has none for the request.
    """

    def __init__(self, board: Board | None) -> None:
        self._board = board

    def __call__(self, request: PlacementRequest) -> tuple[float, ...] | None:
        found = find_expected_run_time(self._board, make_request_shape(request)) if self._board is not None else None
        return found.run_s if found is not None and np.isfinite(found.run_s).all() else None
