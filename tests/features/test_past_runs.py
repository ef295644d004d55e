"""What is known of similar jobs at submission: counted once, in any order, and kept over a restart."""

import json
import math
from itertools import permutations

import numpy as np
import pytest

from fleetcast.features.past_runs import COLUMN, FEATURES, JobShape, PastRuns

SHAPE = JobShape(user="ada", group="physics", name="train-17", gpus=8, limit_s=3600, submitted_ms=1_000)
S = 1_000


def run(history: PastRuns, job: str, begin_s: int, run_s: int, outcome: str = "finished", **shape: object) -> None:
    fields = {"user": "ada", "group": "physics", "gpus": 8, "limit_s": 3600, "submitted_ms": begin_s * S, **shape}
    history.record_submission(job, 1, JobShape(**fields))  # type: ignore[arg-type]
    history.record_start(job, 1, begin_s * S)
    history.record_end(job, 1, (begin_s + run_s) * S, outcome)


def value(history: PastRuns, name: str, now_s: int = 10_000, shape: JobShape = SHAPE) -> float:
    return float(history.compute_features(shape, now_s * S)[COLUMN[name]])


def test_nothing_is_known_of_the_first_job() -> None:
    features = PastRuns().compute_features(SHAPE, 10_000)
    assert features.shape == (len(FEATURES),)
    assert features[COLUMN["log_gpus"]] == pytest.approx(math.log(8))
    assert features[COLUMN["backed_by"]] == -1
    assert np.isnan(features[COLUMN["user_last"]])


def test_last_mean_of_two_and_median_are_of_the_runs_that_ended() -> None:
    history = PastRuns()
    for number, run_s in enumerate((100, 10, 1000)):
        run(history, f"j{number}", number * 2000, run_s)
    history.record_submission("now", 1, SHAPE)
    history.record_start("now", 1, 9_000 * S)
    assert value(history, "user_last") == pytest.approx(math.log(1000), abs=1e-3)
    assert value(history, "user_mean_two") == pytest.approx(math.log(505), abs=1e-3)
    assert value(history, "group_gpus_p50_short") == pytest.approx(math.log(100), abs=1e-3)
    assert value(history, "user_running") == pytest.approx(math.log(2))
    assert value(history, "user_running_oldest_age") == pytest.approx(math.log(1001))
    assert math.isnan(value(history, "user_last", shape=JobShape(user="bob", group="physics", gpus=8)))


def test_any_order_and_repetition_of_the_events_counts_a_job_once() -> None:
    def told(order: tuple[int, ...]) -> list[float]:
        history = PastRuns()
        events = (
            lambda: history.record_submission("a", 1, SHAPE),
            lambda: history.record_start("a", 1, 2_000),
            lambda: history.record_end("a", 1, 62_000, "failed"),
        )
        for number in (*order, *order):
            events[number]()
        assert len(history) == 0
        return history.compute_features(SHAPE, 100_000).tolist()

    straight = told((0, 1, 2))
    assert straight[COLUMN["user_failed"]] == 1
    assert straight[COLUMN["user_count"]] == pytest.approx(math.log(2))
    for order in permutations(range(3)):
        np.testing.assert_array_equal(told(order), straight)


def test_features_of_a_submission_know_what_was_told_before_it_and_not_the_job_itself() -> None:
    history = PastRuns()
    for number in range(12):
        run(history, f"j{number}", number * 100, 50)
    now = JobShape(user="ada", group="physics", gpus=8, limit_s=3600, submitted_ms=5_000 * S)
    then = history.compute_features(now, now.submitted_ms)
    history.record_submission("now", 1, now)
    run(history, "later", 6_000, 9_000)
    assert history.record_submission("now", 1, now) is None  # told again
    taken, running = history.pop_features("now", 1), history.compute_open_job_features("now", 1, 20_000 * S)
    assert taken is not None
    assert running is not None
    np.testing.assert_array_equal(taken, then)
    assert history.pop_features("now", 1) is None
    assert running[COLUMN["user_last"]] == pytest.approx(math.log(9_000), abs=1e-3)
    assert history.compute_open_job_features("later", 1, 0) is None


def test_what_ended_is_handed_over_once_with_the_features_nobody_took() -> None:
    history = PastRuns()
    run(history, "a", 0, 50)
    run(history, "b", 100, 60, "preempted")
    history.record_submission("c", 1, JobShape(user="ada", submitted_ms=200 * S))
    taken = history.pop_features("c", 1)
    assert taken is not None
    history.record_start("c", 1, 200 * S)
    history.record_end("c", 1, 270 * S, "failed")
    restored = PastRuns()
    restored.load(json.loads(json.dumps(history.dump()[0])), {})
    for one in (history, restored):
        first, last = one.pop_closed_runs()
        assert (first.job, first.run_s, first.ended_ms) == ("a", 50.0, 50 * S)
        assert first.features is not None
        assert first.features[COLUMN["user_count"]] != first.features[COLUMN["user_count"]]  # the first of its user
        assert (last.job, last.run_s, last.features) == ("c", 70.0, None)
        assert one.pop_closed_runs() == []


def test_a_job_that_is_cancelled_while_it_waits_waits_no_more() -> None:
    history = PastRuns()
    for number in range(3):
        history.record_submission(f"j{number}", 1, SHAPE)
        history.record_end(f"j{number}", 1, 5_000, "failed")
    assert len(history) == 0
    again = PastRuns()
    again.load(*history.dump())
    for one in (history, again):
        assert len(one) == 0
        one.record_start("j1", 1, 2_000)  # its start was late
        assert len(one) == 0
        assert value(one, "user_count") == pytest.approx(math.log(2))


@pytest.mark.parametrize(("run_s", "outcome"), [(50, "preempted"), (-1, "finished")])
def test_an_attempt_that_was_preempted_or_ended_before_it_began_is_no_run_time(run_s: int, outcome: str) -> None:
    history = PastRuns()
    run(history, "a", 100, run_s, outcome)
    assert math.isnan(value(history, "user_last"))
    assert (len(history), history.pop_closed_runs()) == (0, [])


def test_quantiles_back_off_to_the_group_and_to_all() -> None:
    history = PastRuns()
    for number in range(12):
        run(history, f"j{number}", number * 100, 50)
    assert value(history, "backed_by") == 2
    other = JobShape(user="bob", group="physics", gpus=8)
    assert value(history, "backed_by", shape=other) == 4
    stranger = JobShape(user="eve", group="art", gpus=1)
    assert value(history, "backed_by", shape=stranger) == 5
    assert value(history, "empirical_0.5", shape=stranger) == pytest.approx(math.log(50), abs=1e-3)
    assert history.find_group_runs(stranger) is not None


def test_the_last_twenty_forget_what_the_last_two_hundred_keep() -> None:
    history = PastRuns()
    for number in range(300):
        run(history, f"j{number}", number * 100, 90 if number < 250 else 10)
    assert value(history, "user_p90_short", 40_000) == pytest.approx(math.log(10), abs=1e-3)
    assert value(history, "user_p90_long", 40_000) == pytest.approx(math.log(90), abs=1e-3)
    assert value(history, "user_count", 40_000) == pytest.approx(math.log(301))


def test_names_are_alike_by_their_stem() -> None:
    assert JobShape(name="train-17.2").stem == JobShape(name="train-18.11").stem
    history = PastRuns()
    for number in range(12):
        run(history, f"j{number}", number, 77, name=f"train-{number}")
        run(history, f"k{number}", number, 7700)
    assert value(history, "user_name_last") == pytest.approx(math.log(77), abs=1e-3)
    assert value(history, "empirical_0.5") == pytest.approx(math.log(77), abs=1e-3)
    other, unnamed = JobShape(user="ada", name="eval-1", gpus=8), JobShape(user="ada", name="4711", gpus=8)
    assert math.isnan(value(history, "user_name_last", shape=other))
    assert math.isnan(value(history, "user_name_last", shape=unnamed))


def test_a_restored_history_goes_on_as_if_nothing_had_happened() -> None:
    straight, before = PastRuns(), PastRuns()
    for history in (straight, before):
        for number in range(30):
            run(history, f"j{number}", number * 100, 10 + number)
        history.record_submission("waits", 1, SHAPE)
        history.record_submission("runs", 2, SHAPE)
        history.record_start("runs", 2, 4_000 * S)
    restored = PastRuns()
    restored.load(json.loads(json.dumps(before.dump()[0])), {})
    for history in (straight, restored):
        history.record_start("waits", 1, 5_000 * S)
        history.record_end("waits", 1, 5_100 * S)
        history.record_end("j3", 1, 9_999 * S)  # told again
    now, later = straight.compute_features(SHAPE, 6_000 * S), restored.compute_features(SHAPE, 6_000 * S)
    np.testing.assert_array_equal(now, later)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_KEYS", "MAX_ENDED", "MAX_LIVE", "MAX_UNSTARTED"):
        monkeypatch.setattr(f"fleetcast.features.past_runs.{name}", 5)
    history = PastRuns()
    for number in range(40):
        run(history, f"j{number}", number, 5, user=f"u{number}")
        history.record_submission(f"waits{number}", 1, JobShape(user=f"u{number}"))
        history.record_submission(f"left{number}", 1, JobShape(user=f"u{number}"))
        history.record_end(f"left{number}", 1, number, "failed")
    kept, _ = history.dump()
    assert [len(kept[part]) for part in ("pasts", "ended")] == [5, 5]
    assert len(kept["live"]) <= 5 + 5
