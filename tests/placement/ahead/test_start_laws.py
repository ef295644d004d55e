"""Start times go by what the plan goes by: its turns, limits, what is lent, nodes that are closed, parts of GPUs."""

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ahead.paths import sample_timelines
from fleetcast.placement.ahead.start_time import (
    StartEstimate,
    compute_start_times,
    estimate_start,
    forecast_room,
    list_blockers,
)
from fleetcast.placement.machines.running_jobs import NO_RUNNING_JOBS, RunningJobs
from fleetcast.placement.machines.slots import HeldParts
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.promised import make_hold_name
from fleetcast.placement.plan.queue import WaitingEntry, plan
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.charges import LeafUse
from fleetcast.placement.queues.queues_ahead import QueueHold, find_allowed_delay_s
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.standing import QueueStanding
from tests.fuzz.bounds import examples
from tests.placement.conftest import build
from tests.placement.plan.test_plan import NOW_MS, OPTIONS, TIMES, TREE, free, queued, requests, scene, turns_of
from tests.placement.runs import Run, table_of

HOUR_S = 3600.0
ROUNDING_S = 0.1  # start times are float32
EXACT = RunTimeQuantiles({0: (HOUR_S, HOUR_S)}, {0: (HOUR_S,) * 8}, {8: 1})


def request(name: str, queue: str = "a", gpus: int = 8, **fields: Any) -> PlacementRequest:
    return PlacementRequest(request_id=name, queue=queue, gpus_per_node=gpus, **fields)


def turns(text: str, view: ClusterView, **held: float) -> TreeTurns:
    """Each queue holds what is given with one job of its name."""
    use = {name: LeafUse({"gpu": gpus}, 0.0) for name, gpus in held.items()}
    jobs = {name: QueueHold(name, {"gpu": gpus}) for name, gpus in held.items()}
    return TreeTurns(read_queues(text), use, view, EXACT, NOW_MS, None, jobs)


def running(**left_h: float) -> RunningJobs:
    return table_of({name: Run(NOW_MS, 8, left_s=(HOUR_S * hours,) * 8) for name, hours in left_h.items()})


def starts(view: ClusterView, jobs: RunningJobs, own: TreeTurns, *queue: PlacementRequest) -> dict[str, Any]:
    """request → hours until it starts along the path in the middle."""
    entries = [WaitingEntry(entry, NOW_MS - 1000 + at) for at, entry in enumerate(queue)]
    told = sample_timelines(entries, view, jobs, EXACT, OPTIONS, lambda asked: (HOUR_S,) * 8, turns=own)
    return {name: round(float(np.median(start_s)) / HOUR_S, 2) for name, start_s in told.starts_s.items()}


def comes(view: ClusterView, jobs: RunningJobs, own: TreeTurns, one: PlacementRequest) -> StartEstimate:
    """What a newcomer is told in an empty queue."""
    return estimate_start(one, sample_timelines([], view, jobs, EXACT, OPTIONS, turns=own))


def hours(estimate: StartEstimate) -> float:
    assert estimate.start_ms is not None
    return round((estimate.start_ms["p50"] - NOW_MS) / 3_600_000, 2)


def window(kind: str, name: str, *nodes: str, from_h: float = -1.0, to_h: float) -> str:
    """A queue `a`, and nodes that are kept from it: by a reservation for queue `b`, or by maintenance."""
    times = [datetime.fromtimestamp(NOW_MS / 1000 + HOUR_S * at, UTC).isoformat() for at in (from_h, to_h)]
    queue = 'queue = "b"\n' if kind == "reservation" else ""
    rows = f'name = "{name}"\n{queue}nodes = {json.dumps(nodes)}\nfrom = {times[0]}\nto = {times[1]}\n'
    return f"[queue.a]\n[queue.b]\n[[{kind}]]\n{rows}"


@pytest.mark.parametrize("kind", ["reservation", "maintenance"])
@pytest.mark.parametrize(("to_h", "ends_h", "awaits"), [(2.0, 5.0, True), (5.0, 2.0, False), (0.01, 1.0, True)])
def test_room_and_starts_name_the_window_or_the_job_whose_end_they_wait_for(
    kind: str, to_h: float, ends_h: float, awaits: bool
) -> None:
    """One node is kept by a window, the other one by a job: what ends first gives the GPUs."""
    view = build({"r01": [8, 0]}, jobs=("j",), holders=np.repeat([[-1], [0]], 8, axis=1).astype(np.int32))
    jobs, own = running(j=ends_h), turns(window(kind, "w1", "n001", to_h=to_h), view, j=8.0)
    paths = sample_timelines([], view, jobs, EXACT, OPTIONS, turns=own)
    found = estimate_start(request("x"), paths)
    what = f"{kind} 'w1'" if awaits else "job j"
    assert found.sentence.endswith(f", when {what} ends") or found.sentence.endswith("is free now")
    newcomer = estimate_start(request("new", gpus=1), paths)
    said = forecast_room(paths, {}, newcomer).sentence
    assert said.endswith(f", when {what if awaits else 'the next job'} ends")
    assert said.startswith("room within a minute" if to_h < 0.1 else "room in ")


def test_a_job_that_a_coming_reservation_keeps_away_waits_for_its_end() -> None:
    view = build({"r01": [8]}, jobs=(), holders=np.full((1, 8), -1, np.int32))
    own = turns(window("reservation", "w1", "n001", from_h=0.5, to_h=3.0), view)
    found = estimate_start(
        request("x", limit_s=3 * HOUR_S), sample_timelines([], view, NO_RUNNING_JOBS, EXACT, OPTIONS, turns=own)
    )
    assert hours(found) == 3
    assert found.sentence.endswith("when reservation 'w1' ends")


@examples(150)
@given(st.sampled_from(["", TREE]), free, queued)
def test_what_starts_now_in_the_plan_starts_now_in_start_times(tree: str, nodes: Any, drawn: Any) -> None:
    queue, view, jobs = scene(nodes, drawn)
    now = plan(queue, view, jobs, TIMES, OPTIONS, turns_of(tree, view))
    told = sample_timelines(queue, view, jobs, TIMES, OPTIONS, turns=turns_of(tree, view))
    placed = {entry.request.request_id for entry, _ in now.placed if entry.request.gpus_per_node}
    untried = {wait.entry.request.request_id for wait in now.waiting if wait.reason.code == "untried"}
    assert placed <= told.starts_s.keys()
    for name, start_s in told.starts_s.items():
        assert name in untried or (start_s == 0).all() == (name in placed)


@examples(100)
@given(st.integers(8, 24), st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=12))
def test_a_queue_never_holds_more_than_its_limit_along_any_path(limit: int, gpus: list[int]) -> None:
    view = build({"r01": [8, 8, 8, 8]})
    own = turns(f"[queue.a]\nlimit = {{gpu = {limit}}}\n", view)
    entries = [WaitingEntry(request(f"q{at}", gpus=one), NOW_MS - at) for at, one in enumerate(gpus)]
    told = sample_timelines(entries, view, NO_RUNNING_JOBS, RunTimeQuantiles({0: (600.0, 7200.0)}), OPTIONS, turns=own)
    ends_s = told.list_running_ends() | {name: told.ends_s[holder] for name, holder in told.holders.items()}
    for path in range(len(told.starts_s["q0"])):
        spans = [(told.starts_s[f"q{at}"][path], ends_s[f"q{at}"][path], one) for at, one in enumerate(gpus)]
        for start_s, _, _ in spans:
            held = [one for begin_s, end_s, one in spans if begin_s <= start_s < end_s - ROUNDING_S]
            assert sum(held) <= limit


def test_a_queue_at_its_limit_starts_nothing_before_something_of_its_own_ends(make_view) -> None:
    holders = np.full((3, 8), -1, np.int32)
    holders[0], holders[1] = 0, 1
    view = make_view({"r01": [0, 0, 8]}, holders=holders, jobs=("a", "b"))
    jobs = running(a=3, b=1)
    text = "[queue.a]\nlimit = {gpu = 8}\n[queue.b]\n"
    found = starts(view, jobs, turns(text, view, a=8.0, b=8.0), request("mine"), request("theirs", "b"))
    assert found == {"mine": 3.0, "theirs": 0.0}
    late = comes(view, jobs, turns(text, view, a=8.0, b=8.0), request("comes"))
    assert (hours(late), late.constraint) == (3.0, "quota")
    assert hours(comes(view, jobs, turns(text, view, a=8.0, b=8.0), request("comes", "b"))) == 0.0


def test_what_a_lender_waits_for_is_lent_to_nobody(make_view) -> None:
    holders = np.full((2, 8), -1, np.int32)
    holders[0] = 0
    view = make_view({"r01": [0, 8]}, holders=holders, jobs=("b",))
    text = "[queue.a]\nguaranteed = {gpu = 16}\n[queue.b]\n"
    own = turns(text, view, b=8.0)
    found = starts(view, running(b=1), own, request("own", gang=2), request("borrows", "b"))
    assert found == {"own": 1.0, "borrows": 2.0}


def test_a_node_in_maintenance_is_used_before_only_by_what_ends_before_and_after_it(make_view) -> None:
    text = '[queue.a]\n[[maintenance]]\nnodes = ["n001"]\nfrom = {}\nto = {}\n'.format(
        "2027-01-15T09:00:00Z", "2027-01-15T11:00:00Z"
    )
    assert NOW_MS == 1_800_000_000_000  # 2027-01-15T08:00:00Z
    view = make_view({"r01": [8]})
    long, short = request("long", limit_s=2 * HOUR_S), request("short", limit_s=0.5 * HOUR_S)
    times = RunTimeQuantiles({})
    own = TreeTurns(read_queues(text), {}, view, times, NOW_MS)
    entries = [WaitingEntry(long, NOW_MS - 2), WaitingEntry(short, NOW_MS - 1)]
    told = sample_timelines(entries, view, NO_RUNNING_JOBS, times, OPTIONS, turns=own)
    assert (told.starts_s["long"] == 3 * HOUR_S).all()
    assert (told.starts_s["short"] < HOUR_S).all()
    alone = sample_timelines([], view, NO_RUNNING_JOBS, times, OPTIONS, turns=own)
    assert hours(estimate_start(long, alone)) == 3.0
    assert hours(estimate_start(short, alone)) == 0.0


@pytest.mark.parametrize(("queue", "starts_h"), [("a", 0.0), ("b", 4.0)])
def test_reserved_nodes_are_for_the_queue_that_reserved_them(make_view, queue: str, starts_h: float) -> None:
    text = (
        '[queue.a]\n[queue.b]\n[[reservation]]\nname = "kept"\nqueue = "a"\nnodes = ["n001"]\n'
        "from = 2027-01-15T07:00:00Z\nto = 2027-01-15T12:00:00Z\n"
    )
    view = make_view({"r01": [8]})
    own = turns(text, view)
    assert starts(view, NO_RUNNING_JOBS, own, request("one", queue)) == {"one": starts_h}
    assert hours(comes(view, NO_RUNNING_JOBS, own, request("comes", queue))) == starts_h


def test_parts_of_a_gpu_are_free_and_come_back_as_parts(make_view) -> None:
    holders = np.zeros((1, 8), np.int32)
    holders[0, 7] = 1
    parts = HeldParts(np.array([1, 2]), np.array([7, 7]), np.array([300, 600]))
    milli = np.zeros((1, 8), np.int16)
    milli[0, 7] = 100
    view = make_view({"r01": [0]}, holders=holders, jobs=("all", "p", "q"), parts=parts, milli=milli)
    jobs = running(all=9, p=1, q=2)
    own = turns("[queue.a]\n", view)
    asked = [request(f"s{share}", gpus=1, gpu_share=share) for share in (100, 250, 900)]
    assert starts(view, jobs, own, *asked[:1]) == {"s100": 0.0}
    assert starts(view, jobs, own, *asked[1:]) == {"s250": 1.0, "s900": 2.0}
    assert hours(comes(view, jobs, own, asked[0])) == 0.0
    assert hours(comes(view, jobs, own, request("whole", gpus=1))) == 2.0


def test_from_when_a_queue_may_have_more() -> None:
    standing = QueueStanding(
        read_queues("[queue.a]\nlimit = {gpu = 8}\n"), {"a": LeafUse({"gpu": 6.0}, 0.0)}, {"gpu": 9.0}
    )

    def of(gpus: float) -> QueueHold:
        return QueueHold("a", {"gpu": gpus})

    spans = [(-1.0, 50.0, of(4.0)), (-1.0, 90.0, of(2.0)), (50.0, 70.0, of(6.0))]
    assert find_allowed_delay_s(standing, spans, of(2.0)) == 0.0
    assert find_allowed_delay_s(standing, spans, of(4.0)) == 70.0
    assert find_allowed_delay_s(standing, spans, of(8.0)) == 90.0
    assert find_allowed_delay_s(standing, spans, of(9.0)) == float("inf")


def test_jobs_of_other_schedulers_are_held_to_no_limit_but_to_maintenance(make_view) -> None:
    window = "from = 2027-01-15T07:00:00Z\nto = 2027-01-15T10:00:00Z\n"
    text = f'[queue.a]\n[[maintenance]]\nnodes = ["n001"]\n{window}'
    view = make_view({"r01": [8, 8]})
    found = starts(view, NO_RUNNING_JOBS, turns(text, view), request("\nfirst", "theirs"), request("\nnext", "theirs"))
    assert found == {"\nfirst": 0.0, "\nnext": 1.0}


@examples(150)
@given(st.sampled_from(["", TREE]), free, queued, requests, st.sampled_from([0.5, 1.0, 3.0]))
def test_no_blocker_ends_after_the_start_that_waits_for_it(
    tree: str, nodes: Any, drawn: Any, columns: Any, factor: float
) -> None:
    """The ends of blockers and the start are of the same futures, and are corrected alike."""

    def told(waiting: str | None, start_ms: dict[str, int]) -> dict[str, int]:
        return {level: NOW_MS + round(factor * (time_ms - NOW_MS)) for level, time_ms in start_ms.items()}

    queue, view, jobs = scene(nodes, drawn)
    futures = sample_timelines(queue, view, jobs, TIMES, OPTIONS, turns=turns_of(tree, view))
    issued = compute_start_times(futures)
    newcomer = PlacementRequest(request_id="new", queue="a", **columns)
    for one in [newcomer, *(entry.request for entry in queue)]:
        estimate = estimate_start(one, futures, adjust=told)
        start_ms = issued.get(one.request_id)
        pairs = [(estimate.start_ms, estimate.blocked_by)]
        if start_ms is not None:
            mine = told(None, dict(zip(("p10", "p50", "p90"), start_ms, strict=True)))
            pairs.append((mine, list_blockers(one, futures, NOW_MS, mine, told)))
        for starts_ms, blockers in pairs:
            for blocker in blockers:
                assert starts_ms is not None
                assert all(blocker.ends_ms[level] <= starts_ms[level] for level in starts_ms)
                assert list(blocker.ends_ms.values()) == sorted(blocker.ends_ms.values())


def test_a_job_that_still_runs_when_the_request_starts_is_no_blocker(make_view) -> None:
    """Each of 16 nodes has a job of one to 24 hours: whichever ends first, the start is not after a later one."""
    holders = np.repeat(np.arange(16, dtype=np.int32), 8).reshape(16, 8)
    names = tuple(f"j{row}" for row in range(16))
    view = make_view({"r01": [0] * 16}, holders=holders, jobs=names)
    levels = tuple(HOUR_S * hours for hours in (0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 18.0, 24.0))
    futures = sample_timelines(
        [], view, table_of({name: Run(NOW_MS, 8, left_s=levels) for name in names}), EXACT, OPTIONS
    )
    estimate = estimate_start(request("new"), futures)
    assert estimate.start_ms is not None
    for blocker in estimate.blocked_by:
        assert blocker.ends_ms["p50"] <= estimate.start_ms["p50"]


def test_the_gpus_that_are_held_for_a_request_are_no_blocker_of_it(make_view) -> None:
    names = ("j", make_hold_name("p"))
    view = make_view({"r01": [0, 0]}, holders=np.repeat(np.arange(2, dtype=np.int32), 8).reshape(2, 8), jobs=names)
    jobs = table_of({name: Run(NOW_MS, 8, left_s=(HOUR_S,) * 8) for name in names})
    waiting = request("p", gang=2)
    futures = sample_timelines([WaitingEntry(waiting, NOW_MS)], view, jobs, EXACT, OPTIONS)
    assert [blocker.job for blocker in list_blockers(waiting, futures, NOW_MS)] == ["j"]
