"""The source over an API server in memory: lists, watches, restarts, and what is missed between them."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from fleetcast.checks import check_source
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.events import NodeEvent
from fleetcast.ingest.kubernetes.asked_gpus import read_asked_gpus
from fleetcast.ingest.kubernetes.objects import Container, PodSpec, Resources
from fleetcast.ingest.kubernetes.source import KubernetesSource
from fleetcast.ingest.source import Batch
from tests.ingest.small_kubernetes import (
    CREATED,
    CREATED_MS,
    Reply,
    SmallKubernetes,
    condition,
    ended,
    job,
    meta,
    pod,
    running,
    template,
)

NOW_MS = CREATED_MS + 60_000


class Followed:
    """A source over a small cluster, in a loop of its own, as the pipeline drives it."""

    def __init__(self, server: SmallKubernetes, position: dict[str, Any] | None = None, **options: Any) -> None:
        self.server = server
        self.clock = ManualClock(NOW_MS)
        self.source = KubernetesSource(Entities(), self.clock, options, server=server)
        if position is not None:
            self.source.seek(json.loads(json.dumps(position)))
        self._runner = asyncio.Runner()
        self._taken: asyncio.Task[Batch] | None = None

    def __enter__(self) -> "Followed":
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        if self._taken is not None:
            self._taken.cancel()
            await asyncio.gather(self._taken, return_exceptions=True)
        await self.source.close()
        await self.source.close()

    def told(self, quiet_s: float = 0.15) -> list[Any]:
        """What it tells until its threads have taken all there is, and it is quiet."""
        batches = self._runner.run(self._take(quiet_s))
        return [event for batch in batches for event in (*batch.events, *batch.node_events)]

    def batches(self, quiet_s: float = 0.15) -> list[Batch]:
        return self._runner.run(self._take(quiet_s))

    async def _take(self, quiet_s: float) -> list[Batch]:
        batches: list[Batch] = []
        while True:
            self._taken = self._taken or asyncio.ensure_future(self.source.next())
            settled = self._is_settled()
            done, _ = await asyncio.wait({self._taken}, timeout=quiet_s)
            if done:
                taken, self._taken = self._taken, None
                batches.append(taken.result())
            elif settled and self._is_settled():
                return batches

    def _is_settled(self) -> bool:
        follower = self.source._follower
        return follower is not None and self.server.is_settled(follower._threads)

    def settle(self) -> list[Any]:
        """What it tells once what was missing stays missing."""
        first = self.told()
        self.clock.advance(3.0)
        return [*first, *self.told(0.8)]


def brief(events: list[Any]) -> list[tuple[Any, ...]]:
    """(job or node, attempt, type) of each."""
    return [
        (event.node, event.type) if isinstance(event, NodeEvent) else (event.job, event.attempt, _tag(event))
        for event in events
    ]


def _tag(event: Any) -> str:
    return str(type(event).__struct_config__.tag)


def gang(server: SmallKubernetes, name: str = "train", node: str = "n") -> None:
    server.put("jobs", job(name))
    for index in range(2):
        server.put("pods", running(pod(name, index), f"{node}{index}"))


def test_a_list_tells_of_a_gang_that_runs() -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        submitted, started = followed.told()
    assert submitted.gang == 2
    assert (submitted.gpus_per_node, submitted.cpus, submitted.host_memory_gib) == (8, 16, 128.0)
    assert (submitted.tenant, submitted.time_ms, submitted.sequence) == ("ml", CREATED_MS, 1)
    assert [(rank.rank, rank.node) for rank in started.ranks] == [(0, "n0"), (1, "n1")]
    assert (started.job, started.attempt, started.sequence, started.time_ms) == ("ml/train", 1, 3, CREATED_MS)


def test_a_watch_tells_the_same_as_a_list_in_whatever_order_pods_and_job_arrive() -> None:
    server = SmallKubernetes()
    with Followed(server) as followed:
        assert followed.told() == []
        server.put("pods", running(pod("train", 1), "n1"))
        server.put("pods", running(pod("train", 0), "n0"))
        assert followed.told() == []
        server.put("jobs", job("train"))
        watched = followed.told()
    with Followed(server) as rebuilt:
        assert rebuilt.told() == watched


def test_it_waits_until_the_whole_gang_runs_and_says_why() -> None:
    server = SmallKubernetes()
    server.put("jobs", job("train"))
    server.put("pods", running(pod("train", 0), "n0"))
    waiting = pod("train", 1)
    waiting["status"]["conditions"] = [condition("PodScheduled", "Unschedulable", "0/6 nodes are available", "False")]
    server.put("pods", waiting)
    with Followed(server) as followed:
        _, queued = followed.told()
        assert queued.reason == "Unschedulable: 0/6 nodes are available"
        server.put("pods", running(pod("train", 1), "n1"))
        assert brief(followed.told()) == [("ml/train", 1, "started")]


def test_a_job_that_completes_is_finished() -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        server.put("jobs", job("train", conditions=[condition("Complete")]))
        (finished,) = followed.told()
        server.delete("jobs", "train")
        assert followed.told() == []
    assert (_tag(finished), finished.sequence, finished.time_ms) == ("finished", 1 << 20, CREATED_MS)


FAILURES = [
    (1, "Error", "ValueError: no such file", "user"),
    (137, "OOMKilled", "", "out_of_memory"),
    (137, "Error", "", "unknown"),
    (1, "Error", "RuntimeError: CUDA error: uncorrectable ECC error encountered", "hardware"),
    (1, "Error", "NCCL watchdog timeout", "network"),
    (1, "Error", "torch.OutOfMemoryError: CUDA out of memory", "out_of_memory"),
    (139, "Error", "", "user"),
]


@pytest.mark.parametrize(("code", "reason", "message", "category"), FAILURES)
def test_a_failed_member_ends_the_attempt_with_its_reason(code: int, reason: str, message: str, category: str) -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        server.put("pods", ended(running(pod("train", 1), "n1"), code, reason, message))
        (failed,) = followed.told()
    assert (failed.category, failed.node, failed.attempt) == (category, "n1", 1)
    assert f"exit code {code}" in failed.message


def test_a_replaced_member_begins_the_next_attempt() -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        server.put("pods", ended(running(pod("train", 1), "n1"), 1))
        assert brief(followed.told()) == [("ml/train", 1, "failed")]
        later = {"creationTimestamp": "2026-11-21T10:00:30Z"}
        server.put("pods", running(pod("train", 1, life="b", **later), "n7"))
        submitted, started = followed.told()
    assert (submitted.attempt, started.attempt) == (2, 2)
    assert [rank.node for rank in started.ranks] == ["n0", "n7"]


def test_a_container_that_was_restarted_is_the_next_attempt_too() -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        again = running(pod("train", 1), "n1", restarts=1)
        last = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-11-21T10:00:20Z"}}
        again["status"]["containerStatuses"][0]["lastState"] = last
        server.put("pods", again)
        told = followed.told()
    assert brief(told) == [("ml/train", 1, "failed"), ("ml/train", 2, "submitted"), ("ml/train", 2, "started")]
    assert (told[0].category, told[0].time_ms) == ("out_of_memory", CREATED_MS + 20_000)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("PreemptionByScheduler", ("preempted", "kube-scheduler")),
        ("EvictionByEvictionAPI", ("preempted", "eviction")),
        ("DeletionByTaintManager", ("failed", "node_lost")),
        ("DeletionByPodGC", ("failed", "node_lost")),
    ],
)
def test_a_member_that_has_to_leave_says_for_whom(reason: str, told: tuple[str, str]) -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        leaves = running(pod("train", 0), "n0")
        leaves["metadata"]["deletionTimestamp"] = CREATED
        leaves["status"]["conditions"] = [condition("DisruptionTarget", reason, "higher priority")]
        server.put("pods", leaves)
        server.delete("pods", "train-0")
        (event,) = followed.told()
    assert (_tag(event), getattr(event, "by", "") or event.category) == told


def test_a_deleted_job_is_cancelled_whichever_deletion_is_seen_first() -> None:
    for first in ("pods", "jobs"):
        server = SmallKubernetes()
        gang(server)
        with Followed(server) as followed:
            followed.told()
            for collection in (first, "jobs" if first == "pods" else "pods"):
                for name in ("train",) if collection == "jobs" else ("train-0", "train-1"):
                    server.delete(collection, name)
            (failed,) = followed.settle()
        assert (failed.category, failed.message) == ("cancelled", "deleted")


def test_a_member_that_vanishes_is_a_failure_after_a_moment() -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        server.delete("pods", "train-1")
        assert followed.told() == []
        (failed,) = followed.settle()
    assert (failed.category, failed.node, failed.message) == ("unknown", "n1", "pod train-1 is gone")


def test_a_member_that_vanishes_with_its_node_is_lost_with_it() -> None:
    server = SmallKubernetes()
    for number in range(2):
        server.put("nodes", node(f"n{number}"))
    gang(server)
    with Followed(server) as followed:
        followed.told()
        server.put("nodes", node("n1", condition("Ready", "NodeStatusUnknown", "stopped posting", "Unknown")))
        assert brief(followed.told()) == [("n1", "lost")]
        server.delete("pods", "train-1")
        (failed,) = followed.settle()
    assert (failed.category, failed.node) == ("node_lost", "n1")


def test_a_suspended_job_is_preempted_and_waits_as_its_next_attempt() -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        suspended = job("train")
        suspended["spec"]["suspend"] = True
        server.put("jobs", suspended)
        told = followed.told()
        server.delete("pods", "train-0")
        server.delete("pods", "train-1")
        told += followed.settle()
        gang(server)
        again = followed.told()
    assert brief(told) == [("ml/train", 1, "preempted"), ("ml/train", 2, "submitted"), ("ml/train", 2, "queued")]
    assert [row for row in brief(again) if row[2] != "queued"] == [("ml/train", 2, "started")], "released, then started"


def test_a_job_of_the_same_name_goes_on_counting_attempts() -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        for name in ("train-0", "train-1"):
            server.delete("pods", name)
        server.delete("jobs", "train")
        again = job("train")
        again["metadata"]["uid"] = "another"
        server.put("jobs", again)
        told = followed.settle()
    assert brief(told) == [("ml/train", 1, "failed"), ("ml/train", 2, "submitted")]
    assert told[0].category == "cancelled"


def test_a_restart_goes_on_where_it_was() -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        position = followed.source.position()
    lists = server.lists
    server.put("pods", ended(running(pod("train", 1), "n1"), 137, "OOMKilled"))
    server.delete("pods", "train-1")  # what a list would not show
    with Followed(server, position) as again:
        (failed,) = again.told()
        assert server.lists == lists
    assert (failed.category, failed.attempt) == ("out_of_memory", 1)


def test_what_vanished_while_the_server_forgot_is_found_by_comparison() -> None:
    server = SmallKubernetes()
    gang(server, "gone")
    gang(server, "stays", "m")
    server.put("nodes", node("n0"))
    with Followed(server) as followed:
        followed.told()
        position = followed.source.position()
    for name in ("gone-0", "gone-1"):
        server.delete("pods", name)
    server.delete("jobs", "gone")
    server.delete("nodes", "n0")
    server.forget()
    with Followed(server, position) as again:
        told = again.settle()
    assert sorted(brief(told)) == [("ml/gone", 1, "failed"), ("n0", "lost")], "two threads, in any order"


def test_a_watch_that_is_told_410_lists_anew() -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        lists = server.lists
        server.say("pods", b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}')
        followed.told()
        assert server.lists == lists + 1
        server.put("jobs", job("train", conditions=[condition("Complete")]))
        assert brief(followed.told()) == [("ml/train", 1, "finished")]


def test_while_the_server_is_away_it_says_so_and_goes_on_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetcast.clients.kubernetes.RETRY_MOST_S", 0.1)
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        assert followed.source.health()["up"]
        server.away = True
        with pytest.raises(SourceError, match="nobody answers"):
            followed.told(10.0)
        server.away = False
        server.put("jobs", job("train", conditions=[condition("Failed", "DeadlineExceeded", "too long")]))
        told = _until(followed, lambda events: bool(events) and followed.source.health()["up"])
    assert told[0].category == "timeout"


def _until(followed: Followed, check: Callable[[list[Any]], bool]) -> list[Any]:
    events: list[Any] = []
    for _ in range(40):
        try:
            events += followed.told()
        except SourceError:
            continue
        if check(events):
            return events
    raise AssertionError(f"only {events}")


def test_a_cluster_without_jobsets_and_pytorchjobs_is_followed_all_the_same() -> None:
    server = SmallKubernetes(absent=("jobsets", "pytorchjobs"))
    gang(server)
    with Followed(server) as followed:
        assert len(followed.told()) == 2
        health = followed.source.health()
    assert health["up"]
    assert health["collections"]["jobsets"].startswith("absent: HTTP 404")


def test_a_collection_that_is_forbidden_for_a_moment_is_no_reason_to_take_its_pods_for_other_jobs() -> None:
    """A server that starts refuses, until it has read its roles."""
    server = SmallKubernetes()
    with Followed(server) as followed:
        followed.told()
        lists = server.lists
        server.forbidden = {"jobs"}
        _until(followed, lambda _: followed.source.health()["collections"]["jobs"].startswith("absent: HTTP 403"))
        gang(server)
        assert followed.told() == []
        server.forbidden = set()
        told = _until(followed, lambda events: len(events) >= 2)
        assert server.lists == lists
    assert brief(told) == [("ml/train", 1, "submitted"), ("ml/train", 1, "started")]


def test_an_object_that_is_none_is_counted_and_what_it_was_stays() -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server) as followed:
        followed.told()
        broken = running(pod("train", 1), "n1")
        broken["status"]["containerStatuses"] = "none"
        server.put("pods", broken)
        (batch,) = followed.batches()
        assert [error.reason for error in batch.bad] == ["kubernetes_object"]
        server.forget()
        server.put("pods", broken)
        assert followed.settle() == []
        assert followed.source.health()["bad"] >= 1


def node(name: str, *conditions: dict[str, Any], **spec: Any) -> dict[str, Any]:
    rows = [condition("Ready"), *conditions] if not any(row["type"] == "Ready" for row in conditions) else conditions
    about = {"name": name, "uid": f"u-{name}", "creationTimestamp": "2026-11-01T00:00:00Z"}
    about |= {"labels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}
    return {"metadata": about, "spec": spec, "status": {"conditions": list(rows)}}


def test_nodes_that_are_cordoned_lost_sick_and_well_again() -> None:
    server = SmallKubernetes()
    server.put("nodes", node("n1"))
    with Followed(server) as followed:
        assert followed.told() == []
        assert {name: spec.gpu_model for name, spec in followed.source.nodes().items()} == {"n1": "H100"}
        server.put("nodes", node("n1", unschedulable=True))
        server.put("nodes", node("n1"))
        server.put("nodes", node("n1", condition("Ready", "KubeletNotReady", "no runtime", "False")))
        server.put("nodes", node("n1"))
        server.put("nodes", node("n1", condition("GpuMemWatch", "DCGM", "DBE on GPU 3")))
        server.put("nodes", node("n1", condition("GpuMemWatch", "ok", status="False")))
        server.put("nodes", node("n1", condition("KernelDeadlock", "hung", "task blocked")))
        server.put("nodes", node("n1", condition("KernelDeadlock", "hung"), condition("GpuFailureExpected", "Xid")))
        server.delete("nodes", "n1")
        server.put("nodes", node("n1"))
        told = followed.told()
    assert [(event.type, event.severity) for event in told] == [
        *[("drain", None), ("undrain", None), ("lost", None), ("returned", None)],
        *[("health", "fatal"), ("health", "ok"), ("health", "warning"), ("lost", None), ("returned", None)],
        ("health", "ok"),
    ]
    assert len({event.sequence for event in told}) == len(told)
    assert {event.source for event in told} == {"kubernetes"}


def test_a_new_node_that_is_not_ready_yet_is_withheld_and_not_lost() -> None:
    server = SmallKubernetes()
    joining = node("n1", condition("Ready", "KubeletNotReady", status="False"))
    joining["metadata"]["creationTimestamp"] = "2026-11-21T09:59:00Z"
    server.put("nodes", joining)
    with Followed(server) as followed:
        (event,) = followed.told()
    assert (event.type, event.check, event.message) == ("withhold", "not_responding", "KubeletNotReady")


def test_a_jobset_is_one_job_ranked_by_its_jobs_and_their_indexes() -> None:
    server = SmallKubernetes()
    spec = {"parallelism": 2, "completions": 2, "template": {"spec": template(4)}}
    driver = {"parallelism": 1, "template": {"spec": {"containers": [{"name": "c"}]}}}
    rows = [
        {"name": "driver", "replicas": 1, "template": {"spec": driver}},
        {"name": "workers", "replicas": 2, "template": {"spec": spec}},
    ]
    server.put("jobsets", {"metadata": meta("set"), "spec": {"replicatedJobs": rows}, "status": {"restarts": 0}})
    for number in (1, 0):
        child = job(f"set-workers-{number}")
        child["metadata"]["labels"] = {"jobset.sigs.k8s.io/jobset-name": "set"}
        server.put("jobs", child)
        for index in (1, 0):
            server.put("pods", running(jobset_pod(number, index), f"n{number}{index}"))
    with Followed(server) as followed:
        submitted, started = followed.told()
        assert (submitted.job, submitted.gang, submitted.gpus_per_node) == ("ml/set", 4, 4)
        assert [rank.node for rank in started.ranks] == ["n00", "n01", "n10", "n11"]
        restarted = {"metadata": meta("set"), "spec": {"replicatedJobs": rows}, "status": {"restarts": 1}}
        server.put("pods", ended(running(jobset_pod(1, 0), "n10"), 1))
        server.put("jobsets", restarted)
        for number in (0, 1):
            for index in (0, 1):
                server.delete("pods", f"set-workers-{number}-{index}")
                server.put("pods", running(jobset_pod(number, index, "b"), f"m{number}{index}"))
        told = followed.settle()
    assert brief(told) == [("ml/set", 1, "failed"), ("ml/set", 2, "submitted"), ("ml/set", 2, "started")]


def jobset_pod(number: int, index: int, life: str = "") -> dict[str, Any]:
    thing = pod(f"set-workers-{number}", index, gpus=4, life=life)
    labels = {
        "jobset.sigs.k8s.io/jobset-name": "set",
        "jobset.sigs.k8s.io/job-global-index": str(number),
        "jobset.sigs.k8s.io/restart-attempt": "1" if life else "0",
    }
    thing["metadata"]["labels"] |= labels
    thing["metadata"]["ownerReferences"][0]["uid"] = f"{life}{number}"
    return thing


def pytorchjob(name: str, workers: int, **spec: Any) -> dict[str, Any]:
    replicas = {"Worker": {"replicas": workers, "template": {"spec": template()}}}
    if "elasticPolicy" not in spec:
        replicas["Master"] = {"replicas": 1, "template": {"spec": template()}}
    return {"metadata": meta(name), "spec": {"pytorchReplicaSpecs": replicas, **spec}}


def replica(owner: str, kind: str, index: int) -> dict[str, Any]:
    labels = {"training.kubeflow.org/replica-type": kind, "training.kubeflow.org/replica-index": str(index)}
    thing = pod(owner, index, kind="PyTorchJob", life=f"-{kind}")
    return thing | {"metadata": thing["metadata"] | {"labels": labels}}


def test_the_master_of_a_pytorchjob_is_rank_0() -> None:
    server = SmallKubernetes()
    server.put("pytorchjobs", pytorchjob("ddp", 2))
    for kind, index in (("worker", 1), ("worker", 0), ("master", 0)):
        server.put("pods", running(replica("ddp", kind, index), f"{kind}{index}"))
    with Followed(server) as followed:
        submitted, started = followed.told()
    assert submitted.gang == 3
    assert [rank.node for rank in started.ranks] == ["master0", "worker0", "worker1"]


def test_an_elastic_pytorchjob_starts_with_few_and_is_resized() -> None:
    server = SmallKubernetes()
    server.put("pytorchjobs", pytorchjob("ddp", 3, elasticPolicy={"minReplicas": 2, "maxReplicas": 4}))
    with Followed(server) as followed:
        for index in range(2):
            server.put("pods", running(replica("ddp", "worker", index), f"n{index}"))
        submitted, started = followed.told()
        assert (submitted.gang.min, submitted.gang.desired) == (2, 4)
        assert len(started.ranks) == 2
        server.put("pods", running(replica("ddp", "worker", 2), "n2"))
        (grown,) = followed.told()
        server.put("pods", ended(running(replica("ddp", "worker", 0), "n0"), 1))
        (shrunk,) = followed.told()
    assert (len(grown.ranks), grown.sequence) == (3, 16)
    assert ([rank.node for rank in shrunk.ranks], shrunk.sequence) == (["n1", "n2"], 17)


def deployed(name: str) -> dict[str, Any]:
    labels = {"pod-template-hash": "5d4f"}
    owners = [{"kind": "ReplicaSet", "name": "vllm-5d4f", "controller": True}]
    return {"metadata": meta(name, labels=labels, ownerReferences=owners), "spec": template(2), "status": {}}


def test_a_deployment_is_an_inference_job_that_grows_and_ends_with_its_last_pod() -> None:
    server = SmallKubernetes()
    server.put("pods", running(deployed("a"), "n1"))
    with Followed(server) as followed:
        submitted, _ = followed.told()
        assert (submitted.job, submitted.class_, submitted.gpus_per_node) == ("ml/vllm", "inference", 2)
        server.put("pods", running(deployed("b"), "n2"))
        assert brief(followed.told()) == [("ml/vllm", 1, "resized")]
        for name in ("a", "b"):
            server.delete("pods", name)
        ends = followed.settle()
        server.put("pods", running(deployed("c"), "n3"))
        again = followed.told()
    assert brief(ends)[-1] == ("ml/vllm", 1, "finished")
    assert brief(again) == [("ml/vllm", 2, "submitted"), ("ml/vllm", 2, "started")]


def test_a_pod_of_nobody_is_a_job_of_one() -> None:
    server = SmallKubernetes()
    lone = {"metadata": meta("notebook"), "spec": template(1, priority=7), "status": {}}
    server.put("pods", running(lone, "n1"))
    with Followed(server) as followed:
        submitted, started = followed.told()
        assert (submitted.gang, submitted.priority, len(started.ranks)) == (1, 7, 1)
        server.put("pods", ended(running(lone, "n1"), 0, "Completed"))
        assert brief(followed.told()) == [("ml/notebook", 1, "finished")]
        server.delete("pods", "notebook")
        assert followed.settle() == []


def test_pods_without_gpus_and_of_daemon_sets_are_nobodys_job() -> None:
    server = SmallKubernetes()
    server.put("pods", running(pod("web", 0, gpus=0), "n1"))
    server.put("pods", running(pod("dcgm", 0, kind="DaemonSet"), "n1"))
    with Followed(server) as followed:
        assert followed.told() == []


def test_mig_slices_are_counted_and_labels_mean_what_the_options_say() -> None:
    server = SmallKubernetes()
    about = {"kueue.x-k8s.io/queue-name": "nightly", "team": "vision", "fleetcast/class": "batch", "who": "ada"}
    server.put("priorityclasses", {"metadata": {"name": "low", "uid": "1"}, "value": -5})
    sliced = job("sliced", 1)
    sliced["metadata"]["labels"] = about
    resources = {"limits": {"nvidia.com/mig-1g.10gb": 2}}
    selector = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    sliced["spec"]["activeDeadlineSeconds"] = 3600
    sliced["spec"]["template"]["spec"] = {
        **{"containers": [{"resources": resources}], "nodeSelector": selector, "priorityClassName": "low"}
    }
    server.put("jobs", sliced)
    options = {"tenant_label": "team", "user_label": "who", "keep_labels": ["team"], "prefix": "west/", "cluster": "w"}
    with Followed(server, **options) as followed:
        (submitted,) = followed.told()
    assert (submitted.job, submitted.cluster) == ("west/ml/sliced", "w")
    assert (submitted.queue, submitted.tenant, submitted.user, submitted.class_) == (
        "nightly",
        "vision",
        "ada",
        "batch",
    )
    assert (submitted.gpus_per_node, submitted.gpu_model, submitted.priority, submitted.limit_s) == (
        2,
        "A100",
        -5,
        3600,
    )
    assert submitted.labels == {"team": "vision", "mig": "1g.10gb", "kind": "Job"}
    assert submitted.gpu_share == 143  # a seventh each


@pytest.mark.parametrize(
    ("label", "word", "expected"),
    [
        ("fleetcast/preemptible", "Yes", True),
        ("fleetcast/preemptible", "false", False),
        ("fleetcast.io/preemptible", "0", False),
        ("other", "true", None),
    ],
)
def test_a_label_says_whether_a_job_may_be_stopped(label: str, word: str, expected: bool | None) -> None:
    server = SmallKubernetes()
    labelled = job("labelled", 1)
    labelled["metadata"]["labels"] = {label: word}
    server.put("jobs", labelled)
    with Followed(server) as followed:
        (submitted,) = followed.told()
    assert submitted.preemptible is expected
    assert "unread_preemptible" not in submitted.labels


def test_mig_instances_are_parts_of_gpus_by_their_slices() -> None:
    def asked(**limits: int) -> tuple[int, str, int | None]:
        names = {f"nvidia.com/{name.replace('__', '.').replace('_', '-')}": count for name, count in limits.items()}
        spec = PodSpec(containers=(Container(resources=Resources(limits=names)),))
        return read_asked_gpus(spec, ("nvidia.com/gpu", "nvidia.com/mig-*"))[:3]

    assert asked(mig_3g__40gb=1) == (1, "3g.40gb", 429)
    assert asked(mig_3g__40gb=1, mig_1g__10gb=1) == (2, "3g.40gb", 286)  # four sevenths together
    assert asked(mig_half=1) == (1, "half", None)
    assert asked(gpu=2) == (2, "", None)


def test_options_are_checked_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"options\.kubeconf: no such key; did you mean kubeconfig\?"):
        KubernetesSource(Entities(), ManualClock(0), {"kubeconf": "x"}, server=SmallKubernetes())
    with pytest.raises(ConfigError, match="collections"):
        KubernetesSource(Entities(), ManualClock(0), {"collections": ["pod"]}, server=SmallKubernetes())


def test_what_an_older_version_kept_is_read_anew() -> None:
    server = SmallKubernetes()
    gang(server)
    with Followed(server, {"versions": {"pods": 7}}) as followed:
        assert len(followed.told()) == 2


def test_it_is_a_source() -> None:
    server = SmallKubernetes()
    gang(server, "a")
    source: list[KubernetesSource] = []

    def make() -> KubernetesSource:
        source.append(KubernetesSource(Entities(), ManualClock(NOW_MS), {}, server=server))
        return source[-1]

    check_source(make, batches=1)


def test_a_thread_that_ends_of_a_bug_is_told_and_a_source_made_anew_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection that stood still in silence would leave what ended there running for ever."""
    server = SmallKubernetes()
    with Followed(server) as source:
        source.told()
        position = source.source.position()
        monkeypatch.setattr("fleetcast.ingest.kubernetes.source.decode", lambda *_: 1 / 0)
        server.put("jobs", job("train", 1))
        server.put("pods", pod("train", 0))
        with pytest.raises(ZeroDivisionError):
            source.told(5.0)
        source._taken = None
    monkeypatch.undo()
    with Followed(server, position) as again:
        assert {event.job for event in again.told()} == {"ml/train"}


def test_an_invalid_byte_in_the_head_of_a_list_is_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SmallKubernetes()
    monkeypatch.setattr(server, "_list", lambda *_: Reply(200, b'{"metadata": {"resourceVersion": "\xff"}}'))
    with Followed(server) as source, pytest.raises(SourceError, match="is no list"):
        source.told(5.0)
