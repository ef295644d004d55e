"""The origins of an attempt's facts: job events, labels, the training loop, or our own queue."""

from collections.abc import Mapping
from typing import Literal

from fleetcast.fleet.events import Phase, Step, Submitted
from fleetcast.fleet.requests import RankPlacement

Teller = Literal["events", "labels", "sdk", "queue"]
REQUESTED = -1  # the sequence of a submission that is a request of our own queue; no event has it
UNSEEN_START = {"fleetcast/start": "unseen"}  # a label of a submission: it ran when somebody first heard of it
REQUEST_LABEL = "fleetcast/request"  # of such a submission: the id of the request
TELLING = ("submission", "queued", "started", "end")  # groups of fields that say that a job waits, runs or ended


def find_fact_origin(written: Mapping[str, int], submission: Submitted | None) -> Teller:
    """Return the origin of an attempt's facts, from the sequences of the events that set them.

    Facts from labels, and ends by silence, have sequences below 0. Steps set no facts.

    >>> [find_fact_origin(fact, None) for fact in ({"started": 3}, {"started": -9}, {"phase": 5, "end": -9})]
    ['events', 'labels', 'sdk']
    """
    sequences = [written[group] for group in TELLING if group in written]
    if any(sequence >= 0 for sequence in sequences):
        return "events"
    if written.get("submission") == REQUESTED:
        return "queue"
    if "started" in written or "submission" in written:
        return "labels"
    return "events" if submission is not None else "sdk"  # a submission that nothing wrote is a board's


def update_rank_place(ranks: tuple[RankPlacement, ...], event: Phase | Step) -> tuple[RankPlacement, ...]:
    """Return the ranks in order, with the place of one rank updated to the one that its event reports."""
    mine = RankPlacement(event.rank or 0, event.node, event.gpus)
    if not event.node or mine in ranks:
        return ranks
    others = (rank for rank in ranks if rank.rank != mine.rank)
    return tuple(sorted((*others, mine), key=lambda rank: rank.rank))
