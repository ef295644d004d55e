import pytest

from fleetcast.fleet.clock import ClockWatch, ManualClock, ScaledClock, SystemClock


@pytest.mark.parametrize("clock", [SystemClock(), ScaledClock(1_000_000, 0, 15.0)], ids=["system", "scaled"])
def test_a_clock_that_runs_was_not_set(clock: SystemClock | ScaledClock) -> None:
    watch = ClockWatch(clock)
    assert abs(watch.pop_clock_step_ms()) < 1000


def test_a_step_is_told_once_and_time_that_passes_is_none() -> None:
    clock = ManualClock(10_000)
    watch = ClockWatch(clock)
    clock.advance(3600)
    clock.time_ms -= 90_000
    assert [watch.pop_clock_step_ms(), watch.pop_clock_step_ms()] == [-90_000, 0]
    clock.time_ms += 7_200_000
    clock.advance(5)
    assert watch.pop_clock_step_ms() == 7_200_000


def test_small_steps_are_added_up_until_they_are_large_enough() -> None:
    clock = ManualClock(10_000)
    watch = ClockWatch(clock, least_ms=5000)
    found = []
    for _ in range(4):
        clock.time_ms += 2000
        clock.advance(5)
        found.append(watch.pop_clock_step_ms())
    assert found == [0, 0, 6000, 0]


class Hesitant(ManualClock):
    """An hour may pass between two readings of it."""

    hesitates = 0

    def now_ms(self) -> int:
        if self.hesitates:
            self.hesitates -= 1
            self.advance(3600)
        return self.time_ms


@pytest.mark.parametrize("times", [1, 100])
def test_a_thread_that_was_made_to_wait_is_no_step(times: int) -> None:
    clock = Hesitant(10_000)
    watch = ClockWatch(clock)
    clock.hesitates = times
    assert watch.pop_clock_step_ms() == 0
    clock.hesitates = 0
    assert watch.pop_clock_step_ms() == 0
    clock.time_ms -= 90_000
    assert watch.pop_clock_step_ms() == -90_000
