"""Sequence numbers of job events, by what happened rather than who reports it: a start that two report is one event.

An end that one record alone explains (an epilog's comment) has two numbers: the fold takes the greater, in any order.
A training loop that reports itself (`fleetcast-client`) numbers from `RANK << 32`, a block for each rank.
"""

from typing import Final

SUBMITTED: Final = 1
QUEUED: Final = 2
STARTED: Final = 3
RESIZED: Final = 16  # and the following, one a change
ENDED: Final = 1 << 20
LABELS: Final = -(1 << 32)  # before all of them: an exporter's labels tell of it, and whatever else does counts more
EXPLAINED: Final = ENDED + 1  # the end by a record that says why; it counts more than one that cannot


def first_of_rank(rank: int) -> int:
    """
    >>> first_of_rank(0) > ENDED
    True
    """
    return (rank + 1) << 32
