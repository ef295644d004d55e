"""Start times behind jobs whose run time nothing tells: null with the reason, or known by time limits alone."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ahead.paths import Timelines, sample_timelines
from fleetcast.placement.ahead.reservation import compute_hold_probability, describe_claim, estimate_job_releases
from fleetcast.placement.ahead.start_time import compute_start_times, estimate_start, forecast_room
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import NO_RUNNING_JOBS, RunningJobs
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from tests.placement.conftest import build
from tests.placement.runs import Run, table_of

NOW_MS = 1_760_000_000_000
HOUR_S = 3600.0
OPTIONS = Options(now_ms=NOW_MS)
NOTHING = RunTimeQuantiles({})
SEEN = RunTimeQuantiles({0: (HOUR_S, 2 * HOUR_S)})
BUSY = ("a", "b")


def request(name: str, gang: int = 1, **fields: object) -> PlacementRequest:
    return PlacementRequest(request_id=name, gang=gang, gpus_per_node=8, **fields)  # type: ignore[arg-type]


@pytest.fixture
def busy_view(make_view):
    """Two nodes, each held by a job of its own."""
    return make_view({"r01": [0, 0]}, holders=np.repeat(np.arange(2, dtype=np.int32), 8).reshape(2, 8), jobs=BUSY)


def running(**limits_s: float | None) -> RunningJobs:
    """Jobs that began ten minutes ago, by their time limits."""
    return table_of({job: Run(NOW_MS - 600_000, 8, limits_s.get(job)) for job in BUSY})


def played(view, jobs, *queue: PlacementRequest, times: RunTimeQuantiles = NOTHING) -> Timelines:
    return sample_timelines([WaitingEntry(one, NOW_MS - 1) for one in queue], view, jobs, times, OPTIONS)


def test_a_start_behind_a_job_of_unknown_run_time_is_null_and_says_why(busy_view) -> None:
    """A day was assumed of each job, and served as `p50 6 h, p90 22 h`, just after a start."""
    paths = played(busy_view, running(), request("x"))
    assert compute_start_times(paths) == {}
    for asked in (request("x"), request("new")):
        found = estimate_start(asked, paths)
        assert (found.start_ms, found.by, found.blocked_by) == (None, None, ())
        assert found.sentence.startswith("behind ")
        assert "run time is not known ('a', 'b'" in found.sentence
        assert "no time limit" in found.sentence


def test_a_start_that_only_limits_tell_says_so(busy_view) -> None:
    paths = played(busy_view, running(a=HOUR_S, b=HOUR_S), request("x", limit_s=HOUR_S))
    found = estimate_start(request("x"), paths)
    assert found.by == "limit"
    assert found.start_ms is not None
    assert found.start_ms["p90"] <= NOW_MS + 50 * 60_000
    assert [row.by for row in estimate_job_releases(paths)] == ["limit", "limit"]


def test_a_limit_that_has_passed_tells_nothing(busy_view) -> None:
    paths = played(busy_view, running(a=300.0, b=300.0))
    assert estimate_start(request("x"), paths).start_ms is None
    assert [row.ends_ms for row in estimate_job_releases(paths)] == [None, None]


def test_a_known_job_gives_its_gpus_also_beside_an_unknown_one(busy_view) -> None:
    """One node is free when `a` ends. Both are free when `b` ends, which nothing tells."""
    jobs = running(a=HOUR_S)
    one, both = request("one", limit_s=60.0), request("both", gang=2, limit_s=60.0)
    assert estimate_start(one, played(busy_view, jobs)).by == "limit"
    assert estimate_start(both, played(busy_view, jobs)).start_ms is None
    assert compute_start_times(played(busy_view, jobs, one, both)).keys() == {"one"}


def test_ended_jobs_tell_and_what_fits_now_needs_no_run_time(busy_view, make_view) -> None:
    assert estimate_start(request("x"), played(busy_view, running(), times=SEEN)).by == "runs"
    free = make_view({"r01": [0, 8]}, holders=np.array([[0] * 8, [-1] * 8], np.int32), jobs=("a",))
    found = estimate_start(request("x"), played(free, running()))
    assert (found.by, found.start_ms) == ("room", dict.fromkeys(("p10", "p50", "p90"), NOW_MS))


def test_what_never_fits_is_not_said_to_wait_for_run_times(busy_view) -> None:
    found = estimate_start(request("x", gang=3), played(busy_view, running()))
    assert "does not fit even when all jobs" in found.sentence


def test_no_sentence_says_that_work_of_unknown_jobs_never_ends(make_view) -> None:
    idle = make_view({"r01": [0, 0]}, holders=np.full((2, 8), -1, np.int32), jobs=())
    view = replace(idle, unknown_use=np.ones((2, 8), bool))
    paths = sample_timelines([], view, NO_RUNNING_JOBS, NOTHING, OPTIONS)
    newcomer = estimate_start(request("x"), paths)
    for sentence in (newcomer.sentence, forecast_room(paths, {}, newcomer).sentence):
        assert "no job event says when the work on the GPUs ends" in sentence
        assert "even when all jobs have ended" not in sentence


def test_a_newcomer_behind_an_unknown_start_has_none(busy_view) -> None:
    """`both` waits for `b`, which nothing tells: who comes next cannot be told the end of `a`."""
    paths = played(busy_view, running(a=HOUR_S), request("both", gang=2))
    assert estimate_start(request("new"), paths).start_ms is None


def test_room_behind_an_unknown_start_is_not_known(busy_view) -> None:
    paths = played(busy_view, running(), request("x"))
    found = forecast_room(paths, compute_start_times(paths), estimate_start(request("new"), paths))
    assert (found.opens_ms, found.by) == (None, None)
    assert "run time is not known" in found.sentence
    known = played(busy_view, running(), request("x"), times=SEEN)
    assert forecast_room(known, compute_start_times(known), estimate_start(request("new"), known)).by == "runs"


def test_how_surely_a_reservation_holds_is_null_behind_an_unknown_run_time(busy_view) -> None:
    head = request("x")
    for times, jobs, by, basis in (
        (NOTHING, running(), None, "prior"),
        (NOTHING, running(a=HOUR_S, b=HOUR_S), "limit", "limit"),
        (SEEN, running(), "runs", "runs"),
    ):
        paths = played(busy_view, jobs, head, times=times)
        reservation = paths.now.head
        assert reservation is not None
        found = describe_claim(reservation, busy_view, paths)
        assert (found.by, found.basis) == (by, basis)
        assert (compute_hold_probability(reservation, paths) is None) == (by is None) == (found.holds_p is None)
        assert ("run time is not known" in found.reason) == (by is None)
        assert msgspec.json.encode(found)


@given(
    limits=st.lists(st.none() | st.sampled_from((700.0, HOUR_S, 10 * HOUR_S)), min_size=2, max_size=2),
    gangs=st.lists(st.sampled_from((1, 2)), max_size=4),
    is_seen=st.booleans(),
)
def test_no_start_time_rests_on_an_unknown_run_time(
    limits: list[float | None], gangs: list[int], is_seen: bool
) -> None:
    """The law: where nothing tells any run time every answer is null, and where all are known none is."""
    view = build({"r01": [0, 0]}, holders=np.repeat(np.arange(2, dtype=np.int32), 8).reshape(2, 8), jobs=BUSY)
    queue = [request(f"q{at}", gang, limit_s=60.0) for at, gang in enumerate(gangs)]
    paths = played(view, running(**dict(zip(BUSY, limits, strict=True))), *queue, times=SEEN if is_seen else NOTHING)
    unknown = [job for job, limit_s in zip(BUSY, limits, strict=True) if limit_s is None and not is_seen]
    assert set(paths.unknown_jobs) == set(unknown)
    for one in [*queue, request("new")]:
        found = estimate_start(one, paths)
        assert (found.by is None) == (found.start_ms is None)
        if len(unknown) == 2:
            assert found.start_ms is None
        if not unknown:
            assert found.start_ms is not None
