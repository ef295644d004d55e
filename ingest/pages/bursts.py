"""The times at which targets are scraped: a few bursts per interval, with bounded concurrency.

    interval   |--1--2--3--4--5--6--7--8--9--10-|   each target belongs to one of BURSTS times, by its URL
    burst      all targets of one time: at most `limit` requests at once, in order of arrival

A process that wakes for one page at a time spends most of its time on waking. A target that finds all
slots busy waits for its turn. A slow target never delays a quick one for long: its slot is free again
after SLOW_S. From its next round on, it waits in a lane for slow targets.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

BURSTS = 10  # per interval
SLOW_S = 1.0  # wall


def compute_burst_phase(url: str) -> float:
    """Return the time of a target's burst as a fraction of the interval.

    Samples are stored in time slots as long as the interval. A burst lies far from the edges of its
    slot, so a clock that is corrected by some milliseconds moves no sample into another slot.
    """
    return (zlib.crc32(url.encode()) % BURSTS + 0.5) / BURSTS


def compute_next_burst_ms(now_ms: float, phase: float, period_ms: float) -> float:
    """Return when a target's next burst begins, at least half a period after `now_ms`.

    An exporter may refresh a counter between two rounds. If these rounds followed each other quickly, the rate of the
    counter would be absurd.

    >>> compute_next_burst_ms(now_ms=60_000, phase=0.25, period_ms=10_000), compute_next_burst_ms(60_000, 0.75, 10_000)
    (72500.0, 67500.0)
    """
    wait_ms = (phase * period_ms - now_ms) % period_ms
    return now_ms + (wait_ms if wait_ms >= period_ms / 2 else wait_ms + period_ms)


class FetchSlots:
    """A limit on concurrent requests: `limit` for quick targets, and another `limit` for slow ones.

    `is_idle` is set while no quick target holds a slot or waits for one.
    """

    def __init__(self, limit: int) -> None:
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self._busy = 0  # quick targets that hold a slot or wait for one
        self._lanes = {is_slow: asyncio.Semaphore(limit) for is_slow in (False, True)}

    @asynccontextmanager
    async def hold_slot(self, *, is_slow: bool) -> AsyncIterator[None]:
        """Wait for a slot, and hold it while the context is open, but at most for SLOW_S.

        is_slow: the target's last request lasted longer than SLOW_S.
        """
        lane = self._lanes[is_slow]
        self._add_busy_target(is_slow)
        try:
            await lane.acquire()
        except BaseException:
            self._remove_busy_target(is_slow)
            raise
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                lane.release()
                self._remove_busy_target(is_slow)

        timer = asyncio.get_running_loop().call_later(SLOW_S, release)
        try:
            yield
        finally:
            timer.cancel()
            release()

    def _add_busy_target(self, is_slow: bool) -> None:
        if not is_slow:
            self._busy += 1
            self.is_idle.clear()

    def _remove_busy_target(self, is_slow: bool) -> None:
        if not is_slow:
            self._busy -= 1
            if not self._busy:
                self.is_idle.set()
