"""Decoders of what lies on disk: segments, boards, arrays, snapshots. Files tear, rot, and come from elsewhere."""

import asyncio
import contextlib
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.features.arrays_file import TornFileError, read_arrays, write_arrays
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.inbox.inbox import InboxSource
from fleetcast.ingest.inbox.segments import HEADER, RecordKind, encode_record, read_segment, scan_records
from fleetcast.ingest.source import Batch
from fleetcast.service.board.board import Board, BoardError, BoardReader, Section, encode_board
from tests.fuzz.bounds import MIB
from tests.fuzz.decoder import Decoder
from tests.fuzz.door_decoders import DRAIN, NOW_MS, STARTED, SUBMITTED, take

# -- segments of the inbox ------------------------------------------------------------------------------------------

RECORDS = tuple(encode_record(RecordKind.EVENT, NOW_MS, body) for body in (SUBMITTED, STARTED, DRAIN))
REFUSED = encode_record(RecordKind.REFUSED, NOW_MS, b'{"reasons": {"future": 2}, "examples": {}}')


def decode_segment(data: bytes) -> None:
    """As an older segment, behind which a new one was begun: what is whole is delivered, then the next one is read."""
    records, taken = scan_records(data[len(HEADER) :])
    assert taken <= max(0, len(data) - len(HEADER))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "api-000000000001.seg").write_bytes(data)
        (folder / "api-000000000002.seg").write_bytes(HEADER + RECORDS[2])
        for offset in (len(HEADER), len(data) // 2 + len(HEADER)):
            read_segment(folder / "api-000000000001.seg", offset, sealed=False)
        batches = asyncio.run(_drained(InboxSource(folder, poll_s=0.0)))
    assert sum(len(batch.node_events) for batch in batches) >= 1, "the segment behind it was not read"
    if data.startswith(HEADER) and records:
        assert sum(len(batch) + len(batch.bad) for batch in batches) > len(records)
    for batch in batches:
        take(batch)


async def _drained(source: InboxSource) -> list[Batch]:
    batches: list[Batch] = []
    left = source.backlog_bytes()
    while left:
        batches.append(await source.next())
        before, left = left, source.backlog_bytes()
        assert left < before, "it reads on for ever"
    return batches


SEGMENTS = Decoder(
    decode_segment,
    (
        *(HEADER, HEADER + b"".join(RECORDS), HEADER + RECORDS[0] + REFUSED + RECORDS[1][:-5], b"", HEADER[:7]),
        HEADER + RECORDS[0] + bytes(40) + RECORDS[1],
    ),
    (HEADER, RECORDS[2], REFUSED, RECORDS[0][:17], b"\xff\xff\xff\xff", b"\x00\x00\x00\x04"),
    base_bytes=8 * MIB,
)

# -- the board ------------------------------------------------------------------------------------------------------

BOARD = encode_board(
    [
        Section("names.node", b"n1\nn2", NOW_MS),
        Section("node.risk", np.ones((3, 2), np.float32), NOW_MS, "rules"),
        Section("empty", np.zeros((0, 8), np.int32), NOW_MS),
        Section("meta", b'{"generation": 1}', NOW_MS),
    ],
    7,
    NOW_MS,
)


def decode_board(data: bytes) -> None:
    """A whole board or a BoardError, and of a whole one each section can be read as what its row says."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "board").write_bytes(BOARD)
        (folder / "urgent").write_bytes(data)
        reader = BoardReader(folder)
        _read_all(reader.latest())
        (folder / "board.new").write_bytes(data)
        (folder / "board.new").rename(folder / "board")
        assert reader.latest() is not None, "a torn board took the last good one away"
    try:
        board = Board(data)
    except BoardError:
        return
    _read_all(board)


def _read_all(board: Board | None) -> None:
    assert board is not None
    for name in board.sections():
        row = board.meta(name)
        assert len(board.raw(name)) == row["nbytes"]
        if row["dtype"] != "bytes":
            assert board.array(name).nbytes == row["nbytes"]


BOARDS = Decoder(
    decode_board,
    (BOARD, b"", b"FLEETBRD", BOARD[:40], BOARD[:-1]),
    (
        *(b'"dtype":"', b'"shape":[', b'"offset":', b'"nbytes":', b'"sections":[', b"<f4", b"|O", b"bytes", b"<U9"),
        *(b"FLEETBRD", b"V0", b"f4,f4", b"(2,", b",-1", b"datetime64", b'"as_of_ms":'),
    ),
)

HEAD_LENGTH = int.from_bytes(BOARD[8:12], "little")
BOARD_HEAD = BOARD[12 : 12 + HEAD_LENGTH]


def decode_board_head(text: bytes) -> None:
    """Any directory before the sections of a real board."""
    decode_board(b"FLEETBRD" + len(text).to_bytes(4, "little") + text + BOARD[12 + HEAD_LENGTH :])


BOARD_HEADS = Decoder(decode_board_head, (BOARD_HEAD, b"{}", b"[]", b""), BOARDS.words)

# -- arrays ---------------------------------------------------------------------------------------------------------


def _written(about: dict[str, Any], arrays: dict[str, Any]) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.arrays"
        write_arrays(path, about, arrays)
        return path.read_bytes()


ARRAYS = {"raw": np.arange(6.0).reshape(2, 3), "count": np.zeros(3, np.int32), "none": np.zeros((0, 4))}
ARRAYS["packed"] = np.arange(40.0).repeat(8).reshape(8, 40)
ARRAY_FILE = _written({"kind": EntityKind.GPU.value}, ARRAYS)


def decode_arrays(data: bytes) -> None:
    """Torn, or what was written."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.arrays"
        path.write_bytes(data)
        try:
            _, arrays = read_arrays(path)
        except TornFileError:
            return
    assert arrays.keys() == ARRAYS.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[key])


ARRAY_FILES = Decoder(decode_arrays, (ARRAY_FILE, b"", ARRAY_FILE[:20], ARRAY_FILE[:-1]), (b"FLEETARR", b"<f8"))


def decode_arrays_head(text: bytes) -> None:
    """Any header, with a checksum that is right: torn, or arrays."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a.arrays"
        path.write_bytes(ARRAY_FILE[:8] + struct.pack("<II", len(text), zlib.crc32(text)) + text + bytes(200))
        with contextlib.suppress(TornFileError):
            read_arrays(path)


ARRAY_HEADS = Decoder(
    decode_arrays_head,
    (
        ARRAY_FILE[16 : 16 + int.from_bytes(ARRAY_FILE[8:12], "little")],
        b"{}",
        b"[]",
        b"",
        b'{"about": {}, "arrays": {}}',
    ),
    (
        b'"dtype": "',
        b'"shape": [',
        b'"offset": ',
        b'"nbytes": ',
        b'"crc32": ',
        b'"packed": true',
        b'"arrays": {',
        b"|O",
        b"<f4,<f4",
        b"V0",
    ),
)

FILES: dict[str, Decoder] = {
    "segments": SEGMENTS,
    "boards": BOARDS,
    "arrays": ARRAY_FILES,
    "board heads": BOARD_HEADS,
    "array heads": ARRAY_HEADS,
}
