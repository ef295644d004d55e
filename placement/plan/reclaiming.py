"""The jobs that a pass would stop for the head of the queue: patience first, then the cheapest victims.

The head gets GPUs back that its queue is guaranteed, or that its class may take (`fleetcast.placement.reclaim`).
Jobs that end soon by themselves are waited for. What a pass finds is a proposal: nothing is stopped here.
The placer sends a proposal to executors only if the pass says that it may be sent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.elastic.shrink import MAY_SHRINK, GangShrink, ShrunkGangs, find_shrinks, saves_time
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.slots import list_held_parts
from fleetcast.placement.machines.view import Advice, ClusterView
from fleetcast.placement.machines.words import format_count
from fleetcast.placement.plan.promised import SendingBounds
from fleetcast.placement.plan.turns import count_gpus_by_resource
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.standing import QueueStanding
from fleetcast.placement.queues.tree import QueueTree, ReclaimPolicy, join_some
from fleetcast.placement.reclaim.cost import StopCosts, StoppableJobs, compute_stop_costs
from fleetcast.placement.reclaim.eligibility import (
    Eligibility,
    compute_eligibility,
    explain_no_victims,
    make_taker,
)
from fleetcast.placement.reclaim.fairness import Queues, VictimSearcher, find_fair_victims
from fleetcast.placement.reclaim.room import HostAmounts
from fleetcast.placement.reclaim.victims import ChosenVictims, NoVictims, find_victims

ReclaimCode = Literal["found", "patience", "bound", "none"]
NO_VICTIMS = {
    "no_gpus": "the request needs no GPU",
    "refused": "the freed GPUs would not have the required shape",
    "quota": "its queue may hold no more",
    "unfair": "the queues that would give hold no more than their share",
}


@dataclass(frozen=True, slots=True)
class ReclaimInput:
    """The facts by which a pass may propose to stop running jobs.

    jobs: the running jobs of the board. Jobs that the pass itself places are not among them.
    find: the search for victims. Plays compare it with others. propose: called instead of `propose_reclaim`, with
    its arguments. leaving: job → the share of its GPUs that it was
    asked to give up and still holds. barred: job → why nobody can stop it now.
    failed: request_id → the jobs that did not stop for it. exhausted: requests for which no further jobs are
    stopped. rigid: the jobs whose size no executor can change. bounds: None if they are unknown. impatient: a
    request that counts as if it had waited long enough. clock_steps_ms: request_id → by how much the clock was set
    while the request waits. savers: the jobs whose executor has them write a checkpoint before they stop.
    """

    policy: ReclaimPolicy
    tree: QueueTree
    jobs: RunningJobs
    find: VictimSearcher = find_victims
    propose: Callable[..., "ReclaimProposal"] | None = None
    leaving: Mapping[str, float] = field(default_factory=dict)
    barred: Mapping[str, Eligibility] = field(default_factory=dict)
    failed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    exhausted: frozenset[str] = frozenset()
    rigid: frozenset[str] = frozenset()
    bounds: SendingBounds | None = None
    impatient: str = ""
    clock_steps_ms: Mapping[str, int] = field(default_factory=dict)
    savers: frozenset[str] = frozenset()

    @property
    def may_send(self) -> bool:
        """Whether the placer lets executors act within the bounds. Otherwise a pass sends nothing."""
        return self.bounds is not None and self.policy.mode == "act" and not self.bounds.stopped

    def mask_jobs_that_save(self) -> NDArray[np.bool_]:
        """Return (j,) whether a job writes a checkpoint before it stops: its grace must be long enough."""
        saves = np.array([name in self.savers for name in self.jobs.names], bool)
        return np.asarray(saves & (self.jobs.checkpoint_cost_s <= self.policy.grace_s))


@dataclass(frozen=True, slots=True)
class ReclaimProposal:
    """The result of the search for jobs to stop for the head of the queue.

    code: "found", or the reason why no job would be stopped. victims: None unless found. kinds: why each victim
    may be stopped, in the order of the victims. costs: of all running jobs, by row of their table. shrinks: gangs that
    give up members instead. Then no job stops. sends: whether the placer lets executors act.
    """

    code: ReclaimCode
    request: PlacementRequest
    sentence: str
    victims: ChosenVictims | None = None
    kinds: tuple[Eligibility, ...] = ()
    costs: StopCosts | None = None
    shrinks: tuple[GangShrink, ...] = ()
    sends: bool = False


def propose_reclaim(
    request: PlacementRequest,
    view: ClusterView,
    standing: QueueStanding,
    holds: Mapping[str, QueueHold],
    facts: ReclaimInput,
    options: Options,
    shadow_ms: int,
    queued_ms: int,
    run_s: float | None = None,
) -> ReclaimProposal:
    """Return which running jobs would be stopped for a request that does not fit, or why none would be.

    view: the fleet, with what this pass has placed. standing, holds: the queues, and the jobs that count against
    them. shadow_ms: when the request should fit by itself. queued_ms: since when it waits. run_s: its run time at full
    size, None to compare no times. Elastic gangs shrink before any job stops. Queues give GPUs back before a class
    takes any. So the jobs of borrowing queues are tried first, and those that the class preempts join them only if that
    fails.
    """
    policy, now_ms = facts.policy, options.now_ms
    queued_ms += facts.clock_steps_ms.get(request.request_id, 0)
    if request.request_id in facts.exhausted:
        return ReclaimProposal("none", request, "stops no further job: two sets of jobs did not make room")
    if shadow_ms - now_ms <= 1000 * policy.patience_s:
        sentence = f"stops no job: jobs that end within {(shadow_ms - now_ms) / 1000:.0f} s make room"
        return ReclaimProposal("patience", request, sentence)
    if now_ms - queued_ms < 1000 * policy.patience_s and request.request_id != facts.impatient:
        waited_s = max(0, now_ms - queued_ms) / 1000
        sentence = f"stops no job yet: it has waited {waited_s:.0f} of {policy.patience_s:g} s"
        return ReclaimProposal("patience", request, sentence)
    taker = make_taker(request, facts.tree)
    barred = dict(facts.barred)
    barred.update(dict.fromkeys(facts.failed.get(request.request_id, ()), Eligibility.FAILED))
    eligibility = compute_eligibility(facts.jobs, taker, standing, policy, now_ms, barred)
    costs = compute_job_costs(facts.jobs, view, now_ms, facts.mask_jobs_that_save())
    elastic = eligibility.copy()
    elastic[[facts.jobs.row[name] for name in facts.rigid & facts.jobs.row.keys()]] = Eligibility.NO_EXECUTOR
    queues = Queues(standing, holds, closed=_count_closed_gpus(view))
    shrunk = find_shrinks(request, view, facts.jobs, elastic, queues, options)
    loss = "" if shrunk is None else _explain_loss(request, shrunk, eligibility, facts.jobs, shadow_ms - now_ms, run_s)
    if loss:
        return ReclaimProposal("none", request, loss)
    if shrunk is not None:
        return _make_shrink_proposal(request, shrunk, costs, facts, now_ms)
    rows = facts.jobs.find_rows(view.jobs)  # -1: what this pass has placed
    why: NoVictims | None = None
    for tier in (Eligibility.RECLAIM, Eligibility.PREEMPT):
        may = (eligibility > 0) & (eligibility <= tier)
        if not (may & (eligibility == tier)).any():
            continue
        outranked = frozenset(
            facts.jobs.names[row] for row in np.flatnonzero(may & (eligibility == Eligibility.PREEMPT))
        )
        cost = np.append(np.where(may, costs.total, np.inf), np.inf)[rows]
        host = HostAmounts(*(np.append(held, np.nan)[rows] for held in (facts.jobs.cpus, facts.jobs.host_memory_gib)))
        found = find_fair_victims(request, view, cost, options, replace(queues, outranked=outranked), host, facts.find)
        if isinstance(found, ChosenVictims):
            return _judge_bounds(request, found, facts, eligibility, costs, now_ms)
        why = found
    return ReclaimProposal("none", request, _explain_failure(why, eligibility))


def _count_closed_gpus(view: ClusterView) -> dict[str, float]:
    """Return resource → the free GPUs on closed, lost or failing nodes: no stopped job starts there."""
    closed = ~view.is_open | (view.advice == Advice.DRAIN)
    return count_gpus_by_resource(view, view.usable & (view.holders < 0) & closed[:, None])


def _explain_not_sent(facts: ReclaimInput, gpus: Mapping[str, float], now_ms: int) -> tuple[str, str]:
    """Return the bound that a set exceeds by itself, and why the set is only named and not sent.

    gpus: job → the GPUs that it loses. Both are "" if the set may be sent, or if nothing is ever sent. The mode
    "advise" names a set beyond a bound all the same, and says so.
    """
    if facts.bounds is None:
        return "", ""
    leaf = {name: facts.jobs.leaf[facts.jobs.row[name]] for name in gpus}
    taken: dict[str, float] = {}
    for name, count in gpus.items():
        taken[leaf[name]] = taken.get(leaf[name], 0.0) + count
    bound = facts.bounds.explain_bound(taken, now_ms)
    if facts.policy.mode != "act":
        return "", bound and f"the mode act would not send it: {bound}"
    advice = facts.bounds.explain_advice(leaf)
    return bound, advice and f"not sent: {advice}"


def _explain_loss(
    request: PlacementRequest,
    shrunk: ShrunkGangs,
    eligibility: NDArray[np.int8],
    jobs: RunningJobs,
    wait_ms: int,
    run_s: float | None,
) -> str:
    """Return why gangs do not shrink: only their own queue is served, and it would lose time. Returns "" otherwise.

    A request to which other queues or classes owe GPUs does not wait for its own queue's sake.
    """
    owed = np.isin(eligibility, [kind for kind in MAY_SHRINK if kind is not Eligibility.OWN_QUEUE]).any()
    if run_s is None or owed or saves_time(request, shrunk, jobs, wait_ms / 1000, run_s):
        return ""
    names = join_some([one.job for one in shrunk.shrinks])
    return f"shrinks no gang: it would end earlier by less time than {names} would end later"


def _make_shrink_proposal(
    request: PlacementRequest, shrunk: ShrunkGangs, costs: StopCosts, facts: ReclaimInput, now_ms: int
) -> ReclaimProposal:
    bound, advice = _explain_not_sent(facts, {one.job: float(one.gpus) for one in shrunk.shrinks}, now_ms)
    if bound:
        return ReclaimProposal("bound", request, f"shrinks no gang: {bound}")
    sends, why = facts.may_send and not advice, f"; {advice}" if advice else ""
    names = join_some([f"{one.job} to {format_count(one.size, 'member')}" for one in shrunk.shrinks])
    sentence = f"{'shrinks' if sends else 'would shrink'} {names} for it, and stops no job{why}"
    return ReclaimProposal("found", request, sentence, shrunk.placed, (), costs, shrunk.shrinks, sends)


def _judge_bounds(
    request: PlacementRequest,
    found: ChosenVictims,
    facts: ReclaimInput,
    eligibility: NDArray[np.int8],
    costs: StopCosts,
    now_ms: int,
) -> ReclaimProposal:
    """Return the proposal to stop these victims, or the bound that forbids it."""
    rows = tuple(facts.jobs.row[name] for name in found.chosen.jobs)
    hours = found.chosen.cost_gpu_s / 3600
    if hours > facts.policy.gpu_h_per_h:
        allowed = f"preempt_gpu_h_per_h allows {facts.policy.gpu_h_per_h:g}"
        sentence = f"stops no job: {hours:.1f} GPU-hours would be lost, and {allowed}"
        return ReclaimProposal("bound", request, sentence)
    taken = {name: float(facts.jobs.gpus[row]) for name, row in zip(found.chosen.jobs, rows, strict=True)}
    bound, advice = _explain_not_sent(facts, taken, now_ms)
    if bound:
        return ReclaimProposal("bound", request, f"stops no job: {bound}")
    sends = facts.may_send and not advice
    verb, why = "stops" if sends else "would stop", f"; {advice}" if advice else ""
    lost = f"at {hours:.1f} GPU-hours of lost work{why}"
    sentence = f"{verb} {format_count(len(rows), 'job')} for it ({join_some(found.chosen.jobs)}), {lost}"
    kinds = tuple(Eligibility(int(eligibility[row])) for row in rows)
    return ReclaimProposal("found", request, sentence, found, kinds, costs, sends=sends)


def _explain_failure(why: NoVictims | None, eligibility: NDArray[np.int8]) -> str:
    """Describe why no job is stopped."""
    if why is not None and why.code == "no_room":
        return f"stops no job: with all that may stop gone, {why.members} of {format_count(why.needed, 'member')} fit"
    if why is not None:
        return f"stops no job: {NO_VICTIMS[why.code]}"
    barred = explain_no_victims(eligibility)
    return f"stops no job: {barred}" if barred else "stops no job: none runs"


def compute_job_costs(
    jobs: RunningJobs, view: ClusterView, now_ms: int, on_demand: NDArray[np.bool_] | None = None
) -> StopCosts:
    """Return the cost of stopping each running job at `now_ms`. Times of -1 are unknown.

    view: gives the nodes of the jobs, and their risk. on_demand: (j,) whether a job writes a checkpoint before it
    stops. None: no job does.
    """
    return compute_stop_costs(
        StoppableJobs(
            gpus=jobs.gpus.astype(np.float64),
            started_ms=np.where(jobs.started_ms >= 0, jobs.started_ms, np.nan),
            checkpoint_ms=np.where(jobs.checkpoint_ms >= 0, jobs.checkpoint_ms, np.nan),
            checkpoint_cost_s=jobs.checkpoint_cost_s,
            failures_s=_estimate_failure_intervals(jobs, view),
            restart_s=jobs.restart_s,
            on_demand=np.zeros(len(jobs), bool) if on_demand is None else on_demand,
        ),
        now_ms,
    )


def _estimate_failure_intervals(jobs: RunningJobs, view: ClusterView) -> NDArray[np.float64]:
    """Return (j,) mean seconds between failures of a job's nodes.

    It is NaN if the risk of a node is unknown, and for jobs whose cost does not depend on it. A job fails with the
    first of its nodes. So its rate is the sum of their rates.
    """
    found = np.full(len(jobs), np.nan)
    rows = np.flatnonzero((jobs.checkpoint_ms < 0) & ~np.isnan(jobs.checkpoint_cost_s))
    if not len(rows) or np.isnan(view.p_fail).all():
        return found
    at = {name: at for at, name in enumerate(view.jobs)}
    own = np.array([at.get(jobs.names[row], -1) for row in rows.tolist()], np.int64)
    counts = np.zeros(len(view.jobs), bool)
    counts[own[own >= 0]] = True
    parts, (nodes, gpus) = list_held_parts(view.holders, view.parts), view.holders.shape
    is_own = counts[parts.job]
    job, node = np.divmod(np.unique(parts.job[is_own] * nodes + parts.gpu[is_own] // gpus), nodes)
    with np.errstate(divide="ignore"):
        rate = -np.log1p(-view.p_fail) / view.risk_horizon_s
        interval_s = 1 / np.bincount(job, rate[node], len(view.jobs))
    found[rows[own >= 0]] = interval_s[own[own >= 0]]
    return found
