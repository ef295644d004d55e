"""PlacementService: decides, queues and cancels placements, and writes them to the ledger.

It contains no HTTP.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from fleetcast.fleet.clock import Clock, ClockWatch
from fleetcast.fleet.errors import ConflictError, RequestError, StaleError, UnknownEntity
from fleetcast.fleet.requests import (
    HONOURED_BY_QUEUES,
    Decision,
    PlacementRequest,
    check_avoided,
    check_request,
    list_ignored_facts,
)
from fleetcast.placement.ahead.start_time import LEVELS
from fleetcast.placement.engine import decide, is_still_valid
from fleetcast.placement.ledger.ledger import Intent, IntentState, Ledger, QueueEntry
from fleetcast.placement.machines.options import Filter, Options, Scorer
from fleetcast.placement.plan.charged import make_placement_charge
from fleetcast.placement.plan.claims import Claims
from fleetcast.placement.plan.queue import ONE_LINE, Plan, Wait, Waiting
from fleetcast.placement.plan.timeline import place
from fleetcast.placement.plan.turns import QueueTurns
from fleetcast.service.answers.placements import QueueRow, Settled
from fleetcast.service.board.age import describe_staleness
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.board.expiry import Expiry
from fleetcast.service.config import Config
from fleetcast.service.placer.charged_clock import STEP_MS
from fleetcast.service.placer.charging import find_charged_leaf
from fleetcast.service.placer.failures import PASS, Failures
from fleetcast.service.placer.known_names import check_known_names
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.own_numbers import DECISIONS, LINES, OwnNumbers
from fleetcast.service.placer.queue_pass import QueuePass
from fleetcast.service.placer.queue_rows import NOT_LOOKED_AT, StartNotes, make_queue_row
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.recent_demand import RecentDemand
from fleetcast.service.placer.state_watch import StateWatch
from fleetcast.service.placer.view import Observed, ViewDecoder, merge_waiting_jobs, settled, with_intents
from fleetcast.service.plugins import load_functions

logger = logging.getLogger(__name__)

StartTimes = Mapping[str, tuple[int, int, int]]  # request_id → start_ms at p10, p50, p90
WAITING = {"submitted", "queued"}  # events of an attempt that holds nothing yet


class PlacementService:
    """The service that decides about placements. It owns the ledger.

    Code that reads or writes the ledger runs to its end without an await, so there are no locks.
    """

    def __init__(self, config: Config, clock: Clock, ledger: Ledger, metrics: PlacerMetrics) -> None:
        self.config = config
        self.clock = clock
        self.ledger = ledger
        self.metrics = metrics
        self.reader = BoardReader(config.board)
        self.failures = failures = Failures(metrics.failures)
        self.filters = tuple(
            (name, failures.guard_filter(name, function))
            for name, function in load_functions("placer.filters", config.placer.filters)
        )
        self.scorers = tuple(
            (name, failures.guard_scorer(name, function))
            for name, function in load_functions("placer.scorers", config.placer.scorers)
        )
        self.demand = RecentDemand(ledger)
        self.own_decisions, self.own_lines = OwnNumbers(ledger, DECISIONS), OwnNumbers(ledger, LINES)
        self._watch = ClockWatch(clock, STEP_MS)
        self._postponed_ms: Counter[str] = Counter()  # request_id -> by how much the clock was set since its promise
        self._inherited = frozenset(
            row.request_id for row in ledger.list_active_intents()
        )  # made by an earlier process
        self._expiry = Expiry(config)
        self.watch = StateWatch(config, clock, ledger)
        metrics.state_doubts.set_function(lambda: len(self.watch.doubts))
        metrics.audit_position.set_function(lambda: ledger.head.audit_id)
        self._observer = ViewDecoder(config.placer)
        self._observed: tuple[Board, Observed] | None = None
        self._observing = False  # a thread is decoding a board
        self._view: _View | None = None
        self.turns: QueueTurns = ONE_LINE
        self.waits: dict[str, Wait] = {}
        self.stalled = ""
        self.queues = ServedQueues(config.placer.queues, ledger, clock, config.pipeline.tick_s)
        metrics.queues_refused.set_function(lambda: bool(self.queues.file.refused))
        self.claims = Claims()
        self.planned: Plan | None = None  # the last pass, while something waits
        self.starts: StartTimes = {}  # of what waits, as of the last refresh of the sampler
        self.start_notes = StartNotes()

    # -- what is known

    @property
    def board(self) -> Board | None:
        return self._observed[0] if self._observed else None

    def runs(self) -> frozenset[tuple[str, int]]:
        """Return the attempts that run, according to the newest board."""
        return self._observed[1].seen if self._observed else frozenset()

    def refresh(self) -> bool:
        """Load the newest board, if there is a new one. Returns whether there was."""
        board = self._find_new_board()
        self.watch.check(self.board if board is None else board)
        return board is not None and self._adopt_board(board, self._observer.attempt(board))

    async def refresh_in_thread(self) -> bool:
        """Refresh, with the board decoded and a changed file of queues read in a thread. Return whether one is new."""
        has_new_queues = await self.queues.read_in_thread(self._observed[1] if self._observed else None)
        board = self._find_new_board()
        self.watch.check(self.board if board is None else board)
        if board is None:
            return has_new_queues
        self._observing = True
        try:
            return self._adopt_board(board, await asyncio.to_thread(self._observer.attempt, board)) or has_new_queues
        finally:
            self._observing = False

    def _find_new_board(self) -> Board | None:
        if self._observing:
            return None
        board = self.reader.latest()
        return None if self._observed and board is self._observed[0] else board

    def _adopt_board(self, board: Board, observed: Observed | None) -> bool:
        if observed is None:
            return False
        self._observed, self._view = (board, observed), None
        return True

    def observed(self) -> Observed:
        """Return the newest view, intents included.

        Raises StaleError if there is no board, or only an old one.
        """
        self.refresh()
        now_ms = self.clock.now_ms()
        if self._observed is None:
            raise StaleError("warming: the pipeline has not published a board yet")
        board, base = self._observed
        age_s = (now_ms - board.as_of_ms) / 1000
        self.metrics.view_age_s.set(age_s)
        if why := describe_staleness(age_s, self.config.stale_after_s(self.clock)) or base.unknown:
            raise StaleError(why)
        promises = self._promises()
        if not self.watch.doubts:
            expired = self._expiry.expired(promises, board, now_ms)
            self.ledger.finish_intents(settled(promises, base, expired), now_ms)
            self.metrics.set_paused_promises(self._expiry.paused)
            self.queues.follow(board, base)
        if self._view is None or self._view.version != self.ledger.version:
            self._view = self._add_promises(base)
        return self._view.observed

    def _observe_for_decision(self) -> Observed:
        """Return the newest view. Raises StaleError also while part of the state is in doubt."""
        self.refresh()
        self.watch.refuse()
        return self.observed()

    def _promises(self) -> list[Intent]:
        """Return the active intents. After the clock was set, each still lasts for the rest of its time.

        An intent that an earlier process made lasts at least until its recorded expiry. That process may have
        seen the clock set forward, and this one only sees it set back.
        """
        active = self.ledger.list_active_intents()
        by_ms = self._watch.pop_clock_step_ms()
        if by_ms:
            logger.warning("the clock was set by %+.0f s: promises last as long as before", by_ms / 1000)
            self._expiry.listening.disregard_earlier_statement()
            self._postponed_ms.update({row.request_id: by_ms for row in active})  # adds to what is there
        if not self._postponed_ms:
            return active
        now = [replace(row, expires_ms=row.expires_ms + self._find_postponement_ms(row.request_id)) for row in active]
        self._postponed_ms = Counter({row.request_id: self._postponed_ms[row.request_id] for row in active})
        return now

    def _find_postponement_ms(self, request_id: str) -> int:
        by_ms = self._postponed_ms[request_id]
        return max(0, by_ms) if request_id in self._inherited else by_ms

    def _add_promises(self, base: Observed) -> "_View":
        """Return the view of the ledger as it is now.

        If promises were only added since the last view, they are added to that one.
        """
        active = {intent.request_id: intent for intent in self.ledger.list_active_intents()}
        last = self._view
        if last is None or not last.promised <= active.keys():
            last = _View(0, frozenset(), base)
        added = [intent for request_id, intent in active.items() if request_id not in last.promised]
        return _View(self.ledger.version, frozenset(active), with_intents(last.observed, added))

    def options(self) -> Options:
        return Options(
            max_risk=self.config.placer.max_risk,
            now_ms=self.clock.now_ms(),
            intent_expires_s=self.config.placer.intent_expires_s,
            demand=self.demand.known(self._observed[1].view.inventory.gpu_models) if self._observed else None,
            clusters=self.config.fleet.clusters,
            filters=cast(tuple[tuple[str, Filter], ...], self.filters),
            scorers=cast(tuple[tuple[str, Scorer], ...], self.scorers),
        )

    # -- requests

    def place(self, request: PlacementRequest, caller: str) -> bytes:
        """Decide now and store the decision. A request that was decided before gets its stored reply.

        A dry run stores nothing.
        """
        check_request(request, bool(self.queues.tree))
        check_avoided(request)
        self.refresh()
        self.watch.refuse()
        if not request.dry_run and (before := self.ledger.find_stored_reply(request)) is not None:
            return before
        self.check_names(request)
        observed = self.observed()
        if not request.dry_run and (why := self._taken(request, observed, self._find_promised_attempts())):
            raise ConflictError(why)
        leaf, allowed = self.queues.leaf(request), self.queues.turns(observed).allow(request)
        began = time.perf_counter()
        if isinstance(allowed, str):
            decision = self._record(request, "refused", f"refused: {allowed}", self.clock.now_ms())
        else:
            decision = decide(allowed, observed.view, self.options())
            decision = self._completed(request, decision)
        self.metrics.decide_s.observe(time.perf_counter() - began)
        if request.dry_run:
            return msgspec.json.encode(decision)
        self.metrics.decisions.labels(decision.outcome, "placements").inc()
        action, now_ms = "place" if decision.outcome == "placed" else "refuse", self.clock.now_ms()
        charge = make_placement_charge(request, decision, leaf, observed.view, observed.run_times, now_ms)
        return self.ledger.commit(request, decision, now_ms, caller, action, charge)

    def enqueue(self, request: PlacementRequest, caller: str) -> bytes:
        """Store the request in the queue. A queued or decided request gets its stored reply."""
        check_request(request, bool(self.queues.tree))
        check_avoided(request)
        if request.dry_run:
            raise RequestError("a dry run cannot wait: send it to /placements", "dry_run")
        self.watch.refuse()
        if (before := self.ledger.find_stored_reply(request)) is not None:
            return before
        self.check_names(request)
        key = (request.job_name, request.attempt)
        if any((entry.request.job_name, entry.request.attempt) == key for entry in self.ledger.queued()):
            raise ConflictError(f"attempt {request.attempt} of {request.job_name} waits already")
        if self._observed and (why := self._taken(request, self._observed[1], self._find_promised_attempts())):
            raise ConflictError(why)
        self.queues.leaf(request)
        now_ms = self.clock.now_ms()
        before_it = sum(entry.request.priority >= request.priority for entry in self.ledger.queued())
        others = "nobody is" if not before_it else "1 request is" if before_it == 1 else f"{before_it:,} requests are"
        decision = self._record(request, "queued", f"queued: {others} before it", now_ms)
        self.metrics.decisions.labels("queued", "queue").inc()
        return self.ledger.enqueue(request, decision, now_ms, caller)

    def check_names(self, request: PlacementRequest) -> None:
        """Raise RequestError if the request names things that this installation does not have."""
        view = self._observed[1].view if self._observed else None
        check_known_names(request, self.config.fleet, view, self.queues.tree)

    def _find_promised_attempts(self) -> dict[tuple[str, int], str]:
        """Return (job, attempt) → the request by which it was promised GPUs."""
        return {(row.job, row.attempt): row.request_id for row in self.ledger.list_active_intents()}

    def _taken(self, request: PlacementRequest, observed: Observed, promised: Mapping[tuple[str, int], str]) -> str:
        """Return why this attempt cannot be placed (again), or "".

        The attempt's own events would end the new intent and free its GPUs.
        """
        key = (request.job_name, request.attempt)
        name = f"attempt {request.attempt} of {request.job_name}"
        if key in observed.ended:
            return f"{name} has ended already: name the next attempt"
        if key in observed.seen:
            return f"{name} runs already: name the next attempt"
        holder = promised.get(key)
        return f"{name} was promised GPUs already, as request {holder}: cancel that first" if holder else ""

    def withdraw(self, request_id: str, caller: str) -> Settled:
        """Remove a request from the queue. Its stored decision becomes a refusal that says so."""
        self.watch.refuse()
        entry = next((row for row in self.ledger.queued() if row.request.request_id == request_id), None)
        now_ms = self.clock.now_ms()
        if entry is None:
            reply = self.ledger.find(request_id)
            if reply is None:
                raise UnknownEntity(f"no request {request_id!r} is in the queue")
            outcome = msgspec.json.decode(reply, type=Decision).outcome
            raise ConflictError(f"{request_id!r} does not wait any more: it was {outcome}")
        sentence = "refused: withdrawn from the queue"
        self.ledger.commit(
            entry.request, self._record(entry.request, "refused", sentence, now_ms), now_ms, caller, "withdraw"
        )
        self.waits.pop(request_id, None)
        return Settled(request_id, "withdrawn", "withdrawn from the queue")

    def cancel(self, request_id: str, caller: str) -> Settled:
        """Release the GPUs of a placement whose job has not started yet."""
        self.watch.refuse()
        state = self.ledger.read_intent_state(request_id)
        if state is IntentState.ACTIVE:
            self._refuse_if_started(request_id)
            self.ledger.finish_intents([(request_id, IntentState.CANCELLED)], self.clock.now_ms(), caller)
        elif state is None:
            if self.ledger.is_queued(request_id):
                raise ConflictError(f"{request_id!r} still waits: withdraw it with DELETE /queue/{request_id}")
            if self.ledger.find(request_id) is None:
                raise UnknownEntity(f"no placement {request_id!r}")
            raise ConflictError(f"{request_id!r} was refused: there is nothing to cancel")
        elif state is not IntentState.CANCELLED:
            words = {IntentState.SEEN: "runs already: end the job", IntentState.ENDED: "has ended"}
            raise ConflictError(f"{request_id!r} {words.get(state, 'has expired: its GPUs are free again')}")
        return Settled(request_id, "cancelled", "cancelled, its GPUs are free again")

    def _refuse_if_started(self, request_id: str) -> None:
        """Raise ConflictError if the job's start was acknowledged, even if no board shows it yet.

        Its GPUs are in use then.
        """
        intent = next(row for row in self.ledger.list_active_intents() if row.request_id == request_id)
        if not self._expiry.acknowledged(intent, self.board) <= WAITING:
            raise ConflictError(f"{request_id!r} runs already: end the job")

    def _record(self, request: PlacementRequest, outcome: str, sentence: str, now_ms: int) -> Decision:
        """Build a decision for which no node was considered."""
        return Decision(
            request_id=request.request_id,
            decision_id=f"d-{request.request_id}-{now_ms}",
            outcome=outcome,  # type: ignore[arg-type]
            sentence=sentence + self.queues.describe_charged_queue(request),
            board_as_of_ms=self.board.as_of_ms if self.board else 0,
            ignored=self.ignored(request),
        )

    def _completed(self, request: PlacementRequest, decision: Decision) -> Decision:
        """Add to a decision of the engine the facts that only the service knows."""
        sentence = decision.sentence + self.queues.describe_charged_queue(request)
        return msgspec.structs.replace(decision, ignored=self.ignored(request), sentence=sentence)

    def ignored(self, request: PlacementRequest) -> tuple[str, ...]:
        """Return the facts of a request that have no effect here."""
        return list_ignored_facts(request, HONOURED_BY_QUEUES if self.queues.tree else ())

    # -- the queue

    def work_queue(self) -> int:
        """Make one whole pass over the queue. Returns how many requests were placed.

        Raises StaleError as `observed` does.
        """
        begun = self.begin_pass()
        return self.end_pass(begun, begun.think())[0] if begun else 0

    def begin_pass(self) -> QueuePass | None:
        """Return the input of the next pass, or None if no request waits.

        Raises StaleError as `observed` does, and while part of the state is in doubt.
        """
        queue = self.ledger.queued()
        self.metrics.queue_length.set(len(queue))
        if not queue:
            self.waits, self.planned, self.stalled = {}, None, ""
            with suppress(StaleError):
                self.observed()  # charges and the file of queues go on
            return None
        try:
            observed, options = self._observe_for_decision(), self.options()
        except StaleError as error:
            self.stalled = f"nothing is decided now: {error}"
            raise
        self.stalled = ""
        wanted, stranded = self._choose_entries_to_plan(queue, observed)
        dropped = self.claims.dropped(entry.request.request_id for entry in wanted)
        return QueuePass(wanted, observed, options, self.queues.turns(observed), dropped, stranded)

    def record_failed_pass(self, error: Exception) -> None:
        """Record that a pass failed.

        If no pass has succeeded with the present queue tree, the previous tree serves again.
        """
        why = self.failures.record(PASS, error)
        self.stalled = f"nothing is placed from the queue now: the {why}"
        self.queues.withdraw_tree(why)

    def end_pass(self, begun: QueuePass, planned: Plan) -> tuple[int, int]:
        """Store the plan. Returns (placed, number of requests to plan again).

        Requests that were decided meanwhile may have taken GPUs of the plan.
        """
        observed = self._observe_for_decision()
        self.turns = begun.turns
        unchanged = observed is begun.observed
        view, promised, turns = observed.view, self._find_promised_attempts(), self.queues.turns(observed)
        placed = lost = 0
        waits = {
            wait.entry.request.request_id: wait for wait in (*planned.waiting, *begun.make_stranded_waits(planned))
        }
        with self.ledger.transaction():
            for entry, decision in planned.placed:
                request = entry.request
                if not self.ledger.is_queued(request.request_id):
                    continue
                if not unchanged and (
                    self._taken(request, observed, promised)
                    or not is_still_valid(request, decision, view, begun.options)
                    or isinstance(turns.allow(request), str)
                ):
                    lost += 1
                    continue
                now_ms, leaf = self.clock.now_ms(), find_charged_leaf(request, self.queues.tree)
                times = observed.run_times
                queued_ms = self.queues.time.queued_ms(request.request_id, entry.queued_ms)
                decision = self._completed(request, decision)
                charge = make_placement_charge(request, decision, leaf, view, times, now_ms, queued_ms)
                self.ledger.commit(request, decision, now_ms, "queue", "place", charge)
                turns.take(request, decision)
                self.metrics.decisions.labels("placed", "queue").inc()
                view = view if unchanged else place(view, request, decision.ranks)
                placed += 1
            self.ledger.remember(over_quota=sorted(name for name, wait in waits.items() if wait.reason.is_over_quota))
        self.waits = waits
        self.queues.file.confirm()
        self.planned = planned
        self.metrics.queue_length.set(len(self.ledger.queued()))
        return placed, lost

    def _choose_entries_to_plan(
        self, queue: Sequence[QueueEntry], observed: Observed
    ) -> tuple[list[QueueEntry], list[tuple[QueueEntry, str]]]:
        """Return the entries to plan, and the entries whose queue the file no longer names, with the reason.

        Attempts that started elsewhere meanwhile are refused with the reason.
        """
        wanted: list[QueueEntry] = []
        stranded: list[tuple[QueueEntry, str]] = []
        promised = self._find_promised_attempts()
        taken = observed.seen | observed.ended | promised.keys()
        for entry in queue:
            is_taken = (entry.request.job_name, entry.request.attempt) in taken
            why = self._taken(entry.request, observed, promised) if is_taken else ""
            if why:
                now_ms = self.clock.now_ms()
                decision = self._record(entry.request, "refused", f"refused: {why}", now_ms)
                self.ledger.commit(entry.request, decision, now_ms, "queue", "refuse")
                self.metrics.decisions.labels("refused", "queue").inc()
            elif gone := self.queues.gone(entry.request):
                stranded.append((entry, gone))
            else:
                wanted.append(entry)
        return wanted, stranded

    async def queue_rows(self) -> list[QueueRow]:
        """Return the rows of `GET /queue`, in order.

        They are made in a thread, from the entries that wait now.
        """
        return await asyncio.to_thread(self._make_explained_rows, self.ledger.queued(), self.clock.now_ms())

    def _make_explained_rows(self, entries: Sequence[QueueEntry], now_ms: int) -> list[QueueRow]:
        return [
            self._make_explained_row(position, entry, now_ms)
            for position, entry in enumerate(self.in_order(entries), 1)
        ]

    def in_order(self, entries: Sequence[QueueEntry]) -> list[Waiting]:
        """Return the entries in the order of the last pass."""
        return self.turns.in_order([Waiting(entry.request, entry.queued_ms) for entry in entries])

    def list_waiting_jobs(self) -> list[Waiting]:
        """Return all that waits, each once: requests of our own queue, and jobs that wait according to events."""
        return merge_waiting_jobs(
            self.board, self.ledger.queued(), [intent.job for intent in self.ledger.list_active_intents()]
        )

    def start_ms(self, request_id: str, now_ms: int) -> dict[str, int] | None:
        start = self.starts.get(request_id)
        return {name: max(now_ms, ms) for name, ms in zip(LEVELS, start, strict=True)} if start else None

    def _make_explained_row(self, position: int, entry: Waiting, now_ms: int) -> QueueRow:
        request_id = entry.request.request_id
        wait, start_ms = self.waits.get(request_id), self.start_ms(request_id, now_ms)
        start = self.start_notes.sentence(request_id, start_ms, now_ms)
        why = wait.why + (f"; {start}" if start else "") if wait else NOT_LOOKED_AT
        by, ignored = self.start_notes.by.get(request_id), self.ignored(entry.request)
        return make_queue_row(position, entry, self.stalled or why, start_ms, ignored, now_ms, by)


@dataclass(frozen=True, slots=True)
class _View:
    """The view with the promises of one version of the ledger. `promised`: the requests in it."""

    version: int
    promised: frozenset[str]
    observed: Observed
