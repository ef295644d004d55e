"""The computation of one pass over the queue.

It reads only objects that never change, so it may run in a thread.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from fleetcast.placement.ledger.ledger import QueueEntry
from fleetcast.placement.machines.options import Options
from fleetcast.placement.plan.promised import Promises
from fleetcast.placement.plan.queue import ONE_LINE, Plan, Wait, WaitingEntry, plan
from fleetcast.placement.plan.reasons import StateAfterPass, WaitReason
from fleetcast.placement.plan.reclaiming import ReclaimInput
from fleetcast.placement.plan.turns import QueueTurns
from fleetcast.service.placer.view import ObservedFleet


@dataclass(frozen=True, slots=True)
class QueuePass:
    """The input of one pass over the queue.

    stranded: entries whose queue is missing from the queue file, each with the reason.
    """

    queue: Sequence[QueueEntry]
    observed: ObservedFleet
    options: Options
    turns: QueueTurns = ONE_LINE
    dropped: Collection[str] = ()  # requests whose claims reserve nothing in this pass
    stranded: Sequence[tuple[QueueEntry, str]] = ()
    reclaim: ReclaimInput | None = None
    promises: Promises = field(default_factory=dict)

    def compute_plan(self) -> Plan:
        """Compute which requests are placed, and where."""
        observed = self.observed
        queue = [WaitingEntry(entry.request, entry.queued_ms) for entry in self.queue]
        state = observed.view, observed.running, observed.run_times
        return plan(queue, *state, self.options, self.turns, self.dropped, self.reclaim, self.promises)

    def make_stranded_waits(self, planned: Plan) -> Iterator[Wait]:
        """Yield the waits of stranded entries. Their positions follow those of the plan."""
        after = StateAfterPass(self.options, planned.view, self.turns)
        for position, (entry, why) in enumerate(self.stranded, len(planned.waiting) + 1):
            reason = WaitReason("gone", entry.request, after, said=why)
            yield Wait(WaitingEntry(entry.request, entry.queued_ms), position, reason)
