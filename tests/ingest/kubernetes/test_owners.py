"""Owners of pods: a kind is its name and its API group, and two kinds may share a name."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.clients.kubernetes import Changes, Listing
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Started, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.ingest.kubernetes.jobs import JobState
from fleetcast.ingest.kubernetes.objects import Pod, decode
from fleetcast.ingest.kubernetes.owners import find_owner, qualify_kind
from fleetcast.ingest.kubernetes.source import KINDS, KubernetesSource
from tests.fuzz.bounds import examples
from tests.ingest.small_kubernetes import CREATED_MS, SmallKubernetes, job, meta, running, template

FIELD = Path(__file__).parents[2] / "field"


def owned(name: str, api_version: str, kind: str, owner: str, **labels: str) -> dict[str, Any]:
    uid = f"u-{owner}" if api_version == "batch/v1" else f"u-{kind}-{owner}"
    owners = [{"apiVersion": api_version, "kind": kind, "name": owner, "uid": uid, "controller": True}]
    about = meta(name, labels=labels, ownerReferences=owners)
    return running({"metadata": about, "spec": template(), "status": {}}, f"n-{name}")


class Fed:
    """A source that is given objects, and the table of what it reports."""

    def __init__(self, **options: Any) -> None:
        self.clock = ManualClock(CREATED_MS + 60_000)
        self.source = KubernetesSource(Entities(), self.clock, options, server=SmallKubernetes())
        self.source.apply_messages([Listing(name, (), "1") for name in KINDS])
        self.decode = {row.name: row.decode for row in self.source.list_collections()}
        self.table = JobTable()
        self.events: list[Any] = []
        self.node_events: list[Any] = []
        self.bad: list[str] = []

    def put(self, name: str, *things: dict[str, Any], kind: str = "ADDED") -> list[Any]:
        batch = self.source.apply_messages(
            [
                Changes(name, ((kind, self.decode[name](json.dumps(thing).encode())),), "2")
                for thing in json.loads(json.dumps(things))
            ]
        )
        self.bad += [error.detail for error in batch.bad]
        for event in batch.events:
            self.table.apply(event)
        self.events += batch.events
        self.node_events = [*self.node_events, *batch.node_events]
        return list(batch.events)

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for event in self.source.apply_messages([]).events:
            self.table.apply(event)
            self.events.append(event)

    def running(self) -> dict[str, tuple[str, ...]]:
        return {row.job: row.hosts for row in self.table.list_running()}

    def submitted(self, job_name: str) -> Submitted:
        return next(row for row in self.events if isinstance(row, Submitted) and row.job == job_name)


def test_pods_of_a_volcano_job_are_a_job_with_its_queue() -> None:
    fed = Fed()
    fed.put("pods", *json.loads((FIELD / "32-kube-volcano-job-pods.json").read_text())["items"])
    assert fed.running() == {"ml/vcj": ("n0", "n1")}
    submitted = fed.submitted("ml/vcj")
    assert (submitted.queue, submitted.gpus_per_node) == ("q1", 8)
    assert submitted.labels["kind"] == "Job.batch.volcano.sh"


@pytest.mark.parametrize(
    ("api_version", "kind", "shown"),
    [
        ("batch.volcano.sh/v1alpha1", "Job", "Job.batch.volcano.sh"),
        ("training.example.com/v1", "PyTorchJob", "PyTorchJob.training.example.com"),
        ("jobs.example.com/v2", "JobSet", "JobSet.jobs.example.com"),
        ("kubeflow.org/v1", "MPIJob", "MPIJob"),
        ("argoproj.io/v1alpha1", "Workflow", "Workflow"),
        ("apps/v1", "StatefulSet", "StatefulSet"),
        ("apps.kruise.io/v1beta1", "StatefulSet", "StatefulSet.apps.kruise.io"),
        ("acme.io/v1", "Experiment", "Experiment.acme.io"),
    ],
)
def test_pods_of_any_kind_of_owner_appear_as_its_job(api_version: str, kind: str, shown: str) -> None:
    fed = Fed()
    fed.put("pods", *[owned(f"x-{number}", api_version, kind, "x") for number in range(2)])
    assert fed.running() == {"ml/x": ("n-x-0", "n-x-1")}
    assert fed.submitted("ml/x").labels["kind"] == shown


def test_two_kinds_of_one_name_are_two_jobs() -> None:
    fed = Fed()
    fed.put("jobs", job("x", 1))
    fed.put("pods", owned("x-batch", "batch/v1", "Job", "x"))
    fed.put("pods", owned("x-volcano", "batch.volcano.sh/v1alpha1", "Job", "x"))
    fed.put("pods", owned("x-web", "apps/v1", "StatefulSet", "x"))
    assert fed.running() == {
        "ml/x": ("n-x-batch",),
        "ml/x (Job.batch.volcano.sh)": ("n-x-volcano",),
        "ml/x (StatefulSet)": ("n-x-web",),
    }
    fed.put("pods", owned("x-web", "apps/v1", "StatefulSet", "x"), kind="DELETED")
    fed.wait(3)
    assert fed.running().keys() == {"ml/x", "ml/x (Job.batch.volcano.sh)"}


def test_a_job_object_that_comes_after_another_kind_of_its_name_is_not_lost() -> None:
    fed = Fed()
    fed.put("pods", owned("x-volcano", "batch.volcano.sh/v1alpha1", "Job", "x"))
    fed.put("jobs", job("x", 1))
    fed.put("pods", owned("x-batch", "batch/v1", "Job", "x"))
    assert fed.running() == {"ml/x": ("n-x-volcano",), "ml/x (Job)": ("n-x-batch",)}
    fed.put("jobs", job("x", 1), kind="DELETED")
    fed.wait(3)
    assert fed.running() == {"ml/x": ("n-x-volcano",)}


def test_the_same_names_hold_after_a_restart() -> None:
    fed = Fed()
    fed.put("pods", owned("x-volcano", "batch.volcano.sh/v1alpha1", "Job", "x"))
    fed.put("pods", owned("x-web", "apps/v1", "StatefulSet", "x"))
    again = Fed()
    again.source.seek(json.loads(json.dumps(fed.source.position())))
    again.put("pods", owned("x-web-2", "apps/v1", "StatefulSet", "x"))
    (resized,) = again.events
    assert (resized.job, len(resized.ranks)) == ("ml/x (StatefulSet)", 2)


def test_a_position_of_before_groups_were_read_goes_on_with_the_same_job() -> None:
    fed = Fed()
    fed.put("pods", owned("x-0", "acme.io/v1", "Experiment", "x"))
    (uid,) = fed.source._at.jobs.members
    old = json.loads(json.dumps(fed.source.position()))
    again = Fed()
    again.source.seek(old)
    state: JobState = again.source._at.jobs
    state.members = {key: msgspec.structs.replace(row, kind="Experiment") for key, row in state.members.items()}
    state.workloads = {key: msgspec.structs.replace(row, kind="Experiment") for key, row in state.workloads.items()}
    again.source._restore_position(again.source._at)
    again.put("pods", owned("x-0", "acme.io/v1", "Experiment", "x"))
    assert again.events == []
    assert state.members[uid].job == "ml/x"


def test_an_argo_rollout_stands_behind_its_replica_set() -> None:
    fed = Fed()
    fed.put("pods", owned("llm-7d9f-a", "apps/v1", "ReplicaSet", "llm-7d9f", **{"rollouts-pod-template-hash": "7d9f"}))
    assert (fed.submitted("ml/llm").class_, fed.submitted("ml/llm").labels["kind"]) == ("inference", "Rollout")


def test_a_ray_job_stands_behind_its_cluster_and_a_group_label_behind_lone_pods() -> None:
    about = {"ray.io/cluster": "tune-x7k2p", "ray.io/originated-from-crd": "RayJob"}
    about["ray.io/originated-from-cr-name"] = "tune"
    fed = Fed()
    fed.put("pods", owned("tune-x7k2p-worker-0", "ray.io/v1", "RayCluster", "tune-x7k2p", **about))
    grouped = {"metadata": meta("g-0", labels={"kueue.x-k8s.io/pod-group-name": "g"}), "spec": template(), "status": {}}
    fed.put("pods", running(grouped, "n9"))
    assert fed.running() == {"ml/tune": ("n-tune-x7k2p-worker-0",), "ml/g": ("n9",)}


def test_a_kubeflow_notebook_is_interactive() -> None:
    fed = Fed()
    fed.put("pods", owned("nb-0", "apps/v1", "StatefulSet", "nb", **{"notebook-name": "nb"}))
    assert (fed.submitted("ml/nb").class_, fed.submitted("ml/nb").labels["kind"]) == ("interactive", "Notebook")


def test_pods_that_another_pod_owns_are_one_job() -> None:
    fed = Fed()
    fed.put("pods", *[owned(f"exec-{number}", "v1", "Pod", "driver") for number in range(2)])
    assert fed.running() == {"ml/driver": ("n-exec-0", "n-exec-1")}


API_VERSIONS = ("batch/v1", "batch.volcano.sh/v1alpha1", "apps/v1", "acme.io/v1", "v1", "kubeflow.org/v1")


@examples(100)
@given(st.lists(st.tuples(st.sampled_from(API_VERSIONS), st.sampled_from(["Job", "Experiment", "StatefulSet"]))))
def test_each_pod_with_gpus_is_held_by_exactly_one_running_job(owners: list[tuple[str, str]]) -> None:
    """Whatever the kinds and groups are, and all of one name. A batch Job is known from its own object."""
    fed = Fed()
    pods = [owned(f"x-{number}", version, kind, "x") for number, (version, kind) in enumerate(owners)]
    batch = [version == "batch/v1" and kind == "Job" for version, kind in owners]
    if any(batch):
        fed.put("jobs", {**job("x", sum(batch)), "status": {}})
    fed.put("pods", *pods)
    held = [node for hosts in fed.running().values() for node in hosts]
    assert sorted(held) == sorted(f"n-x-{number}" for number in range(len(owners)))
    kinds = {qualify_kind(kind, version) for version, kind in owners}
    assert len(fed.running()) == len(kinds)


def test_the_pod_itself_where_nobody_owns_it() -> None:
    pod = decode(json.dumps({"metadata": meta("p")}).encode(), Pod)
    assert find_owner(pod) == ("Pod", "p", True)
    assert not [row for row in Fed().events if isinstance(row, Started)]


def test_the_owner_may_change_the_word_on_preemption_while_the_job_runs() -> None:
    fed = Fed()
    thing = job("x", 1)
    thing["metadata"]["labels"] = {"fleetcast.io/preemptible": "perhaps"}
    fed.put("jobs", thing)
    fed.put("pods", owned("x-0", "batch/v1", "Job", "x"))
    fed.clock.advance(60.0)
    attempt = fed.table.get("ml/x")
    assert attempt is not None
    assert (attempt.state, attempt.submission and attempt.submission.preemptible) == ("running", None)
    assert fed.submitted("ml/x").labels["unread_preemptible"] == "perhaps"
    assert fed.bad == ["job ml/x: preemptible is 'perhaps', expected one of true, yes, 1, false, no, 0"]
    before_ms = attempt.submitted_ms
    thing["metadata"]["labels"]["fleetcast.io/preemptible"] = "false"
    for _ in range(2):
        fed.put("jobs", thing, kind="MODIFIED")
    attempt = fed.table.get("ml/x")
    assert attempt is not None
    assert attempt.submission is not None
    assert (attempt.state, attempt.submission.preemptible, attempt.submitted_ms) == ("running", False, before_ms)
    assert sum(isinstance(event, Submitted) for event in fed.events) == 2
    assert len(fed.bad) == 1
