"""Clocks. Each class that needs the time receives a `Clock`.

*Fleet time* (periods, ages, deadlines, timestamps) is the time of the observed cluster. *Wall time*
(socket timeouts) is the machine's. They differ only in a simulated fleet, whose processes share a
`ScaledClock`.
"""

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Return the fleet time in Unix milliseconds."""

    def steady_ms(self) -> int:
        """Return fleet milliseconds since a fixed moment. Setting the clock does not change them."""

    def convert_to_wall_s(self, fleet_s: float) -> float:
        """Return how many wall seconds `fleet_s` fleet seconds take."""

    async def sleep(self, fleet_s: float) -> None:
        """Sleep for a duration in fleet seconds."""


class SystemClock:
    """A clock whose fleet time is wall time."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def convert_to_wall_s(self, fleet_s: float) -> float:
        return fleet_s

    async def sleep(self, fleet_s: float) -> None:
        await asyncio.sleep(fleet_s)


@dataclass(frozen=True, slots=True)
class ScaledClock:
    """A clock that runs `speed` times as fast as the machine's clock.

    Fleet time was `epoch_ms` when the machine's clock was `wall_ms`.

    >>> ScaledClock(epoch_ms=1_000_000, wall_ms=0, speed=15.0).convert_to_wall_s(30.0)
    2.0
    """

    epoch_ms: int
    wall_ms: int
    speed: float

    def now_ms(self) -> int:
        return self.epoch_ms + int((time.time_ns() / 1e6 - self.wall_ms) * self.speed)

    def steady_ms(self) -> int:
        return int(time.monotonic_ns() / 1e6 * self.speed)

    def convert_to_wall_s(self, fleet_s: float) -> float:
        return fleet_s / self.speed

    async def sleep(self, fleet_s: float) -> None:
        await asyncio.sleep(fleet_s / self.speed)


@dataclass(slots=True)
class ManualClock:
    """A clock that a test moves.

    `advance` lets time pass. Assigning `time_ms` sets the clock. `sleep` advances the clock and returns at
    once.
    """

    time_ms: int = 0
    passed_ms: int = 0

    def now_ms(self) -> int:
        return self.time_ms

    def steady_ms(self) -> int:
        return self.passed_ms

    def convert_to_wall_s(self, fleet_s: float) -> float:
        return 0.0

    async def sleep(self, fleet_s: float) -> None:
        self.advance(fleet_s)
        await asyncio.sleep(0)

    def advance(self, fleet_s: float) -> None:
        self.time_ms += round(fleet_s * 1000)
        self.passed_ms += round(fleet_s * 1000)


class ClockWatch:
    """A detector of clock steps, which NTP, an administrator or a resumed virtual machine may cause.

    Steps smaller than `least_ms` are added up until they reach it.
    """

    TRIES, SURE_MS = 5, 100

    def __init__(self, clock: Clock, least_ms: int = 0) -> None:
        self._clock = clock
        self._least_ms = least_ms
        self._ahead_ms = self._measure_lead()[0]

    def pop_clock_step_ms(self) -> int:
        """Return by how many ms of fleet time the clock was set since the last call.

        The result is negative if the clock was set back.

        >>> clock = ManualClock(5000)
        >>> watch = ClockWatch(clock)
        >>> clock.advance(60)
        >>> watch.pop_clock_step_ms()
        0
        >>> clock.time_ms -= 3_600_000
        >>> watch.pop_clock_step_ms(), watch.pop_clock_step_ms()
        (-3600000, 0)
        """
        ahead_ms, within_ms = self._measure_lead()
        by_ms = ahead_ms - self._ahead_ms
        if abs(by_ms) <= within_ms or abs(by_ms) < self._least_ms:
            return 0
        self._ahead_ms = ahead_ms
        return by_ms

    def _measure_lead(self) -> tuple[int, int]:
        """Return the lead of the clock over the steady clock, and the uncertainty of this lead, both in ms.

        The lead is uncertain because the system may delay the thread between two readings.
        """
        best = 0, 2**62
        for _ in range(self.TRIES):
            before_ms = self._clock.steady_ms()
            ahead_ms = self._clock.now_ms() - before_ms
            within_ms = self._clock.steady_ms() - before_ms
            best = min(best, (ahead_ms, within_ms), key=lambda pair: pair[1])
            if best[1] <= self.SURE_MS:
                break
        return best


def format_moment(time_ms: int) -> str:
    """Format a Unix time in ms for a message.

    >>> format_moment(1_600_000_000_999)
    '2020-09-13 12:26:40 UTC'
    """
    return f"{datetime.fromtimestamp(time_ms // 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
