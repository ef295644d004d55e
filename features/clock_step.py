"""What a ring makes of a clock that was set back: it moves with it.

    before   slots … 97 98 99 100          the clock said 100, and is set back by 40
    after    slots … 57 58 59  60 61 …     what was seen keeps its age, and what comes next is newer

Without it every series would wait until its last sample lies in the past again.
"""

import numpy as np

from features.ring import NEVER, Ring


def move_back(ring: Ring, by_ms: int) -> None:
    """Move all times of a ring back by `by_ms`; its slots by as many whole ones, its buckets with them."""
    if ring.head < 0:
        return
    slots, newest_bucket = round(by_ms / ring.span.interval_ms), ring.newest_bucket
    for times, never in ((ring.time_ms, -1), (ring.changed_ms, 0), (ring.first_seen_ms, NEVER)):
        times[times != never] -= by_ms
    ring.head -= slots
    ring.closed = min(ring.closed - slots, ring.head)
    _roll(ring.fine, slots)
    _roll(ring.events, slots)
    _roll(ring.coarse, newest_bucket - ring.newest_bucket)
    ring.touched_slot = ring.touched_bucket = 0
    ring.dirty[: ring.size] = True


def _roll(rows: np.ndarray, by: int) -> None:
    """Slot s moves to s - by, in the ring (row, slot, entity); a row at a time, so that it costs little room."""
    for row in rows:
        row[:] = np.roll(row, -by, axis=0)
