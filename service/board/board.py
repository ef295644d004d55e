"""The board: named sections in one file, atomically replaced, memory-mapped by readers.

Layout: magic (8 bytes), header length (uint32, little endian), JSON header, then the sections, each
aligned to 64 bytes. A section is an array (`dtype`, `shape`) or bytes (dtype "bytes"): JSON, or names
joined by newlines.

    header  {"version": 2, "sequence": n, "as_of_ms": t, "standing": {"inbox": {segment: offset},
             "identity", "seen", "board_lost", "snapshot_lost"} or null,
             "sections": [{"name", "dtype", "shape", "offset", "nbytes", "as_of_ms", "model"}]}

A folder holds two such files. `board` is replaced at each tick, and `urgent` at once by a hard signal.
If both have a section, the newer one wins. Readers ignore sections that they do not know.

`standing`: the board includes every record of the inbox before these offsets, and none after them. Its
other fields are for fleetcast.service.state_identity. Only the first pipeline's `board` has a standing.
"""

import contextlib
import math
import mmap
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet import files
from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.service.state_identity import Doubt, PartView

MAGIC = b"FLEETBRD"
ALIGN = 64
BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Section:
    """One named section of a board: an array or bytes."""

    name: str
    data: NDArray[Any] | bytes
    as_of_ms: int
    model: str = ""


class Standing(msgspec.Struct, frozen=True):
    """The inbox position of a whole board, and what the board says about the parts of the state.

    `inbox`: segment → offset up to which the board includes the segment.
    """

    inbox: dict[str, int] = {}
    identity: str = ""
    seen: PartView = PartView()
    board_lost: Doubt | None = None
    snapshot_lost: Doubt | None = None


class BoardError(Exception):
    """The error for a file that is not a whole board: torn, foreign or of another version."""


class _Row(TypedDict):
    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int
    as_of_ms: int
    model: str


class _Header(TypedDict):
    version: Literal[2]
    sequence: int
    as_of_ms: int
    standing: Standing | None
    sections: list[_Row]


_decode_header = msgspec.json.Decoder(_Header).decode


def _parse_header(view: memoryview) -> _Header:
    """Decode the header of a board.

    Raises BoardError if the header is invalid, or if a section exceeds the file.
    """
    if len(view) < 12 or bytes(view[:8]) != MAGIC:
        raise BoardError("not a board file")
    (length,) = struct.unpack("<I", view[8:12])
    try:
        header: _Header = _decode_header(view[12 : 12 + length])
    except (ValueError, RecursionError) as error:
        raise BoardError(f"torn board header: {explain_json_error(error)}") from None
    for row in header["sections"]:
        if row["offset"] < 0 or not 0 <= row["nbytes"] <= len(view) - row["offset"]:
            raise BoardError(f"torn board: {len(view)} bytes, {row['name']} ends at {row['offset'] + row['nbytes']}")
        if _compute_nbytes(row) != row["nbytes"]:
            raise BoardError(f"torn board: {row['name']} is {row['nbytes']} bytes, not {row['dtype']} {row['shape']}")
    return header


def _compute_nbytes(row: _Row) -> int:
    """Return the size in bytes that dtype and shape require, or -1 if they are invalid."""
    try:
        dtype = np.dtype("u1" if row["dtype"] == BYTES else row["dtype"])
    except (TypeError, ValueError):
        return -1
    if dtype.hasobject or min(row["shape"], default=0) < 0:
        return -1
    return math.prod(row["shape"], start=dtype.itemsize)


class Board:
    """One published board. It never changes. Arrays are read-only views into the mapped file."""

    def __init__(self, buffer: bytes | mmap.mmap) -> None:
        view = memoryview(buffer)
        header = _parse_header(view)
        self._view = view
        self._sections: dict[str, _Row] = {row["name"]: row for row in header["sections"]}
        self.as_of_ms: int = header["as_of_ms"]
        self.sequence: int = header["sequence"]
        self.standing = header["standing"]
        self._names: dict[str, tuple[str, ...]] = {}
        self._overlay: Board | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._sections

    def overlay_urgent_sections(self, urgent: "Board | None") -> "Board":
        """Overlay the newer sections of `urgent`, and return this board."""
        self._overlay = urgent
        return self

    def _find_section(self, name: str) -> "tuple[Board, _Row]":
        own = self._sections.get(name)
        over = self._overlay._sections.get(name) if self._overlay else None
        if over and self._overlay and (own is None or over["as_of_ms"] > own["as_of_ms"]):
            return self._overlay, over
        if own is None:
            raise KeyError(f"the board has no section {name!r}")
        return self, own

    def meta(self, name: str) -> "_Row":
        """Return a section's entry in the header: dtype, shape, as_of_ms, model."""
        return self._find_section(name)[1]

    def sections(self) -> list[str]:
        return list(self._sections)

    def raw(self, name: str) -> memoryview:
        """Return the section's bytes without copying."""
        board, row = self._find_section(name)
        return board._view[row["offset"] : row["offset"] + row["nbytes"]]

    def array(self, name: str) -> NDArray[Any]:
        """Return a section as a read-only array. Raises KeyError if the board has no section with this name."""
        _, row = self._find_section(name)
        array = np.frombuffer(self.raw(name), dtype=np.dtype(row["dtype"])).reshape(row["shape"])
        array.flags.writeable = False
        return array

    def text(self, name: str) -> bytes:
        return bytes(self.raw(name))

    def json(self, name: str) -> Any:
        return msgspec.json.decode(self.raw(name))

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names in a section of names, which are joined by newlines."""
        if name not in self._names:
            text = self.text(name).decode()
            self._names[name] = tuple(text.split("\n")) if text else ()
        return self._names[name]


def encode_board(sections: Sequence[Section], sequence: int, as_of_ms: int, standing: Standing | None = None) -> bytes:
    """Return the bytes of a board file."""
    payloads = [section.data if isinstance(section.data, bytes) else section.data.tobytes() for section in sections]

    def encode_header(base: int) -> bytes:
        rows, offset = [], base
        for section, payload in zip(sections, payloads, strict=True):
            array = None if isinstance(section.data, bytes) else section.data
            rows.append(
                {
                    "name": section.name,
                    "dtype": BYTES if array is None else array.dtype.str,
                    "shape": [len(payload)] if array is None else list(array.shape),
                    "offset": offset,
                    "nbytes": len(payload),
                    "as_of_ms": section.as_of_ms,
                    "model": section.model,
                }
            )
            offset += -(-len(payload) // ALIGN) * ALIGN
        about = {"version": 2, "sequence": sequence, "as_of_ms": as_of_ms, "standing": standing}
        return msgspec.json.encode({**about, "sections": rows})

    base = -(-(12 + len(encode_header(10**12)) + ALIGN) // ALIGN) * ALIGN
    head = encode_header(base)
    parts = [MAGIC, struct.pack("<I", len(head)), head, b"\0" * (base - 12 - len(head))]
    for payload in payloads:
        parts += [payload, b"\0" * (-len(payload) % ALIGN)]
    return b"".join(parts)


def encode_names(names: Sequence[str]) -> bytes:
    r"""Encode names as a section that `Board.names` reads.

    A line break inside a name is escaped, because it would shift all following names.

    >>> encode_names(["n1", "n 2", "n\n3"])
    b'n1\nn 2\nn\\n3'
    """
    text = "\n".join(names)
    if text.count("\n") >= len(names):
        text = "\n".join(name.replace("\n", "\\n") for name in names)
    return text.encode("utf-8", "replace")


class BoardWriter:
    """The writing side of a board. A section that is not republished keeps its value.

    The writer holds a replaced board open until the next one is replaced, too. The system deletes a file
    when the last process closes it. This takes milliseconds, which would delay a reader's answers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files.make_folder(folder, "board")
        for left in folder.glob(".*.tmp"):  # by a process that was killed while it wrote; there is one writer
            with contextlib.suppress(OSError):  # a disk that is read-only now is said at each publication
                left.unlink()
        self._sections_before: dict[str, Section] = {}
        last = _open_mapped_board(folder / "board")
        self.sequence = last.sequence if last else 0  # of the last one that was published
        self._numbers = count(self.sequence + 1)  # a restart goes on counting: readers cache by it
        self._open = deque[object](maxlen=2)  # the newest board and the one before, mapped

    def publish(self, sections: Sequence[Section], as_of_ms: int, standing: Standing | None = None) -> None:
        """Replace the board. This may run in a thread while another thread calls `publish_urgent`."""
        self._sections_before.update((section.name, section) for section in sections)
        self._replace_file("board", [*self._sections_before.values()], as_of_ms, standing)
        with contextlib.suppress(OSError, ValueError):  # ValueError: somebody has emptied the file
            self._open.append(files.map_file(self.folder / "board"))

    def publish_urgent(self, sections: Sequence[Section], as_of_ms: int) -> None:
        self._replace_file("urgent", sections, as_of_ms)

    def _replace_file(
        self, name: str, sections: Sequence[Section], as_of_ms: int, standing: Standing | None = None
    ) -> None:
        """Replace a file of the board.

        `board` is fsynced, because a power cut must not undo a number that the ledger has recorded. `urgent` is
        not fsynced.
        """
        data = encode_board(sections, next(self._numbers), as_of_ms, standing)
        files.replace_file(self.folder / name, [data], "board", sync=name == "board")


class BoardReader:
    """The reading side of a board. `latest()` maps the file again only if it was replaced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._polled = folder / "board", folder / "urgent"  # to make a path costs more than its stat
        self._stamp: tuple[Any, ...] = ()
        self._board: Board | None = None

    def latest(self) -> Board | None:
        """Return the newest whole board, or None before the first one.

        After a torn file, this is the last good board.
        """
        stamp = tuple(map(_read_stamp, self._polled))
        if stamp != self._stamp:
            board = _open_mapped_board(self.folder / "board")
            if board is not None:
                self._board = board.overlay_urgent_sections(_open_mapped_board(self.folder / "urgent"))
                self._stamp = stamp
        return self._board


def _read_stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _open_mapped_board(path: Path) -> Board | None:
    try:
        return Board(files.map_file(path))
    except (FileNotFoundError, ValueError, BoardError):  # ValueError: an empty file cannot be mapped
        return None
