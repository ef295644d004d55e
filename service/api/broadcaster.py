"""The broadcaster of server-sent events: one reader of the board serves any number of clients.

A slow client skips boards.

    event: board   {"as_of_ms", "sequence"}   at once, then whenever a board is published
    event: hard    [{…}, …]                   hard signals as they arrive, without waiting for a tick
    event: action  [{…}, …]                   actions on running jobs, as soon as they change (at first the newest)
    : heartbeat                               after every 15 s of silence
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from fleetcast.fleet.event_wait import wait_for_event
from fleetcast.fleet.file_changes import REPLACED, FileChanges
from fleetcast.service.api.action_feed import ActionFeed
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache

POLL_S = 0.1  # the least time between two boards
HEARTBEAT_S = 15.0
MAX_CLIENTS = 256
MAX_ROWS = 256  # hard signals and changes of actions that a slow client may still receive


class EventBroadcaster:
    """The broadcaster of one api process. All times are wall time.

    `close` ends every stream so that the server can stop. actions: None streams no actions. sends_signals: whether
    clients receive hard signals.
    """

    def __init__(
        self,
        cache: BoardCache,
        actions: ActionFeed | None = None,
        *,
        sends_signals: bool = True,
        poll_s: float = POLL_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.cache = cache
        self._actions = actions
        self._sends_signals = sends_signals
        self.clients = 0
        self.closed = False
        self._poll_s = poll_s
        self._heartbeat_s = heartbeat_s
        self._board: bytes = b""
        self._boards = 0
        self._rows: deque[tuple[int, str, Any]] = deque(maxlen=MAX_ROWS)  # number, event, row
        self._row_count = 0
        self._headers: Mapping[str, str] = {}
        self._urgent_raw = b""
        self._urgent: list[Any] = []
        self._changed = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []

    async def stream_events(self, headers: Mapping[str, str] | None = None) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events for one client. headers: its access to the placer."""
        self.clients += 1
        self._headers = headers or {}
        if not self._readers:
            self._refresh_board()
            self._readers = [asyncio.ensure_future(self._run_read_loop())]
            if self._actions is not None:
                self._readers.append(asyncio.ensure_future(self._run_action_loop(self._actions)))
        boards, number = -1, self._row_count
        try:
            yield b"retry: 2000\n\n"
            while not self.closed:
                changed = self._changed
                if self._boards != boards and self._board:
                    boards = self._boards
                    yield self._board
                if self._row_count != number:
                    fresh = [(event, row) for at, event, row in self._rows if at > number]
                    number = self._row_count
                    for name in sorted({event for event, _ in fresh}):
                        rows = [row for event, row in fresh if event == name]
                        yield f"event: {name}\ndata: ".encode() + msgspec.json.encode(rows) + b"\n\n"
                if not await wait_for_event(changed, self._heartbeat_s):
                    yield b": heartbeat\n\n"
        finally:
            self.clients -= 1
            if not self.clients:
                self._stop_readers()

    def _stop_readers(self) -> list[asyncio.Task[None]]:
        stopped, self._readers = self._readers, []
        for reader in stopped:
            reader.cancel()
        if self._actions is not None:
            self._actions.forget()
        return stopped

    async def _run_action_loop(self, actions: ActionFeed) -> None:
        while not self.closed:
            rows = await actions.wait_for_rows(self._headers)
            if rows:
                self._add_rows("action", rows)
                self._wake_clients()

    async def _run_read_loop(self) -> None:
        with contextlib.closing(FileChanges({self.cache.folder: REPLACED}, self._poll_s)) as changes:
            while not self.closed:
                await changes.wait()
                if self._refresh_board():
                    self._wake_clients()

    def _refresh_board(self) -> bool:
        """Read the board. Returns whether there is a new board or a new hard signal."""
        try:
            board = self.cache.read()
        except OSError:  # such as no descriptor left: the next read may find one, and open streams must not end
            return False
        if board is None:
            return False
        data = msgspec.json.encode({"as_of_ms": board.as_of_ms, "sequence": board.sequence})
        text = b"id: %d\nevent: board\ndata: %b\n\n" % (board.sequence, data)
        changed = text != self._board
        if changed:
            self._board, self._boards = text, self._boards + 1
        return (self._sends_signals and self._add_new_signals(board)) or changed

    def _add_new_signals(self, board: Board) -> bool:
        try:
            raw = board.text("doc.urgent")
        except KeyError:
            return False
        if raw == self._urgent_raw:
            return False
        self._urgent_raw = raw
        rows = msgspec.json.decode(raw)["rows"]
        fresh = [row for row in rows if row not in self._urgent]
        self._urgent = rows
        self._add_rows("hard", fresh)
        return bool(fresh)

    def _add_rows(self, event: str, rows: Sequence[Any]) -> None:
        for row in rows:
            self._row_count += 1
            self._rows.append((self._row_count, event, row))

    def _wake_clients(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        self.closed = True
        self._wake_clients()
        for reader in self._stop_readers():
            with contextlib.suppress(asyncio.CancelledError):
                await reader
