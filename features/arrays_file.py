"""Files of named arrays, written in parts. Checksums reveal a torn file.

A reader maps the file into memory, and needs RAM only for the arrays that it copies.

part    magic (8 bytes) | header length (uint32) | header crc32 (uint32) | JSON header | the arrays' bytes
header  {"about": {...}, "arrays": {name: {"dtype", "shape", "offset", "nbytes", "crc32"}}, "last": bool}

An array that lz4 makes smaller is stored as an lz4 block: `nbytes` and `crc32` are those of the
block, and `packed` is true. So rows of metrics that no exporter reports, and constant values, need
almost no space.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import lz4.block
import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet import files

AREA = "snapshot"  # of failpoints
MAGIC = b"FLEETARR"
_HEAD = struct.Struct("<8sII")
PACKED_FROM = 256  # bytes: a smaller array is stored as it is
LEAST_SAVED = 0.9  # of its bytes: a block that is larger is not worth unpacking
MOST_UNPACKED = 255  # bytes that one byte of an lz4 block can stand for


class TornFileError(Exception):
    """The error for a file of arrays that is cut short, overwritten, or of another format."""


class ArraysWriter:
    """A writer of the parts of a file. It writes a temporary file, which `finish` renames to `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._beside = path.with_name(f".{path.name}.tmp")
        self._file = files.create_file(self._beside, AREA)

    def add(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], *, last: bool = False) -> None:
        """Append one part to the file. The arrays must not change during the call."""
        rows, blocks, offset = {}, [], 0
        for name, array in arrays.items():
            block, packed = _encode_array(np.ascontiguousarray(array))
            rows[name] = {
                "dtype": array.dtype.str,
                "shape": array.shape,
                "offset": offset,
                "nbytes": len(block),
                "crc32": zlib.crc32(block),
            } | ({"packed": True} if packed else {})
            blocks.append(block)
            offset += len(block)
        header = json.dumps({"about": about, "arrays": rows, "last": last}).encode()
        self._file.write(_HEAD.pack(MAGIC, len(header), zlib.crc32(header)) + header)
        for block in blocks:
            if block:
                self._file.write(block)

    def finish(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Write the last part, fsync the file and rename it to its final path."""
        self.add(about, arrays or {}, last=True)
        self._file.sync()
        self.close()
        files.rename(self._beside, self.path, AREA)

    def close(self) -> None:
        """Close the file, whether or not it is finished. A second call does nothing."""
        self._file.close()


def _encode_array(array: NDArray[Any]) -> tuple[bytes | memoryview, bool]:
    """Return the bytes to store for an array, and whether they are an lz4 block.

    The array is compressed only if that makes it clearly smaller.
    """
    raw: bytes | memoryview = array.reshape(-1).view(np.uint8).data if array.size else b""
    if len(raw) >= PACKED_FROM:
        block = lz4.block.compress(raw, store_size=False)
        if len(block) <= LEAST_SAVED * len(raw):
            return block, True
    return raw, False


def write_arrays(path: Path, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays and their facts (`about`) to a file of one part."""
    writer = ArraysWriter(path)
    try:
        writer.finish(about, arrays)
    finally:
        writer.close()


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read a file of one part, and return its facts (`about`) and its arrays by name, read-only.

    Raises TornFileError if the file is damaged, and OSError if it cannot be read.
    """
    return next(read_parts(path))


def read_parts(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, NDArray[Any]]]]:
    """Yield the facts (`about`) and the read-only arrays by name of each part of a file, in order.

    Raises TornFileError if the file is damaged, and OSError if it cannot be read.
    """
    try:
        data = memoryview(files.map_file(path))
    except ValueError:
        raise TornFileError(f"{path.name}: empty") from None
    at, last = 0, False
    while not last:
        header, at = _read_header(path.name, data, at)
        arrays = {name: _read_array(path.name, data[at:], name, row) for name, row in header["arrays"].items()}
        at += sum(row["nbytes"] for row in header["arrays"].values())
        last = header["last"]
        yield header["about"], arrays


class _Row(TypedDict):
    dtype: str
    shape: list[int]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    crc32: int
    packed: NotRequired[bool]


class _Header(TypedDict):
    about: dict[str, Any]
    arrays: dict[str, _Row]
    last: bool


_decode = msgspec.json.Decoder(_Header).decode


def _read_header(name: str, data: memoryview, at: int) -> tuple[_Header, int]:
    """Return the header of the part at offset `at`, and the offset at which its arrays begin."""
    if len(data) - at < _HEAD.size:
        raise TornFileError(f"{name}: {len(data) - at} bytes at {at}, not even a header")
    magic, length, crc = _HEAD.unpack_from(data, at)
    begin = at + _HEAD.size
    text = data[begin : begin + length]
    if magic != MAGIC or zlib.crc32(text) != crc:
        raise TornFileError(f"{name}: broken header at {at}")
    try:
        return _decode(text), begin + length
    except (ValueError, RecursionError) as error:
        raise TornFileError(f"{name}: the header at {at} is none: {error}") from None


def _read_array(file: str, data: memoryview, name: str, row: _Row) -> NDArray[Any]:
    part = data[row["offset"] : row["offset"] + row["nbytes"]]
    if len(part) != row["nbytes"] or (len(part) and zlib.crc32(part) != row["crc32"]):
        raise TornFileError(f"{file}: array {name} is torn, {len(part)} of {row['nbytes']} bytes")
    try:
        kind = np.dtype(row["dtype"])
        unpacked = _decompress_block(part, kind.itemsize * math.prod(row["shape"])) if row.get("packed") else part
        return np.frombuffer(unpacked, kind).reshape(row["shape"])
    except (TypeError, ValueError, lz4.block.LZ4BlockError) as error:
        raise TornFileError(f"{file}: array {name} is not {row['dtype']} {row['shape']}: {error}") from None


def _decompress_block(block: memoryview, size: int) -> bytes:
    """Decompress an lz4 block to `size` bytes. Raises ValueError or LZ4BlockError if it is damaged."""
    if not 0 < size <= MOST_UNPACKED * len(block) + PACKED_FROM:
        raise ValueError(f"{len(block)} bytes cannot hold {size}")
    found: bytes = lz4.block.decompress(block, uncompressed_size=size)
    if len(found) != size:
        raise ValueError(f"{len(found)} of {size} bytes")
    return found
