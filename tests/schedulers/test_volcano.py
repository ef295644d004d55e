"""Volcano's questions under their Go names: every node is scored, no gang is held back that could ever fit."""

import json
from typing import Any

import pytest

from fleetcast.fleet.errors import RequestError
from fleetcast.schedulers.volcano import VolcanoAdapter
from tests.schedulers.small_fleet import weather

RISKS = {"n1": 0.01, "n2": 0.01, "bad": 0.9}
POD = {
    "metadata": {"name": "train-0", "uid": "6f1c"},
    "spec": {"containers": [{"name": "c", "resources": {"requests": {"nvidia.com/gpu": "8"}}}]},
}
TASK = {"UID": "6f1c", "Job": "default/train", "Name": "train-0", "Namespace": "default", "Pod": POD, "Priority": 1}


def node(name: str) -> dict[str, Any]:
    """A NodeInfo, shortened by most of what nobody reads."""
    return {"Name": name, "Node": {"metadata": {"name": name}}, "Idle": {"MilliCPU": 1}, "Tasks": {}}


def gang(gpus: str | None) -> dict[str, Any]:
    resources = None if gpus is None else {"cpu": "16", "nvidia.com/gpu": gpus}
    group = {"Name": "train", "Spec": {"MinMember": 2, "MinResources": resources}, "Status": {"Phase": "Pending"}}
    return {"job": {"UID": "default/train", "Queue": "default", "MinAvailable": 2, "PodGroup": group}}


def ask(verb: str, question: Any, free: int = 8) -> Any:
    return json.loads(VolcanoAdapter().verbs[verb].answer(weather(RISKS, free=free), json.dumps(question).encode()))


def blindly(verb: str, question: Any) -> Any:
    return json.loads(VolcanoAdapter().verbs[verb].stale(json.dumps(question).encode()) or b"")


def test_every_node_is_scored_a_stranger_neutrally() -> None:
    question = {"task": TASK, "nodes": [node(name) for name in ("n1", "bad", "stranger")]}
    assert ask("prioritize", question) == {
        "nodeScore": {"n1": 100.0, "bad": 0.0, "stranger": 50.0},
        "errorMessage": "",
    }


@pytest.mark.parametrize("question", [{}, {"task": None, "nodes": None}, {"task": {}, "nodes": []}])
def test_scores_are_never_null(question: Any) -> None:
    assert ask("prioritize", question) == blindly("prioritize", question) == {"nodeScore": {}, "errorMessage": ""}


def test_without_a_forecast_all_nodes_are_alike() -> None:
    question = {"task": TASK, "nodes": [node("n1"), node("bad")]}
    assert blindly("prioritize", question)["nodeScore"] == {"n1": 50.0, "bad": 50.0}


@pytest.mark.parametrize(("gpus", "status"), [("16", 0), ("17", -1), ("2400m", 0), (None, 0)])
def test_only_a_gang_that_sound_nodes_could_never_hold_is_rejected(gpus: str | None, status: int) -> None:
    assert ask("enqueueable", gang(gpus), free=0) == {"status": status}
    assert blindly("enqueueable", gang(gpus)) == {"status": 0}


@pytest.mark.parametrize("question", [{}, {"job": None}, {"job": {"PodGroup": None}}, {"job": {"PodGroup": {}}}])
def test_a_job_that_says_nothing_of_itself_is_left_to_others(question: Any) -> None:
    assert ask("enqueueable", question) == {"status": 0}


@pytest.mark.parametrize(
    ("verb", "question"),
    [("prioritize", {"nodes": [{}]}), ("prioritize", []), ("enqueueable", {"job": {"PodGroup": 1}})],
)
def test_another_shape_is_refused_with_and_without_a_forecast(verb: str, question: Any) -> None:
    for way in (ask, blindly):
        with pytest.raises(RequestError):
            way(verb, question)
