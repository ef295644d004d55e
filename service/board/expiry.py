"""Expire intents whose jobs did not start in time.

A start that was acknowledged in time may still wait in the inbox. So an intent expires upon a board that was made
after its expiry, and has folded the inbox as far as it reached when the placer first found the intent's time over.
"""

from collections.abc import Sequence
from pathlib import Path

from ingest.inbox.reach import End, covers, inbox_end, unread, unread_types
from placement.ledger import Intent
from service.board.board import Board, Standing


class Expiry:
    """Notes where the inbox ended. After a restart it notes later ends, which is as good."""

    def __init__(self, inbox: Path) -> None:
        self._inbox = inbox
        self._ends: dict[str, End] = {}  # request id -> where the inbox ended when its time was found to be over

    def expired(self, intents: Sequence[Intent], board: Board, now_ms: int) -> set[str]:
        """The requests whose time is over, upon a board that knows of every start until then."""
        over = {intent.request_id: intent for intent in intents if now_ms >= intent.expires_ms}
        if over.keys() != self._ends.keys():
            end = inbox_end(self._inbox) if over.keys() - self._ends.keys() else {}
            self._ends = {request_id: self._ends.get(request_id, end) for request_id in over}
        made_after = [intent for intent in over.values() if board.as_of_ms >= intent.expires_ms]
        if not made_after:
            return set()
        left = unread(self._inbox, _folded(board))
        return {row.request_id for row in made_after if covers(left, self._ends[row.request_id])}

    def acknowledged(self, intent: Intent, board: Board | None) -> set[str]:
        """The types of the attempt's events that were acknowledged, and that the board has not folded."""
        return set(unread_types(self._inbox, _folded(board), intent.job, intent.attempt))


def _folded(board: Board | None) -> dict[str, int]:
    """How far a board has folded the inbox."""
    return (board.standing if board and board.standing else Standing()).inbox
