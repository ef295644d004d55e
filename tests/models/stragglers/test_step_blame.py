"""What is held to its own past or to its peers' noise before a gang is called slow, and who is named then."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from fleetcast.fleet.events import Checkpoint, Started, Step, StepParts
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import RankPlacement
from fleetcast.models.risk.rules import BY_NAME
from fleetcast.models.stragglers.steps import StepPace, measure_pace
from fleetcast.models.stragglers.straggler import Suspect, _make_answer

RANKS, STAGES = 8, 4


def follow(compute: np.ndarray, stages: int = 0, wait_s=0.2, attempt=None):
    """An attempt whose ranks computed `compute` (step, rank) seconds, and its pace after each step."""
    attempt, pace, now_ms, paces = attempt or JobAttempt("j", 1), None, 0, []
    waits = np.broadcast_to(wait_s, len(compute))
    for number, (row, wait) in enumerate(zip(compute, waits.tolist(), strict=True)):
        whole_s = float(row.max()) + wait
        now_ms += round(whole_s * 1000)
        for rank, seconds in enumerate(row.tolist()):
            parts = StepParts(compute=seconds, communication=whole_s - seconds)
            step = Step(
                job="j", sequence=((rank + 1) << 32) + number, time_ms=now_ms, step=number, rank=rank,
                stage=rank % stages if stages else None, duration_s=whole_s, parts=parts,
            )  # fmt: skip
            attempt.fold(step)
        pace = measure_pace(attempt, pace)
        paces.append(pace)
    return attempt, paces


def answer(attempt: JobAttempt, pace: StepPace, suspects=()):
    return _make_answer(
        0,
        SimpleNamespace(attempts=[attempt], nodes=[], count_hosts=lambda _: len(attempt.hosts)),
        pace,
        list(suspects),
        attempt.steps[-1].time_ms,
    )


def placed() -> JobAttempt:
    attempt = JobAttempt("j", 1)
    ranks = tuple(RankPlacement(rank, f"n{rank}", (0,)) for rank in range(RANKS))
    attempt.fold(Started(job="j", sequence=0, time_ms=0, ranks=ranks))
    return attempt


def even(steps: int, ranks: int = RANKS, noise: float = 0.01) -> np.ndarray:
    return np.exp(np.random.default_rng(1).normal(0, noise, (steps, ranks)))


@pytest.mark.parametrize("stages", [STAGES, 0])
def test_a_job_whose_last_stage_always_computes_longest_is_never_slow(stages):
    compute = even(40)
    compute[:, 3::4] *= 1.25
    attempt, paces = follow(compute, stages)
    assert not any(pace.slow for pace in paces)
    expected = "stage 3 computes longest; even stages would take 1.2" if stages else "2 ranks take longer than the rest"
    assert expected in answer(attempt, paces[-1])["sentence"]


def test_the_stage_that_grew_is_named_though_the_job_is_slow_by_its_own_past_too():
    compute = even(60)
    compute[:, 3::4] *= 1.25
    compute[40:, 1::4] *= 1.7
    attempt, paces = follow(compute, STAGES)
    assert not any(pace.slow for pace in paces[:40])
    assert (paces[-1].slow, paces[-1].by_peers, paces[-1].stage) == (True, False, 1)
    body = answer(attempt, paces[-1])
    assert (body["culprit"]["kind"], body["culprit"]["name"], body["cause"]) == ("stage", "1", "compute")
    assert body["culprit"]["share"] > 0.9


def test_among_ranks_that_always_took_longer_the_one_that_grew_is_named():
    compute = even(60)
    compute[:, 3::4] *= 1.25
    compute[40:, 7] *= 1.4
    assert follow(compute)[1][-1].ranks == (7,)


def test_what_stages_took_survives_a_snapshot_and_a_pace_without_it_is_read():
    compute = even(12)
    compute[:, 3::4] *= 1.25
    for pace in (follow(compute, STAGES)[1][-1], follow(compute)[1][-1]):
        document = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(pace)))
        assert msgspec.convert(document, StepPace) == pace
        assert pace.stages or pace.uneven
    assert msgspec.convert({"steps": 3}, StepPace).stages == ()


def test_among_many_noisy_ranks_nobody_is_blamed_but_who_is_over_their_noise():
    paces = follow(even(60, 64, noise=0.1))[1]
    assert not any(pace.slow or pace.ranks for pace in paces)
    compute = even(30, 16, noise=0.02)
    compute[:, 5] *= 1.3
    paces = follow(compute)[1]
    assert all(pace.slow and pace.ranks == (5,) for pace in paces[4:])


def test_who_explains_little_of_a_slow_job_is_not_named_for_it():
    compute = 0.5 * even(50, noise=0.003)
    compute[:, 5] *= 1.12
    wait_s = np.where(np.arange(50) < 40, 1.5, 2.5)
    pace = follow(compute, wait_s=wait_s)[1][-1]
    assert (pace.slow, pace.ranks, pace.stage) == (True, (), None)
    compute[40:, 5] = 1.6
    assert follow(compute, wait_s=wait_s)[1][-1].ranks == (5,)


def test_a_member_with_a_graver_reason_on_another_node_is_named_before_a_slow_rank():
    compute = even(50)
    compute[40:, 5] *= 1.3
    attempt, paces = follow(compute, attempt=placed())
    assert answer(attempt, paces[-1])["culprit"]["name"] == "n5/0"
    for node, severity, name in (("n2", 0.8, "n2/0"), ("n2", 0.05, "n5/0"), ("n5", 0.8, "n5/0")):
        suspect = Suspect(BY_NAME["thermal_throttle"], f"{node}/0", node, severity, True, 1, "its clock is low")
        body = answer(attempt, paces[-1], [suspect])
        assert (body["slow"], body["culprit"]["name"]) == (True, name)
        assert ("its clock is low" in body["sentence"]) == (name == f"{node}/0")


def test_a_checkpoint_in_a_slow_job_neither_contradicts_that_nor_hides_who_it_is():
    compute = even(60)
    compute[40:, 5] *= 1.4
    attempt, paces = follow(compute)
    last = attempt.steps[-1]
    attempt.fold(Checkpoint(job="j", sequence=1, time_ms=last.time_ms - 10, edge="begin"))
    pace = measure_pace(attempt, paces[-1])
    assert (pace.slow, pace.ranks, pace.cause) == (True, (5,), "compute")
    assert pace.ratio == pytest.approx(paces[-1].ratio, rel=0.1)


def alone(seconds, tokens=None, length=None, parts=None) -> list[StepPace]:
    """The pace after each of the last 300 steps of a job that tells of its steps as one."""
    attempt, pace, paces, now_ms = JobAttempt("j", 1), None, [], 0
    for number, duration_s in enumerate(seconds):
        now_ms += round(duration_s * 1000)
        step = Step(
            job="j", sequence=number + 1, time_ms=now_ms, step=number, duration_s=float(duration_s),
            tokens=None if tokens is None else int(tokens[number]),
            sequence_length=None if length is None else length, parts=parts(number) if parts else None,
        )  # fmt: skip
        attempt.fold(step)
        if number >= len(seconds) - 300:
            pace = measure_pace(attempt, pace)
            paces.append(pace)
    return paces


@pytest.mark.parametrize("length", [2048.0, None])
def test_steps_that_grow_with_their_tokens_little_by_little_are_slow_by_these_or_not_at_all(length):
    work = np.linspace(1, 1.6, 700) * (1 + 0.1 * np.random.default_rng(0).standard_normal(700))
    paces = alone(work + 0.2, 1e5 * work, length)
    assert all(pace.cause == "sequence_length" for pace in paces if pace.slow)
    assert not all(pace.slow for pace in paces)
    last = alone(np.linspace(1, 1.6, 700) + 0.2)[-1]
    assert (last.slow, last.cause) == (True, "unknown")


def test_steps_longer_by_their_tokens_alone_are_nobodys_fault_and_others_are_slow():
    work = np.repeat([1.0, 2.0], [100, 8]) * (1 + 0.03 * np.random.default_rng(0).standard_normal(108))
    assert alone(work + 0.1, 1e5 * work)[-1].cause == "sequence_length"
    slow = np.where(np.arange(108) < 100, 1.0, 1.3)
    varied = 1e5 * (1 + 0.1 * np.random.default_rng(0).standard_normal(108))
    pace = alone(slow * varied / 1e5, varied)[-1]
    assert (pace.slow, pace.cause) == (True, "unknown")


def test_what_grew_besides_the_parts_that_have_a_name_is_no_cause():
    def parts(number: int) -> StepParts:
        late = number >= 40
        return StepParts(compute=0.8 + 0.001 * late, communication=0.1, data=0.05, other=0.05 + late)

    pace = alone([1.0] * 40 + [2.0] * 6, parts=parts)[-1]
    assert (pace.slow, pace.cause) == (True, "unknown")


def test_ranks_that_pause_in_turns_are_not_the_cause_of_slow_communication():
    compute = even(60)
    for number in range(40, 60):
        compute[number, number % RANKS] *= 1.4
    pace = follow(compute, wait_s=np.where(np.arange(60) < 40, 0.2, 1.5))[1][-1]
    assert (pace.slow, pace.ranks, pace.cause) == (True, (), "communication")
    assert follow(compute)[1][-1].cause == "garbage_collection"
