"""The broadcaster of server-sent events: one reader of the board serves any number of clients.

A slow client skips boards.

    event: board   {"as_of_ms", "sequence"}   at once, then whenever a board is published
    event: hard    [{…}, …]                   hard signals as they arrive, without waiting for a tick
    : heartbeat                               after every 15 s of silence
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from fleetcast.fleet.event_wait import wait_for_event
from fleetcast.fleet.file_changes import REPLACED, FileChanges
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache

POLL_S = 0.1  # the least time between two boards
HEARTBEAT_S = 15.0
MAX_CLIENTS = 256
MAX_HARD_REASONS = 256


class EventBroadcaster:
    """The broadcaster of one api process. All times are wall time.

    `close` ends every stream so that the server can stop.
    """

    def __init__(self, cache: BoardCache, *, poll_s: float = POLL_S, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.cache = cache
        self.clients = 0
        self.closed = False
        self._poll_s = poll_s
        self._heartbeat_s = heartbeat_s
        self._board: bytes = b""
        self._boards = 0
        self._hard: deque[tuple[int, Any]] = deque(maxlen=MAX_HARD_REASONS)
        self._hard_count = 0
        self._urgent_raw = b""
        self._urgent: list[Any] = []
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def stream_events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events for one client."""
        self.clients += 1
        if self._reader is None:
            self._refresh_board()
            self._reader = asyncio.ensure_future(self._run_read_loop())
        boards, hard = -1, self._hard_count
        try:
            yield b"retry: 2000\n\n"
            while not self.closed:
                changed = self._changed
                if self._boards != boards and self._board:
                    boards = self._boards
                    yield self._board
                if self._hard_count != hard:
                    rows = [row for number, row in self._hard if number > hard]
                    hard = self._hard_count
                    yield b"event: hard\ndata: " + msgspec.json.encode(rows) + b"\n\n"
                if not await wait_for_event(changed, self._heartbeat_s):
                    yield b": heartbeat\n\n"
        finally:
            self.clients -= 1
            if not self.clients and self._reader is not None:
                self._reader.cancel()
                self._reader = None

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
        return self._add_new_signals(board) or changed

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
        for row in fresh:
            self._hard_count += 1
            self._hard.append((self._hard_count, row))
        return bool(fresh)

    def _wake_clients(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        self.closed = True
        self._wake_clients()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
            self._reader = None
