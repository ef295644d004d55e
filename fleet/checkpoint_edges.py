"""The beginnings and ends of an attempt's checkpoints, merged within each second.

Because of the merge, the checkpoints of a gang take no more memory than those of one process:

rank 0 begin 10.1 s, rank 1 begin 10.4 s, ..., rank 511 begin 10.2 s   ->   one "begin" at 10_100 ms, count 512
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Literal

from fleetcast.fleet.events import Checkpoint

MAX_EDGES = 256  # the newest by event time, whatever the order of arrival
TOGETHER_MS = 1000


@dataclass(frozen=True, slots=True)
class CheckpointEdges:
    """The beginnings or ends of a checkpoint within one second.

    time_ms: the time of the first beginning, or of the last end. bytes: the sum of the stated sizes. None if no
    event states a size.
    """

    edge: Literal["begin", "end"]
    time_ms: int
    bytes: int | None = None
    target: str = ""
    count: int = 1

    @classmethod
    def from_event(cls, event: Checkpoint) -> "CheckpointEdges":
        return cls(event.edge, event.time_ms, event.bytes, event.target)

    def __add__(self, other: "CheckpointEdges") -> "CheckpointEdges":
        """Merge edges of the same second and kind."""
        first_or_last = min if self.edge == "begin" else max
        sizes = [size for size in (self.bytes, other.bytes) if size is not None]
        return CheckpointEdges(
            self.edge,
            first_or_last(self.time_ms, other.time_ms),
            sum(sizes) if sizes else None,
            max(self.target, other.target),
            self.count + other.count,
        )


def fold_edge(edges: list[CheckpointEdges], event: Checkpoint) -> None:
    """Fold one checkpoint event into `edges`, which stays in order of time."""
    edge = CheckpointEdges.from_event(event)
    second = _get_second(edge)
    low = bisect_left(edges, second, key=_get_second)
    high = bisect_right(edges, second, low, key=_get_second)
    same = edges[low:high]
    at = next((at for at, one in enumerate(same) if one.edge == edge.edge), None)
    if at is None:
        same.append(edge)
    else:
        same[at] += edge
    edges[low:high] = sorted(same, key=_make_order_key)
    if len(edges) > MAX_EDGES:  # of the oldest second those that began: what was dropped once is dropped again
        oldest = bisect_right(edges, _get_second(edges[0]), key=_get_second)
        del edges[min(range(oldest), key=lambda row: edges[row].edge == "end")]


def _get_second(edge: CheckpointEdges) -> int:
    return edge.time_ms // TOGETHER_MS


def _make_order_key(edge: CheckpointEdges) -> tuple[int, bool]:
    return edge.time_ms, edge.edge == "end"
