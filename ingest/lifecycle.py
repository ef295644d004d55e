"""Sequences of the events that a scheduler's own records tell of a job: each has a number of its own.

Slurm's queue, its accounting and its completion webhook tell of one start or one end, each in its own words. As the
number says what happened, and not who told it, the events of all of them have one identity, and count once. The same
holds for the list and the watch of Kubernetes, and for what a restarted source tells again. An end that one record
explains (an epilog's comment) and another does not has two: the fold keeps the greater, in whatever order they come.

A training loop that reports itself (`fleetcast-client`) numbers from `RANK << 32` on, a block for each rank.
"""

from typing import Final

SUBMITTED: Final = 1
QUEUED: Final = 2
STARTED: Final = 3
RESIZED: Final = 16  # and the following, one a change
ENDED: Final = 1 << 20
EXPLAINED: Final = ENDED + 1  # the end by a record that says why; it counts more than one that cannot


def first_of_rank(rank: int) -> int:
    """The first sequence of what rank `rank` tells of itself.

    >>> first_of_rank(0) > ENDED
    True
    """
    return (rank + 1) << 32
