"""Who holds a gang back, from what its ranks tell."""

import numpy as np

from fleetcast.fleet.events import Phase, Step, StepParts
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.stragglers.step_peers import find_blame
from fleetcast.models.stragglers.steps import StepPace, measure_pace

REPLICAS, STAGES = 4, 2


def told(compute: np.ndarray, data: np.ndarray | None = None, length: np.ndarray | None = None):
    """An attempt whose ranks told of `compute` seconds (step, replica, stage), and its pace after each step."""
    attempt, pace, now_ms = JobAttempt("j", 1), StepPace(0), 0
    paces = []
    for number, rows in enumerate(compute):
        own = rows + (0 if data is None else data[number])
        whole_s = float(own.max()) + 0.1
        now_ms += int(whole_s * 1000)
        for rank, seconds in enumerate(rows.ravel().tolist()):
            parts = StepParts(compute=seconds, data=0.0 if data is None else float(data[number].ravel()[rank]))
            step = Step(
                job="j", sequence=((rank + 1) << 32) + number, time_ms=now_ms, step=number, rank=rank,
                stage=rank % STAGES, duration_s=whole_s, parts=parts,
                sequence_length=None if length is None else float(length[number].ravel()[rank]),
            )  # fmt: skip
            attempt.fold(step)
        pace = measure_pace(attempt, pace)
        paces.append(pace)
    return attempt, paces


def gang(steps: int, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, 0.01, (steps, REPLICAS, STAGES)))


def test_a_rank_over_its_peers_is_named_at_the_third_step_and_no_other():
    compute = gang(40)
    compute[30:, 2, 1] *= 1.2
    _, paces = told(compute)
    assert [bool(pace.ranks) for pace in paces] == [False] * 32 + [True] * 8
    assert all(pace.ranks == (5,) and pace.cause == "compute" and pace.slow for pace in paces[32:])


def test_who_was_slow_from_the_first_step_is_named_though_the_job_never_changed():
    compute = gang(8)
    compute[:, 1, 0] *= 1.4
    pace = told(compute)[1][-1]
    assert (pace.slow, pace.ranks) == (True, (2,))
    assert abs(pace.since_ms) < 5
    assert 1.3 < pace.ratio < 1.5
    assert not told(gang(8))[1][-1].slow


def test_one_clear_step_names_a_rank_unless_another_one_was_slow_just_before():
    compute = gang(4)
    compute[3, 0, 0] *= 1.6
    assert [row.rank for row in find_blame(told(compute)[0].rank_steps).ranks] == [0]
    compute[2, 3, 0] *= 1.6
    assert find_blame(told(compute)[0].rank_steps).ranks == ()


def test_slow_data_loading_of_one_rank_is_its_own_and_a_few_milliseconds_are_nothing():
    compute, data = gang(8), np.full((8, REPLICAS, STAGES), 0.002)
    data[:, 0, 1] = 0.02
    assert find_blame(told(compute, data)[0].rank_steps).ranks == ()
    data[:, 0, 1] = 0.5
    (row,) = find_blame(told(compute, data)[0].rank_steps).ranks
    assert (row.rank, row.part) == (1, "data")


def test_a_rank_with_longer_sequences_is_not_slow():
    compute, length = gang(8), np.full((8, REPLICAS, STAGES), 1000.0)
    compute[:, 0, 0] *= 1.5
    length[:, 0, 0] *= 1.5
    assert find_blame(told(compute, length=length)[0].rank_steps).ranks == ()


def test_a_stage_that_became_the_slowest_is_named_and_nobody_when_stages_are_even():
    compute = gang(20)
    compute[8:, :, 1] *= 1.5
    pace = told(compute)[1][-1]
    assert (pace.slow, pace.stage, pace.ranks) == (True, 1, ())
    assert pace.ratio > 1.1
    even = told(1.5 * gang(10))[1][-1]
    assert (even.slow, even.stage) == (False, None)


def test_ranks_that_pause_in_turns_are_nobodys_fault():
    compute = gang(60)
    for number in range(40, 60):  # each step waits for somebody else
        compute[number, number % REPLICAS, number % STAGES] *= 1.4
    pace = told(compute)[1][-1]
    assert (pace.slow, pace.ranks, pace.cause) == (True, (), "garbage_collection")
    lone = gang(60)
    for number, replica in ((20, 0), (33, 2), (47, 3)):
        lone[number, replica, 0] *= 3
    pace = told(lone)[1][-1]
    assert (pace.slow, pace.cause) == (False, "garbage_collection")


def test_ranks_that_report_in_batches_are_compared_by_the_steps_that_all_told():
    compute = gang(12)
    compute[:, 3, 1] *= 1.3
    attempt, _ = told(compute)
    for number in range(12, 17):  # rank 0 is ahead
        step = Step(
            job="j", sequence=(1 << 32) + number, time_ms=60_000 + number, step=number, rank=0, stage=0,
            duration_s=1.4, parts=StepParts(compute=1.0),
        )  # fmt: skip
        attempt.fold(step)
    assert [row.rank for row in find_blame(attempt.rank_steps).ranks] == [7]


def test_nobody_is_blamed_in_an_evaluation():
    compute = gang(8)
    compute[:, 1, 0] *= 1.4
    attempt, _ = told(compute)
    attempt.fold(Phase(job="j", sequence=1, time_ms=99_000, name="evaluation"))
    assert not measure_pace(attempt).slow
