"""Checkpoints of a whole gang, derived from their begin and end events, which name no rank.

begin begin begin ── end ── end ── end        one checkpoint: from the first begin to the end of the last rank
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fleetcast.fleet.checkpoint_edges import CheckpointEdges

TOGETHER_MS = 60_000  # ranks of a gang begin within it, and tell ends that nobody began no later
APART_MS = 5_000  # one that begins so soon after all others have ended writes the same checkpoint
LONGEST_MS = 3_600_000  # an end that comes later ends nothing


@dataclass(frozen=True, slots=True)
class Episode:
    """One checkpoint of a gang.

    end_ms: when the last rank ended, None while a rank still writes. bytes: the sum over all ranks,
    None if unstated.
    """

    begin_ms: int
    end_ms: int | None
    bytes: int | None

    @property
    def duration_s(self) -> float | None:
        return None if self.end_ms is None else (self.end_ms - self.begin_ms) / 1000


@dataclass(slots=True)
class _CheckpointEdges:
    """The begin and end events of one checkpoint, in order of time.

    still: the number of ranks that have begun but not ended.
    """

    edges: list[CheckpointEdges]
    still: int = 0

    def add(self, edge: CheckpointEdges) -> None:
        self.edges.append(edge)
        self.still += edge.count if edge.edge == "begin" else -edge.count

    def is_over_before(self, edge: CheckpointEdges) -> bool:
        """Return whether this checkpoint is over, so that the begin event belongs to the next one."""
        if edge.time_ms - self.edges[0].time_ms > TOGETHER_MS:
            return True
        return self.still <= 0 and edge.time_ms - self.edges[-1].time_ms > APART_MS

    def accepts_end(self, edge: CheckpointEdges) -> bool:
        """Return whether an end event belongs to this checkpoint.

        While a rank still writes, the end must lie within LONGEST_MS of the begin. Otherwise it must lie within
        TOGETHER_MS of the last event.
        """
        if self.still > 0:
            return edge.time_ms - self.edges[0].time_ms <= LONGEST_MS
        return edge.time_ms - self.edges[-1].time_ms <= TOGETHER_MS

    def make_episode(self, *, is_last: bool) -> Episode:
        ends = [edge.time_ms for edge in self.edges if edge.edge == "end"]
        ends_ms = {
            kind: sum(edge.bytes or 0 for edge in self.edges if edge.edge == kind) for kind in ("begin", "end")
        }  # fmt: skip
        written = max(ends_ms.values())  # who tells its bytes at both edges writes them once
        is_over = bool(ends) and (not is_last or self.still <= 0)
        return Episode(self.edges[0].time_ms, ends[-1] if is_over else None, written or None)


def find_episodes(edges: Sequence[CheckpointEdges]) -> list[Episode]:
    """Return the checkpoints in order of their beginnings.

    A checkpoint may lack its last end events. Once the next checkpoint begins, it ends at its last known end event.
    """
    gangs: list[_CheckpointEdges] = []
    for edge in sorted(edges, key=lambda row: row.time_ms):
        if edge.edge == "begin" and (not gangs or gangs[-1].is_over_before(edge)):
            gangs.append(_CheckpointEdges([]))
        if gangs and (edge.edge == "begin" or gangs[-1].accepts_end(edge)):
            gangs[-1].add(edge)
    return [gang.make_episode(is_last=gang is gangs[-1]) for gang in gangs]
