from collections.abc import Sequence

import numpy as np
import pytest

from fleetcast.training.judges.queue_simulation import NEVER_S, QueuedJobs, QueueSimulation

Rows = Sequence[tuple[int, int, int, int]]  # submit_s, cores, limit_s, run_s


def table(rows: Rows) -> tuple[QueuedJobs, np.ndarray]:
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    return QueuedJobs(columns[0], columns[1], columns[2]), columns[3]


def starts(rows: Rows, capacity: int = 10, reserved: int | None = None) -> list[int]:
    jobs, run_s = table(rows)
    return played(jobs, run_s, capacity, reserved).tolist()


def played(jobs: QueuedJobs, run_s: np.ndarray, capacity: int, reserved: int | None = None) -> np.ndarray:
    """(job,) when each starts; `NEVER_S` for a job that is larger than the cluster."""
    state = QueueSimulation(jobs, run_s.tolist(), capacity, reserved)
    for job, submit_s in enumerate(jobs.submit_s.tolist()):
        state.advance(submit_s)
        state.submit(job)
    state.advance(NEVER_S)
    starts = np.full(len(jobs), NEVER_S, np.int64)
    starts[list(state.start_s)] = list(state.start_s.values())
    return starts


def busy(seed: int, count: int = 60, scale: int = 1) -> tuple[QueuedJobs, np.ndarray]:
    """Jobs for a cluster of 16 that is asked for more than it has now and then."""
    rng = np.random.default_rng(seed)
    submit_s = np.cumsum(rng.integers(0, 400 * scale, count))
    limit_s = rng.choice([600, 3600, 7200], count) * scale
    return QueuedJobs(submit_s, rng.choice([1, 2, 4, 12], count), limit_s), rng.integers(1, limit_s)


def test_jobs_start_at_once_while_there_is_room() -> None:
    assert starts([(0, 5, 100, 50), (70, 5, 100, 50)]) == [0, 70]


def test_an_early_end_lets_the_next_start_early() -> None:
    assert starts([(0, 10, 1000, 200), (70, 10, 1000, 100)]) == [0, 200]


def test_a_job_is_killed_at_its_limit() -> None:
    assert starts([(0, 10, 200, 9999), (70, 10, 100, 1)]) == [0, 200]


def test_a_short_job_passes_where_it_delays_nobody() -> None:
    # the wide one is planned at 1000; of the two behind it only the short one ends by then
    assert starts([(0, 6, 1000, 1000), (70, 10, 100, 100), (140, 4, 2000, 60), (210, 4, 700, 60)]) == [
        *(0, 1000),
        *(1100, 210),
    ]


def test_easy_plans_for_the_first_only() -> None:
    # two gangs wait; conservatively the last keeps clear of both, with EASY of the first alone
    rows = [(0, 6, 1000, 1000), (70, 8, 500, 500), (140, 6, 500, 500), (210, 2, 5000, 10)]
    assert starts(rows, reserved=1)[3] == 210
    assert starts([*rows[:2], (140, 10, 500, 500), rows[3]], reserved=1)[3] == 210
    assert starts([*rows[:2], (140, 10, 500, 500), rows[3]])[3] == 2000


def test_what_is_larger_than_the_cluster_never_starts_and_holds_nobody_up() -> None:
    assert starts([(0, 11, 100, 50), (10, 10, 100, 50)]) == [NEVER_S, 10]


@pytest.mark.parametrize("reserved", [None, 1])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_starts_before_his_submit_and_the_cluster_is_never_overfull(seed: int, reserved: int | None) -> None:
    jobs, run_s = busy(seed)
    start_s = played(jobs, run_s, 16, reserved)
    assert (start_s >= jobs.submit_s).all()
    assert (start_s < NEVER_S).all()
    used = [jobs.cores[(start_s <= now) & (now < start_s + run_s)].sum() for now in start_s]
    assert max(used) <= 16
    assert (start_s - jobs.submit_s > 600).any()


@pytest.mark.parametrize("seed", range(3))
def test_with_exact_run_times_the_plan_comes_true(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned at the submission is what happens, whoever comes later."""
    monkeypatch.setattr("fleetcast.training.judges.queue_simulation.PASS_S", 0)
    jobs, run_s = busy(seed, scale=997)
    exact = QueuedJobs(jobs.submit_s, jobs.cores, run_s)
    state = QueueSimulation(exact, run_s.tolist(), 16)
    planned = {}
    for job, submit_s in enumerate(exact.submit_s.tolist()):
        state.advance(submit_s)
        state.submit(job)
        planned[job] = state.plan_starts()[job]
    state.advance(NEVER_S)
    assert state.start_s == planned


@pytest.mark.parametrize("seed", range(3))
def test_played_with_the_real_run_times_the_last_start_is_the_replays(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetcast.training.judges.queue_simulation.COARSER", 0.0)
    jobs, run_s = busy(seed)
    state = QueueSimulation(jobs, run_s.tolist(), 16)
    for job, submit_s in enumerate(jobs.submit_s.tolist()):
        state.advance(submit_s)
        state.submit(job)
    last = len(jobs) - 1
    assert state.fork(run_s.tolist()).play_until_start(last) == played(jobs, run_s, 16)[last]


def test_to_plan_and_to_play_on_a_fork_change_nothing() -> None:
    jobs, run_s = busy(1)
    state, plain = (QueueSimulation(jobs, run_s.tolist(), 16) for _ in range(2))
    for job, submit_s in enumerate(jobs.submit_s.tolist()):
        for one in (state, plain):
            one.advance(submit_s)
            one.submit(job)
        assert state.plan_starts() == state.plan_starts()
        state.fork([1] * len(jobs)).advance(submit_s + 5000)
    for one in (state, plain):
        one.advance(NEVER_S)
    assert state.start_s == plain.start_s


def test_a_fork_may_plan_for_fewer() -> None:
    # as above: the last starts beside the first gang, and in the way of the second
    jobs, run_s = table([(0, 6, 1000, 1000), (70, 8, 500, 500), (140, 10, 500, 500), (210, 2, 5000, 10)])
    state = QueueSimulation(jobs, run_s.tolist(), 10)
    for job in range(4):
        state.advance(jobs.submit_s[job])
        state.submit(job)
    assert [state.fork(state.run_s, reserved).play_until_start(3) for reserved in (None, 1)] == [2000, 210]
