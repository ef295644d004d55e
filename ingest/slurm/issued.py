"""Checksums of the facts last issued about a live job, to detect changes of Slurm's record.

A job's queue, limit, size, reason and release change while it waits. The job table accepts the event with
the highest sequence. So a change is issued with a later sequence (`fleetcast.ingest.lifecycle`), and an
unchanged fact is issued once.
"""

import math
import zlib
from collections.abc import Iterable, Iterator

import msgspec

from fleetcast.fleet.events import JobEvent, Queued, Submitted
from fleetcast.ingest.lifecycle import compute_queued_sequence, compute_submitted_sequence

_ISSUED_PREEMPTIBLE = {None: False, True: True, False: "no"}  # not said was issued as False before
PRIORITY_STEPS = 10.0  # natural logs of priority, times this: a change below a tenth is none


class IssuedJob(msgspec.Struct, array_like=True, frozen=True):
    """Checksums (CRC-32) of an attempt's submission, its size, and the reason why it waits.

    `size` and `waiting` are 0 if it does not wait. `has_several`: it waited in several queues, so only the record
    of its start names its queue.
    """

    attempt: int
    submission: int
    size: int = 0
    waiting: int = 0
    has_several: bool = False


def make_checksums(events: Iterable[JobEvent]) -> IssuedJob | None:
    """Return the checksums of the events made from one record, or None if they contain no submission."""
    submitted = queued = None
    for event in events:
        match event:
            case Submitted():
                submitted = event
            case Queued():
                queued = event
    if submitted is None:
        return None
    what = _hash_facts(
        (submitted.queue, submitted.queues, submitted.user, submitted.tenant, submitted.name, submitted.class_),
        (
            _ISSUED_PREEMPTIBLE[submitted.preemptible],
            submitted.limit_s,
            submitted.gpu_share,
            sorted(submitted.labels.items()),
        ),
    )
    if queued is None:
        return IssuedJob(submitted.attempt, what, has_several=bool(submitted.queues))
    steps = round(PRIORITY_STEPS * math.log1p(max(0, submitted.priority)))
    size = _hash_facts(submitted.gang, submitted.gpus_per_node, submitted.gpu_model, submitted.tasks, steps)
    why = _hash_facts(queued.blocked, queued.reason.partition(",")[0])
    return IssuedJob(submitted.attempt, what, size, why, bool(submitted.queues))


def resequence_corrections(
    events: Iterable[JobEvent], before: IssuedJob | None, now: IssuedJob | None, now_ms: int
) -> Iterator[JobEvent]:
    """Yield the events. If an event corrects an earlier one of the same attempt, it gets a later sequence.

    before, now: the checksums of the previous and the present record.
    """
    if before is None or now is None or before.attempt != now.attempt:
        yield from events
        return
    submitted_ms = now_ms
    for event in events:
        if isinstance(event, Submitted):
            submitted_ms = event.time_ms
            is_resized = bool(before.size and now.size) and before.size != now.size
            if before.submission != now.submission or is_resized:
                event = msgspec.structs.replace(event, sequence=compute_submitted_sequence(submitted_ms, now_ms))
        elif isinstance(event, Queued) and before.waiting and before.waiting != now.waiting:
            event = msgspec.structs.replace(
                event, sequence=compute_queued_sequence(submitted_ms, now_ms), time_ms=now_ms
            )
        yield event


def _hash_facts(*facts: object) -> int:
    return zlib.crc32(repr(facts).encode("utf-8", "surrogatepass")) or 1
