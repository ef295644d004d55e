from typing import Any

import numpy as np
import pytest

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ahead.paths import Timelines, sample_timelines
from fleetcast.placement.ahead.reservation import describe_claim, estimate_job_releases, find_free_windows
from fleetcast.placement.machines.options import Options
from fleetcast.placement.plan.queue import Plan, WaitingEntry, plan
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from tests.placement.runs import Run, table_of

NOW_MS = 1_589_310_000_000
OPTIONS = Options(now_ms=NOW_MS)
HOUR_S = 3600.0
HEAD = WaitingEntry(PlacementRequest(request_id="head", gang=3, gpus_per_node=8), NOW_MS)


@pytest.fixture
def view(make_view):
    """Four nodes; a holds n001, b holds n002; the others are free."""
    holders = np.full((4, 8), -1, np.int32)
    holders[0], holders[1] = 0, 1
    return make_view({"r01": [0, 0], "r02": [8, 8]}, holders=holders, jobs=("a", "b"))


def look(view: Any, left_h: tuple[float, float]) -> tuple[Plan, Timelines]:
    """The plan goes by limits of one and two hours; the jobs are told to take `left_h` more."""
    running = table_of(
        {
            job: Run(NOW_MS, 8, limit_s=hours * HOUR_S, left_s=(HOUR_S * left,) * 8)
            for job, hours, left in zip("ab", (1, 2), left_h, strict=True)
        }
    )
    planned = plan([HEAD], view, running, RunTimeQuantiles({}), OPTIONS)
    return planned, sample_timelines([HEAD], view, running, RunTimeQuantiles({}), OPTIONS)


def test_a_reservation_holds_while_its_releases_come_in_time(view) -> None:
    planned, paths = look(view, (0.5, 2))
    claim = describe_claim(planned.head, view, paths)
    assert (claim.request_id, claim.waits_for, claim.gpus, claim.idle_gpus) == ("head", "a", 24, 16)
    assert claim.shadow_ms == NOW_MS + 3_600_000
    assert claim.holds_p == 1.0


def test_a_reservation_holds_though_sampled_times_are_rounded(view) -> None:
    planned, paths = look(view, (1 + 0.5 / 3600, 2))
    assert describe_claim(planned.head, view, paths).holds_p == 1.0


def test_a_reservation_decays_when_its_releases_come_late(view) -> None:
    planned, paths = look(view, (1.5, 3))
    assert describe_claim(planned.head, view, paths).holds_p == 0.0
    assert describe_claim(planned.head, view, None).holds_p is None


def test_what_the_head_will_use_is_free_until_its_shadow_time(view) -> None:
    planned, _ = look(view, (1, 2))
    (window,) = find_free_windows(planned.view, planned.claims)
    assert (window.gpus, window.nodes, window.until_ms) == (16, 2, NOW_MS + 3_600_000)
    (window,) = find_free_windows(view, ())
    assert (window.gpus, window.nodes, window.until_ms) == (16, 2, None)


def test_releases_come_soonest_first_with_their_quantiles(view) -> None:
    _, paths = look(view, (2, 1))
    rows = estimate_job_releases(paths)
    assert [(row.job, row.gpus, row.nodes) for row in rows] == [("b", 8, 1), ("a", 8, 1)]
    assert rows[0].ends_ms == dict.fromkeys(("p10", "p50", "p90"), NOW_MS + 3_600_000)


@pytest.mark.parametrize("nodes", [3, 5])  # five are more than there are: it never starts
def test_a_job_that_runs_and_waits_again_ends_as_what_runs_does(view, nodes: int) -> None:
    _, alone = look(view, (2, 1))
    again = WaitingEntry(PlacementRequest(request_id="again", job="b", attempt=2, gang=nodes, gpus_per_node=8), NOW_MS)
    paths = sample_timelines([again], view, alone.now.running, RunTimeQuantiles({}), OPTIONS)
    assert estimate_job_releases(paths) == estimate_job_releases(alone)
