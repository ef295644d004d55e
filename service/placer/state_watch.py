"""The placer's check that the parts of the state agree.

The parts are inbox, ledger, board and snapshot. While one part lacks what another has seen, the placer
places nothing.
"""

import logging
from pathlib import Path

import msgspec

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.errors import StaleError
from fleetcast.placement.ledger.ledger import Ledger, LedgerError
from fleetcast.service.board.board import Board
from fleetcast.service.config import Config
from fleetcast.service.state_identity import Doubt, Part, PartView, StateParts, explain_refusal, find_doubts
from fleetcast.service.state_parts import (
    ACCEPTED_HEAD,
    AcceptedParts,
    StateFile,
    find_missing_head,
    make_board_part,
    make_identity,
    read_identity,
    read_inbox_part,
    read_seen_mark,
    read_state_parts,
)

logger = logging.getLogger(__name__)

AGAIN_MS = 1000  # steady, between two looks while something is in doubt


class StateWatch:
    """A check that the parts of the state agree.

    It runs at the start, at every new board, and every second while they disagree.
    """

    def __init__(self, config: Config, clock: Clock, ledger: Ledger) -> None:
        self._config = config
        self._clock = clock
        self._ledger = ledger
        self._file = _read_inode(ledger.path)
        self._board: Board | None = None
        self._looked_ms = clock.steady_ms()
        self.doubts: list[Doubt] = []
        self._check_parts()

    def check_if_due(self, board: Board | None) -> None:
        """Compare the parts if the board is new, or if it is time to check a disagreement again.

        Raises LedgerError if the ledger's file was replaced.
        """
        fresh = board is not self._board
        again = self.doubts and self._clock.steady_ms() - self._looked_ms >= AGAIN_MS
        if fresh or again:
            self._board = board
            self._looked_ms = self._clock.steady_ms()
            self._check_parts()

    def raise_if_in_doubt(self) -> None:
        """Raise StaleError while the parts of the state disagree.

        Raises LedgerError if the ledger's file was replaced, because later writes would be lost.
        """
        self._check_ledger_file()
        if self.doubts:
            raise StaleError(explain_refusal(self.doubts))

    def _create_identity(self) -> None:
        """Create the identity of a new state.

        Write the identity into the ledger only if the ledger has none and no other part has seen a ledger.
        """
        parts = read_state_parts(self._config)
        if not parts.find_identity() and not self._ledger.identity:
            make_identity(self._config.inbox)
        file = read_identity(self._config.inbox)
        others = (parts.inbox, parts.board, parts.snapshot)
        if file and not self._ledger.identity and all(part is None or part.seen.ledger is None for part in others):
            self._ledger.set_identity(file.identity)

    def _check_parts(self) -> None:
        self._check_ledger_file()
        try:
            self._compare_parts()
        except LedgerError as error:  # it cannot be used now, so that nothing is placed anyhow
            logger.error("%s; the parts of the state are compared when it can be", error)

    def _compare_parts(self) -> None:
        if not self._ledger.identity:
            self._create_identity()
        self._adopt_accepted_identity()
        ledger, marks = self._ledger, self._ledger.list_marks()
        lost = find_missing_head(self._config.placer.expect_head, marks, ledger.find_hash_and_head)
        standing = self._board.standing if self._board else None
        parts = StateParts(
            inbox=read_inbox_part(self._config.inbox),
            ledger=Part(True, ledger.identity, ledger.position, read_seen_mark(marks), lost=lost),
            board=make_board_part(self._board),
            snapshot=Part(True, folded=standing.inbox, lost=standing.snapshot_lost) if standing else None,
        )
        before, self.doubts = self.doubts, find_doubts(parts)
        if self.doubts and self.doubts != before:
            logger.error("%s", explain_refusal(self.doubts))
        elif before and not self.doubts:
            logger.info("the parts of the state agree again")
        if not self.doubts and self._board and standing and standing.identity == ledger.identity:
            mark = msgspec.structs.replace(standing.seen, ledger=None, board=self._board.sequence)
            ledger.record_marks(seen=msgspec.to_builtins(mark))

    def _check_ledger_file(self) -> None:
        if _read_inode(self._ledger.path) != self._file:
            raise LedgerError(f"{self._ledger.path} was removed or replaced while the placer ran: it starts again")

    def _adopt_accepted_identity(self) -> None:
        file = read_identity(self._config.inbox)
        board = self._board.standing if self._board and self._board.standing else None
        if file and adopt_identity(self._ledger, file, [board.seen if board else PartView()], self._clock.now_ms()):
            logger.warning("%s", file.accepted.sentence if file.accepted else "")


def adopt_identity(ledger: Ledger, file: StateFile, others: list[PartView], now_ms: int) -> bool:
    """Write the state's new identity into the ledger and the audit trail. Returns whether it was written.

    It is written only if an operator accepted it for this very ledger, and no other ledger has it.
    """
    accepted: AcceptedParts | None = file.accepted
    if accepted is None or ledger.identity == file.identity:
        return False
    replaced = any(seen.identity == file.identity and seen.ledger is not None for seen in others)
    if replaced or accepted.ledger != (ledger.identity, ledger.position):
        return False
    with ledger.transaction():
        ledger.set_identity(file.identity, rebuilt=True)
        ledger.record_marks(seen={})
        if accepted.expect_head:
            ledger.record_marks(**{ACCEPTED_HEAD: accepted.expect_head})
        ledger.record_acceptance(accepted.sentence, now_ms, accepted.by)
    return True


def _read_inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
