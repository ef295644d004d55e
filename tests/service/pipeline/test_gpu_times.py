"""GPU time of attempts: what ticks add up to, across a restart, a move and a gap."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.service.answers.jobs import GpuTimeRow
from fleetcast.service.pipeline.gpu_times import LONGEST_GAP_MS, GpuTimes, round_to_two_digits

NOBODY, NAN = -1, np.nan


def running(job: str, started_ms: int = 0) -> JobAttempt:
    attempt = JobAttempt(job, 1)
    attempt.started_ms = attempt.placed_ms = started_ms
    return attempt


def holder(*gpus: int) -> NDArray[np.int32]:
    return np.array([gpus], np.int32)


def busy(*ratios: float) -> NDArray[np.float64]:
    return np.array([ratios])


def test_busy_and_watched_seconds_add_up_by_attempt() -> None:
    times, jobs = GpuTimes(), [running("a"), running("b", 15_000)]
    for now_ms in (0, 10_000, 20_000):
        times.add_gpu_time(now_ms, jobs, holder(0, 0, 1, NOBODY), busy(1.0, 0.5, 0.2, 0.9))
    assert times.make_rows() == [GpuTimeRow("a", 1, 30.0, 40.0), GpuTimeRow("b", 1, 1.0, 5.0)]  # b began at 15 s


def test_a_gpu_that_nobody_hears_is_not_watched_and_nonsense_is_bounded() -> None:
    times = GpuTimes()
    for now_ms in (0, 10_000):
        times.add_gpu_time(now_ms, [running("a")], holder(0, 0), busy(NAN, 7.0))
    assert times.make_rows() == [GpuTimeRow("a", 1, 10.0, 10.0)]


@pytest.mark.parametrize("later_ms", [-5, 0, LONGEST_GAP_MS + 1])
def test_of_a_gap_and_of_a_clock_that_goes_back_nothing_is_claimed(later_ms: int) -> None:
    times = GpuTimes()
    for now_ms in (0, later_ms):
        times.add_gpu_time(now_ms, [running("a", -1000)], holder(0), busy(1.0))
    assert times.make_rows() == []


def test_on_other_gpus_an_attempt_begins_anew() -> None:
    times, attempt = GpuTimes(), running("a")
    times.add_gpu_time(0, [attempt], holder(0), busy(1.0))
    times.add_gpu_time(10_000, [attempt], holder(0), busy(1.0))
    attempt.placed_ms = 10_000
    times.add_gpu_time(14_000, [attempt], holder(0), busy(0.5))
    assert times.make_rows() == [GpuTimeRow("a", 1, 2.0, 4.0)]


def test_it_survives_a_restart_and_a_set_clock() -> None:
    times = GpuTimes()
    for now_ms in (0, 10_000):
        times.add_gpu_time(now_ms, [running("a")], holder(0), busy(0.5))
    about, arrays = times.dump()
    again = GpuTimes()
    again.load(msgspec.msgpack.decode(msgspec.msgpack.encode(about)), arrays)
    assert again.make_rows() == times.make_rows()
    times.shift_times(3_600_000)
    times.add_gpu_time(3_620_000, [running("a")], holder(0), busy(0.5))
    assert times.make_rows() == again.make_rows()
    with pytest.raises(msgspec.ValidationError):
        GpuTimes().load([("a", "x")], {})


HUNDREDTHS = st.integers(-(10**14), 10**14).map(lambda number: number / 1000)
SECONDS = st.one_of(HUNDREDTHS, st.floats(-1e6, 1e6), st.floats(allow_nan=False, allow_infinity=False, width=32))


@given(st.lists(SECONDS, max_size=20))
def test_many_numbers_are_rounded_as_one_by_one(values: list[float]) -> None:
    assert list(map(repr, round_to_two_digits(np.array(values, np.float64)))) == [
        repr(round(value, 2)) for value in values
    ]


def test_the_time_of_the_other_attempts_stays_when_one_is_forgotten() -> None:
    times, jobs = GpuTimes(), [running("a"), running("b"), running("c")]
    for now_ms in (0, 10_000):
        times.add_gpu_time(now_ms, jobs, holder(0, 1, 2), busy(0.1, 0.2, 0.3))
    times._drop_unlisted_attempts({("a", 1), ("c", 1)})
    times.add_gpu_time(20_000, [jobs[2], jobs[0], running("d")], holder(1, NOBODY, 0), busy(0.1, 0.2, 0.3))
    assert times.make_rows() == [GpuTimeRow("a", 1, 2.0, 20.0), GpuTimeRow("c", 1, 6.0, 20.0), GpuTimeRow("d", 1, 0, 0)]
