"""Sampled futures know the requests for which passes stop jobs, by the rules of the pass."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.actions.breaker import BreakerCapacity, BreakerLimits
from fleetcast.placement.ahead.paths import Timelines, sample_timelines
from fleetcast.placement.ahead.run_draws import PATHS
from fleetcast.placement.ahead.stops import NO_STOPS, PASS_S, SOONEST_S, SentStop, StopsAhead
from fleetcast.placement.machines.running_jobs import RUN_LEVELS, RunningJobs, make_running_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.promised import SendingBounds
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.plan.reclaiming import ReclaimInput
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.charges import LeafUse
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.tree import ReclaimPolicy
from tests.placement.conftest import build
from tests.placement.plan.test_plan import NOW_MS, OPTIONS

HOUR_S = 3600.0
EXACT = RunTimeQuantiles({0: (HOUR_S, HOUR_S)}, {0: (HOUR_S,) * 8}, {8: 1})
TREE = read_queues("[queue.owed]\nguaranteed = {gpu = 16}\n[queue.borrows]\nguaranteed = {gpu = 16}\n")
POLICY = ReclaimPolicy("act", patience_s=60.0)
JOBS = ("b0", "b1", "b2", "b3")  # each on one node of eight GPUs
STOP_S = 100.0


def make_view() -> ClusterView:
    holders = np.repeat(np.arange(4, dtype=np.int32), 8).reshape(4, 8)
    return build({"r01": [0, 0, 0, 0]}, holders=holders, jobs=JOBS)


def make_table(left_h: float = 10.0, started_s: float = 4000.0) -> RunningJobs:
    """Return the jobs of the queue that borrows."""
    columns: dict[str, Any] = {"gpus": [8] * 4, "members": [1] * 4, "gpus_per_member": [8] * 4}
    return make_running_jobs(
        JOBS,
        leaf=["borrows"] * 4,
        started_ms=[NOW_MS - round(1000 * started_s)] * 4,
        remaining_s=[(HOUR_S * left_h,) * len(RUN_LEVELS)] * 4,
        **columns,
    )


def make_entry(name: str, waited_s: float = 3600.0, nodes: int = 1) -> WaitingEntry:
    request = PlacementRequest(request_id=name, queue=name.partition("-")[0], gang=nodes, gpus_per_node=8)
    return WaitingEntry(request, NOW_MS - round(1000 * waited_s))


def sample(jobs: RunningJobs, stops: StopsAhead, *queue: WaitingEntry) -> Timelines:
    view, hour = make_view(), (HOUR_S,) * len(RUN_LEVELS)
    holds = {name: QueueHold("borrows", {"gpu": 8.0}) for name in JOBS}
    turns = TreeTurns(TREE, {"borrows": LeafUse({"gpu": 32.0}, 0.0)}, view, EXACT, NOW_MS, None, holds)
    return sample_timelines(queue, view, jobs, EXACT, OPTIONS, lambda asked: hour, turns=turns, stops=stops)


def make_stops(jobs: RunningJobs, policy: ReclaimPolicy = POLICY) -> StopsAhead:
    bounds = SendingBounds(policy, BreakerCapacity(32.0, {"": 32.0}), BreakerLimits(1.0, 1.0))
    return StopsAhead(ReclaimInput(policy, TREE, jobs, bounds=bounds), STOP_S)


def test_an_owed_request_starts_once_the_jobs_of_a_borrower_have_stopped() -> None:
    jobs = make_table()
    before = sample(jobs, NO_STOPS, make_entry("owed"))
    assert before.starts_s["owed"].min() > HOUR_S
    found = sample(jobs, make_stops(jobs), make_entry("owed"))
    starts_s = np.sort(found.starts_s["owed"])
    assert starts_s[PATHS // 2 - 1] < STOP_S < starts_s[PATHS // 2]
    assert SOONEST_S <= starts_s[0] < starts_s[-1] < 10 * STOP_S
    np.testing.assert_allclose(found.ends_s[found.holders["owed"]], found.starts_s["owed"] + HOUR_S, rtol=1e-5)


def test_it_first_waits_for_the_patience_and_the_longer_it_has_waited_the_less() -> None:
    jobs = make_table()
    full, half = (sample(jobs, make_stops(jobs), make_entry("owed", waited_s)) for waited_s in (0.0, 30.0))
    np.testing.assert_allclose(full.starts_s["owed"] - half.starts_s["owed"], 30.0, rtol=1e-4)
    np.testing.assert_allclose(np.median(half.starts_s["owed"]), 30.0 + PASS_S / 2 + STOP_S, rtol=0.05)


def test_no_more_requests_start_early_than_the_guarantee_allows() -> None:
    jobs = make_table()
    queue = [make_entry(f"owed-{at}", 3600.0 - at) for at in range(3)]
    found = sample(jobs, make_stops(jobs), *queue)
    assert max(found.starts_s["owed-0"].max(), found.starts_s["owed-1"].max()) < HOUR_S
    assert found.starts_s["owed-2"].min() > HOUR_S


@pytest.mark.parametrize("jobs", [make_table(started_s=300.0), make_table(left_h=0.001)])
def test_jobs_that_may_not_stop_or_end_sooner_bring_no_start_forward(jobs: RunningJobs) -> None:
    found, before = (sample(jobs, stops, make_entry("owed")) for stops in (make_stops(jobs), NO_STOPS))
    assert (found.starts_s["owed"] <= before.starts_s["owed"]).all()
    assert np.median(found.starts_s["owed"]) == np.median(before.starts_s["owed"])


def test_a_stop_that_was_sent_counts_from_then_on_even_if_nothing_more_is_sent() -> None:
    jobs = make_table()
    sent = SentStop(60.0, frozenset({"b1"}))
    found = sample(jobs, StopsAhead(None, STOP_S, {"owed": sent}), make_entry("owed"))
    np.testing.assert_allclose(np.median(found.starts_s["owed"]), STOP_S - 60.0, rtol=0.1)
    late = sample(jobs, StopsAhead(None, STOP_S, {"owed": replace(sent, since_s=5000.0)}), make_entry("owed"))
    assert set(late.starts_s["owed"].tolist()) == {SOONEST_S}


def test_a_set_that_would_only_be_named_brings_no_start_forward() -> None:
    jobs = make_table()
    found = sample(jobs, make_stops(jobs, replace(POLICY, act_in=("other",))), make_entry("owed"))
    assert found.starts_s["owed"].min() > HOUR_S


def test_a_borrower_has_no_job_stopped() -> None:
    jobs = make_table()
    found = sample(jobs, make_stops(jobs), make_entry("borrows"))
    assert found.starts_s["borrows"].min() > HOUR_S


def test_a_stopped_job_waits_again_before_the_requests_of_queues_behind_its_own() -> None:
    tree = read_queues(
        "[queue.owed]\nguaranteed = {gpu = 8}\n[queue.middle]\n[queue.borrows]\nguaranteed = {gpu = 8}\n"
    )
    view, hour = make_view(), (HOUR_S,) * len(RUN_LEVELS)
    left_s = [(HOUR_S * left_h,) * len(RUN_LEVELS) for left_h in (10.0, 1.5, 3.0, 20.0)]
    columns: dict[str, Any] = {"gpus": [8] * 4, "started_ms": [NOW_MS - 4_000_000] * 4, "remaining_s": left_s}
    jobs = make_running_jobs(JOBS, leaf=["borrows"] * 3 + ["middle"], **columns)
    holds = {name: QueueHold(leaf, {"gpu": 8.0}) for name, leaf in zip(JOBS, jobs.leaf, strict=True)}
    use = {leaf: LeafUse({"gpu": gpus}, 0.0) for leaf, gpus in (("borrows", 24.0), ("middle", 8.0))}
    queue = [make_entry(name) for name in ("owed", "middle", "borrows")]

    def sample_with(stops: StopsAhead) -> dict[str, list[float]]:
        turns = TreeTurns(tree, use, view, EXACT, NOW_MS, None, holds)
        found = sample_timelines(queue, view, jobs, EXACT, OPTIONS, lambda asked: hour, turns=turns, stops=stops)
        return {name: (start_s / HOUR_S).tolist() for name, start_s in found.starts_s.items()}

    before = {name: hours[0] for name, hours in sample_with(NO_STOPS).items()}
    assert before == {"owed": 1.5, "middle": 2.5, "borrows": 3.0}
    found = sample_with(StopsAhead(None, STOP_S, {"owed": SentStop(0.0, frozenset({"b3"}))}))
    assert max(found["owed"]) < 0.2
    np.testing.assert_allclose(found["middle"], np.array(found["owed"]) + 1.0, rtol=1e-5)
    np.testing.assert_allclose(found["borrows"], np.array(found["middle"]) + 1.0, rtol=1e-5)  # b3 again at 1.5 h


def test_a_request_for_which_jobs_will_stop_no_longer_counts_as_waiting_in_the_search_for_later_ones() -> None:
    """Vision waits for 8 of its 24 GPUs, so it lends the other 16 to language also after the first stop."""
    tree = read_queues(
        "[queue.language]\nguaranteed = {gpu = 8}\n[queue.vision]\nguaranteed = {gpu = 24}\n"
        '[queue."language/pretraining"]\nweight = 70\n[queue."language/tuning"]\nweight = 30\n'
    )
    view, leaf, hour = make_view(), "language/tuning", (HOUR_S,) * len(RUN_LEVELS)
    jobs = replace(make_table(), leaf=(leaf,) * 4)
    holds = {name: QueueHold(leaf, {"gpu": 8.0}) for name in JOBS}
    turns = TreeTurns(tree, {leaf: LeafUse({"gpu": 32.0}, 0.0)}, view, EXACT, NOW_MS, None, holds)
    bounds = SendingBounds(POLICY, BreakerCapacity(32.0, {"": 32.0}), BreakerLimits(1.0, 1.0))
    stops = StopsAhead(ReclaimInput(POLICY, tree, jobs, bounds=bounds), STOP_S)
    queue = [make_entry("vision"), make_entry("language/pretraining")]
    found = sample_timelines(queue, view, jobs, EXACT, OPTIONS, lambda asked: hour, turns=turns, stops=stops)
    assert {name: start_s.max() < HOUR_S for name, start_s in found.starts_s.items()} == {
        "vision": True,
        "language/pretraining": True,
    }


@pytest.mark.parametrize(("what", "hours"), [("", 3.0), ("gpu_model", 2.5), ("pool", 2.5), ("window", 24.0)])
def test_the_next_attempt_of_a_stopped_job_is_a_request_like_any_other(what: str, hours: float) -> None:
    """b3 leaves the last node to `owed`. The second node is free after 1.5 hours, the third after 3.

    Then `borrows`, the next attempt of b3, which runs for 20 hours, and `middle` start in this order.
    """
    queues = "[queue.owed]\nguaranteed = {gpu = 8}\n[queue.middle]\nweight = 0.01\n[queue.borrows]\n"
    window = '[[maintenance]]\nname = "w"\nnodes = ["n002"]\nfrom = 2027-01-15T00:00:00Z\nto = 2027-01-20T00:00:00Z\n'
    tree, view = read_queues(queues + (window if what == "window" else "")), make_view()
    if what in ("gpu_model", "pool"):
        columns: dict[str, Any] = {what: np.array([1, 1, 0, 0], np.int16), f"{what}s": ("H100", "B200")}
        view = replace(view, inventory=replace(view.inventory, **columns))
    left_s = [(HOUR_S * left_h,) * len(RUN_LEVELS) for left_h in (90.0, 1.5, 3.0, 20.0)]
    columns = {"gpus": [8] * 4, "started_ms": [NOW_MS - 4_000_000] * 4, "remaining_s": left_s}
    jobs = make_running_jobs(JOBS, leaf=["middle", *["borrows"] * 3], **columns)
    holds = {name: QueueHold(leaf, {"gpu": 8.0}) for name, leaf in zip(JOBS, jobs.leaf, strict=True)}
    use = {"borrows": LeafUse({"gpu": 24.0}, 0.0), "middle": LeafUse({"gpu": 8.0}, 0.0)}
    turns = TreeTurns(tree, use, view, EXACT, NOW_MS, None, holds)
    stops = StopsAhead(None, STOP_S, {"owed": SentStop(0.0, frozenset({"b3"}))})
    run_s = {"owed": 100 * HOUR_S}
    queue, known = [make_entry(name) for name in ("owed", "middle", "borrows")], (1.0,) * len(RUN_LEVELS)
    found = sample_timelines(
        queue, view, jobs, EXACT, OPTIONS,
        lambda asked: tuple(run_s.get(asked.request_id, HOUR_S) * one for one in known), turns=turns, stops=stops,
    )  # fmt: skip
    assert np.median(found.starts_s["middle"]) / HOUR_S == pytest.approx(hours, abs=0.1)
