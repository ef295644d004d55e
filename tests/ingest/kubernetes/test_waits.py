"""Jobs that may not start are blocked with the reason; jobs that wait for resources are queued."""

from typing import Any

import pytest

from fleetcast.fleet.events import Queued
from tests.ingest.kubernetes.test_owners import Fed
from tests.ingest.small_kubernetes import condition, job, meta, pod, running, template

INSUFFICIENT = "0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 3 node(s) had untolerated taint {x: y}."
SELECTOR = "0/5 nodes are available: 5 node(s) didn't match Pod's node affinity/selector."


def gated(name: str, *gates: str) -> dict[str, Any]:
    spec = template(schedulingGates=[{"name": gate} for gate in gates])
    return {"metadata": meta(name), "spec": spec, "status": {"phase": "Pending"}}


def unschedulable(name: str, message: str) -> dict[str, Any]:
    thing = gated(name)
    rows = [condition("PodScheduled", "Unschedulable", message, "False")]
    return {**thing, "status": {"phase": "Pending", "conditions": rows}}


def suspended(name: str, **labels: str) -> dict[str, Any]:
    thing = job(name)
    thing["metadata"]["labels"] = {key.replace("__", "/"): value for key, value in labels.items()}
    thing["spec"]["suspend"] = True
    return thing


def states(fed: Fed) -> dict[str, tuple[str, str]]:
    return {row.job: (row.state, row.queued_reason) for row in (*fed.table.list_queued(), *fed.table.list_blocked())}


def test_a_scheduling_gate_blocks_until_it_is_removed() -> None:
    fed = Fed()
    fed.put("pods", gated("p", "example.com/review"))
    assert states(fed) == {"ml/p": ("blocked", "scheduling gates: example.com/review")}
    fed.put("pods", gated("p"))
    assert states(fed) == {"ml/p": ("queued", "released")}
    fed.put("pods", running(gated("p"), "n1"))
    assert fed.running() == {"ml/p": ("n1",)}


def test_a_gang_is_blocked_while_one_member_is() -> None:
    fed = Fed()
    fed.put("jobs", job("train"))
    fed.put("pods", {**pod("train", 0), "status": unschedulable("x", INSUFFICIENT)["status"]})
    assert states(fed)["ml/train"][0] == "queued"
    fed.put("pods", {**pod("train", 1), "spec": gated("x", "a", "b")["spec"]})
    assert states(fed)["ml/train"] == ("blocked", "scheduling gates: a, b")
    fed.put("pods", pod("train", 1))
    assert states(fed)["ml/train"][0] == "queued"


def test_a_suspended_job_is_blocked_until_it_is_resumed() -> None:
    fed = Fed()
    fed.put("jobs", suspended("train"))
    assert states(fed) == {"ml/train": ("blocked", "suspended")}
    fed.put("jobs", job("train"))
    assert states(fed) == {"ml/train": ("queued", "released")}


def test_a_job_that_kueue_suspends_waits_for_its_quota_unless_the_site_says_otherwise() -> None:
    for options, state in (({}, "queued"), ({"admission": "blocked"}, "blocked")):
        fed = Fed(**options)
        fed.put("jobs", suspended("train", **{"kueue.x-k8s.io__queue-name": "q"}))
        assert states(fed)["ml/train"][0] == state
        fed.put("pods", gated("p", "kueue.x-k8s.io/admission"))
        assert states(fed)["ml/p"][0] == state


@pytest.mark.parametrize(
    ("message", "state"),
    [
        (INSUFFICIENT, "queued"),
        (SELECTOR, "blocked"),
        ("0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims.", "blocked"),
        ('persistentvolumeclaim "data" not found', "blocked"),
        ("0/2 nodes are available: 2 node(s) had untolerated taint {dedicated: other}.", "blocked"),
        ("0/2 nodes are available: 2 cannot allocate all claims.", "queued"),
        ("0/2 nodes are available: 2 Too many pods.", "queued"),
        ("pod group is not ready, 1 Pending, 4 minAvailable", "queued"),
        ("a message of a scheduler that nobody knows", "queued"),
    ],
)
def test_a_pod_that_no_freed_gpu_would_help_is_blocked(message: str, state: str) -> None:
    fed = Fed()
    fed.put("pods", unschedulable("p", message))
    assert states(fed) == {"ml/p": (state, f"Unschedulable: {message}")}


def test_a_container_that_cannot_be_made_is_blocked() -> None:
    thing = gated("p")
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    thing["status"] |= {"containerStatuses": [waiting]}
    fed = Fed()
    fed.put("pods", thing)
    assert states(fed) == {"ml/p": ("blocked", "ImagePullBackOff: no such image")}


def test_a_reason_that_only_changes_its_words_is_told_once() -> None:
    fed = Fed()
    for count in range(5):
        fed.put("pods", unschedulable("p", f"0/{count} nodes are available: {count} Insufficient nvidia.com/gpu."))
    assert sum(isinstance(event, Queued) for event in fed.events) == 1


def test_a_started_attempt_that_is_suspended_is_blocked_as_its_next_attempt() -> None:
    fed = Fed()
    fed.put("jobs", job("train", 1))
    fed.put("pods", running(pod("train", 0), "n1"))
    fed.put("jobs", {**suspended("train"), "spec": {**job("train", 1)["spec"], "suspend": True}})
    assert states(fed) == {"ml/train": ("blocked", "suspended")}
    assert fed.running() == {}
