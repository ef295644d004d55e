"""The state of the queues along a sampled future, in which jobs start and end.

The rules are those of `fleetcast.placement.queues.standing`. Every waiting request adds to the GPUs that its
queue waits for, whatever its place in the order. A job that may run on any model counts as GPUs of any model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.queues.standing import LENDERS, QueueStanding
from fleetcast.placement.queues.tree import Amounts

Times = NDArray[np.float32]


@dataclass(frozen=True)
class QueueHold:
    """The GPUs that a job counts against the quota of its leaf, by resource."""

    leaf: str
    amounts: Amounts

    @cached_property
    def kind(self) -> tuple[str, ...]:
        """The leaf and the names of its resources. Holds of one kind differ only in their amounts."""
        return self.leaf, *sorted(self.amounts)

    @cached_property
    def key(self) -> tuple[str, frozenset[tuple[str, float]]]:
        """The leaf and the amounts. Holds with the same key count alike."""
        return self.leaf, frozenset(self.amounts.items())

    @cached_property
    def largest_amount(self) -> float:
        return max(self.amounts.values())


@dataclass(frozen=True, slots=True, eq=False)
class Closure:
    """A time span in which a queue may not use some nodes.

    nodes: (n,) bool. from_s, to_s: seconds from now. name: its name for people.
    """

    nodes: NDArray[np.bool_]
    from_s: float
    to_s: float
    name: str = ""

    def bars(self, start_s: float, run_s: float) -> bool:
        """Return whether the closure bars a job that would start at `start_s` and run for `run_s`."""
        return self.from_s < start_s + run_s and start_s < self.to_s


class QueuesAhead:
    """The state of the queues along one sampled future, updated as jobs start and end.

    holds: number of a job → its hold, for jobs that hold GPUs.
    """

    def __init__(self, standing: QueueStanding, holds: Mapping[int, QueueHold]) -> None:
        self._standing = standing
        self._holds = dict(holds)
        self._refused: dict[tuple[str, ...], tuple[float, str]] = {}  # kind → the least that is refused, and by whom
        self._allowed: dict[tuple[str, ...], float] = {}  # kind → the most that is allowed, since the last change

    @classmethod
    def from_standing(
        cls, standing: QueueStanding, holds: Mapping[int, QueueHold], waiting: Iterable[QueueHold]
    ) -> "QueuesAhead":
        """Return the present state of the queues, in which exactly the requests of `waiting` wait."""
        standing = standing.copy()
        standing.clear_waiting_counts()
        for hold in waiting:
            standing.add_waiting(hold.leaf, hold.amounts)
        return cls(standing, holds)

    def copy(self) -> "QueuesAhead":
        """Return a copy that can be changed independently."""
        return QueuesAhead(self._standing.copy(), self._holds)

    def allows(self, hold: QueueHold) -> bool:
        """Return whether the queue's quota allows a job with this hold to start now."""
        least, _ = self._refused.get(hold.kind, (np.inf, ""))
        if hold.largest_amount >= least:
            return False
        if hold.largest_amount <= self._allowed.get(hold.kind, -1.0):
            return True
        by = self._standing.find_refusing_queue(hold.leaf, hold.amounts)
        if by is not None:
            self._refused[hold.kind] = hold.largest_amount, by
        else:
            self._allowed[hold.kind] = hold.largest_amount
        return by is None

    def start_job(self, number: int, hold: QueueHold, waited: bool) -> None:
        """Count the GPUs of a job that starts. waited: whether the job was one of the waiting requests."""
        self._allowed.clear()
        if waited:
            self._standing.add_waiting(hold.leaf, hold.amounts, -1.0)
        self._standing.add_held(hold.leaf, hold.amounts)
        self._holds[number] = hold

    def end_job(self, number: int) -> None:
        hold = self._holds.pop(number, None)
        if hold is not None:
            self._allowed.clear()
            self._standing.add_held(hold.leaf, hold.amounts, -1.0)
            freed = {LENDERS, *self._standing.list_path(hold.leaf)}
            self._refused = {kind: row for kind, row in self._refused.items() if row[1] not in freed}


def find_allowed_delay_s(
    standing: QueueStanding, spans: Iterable[tuple[float, float, QueueHold]], hold: QueueHold
) -> float:
    """Return the seconds from now until the queue's quota allows a job with this hold, inf if never.

    spans: (start_s, end_s, hold) of each job that holds GPUs now or later. `standing` already counts
    jobs that started before now.
    """
    numbered = list(enumerate(spans))
    events = [(end_s, 0, number) for number, (_, end_s, _) in numbered]
    events += [(start_s, 1, number) for number, (start_s, _, _) in numbered if start_s >= 0]
    holds = {number: one for number, (start_s, _, one) in numbered if start_s < 0}
    queues, coming = QueuesAhead.from_standing(standing, holds, ()), {number: one for number, (_, _, one) in numbered}
    if queues.allows(hold):
        return 0.0
    for now_s, together in groupby(sorted(events), key=lambda event: event[0]):
        for _, starts, number in together:
            if starts:
                queues.start_job(number, coming[number], waited=False)
            else:
                queues.end_job(number)
        if queues.allows(hold):
            return float(now_s)
    return float("inf")
