"""The sequence numbers of a stream that have arrived, stored compactly."""

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SeenSequences:
    """The sequence numbers that have arrived, as sorted disjoint runs [first, last].

    If no number in between is missing, there is a single run.
    """

    runs: list[list[int]] = field(default_factory=list)

    def add(self, sequence: int) -> bool:
        """Add a sequence number. Return whether it is new."""
        last = self.runs[-1] if self.runs else None
        if last is None or sequence > last[1] + 1:  # records in order need no search
            self.runs.append([sequence, sequence])
            return True
        if sequence == last[1] + 1:
            last[1] = sequence
            return True
        at = bisect_right(self.runs, sequence, key=lambda run: run[0])
        before = self.runs[at - 1] if at else None
        after = self.runs[at] if at < len(self.runs) else None
        if before and sequence <= before[1]:
            return False
        joins_before = before is not None and before[1] == sequence - 1
        joins_after = after is not None and after[0] == sequence + 1
        if before and joins_before:
            before[1] = after[1] if after and joins_after else sequence
            if joins_after:
                del self.runs[at]
        elif after and joins_after:
            after[0] = sequence
        else:
            self.runs.insert(at, [sequence, sequence])
        return True

    def close_gaps(self, most: int) -> None:
        """Reduce the number of runs to `most`. Numbers in gaps between the lowest runs then count as seen.

        If they arrive later, they are ignored.
        """
        extra = len(self.runs) - most
        if extra > 0:
            self.runs[: extra + 1] = [[self.runs[0][0], self.runs[extra][1]]]

    def copy(self) -> "SeenSequences":
        return SeenSequences([list(run) for run in self.runs])


def add_newest_event(newest: list[Any], event: Any, most: int) -> None:
    """Insert an event into `newest`, which is sorted by sequence and has at most `most` events.

    Whatever the order of arrival, the events with the highest sequences stay.
    """
    insort(newest, event, key=lambda row: row.sequence)
    if len(newest) > most:
        del newest[0]
