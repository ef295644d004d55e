"""Clocks. Everything that asks for the time is given a `Clock`.

*Fleet time* is the time of the cluster under observation: periods, ages, deadlines and timestamps are in it.
*Wall time* is the machine's: socket timeouts are in it. With `SystemClock` the two are one; a simulated fleet
runs under a `ScaledClock` that all its processes share.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Fleet time, Unix milliseconds."""

    def wall_s(self, fleet_s: float) -> float:
        """How many wall seconds `fleet_s` fleet seconds take."""

    async def sleep(self, fleet_s: float) -> None:
        """Sleep for a fleet duration."""


class SystemClock:
    """Fleet time is wall time."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def wall_s(self, fleet_s: float) -> float:
        return fleet_s

    async def sleep(self, fleet_s: float) -> None:
        await asyncio.sleep(fleet_s)


@dataclass(frozen=True, slots=True)
class ScaledClock:
    """Fleet time was `epoch_ms` when the machine's clock read `wall_ms`, and runs `speed` times as fast.

    >>> ScaledClock(epoch_ms=1_000_000, wall_ms=0, speed=15.0).wall_s(30.0)
    2.0
    """

    epoch_ms: int
    wall_ms: int
    speed: float

    def now_ms(self) -> int:
        return self.epoch_ms + int((time.time_ns() / 1e6 - self.wall_ms) * self.speed)

    def wall_s(self, fleet_s: float) -> float:
        return fleet_s / self.speed

    async def sleep(self, fleet_s: float) -> None:
        await asyncio.sleep(fleet_s / self.speed)


@dataclass(slots=True)
class ManualClock:
    """A clock that a test moves by hand; `sleep` advances it at once."""

    time_ms: int = 0

    def now_ms(self) -> int:
        return self.time_ms

    def wall_s(self, fleet_s: float) -> float:
        return 0.0

    async def sleep(self, fleet_s: float) -> None:
        self.advance(fleet_s)
        await asyncio.sleep(0)

    def advance(self, fleet_s: float) -> None:
        self.time_ms += round(fleet_s * 1000)
