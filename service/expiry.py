"""When a promise that nobody was seen to keep has expired.

Not by the clock alone: the board that the placer judges by is older than the clock, and a start that was acknowledged
in time may wait in the inbox behind a pipeline that is slow, stopped or away. So what counts is a board that knows of
everything that was acknowledged up to the expiry: it was made after it, and has folded the inbox up to the end that
the inbox had then. The placer notes that end at its first look at or after the expiry.
"""

from collections.abc import Sequence
from pathlib import Path

from ingest.inbox_reach import End, covers, inbox_end, unread, unread_types
from placement.ledger import Intent
from service.board import Board, Standing


class Expiry:
    """Looks at an inbox folder, and remembers its ends. After a restart it notes later ones, which is as good."""

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
        """The types of the events of its attempt that were acknowledged and that the board does not know of."""
        return set(unread_types(self._inbox, _folded(board), intent.job, intent.attempt))


def _folded(board: Board | None) -> dict[str, int]:
    """How far a board has folded the inbox."""
    return (board.standing if board and board.standing else Standing()).inbox
