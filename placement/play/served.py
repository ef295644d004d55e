"""A simulation through time of the plan that the placer serves, on a fleet whose jobs follow a trace.

The plan is `fleetcast.placement.plan.queue.plan`. It knows only what the placer would know at that time:
requests, charges, banks, and the run times of jobs that have ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.requests import Decision, PlacementRequest, RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.placement.elastic.grow import DWELL_MS, propose_growth
from fleetcast.placement.elastic.members import assign_gpus, release_gpus
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import NO_RUNNING_JOBS, RunningJobs
from fleetcast.placement.machines.shapes import RecentShapes, ShapeDemand, make_member_shape, make_shape_demand
from fleetcast.placement.machines.slots import convert_to_milli
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.charged import make_placement_charge
from fleetcast.placement.plan.queue import ONE_LINE, Plan, Wait, WaitingEntry, make_begun_jobs, plan
from fleetcast.placement.plan.reclaiming import ReclaimProposal
from fleetcast.placement.plan.timeline import add_request_placement
from fleetcast.placement.plan.turns import QueueTurns, TreeTurns, sum_placed_amounts
from fleetcast.placement.play.elastic import ElasticProgress
from fleetcast.placement.play.faults import PlayedFaults
from fleetcast.placement.play.progress import FAULT
from fleetcast.placement.play.reclaim import PlayedReclaim
from fleetcast.placement.play.seen_runs import SeenRuns
from fleetcast.placement.queues.charges import Charge, LeafUse, PastUse, compute_leaf_use
from fleetcast.placement.queues.credits import Bank, compute_banks
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.tree import QueueTree
from fleetcast.placement.reclaim.victims import ChosenVictims

MAX_SHAPES = 2000  # newest requests that are packed for
SHAPES_BETWEEN_REBUILDS = 500
FEWEST_SHAPES = 50


def make_empty_view(gpus: Sequence[int]) -> ClusterView:
    """Return the view of an empty fleet whose nodes have these GPU counts.

    Nothing else is known of the nodes.
    """
    topology = Topology.build([NodeSpec(f"n{row + 1:04d}", each) for row, each in enumerate(gpus)])
    n = len(gpus)
    usable = np.arange(max(gpus))[None, :] < np.array(gpus)[:, None]
    unknown = np.full(n, np.nan)
    return ClusterView(
        topology=topology,
        milli=convert_to_milli(usable),
        usable=usable,
        state=np.full(n, NodeState.IN_SERVICE, np.int8),
        p_fail=np.zeros(n),
        p_slow=np.zeros(n),
        reason={},
        holders=np.full(usable.shape, -1, np.int32),
        jobs=(),
        free_cpus=unknown,
        free_host_memory_gib=unknown,
    )


@dataclass(slots=True)
class PlayedCharges:
    """The charges and banked credits of a play, as the ledger would store them."""

    tree: QueueTree
    opened: dict[int, Charge] = field(default_factory=dict)  # job → its charge
    closed: list[Charge] = field(default_factory=list)
    banks: dict[str, Bank] = field(default_factory=dict)
    _past: PastUse = field(init=False)

    def __post_init__(self) -> None:
        self._past = PastUse(self.tree.policy.half_life_s)

    def update_banks(self, now_ms: int) -> None:
        """Advance the banked credits to now. The caller does this before opening or closing a charge."""
        self.banks |= compute_banks(self.tree, self.banks, self.opened.values(), now_ms)

    def close_charge(self, job: int, now_ms: int, outcome: str) -> None:
        self.update_banks(now_ms)
        charge = replace(self.opened.pop(job), ended_ms=now_ms, outcome=outcome)
        self._past.add(charge)
        self.closed.append(charge)

    def resize_charge(self, job: int, share: float, now_ms: int) -> None:
        """Close the charge of a job whose size changes, and open one for `share` times its GPUs."""
        charge = self.opened[job]
        self.close_charge(job, now_ms, "resized")
        held = tuple(replace(row, gpus=row.gpus * share) for row in charge.held)
        self.opened[job] = replace(charge, held=held, held_ms=now_ms, started_ms=now_ms, expected_s=None)

    def compute_leaf_use_now(self, now_ms: int) -> dict[str, LeafUse]:
        return compute_leaf_use(self.opened.values(), self._past, now_ms)


@dataclass(frozen=True, slots=True)
class JobHold:
    """The GPUs that a running job holds, and since when. quota: those that count against its queue."""

    request: PlacementRequest
    ranks: tuple[RankPlacement, ...]
    started_ms: int
    quota: QueueHold | None = None

    @property
    def gpus(self) -> int:
        return sum(len(rank.gpus) for rank in self.ranks)


@dataclass(slots=True)
class ServedPlan:
    """A scheduler for plays that starts jobs by the plan that the placer serves.

    ask: function that returns the request of a job, with a unique id. It returns None if the job can
    never be placed. forgets: whether shares count only the GPUs that are held now, as Kueue's do.
    reclaim: stops running jobs for requests that wait. None if jobs always run to their end. It needs a tree.
    faults: nodes that fail. They need `reclaim`, which records the jobs that stop.
    elastic: the sizes of elastic gangs, which shrink for the head of the queue and grow back. It needs `reclaim`.
    waits: the waiting entries of the last pass. holds: running job → the GPUs that it holds.
    """

    view: ClusterView
    ask: Callable[[int], PlacementRequest | None]
    tree: QueueTree | None = None
    forgets: bool = False
    reclaim: PlayedReclaim | None = None
    faults: PlayedFaults | None = None
    elastic: ElasticProgress | None = None
    runs: SeenRuns = field(default_factory=SeenRuns)
    played: PlayedCharges | None = field(init=False)
    waits: tuple[Wait, ...] = ()
    holds: dict[int, JobHold] = field(default_factory=dict)
    _waiting: dict[str, WaitingEntry] = field(default_factory=dict)
    _jobs: dict[str, int] = field(default_factory=dict)  # request id → job, while it waits or runs
    _running: RunningJobs = NO_RUNNING_JOBS
    _gone: set[str] = field(default_factory=set)
    _shapes: RecentShapes = field(default_factory=lambda: RecentShapes(MAX_SHAPES))
    _demand: ShapeDemand | None = None
    _queued_ms: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.played = PlayedCharges(self.tree) if self.tree is not None else None

    def add_waiting_job(self, job: int, now_s: float) -> None:
        request = self.ask(job)
        if request is None:
            return
        if self.reclaim is not None and job not in self._queued_ms:
            self.reclaim.record_arrival(job, request)
        queued_ms = self._queued_ms.setdefault(job, round(now_s * 1000))
        self._waiting[request.request_id] = WaitingEntry(request, queued_ms)
        self._jobs[request.request_id] = job
        self._shapes.add(make_member_shape(request), request.members.desired)
        if self._shapes.version % min(max(len(self._shapes) // 4, 10), SHAPES_BETWEEN_REBUILDS) == 0:
            self._demand = (
                make_shape_demand(self._shapes.count_members(), ()) if len(self._shapes) >= FEWEST_SHAPES else None
            )

    def end_job(self, job: int, now_s: float, refused: bool) -> None:
        hold, now_ms = self.holds[job], round(now_s * 1000)
        self._release_gpus(job, now_ms, "expired" if refused else "finished")
        if not refused:
            self.runs.record_end(hold.gpus, (now_ms - hold.started_ms) / 1000)
            del self._queued_ms[job]
            if self.reclaim is not None:
                self.reclaim.record_end(hold.request)

    def _release_gpus(self, job: int, now_ms: int, outcome: str) -> None:
        """Release the GPUs of a job. The view follows in `_drop_gone_jobs`."""
        hold = self.holds.pop(job)
        if self.played is not None:
            self.played.close_charge(job, now_ms, outcome)
        self._gone.add(hold.request.job_name)

    def _drop_gone_jobs(self) -> None:
        """Remove the jobs that have released their GPUs from the view and from the table of running jobs."""
        if self._gone:
            self.view = remove_jobs(self.view, self._gone)
            self._running = self._running.select_rows(
                np.array([name not in self._gone for name in self._running.names], bool)
            )
            self._gone.clear()

    def start_jobs(self, now_s: float) -> Sequence[int] | None:
        if self.faults is not None and self.faults.advance(now_s):
            self._apply_faults(self.faults, now_s)
        if not self._waiting:
            self.waits = ()
            self._drop_gone_jobs()
            self._grow_gangs(self.view, now_s)
            return None
        now_ms, started = round(now_s * 1000), []
        found = self._run_pass(now_ms)
        while found.proposal is not None and found.proposal.victims is not None:
            if self._is_patient(found.proposal.request, now_s):
                break
            started.append(self._reclaim_gpus(found.proposal, found.proposal.victims, now_s))
            found = self._run_pass(now_ms)
        before, self.view, self.waits = self.view, found.view, found.waiting
        self._running = found.running
        for entry, decision in found.placed:
            started.append(self._record_start(entry, decision, before, now_ms))
        self._grow_gangs(found.make_unclaimed_view(), now_s)
        return started

    def _grow_gangs(self, free: ClusterView, now_s: float) -> None:
        """Let elastic gangs grow on GPUs that the last pass left free. free: the view without what it reserved."""
        if self.elastic is None or self.reclaim is None or not self.elastic.desired.keys() & self.holds.keys():
            return
        now_ms, by_name = round(now_s * 1000), {hold.request.job_name: job for job, hold in self.holds.items()}
        held = {job: (hold.request, hold.gpus, hold.started_ms) for job, hold in self.holds.items()}
        facts = self.reclaim.make_input(held, now_ms)
        if facts is None:
            return
        ages_s = ((now_ms - facts.jobs.started_ms) / 1000).tolist()
        left_s = np.full(len(facts.jobs), np.nan)
        for row in np.flatnonzero(facts.jobs.gang_desired > facts.jobs.members).tolist():
            total_s = self.runs.times.estimate_run_s(int(facts.jobs.gpus[row]), 0.5, age_s=ages_s[row])
            left_s[row] = total_s - ages_s[row]
        waiting = [wait.entry.request for wait in self.waits]
        options = Options(now_ms=now_ms, demand=self._demand)
        for growth in propose_growth(free, facts.jobs, left_s, waiting, options):
            job = by_name[growth.job]
            self._resize(job, growth.places, now_s)

    def _resize(self, job: int, changed: Sequence[RankPlacement], now_s: float) -> None:
        """Add the GPUs of `changed` to a gang, or take them away if it holds them."""
        assert self.elastic is not None
        hold, g, nodes = self.holds[job], self.view.milli.shape[1], self.view.topology.names
        row, each = self.view.inventory.row, hold.request.gpus_per_node
        old, other = (
            {row[rank.node] * g + gpu for rank in ranks for gpu in rank.gpus} for ranks in (hold.ranks, changed)
        )
        new = old ^ other
        flat = sorted(new)
        ranks = tuple(
            RankPlacement(at // each, nodes[flat[at] // g], tuple(gpu % g for gpu in flat[at : at + each]))
            for at in range(0, len(flat), each)
        )
        if old > new:
            self.view = release_gpus(self.view, np.array(sorted(old - new), np.int64))
        else:
            self.view = assign_gpus(self.view, hold.request.job_name, np.array(sorted(new - old), np.int64))
        share, quota = len(new) / len(old), hold.quota
        if quota is not None:
            quota = QueueHold(quota.leaf, {key: amount * share for key, amount in quota.amounts.items()})
        if self.played is not None:
            self.played.resize_charge(job, share, round(now_s * 1000))
        self.holds[job] = replace(hold, ranks=ranks, quota=quota)
        is_own = np.array([name == hold.request.job_name for name in self._running.names], bool)
        self._running = replace(self._running, gpus=np.where(is_own, len(new), self._running.gpus))
        self.elastic.resize(job, len(ranks), now_s)
        self.elastic.request_pass(now_s + DWELL_MS / 1000)

    def _run_pass(self, now_ms: int) -> Plan:
        """Return the plan of one pass. Nothing of it has happened yet."""
        self._drop_gone_jobs()
        options, turns = Options(now_ms=now_ms, demand=self._demand), self._make_turns(now_ms)
        facts = None
        if self.reclaim is not None:
            earlier = ((job, hold) for job, hold in self.holds.items() if hold.started_ms < now_ms)
            held = {job: (hold.request, hold.gpus, hold.started_ms) for job, hold in earlier}
            facts = self.reclaim.make_input(held, now_ms)
        queue = tuple(self._waiting.values())
        return plan(queue, self.view, self._running, self.runs.times, options, turns, reclaim=facts)

    def _is_patient(self, request: PlacementRequest, now_s: float) -> bool:
        """Return whether a request must wait longer before jobs are stopped for it. If so, ask for a pass then."""
        assert self.reclaim is not None
        due_s = self._waiting[request.request_id].queued_ms / 1000 + self.reclaim.policy.patience_s
        if due_s > now_s:
            self.reclaim.progress.request_pass(due_s)
        return due_s > now_s

    def _reclaim_gpus(self, proposal: ReclaimProposal, victims: ChosenVictims, now_s: float) -> int:
        """Stop the victims of a proposal, and start the request that they stop for. Returns its job.

        What else the pass would have placed is left to the next one. So nothing is placed on what the victims free
        before the request that they stop for.
        """
        assert self.reclaim is not None
        now_ms, payer = round(now_s * 1000), self._jobs[proposal.request.request_id]
        by_name = {hold.request.job_name: job for job, hold in self.holds.items()}
        self._stop_jobs([by_name[name] for name in victims.chosen.jobs], payer, now_s)
        for shrink in proposal.shrinks:
            self._resize(by_name[shrink.job], shrink.ranks, now_s)
        free, request, ranks = self.view, proposal.request, victims.decision.ranks
        self.view = add_request_placement(free, request, ranks)
        begun = make_begun_jobs([(request, sum(len(rank.gpus) for rank in ranks))], now_ms)
        self._running = self._running.append_rows(begun)
        return self._record_start(self._waiting[request.request_id], victims.decision, free, now_ms)

    def _apply_faults(self, faults: PlayedFaults, now_s: float) -> None:
        """Stop the jobs on nodes that have failed, and take these nodes out of service. Repaired nodes return."""
        row, lost = self.view.inventory.row, faults.list_stopped_nodes()
        jobs = [job for job, hold in self.holds.items() if any(row[rank.node] in lost for rank in hold.ranks)]
        self._stop_jobs(jobs, FAULT, now_s)
        self.view = faults.mark_nodes(self.view)

    def _stop_jobs(self, jobs: Sequence[int], payer: int, now_s: float) -> None:
        """Stop running jobs, which then wait again."""
        assert self.reclaim is not None
        for job in jobs:
            self._release_gpus(job, round(now_s * 1000), "failed" if payer == FAULT else "preempted")
            self.reclaim.progress.stop_attempt(job, now_s, payer)
            self.add_waiting_job(job, now_s)
        self._drop_gone_jobs()

    def _record_start(self, entry: WaitingEntry, decision: Decision, before: ClusterView, now_ms: int) -> int:
        """Record that a waiting entry has started, and return its job. before: the view before the placement."""
        job = self._jobs.pop(entry.request.request_id)
        del self._waiting[entry.request.request_id]
        quota = None
        if self.played is not None:
            leaf = self.played.tree.find_request_leaf(entry.request)
            quota = QueueHold(leaf, sum_placed_amounts(decision, before)) if self.reclaim is not None else None
            charge = make_placement_charge(
                entry.request, decision, leaf, before, self.runs.times, now_ms, entry.queued_ms
            )
            self.played.opened[job] = replace(charge, started_ms=now_ms)
        self.holds[job] = JobHold(entry.request, decision.ranks, now_ms, quota)
        if self.elastic is not None and job in self.elastic.desired:
            self.elastic.size[job] = len(decision.ranks)
        return job

    def _make_turns(self, now_ms: int) -> QueueTurns:
        if self.played is None:
            return ONE_LINE
        self.played.update_banks(now_ms)
        use = self.played.compute_leaf_use_now(now_ms)
        if self.forgets:
            use = {leaf: LeafUse(mine.held, 0.0) for leaf, mine in use.items()}
        banked = {name: bank.banked for name, bank in self.played.banks.items()}
        jobs = {hold.request.job_name: hold.quota for hold in self.holds.values() if hold.quota is not None}
        return TreeTurns(self.played.tree, use, self.view, self.runs.times, now_ms, banked, jobs or None)
