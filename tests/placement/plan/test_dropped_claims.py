"""A claim is dropped when futures do not believe in it, and hard the third time."""

import numpy as np

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.options import Options
from fleetcast.placement.plan.dropped_claims import LEAST_P, MOST_DROPS, DroppedClaims
from fleetcast.placement.plan.queue import WaitingEntry, plan
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from tests.placement.runs import Run, table_of

NOW_MS = 1_800_000_000_000


def test_a_claim_is_dropped_once_a_look_and_hard_in_the_end() -> None:
    claims = DroppedClaims()
    assert claims.choose_dropped_claims(["head"]) == frozenset()
    for _ in range(MOST_DROPS):
        claims.record_hold_probabilities({"head": LEAST_P / 2, "second": None, "third": 1.0})
        assert claims.choose_dropped_claims(["head"]) == {"head"}
        assert claims.choose_dropped_claims(["head"]) == frozenset()
    claims.record_hold_probabilities({"head": 0.0})
    assert claims.choose_dropped_claims(["head"]) == frozenset()


def test_a_claim_that_holds_or_that_no_future_knows_is_kept() -> None:
    claims = DroppedClaims()
    for holds_p in (LEAST_P, 1.0, None):
        claims.record_hold_probabilities({"head": 0.0})
        claims.record_hold_probabilities({"head": holds_p})
        assert claims.choose_dropped_claims(["head"]) == frozenset()


def test_several_claims_are_dropped_together() -> None:
    claims = DroppedClaims()
    claims.record_hold_probabilities({"head": 0.0, "second": 1.0, "third": 0.1})
    assert claims.choose_dropped_claims(["head", "second", "third"]) == {"head", "third"}


def test_who_waits_no_more_is_forgotten() -> None:
    claims = DroppedClaims()
    for _ in range(MOST_DROPS):
        claims.record_hold_probabilities({"head": 0.0})
        claims.choose_dropped_claims(["head"])
    claims.choose_dropped_claims([])
    claims.record_hold_probabilities({"head": 0.0})
    assert claims.choose_dropped_claims(["head"]) == {"head"}


def test_a_dropped_claim_keeps_nothing_for_a_pass(make_view) -> None:
    holders = np.full((2, 8), -1, np.int32)
    holders[0] = 0
    view = make_view({"r01": [0, 8]}, holders=holders, jobs=("a",))
    running = table_of({"a": Run(NOW_MS, 8, 60.0)})
    head = PlacementRequest(request_id="head", gang=2, gpus_per_node=8, priority=1)
    long = PlacementRequest(request_id="long", gpus_per_node=8, limit_s=9000.0)
    queue = [WaitingEntry(head, NOW_MS), WaitingEntry(long, NOW_MS)]

    def placed(*dropped: str) -> list[str]:
        found = plan(queue, view, running, RunTimeQuantiles({}), Options(now_ms=NOW_MS), dropped=dropped)
        assert [claim.request.request_id for claim in found.claims] == ["head"]
        return [entry.request.request_id for entry, _ in found.placed]

    assert placed() == placed("other") == []
    assert placed("head") == ["long"]
