"""Edges of an attempt's checkpoints, those of one second together: so the ranks of a gang cost what one process costs.

    rank 0 begin 10.1 s, rank 1 begin 10.4 s, ..., rank 511 begin 10.2 s   ->   Edges("begin", 10_100 ms, count=512)

The newest EDGES_KEPT are kept, by time. Nothing goes by the order of arrival, nor by sequences (each rank counts in a
range of its own): seconds that were dropped are older than all that are kept, so they never come back.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from fleet.events import Checkpoint

EDGES_KEPT = 256
TOGETHER_MS = 1000


@dataclass(frozen=True, slots=True)
class Edges:
    """time_ms: of the first that began, or of the last that ended. bytes: of all; None where none tells.

    Its fields are named as those of one event, so that a snapshot which kept events is read as one edge each.
    """

    edge: Literal["begin", "end"]
    time_ms: int
    bytes: int | None = None
    target: str = ""
    count: int = 1

    @classmethod
    def of(cls, event: Checkpoint) -> "Edges":
        return cls(event.edge, event.time_ms, event.bytes, event.target)

    def __add__(self, other: "Edges") -> "Edges":
        """Of the same second and kind."""
        first_or_last = min if self.edge == "begin" else max
        told = [size for size in (self.bytes, other.bytes) if size is not None]
        return Edges(
            self.edge,
            first_or_last(self.time_ms, other.time_ms),
            sum(told) if told else None,
            max(self.target, other.target),
            self.count + other.count,
        )


def in_order(edges: list[Edges]) -> None:
    """Sort them as `keep_edge` needs them: those of an old snapshot lie by sequence."""
    edges.sort(key=_place)


def keep_edge(kept: list[Edges], event: Checkpoint) -> None:
    """Fold one event into `kept`, which is and stays in order."""
    edge = Edges.of(event)
    place = _place(edge)
    at = bisect_left(kept, place, key=_place)
    if at < len(kept) and _place(kept[at]) == place:
        kept[at] += edge
        return
    kept.insert(at, edge)
    if len(kept) > EDGES_KEPT:
        del kept[0]


def _place(edge: Edges) -> tuple[int, bool]:
    return edge.time_ms // TOGETHER_MS, edge.edge == "end"
