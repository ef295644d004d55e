"""Laws of plays in which running jobs are stopped for requests that are within the guarantee of their queue.

`make soak` plays thousands of scenes; else it is dozens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.placement.play.progress import JobProgress
from fleetcast.placement.play.replay import Replay, Trace
from fleetcast.placement.play.served import ServedPlan
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.training.judges.played import PlayScene, make_served_plan
from fleetcast.training.judges.played_reclaim import CheckpointDraw, ReclaimMethod, make_reclaim_replay
from tests.fuzz.bounds import examples

NODES, EACH = 2, 4
DAY_S = 86_400.0
TREE = read_queues("""
[policy]
half_life_h = 1
min_run_s = 30
stops_a_day = 2
[queue.a]
guaranteed = {gpu = 4}
[queue.b]
guaranteed = {gpu = 2}
[queue.c]
""")


@dataclass(frozen=True)
class Job:
    submit_s: int
    run_s: int
    gpus: int
    queue: str
    limited: bool = True


jobs = st.builds(
    Job,
    st.integers(0, 900),
    st.integers(1, 1500),
    st.sampled_from([1, 1, 2, 3, 4, 8]),
    st.sampled_from(["a", "b", "c", "c"]),
    st.booleans(),
)
scenes = st.lists(jobs, min_size=4, max_size=16).map(lambda rows: sorted(rows, key=lambda job: job.submit_s))
methods = st.sampled_from(["by_cost", "youngest_first"])
patience = st.sampled_from([0.0, 300.0])
seeds = st.integers(0, 5)
few = examples(25)


def make_scene(rows: Sequence[Job]) -> PlayScene:
    limits = [2.0 * row.run_s if row.limited else None for row in rows]
    trace = Trace(
        [str(at) for at in range(len(rows))],
        [float(row.submit_s) for row in rows],
        [float(row.run_s) for row in rows],
        [row.gpus for row in rows],
        limits,
        ["ada"] * len(rows),
        [row.queue for row in rows],
    )
    return PlayScene(trace, NODES, EACH, TREE)


def make_play(
    rows: Sequence[Job], method: ReclaimMethod, patience_s: float, seed: int
) -> tuple[Replay, ServedPlan, JobProgress]:
    replay, reclaim = make_reclaim_replay(make_scene(rows), method, patience_s, CheckpointDraw(seed))
    reclaim.progress.interval_s[:] = np.minimum(reclaim.progress.interval_s / 20, np.inf)  # 30 s to 12 min
    assert isinstance(replay.scheduler, ServedPlan)
    return replay, replay.scheduler, reclaim.progress


def list_slots(plan: ServedPlan, job: int) -> set[tuple[str, int]]:
    return {(rank.node, gpu) for rank in plan.holds[job].ranks for gpu in rank.gpus}


@few
@given(scenes, methods, patience, seeds)
def test_a_gpu_has_one_holder_and_who_paid_runs_on_what_was_freed(
    rows: list[Job], method: ReclaimMethod, patience_s: float, seed: int
) -> None:
    replay, plan, progress = make_play(rows, method, patience_s, seed)
    before: dict[int, set[tuple[str, int]]] = {}
    seen = 0
    for now_s in replay.play_steps():
        held: Counter[tuple[str, int]] = Counter()
        for job in plan.holds:
            held.update(list_slots(plan, job))
        assert max(held.values(), default=0) <= 1
        assert int((plan.view.milli > 0).sum()) <= NODES * EACH - len(held)
        for stop in progress.stops[seen:]:
            assert (stop.at_s, stop.job in before) == (now_s, True)
            assert before[stop.job] & list_slots(plan, stop.payer), "what was freed went to somebody else"
        seen = len(progress.stops)
        before = {job: list_slots(plan, job) for job in plan.holds}


@few
@given(scenes, methods, patience, seeds)
def test_all_work_is_done_once_and_all_that_was_held_is_charged(
    rows: list[Job], method: ReclaimMethod, patience_s: float, seed: int
) -> None:
    replay, plan, progress = make_play(rows, method, patience_s, seed)
    replay.play()
    assert np.isfinite(replay.end_s).all()
    assert progress.saved_s.tolist() == [row.run_s for row in rows]
    expected_s = np.array([row.run_s for row in rows], np.float64)
    for stop in progress.stops:
        expected_s[stop.job] += stop.lost_s
    ran_s = np.zeros(len(rows))
    for attempt in progress.attempts:
        ran_s[attempt.job] += attempt.end_s - attempt.start_s - min(attempt.restart_s, attempt.end_s - attempt.start_s)
    assert ran_s == pytest.approx(expected_s, abs=1e-6)
    assert plan.played is not None
    held = sum((attempt.end_s - attempt.start_s) * rows[attempt.job].gpus for attempt in progress.attempts)
    charged = sum(charge.compute_held_gpu_s(0, 10**12) for charge in plan.played.closed)
    assert charged == pytest.approx(held, rel=1e-3, abs=rows and 8 * len(progress.attempts) * 1e-2)


@few
@given(scenes, methods, patience, seeds)
def test_stops_stay_within_the_bounds_of_the_policy_and_are_never_returned(
    rows: list[Job], method: ReclaimMethod, patience_s: float, seed: int
) -> None:
    replay, _, progress = make_play(rows, method, patience_s, seed)
    replay.play()
    begun = {(attempt.job, attempt.end_s): attempt.start_s for attempt in progress.attempts}
    for stop in progress.stops:
        recent = [one for one in progress.list_stops(stop.job) if stop.at_s - DAY_S < one.at_s <= stop.at_s]
        assert len(recent) <= TREE.policy.reclaim.stops_a_day
        assert stop.at_s - begun[stop.job, stop.at_s] >= TREE.policy.reclaim.min_run_s
        assert all(rows[stop.job].queue != rows[stop.payer].queue for stop in progress.stops)
    pairs = {(stop.job, stop.payer) for stop in progress.stops}
    assert not any((payer, job) in pairs for job, payer in pairs)


@few
@given(scenes, methods, patience, seeds)
def test_the_same_play_gives_the_same_stops_and_starts(
    rows: list[Job], method: ReclaimMethod, patience_s: float, seed: int
) -> None:
    (one, _, first), (two, _, second) = (make_play(rows, method, patience_s, seed) for _ in range(2))
    assert one.play().tobytes() == two.play().tobytes()
    assert first.stops == second.stops


@few
@given(scenes, seeds)
def test_without_preemption_the_play_is_that_of_the_serving_plan(rows: list[Job], seed: int) -> None:
    replay, plan, progress = make_play(rows, "no_preemption", 0.0, seed)
    scene = make_scene(rows)
    served = make_served_plan(scene, "ours")
    assert Replay(scene.trace, served).play().tobytes() == replay.play().tobytes()
    assert not progress.stops
    assert plan.played is not None
    assert served.played is not None
    assert plan.played.closed == served.played.closed


def test_a_request_within_its_guarantee_takes_back_what_was_lent_and_the_cheapest_job_pays() -> None:
    """c holds all eight GPUs. The younger of its jobs has just written a checkpoint, or the older one has."""
    rows = [Job(0, 5000, 4, "c", False), Job(1000, 5000, 4, "c", False), Job(2000, 100, 4, "a", False)]
    for intervals_s, victim in (((1999.0, np.inf), 0), ((np.inf, 999.0), 1)):
        replay, _, progress = make_play(rows, "by_cost", 0.0, 1)
        progress.interval_s[:2] = intervals_s
        replay.play()
        assert [(stop.job, stop.payer, stop.at_s, stop.lost_s) for stop in progress.stops] == [(victim, 2, 2000.0, 1.0)]
        assert replay.start_s.tolist() == [0.0, 1000.0, 2000.0]
        assert replay.end_s[victim] == 2100.0 + 300.0 + 5000.0 - intervals_s[victim]
    replay, _, progress = make_play(rows, "youngest_first", 0.0, 1)
    progress.interval_s[:2] = (1999.0, np.inf)
    replay.play()
    assert [(stop.job, stop.lost_s) for stop in progress.stops] == [(1, 1000.0)]


def test_a_job_that_was_stopped_during_its_restart_loses_the_restart_alone() -> None:
    progress = JobProgress([1000.0], np.array([400.0]))
    assert progress.begin_attempt(0, 0.0) == 1000.0
    assert progress.find_checkpoint_s(0, 900.0) == 800.0
    progress.stop_attempt(0, 900.0, payer=7)
    assert progress.begin_attempt(0, 2000.0) == 2500.0
    assert np.isnan(progress.find_checkpoint_s(0, 2100.0))
    progress.stop_attempt(0, 2100.0, payer=7)
    assert [(stop.lost_s, stop.restart_s) for stop in progress.stops] == [(100.0, 0.0), (0.0, 100.0)]
    assert replace(progress.attempts[1]).end_s == 2100.0
    assert progress.begin_attempt(0, 3000.0) == 3500.0
    progress.end_attempt(0, 3500.0)
    assert progress.saved_s.tolist() == [1000.0]
