"""The writer of the placer's decisions. It adds charges, and facts that only the service knows."""

import msgspec

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.requests import (
    HONOURED_BY_QUEUES,
    HONOURED_BY_RECLAIM,
    Decision,
    PlacementRequest,
    list_ignored_facts,
)
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.charged import make_placement_charge
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.service.placer.promised_view import PromisedView
from fleetcast.service.placer.queues import ServedQueues


class DecisionWriter:
    """A writer of decisions into the ledger. It charges each placed request to its queue."""

    def __init__(self, clock: Clock, ledger: Ledger, view: PromisedView, queues: ServedQueues) -> None:
        self._clock = clock
        self._ledger = ledger
        self._view = view
        self._queues = queues

    def make_decision(self, request: PlacementRequest, outcome: str, sentence: str, now_ms: int) -> Decision:
        """Make a decision without considering any node."""
        board = self._view.board
        return Decision(
            request_id=request.request_id,
            decision_id=f"d-{request.request_id}-{now_ms}",
            outcome=outcome,  # type: ignore[arg-type]
            sentence=sentence + self._queues.describe_charged_queue(request),
            board_as_of_ms=board.as_of_ms if board else 0,
            ignored=self.find_ignored_facts(request),
        )

    def complete_decision(self, request: PlacementRequest, decision: Decision) -> Decision:
        """Add facts that only the service knows to a decision of the engine.

        It adds the facts of the request that have no effect. If the request names an unknown queue, it also adds
        the queue that is charged instead.
        """
        sentence = decision.sentence + self._queues.describe_charged_queue(request)
        return msgspec.structs.replace(decision, ignored=self.find_ignored_facts(request), sentence=sentence)

    def store_decision(
        self,
        request: PlacementRequest,
        decision: Decision,
        leaf: str,
        view: ClusterView,
        run_times: RunTimeQuantiles,
        caller: str,
        queued_ms: int | None = None,
    ) -> bytes:
        """Store a decision of the engine, and charge a placement to the leaf queue. Returns the stored reply."""
        now_ms = self._clock.now_ms()
        action = "place" if decision.outcome == "placed" else "refuse"
        charge = make_placement_charge(request, decision, leaf, view, run_times, now_ms, queued_ms)
        return self._ledger.commit_decision(request, decision, now_ms, caller, action, charge)

    def refuse(self, request: PlacementRequest, why: str, caller: str, action: str = "refuse") -> None:
        """Store a refusal for a waiting request."""
        now_ms = self._clock.now_ms()
        decision = self.make_decision(request, "refused", f"refused: {why}", now_ms)
        self._ledger.commit_decision(request, decision, now_ms, caller, action)

    def find_ignored_facts(self, request: PlacementRequest) -> tuple[str, ...]:
        """Return the facts of a request that have no effect here."""
        tree = self._queues.tree
        if tree is None:
            return list_ignored_facts(request)
        stops = () if tree.policy.reclaim.mode == "off" else HONOURED_BY_RECLAIM
        return list_ignored_facts(request, HONOURED_BY_QUEUES + stops)
