"""What the first pipeline knows of the state that it goes on with: its identity, what it has seen, what it lacks."""

import logging
from collections.abc import Sequence

from fleet import files
from service.board import Standing
from service.config import Config
from service.disk_trouble import said
from service.occupancy import UNKNOWN
from service.snapshot import Kept
from service.state_identity import BOARD, SNAPSHOT, Doubt, Part, Parts, Seen, doubts, furthest, within
from service.state_parts import StateFile, board_part, inbox_part, ledger_part, make_identity, read_identity, write_seen

logger = logging.getLogger(__name__)


class Lineage:
    """At the start it compares what lies there; `look` goes on with that at every board.

    What the pipeline lacks it cannot get back while it runs: its boards and snapshots say so until somebody accepts
    it, or starts with others. Ledger and inbox are looked at anew each time.
    """

    def __init__(self, config: Config, kept: Kept, now_ms: int) -> None:
        self._config = config
        self._kept = kept
        self._began_ms = now_ms
        self._board_lost: Doubt | None = None
        self.is_accepted = False
        parts = self._parts()
        self.identity = parts.identity()
        if not self.identity and parts.ledger is not None:  # one that cannot be read now may have an identity
            self.identity = make_identity(config.inbox)
        self.seen = Seen(identity=self.identity)
        for seen in parts.claims().values():
            self.seen = self.seen.with_more(seen)
        self._judge(parts)
        self.judge_occupancy()

    def _parts(self) -> Parts:
        """What lies there; what somebody accepted is of the identity that it got by that."""
        kept, inbox = self._kept, inbox_part(self._config.inbox)
        there = kept.number > 0 or any(map(str.isdecimal, files.listing(self._config.home(0) / "snapshot")))
        folded = kept.positions.get("inbox", {})
        snapshot = Part(there, kept.identity, kept.number, kept.seen, folded, kept.lost)
        board, ledger = board_part(self._config.board), ledger_part(self._config.ledger)
        file = read_identity(self._config.inbox)
        if file and _was_accepted(file, kept, (inbox.seen, board.seen, ledger.seen if ledger else Seen())):
            self._take_as_whole()
            kept.positions["inbox"] = folded = within(folded, inbox.end)
            snapshot = Part(there, file.identity, kept.number, folded=folded)
            board = board if board.identity == file.identity else Part(board.there)
        return Parts(inbox, ledger, board, snapshot)

    def _judge(self, parts: Parts) -> None:
        found = {doubt.part: doubt for doubt in doubts(parts)}
        self._kept.lost, self._board_lost = found.get(SNAPSHOT), found.get(BOARD)
        for doubt in found.values():
            logger.error("%s; nothing is placed until it is put back, or accepted: fleetcast state show", doubt.what)

    def judge_occupancy(self) -> None:
        """Note the loss where nobody knows what runs."""
        if not self._kept.occupancy_known and self._kept.lost is None:
            self._kept.lost = Doubt(SNAPSHOT, UNKNOWN, self.seen.time_ms)

    def _take_as_whole(self) -> None:
        self.is_accepted = True
        self._kept.lost = self._board_lost = None
        self._kept.occupancy_known = True

    def look(self, inbox: dict[str, int], board: int, snapshot: int, now_ms: int) -> Standing:
        """The standing of a board that has folded `inbox`, after board number `board` and snapshot `snapshot`.

        It raises what was seen unless something is in doubt. It reads files, and is called by one thread at a time.
        """
        self._follow(read_identity(self._config.inbox), now_ms)
        parts = Parts(
            inbox=inbox_part(self._config.inbox),
            ledger=ledger_part(self._config.ledger),
            board=Part(True, self.identity, board, self.seen, lost=self._board_lost),
            snapshot=Part(True, self.identity, snapshot, folded=inbox, lost=self._kept.lost),
        )
        if self.identity and not doubts(parts):
            self._raise(parts, inbox, board, snapshot, now_ms)
        return Standing(inbox, self.identity, self.seen, self._board_lost, self._kept.lost)

    def _follow(self, file: StateFile | None, now_ms: int) -> None:
        """Take the identity that somebody has accepted since the start, or that the placer has made."""
        if file is None or file.identity == self.identity:
            return
        accepted = file.accepted is not None and file.accepted.time_ms >= self._began_ms
        if accepted:
            self._take_as_whole()
        if accepted or not self.identity:
            logger.info("the state is %s from now on", file.identity)
            self.identity, self.seen = file.identity, Seen(identity=file.identity, time_ms=now_ms)

    def _raise(self, parts: Parts, inbox: dict[str, int], board: int, snapshot: int, now_ms: int) -> None:
        line, ledger = self.seen.ledger, parts.ledger
        if ledger is not None and ledger.identity == self.identity:
            line = max(line or 0, ledger.position)
        folded = furthest(self.seen.inbox, within(inbox, parts.inbox.end))
        self.seen = Seen(self.identity, now_ms, line, board, snapshot, folded)

    def note(self, seen: Seen) -> None:
        """Leave with the inbox what a snapshot has seen; a disk that is full costs that word alone."""
        with said("note in the inbox what the snapshot has seen", "the next one does"):
            write_seen(self._config.inbox, seen)


def _was_accepted(file: StateFile, kept: Kept, told: Sequence[Seen]) -> bool:
    """Whether somebody has accepted the snapshot that was restored, or that there is none (and none came since)."""
    if file.accepted is None or kept.identity == file.identity:
        return False
    if kept.number:
        return (kept.number, kept.saved_ms) in file.accepted.snapshots
    since = any(seen.snapshot for seen in told if seen.identity == file.identity)
    return not file.accepted.snapshots and not since
