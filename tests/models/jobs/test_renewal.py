import numpy as np

from fleetcast.models.jobs.renewal import predict_next_beginning

MINUTE = 60_000


def test_a_regular_job_is_told_to_the_minute() -> None:
    told = predict_next_beginning(np.arange(8) * 20 * MINUTE, 145 * MINUTE)
    assert told is not None
    assert (told.p10_ms, told.p50_ms, told.p90_ms, told.intervals) == (160 * MINUTE,) * 3 + (7,)


def test_what_has_not_begun_yet_is_told_given_that() -> None:
    begins = np.cumsum([0, 10, 10, 30, 10, 30, 10, 30]) * MINUTE  # every 10 or 30 minutes
    early = predict_next_beginning(begins, int(begins[-1]) + MINUTE)
    late = predict_next_beginning(begins, int(begins[-1]) + 15 * MINUTE)
    assert early is not None
    assert late is not None
    assert early.p10_ms - begins[-1] == 10 * MINUTE
    assert late.p10_ms - begins[-1] == 30 * MINUTE


def test_one_beginning_or_a_long_silence_tells_nothing() -> None:
    assert predict_next_beginning(np.array([MINUTE]), 2 * MINUTE) is None
    assert predict_next_beginning(np.arange(5) * MINUTE, 60 * MINUTE) is None
    overdue = predict_next_beginning(np.arange(6) * 10 * MINUTE, 62 * MINUTE)
    assert overdue is not None
    assert overdue.p10_ms > 62 * MINUTE - 1
