"""Nodes that running jobs leave for a gang that lost some: their search, and the life of the actions.

The jobs are chosen like those that stop for a waiting request (`propose_reclaim`). In one transaction they are asked to
stop, and the replacement of the gang is proposed. From then on its GPUs are held for the gang. It is sent once all the
jobs have left. If one of them does not leave, the replacement is withdrawn, and recovery takes its next step.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from msgspec import structs

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.actions.action import JobAction, make_recovery_payer
from fleetcast.placement.actions.life import ActionRecord, ActionState
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.promised import count_promises
from fleetcast.placement.plan.reclaiming import ReclaimInput, ReclaimProposal, propose_reclaim
from fleetcast.placement.plan.timeline import Release, Timeline, estimate_releases
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.standing import QueueStanding
from fleetcast.placement.queues.tree import ReclaimPolicy
from fleetcast.placement.reclaim.eligibility import Eligibility
from fleetcast.placement.recovery.replacement import BorrowedNodes, BorrowSearch
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.gang_losses import GangLosses
from fleetcast.service.placer.promised_sets import FAILED, PromisedSets
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.reclaim import SENT_MS, ReclaimAdvisor, make_actions, withdraw_proposals_of_jobs
from fleetcast.service.placer.view import ObservedFleet

NEVER_MS = 1 << 62
STOPPED_FOR_GANG = "the job should leave nodes to a gang that lost some"
NO_LONGER_NEEDED = "the gang no longer needs the nodes of this job"


@dataclass
class BorrowingPass:
    """The facts by which one pass looks for jobs that leave nodes to gangs. Each job leaves for one gang at most.

    find_loss_ms: returns since when nodes of a gang are lost, or None if its attempt may not borrow again.
    """

    fleet: ObservedFleet
    options: Options
    facts: ReclaimInput
    standing: QueueStanding
    holds: dict[str, QueueHold]
    find_loss_ms: Callable[[str, int, Collection[str]], int | None]
    found: dict[str, tuple[BorrowedNodes, ReclaimProposal]] = field(default_factory=dict)  # by gang, the last one

    @cached_property
    def releases(self) -> Sequence[Release]:
        return estimate_releases(self.fleet.view, self.fleet.running, self.fleet.run_times, self.options.now_ms)

    def make_search(self, row: int, view: ClusterView, lost: Collection[str]) -> BorrowSearch | None:
        """Return the search for one gang, or None if it may not borrow. lost: its nodes that failed.

        view: the fleet, with the GPUs that this pass gives to other gangs.
        """
        jobs = self.fleet.jobs
        loss_ms = self.find_loss_ms(jobs.names[row], int(jobs.attempt[row]), lost)
        return None if loss_ms is None else partial(self._find_nodes, row, view, loss_ms)

    def _find_nodes(
        self, row: int, view: ClusterView, loss_ms: int, missing: PlacementRequest, options: Options
    ) -> BorrowedNodes | None:
        """Return the nodes that jobs would leave for the missing members of a gang, or None.

        Its queue then holds what it held before the loss.
        """
        jobs, tree, now_ms = self.fleet.jobs, self.facts.tree, self.options.now_ms
        job, leaf = jobs.names[row], jobs.leaf[row]
        queue, user = tree.split_leaf(leaf)
        payer = make_recovery_payer(job, int(jobs.attempt[row]))
        request = structs.replace(missing, request_id=payer, queue=queue, user=user)
        if jobs.job_class[row]:
            request = structs.replace(request, class_=jobs.job_class[row])
        if not leaf or tree.find_known_leaf(request) != leaf:
            return None
        standing = self.standing.copy()
        standing.add_held(leaf, standing.compute_amounts(request, request.members.min), -1.0)
        barred = {**self.facts.barred, job: Eligibility.IN_ACTION}
        facts = replace(self.facts, impatient=payer, barred=barred, rigid=self.facts.rigid | {job})
        proposal = propose_reclaim(request, view, standing, self.holds, facts, options, NEVER_MS, loss_ms)
        victims = proposal.victims
        stopping = (*(shrink.job for shrink in proposal.shrinks), *(victims.chosen.jobs if victims else ()))
        if victims is None or not stopping or self._fits_soon(job, request, options):
            return None
        after_s = max(0.0, self.facts.policy.patience_s - (now_ms - loss_ms) / 1000)
        found = BorrowedNodes(victims.decision.ranks, stopping, victims.chosen.cost_gpu_s, after_s)
        self.found[job] = found, proposal
        return found

    def _fits_soon(self, job: str, request: PlacementRequest, options: Options) -> bool:
        """Return whether jobs that end soon make room for a request, while its gang holds its nodes."""
        soon_ms = self.options.now_ms + round(1000 * self.facts.policy.patience_s)
        ending = [release for release in self.releases if release.end_ms <= soon_ms and release.job != job]
        return fits_now(request, Timeline(self.fleet.view, ending).make_view_after(len(ending)), options)

    def choose(self, job: str) -> ReclaimProposal | None:
        """Record that the last search for a gang is used, so that its jobs leave for no other gang.

        Returns the proposal if its jobs may be asked now.
        """
        nodes, proposal = self.found[job]
        shares = dict.fromkeys(nodes.jobs, 1.0)
        for shrink in proposal.shrinks:
            shares[shrink.job] = shrink.gpus / max(1, int(self.fleet.jobs.gpus[self.fleet.jobs.row[shrink.job]]))
        for name in shares.keys() & self.holds.keys():
            self.standing.add_held(self.holds[name].leaf, self.holds[name].amounts, -shares[name])
        self.facts = replace(
            self.facts,
            barred={**self.facts.barred, **dict.fromkeys(shares, Eligibility.IN_ACTION)},
            rigid=self.facts.rigid.union(shares),
        )
        return proposal if proposal.sends and not nodes.after_s else None


class NodeBorrowing:
    """The life of replacements for which other jobs leave their nodes."""

    def __init__(self, queues: ServedQueues, advisor: ReclaimAdvisor, sets: PromisedSets) -> None:
        self._control: ActionControl = advisor.control
        self._queues, self._advisor, self._sets = queues, advisor, sets
        self._losses = GangLosses(queues.ledger)

    def begin_pass(self, fleet: ObservedFleet, options: Options) -> BorrowingPass | None:
        """Return the facts of a pass, or None without queues."""
        facts, turns = self._advisor.make_input(fleet, options.now_ms), self._queues.make_turns(fleet)
        if facts is None or turns.standing is None:
            return None
        promises = self._sets.make_promises(options.now_ms)
        standing = count_promises(turns.standing, turns.holds, facts.leaving, promises).copy()
        find_loss_ms = partial(self._find_loss_ms, options.now_ms)
        return BorrowingPass(fleet, options, facts, standing, dict(turns.holds), find_loss_ms)

    def _find_loss_ms(self, now_ms: int, job: str, attempt: int, nodes: Collection[str]) -> int | None:
        """Return when an attempt lost the first of these nodes, or now. Returns None after a failed borrowing."""
        borrowing = self._losses.find_borrowing((job, attempt))
        if borrowing and self._control.get_action(borrowing).state is not ActionState.SEEN:
            return None
        lost_ms = self._losses.find_loss_ms((job, attempt), nodes)
        return now_ms if lost_ms is None else lost_ms

    def record_losses(self, fleet: ObservedFleet, now_ms: int) -> None:
        """Record which gangs have lost nodes. The caller holds the ledger's transaction."""
        self._losses.update(fleet, now_ms, self._queues.time.ahead_ms)

    def send(
        self, action: JobAction, proposal: ReclaimProposal, fleet: ObservedFleet, policy: ReclaimPolicy, now_ms: int
    ) -> None:
        """Ask the jobs of a proposal to leave, all or none, and propose the replacement that follows.

        action: the replacement. The caller holds the ledger's transaction.
        """
        if self._control.find_open_action_of(action.job) is not None:
            return
        by_ms = now_ms + round(1000 * policy.grace_s) + SENT_MS
        stops = make_actions(proposal, fleet, policy, now_ms, self._advisor.find_executor, by_ms)
        withdraw_proposals_of_jobs(self._control, {stop.job for stop in stops}, STOPPED_FOR_GANG, now_ms)
        found = self._control.propose(stops, now_ms)
        ids = tuple(record.action_id for record in found.opened)
        why = "" if not found.declined else found.declined[0][1]
        if not why and not self._control.send(ids, now_ms):
            why = self._control.explain_stop()
        if why:
            for action_id in ids:
                self._control.withdraw(action_id, why, now_ms)
            return
        last_ms = by_ms + round(1000 * policy.grace_s) + SENT_MS
        executor = self._advisor.find_executor(action.kind, action.job, now_ms)
        following = structs.replace(action, executor=executor, by_ms=last_ms, after=ids)
        for opened in self._control.propose([following], now_ms, may_repeat=True).opened:
            self._losses.record_borrowing(action.job, action.attempt, opened.action_id)

    def is_due(self, record: ActionRecord, fleet: ObservedFleet) -> bool:
        """Return whether a replacement is sent now: all jobs have left its nodes, and its attempt still runs."""
        before = [self._control.get_action(action_id) for action_id in record.action.after]
        has_nodes = all(row.state is ActionState.SEEN for row in before)
        still_runs = (record.action.job, record.action.attempt) in fleet.seen
        return has_nodes and still_runs and not self._control.explain_stop()

    def explain_failure(self, record: ActionRecord) -> str:
        """Return a sentence about the job that does not leave its nodes, or "" if each has left or may still leave."""
        for row in map(self._control.get_action, record.action.after):
            if row.state in FAILED or row.state is ActionState.WITHDRAWN:
                return f"{row.action.job} does not leave its nodes"
        return ""

    def withdraw(self, record: ActionRecord, why: str, now_ms: int, *, has_ended: bool = False) -> None:
        """Withdraw a replacement, and the stops for it that no executor may have begun."""
        self._control.withdraw(record.action_id, why, now_ms, has_ended=has_ended)
        for row in map(self._control.get_action, record.action.after):
            if row.is_open and not row.may_have_begun:
                self._control.withdraw(row.action_id, NO_LONGER_NEEDED, now_ms)
