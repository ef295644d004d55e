"""Sequence numbers of job events. An event's kind decides its number. The reporter does not matter.

So a start that two sources report is one event. An end has two numbers. A record that explains the end, such
as an epilog's comment, has the greater number, so it wins in any order of arrival. A training loop that reports
itself (`fleetcast-client`) counts from `RANK << 32`, with a block for each rank.
"""

from typing import Final

SUBMITTED: Final = 1
QUEUED: Final = 2
STARTED: Final = 3
RESIZED: Final = 16  # and the following, one a change
ENDED: Final = 1 << 20
LABELS: Final = -(1 << 32)  # before all of them: an exporter's labels tell of it, and whatever else does counts more
EXPLAINED: Final = ENDED + 1  # the end by a record that says why; it counts more than one that cannot
QUEUED_LATER: Final = 1 << 29  # and the following, one a change: see `compute_queued_sequence`
SUBMITTED_LATER: Final = 1 << 30  # as QUEUED_LATER: see `compute_submitted_sequence`


def compute_queued_sequence(submitted_ms: int, now_ms: int) -> int:
    """Return the sequence of a `queued` event that changes the reason, or `blocked`, of an earlier one.

    It grows with time, so the latest event counts. Changes within a tenth of a second share a number.

    >>> EXPLAINED < compute_queued_sequence(0, 50) < compute_queued_sequence(0, 150)
    True
    >>> compute_queued_sequence(0, 150) < compute_submitted_sequence(0, 50) < compute_first_sequence(0)
    True
    """
    return QUEUED_LATER + _count_tenths(submitted_ms, now_ms)


def compute_submitted_sequence(submitted_ms: int, now_ms: int) -> int:
    """Return the sequence of a `submitted` event that corrects the queue, limit or size of an earlier one."""
    return SUBMITTED_LATER + _count_tenths(submitted_ms, now_ms)


def _count_tenths(submitted_ms: int, now_ms: int) -> int:
    """Return the tenths of a second since the submission, limited to 1.7 years."""
    return min(max(0, now_ms - submitted_ms) // 100, QUEUED_LATER - 1)


def compute_first_sequence(rank: int) -> int:
    """Return the first sequence number of events that a rank itself reports.

    >>> compute_first_sequence(0) > ENDED
    True
    """
    return (rank + 1) << 32
