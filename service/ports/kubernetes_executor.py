"""The executor that stops and shrinks Kubernetes Jobs, and replaces pods on lost or failing nodes.

    Job that ignores disruptions   mark → evict every pod → suspend      resume: unsuspend
    any other Job                  mark → suspend                        resume: unsuspend
    Job under Kueue                mark → spec.active = false            resume: spec.active = true

A JobSet is treated like any other Job: it suspends its Jobs. A suspended Job deletes its pods, which end within
their own grace and do not count as failed. Evicted pods would count. Nothing is written before every check has
passed, so a refusal leaves the gang as it was. The mark on the Job makes each step repeatable. A stopped Job is
resumed once the payer's Job has its nodes, and at `by_ms` at the latest. A gang that only restarts elsewhere is
resumed once its pods are gone.

A mark has times of the system clock, which outlive the process. Within a process the steady clock measures the rest,
so a clock that is set resumes no Job early or late. Whether a pod is overdue is read on the server's clock.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from fleetcast.clients.kube_api import KubeAccount, KubeApi, KubeRefused
from fleetcast.fleet.clock import Clock, SystemClock
from fleetcast.fleet.errors import SourceError
from fleetcast.ingest.preemptible import LABEL, parse_preemptible
from fleetcast.placement.actions.action import ActionKind
from fleetcast.schedulers.executor import ACCEPTED, ActionOrder, SendOutcome, SendReply, make_refusal
from fleetcast.schedulers.kubernetes_replace import (
    HostNode,
    ReplaceMethod,
    choose_replace_method,
    explain_missing_pods,
    explain_open_nodes,
    list_lost_pods,
)
from fleetcast.schedulers.kubernetes_shrink import plan_shrink
from fleetcast.schedulers.kubernetes_stop import (
    JobAddress,
    StopMark,
    StoppableJob,
    StoppablePod,
    explain_other_places,
    explain_own_preemption,
    parse_job_name,
)
from fleetcast.service.plugins import read_options
from fleetcast.service.ports.kube_jobs import CONFLICT, KubeJobs, list_uids
from fleetcast.service.ports.kube_objects import check_server_address

logger = logging.getLogger(__name__)

KINDS = frozenset({ActionKind.PREEMPT, ActionKind.REPLACE, ActionKind.SHRINK})
TOO_MANY, SERVER_FAULT = 429, 500
TRIES = 5  # further tries to write a mark while a controller writes to the Job


class KubernetesExecutorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the executor, described in docs/schedulers/kubernetes.md."""

    prefix: str = ""
    server: str = ""
    token_file: str = ""
    ca_file: str = ""


def make_kubernetes_executor(options: Mapping[str, Any]) -> "KubernetesExecutor":
    """Make the built-in executor `kubernetes`. Raises ConfigError."""
    given = read_options(options, KubernetesExecutorOptions)
    check_server_address(given.server)
    return KubernetesExecutor(KubeApi(KubeAccount(given.server, given.token_file, given.ca_file)), given.prefix)


class _Plan(NamedTuple):
    """A checked action. mark: what the Job is marked with. spec: fields of the Job that change with the mark."""

    mark: StopMark
    spec: Mapping[str, Any] | None = None


class KubernetesExecutor:
    """An executor for batch/v1 Jobs and JobSets, with or without Kueue."""

    def __init__(self, api: KubeApi, prefix: str = "", clock: Clock | None = None) -> None:
        self._jobs, self._prefix, self._clock = KubeJobs(api), prefix, clock or SystemClock()
        self._ends_ms: dict[str, float] = {}  # action → steady ms at which its Job is resumed at the latest

    def explain_inability(self, kind: str, job: str) -> str:
        if parse_job_name(job, self._prefix) is None:
            return f"{job!r} is not named like {self._prefix}NAMESPACE/NAME, as Jobs of Kubernetes are"
        return "" if kind in KINDS else f"the executor kubernetes cannot {kind} a Job"

    async def send(self, order: ActionOrder) -> SendReply:
        if why := self.explain_inability(order.kind, order.job):
            return make_refusal(why)
        return await _answer(self._begin(order, self._locate_job(order.job)))

    async def follow(self, orders: Sequence[ActionOrder]) -> Sequence[SendReply]:
        """Finish the steps that were interrupted, and resume Jobs whose payer has its nodes."""
        replies = [await _answer(self._follow_one(order)) for order in orders]
        try:
            await self._resume_jobs()
        except (KubeRefused, SourceError) as error:
            logger.warning("stopped Jobs are not resumed yet: %s", error)
        return replies

    async def close(self) -> None:
        await self._jobs.close()

    async def _begin(self, order: ActionOrder, address: JobAddress, tries: int = TRIES) -> SendReply:
        """Check everything, mark the Job, and begin. Raises SourceError or KubeRefused.

        If the Job changes after the checks, they are made again.
        """
        job = await self._jobs.read_job(address)
        if job is None:
            return make_refusal("the cluster has no such Job")
        if job.mark and job.mark.action == order.action_id:
            return await self._continue(job, job.mark, order)
        if job.is_stopped_by_us:
            return make_refusal("another action has stopped it")
        pods = await self._jobs.list_pods(job)
        if order.kind == ActionKind.PREEMPT and not _list_active_pods(pods, order):
            return ACCEPTED  # the attempt has ended by itself: nothing is left to do
        planners = {
            ActionKind.PREEMPT: self._plan_stop,
            ActionKind.REPLACE: self._plan_replacement,
            ActionKind.SHRINK: self._plan_shrink,
        }
        plan = await planners[ActionKind(order.kind)](order, job, pods)
        if isinstance(plan, str):
            return make_refusal(plan)
        mark = msgspec.structs.replace(plan.mark, since_ms=self._clock.now_ms())
        self._measure_rest_ms(mark)
        version = job.metadata.resource_version
        try:
            job = await self._jobs.write_mark(job, mark, is_open=not mark.only_pods, spec=plan.spec, version=version)
        except KubeRefused as error:
            if error.status != CONFLICT or not tries:
                raise
            return await self._begin(order, address, tries - 1)
        return await self._continue(job, mark, order)

    async def _plan_stop(self, order: ActionOrder, job: StoppableJob, pods: Sequence[StoppablePod]) -> _Plan | str:
        """Return how to stop a Job, or why it must not be stopped. Raises SourceError or KubeRefused."""
        pods = [pod for pod in pods if pod.is_active]
        workload = await self._jobs.find_workload(job)
        why = _explain_protection(job, pods) or explain_other_places(pods, {rank.node for rank in order.ranks})
        if workload and not why:
            why = explain_own_preemption(workload, await self._jobs.list_cluster_queues())
        why = why or await self._jobs.explain_evictions(job.metadata.namespace, pods, order.grace_s, pods)
        name = workload.metadata.name if workload else ""
        return why or _Plan(StopMark(order.action_id, order.payer, order.by_ms, list_uids(pods), name))

    async def _plan_replacement(
        self, order: ActionOrder, job: StoppableJob, pods: Sequence[StoppablePod]
    ) -> _Plan | str:
        """Return what to replace, or why nothing is replaced. Raises SourceError or KubeRefused."""
        named = {rank.node for rank in order.ranks}
        pods = [pod for pod in pods if not pod.has_ended and pod.spec.node_name]
        nodes = await self._read_nodes(named)
        lost = {name for name in named if name not in nodes or not nodes[name].is_ready}
        leaving = [pod for pod in pods if pod.spec.node_name in named]
        if why := explain_missing_pods(pods, named) or explain_open_nodes(leaving, nodes):
            return why
        workload = await self._jobs.find_workload(job)
        is_all = len(leaving) == len(pods)
        method = choose_replace_method(job, workload, lost, named, is_all=is_all)
        if isinstance(method, str):
            return method
        only_pods = method is ReplaceMethod.PODS
        stopped = leaving if only_pods else pods
        healthy = [pod for pod in stopped if pod.is_active and pod.spec.node_name not in lost]
        why = _explain_protection(job, healthy) if healthy else ""
        active = [pod for pod in stopped if pod.is_active]
        why = why or await self._jobs.explain_evictions(job.metadata.namespace, active, order.grace_s, healthy)
        mark = StopMark(
            order.action_id,
            order.payer,
            order.by_ms,
            list_uids(stopped),
            workload.metadata.name if workload and not only_pods else "",
            restarts=not only_pods,
            only_pods=only_pods,
        )
        return why or _Plan(mark)

    async def _plan_shrink(self, order: ActionOrder, job: StoppableJob, pods: Sequence[StoppablePod]) -> _Plan | str:
        """Return how to shrink a Job, or why it keeps its size. Raises SourceError or KubeRefused.

        The mark and the size are one write, so the mark is done at once.
        """
        named = {rank.node for rank in order.ranks}
        size = plan_shrink(job, [pod for pod in pods if not pod.has_ended], named)
        if isinstance(size, str):
            return size
        leaving = [pod for pod in pods if pod.is_active and pod.spec.node_name in named]
        why = _explain_protection(job, leaving)
        why = why or await self._jobs.explain_evictions(job.metadata.namespace, leaving, order.grace_s, leaving)
        uids = list_uids(leaving)
        mark = StopMark(order.action_id, order.payer, order.by_ms, uids, is_done=True, only_pods=True)
        return why or _Plan(mark, {"parallelism": size, "completions": size})

    async def _follow_one(self, order: ActionOrder) -> SendReply:
        """Continue an action. The reply is ACCEPTED if the Job has ended meanwhile."""
        address = parse_job_name(order.job, self._prefix)
        job = await self._jobs.read_job(address) if address else None
        if job is None or job.mark is None or job.mark.action != order.action_id:
            return ACCEPTED
        return await self._continue(job, job.mark, order)

    async def _continue(self, job: StoppableJob, mark: StopMark, order: ActionOrder) -> SendReply:
        """Make the remaining steps of an action. Raises SourceError or KubeRefused.

        If all pods of the mark are gone by themselves, another attempt is left untouched. The action is then accepted
        as done, unless it is a replacement and the other attempt uses the nodes that it leaves.
        """
        if mark.is_done or not (mark.only_pods or job.is_stopped_by_us):
            return ACCEPTED
        if mark.workload:
            await self._jobs.set_workload_active(job, mark, is_active=False)
            return await self._write_done(job, mark)
        present = await self._jobs.list_pods(job)
        pods = {pod.metadata.uid: pod for pod in present if pod.is_active}
        is_other = any(pod.spec.node_name for uid, pod in pods.items() if uid not in mark.pods.values())
        left = {name: uid for name, uid in mark.pods.items() if uid in pods}
        if is_other and not mark.only_pods:
            await self._jobs.write_mark(job, mark, is_open=False)
            has_left = not left and not (mark.restarts and _list_active_pods(present, order))
            return ACCEPTED if has_left else make_refusal("another attempt runs meanwhile")
        if job.ignores_disruptions and (why := await self._jobs.evict(job.metadata.namespace, left, order.grace_s)):
            raise SourceError(f"some pods are not evicted yet: {why}")
        if not mark.only_pods:
            return await self._write_done(job, mark, {"suspend": True})
        if await self._are_gone(job, mark, present) and not left:
            return await self._write_done(job, mark)
        return ACCEPTED

    async def _write_done(self, job: StoppableJob, mark: StopMark, spec: Mapping[str, Any] | None = None) -> SendReply:
        done = msgspec.structs.replace(mark, is_done=True)
        await self._jobs.write_mark(job, done, is_open=not mark.only_pods, spec=spec)
        return ACCEPTED

    async def _resume_jobs(self) -> None:
        """Resume each stopped Job that may start again, or whose action has expired."""
        jobs = await self._jobs.list_stopped_jobs()
        open_actions = {job.mark.action for job in jobs if job.mark is not None}
        self._ends_ms = {action: end_ms for action, end_ms in self._ends_ms.items() if action in open_actions}
        for job in jobs:
            try:
                await self._resume_if_due(job)
            except KubeRefused as error:  # it may concern this Job alone
                logger.warning("%s is not resumed yet: %s", job.metadata.name, error)

    async def _resume_if_due(self, job: StoppableJob) -> None:
        mark = job.mark
        if mark is None:
            return
        if self._measure_rest_ms(mark) > 0 and not (mark.is_done and await self._may_start(job, mark)):
            return
        if mark.workload:
            await self._jobs.set_workload_active(job, mark, is_active=True)
            await self._jobs.write_mark(job, mark, is_open=False)
        else:
            await self._jobs.write_mark(job, mark, is_open=False, spec={"suspend": False})

    def _measure_rest_ms(self, mark: StopMark) -> float:
        """Return the ms until a Job is resumed at the latest.

        For a mark that an earlier process wrote, the first call uses the system clock. More than the whole time of the
        action is never left.
        """
        steady_ms, now_ms = self._clock.steady_ms(), self._clock.now_ms()
        if mark.action not in self._ends_ms:
            whole_ms = mark.by_ms - mark.since_ms if mark.since_ms else math.inf
            self._ends_ms[mark.action] = steady_ms + min(mark.by_ms - now_ms, whole_ms)
        return self._ends_ms[mark.action] - steady_ms

    async def _may_start(self, job: StoppableJob, mark: StopMark) -> bool:
        if mark.restarts:
            return await self._are_gone(job, mark, await self._jobs.list_pods(job))
        return await self._has_nodes(mark.payer)

    async def _are_gone(self, job: StoppableJob, mark: StopMark, pods: Sequence[StoppablePod]) -> bool:
        """Return whether all pods of a mark have ended, after recording as failed those that a lost node cannot end."""
        left = [pod for pod in pods if pod.metadata.uid in mark.pods.values() and not pod.has_ended]
        deleted = {pod.spec.node_name for pod in left if pod.spec.node_name and not pod.is_active}
        lost = list_lost_pods(left, await self._read_nodes(deleted), self._jobs.read_server_ms(self._clock))
        for pod in lost:
            await self._jobs.end_pod(job.metadata.namespace, pod)
        return len(lost) == len(left)

    async def _read_nodes(self, names: set[str]) -> dict[str, HostNode]:
        """Return name → node, without nodes that the cluster has deleted."""
        found = await asyncio.gather(*(self._jobs.read_node(name) for name in sorted(names)))
        return {name: node for name, node in zip(sorted(names), found, strict=True) if node is not None}

    async def _has_nodes(self, payer: str) -> bool:
        """Return whether a request that is named like a Job has all its pods on nodes."""
        address = parse_job_name(payer, self._prefix)
        job = await self._jobs.read_job(address) if address else None
        if job is None:
            return False
        bound = sum(bool(pod.spec.node_name) and pod.is_active for pod in await self._jobs.list_pods(job))
        return bound >= max(job.wanted_pods, 1)

    def _locate_job(self, job: str) -> JobAddress:
        address = parse_job_name(job, self._prefix)
        assert address is not None
        return address


def _list_active_pods(pods: Sequence[StoppablePod], order: ActionOrder) -> list[StoppablePod]:
    """Return the active pods on the nodes that an action names."""
    named = {rank.node for rank in order.ranks}
    return [pod for pod in pods if pod.is_active and pod.spec.node_name in named]


def _explain_protection(job: StoppableJob, pods: Sequence[StoppablePod]) -> str:
    """Return how the owner forbids to stop a Job, or ""."""
    words = [meta.get_word(LABEL) for meta in (job.metadata, *(pod.metadata for pod in pods))]
    return f"its owner forbids it by {LABEL}" if any(parse_preemptible(word) is False for word in words) else ""


async def _answer(reply: Awaitable[SendReply]) -> SendReply:
    """Return a reply, or the reply for the error that occurred instead."""
    try:
        return await reply
    except SourceError as error:
        return SendReply(SendOutcome.UNREACHABLE, str(error))
    except KubeRefused as error:
        may_pass = error.status in (CONFLICT, TOO_MANY) or error.status >= SERVER_FAULT
        return SendReply(SendOutcome.UNREACHABLE if may_pass else SendOutcome.REFUSED, str(error))
