"""The requests for which passes stop running jobs, in sampled futures, and when these jobs have stopped.

The futures themselves search for no victims. The search is the one of the pass. It runs for the waiting requests
in their order, each with the fleet and the shares that the stops before it leave, until it fails for one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.ahead.run_draws import PATHS, compute_normal_quantiles
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import NO_RUNNING_JOBS
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.promised import Promises, count_promises
from fleetcast.placement.plan.queue import MAX_MS, WaitingEntry
from fleetcast.placement.plan.reclaiming import ReclaimInput, propose_reclaim
from fleetcast.placement.plan.timeline import add_request_placement
from fleetcast.placement.plan.turns import QueueTurns

MOST_ENTRIES = 100  # for which victims are searched, 3 to 10 ms each. Most queues have none after a few.
PASS_S = 15.0  # from pass to pass; each stops jobs for one request
SPREAD = 0.6  # of the logarithm of the time that a stop takes
SOONEST_S = 15.0  # a stop that is overdue may be seen at any time

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SentStop:
    """Jobs that were asked to stop for a request.

    since_s: seconds since then. jobs: those that still run. holds: names under which the view holds what is promised.
    """

    since_s: float
    jobs: frozenset[str] = frozenset()
    holds: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PlannedStop:
    """Jobs that stop for a request in sampled futures. at_s: (path,) seconds until they have stopped.

    jobs: they wait again after the stop. holds: names under which the view holds GPUs for the request until then.
    """

    at_s: Array
    jobs: frozenset[str]
    holds: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StopsAhead:
    """The facts about stops that sampled futures know.

    reclaim: the facts by which passes stop jobs, None if they stop none. stop_s: the median time from the pass that
    stops jobs to the start of their request. sent: request → the jobs that were asked to stop for it. promises:
    the GPUs that these jobs free.
    """

    reclaim: ReclaimInput | None = None
    stop_s: float = 0.0
    sent: Mapping[str, SentStop] = field(default_factory=dict)
    promises: Promises = field(default_factory=dict)

    @property
    def restart_s(self) -> dict[str, float]:
        """Running job → seconds from a new start to useful work."""
        jobs = self.reclaim.jobs if self.reclaim is not None else NO_RUNNING_JOBS
        return dict(zip(jobs.names, jobs.restart_s.tolist(), strict=True))

    def find_stops(
        self, queue: Sequence[WaitingEntry], view: ClusterView, turns: QueueTurns, options: Options
    ) -> dict[str, PlannedStop]:
        """Return request → the jobs that stop for it.

        queue: the waiting requests, in order. view, turns: the fleet and the queues after the requests that start now.
        """
        found = {
            name: PlannedStop(self._draw_stop_s(name, -one.since_s), one.jobs, one.holds)
            for name, one in self.sent.items()
        }
        facts, standing, holds = self.reclaim, turns.standing, dict(turns.holds)
        if facts is None or standing is None:
            return found
        propose = facts.propose or propose_reclaim
        standing, later_s = count_promises(standing, holds, facts.leaving, self.promises).copy(), -PASS_S
        standing.clear_waiting_counts()  # as in a pass, only the requests before it count
        for entry in queue[:MOST_ENTRIES]:
            request_id, hold = entry.request.request_id, turns.find_hold(entry.request)
            if request_id in found or hold is None:
                continue
            request = turns.make_later_request(entry.request)
            if request is None or fits_now(request, view, options):
                standing.count_waiting(entry.request)
                continue
            proposal = propose(request, view, standing, holds, facts, options, MAX_MS, 0)
            if proposal.victims is None or not proposal.sends or proposal.shrinks:
                break  # it is the head, and passes stop jobs for the head alone
            stopped = proposal.victims.chosen.jobs
            for job in stopped:
                if (own := holds.pop(job, None)) is not None:
                    standing.add_held(own.leaf, own.amounts, -1.0)
            standing.add_held(hold.leaf, hold.amounts)
            view = add_request_placement(remove_jobs(view, stopped), request, proposal.victims.decision.ranks)
            waited_s = (options.now_ms - entry.queued_ms) / 1000
            later_s = max(later_s + PASS_S, facts.policy.patience_s - waited_s + PASS_S / 2)  # the next pass sees it
            found[request_id] = PlannedStop(self._draw_stop_s(request_id, later_s), frozenset(stopped))
        return found

    def _draw_stop_s(self, request_id: str, later_s: float) -> Array:
        """Draw (path,) seconds until jobs have stopped. later_s: seconds until they are asked, or negative."""
        order = np.random.default_rng([*request_id.encode()]).permutation(PATHS)
        delay_s = self.stop_s * np.exp(SPREAD * compute_normal_quantiles(PATHS))[order]
        return np.maximum(later_s + delay_s, SOONEST_S).astype(np.float32)


NO_STOPS = StopsAhead()
