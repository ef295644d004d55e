"""The thinking part of a pass over the queue. It reads only what never changes, so it may run in a thread."""

from collections.abc import Sequence
from dataclasses import dataclass

from placement.ledger import QueueEntry
from placement.options import Options
from placement.queue import ONE_LINE, Plan, Waiting, plan
from placement.turns import QueueTurns
from service.placer.view import Observed


@dataclass(frozen=True, slots=True)
class QueuePass:
    """What a pass works on."""

    queue: Sequence[QueueEntry]
    observed: Observed
    options: Options
    turns: QueueTurns = ONE_LINE
    dropped: str = ""  # whose claim keeps nothing this time

    def think(self) -> Plan:
        """Who is to be placed where."""
        observed = self.observed
        queue = [Waiting(entry.request, entry.queued_ms) for entry in self.queue]
        state = observed.view, observed.running, observed.run_times
        return plan(queue, *state, self.options, self.turns, self.dropped)
