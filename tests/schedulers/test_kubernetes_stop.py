"""The rules by which the executor `kubernetes` stops a Job."""

import json
from typing import Any

import msgspec
import pytest

from fleetcast.schedulers.kubernetes_stop import (
    MARK,
    STOPPED,
    DisruptionBudget,
    KueueClusterQueue,
    StopMark,
    StoppableJob,
    StoppablePod,
    StoppableWorkload,
    explain_budgets,
    explain_other_places,
    explain_own_preemption,
    make_mark_fields,
    parse_job_name,
)


def pod(node: str = "", phase: str = "Running", **meta: Any) -> StoppablePod:
    return msgspec.convert(
        {"metadata": {"name": "p", **meta}, "spec": {"nodeName": node}, "status": {"phase": phase}}, StoppablePod
    )


def budget(allowed: int, selector: dict[str, Any] | None) -> DisruptionBudget:
    thing = {"metadata": {"name": "b"}, "spec": {"selector": selector}, "status": {"disruptionsAllowed": allowed}}
    return msgspec.convert(thing, DisruptionBudget)


def queue(name: str, cohort: str = "", **preemption: Any) -> KueueClusterQueue:
    spec = {"cohortName": cohort, "preemption": preemption}
    return msgspec.convert({"metadata": {"name": name}, "spec": spec}, KueueClusterQueue)


def job(*rules: dict[str, Any], **annotations: str) -> StoppableJob:
    spec = {"podFailurePolicy": {"rules": list(rules)}} if rules else {}
    return msgspec.convert({"metadata": {"name": "j", "annotations": annotations}, "spec": spec}, StoppableJob)


@pytest.mark.parametrize("name", ["default/", "/train", "default", "east/default/train", ""])
def test_other_names_are_no_jobs(name: str) -> None:
    assert parse_job_name(name, "") is None
    assert parse_job_name(name, "west/") is None


def test_pods_that_ended_or_leave_are_not_active() -> None:
    assert pod(phase="Pending").is_active
    assert not pod(phase="Failed").is_active
    assert not pod(deletionTimestamp="2026-11-27T06:00:00Z").is_active


def test_an_attempt_is_known_by_the_nodes_of_its_pods() -> None:
    assert explain_other_places([pod("a"), pod("a"), pod("b"), pod()], {"a", "b"}) == ""
    assert explain_other_places([pod("a")], {"a", "b"}).endswith("the pods are on a, and the action names a, b")
    assert explain_other_places([pod()], {"a"}).endswith("on no node, and the action names a")
    assert explain_other_places([], {"a"}) == "the Job has no active pod"


@pytest.mark.parametrize(
    ("selector", "is_refused"),
    [
        ({}, True),  # it selects every pod
        (None, False),
        ({"matchLabels": {"app": "train"}}, True),
        ({"matchLabels": {"app": "other"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["train", "x"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["train"]}]}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
    ],
)
def test_a_budget_counts_the_whole_gang(selector: dict[str, Any] | None, is_refused: bool) -> None:
    gang = [pod("a", labels={"app": "train"}), pod("b", labels={"app": "train"})]
    assert bool(explain_budgets(gang, [budget(1, selector)])) is is_refused
    assert explain_budgets(gang, [budget(2, selector)]) == ""


@pytest.mark.parametrize("rule", [{"withinClusterQueue": "LowerPriority"}, {"reclaimWithinCohort": "Any"}])
def test_a_queue_of_the_cohort_that_preempts_is_named(rule: dict[str, str]) -> None:
    workload = msgspec.convert(
        {"metadata": {"name": "w"}, "status": {"admission": {"clusterQueue": "a"}}}, StoppableWorkload
    )
    name, value = next(iter(rule.items()))
    assert explain_own_preemption(workload, [queue("a", "c"), queue("b", "c", **rule)]) == (
        f"ClusterQueue b preempts by itself ({name}: {value})"
    )
    assert explain_own_preemption(workload, [queue("a", "c"), queue("b", "d", **rule)]) == ""
    assert explain_own_preemption(workload, [queue("a"), queue("b", **rule)]) == ""
    assert explain_own_preemption(workload, [queue("a", borrowWithinCohort={"policy": "Never"})]) == ""
    assert explain_own_preemption(workload, [queue("a", borrowWithinCohort={"policy": "LowerPriority"})])


def test_the_first_rule_on_disruptions_says_whether_an_eviction_counts() -> None:
    ignore = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    fail = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]}
    by_exit = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}, "onPodConditions": None}
    assert job(by_exit, ignore).ignores_disruptions
    assert not job(fail, ignore).ignores_disruptions
    assert not job(by_exit).ignores_disruptions
    assert not job().ignores_disruptions


def test_a_mark_is_read_as_it_was_written() -> None:
    mark = StopMark("0f-1", "r1", 5, {"p": "u"}, "w", is_done=True)
    fields = make_mark_fields(mark, is_open=True)
    assert fields["labels"] == {STOPPED: "true"}
    found = job(**{MARK: str(fields["annotations"][MARK])})
    assert found.mark == mark
    assert make_mark_fields(mark, is_open=False)["labels"] == {STOPPED: None}


@pytest.mark.parametrize("text", ["", "{", json.dumps({"action": 1})])
def test_an_unreadable_mark_is_none(text: str) -> None:
    assert job(**{MARK: text}).mark is None
