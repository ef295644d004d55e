"""The service that decides, queues and cancels placements, and writes them to the ledger.

It contains no HTTP code.
"""

import time
from collections import defaultdict
from typing import cast

import msgspec

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.errors import ConflictError, RequestError, UnknownEntity
from fleetcast.fleet.requests import (
    Decision,
    PlacementRequest,
    check_avoided_nodes,
    check_request,
)
from fleetcast.placement.actions.breaker import BreakerCapacity, BreakerLimits
from fleetcast.placement.engine import decide
from fleetcast.placement.ledger.ledger import IntentState, Ledger
from fleetcast.placement.machines.options import Filter, Options, Scorer
from fleetcast.placement.queues.queues_file import count_installed_gpus
from fleetcast.placement.queues.tree import ANY
from fleetcast.service.answers.placements import Settled
from fleetcast.service.config import Config
from fleetcast.service.placer.action_follow import ActionFollower
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.backlog import RequestBacklog
from fleetcast.service.placer.decision_writer import DecisionWriter
from fleetcast.service.placer.executors import ExecutorChoice, open_configured_executors
from fleetcast.service.placer.failures import ACTIONS, Failures
from fleetcast.service.placer.known_names import check_known_names
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.own_numbers import DECISIONS, LINES, OwnNumbers
from fleetcast.service.placer.promised_view import PromisedView, explain_attempt_conflict
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.recent_demand import RecentDemand
from fleetcast.service.placer.reclaim import ReclaimAdvisor
from fleetcast.service.placer.recovery import RecoveryAdvisor
from fleetcast.service.placer.view import ObservedFleet
from fleetcast.service.plugins import load_functions


class PlacementService:
    """The service that decides about placements. It owns the ledger.

    Code that reads or writes the ledger runs to its end without an await, so the service needs no locks.
    """

    def __init__(self, config: Config, clock: Clock, ledger: Ledger, metrics: PlacerMetrics) -> None:
        self.config = config
        self.clock = clock
        self.ledger = ledger
        self.metrics = metrics
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
        self.queues = ServedQueues(config.placer.queues, ledger, clock, config.pipeline.tick_s)
        self.view = PromisedView(config, clock, ledger, self.queues, metrics)
        self.decisions = DecisionWriter(clock, ledger, self.view, self.queues)
        limits = BreakerLimits(config.placer.taken_queue_share, config.placer.taken_fleet_share)
        self.actions = ActionControl(ledger, clock, limits, self._measure_capacity, metrics.actions)
        self.executors = ExecutorChoice(open_configured_executors(config.adapters))
        self._follower = ActionFollower(self.actions, clock)
        self.view.follow_actions = self._follow_actions
        self.advisor = ReclaimAdvisor(self.actions, self.queues, self.executors, self.view.promised_sets)
        recovery = RecoveryAdvisor(self.queues, self.advisor, self.view.promised_sets, failures)
        placed_by = self.decisions, self.make_options, failures, self.advisor, recovery
        self.backlog = RequestBacklog(self.view, self.queues, *placed_by)
        metrics.audit_position.set_function(lambda: ledger.head.audit_id)
        metrics.queues_refused.set_function(lambda: bool(self.queues.file.refused))

    def make_options(self) -> Options:
        """Return the options for a decision at the present time."""
        known = self.view.view_without_promises
        return Options(
            max_risk=self.config.placer.max_risk,
            now_ms=self.clock.now_ms(),
            intent_expires_s=self.config.placer.intent_expires_s,
            demand=self.demand.get_demand(known.view.inventory.gpu_models) if known else None,
            clusters=self.config.fleet.clusters,
            filters=cast(tuple[tuple[str, Filter], ...], self.filters),
            scorers=cast(tuple[tuple[str, Scorer], ...], self.scorers),
        )

    def _measure_capacity(self) -> BreakerCapacity:
        """Return the GPUs of the fleet, and of each queue: those guaranteed to it, or those that it holds if more.

        Without a board there are none, so the circuit breaker admits nothing.
        """
        known, tree = self.view.view_without_promises, self.queues.tree
        queues: dict[str, float] = defaultdict(float)
        if tree is not None:
            for charge in self.ledger.charges.list_open_charges().values():
                queues[charge.leaf] += charge.gpus
            for node in tree.nodes:
                queues[node.name] = max(queues[node.name], node.guaranteed.get(ANY, 0.0))
        fleet = count_installed_gpus(known.view.topology.nodes).get(ANY, 0.0) if known else 0.0
        return BreakerCapacity(fleet, queues)

    def _follow_actions(self, observed: ObservedFleet, now_ms: int) -> None:
        """Record what a board shows of actions. If that fails, they stay open, and their GPUs stay held."""
        with self.failures.contain(ACTIONS):
            self._follower.follow_board(observed, now_ms)

    def place(self, request: PlacementRequest, caller: str) -> bytes:
        """Decide a request now, and store the decision. Returns the encoded reply.

        A request that was decided before gets its stored reply. A dry run stores nothing.
        """
        check_request(request, bool(self.queues.tree))
        check_avoided_nodes(request)
        self.view.refresh()
        self.view.watch.raise_if_in_doubt()
        if not request.dry_run and (before := self.ledger.find_stored_reply(request)) is not None:
            return before
        self.check_names(request)
        observed = self.view.observe_for_pass()
        if not request.dry_run and (
            why := explain_attempt_conflict(request, observed, self.view.find_promised_attempts())
        ):
            raise ConflictError(why)
        leaf, turns = self.queues.find_leaf(request), self.queues.make_turns(observed)
        allowed = turns.limit_to_quota(request)
        began = time.perf_counter()
        if isinstance(allowed, str):
            decision = self.decisions.make_decision(request, "refused", f"refused: {allowed}", self.clock.now_ms())
        else:
            view = self.view.promised_sets.release_own_gang(observed.view, request)
            decision = decide(allowed, view, self.make_options())
            decision = self.decisions.complete_decision(request, decision)
        self.metrics.decide_s.observe(time.perf_counter() - began)
        if request.dry_run:
            return msgspec.json.encode(decision)
        self.metrics.decisions.labels(decision.outcome, "placements").inc()
        with self.ledger.transaction():
            if decision.outcome == "placed" and (growths := self.backlog.growth.list_withdrawable()):
                turns.record_placement(request, decision)
                self.backlog.growth.make_way(growths, [decision], turns.standing, observed.view, self.clock.now_ms())
            return self.decisions.store_decision(request, decision, leaf, observed.view, observed.run_times, caller)

    def enqueue(self, request: PlacementRequest, caller: str) -> bytes:
        """Put a request into the queue. Returns the encoded reply.

        A request that is already queued or decided gets its stored reply.
        """
        check_request(request, bool(self.queues.tree))
        check_avoided_nodes(request)
        if request.dry_run:
            raise RequestError("a dry run cannot wait: send it to /placements", "dry_run")
        self.view.watch.raise_if_in_doubt()
        if (before := self.ledger.find_stored_reply(request)) is not None:
            return before
        self.check_names(request)
        key = (request.job_name, request.attempt)
        if any((entry.request.job_name, entry.request.attempt) == key for entry in self.ledger.list_queue_entries()):
            raise ConflictError(f"attempt {request.attempt} of {request.job_name} waits already")
        known = self.view.view_without_promises
        if known and (why := explain_attempt_conflict(request, known, self.view.find_promised_attempts())):
            raise ConflictError(why)
        self.queues.find_leaf(request)
        now_ms = self.clock.now_ms()
        before_it = sum(entry.request.priority >= request.priority for entry in self.ledger.list_queue_entries())
        others = (
            "no request is" if not before_it else "1 request is" if before_it == 1 else f"{before_it:,} requests are"
        )
        decision = self.decisions.make_decision(request, "queued", f"queued: {others} before it", now_ms)
        self.metrics.decisions.labels("queued", "queue").inc()
        return self.ledger.enqueue(request, decision, now_ms, caller)

    def check_names(self, request: PlacementRequest) -> None:
        """Check that this installation has everything that the request names. Raises RequestError if not."""
        known = self.view.view_without_promises
        check_known_names(request, self.config.fleet, known.view if known else None, self.queues.tree)

    def withdraw(self, request_id: str, caller: str) -> Settled:
        """Remove a request from the queue. The stored decision becomes a refusal that says so.

        Raises UnknownEntity for an unknown request, and ConflictError for a request that no longer waits.
        """
        self.view.watch.raise_if_in_doubt()
        entry = next((row for row in self.ledger.list_queue_entries() if row.request.request_id == request_id), None)
        if entry is None:
            reply = self.ledger.find_reply(request_id)
            if reply is None:
                raise UnknownEntity(f"no request {request_id!r} is in the queue")
            outcome = msgspec.json.decode(reply, type=Decision).outcome
            raise ConflictError(f"{request_id!r} does not wait any more: it was {outcome}")
        self.decisions.refuse(entry.request, "withdrawn from the queue", caller, "withdraw")
        self.backlog.waits.pop(request_id, None)
        return Settled(request_id, "withdrawn", "withdrawn from the queue")

    def cancel(self, request_id: str, caller: str) -> Settled:
        """Release the GPUs of a placement whose job has not started yet."""
        self.view.watch.raise_if_in_doubt()
        state = self.ledger.read_intent_state(request_id)
        if state is IntentState.ACTIVE:
            self.view.refuse_if_started(request_id)
            self.ledger.finish_intents([(request_id, IntentState.CANCELLED)], self.clock.now_ms(), caller)
        elif state is None:
            if self.ledger.is_queued(request_id):
                raise ConflictError(f"{request_id!r} still waits: withdraw it with DELETE /queue/{request_id}")
            if self.ledger.find_reply(request_id) is None:
                raise UnknownEntity(f"no placement {request_id!r}")
            raise ConflictError(f"{request_id!r} was refused: there is nothing to cancel")
        elif state is not IntentState.CANCELLED:
            words = {IntentState.SEEN: "runs already: end the job", IntentState.ENDED: "has ended"}
            raise ConflictError(f"{request_id!r} {words.get(state, 'has expired: its GPUs are free again')}")
        return Settled(request_id, "cancelled", "cancelled, its GPUs are free again")
