"""The identity of the state, and the check that its parts agree.

Ledger, board, snapshots and inbox are the parts. Each stores the random identity that the state got at
its first start. Each also stores the last position that it has read in each of the others. This module
compares these records with the parts on disk. So it finds a part that is missing, outdated, or from
another site. If a part lacks something that another part has already read, the state is in doubt. Then
nothing is placed, because GPUs that the missing part had promised could be promised again.

No record advances while the state is in doubt. So the doubt lasts until the parts agree again, or until
an operator accepts the parts as they are. Then the state gets a new identity, and records under the old
one no longer count.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from fleetcast.fleet.clock import format_moment
from fleetcast.ingest.inbox.inbox import WRITES
from fleetcast.ingest.inbox.segments import format_segment_name, parse_position

LEDGER, BOARD, SNAPSHOT, INBOX = "ledger", "board", "snapshot", "inbox"


class Doubt(msgspec.Struct, frozen=True):
    """A reason to place nothing: one part of the state is gone, old, or from another site.

    `since_ms`: when this part was last known to be complete, in Unix ms, or 0 if unknown.
    """

    part: str
    what: str
    since_ms: int = 0


class PartView(msgspec.Struct, frozen=True):
    """A part's record of how far it has seen the other parts.

    inbox: segment → offset in bytes up to which its events were applied.
    """

    identity: str = ""
    time_ms: int = 0
    ledger: int | None = None  # the last line of its audit; None: nothing yet
    board: int = 0  # its sequence
    snapshot: int = 0  # its number
    inbox: dict[str, int] = {}

    def merge_views(self, other: "PartView") -> "PartView":
        """Return, for each part, the furthest position in either view.

        If the views belong to different states, return this one.
        """
        if other.identity != self.identity:
            return self
        ledgers = [row.ledger for row in (self, other) if row.ledger is not None]
        return PartView(
            identity=self.identity,
            time_ms=max(self.time_ms, other.time_ms),
            ledger=max(ledgers, default=None),
            board=max(self.board, other.board),
            snapshot=max(self.snapshot, other.snapshot),
            inbox=merge_positions(self.inbox, other.inbox),
        )


class Part(msgspec.Struct, frozen=True):
    """The ledger, the board or the snapshots, as they exist now."""

    there: bool
    identity: str = ""
    position: int = 0  # last line of audit, sequence, or number
    seen: PartView = PartView()
    folded: dict[str, int] = {}  # of a snapshot: segment -> offset
    lost: Doubt | None = None  # what the part itself says that it lacks


class InboxPart(msgspec.Struct, frozen=True):
    """The inbox as it exists now.

    first: writer of events → number of its first segment. end: writer → its last segment and the size of
    this segment in bytes.
    """

    identity: str = ""
    first: dict[str, int] = {}
    end: dict[str, tuple[int, int]] = {}
    seen: PartView = PartView()


class StateParts(msgspec.Struct, frozen=True):
    """The parts of the saved state whose identities must agree.

    A part that is None is not checked. For example, the placer reads no snapshots.
    """

    inbox: InboxPart
    ledger: Part | None = None
    board: Part | None = None
    snapshot: Part | None = None

    def list_named_parts(self) -> dict[str, Part | InboxPart]:
        """Return name → part in a fixed order, for the parts that are not None."""
        rows = {INBOX: self.inbox, LEDGER: self.ledger, SNAPSHOT: self.snapshot, BOARD: self.board}
        return {name: part for name, part in rows.items() if part is not None}

    def find_identity(self) -> str:
        """Return the identity that most parts have, or "" if none has one yet.

        If several identities are equally frequent, return the first part's identity.
        """
        counts = Counter(part.identity for part in self.list_named_parts().values() if part.identity)
        return counts.most_common(1)[0][0] if counts else ""

    def find_views(self) -> dict[str, PartView]:
        """Return part → its record of the other parts, for the parts that belong to this state."""
        identity = self.find_identity()
        return {
            name: part.seen
            for name, part in self.list_named_parts().items()
            if identity and part.seen.identity == identity
        }


def find_doubts(parts: StateParts) -> list[Doubt]:
    """Return at most one doubt for each part, in a fixed order.

    The list is empty if all parts agree, or if all are new.
    """
    of_board = _find_part_doubts(BOARD, "the board is", parts, parts.board)
    found = [
        next(rows, None)
        for rows in (_find_ledger_doubts(parts), _find_snapshot_doubts(parts), of_board, _find_inbox_doubts(parts))
    ]
    return [doubt for doubt in found if doubt is not None]


def describe_doubt(doubt: Doubt) -> str:
    """Describe a doubt, and when its part was last complete."""
    return doubt.what + (f" (last whole at {format_moment(doubt.since_ms)})" if doubt.since_ms else "")


def explain_refusal(found: Sequence[Doubt]) -> str:
    """Describe all doubts, what they prevent, and how to end them."""
    stated = "; ".join(map(describe_doubt, found))
    return f"{stated}; nothing is placed until it is put back, or accepted: fleetcast state show"


def _find_ledger_doubts(parts: StateParts) -> Iterator[Doubt]:
    part, claims = parts.ledger, parts.find_views()
    if part is None:
        return
    yield from _find_identity_doubts(LEDGER, parts)
    if part.lost is not None:
        yield part.lost
    stated = {name: seen for name, seen in claims.items() if seen.ledger is not None}
    last, since_ms, who = _find_furthest_view(stated, lambda seen: seen.ledger or 0)
    if stated and not part.identity:
        state = "is new" if part.there else "is gone"
        yield Doubt(LEDGER, f"the ledger {state}, and {who} had seen one with {last:,} lines", since_ms)
    elif stated and part.position < last:
        yield Doubt(LEDGER, f"the ledger ends at line {part.position:,}, and {who} had seen line {last:,}", since_ms)


def _find_snapshot_doubts(parts: StateParts) -> Iterator[Doubt]:
    part = parts.snapshot
    yield from _find_part_doubts(SNAPSHOT, "the snapshots are", parts, part)
    last, since_ms, _ = _find_furthest_view(parts.find_views(), lambda seen: seen.snapshot)
    if part is not None and part.there and last and (gap := _describe_gap(part.folded, parts.inbox.first)):
        yield Doubt(SNAPSHOT, f"the snapshot is older than what is left of the inbox: {gap}", since_ms)


def _find_part_doubts(name: str, subject: str, parts: StateParts, part: Part | None) -> Iterator[Doubt]:
    """Yield the doubts about the board or the snapshots.

    Such a part is from another state, records a loss, or is gone.
    """
    if part is None:
        return
    yield from _find_identity_doubts(name, parts)
    if part.lost is not None:
        yield part.lost
    last, since_ms, who = _find_furthest_view(parts.find_views(), lambda seen: getattr(seen, name))
    if last and not part.there:
        yield Doubt(name, f"{subject} gone, and {who} had seen number {last:,}", since_ms)


def _find_inbox_doubts(parts: StateParts) -> Iterator[Doubt]:
    part, claims, identity = parts.inbox, parts.find_views(), parts.find_identity()
    yield from _find_identity_doubts(INBOX, parts)
    since_ms = max((seen.time_ms for seen in claims.values()), default=0)
    if identity and not part.identity:
        yield Doubt(INBOX, f"the inbox is gone or was emptied: it does not know the state {identity}", since_ms)
    for name, seen in claims.items():
        for (writer, number), offset in parse_position(seen.inbox):
            if not writer.startswith(WRITES) and part.end.get(writer, (0, 0)) < (number, offset):
                where = f"byte {offset:,} of {format_segment_name(writer, number)}"
                yield Doubt(
                    INBOX, f"the inbox lacks what {_add_article(name)} had seen of it, up to {where}", seen.time_ms
                )


def _find_identity_doubts(name: str, parts: StateParts) -> Iterator[Doubt]:
    named, identity = parts.list_named_parts(), parts.find_identity()
    own = named[name].identity
    if own and own != identity:
        others = _join_names([_add_article(other) for other, part in named.items() if part.identity == identity])
        since_ms = max((seen.time_ms for seen in parts.find_views().values()), default=0)
        yield Doubt(
            name, f"{_add_article(name)} of the state {own} lies with {others} of the state {identity}", since_ms
        )


def _find_furthest_view(claims: Mapping[str, PartView], of: Any) -> tuple[int, int, str]:
    """Return the furthest position in `claims`, when it was seen (Unix ms), and the part that saw it.

    of: returns the position in a part's record. Returns (0, 0, "") without records.
    """
    if not claims:
        return 0, 0, ""
    name = max(claims, key=lambda name: (of(claims[name]), claims[name].time_ms))
    return of(claims[name]), claims[name].time_ms, _add_article(name)


def _describe_gap(folded: Mapping[str, int], first: Mapping[str, int]) -> str:
    """Describe a segment that no longer exists although its events were never applied.

    Returns "" if there is none.
    """
    reached = {writer: number for (writer, number), _ in parse_position(folded)}
    for writer, number in first.items():
        if number > max(1, reached.get(writer, 0)):
            return f"{format_segment_name(writer, number - 1)} is gone and was not folded"
    return ""


def drop_missing_segments(position: Mapping[str, int], end: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Drop the entries of a position whose segment does not exist, or is shorter than the entry.

    After an inbox was lost, new segments may get the names of the lost ones.

    >>> positions = {"api-000000000002.seg": 99, "api.1-000000000001.seg": 16}
    >>> drop_missing_segments(positions, {"api": (2, 50), "api.1": (1, 16)})
    {'api.1-000000000001.seg': 16}
    """
    rows = {
        format_segment_name(writer, number): (writer, number, offset)
        for (writer, number), offset in parse_position(position)
    }
    return {name: row[2] for name, row in rows.items() if end.get(row[0], (0, 0)) >= row[1:]}


def merge_positions(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Merge two inbox positions: keep the further one for each writer.

    >>> merge_positions({"api-000000000002.seg": 16}, {"api-000000000001.seg": 99, "api.1-000000000001.seg": 16})
    {'api-000000000002.seg': 16, 'api.1-000000000001.seg': 16}
    """
    most: dict[str, tuple[int, int]] = {}
    for position in (first, second):
        for (writer, number), offset in parse_position(position):
            most[writer] = max(most.get(writer, (0, 0)), (number, offset))
    return {format_segment_name(writer, number): offset for writer, (number, offset) in most.items()}


def _add_article(name: str) -> str:
    return f"the {name}"


def _join_names(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]) if len(names) > 1 else names)
