"""The desk: the one place where placements are decided, queued, cancelled and written down. No HTTP here."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from fleet.clock import Clock
from fleet.errors import ConflictError, RequestError, StaleError, UnknownEntity
from fleet.requests import Decision, PlacementRequest, check_request
from placement.engine import decide
from placement.ledger import IntentState, Ledger
from placement.options import Filter, Options, Scorer
from placement.queue import Wait, Waiting, in_order, plan
from placement.start_time import start_times
from service.board import Board, BoardReader
from service.config import Config
from service.placer_metrics import PlacerMetrics
from service.placer_view import Observed, Observer, settled, with_intents
from service.plugins import load

logger = logging.getLogger(__name__)

START_TIMES_EVERY_S = 30.0
NOT_LOOKED_AT = "will be looked at in the next pass"


class Desk:
    """Owns the ledger. Every method runs to its end without an await, so there are no locks."""

    def __init__(self, config: Config, clock: Clock, ledger: Ledger, metrics: PlacerMetrics) -> None:
        self.config = config
        self.clock = clock
        self.ledger = ledger
        self.metrics = metrics
        self.reader = BoardReader(config.board)
        self.filters = load_functions("placer.filters", config.placer.filters)
        self.scorers = load_functions("placer.scorers", config.placer.scorers)
        self._observer = Observer()
        self._observed: tuple[Board, Observed] | None = None
        self._view: tuple[int, Observed] | None = None
        self._waits: dict[str, Wait] = {}
        self._stalled = ""
        self._starts: dict[str, tuple[int, int, int]] = {}
        self._starts_of: tuple[int, str | None] = (-(10**18), None)

    # -- what is known

    @property
    def board(self) -> Board | None:
        return self._observed[0] if self._observed else None

    def refresh(self) -> bool:
        """Take over a new board if there is one; True when there was. Settles the intents it tells about."""
        board = self.reader.latest()
        if board is None or (self._observed and board is self._observed[0]):
            return False
        try:
            observed = self._observer.observe(board)
        except KeyError as error:
            logger.info("the board is not complete yet (%s), waiting for the next one", error)
            return False
        self._observed, self._view = (board, observed), None
        return True

    def observed(self) -> Observed:
        """The newest view, intents included. StaleError when there is no board, or only an old one."""
        self.refresh()
        now_ms = self.clock.now_ms()
        if self._observed is None:
            raise StaleError("warming: the pipeline has not published a board yet")
        board, base = self._observed
        age_s = (now_ms - board.as_of_ms) / 1000
        self.metrics.view_age_s.set(age_s)
        limit_s = self.config.stale_after_s(self.clock)
        if age_s > limit_s:
            raise StaleError(f"the board is {age_s:.0f} s old, at most {limit_s:.0f} s is decided upon")
        if age_s < -limit_s:
            raise StaleError(f"the board is {-age_s:.0f} s ahead of the clock: it is another clock's")
        self.ledger.settle(settled(self.ledger.active_intents(), base, now_ms), now_ms)
        if self._view is None or self._view[0] != self.ledger.version:
            self._view = self.ledger.version, with_intents(base, self.ledger.active_intents())
        return self._view[1]

    def options(self) -> Options:
        return Options(
            max_risk=self.config.placer.max_risk,
            now_ms=self.clock.now_ms(),
            intent_expires_s=self.config.placer.intent_expires_s,
            filters=cast(tuple[tuple[str, Filter], ...], self.filters),
            scorers=cast(tuple[tuple[str, Scorer], ...], self.scorers),
        )

    # -- requests

    def place(self, request: PlacementRequest, caller: str) -> bytes:
        """Decide now and write it down, unless it was decided before; a dry run leaves no trace."""
        check_request(request)
        if not request.dry_run and (before := self.ledger.replay(request)) is not None:
            return before
        observed = self.observed()
        if not request.dry_run and (why := self._taken(request, observed)):
            raise ConflictError(why)
        began = time.perf_counter()
        decision = decide(request, observed.view, self.options())
        self.metrics.decide_s.observe(time.perf_counter() - began)
        if request.dry_run:
            return msgspec.json.encode(decision)
        self.metrics.decisions.labels(decision.outcome, "placements").inc()
        action = "place" if decision.outcome == "placed" else "refuse"
        return self.ledger.commit(request, decision, self.clock.now_ms(), caller, action)

    def enqueue(self, request: PlacementRequest, caller: str) -> bytes:
        """Write the request into the queue, unless it is there or was decided before."""
        check_request(request)
        if request.dry_run:
            raise RequestError("a dry run cannot wait: send it to /placements", "dry_run")
        if (before := self.ledger.replay(request)) is not None:
            return before
        key = (request.job_name, request.attempt)
        if any((entry.request.job_name, entry.request.attempt) == key for entry in self.ledger.queued()):
            raise ConflictError(f"attempt {request.attempt} of {request.job_name} waits already")
        if self._observed and (why := self._taken(request, self._observed[1])):
            raise ConflictError(why)
        now_ms = self.clock.now_ms()
        before_it = sum(entry.request.priority >= request.priority for entry in self.ledger.queued())
        others = "nobody is" if not before_it else "1 request is" if before_it == 1 else f"{before_it:,} requests are"
        decision = self._note(request, "queued", f"queued: {others} before it", now_ms)
        self.metrics.decisions.labels("queued", "queue").inc()
        return self.ledger.enqueue(request, decision, now_ms, caller)

    def _taken(self, request: PlacementRequest, observed: Observed) -> str:
        """Why this attempt cannot be placed (again); empty when it can.

        An intent is settled by the events of its attempt. One for an attempt that runs, has ended or is promised GPUs
        already would be settled by events that are not its own, and its GPUs would be handed out twice.
        """
        key = (request.job_name, request.attempt)
        name = f"attempt {request.attempt} of {request.job_name}"
        if key in observed.ended:
            return f"{name} has ended already: name the next attempt"
        if key in observed.seen:
            return f"{name} runs already: name the next attempt"
        holder = next((row for row in self.ledger.active_intents() if (row.job, row.attempt) == key), None)
        return f"{name} was promised GPUs already, as request {holder.request_id}: cancel that first" if holder else ""

    def withdraw(self, request_id: str, caller: str) -> dict[str, str]:
        """Take a request out of the queue; its stored decision becomes a refusal that says so."""
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
            entry.request, self._note(entry.request, "refused", sentence, now_ms), now_ms, caller, "withdraw"
        )
        self._waits.pop(request_id, None)
        return {"request_id": request_id, "state": "withdrawn", "sentence": "withdrawn from the queue"}

    def cancel(self, request_id: str, caller: str) -> dict[str, str]:
        """Give the GPUs of a placement back that nobody has started yet."""
        state = self.ledger.intent_state(request_id)
        if state is IntentState.ACTIVE:
            self.ledger.settle([(request_id, IntentState.CANCELLED)], self.clock.now_ms(), caller)
        elif state is None:
            if self.ledger.is_queued(request_id):
                raise ConflictError(f"{request_id!r} still waits: withdraw it with DELETE /queue/{request_id}")
            if self.ledger.find(request_id) is None:
                raise UnknownEntity(f"no placement {request_id!r}")
            raise ConflictError(f"{request_id!r} was refused: there is nothing to cancel")
        elif state is not IntentState.CANCELLED:
            words = {IntentState.SEEN: "runs already: end the job", IntentState.ENDED: "has ended"}
            raise ConflictError(f"{request_id!r} {words.get(state, 'has expired: its GPUs are free again')}")
        return {"request_id": request_id, "state": "cancelled", "sentence": "cancelled, its GPUs are free again"}

    def _note(self, request: PlacementRequest, outcome: str, sentence: str, now_ms: int) -> Decision:
        """A decision that looked at no node."""
        return Decision(
            request_id=request.request_id,
            decision_id=f"d-{request.request_id}-{now_ms}",
            outcome=outcome,  # type: ignore[arg-type]
            sentence=sentence,
            board_as_of_ms=self.board.as_of_ms if self.board else 0,
        )

    # -- the queue

    def work_queue(self) -> int:
        """One pass over the queue; returns how many were placed. StaleError as `observed`."""
        queue = [Waiting(entry.request, entry.queued_ms) for entry in self.ledger.queued()]
        self.metrics.queue_length.set(len(queue))
        if not queue:
            self._waits = {}
            return 0
        try:
            observed, options = self.observed(), self.options()
        except StaleError as error:
            self._stalled = f"nothing is decided now: {error}"
            raise
        self._stalled = ""
        queue = self._still_wanted(queue, observed)
        with self.metrics.cycle_s.time():
            result = plan(queue, observed.view, observed.running, observed.run_times, options)
        with self.ledger.transaction():
            for entry, decision in result.placed:
                self.ledger.commit(entry.request, decision, options.now_ms, "queue", "place")
                self.metrics.decisions.labels("placed", "queue").inc()
        self._waits = {wait.entry.request.request_id: wait for wait in result.waiting}
        self._estimate(observed, [wait.entry for wait in result.waiting], options, changed=bool(result.placed))
        self.metrics.queue_length.set(len(result.waiting))
        return len(result.placed)

    def _still_wanted(self, queue: Sequence[Waiting], observed: Observed) -> list[Waiting]:
        """The queue without attempts that somebody else has started meanwhile: those are refused, with the reason."""
        wanted: list[Waiting] = []
        for entry in queue:
            why = self._taken(entry.request, observed)
            if why:
                now_ms = self.clock.now_ms()
                decision = self._note(entry.request, "refused", f"refused: {why}", now_ms)
                self.ledger.commit(entry.request, decision, now_ms, "queue", "refuse")
                self.metrics.decisions.labels("refused", "queue").inc()
            else:
                wanted.append(entry)
        return wanted

    def _estimate(self, observed: Observed, waiting: Sequence[Waiting], options: Options, *, changed: bool) -> None:
        """Start times of the first entries: dearer than a pass, so only now and then."""
        now_ms = options.now_ms
        head = in_order(waiting)[0].request.request_id if waiting else None
        when, of = self._starts_of
        if now_ms - when < START_TIMES_EVERY_S * 1000 and head == of:
            return
        if changed:
            observed = self.observed()
        self._starts_of = now_ms, head
        self._starts = start_times(waiting, observed.view, observed.running, observed.run_times, options)

    def queue_rows(self) -> list[dict[str, Any]]:
        """The rows of `GET /queue`, in order."""
        now_ms = self.clock.now_ms()
        order = in_order([Waiting(entry.request, entry.queued_ms) for entry in self.ledger.queued()])
        return [self._queue_row(position, entry, now_ms) for position, entry in enumerate(order, 1)]

    def _queue_row(self, position: int, entry: Waiting, now_ms: int) -> dict[str, Any]:
        request = entry.request
        wait = self._waits.get(request.request_id)
        start = self._starts.get(request.request_id)
        return {
            "request_id": request.request_id,
            "position": position,
            "tenant": request.tenant,
            "queue": request.queue,
            "user": request.user,
            "gang": request.members,
            "gpus_per_node": request.gpus_per_node,
            "priority": request.priority,
            "waiting_s": max(0.0, (now_ms - entry.queued_ms) / 1000),
            "why": self._stalled or (wait.why if wait else NOT_LOOKED_AT),
            "start_ms": dict(zip(("p10", "p50", "p90"), start, strict=True)) if start else None,
            "job": request.job_name,
        }


def load_functions(key: str, paths: Sequence[str]) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """(name, function) of import paths `package.module:function`; ConfigError when one is not there."""
    return tuple((path.partition(":")[2], load(key, path)) for path in paths)
