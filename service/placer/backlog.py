"""The placer's queue: passes that place waiting requests, and rows that explain why requests wait."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from fleetcast.fleet.errors import StaleError
from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.placement.ahead.start_time import LEVELS
from fleetcast.placement.engine import is_still_valid
from fleetcast.placement.ledger.ledger import QueueEntry
from fleetcast.placement.machines.options import Options
from fleetcast.placement.plan.dropped_claims import DroppedClaims
from fleetcast.placement.plan.queue import ONE_LINE, Plan, Wait, WaitingEntry
from fleetcast.placement.plan.reclaiming import ReclaimInput
from fleetcast.placement.plan.timeline import add_request_placement
from fleetcast.placement.plan.turns import QueueTurns
from fleetcast.service.answers.placements import QueueRow
from fleetcast.service.placer.decision_writer import DecisionWriter
from fleetcast.service.placer.failures import ACTIONS, PASS, Failures
from fleetcast.service.placer.growth import GrowthAdvisor
from fleetcast.service.placer.promised_view import PromisedView, explain_attempt_conflict
from fleetcast.service.placer.queue_pass import QueuePass
from fleetcast.service.placer.queue_rows import NOT_LOOKED_AT, StartNotes, make_queue_row
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.reclaim import ReclaimAdvisor
from fleetcast.service.placer.recovery import RecoveryAdvisor
from fleetcast.service.placer.running_jobs import find_charged_leaf
from fleetcast.service.placer.view import ObservedFleet, merge_waiting_jobs

StartTimes = Mapping[str, tuple[int, int, int]]  # request_id → start_ms at p10, p50, p90


class RequestBacklog:
    """The queue of waiting requests. Each pass considers them in order and places those that may start now."""

    def __init__(
        self,
        view: PromisedView,
        queues: ServedQueues,
        decisions: DecisionWriter,
        options: Callable[[], Options],
        failures: Failures,
        advisor: ReclaimAdvisor,
        recovery: RecoveryAdvisor,
    ) -> None:
        self._view = view
        self._queues = queues
        self._decisions = decisions
        self._options = options
        self._failures = failures
        self._advisor = advisor
        self._recovery = recovery
        self._clock = view.clock
        self._ledger = view.ledger
        self._metrics = view.metrics
        self.turns: QueueTurns = ONE_LINE
        self.waits: dict[str, Wait] = {}
        self.stalled = ""
        self.dropped_claims = DroppedClaims()
        self.planned: Plan | None = None  # the last pass, while something waits
        self.pass_ms: int | None = None  # when the last pass began
        self.growth = GrowthAdvisor(advisor.control, queues, advisor.executors)
        self.starts: StartTimes = {}  # of what waits, as of the last refresh of the sampler
        self.start_notes = StartNotes()

    def run_pass(self) -> int:
        """Run one whole pass over the queue. Returns how many requests were placed.

        Raises StaleError without a fresh board, or while the parts of the state disagree.
        """
        begun = self.begin_pass()
        return self.end_pass(begun, begun.compute_plan())[0] if begun else 0

    def begin_pass(self) -> QueuePass | None:
        """Return the input of the next pass, or None if no request waits.

        Raises StaleError without a fresh board, or while the parts of the state disagree.
        """
        queue = self._ledger.list_queue_entries()
        self._metrics.queue_length.set(len(queue))
        if not queue:
            self.waits, self.planned, self.stalled, self.pass_ms = {}, None, "", self._clock.now_ms()
            self._advisor.withdraw_all("no request waits", self._clock.now_ms())
            with suppress(StaleError):
                observed = self._recover(self._view.observe_fleet(), self._options())  # charges go on as well
                with self._failures.contain(ACTIONS):
                    self.growth.record_growth(None, self._queues.make_turns(observed), observed, self._options())
            return None
        try:
            options = self._options()
            observed = self._recover(self._view.observe_for_decision(), options)
        except StaleError as error:
            self.stalled = f"nothing is decided now: {error}"
            raise
        self.stalled = ""
        wanted, stranded, refused = self._sort_out_entries(queue, observed)
        for entry, why in refused:
            self._decisions.refuse(entry.request, why, "queue")
            self._metrics.decisions.labels("refused", "queue").inc()
        dropped = self.dropped_claims.choose_dropped_claims(entry.request.request_id for entry in wanted)
        turns, reclaim = self._queues.make_turns(observed), self.make_reclaim_input(observed, options.now_ms)
        promises = self._view.promised_sets.make_promises(options.now_ms)
        return QueuePass(wanted, observed, options, turns, dropped, stranded, reclaim, promises)

    def make_preview(self, request: PlacementRequest) -> QueuePass:
        """Return the input of a pass in which a request waits that is in no queue. Nothing is recorded.

        The request counts as if it had waited long enough for a stop. If it waits already, it keeps its place. Raises
        StaleError like `begin_pass`.
        """
        observed, options = self._view.observe_for_decision(), self._options()
        queue = {entry.request.request_id: entry for entry in self._ledger.list_queue_entries()}
        before = queue.get(request.request_id)
        queued_ms = before.queued_ms if before else options.now_ms
        queue[request.request_id] = QueueEntry(request, b"", queued_ms)
        wanted, stranded, _ = self._sort_out_entries(list(queue.values()), observed)
        facts = self.make_reclaim_input(observed, options.now_ms)
        return QueuePass(
            wanted,
            observed,
            options,
            self._queues.make_turns(observed),
            stranded=stranded,
            reclaim=facts and replace(facts, impatient=request.request_id),
            promises=self._view.promised_sets.make_promises(options.now_ms),
        )

    def make_reclaim_input(self, observed: ObservedFleet, now_ms: int) -> ReclaimInput | None:
        """Return the facts by which a pass may stop jobs, or None if it may not. No failure of the search is raised."""
        facts = None
        with self._failures.contain(ACTIONS):
            facts = self._advisor.make_input(observed, now_ms)
        return facts and replace(facts, propose=self._failures.propose_reclaim)

    def _recover(self, observed: ObservedFleet, options: Options) -> ObservedFleet:
        """Let gangs with lost nodes get what they need. Returns the fleet with the GPUs that are held for them."""
        with self._failures.contain(ACTIONS), self._ledger.transaction():
            self._recovery.record_actions(observed, options)
        return self._view.observe_for_pass()

    def record_failed_pass(self, error: Exception) -> None:
        """Record that a pass failed.

        If no pass has succeeded with the present queue tree, the previous tree is used again.
        """
        why = self._failures.record(PASS, error)
        self.stalled = f"nothing is placed from the queue now: the {why}"
        self._queues.withdraw_tree(why)

    def end_pass(self, begun: QueuePass, planned: Plan) -> tuple[int, int]:
        """Store the plan. Returns the number of placed requests, and the number of requests to plan again.

        A request must be planned again if another decision took its GPUs while the plan was computed.
        """
        observed, growths = self._view.observe_for_pass(), self.growth.list_withdrawable()
        self.turns = begun.turns
        unchanged = observed is begun.observed
        view, promised, turns = observed.view, self._view.find_promised_attempts(), self._queues.make_turns(observed)
        placed, lost = list[Decision](), 0
        waits = {
            wait.entry.request.request_id: wait for wait in (*planned.waiting, *begun.make_stranded_waits(planned))
        }
        with self._ledger.transaction():
            for entry, decision in planned.placed:
                request = entry.request
                if not self._ledger.is_queued(request.request_id):
                    continue
                if not unchanged and (
                    explain_attempt_conflict(request, observed, promised)
                    or not is_still_valid(request, decision, view, begun.options)
                    or isinstance(turns.limit_to_quota(request), str)
                ):
                    lost += 1
                    continue
                leaf = find_charged_leaf(request, self._queues.tree)
                queued_ms = self._queues.time.adjust_queued_ms(request.request_id, entry.queued_ms)
                decision = self._decisions.complete_decision(request, decision)
                self._decisions.store_decision(request, decision, leaf, view, observed.run_times, "queue", queued_ms)
                turns.record_placement(request, decision)
                self._metrics.decisions.labels("placed", "queue").inc()
                view = view if unchanged else add_request_placement(view, request, decision.ranks)
                placed.append(decision)
            self.growth.make_way(growths, placed, turns.standing, view, begun.options.now_ms)
            self._ledger.record_marks(
                over_quota=sorted(name for name, wait in waits.items() if wait.reason.is_over_quota)
            )
        with self._failures.contain(ACTIONS), self._ledger.transaction():
            self._advisor.record_proposal(planned.proposal, begun.observed, begun.options.now_ms, unchanged)
        if unchanged:
            with self._failures.contain(ACTIONS):
                self.growth.record_growth(planned, begun.turns, observed, begun.options)
        self.waits = waits
        self._queues.file.confirm_tree()
        self.planned, self.pass_ms = planned, begun.options.now_ms
        self._metrics.queue_length.set(len(self._ledger.list_queue_entries()))
        return len(placed), lost

    def _sort_out_entries(
        self, queue: Sequence[QueueEntry], observed: ObservedFleet
    ) -> tuple[list[QueueEntry], list[tuple[QueueEntry, str]], list[tuple[QueueEntry, str]]]:
        """Return the entries to plan, those whose queue is missing, and those whose attempt started elsewhere.

        The entries of the second and the third list come with their reasons.
        """
        wanted: list[QueueEntry] = []
        stranded: list[tuple[QueueEntry, str]] = []
        refused: list[tuple[QueueEntry, str]] = []
        promised = self._view.find_promised_attempts()
        taken = observed.seen | observed.ended | promised.keys()
        for entry in queue:
            is_taken = (entry.request.job_name, entry.request.attempt) in taken
            why = explain_attempt_conflict(entry.request, observed, promised) if is_taken else ""
            if why:
                refused.append((entry, why))
            elif gone := self._queues.explain_missing_queue(entry.request):
                stranded.append((entry, gone))
            else:
                wanted.append(entry)
        return wanted, stranded, refused

    async def list_queue_rows(self) -> list[QueueRow]:
        """Return the rows of `GET /queue`, in order.

        A thread makes the rows from the entries that wait now.
        """
        return await asyncio.to_thread(
            self._make_explained_rows, self._ledger.list_queue_entries(), self._clock.now_ms()
        )

    def _make_explained_rows(self, entries: Sequence[QueueEntry], now_ms: int) -> list[QueueRow]:
        return [
            self._make_explained_row(position, entry, now_ms)
            for position, entry in enumerate(self.sort_by_turn(entries), 1)
        ]

    def sort_by_turn(self, entries: Sequence[QueueEntry]) -> list[WaitingEntry]:
        """Return the entries in the order of the last pass."""
        return self.turns.sort_entries([WaitingEntry(entry.request, entry.queued_ms) for entry in entries])

    def list_waiting_jobs(self) -> list[WaitingEntry]:
        """Return all waiting entries, each once: requests of our own queue, and waiting jobs of other schedulers."""
        return merge_waiting_jobs(
            self._view.board,
            self._ledger.list_queue_entries(),
            [intent.job for intent in self._ledger.list_active_intents()],
        )

    def find_start_ms(self, request_id: str, now_ms: int) -> dict[str, int] | None:
        start = self.starts.get(request_id)
        return {name: max(now_ms, ms) for name, ms in zip(LEVELS, start, strict=True)} if start else None

    def _make_explained_row(self, position: int, entry: WaitingEntry, now_ms: int) -> QueueRow:
        request_id = entry.request.request_id
        wait, start_ms = self.waits.get(request_id), self.find_start_ms(request_id, now_ms)
        start = self.start_notes.describe_start(request_id, start_ms, now_ms)
        why = wait.why + (f"; {start}" if start else "") if wait else NOT_LOOKED_AT
        by, ignored = self.start_notes.by.get(request_id), self._decisions.find_ignored_facts(entry.request)
        return make_queue_row(position, entry, self.stalled or why, start_ms, ignored, now_ms, by)
