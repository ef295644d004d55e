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


def run_and_count_searches(scene: PassScene, promises: Promises) -> tuple[Plan, int]:
    found = []

    def find(*arguments: Any) -> Any:
        found.append(find_victims(*arguments))
        return found[-1]

    return scene.run_pass(replace(scene.make_facts(promises), find=find), promises), len(found)


def test_the_head_is_an_entitled_request_and_would_stop_jobs(scene: PassScene) -> None:
    plan, searches = run_and_count_searches(scene, {})
    assert plan.proposal is not None
    assert plan.proposal.code == "found"
    assert plan.proposal.request.queue == "entitled"
    assert searches >= 1
    without = scene.run_pass(None, {})
    assert [wait.why for wait in without.waiting] == [wait.why for wait in plan.waiting], "advice places nothing else"


@pytest.mark.parametrize("is_short", [False, True])
def test_entitled_requests_wait_for_their_jobs_and_only_short_ones_search(scene: PassScene, is_short: bool) -> None:
    _, least = run_and_count_searches(scene, {})
    plan, searches = run_and_count_searches(scene, scene.make_promises(is_short))
    assert (
        sum(wait.entry.request.queue == "entitled" and wait.reason.code == "room" for wait in plan.waiting) == RECLAIMS
    )
    assert searches >= RECLAIMS * least if is_short else searches <= least
    rest = scene.run_pass(None, {}, RECLAIMS)
    assert [entry for entry, _ in rest.placed] == [entry for entry, _ in plan.placed], "the peer places the same"
