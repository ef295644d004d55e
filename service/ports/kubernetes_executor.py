"""The executor that stops Kubernetes Jobs by evictions, or by Kueue.

    Job that ignores disruptions   mark → evict every pod → suspend      resume: unsuspend
    any other Job                  mark → suspend                        resume: unsuspend
    Job under Kueue                mark → spec.active = false            resume: spec.active = true

A suspended Job deletes its pods, and they have their own grace. These pods do not count as failed, evicted pods
would. Nothing is written before every check has passed, so a refusal leaves the gang as it was. The mark on the Job
makes each step repeatable. A stopped Job is resumed once the payer's Job has its nodes, and at `by_ms` at the
latest.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fleetcast.clients.kube_api import KubeAccount, KubeApi, KubeRefused
from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import SourceError
from fleetcast.ingest.preemptible import LABEL, parse_preemptible
from fleetcast.schedulers.executor import ActionOrder, SendOutcome, SendReply
from fleetcast.schedulers.kubernetes_stop import (
    KUEUE_QUEUE,
    STOPPED,
    DisruptionBudget,
    JobAddress,
    KueueClusterQueue,
    StopMark,
    StoppableJob,
    StoppablePod,
    StoppableWorkload,
    explain_budgets,
    explain_other_places,
    explain_own_preemption,
    make_eviction,
    make_mark_fields,
    parse_job_name,
)
from fleetcast.service.plugins import read_options
from fleetcast.service.ports.kube_objects import check_server_address

logger = logging.getLogger(__name__)

JOBS, PODS, POLICY = "/apis/batch/v1", "/api/v1", "/apis/policy/v1"
KUEUE_VERSIONS = ("/apis/kueue.x-k8s.io/v1beta2", "/apis/kueue.x-k8s.io/v1beta1")  # the newest first
JOB_UID, KUEUE_JOB_UID = "batch.kubernetes.io/controller-uid", "kueue.x-k8s.io/job-uid"
MANAGER = "fleetcast"
PREEMPT = "preempt"
GONE, CONFLICT, TOO_MANY, SERVER_FAULT = 404, 409, 429, 500
BUDGET = "DisruptionBudget"  # the cause of a refused eviction
AT_ONCE = 16  # evictions
TRIES = 5  # of a mark, when a controller writes to the Job at the same time
TAKEN = SendReply(SendOutcome.TAKEN)
KubeStruct = TypeVar("KubeStruct", bound=msgspec.Struct)


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


def _read_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class KubernetesExecutor:
    """An executor for batch/v1 Jobs, with or without Kueue."""

    def __init__(self, api: KubeApi, prefix: str = "", now_ms: Callable[[], int] = _read_clock_ms) -> None:
        self._api, self._prefix, self._now_ms = api, prefix, now_ms

    def explain_inability(self, kind: str, job: str) -> str:
        if parse_job_name(job, self._prefix) is None:
            return f"not named like {self._prefix}NAMESPACE/NAME"
        return "" if kind == PREEMPT else f"the executor kubernetes cannot {kind} a Job"

    async def send(self, order: ActionOrder) -> SendReply:
        if why := self.explain_inability(order.kind, order.job):
            return _refuse(why)
        return await _answer(self._stop(order, self._locate_job(order.job)))

    async def follow(self, orders: Sequence[ActionOrder]) -> Sequence[SendReply]:
        """Finish the stops that were interrupted, and resume Jobs whose payer has its nodes."""
        replies = [await _answer(self._follow_one(order)) for order in orders]
        try:
            await self._resume_jobs()
        except (KubeRefused, SourceError) as error:
            logger.warning("stopped Jobs are not resumed yet: %s", error)
        return replies

    async def close(self) -> None:
        await self._api.close()

    async def _stop(self, order: ActionOrder, address: JobAddress, tries: int = TRIES) -> SendReply:
        """Check everything, mark the Job, and stop it. Raises SourceError or KubeRefused.

        If the Job changes after the checks, they are made again.
        """
        job = await self._read_job(address)
        if job is None:
            return _refuse("the cluster has no such Job")
        if job.mark and job.mark.action == order.action_id:
            return await self._continue(job, job.mark, order.grace_s)
        if job.is_stopped_by_us:
            return _refuse("another action has stopped it")
        pods = [pod for pod in await self._list_pods(job) if pod.is_active]
        workload = await self._find_workload(job)
        why = _explain_protection(job, pods) or explain_other_places(pods, {rank.node for rank in order.ranks})
        if workload and not why:
            why = explain_own_preemption(workload, await self._list_kueue("clusterqueues", KueueClusterQueue))
        uids = {pod.metadata.name: pod.metadata.uid for pod in pods}
        why = why or await self._evict(address.namespace, uids, order.grace_s, is_trial=True)
        if not why:
            budgets = f"{POLICY}/namespaces/{address.namespace}/poddisruptionbudgets"
            why = explain_budgets(pods, await self._list(budgets, DisruptionBudget))
        if why:
            return _refuse(why)
        mark = StopMark(order.action_id, order.payer, order.by_ms, uids, workload.metadata.name if workload else "")
        try:
            job = await self._write_mark(job, mark, is_open=True, version=job.metadata.resource_version)
        except KubeRefused as error:
            if error.status != CONFLICT or not tries:
                raise
            return await self._stop(order, address, tries - 1)
        return await self._continue(job, mark, order.grace_s)

    async def _follow_one(self, order: ActionOrder) -> SendReply:
        """Continue an action. The reply is TAKEN if the Job has ended meanwhile."""
        address = parse_job_name(order.job, self._prefix)
        job = await self._read_job(address) if address else None
        if job is None or job.mark is None or job.mark.action != order.action_id:
            return TAKEN
        return await self._continue(job, job.mark, order.grace_s)

    async def _continue(self, job: StoppableJob, mark: StopMark, grace_s: float) -> SendReply:
        """Make the remaining steps of a stop. Raises SourceError or KubeRefused."""
        if mark.is_done or not job.is_stopped_by_us:
            return TAKEN
        if mark.workload:
            await self._set_workload_active(job, mark, is_active=False)
            await self._write_mark(job, msgspec.structs.replace(mark, is_done=True), is_open=True)
            return TAKEN
        pods = {pod.metadata.uid: pod for pod in await self._list_pods(job) if pod.is_active}
        if any(pod.spec.node_name for uid, pod in pods.items() if uid not in mark.pods.values()):
            await self._write_mark(job, mark, is_open=False)
            return _refuse("another attempt runs meanwhile")
        left = {name: uid for name, uid in mark.pods.items() if uid in pods}
        if job.ignores_disruptions and (why := await self._evict(job.metadata.namespace, left, grace_s)):
            raise SourceError(f"some pods are not evicted yet: {why}")
        await self._write_mark(job, msgspec.structs.replace(mark, is_done=True), is_open=True, suspend=True)
        return TAKEN

    async def _resume_jobs(self) -> None:
        """Resume each stopped Job whose payer has its nodes, or whose action has expired."""
        for job in await self._list(f"{JOBS}/jobs", StoppableJob, STOPPED):
            mark = job.mark
            is_over = mark is None or self._now_ms() >= mark.by_ms
            if mark is not None and (is_over or (mark.is_done and await self._has_nodes(mark.payer))):
                if mark.workload:
                    await self._set_workload_active(job, mark, is_active=True)
                    await self._write_mark(job, mark, is_open=False)
                else:
                    await self._write_mark(job, mark, is_open=False, suspend=False)

    async def _has_nodes(self, payer: str) -> bool:
        """Return whether a request that is named like a Job has all its pods on nodes."""
        address = parse_job_name(payer, self._prefix)
        job = await self._read_job(address) if address else None
        if job is None:
            return False
        bound = sum(bool(pod.spec.node_name) and pod.is_active for pod in await self._list_pods(job))
        return bound >= max(job.spec.parallelism, 1)

    async def _evict(self, namespace: str, uids: Mapping[str, str], grace_s: float, *, is_trial: bool = False) -> str:
        """Evict pods, or ask whether the server would. Returns the first refusal by a disruption budget, or "".

        A pod that has ended meanwhile counts as evicted. Raises SourceError or KubeRefused.
        """
        free = asyncio.Semaphore(AT_ONCE)

        async def evict_pod(name: str, uid: str) -> str:
            eviction = make_eviction(name, namespace, uid, grace_s)
            async with free:
                try:
                    path = f"{PODS}/namespaces/{namespace}/pods/{name}/eviction"
                    await self._api.create(path, eviction, is_trial=is_trial)
                except KubeRefused as error:
                    if error.status != GONE and error.cause != BUDGET:
                        raise
                    return str(error) if error.cause == BUDGET else ""
            return ""

        found = await asyncio.gather(*(evict_pod(*pod) for pod in uids.items()), return_exceptions=True)
        for outcome in found:
            if isinstance(outcome, BaseException):
                raise outcome
        return next((str(why) for why in found if why), "")

    async def _find_workload(self, job: StoppableJob) -> StoppableWorkload | None:
        """Return the workload by which Kueue admits a Job, or None for a Job that Kueue does not manage."""
        if not job.metadata.get_word(KUEUE_QUEUE):
            return None
        path, labels = f"namespaces/{job.metadata.namespace}/workloads", f"{KUEUE_JOB_UID}={job.metadata.uid}"
        found = await self._list_kueue(path, StoppableWorkload, labels)
        return next((workload for workload in found if workload.status.admission), None)

    async def _set_workload_active(self, job: StoppableJob, mark: StopMark, *, is_active: bool) -> None:
        path = f"namespaces/{job.metadata.namespace}/workloads/{mark.workload}"
        for version in KUEUE_VERSIONS:
            try:
                await self._api.merge(f"{version}/{path}", {"spec": {"active": is_active}}, MANAGER)
                return
            except KubeRefused as error:
                if error.status != GONE:
                    raise

    async def _write_mark(
        self, job: StoppableJob, mark: StopMark, *, is_open: bool, suspend: bool | None = None, version: str = ""
    ) -> StoppableJob:
        """Write a mark. Returns the changed Job. version: the version that the Job must have, or "" for any."""
        meta = job.metadata
        guard = {"uid": meta.uid} | ({"resourceVersion": version} if version else {})
        thing: dict[str, Any] = {"metadata": {**guard, **make_mark_fields(mark, is_open=is_open)}}
        if suspend is not None:
            thing["spec"] = {"suspend": suspend}
        body = await self._api.merge(f"{JOBS}/namespaces/{meta.namespace}/jobs/{meta.name}", thing, MANAGER)
        return _decode(body, StoppableJob)

    async def _read_job(self, address: JobAddress) -> StoppableJob | None:
        try:
            body = await self._api.get(f"{JOBS}/namespaces/{address.namespace}/jobs/{address.name}")
        except KubeRefused as error:
            if error.status == GONE:
                return None
            raise
        return _decode(body, StoppableJob)

    async def _list_pods(self, job: StoppableJob) -> list[StoppablePod]:
        labels = f"{JOB_UID}={job.metadata.uid}"
        return await self._list(f"{PODS}/namespaces/{job.metadata.namespace}/pods", StoppablePod, labels)

    async def _list(self, path: str, kind: type[KubeStruct], labels: str = "") -> list[KubeStruct]:
        bodies, _ = await self._api.list_all(path, labels)
        return [_decode(body, kind) for body in bodies]

    async def _list_kueue(self, path: str, kind: type[KubeStruct], labels: str = "") -> list[KubeStruct]:
        """List objects of Kueue in the newest version that the server knows. Empty if Kueue is not installed."""
        for version in KUEUE_VERSIONS:
            try:
                return await self._list(f"{version}/{path}", kind, labels)
            except KubeRefused as error:
                if error.status != GONE:
                    raise
        return []

    def _locate_job(self, job: str) -> JobAddress:
        address = parse_job_name(job, self._prefix)
        assert address is not None
        return address


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


def _refuse(why: str) -> SendReply:
    return SendReply(SendOutcome.REFUSED, why)


def _decode(body: bytes | msgspec.Raw, kind: type[KubeStruct]) -> KubeStruct:
    """Decode an object. Raises SourceError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = explain_decode_error(error, msgspec.json.Decoder(kind).decode, body)
        raise SourceError(f"not a {kind.__name__}: {why}") from None
