"""The expiry of intents whose jobs did not start in time.

A start that was acknowledged in time may still wait in the inbox. So the board that expires an intent
must be newer than the intent's expiry. It must also include everything that was in the inbox when the
placer first found the intent overdue.

A start that was sent in time may not have been received at all. So an intent also waits

    for each source of starts   until the source has received everything up to the expiry, and for its whole
                                time again after an interruption; at most `outage_pause_s` beyond the expiry
    for its own refused start   as long as a mark records the refusal
"""

from collections import Counter
from collections.abc import Sequence

from fleetcast.ingest.inbox.reach import End, find_first_unread, find_inbox_end, has_passed_end, list_unread_event_types
from fleetcast.placement.ledger.ledger import Intent
from fleetcast.service.board.board import Board, Standing
from fleetcast.service.config import Config
from fleetcast.service.held_starts import find_marked_requests
from fleetcast.service.listening import ListeningReader

REFUSED = "refused"  # stands for a source where the start itself was refused


class IntentExpiry:
    """The rule that expires intents.

    It records where the inbox ended when it first found an intent overdue. A restart loses these records.
    The ends that it records after the restart are later in the inbox. So an intent may expire later, but
    never too early.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._inbox = config.inbox
        self.listening = ListeningReader(config.folder)
        self._ends: dict[str, End] = {}  # request id -> where the inbox ended when its time was found to be over
        self.paused = Counter({REFUSED: 0})  # source, or REFUSED -> the intents that wait for it

    def find_expired(self, intents: Sequence[Intent], board: Board, now_ms: int) -> set[str]:
        """Return the ids of overdue requests for which the board includes every start that was sent in time."""
        over = {intent.request_id: intent for intent in intents if now_ms >= intent.expires_ms}
        if not over:
            self._ends, self.paused = {}, Counter({REFUSED: 0})
            return set()
        marked = over.keys() & find_marked_requests(self._config.folder, [row.request_id for row in intents])
        self.paused = Counter({REFUSED: len(marked)})
        unmarked = over.keys() - marked
        if unmarked != self._ends.keys():  # a start is in the inbox before its mark goes: read the end after the marks
            end = find_inbox_end(self._inbox) if unmarked - self._ends.keys() else {}
            self._ends = {request_id: self._ends.get(request_id, end) for request_id in unmarked}
        made_after = [over[request_id] for request_id in self._ends if board.as_of_ms >= over[request_id].expires_ms]
        if not made_after:
            return set()
        left = find_first_unread(self._inbox, _get_folded_offsets(board))
        folded = [row for row in made_after if has_passed_end(left, self._ends[row.request_id])]
        waits = self._find_awaited_sources(folded, board, now_ms)
        self.paused.update(source for sources in waits.values() for source in sources)
        return {row.request_id for row in folded if not waits[row.request_id]}

    def _find_awaited_sources(self, over: Sequence[Intent], board: Board, now_ms: int) -> dict[str, list[str]]:
        """Return request id → the sources of starts that the overdue intent still waits for."""
        placer = self._config.placer
        grace_ms, pause_ms = round(placer.intent_expires_s * 1000), round(placer.outage_pause_s * 1000)
        sources = self.listening.read_statements(board)
        waits: dict[str, list[str]] = {}
        for row in over:
            is_paused = now_ms < row.expires_ms + pause_ms
            away = [name for name, stated in sources.items() if not stated.covers_expiry(row.expires_ms, grace_ms)]
            waits[row.request_id] = away if is_paused else []
        return waits

    def list_acknowledged_types(self, intent: Intent, board: Board | None) -> set[str]:
        """Return the types of the attempt's events that were acknowledged, but that the board does not include yet."""
        return set(list_unread_event_types(self._inbox, _get_folded_offsets(board), intent.job, intent.attempt))


def _get_folded_offsets(board: Board | None) -> dict[str, int]:
    """Return segment → the offset up to which a board includes the inbox."""
    return (board.standing if board and board.standing else Standing()).inbox
