"""The calls by which an executor reads and changes Jobs, their pods and Kueue's workloads.

All methods raise SourceError if the API server does not answer, and KubeRefused if it refuses.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from fleetcast.clients.kube_api import KubeApi, KubeRefused
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import SourceError
from fleetcast.schedulers.kubernetes_replace import HostNode
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
    make_eviction,
    make_mark_fields,
)

PODS, POLICY = "/api/v1", "/apis/policy/v1"
NODES = "/api/v1/nodes"
KUEUE_VERSIONS = ("/apis/kueue.x-k8s.io/v1beta2", "/apis/kueue.x-k8s.io/v1beta1")  # the newest first
KUEUE_JOB_UID = "kueue.x-k8s.io/job-uid"
MANAGER = "fleetcast"
FORBIDDEN, GONE, CONFLICT = 403, 404, 409
BUDGET = "DisruptionBudget"  # the cause of a refused eviction
AT_ONCE = 16  # evictions
KubeStruct = TypeVar("KubeStruct", bound=msgspec.Struct)


class _Collection(NamedTuple):
    """A kind of Job: the path of its API, its name there, and the label by which its pods name their owner.

    absent: the answers of a server without such an object.
    """

    api: str
    name: str
    uid_label: str
    absent: tuple[int, ...]


JOBS = _Collection("/apis/batch/v1", "jobs", "batch.kubernetes.io/controller-uid", (GONE,))
JOBSETS = _Collection(  # our account needs no right to JobSets where they are not installed
    "/apis/jobset.x-k8s.io/v1alpha2", "jobsets", "jobset.sigs.k8s.io/jobset-uid", (GONE, FORBIDDEN)
)


class KubeJobs:
    """Jobs and JobSets of one cluster, through its API server."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    def read_server_ms(self, clock: Clock) -> int:
        """Return the server's time in its last answer in Unix ms. Without one, return that of a clock."""
        return clock.now_ms() if self._api.server_ms is None else self._api.server_ms

    async def close(self) -> None:
        await self._api.close()

    async def read_job(self, address: JobAddress) -> StoppableJob | None:
        """Return the Job, or else the JobSet, with this name. Returns None if the cluster has neither."""
        for kind in (JOBS, JOBSETS):
            try:
                body = await self._api.get(f"{kind.api}/namespaces/{address.namespace}/{kind.name}/{address.name}")
            except KubeRefused as error:
                if error.status not in kind.absent:
                    raise
            else:
                return _decode_job(body, kind)
        return None

    async def list_stopped_jobs(self) -> list[StoppableJob]:
        """Return the Jobs and JobSets that an action has stopped, and that were not resumed."""
        found = []
        for kind in (JOBS, JOBSETS):
            try:
                bodies, _ = await self._api.list_all(f"{kind.api}/{kind.name}", STOPPED)
            except KubeRefused as error:
                if error.status not in kind.absent:
                    raise
            else:
                found += [_decode_job(body, kind) for body in bodies]
        return found

    async def list_pods(self, job: StoppableJob) -> list[StoppablePod]:
        """Return all pods of a Job that exist, whatever their phase."""
        labels = f"{_get_collection(job).uid_label}={job.metadata.uid}"
        return await self._list(f"{PODS}/namespaces/{job.metadata.namespace}/pods", StoppablePod, labels)

    async def read_node(self, name: str) -> HostNode | None:
        """Return a node, or None if the cluster has no such node."""
        try:
            return _decode(await self._api.get(f"{NODES}/{name}"), HostNode)
        except KubeRefused as error:
            if error.status == GONE:
                return None
            raise

    async def write_mark(
        self,
        job: StoppableJob,
        mark: StopMark,
        *,
        is_open: bool,
        spec: Mapping[str, Any] | None = None,
        version: str = "",
    ) -> StoppableJob:
        """Write a mark, and fields of the spec with it. Returns the changed Job.

        version: the version that the Job must have, or "" for any.
        """
        meta, kind = job.metadata, _get_collection(job)
        guard = {"uid": meta.uid} | ({"resourceVersion": version} if version else {})
        thing: dict[str, Any] = {"metadata": {**guard, **make_mark_fields(mark, is_open=is_open)}}
        if spec is not None:
            thing["spec"] = spec
        path = f"{kind.api}/namespaces/{meta.namespace}/{kind.name}/{meta.name}"
        return _decode_job(await self._api.merge(path, thing, MANAGER), kind)

    async def evict(self, namespace: str, uids: Mapping[str, str], grace_s: float, *, is_trial: bool = False) -> str:
        """Evict pods, or ask whether the server would. Returns the first refusal by a disruption budget, or "".

        uids: name → UID. A pod that has ended meanwhile counts as evicted.
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

    async def explain_evictions(
        self, namespace: str, pods: Sequence[StoppablePod], grace_s: float, healthy: Sequence[StoppablePod]
    ) -> str:
        """Return why the cluster would not let all these pods be evicted at once, or "".

        healthy: those that count as disruptions. A pod on a lost node is disrupted already.
        """
        if why := await self.evict(namespace, list_uids(pods), grace_s, is_trial=True):
            return why
        budgets = f"{POLICY}/namespaces/{namespace}/poddisruptionbudgets"
        return explain_budgets(healthy, await self._list(budgets, DisruptionBudget))

    async def end_pod(self, namespace: str, pod: StoppablePod) -> None:
        """Record that a pod of a lost node has failed, as its kubelet cannot. A pod that is gone counts as ended."""
        path = f"{PODS}/namespaces/{namespace}/pods/{pod.metadata.name}/status"
        thing = {"metadata": {"uid": pod.metadata.uid}, "status": {"phase": "Failed"}}
        try:
            await self._api.merge(path, thing, MANAGER)
        except KubeRefused as error:
            if error.status not in (GONE, CONFLICT):
                raise

    async def find_workload(self, job: StoppableJob) -> StoppableWorkload | None:
        """Return the workload by which Kueue admits a Job, or None for a Job that Kueue does not manage."""
        if not job.metadata.get_word(KUEUE_QUEUE):
            return None
        path, labels = f"namespaces/{job.metadata.namespace}/workloads", f"{KUEUE_JOB_UID}={job.metadata.uid}"
        found = await self._list_kueue(path, StoppableWorkload, labels)
        return next((workload for workload in found if workload.status.admission), None)

    async def list_cluster_queues(self) -> list[KueueClusterQueue]:
        return await self._list_kueue("clusterqueues", KueueClusterQueue)

    async def set_workload_active(self, job: StoppableJob, mark: StopMark, *, is_active: bool) -> None:
        path = f"namespaces/{job.metadata.namespace}/workloads/{mark.workload}"
        for version in KUEUE_VERSIONS:
            try:
                await self._api.merge(f"{version}/{path}", {"spec": {"active": is_active}}, MANAGER)
                return
            except KubeRefused as error:
                if error.status != GONE:
                    raise

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


def list_uids(pods: Sequence[StoppablePod]) -> dict[str, str]:
    """Return pod → UID."""
    return {pod.metadata.name: pod.metadata.uid for pod in pods}


def _get_collection(job: StoppableJob) -> _Collection:
    return JOBSETS if job.is_set else JOBS


def _decode_job(body: bytes | msgspec.Raw, kind: _Collection) -> StoppableJob:
    """Decode a Job or a JobSet. Raises SourceError."""
    job = _decode(body, StoppableJob)
    job.is_set = kind is JOBSETS
    return job


def _decode(body: bytes | msgspec.Raw, kind: type[KubeStruct]) -> KubeStruct:
    """Decode an object. Raises SourceError."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = explain_decode_error(error, msgspec.json.Decoder(kind).decode, body)
        raise SourceError(f"not a {kind.__name__}: {why}") from None
