"""The passes that the benchmark compares do what their names say."""

from dataclasses import replace
from typing import Any

import pytest

from fleetcast.benchmarks.answers.reclaim_pass import RECLAIMS, PassScene, make_pass_scene
from fleetcast.placement.plan.promised import Promises
from fleetcast.placement.plan.queue import Plan
from fleetcast.placement.reclaim.victims import find_victims


@pytest.fixture(scope="module")
def scene() -> PassScene:
    return make_pass_scene(640)


def run_and_count_searches(scene: PassScene, promises: Promises, is_paused: bool = True) -> tuple[Plan, int]:
    found = []

    def find(*arguments: Any) -> Any:
        found.append(find_victims(*arguments))
        return found[-1]

    return scene.run_pass(replace(scene.make_facts(promises, is_paused), find=find), promises), len(found)


def test_the_head_is_an_entitled_request_and_would_stop_jobs(scene: PassScene) -> None:
    plan, searches = run_and_count_searches(scene, {})
    assert plan.proposal is not None
    assert plan.proposal.code == "found"
    assert plan.proposal.request.queue == "entitled"
    assert searches >= 1
    without = scene.run_pass(None, {})
    assert [wait.why for wait in without.waiting] == [wait.why for wait in plan.waiting], "advice places nothing else"


@pytest.mark.parametrize(("is_short", "is_paused"), [(False, True), (True, True), (True, False)])
def test_entitled_requests_wait_for_their_jobs_and_short_ones_search_if_sets_may_be_sent(
    scene: PassScene, is_short: bool, is_paused: bool
) -> None:
    _, least = run_and_count_searches(scene, {})
    plan, searches = run_and_count_searches(scene, scene.make_promises(is_short), is_paused)
    assert (
        sum(wait.entry.request.queue == "entitled" and wait.reason.code == "room" for wait in plan.waiting) == RECLAIMS
    )
    assert searches <= least if is_paused else searches >= RECLAIMS * least
    rest = scene.run_pass(None, {}, RECLAIMS)
    assert [entry for entry, _ in rest.placed] == [entry for entry, _ in plan.placed], "the peer places the same"


def test_without_another_head_a_paused_pass_names_the_set_of_the_last_short_request(scene: PassScene) -> None:
    """Sets of a policy that acts elsewhere are found one after the other, and are not sent either."""
    promises = scene.make_promises(True)
    short = replace(scene, waiting=scene.waiting[:RECLAIMS])
    paused = short.make_facts(promises)
    assert paused.bounds is not None
    policy = replace(paused.policy, act_in=("entitled",))
    elsewhere = replace(paused, policy=policy, bounds=replace(paused.bounds, policy=policy, stopped=""))
    found, others = (short.run_pass(facts, promises) for facts in (paused, elsewhere))
    assert found.proposal is not None
    assert others.proposal is not None
    assert found.proposal.request == others.proposal.request == scene.waiting[RECLAIMS - 1].request
    assert found.proposal.victims is not None
    assert others.proposal.victims is not None
    assert found.proposal.victims.chosen == others.proposal.victims.chosen
    assert found.proposal.victims.decision == others.proposal.victims.decision
    assert found.proposal.kinds == others.proposal.kinds
    assert not found.proposal.sends
    assert not others.proposal.sends
