"""The requests for which passes stop running jobs, in sampled futures: each starts once its jobs have stopped.

The futures themselves stop no jobs. The search for victims is the one of the pass. It runs for the waiting requests
in their order, each with the fleet and the shares that the stops before it leave, until it fails for one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.ahead.run_draws import PATHS, compute_normal_quantiles
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.promised import Promises, count_promises
from fleetcast.placement.plan.queue import MAX_MS, WaitingEntry
from fleetcast.placement.plan.reclaiming import ReclaimInput, propose_reclaim
from fleetcast.placement.plan.timeline import add_request_placement
from fleetcast.placement.plan.turns import QueueTurns

MOST_ENTRIES = 100  # for which victims are searched, 3 to 10 ms each. Most queues have none after a few.
PASS_S = 15.0  # a pass stops jobs for one request, and the next pass for the next one
SPREAD = 0.6  # of the logarithm of the time that a stop takes
SOONEST_S = 15.0  # a stop that is overdue may be seen at any time

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StopsAhead:
    """The facts about stops that sampled futures know.

    reclaim: the facts by which passes stop jobs, None if they stop none. stop_s: the median time from the pass that
    stops jobs to the start of their request. sent_s: request → seconds since jobs were asked to stop for it. promises:
    the GPUs that these jobs free.
    """

    reclaim: ReclaimInput | None = None
    stop_s: float = 0.0
    sent_s: Mapping[str, float] = field(default_factory=dict)
    promises: Promises = field(default_factory=dict)

    def find_starts(
        self, queue: Sequence[WaitingEntry], view: ClusterView, turns: QueueTurns, options: Options
    ) -> dict[str, Array]:
        """Return request → (path,) seconds until it starts, for requests for which jobs stop.

        queue: the waiting requests, in order. view, turns: the fleet and the queues after the requests that start now.
        """
        found = {name: self._draw_stop_s(name, -since_s) for name, since_s in self.sent_s.items()}
        facts, standing, holds = self.reclaim, turns.standing, dict(turns.holds)
        if facts is None or standing is None:
            return found
        standing, later_s = count_promises(standing, holds, facts.leaving, self.promises), -PASS_S
        for entry in queue[:MOST_ENTRIES]:
            request_id, hold = entry.request.request_id, turns.find_hold(entry.request)
            request = None if request_id in found else turns.make_later_request(entry.request)
            if request is None or hold is None or fits_now(request, view, options):
                continue
            proposal = propose_reclaim(request, view, standing, holds, facts, options, MAX_MS, 0)
            if proposal.victims is None or not proposal.sends or proposal.shrinks:
                break  # it is the head, and passes stop jobs for the head alone
            stopped = proposal.victims.chosen.jobs
            standing = standing.copy()
            for job in stopped:
                if (own := holds.pop(job, None)) is not None:
                    standing.add_held(own.leaf, own.amounts, -1.0)
            standing.add_held(hold.leaf, hold.amounts)
            view = add_request_placement(remove_jobs(view, stopped), request, proposal.victims.decision.ranks)
            waited_s = (options.now_ms - entry.queued_ms) / 1000
            later_s = max(later_s + PASS_S, facts.policy.patience_s - waited_s)
            found[request_id] = self._draw_stop_s(request_id, later_s)
        return found

    def _draw_stop_s(self, request_id: str, later_s: float) -> Array:
        """Draw (path,) seconds until jobs have stopped. later_s: seconds until they are asked, or negative."""
        order = np.random.default_rng([*request_id.encode()]).permutation(PATHS)
        delay_s = self.stop_s * np.exp(SPREAD * compute_normal_quantiles(PATHS))[order]
        return np.maximum(later_s + delay_s, SOONEST_S).astype(np.float32)


NO_STOPS = StopsAhead()
