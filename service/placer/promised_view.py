"""The newest view of the cluster, including promised GPUs. The placer decides on this view."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fleetcast.fleet.clock import Clock, ClockWatch
from fleetcast.fleet.errors import ConflictError, StaleError
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ledger.ledger import Intent, Ledger
from fleetcast.placement.queues.tree import QueueTree
from fleetcast.service.board.age import describe_staleness
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.board.expiry import IntentExpiry
from fleetcast.service.config import Config
from fleetcast.service.placer.charged_clock import STEP_MS
from fleetcast.service.placer.growth_holds import list_growths, release_growths
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.promised_sets import PromisedSets
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.running_jobs import PlacedRequests, find_charged_leaf
from fleetcast.service.placer.state_watch import StateWatch
from fleetcast.service.placer.view import ObservedFleet, ViewDecoder, add_intents, find_finished_intents

logger = logging.getLogger(__name__)

WAITING = {"submitted", "queued"}  # events of an attempt that holds nothing yet


class PromisedView:
    """The newest board, on which promised GPUs count as taken.

    It ends a promise when its job has started or its time is over. It calls `on_board` for each new board, and
    `follow_actions` before it adds the GPUs that actions have freed.
    """

    def __init__(
        self, config: Config, clock: Clock, ledger: Ledger, queues: ServedQueues, metrics: PlacerMetrics
    ) -> None:
        self.config = config
        self.clock = clock
        self.ledger = ledger
        self.queues = queues
        self.metrics = metrics
        self.reader = BoardReader(config.board)
        self.watch = StateWatch(config, clock, ledger)
        metrics.state_doubts.set_function(lambda: len(self.watch.doubts))
        self._clock_watch = ClockWatch(clock, STEP_MS)
        self._postponed_ms: Counter[str] = Counter()  # request_id -> by how much the clock was set since its promise
        self._inherited = frozenset(row.request_id for row in ledger.list_active_intents())  # of an earlier process
        self._expiry = IntentExpiry(config)
        self._decoder = ViewDecoder(config.placer)
        self._observed: tuple[Board, ObservedFleet] | None = None
        self._observing = False  # a thread is decoding a board
        self._view: _View | None = None
        self._requests = PlacedRequests(ledger)
        self._completed: _CompletedFleet | None = None
        self._held: _HeldFleet | None = None
        self.promised_sets = PromisedSets(ledger, clock, lambda request: find_charged_leaf(request, queues.tree))
        self.on_board: Callable[[], None] = lambda: None
        self.follow_actions: Callable[[ObservedFleet, int], None] = lambda base, now_ms: None

    @property
    def board(self) -> Board | None:
        return self._observed[0] if self._observed else None

    @property
    def view_without_promises(self) -> ObservedFleet | None:
        """The newest view without promises, even if it is stale. None before the first board."""
        return self._observed[1] if self._observed else None

    def get_running_attempts(self) -> frozenset[tuple[str, int]]:
        """Return the attempts that run according to the newest board."""
        return self._observed[1].seen if self._observed else frozenset()

    def refresh(self) -> bool:
        """Load the newest board if it is new. Returns whether a board was loaded."""
        board = self._find_new_board()
        self.watch.check_if_due(self.board if board is None else board)
        return board is not None and self._adopt_board(board, self._decoder.try_decode_board(board))

    async def refresh_in_thread(self) -> bool:
        """Load a new board and a changed queue file in a thread. Returns whether there was either."""
        has_new_queues = await self.queues.read_in_thread(self.view_without_promises)
        board = self._find_new_board()
        self.watch.check_if_due(self.board if board is None else board)
        if board is None:
            return has_new_queues
        self._observing = True
        try:
            return (
                self._adopt_board(board, await asyncio.to_thread(self._decoder.try_decode_board, board))
                or has_new_queues
            )
        finally:
            self._observing = False

    def _find_new_board(self) -> Board | None:
        if self._observing:
            return None
        board = self.reader.latest()
        return None if self._observed and board is self._observed[0] else board

    def _adopt_board(self, board: Board, observed: ObservedFleet | None) -> bool:
        if observed is None:
            return False
        self._observed, self._view = (board, observed), None
        self.on_board()
        return True

    def observe_fleet(self) -> ObservedFleet:
        """Return the newest view, including promises.

        Raises StaleError if there is no board, or if the board is stale.
        """
        self.refresh()
        now_ms = self.clock.now_ms()
        if self._observed is None:
            raise StaleError("warming: the pipeline has not published a board yet")
        board, base = self._observed
        age_s = (now_ms - board.as_of_ms) / 1000
        self.metrics.view_age_s.set(age_s)
        if why := describe_staleness(age_s, self.config.compute_stale_after_s(self.clock)) or base.unknown:
            raise StaleError(why)
        promises = self.list_promises()
        if not self.watch.doubts:
            expired = self._expiry.find_expired(promises, board, now_ms)
            self.ledger.finish_intents(find_finished_intents(promises, base, expired), now_ms)
            self.metrics.set_paused_promises(self._expiry.paused)
            self.queues.apply_board(board, base)
        base = self._complete_jobs(base)
        if not self.watch.doubts:
            self.follow_actions(base, now_ms)
            self.promised_sets.update(base.view, now_ms)
        if self._view is None or self._view.version != self.ledger.version:
            self._view = self._add_promises(base)
            self._held = None
        sources = self.ledger.actions.version, self.promised_sets.read()
        if self._held is None or self._held.sources != sources or self._held.until_ms <= now_ms:
            held = self.promised_sets.add_holds(self._view.observed, now_ms)
            until_ms = self.promised_sets.find_next_end_ms(now_ms)
            self._held = _HeldFleet(sources, until_ms, held, release_growths(held, list_growths(self.ledger)))
        return self._held.observed

    def observe_for_decision(self) -> ObservedFleet:
        """Return the newest view. Raises StaleError if it is stale, or while the parts of the state disagree."""
        self.refresh()
        self.watch.raise_if_in_doubt()
        return self.observe_fleet()

    def observe_for_pass(self) -> ObservedFleet:
        """Return the newest view for a decision, in which GPUs are free whose growth may be withdrawn for a request.

        Raises StaleError if it is stale, or while the parts of the state disagree.
        """
        self.observe_for_decision()
        assert self._held is not None
        return self._held.for_pass

    def list_promises(self) -> list[Intent]:
        """Return the active intents. If the clock was set, their expiry moves with it.

        When the clock is set back, the intents of an earlier process keep their expiry. That process may have
        seen the clock set ahead before.
        """
        active = self.ledger.list_active_intents()
        by_ms = self._clock_watch.pop_clock_step_ms()
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

    def _complete_jobs(self, base: ObservedFleet) -> ObservedFleet:
        """Return the fleet of a board with its running jobs completed by the ledger and the queue tree."""
        tree, last = self.queues.tree, self._completed
        if last is None or last.base is not base or last.tree is not tree:
            jobs = self._requests.complete_jobs(base.jobs, tree)
            last = self._completed = _CompletedFleet(base, tree, replace(base, jobs=jobs))
            self._view = None
        return last.observed

    def _add_promises(self, base: ObservedFleet) -> "_View":
        """Return the view with all promises that are now in the ledger.

        If the ledger has only gained promises since the last view, only the new ones are added to that view.
        """
        active = {intent.request_id: intent for intent in self.ledger.list_active_intents()}
        last = self._view
        if last is None or not last.promised <= active.keys():
            last = _View(0, frozenset(), base)
        added = [intent for request_id, intent in active.items() if request_id not in last.promised]
        return _View(self.ledger.version, frozenset(active), add_intents(last.observed, added))

    def find_promised_attempts(self) -> dict[tuple[str, int], str]:
        """Return (job, attempt) → the request id of its promise."""
        return {(row.job, row.attempt): row.request_id for row in self.ledger.list_active_intents()}

    def refuse_if_started(self, request_id: str) -> None:
        """Raise ConflictError if the start of the job was acknowledged, even if no board shows it yet.

        The GPUs of a started job are in use.
        """
        intent = next(row for row in self.ledger.list_active_intents() if row.request_id == request_id)
        if not self._expiry.list_acknowledged_types(intent, self.board) <= WAITING:
            raise ConflictError(f"{request_id!r} runs already: end the job")


def explain_attempt_conflict(
    request: PlacementRequest, observed: ObservedFleet, promised: Mapping[tuple[str, int], str]
) -> str:
    """Explain why an attempt cannot be placed. Returns "" if it can.

    An attempt cannot be placed if it runs, has ended, or already has promised GPUs. Otherwise, its earlier
    events would end the new intent and free the GPUs.
    """
    key = (request.job_name, request.attempt)
    name = f"attempt {request.attempt} of {request.job_name}"
    if key in observed.ended:
        return f"{name} has ended already: name the next attempt"
    if key in observed.seen:
        return f"{name} runs already: name the next attempt"
    holder = promised.get(key)
    return f"{name} was promised GPUs already, as request {holder}: cancel that first" if holder else ""


@dataclass(frozen=True, slots=True)
class _View:
    """The view with all promises of one ledger version. `promised`: the request ids of these promises."""

    version: int
    promised: frozenset[str]
    observed: ObservedFleet


@dataclass(frozen=True, slots=True)
class _HeldFleet:
    """The view in which GPUs are held that actions have promised, until `until_ms`.

    sources: the version of the ledger's actions, and the promised sets. for_pass: the view without growth that may be
    withdrawn.
    """

    sources: object
    until_ms: int
    observed: ObservedFleet
    for_pass: ObservedFleet


@dataclass(frozen=True, slots=True)
class _CompletedFleet:
    """The fleet of a board with completed jobs, and what it was made from: the board's fleet and the queue tree."""

    base: ObservedFleet
    tree: QueueTree | None
    observed: ObservedFleet
