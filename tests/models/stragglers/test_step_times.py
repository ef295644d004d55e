"""What step times say where jobs pause, resize, write checkpoints or change their pace for good."""

import pytest

from fleetcast.fleet.events import Checkpoint, Phase, Resized, Step, StepParts
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import RankPlacement
from fleetcast.models.stragglers.steps import measure_pace


def report(fleet, job, durations, first=2):
    for sequence, seconds in enumerate(durations, first):
        fleet.now_ms += round(seconds * 1000)
        fleet.jobs.apply(Step(job=job, sequence=sequence, time_ms=fleet.now_ms, step=sequence, duration_s=seconds))


def test_a_job_that_was_slow_before_its_evaluation_is_not_slow_in_it(small_fleet):
    fleet = small_fleet(2)
    fleet.start("j", fleet.names)
    report(fleet, "j", [2.0] * 30 + [2.6] * 6)
    assert fleet.tick().stragglers["j"]["slow"]
    fleet.jobs.apply(Phase(job="j", sequence=99, time_ms=fleet.now_ms, name="evaluation", rank=0))
    body = fleet.tick().stragglers["j"]
    assert (body["slow"], body["sentence"]) == (False, "in evaluation: its steps are not compared")
    fleet.jobs.apply(Phase(job="j", sequence=100, time_ms=fleet.now_ms, name="steady", rank=0))
    assert fleet.tick().stragglers["j"]["slow"]


@pytest.mark.parametrize(
    ("durations", "sentence"),
    [
        ([2.0] * 30 + [9.0] * 2, "steps take 9 s, usually 2; too few to say that it is slow"),
        ([1.6, 2.0, 2.4, 2.0] * 8 + [2.5] * 2, "steps take 2.50 s, usually 2; they vary as much as that"),
        ([0.004] * 30, "steps take 0.004 s, as usual"),
        ([0.0] * 30 + [0.01] * 4, "steps take 0.01 s; too few for a comparison yet"),
    ],
)
def test_what_is_said_of_steps_is_so(small_fleet, durations, sentence):
    fleet = small_fleet(2)
    fleet.start("j", fleet.names)
    report(fleet, "j", durations)
    body = fleet.tick().stragglers["j"]
    assert (body["slow"], body["sentence"]) == (False, sentence)
    assert body["observed_step_s"] == durations[-1]


def test_steps_of_no_time_blame_nobody():
    attempt = JobAttempt("j", 1)
    for number in range(20):
        for rank in range(4):
            parts = StepParts(compute=1.0 + (rank == 3))
            attempt.fold(
                Step(
                    job="j", sequence=((rank + 1) << 32) + number, time_ms=1000 * number, step=number, rank=rank,
                    duration_s=0.0, parts=parts,
                )
            )  # fmt: skip
    pace = measure_pace(attempt)
    assert (pace.slow, pace.expected_s, pace.ratio) == (False, None, None)


def fold_ranks(attempt: JobAttempt, number: int, ranks: int) -> None:
    """One step of 1.7 s in which rank 7, if there is one, computes half as long again as the others."""
    for rank in range(ranks):
        parts = StepParts(compute=1.5 if rank == 7 else 1.0)
        attempt.fold(
            Step(
                job="j", sequence=((rank + 1) << 32) + number, time_ms=1700 * number, step=number, rank=rank,
                duration_s=1.7, parts=parts,
            )
        )  # fmt: skip


@pytest.mark.parametrize("members", [1, 2])
def test_the_steps_before_a_resize_are_no_reference_and_the_verdict_ends_with_it(small_fleet, members):
    """A gang of two with a fixed batch shrinks to one member, or gets another node: its steps take twice as long."""
    fleet = small_fleet(2)
    fleet.start("j", fleet.names)
    report(fleet, "j", [2.0] * 30 + [2.6] * 6)
    assert fleet.tick().stragglers["j"]["slow"]
    fleet.jobs.apply(Resized(job="j", sequence=99, time_ms=fleet.now_ms + 30_000, nodes=tuple(fleet.names[:members])))
    report(fleet, "j", [50.0], first=100)
    for number in range(30):
        report(fleet, "j", [4.0], first=101 + number)
        assert not fleet.tick().stragglers["j"]["slow"]
    assert fleet.tick().stragglers["j"]["observed_step_s"] == 4.0
    report(fleet, "j", [5.2] * 6, first=200)
    body = fleet.tick().stragglers["j"]
    assert (body["slow"], body["expected_step_s"]) == (True, 4.0), "a slowdown at the new size still counts"


def test_a_rank_that_a_resize_took_away_is_not_blamed():
    attempt = JobAttempt("j", 1)
    for number in range(20):
        fold_ranks(attempt, number, 8)
    assert measure_pace(attempt).ranks == (7,)
    placed = tuple(RankPlacement(rank, f"n{rank}") for rank in range(5))
    attempt.fold(Resized(job="j", sequence=5, time_ms=1700 * 19 + 1, ranks=placed))
    for number in range(20, 30):
        fold_ranks(attempt, number, 5)
        assert measure_pace(attempt).ranks == ()


def test_ranks_that_fell_silent_are_not_blamed_for_the_steps_that_go_on_without_them():
    attempt, blamed = JobAttempt("j", 1), []
    for number in range(20):
        fold_ranks(attempt, number, 8)
    for number in range(20, 40):
        attempt.fold(Step(job="j", sequence=number, time_ms=1700 * number, step=number, duration_s=1.7))
        blamed.append(measure_pace(attempt).ranks)
    assert blamed[:4] == [(7,)] * 4
    assert blamed[-4:] == [()] * 4


def test_steps_under_a_checkpoint_that_still_runs_do_not_count_unless_ends_are_never_told():
    for earlier_ms, slow in (((), False), ((1_000,), True)):
        attempt, now_ms = JobAttempt("j", 1), 1_000_000
        for number, began_ms in enumerate((*earlier_ms, now_ms + 60_000)):
            attempt.fold(Checkpoint(job="j", sequence=900 + number, time_ms=began_ms, edge="begin"))
        for number, seconds in enumerate([2.0] * 30 + [2.5] * 8):
            now_ms += round(seconds * 1000)
            attempt.fold(Step(job="j", sequence=number, time_ms=now_ms, step=number, duration_s=seconds))
        assert measure_pace(attempt).slow is slow


def test_a_checkpoint_excuses_the_steps_from_its_begin_to_its_end():
    attempt, now_ms = JobAttempt("j", 1), 1_000_000
    edges = ((1_010_100, "begin"), (1_015_900, "end"), (1_030_500, "end"), (1_050_500, "begin"), (1_050_600, "end"))
    for number, (time_ms, edge) in enumerate(edges):
        attempt.fold(Checkpoint(job="j", sequence=900 + number, time_ms=time_ms, edge=edge))
    for number in range(40):
        now_ms += 2000
        attempt.fold(Step(job="j", sequence=number, time_ms=now_ms, step=number, duration_s=2.0))
    assert measure_pace(attempt).steps == 40 - 3 - 1


@pytest.mark.parametrize(("before_s", "slow"), [(0.01, False), (1.0, True)])
def test_steps_that_were_skipped_after_a_resume_are_no_reference_for_ever(before_s, slow):
    attempt, pace, now_ms = JobAttempt("j", 1), None, 1_000_000
    for number in range(400):
        seconds = before_s if number < 100 else 2.0 + 0.02 * (number % 3)
        now_ms += round(seconds * 1000)
        attempt.fold(Step(job="j", sequence=number, time_ms=now_ms, step=number, duration_s=seconds))
        if number >= 90:
            pace = measure_pace(attempt, pace)
    assert pace.slow is slow
    assert pace.best_s == pytest.approx(1.0 if slow else 2.0, abs=0.05)
