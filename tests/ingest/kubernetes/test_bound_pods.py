"""Pods that a scheduler has bound hold GPUs before their job starts, and after an attempt of it has ended."""

from typing import Any

from tests.ingest.kubernetes.test_owners import Fed
from tests.ingest.small_kubernetes import job, meta, pod, running, template


def bound(thing: dict[str, Any], node: str, reason: str = "ContainerCreating") -> dict[str, Any]:
    """A pod whose image is pulled."""
    states = [{"name": "c", "restartCount": 0, "state": {"waiting": {"reason": reason}}}]
    return {
        **thing,
        "spec": {**thing["spec"], "nodeName": node},
        "status": {"phase": "Pending", "containerStatuses": states},
    }


def crashing(thing: dict[str, Any], node: str, restarts: int) -> dict[str, Any]:
    found = running(thing, node, restarts)
    last = {"terminated": {"exitCode": 1, "finishedAt": "2026-11-21T10:00:30Z"}}
    status = {"name": "c", "restartCount": restarts, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    found["status"]["containerStatuses"] = [{**status, "lastState": last}]
    return found


def alone(name: str = "p") -> dict[str, Any]:
    return {"metadata": meta(name), "spec": template(8), "status": {"phase": "Pending"}}


def test_a_pod_whose_image_is_pulled_holds_its_gpus_until_it_runs() -> None:
    fed = Fed()
    fed.put("pods", alone())
    fed.wait(300)
    assert fed.source.bound() == {}
    fed.put("pods", bound(alone(), "n1"))
    assert fed.source.bound() == {"ml/p": {"n1": 8}}
    again = Fed()
    again.source.seek(fed.source.position())
    assert again.source.bound() == {"ml/p": {"n1": 8}}
    fed.put("pods", bound(alone(), "n1", "ImagePullBackOff"))
    assert fed.source.bound() == {"ml/p": {"n1": 8}}
    fed.put("pods", running(alone(), "n1"))
    assert (fed.source.bound(), fed.running()) == ({}, {"ml/p": ("n1",)})


def test_a_pod_that_crashes_in_a_loop_holds_its_gpus_although_its_attempts_ended() -> None:
    fed = Fed()
    fed.put("pods", running(alone(), "n1"))
    fed.put("pods", crashing(alone(), "n1", 1))
    fed.wait(61)
    assert fed.running() == {}
    assert fed.source.bound() == {"ml/p": {"n1": 8}}
    fed.put("pods", alone(), kind="DELETED")
    assert fed.source.bound() == {}


def test_the_members_of_a_gang_that_is_not_whole_hold_their_gpus() -> None:
    fed = Fed()
    fed.put("jobs", job("train", 3))
    fed.put("pods", running(pod("train", 0), "n1"), running(pod("train", 1), "n1"), pod("train", 2))
    fed.wait(60)
    assert fed.source.bound() == {"ml/train": {"n1": 16}}
    fed.put("pods", running(pod("train", 2), "n2"))
    assert fed.source.bound() == {}
    assert fed.running() == {"ml/train": ("n1", "n2")}


def test_the_pods_of_a_suspended_job_hold_their_gpus_until_they_have_ended() -> None:
    fed = Fed()
    fed.put("jobs", job("train", 1))
    fed.put("pods", running(pod("train", 0), "n1"))
    suspended = job("train", 1)
    suspended["spec"]["suspend"] = True
    fed.put("jobs", suspended)
    fed.wait(61)
    assert (fed.running(), fed.source.bound()) == ({}, {"ml/train": {"n1": 8}})
    fed.put("pods", pod("train", 0), kind="DELETED")
    assert fed.source.bound() == {}
