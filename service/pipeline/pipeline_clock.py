"""The clock of a pipeline. It adapts the state when the clock is set, or when the pipeline did not run.

set back            samples and signals move with the clock, so they keep their ages and new samples are newer
set ahead           silence of this length does not count, because nothing could have been received
stood still         the same, because this process was stopped, or its machine suspended
started again       the same, from the snapshot on, for sources that cannot go back
"""

import asyncio
import logging
import time

from fleetcast.fleet.clock import Clock, ClockWatch
from fleetcast.service.pipeline.snapshot import SavedState

logger = logging.getLogger(__name__)

BEAT_WALL_S, STILL_WALL_S = 1.0, 10.0


class PipelineClock:
    """The clock of a pipeline. It adapts the state when the clock is set.

    The pipeline reads it before every write.

    `changed`: an event that is set when a new board should be published at once.
    """

    def __init__(self, clock: Clock, saved: SavedState, step_ms: int, changed: asyncio.Event) -> None:
        """Follow a clock.

        `step_ms`: smaller clock steps are ignored. If it is at most a scrape interval, an ignored step delays a
        series by at most one sample.
        """
        self.clock = clock
        self._saved = saved
        self._step_ms = step_ms
        self._changed = changed
        self._watch = ClockWatch(clock)
        self._beaten = time.monotonic(), clock.now_ms()
        self._owed_ms = 0  # to the stateful parts, which a thread may be writing

    def check_clock_ms(self) -> int:
        """Return the time in Unix ms. If the clock was set since the last call, adapt the state first."""
        now_ms, by_ms = self.clock.now_ms(), self._watch.pop_clock_step_ms()
        if by_ms <= -self._step_ms:
            self._shift_state_back(now_ms, -by_ms)
        elif by_ms >= self._step_ms:
            self._record_downtime(now_ms, by_ms, f"the clock was set ahead by {by_ms / 1000:.0f} s")
        return now_ms

    def adapt_after_restore(self, *, misses: bool) -> None:
        """Adapt the state after a snapshot was restored. `misses`: some sources cannot go back."""
        saved, now_ms = self._saved, self.clock.now_ms()
        newest_ms = max(saved.saved_ms, saved.state.counts.newest_sample_ms)
        if saved.saved_ms > now_ms + self._step_ms or newest_ms > now_ms + saved.state.store.span.future_ms:
            self._shift_state_back(now_ms, newest_ms - now_ms)
        elif saved.saved_ms and misses:
            saved.state.store.record_downtime(now_ms, max(0, now_ms - saved.saved_ms))

    async def check_standstill_forever(self) -> None:
        while True:
            await asyncio.sleep(BEAT_WALL_S)
            self.record_standstill()

    def record_standstill(self) -> None:
        """Record downtime if this process stood still since the last call.

        The pipeline calls this about every second, and before it evaluates silence.
        """
        wall_s, now_ms = time.monotonic(), self.check_clock_ms()
        still_s = wall_s - self._beaten[0]
        if still_s > max(STILL_WALL_S, self.clock.convert_to_wall_s(self._step_ms / 1000)):
            self._record_downtime(now_ms, now_ms - self._beaten[1], f"this process stood still for {still_s:.0f} s")
        self._beaten = wall_s, now_ms

    def shift_part_times(self) -> None:
        """Shift the times of the stateful parts after the clock was set.

        The caller ensures that no thread writes the parts.
        """
        if self._owed_ms:
            self._saved.parts.shift_times(self._owed_ms)
            self._owed_ms = 0

    def _shift_state_back(self, now_ms: int, by_ms: int) -> None:
        saved = self._saved
        if saved.state.store.move_times_back(now_ms, by_ms):
            self._owed_ms -= by_ms
            then = "samples and signals keep their ages"
        else:
            then = "no sample lies ahead of it, nothing is moved"
        logger.warning("the clock was set back by %.0f s: %s", by_ms / 1000, then)
        saved.began_ms -= by_ms
        saved.state.counts.newest_sample_ms = min(saved.state.counts.newest_sample_ms, now_ms)
        self._beaten = self._beaten[0], now_ms
        self._changed.set()

    def _record_downtime(self, now_ms: int, for_ms: int, why: str) -> None:
        logger.warning("%s: silence does not count meanwhile", why)
        self._saved.state.store.record_downtime(now_ms, for_ms)
        self._changed.set()
