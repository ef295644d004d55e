"""The newest board with its decoded documents and prepared answers.

The cache drops them when the next board arrives.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.board.urgent import compute_node_state, find_struck_nodes
from fleetcast.service.http.problems import make_warming_problem

T = TypeVar("T")
MAX_CACHED = 256


@dataclass(frozen=True, slots=True)
class NodeAnswers:
    """The prebuilt bodies of all nodes on one board: `blob[offsets[row] : offsets[row + 1]]`."""

    as_of_ms: int
    sequence: int
    rows: dict[bytes, int]
    offsets: "memoryview[int]"
    blob: memoryview
    struck: dict[bytes, bytes]  # bodies of the nodes that a hard signal struck since

    def get_body(self, name: bytes) -> bytes | None:
        """Return the body of a node's answer.

        Returns None for an unknown node. Returns an empty body for a node that is too new to have an answer.
        """
        row = self.rows.get(name)
        if row is None:
            return None
        if self.struck and name in self.struck:
            return self.struck[name]
        return self.read_scored_body(row)

    def read_scored_body(self, row: int) -> bytes:
        return bytes(self.blob[self.offsets[row] : self.offsets[row + 1]]) if row + 1 < len(self.offsets) else b""


class BoardCache:
    """A cache of the newest board. `hold_s`: the shortest time between two polls of the file, in wall seconds."""

    def __init__(self, folder: Path, *, hold_s: float = 0.01) -> None:
        self.folder = folder
        self._reader = BoardReader(folder)
        self._hold_s = hold_s
        self._polled_s = -1e9
        self._board: Board | None = None
        self._cached: dict[Any, Any] = {}
        self._node_names = b""
        self._node_rows: dict[bytes, int] = {}

    def latest(self) -> Board | None:
        """Return the newest board, or None before the first one."""
        return self.read() if time.monotonic() - self._polled_s >= self._hold_s else self._board

    def read(self) -> Board | None:
        """Read the newest board from the file at once. Callers use this when they know that the file has changed."""
        self._polled_s = time.monotonic()
        board = self._reader.latest()
        if board is not self._board:
            self._board, self._cached = board, {}
        return self._board

    def get_board(self) -> Board:
        """Return the newest board. Raises a 503 problem before the first one."""
        board = self.latest()
        if board is None:
            raise make_warming_problem()
        return board

    def get_section(self, board: Board, name: str) -> memoryview:
        """Return a section's bytes. Raises a 503 problem before the pipeline publishes the section."""
        try:
            return board.raw(name)
        except KeyError:
            raise make_warming_problem(f"the board has no {name} yet") from None

    def get_document(self, board: Board, name: str, kind: Any = Any) -> Any:
        """Return a decoded JSON section. Callers must not change it.

        It is decoded once for each board and `kind`. For a large section, use a `kind` whose parts are
        `msgspec.Raw`.
        """
        raw = self.get_section(board, name)
        return self.get_or_derive(board, ("document", name, kind), lambda: msgspec.json.decode(raw, type=kind))

    def get_or_derive(self, board: Board, key: Any, make: Callable[[], T]) -> T:
        """Return the result of `make`. It is called once for each board and key."""
        if board is not self._board:
            return make()
        if key not in self._cached:
            if len(self._cached) >= MAX_CACHED:
                self._cached.clear()
            self._cached[key] = make()
        found: T = self._cached[key]
        return found

    def get_as_of_ms(self, board: Board, name: str) -> int:
        """Return when a section was made, in Unix ms. If the section is missing, return the time of the board."""
        try:
            return int(board.meta(name)["as_of_ms"])
        except KeyError:
            return board.as_of_ms

    def get_node_answers(self, board: Board) -> NodeAnswers:
        """Return the bodies of all nodes. Raises a 503 problem before the pipeline publishes them."""
        return self.get_or_derive(board, "node_answers", lambda: self._make_node_answers(board))

    def _make_node_answers(self, board: Board) -> NodeAnswers:
        blob = self.get_section(board, "answers.node")
        offsets = self.get_section(board, "answers.node.offsets").cast("q")  # in place: a list of all takes a ms
        as_of_ms = self.get_as_of_ms(board, "answers.node")
        answers = NodeAnswers(as_of_ms, board.sequence, self._index_nodes(board), offsets, blob, {})
        for name, rows in find_struck_nodes(board).items():
            row = answers.rows.get(name.encode())
            if row is not None and (body := answers.read_scored_body(row)):
                node = msgspec.json.decode(body)
                node |= {"state": compute_node_state(node["state"], rows), "urgent": rows}
                answers.struck[name.encode()] = msgspec.json.encode(node)
        return answers

    def _index_nodes(self, board: Board) -> dict[bytes, int]:
        """Return node name → row. The result is computed again only when the names change."""
        names = bytes(self.get_section(board, "names.node"))
        if names != self._node_names:
            self._node_names = names
            self._node_rows = {name: row for row, name in enumerate(names.split(b"\n"))} if names else {}
        return self._node_rows
