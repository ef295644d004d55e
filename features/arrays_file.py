"""One file of named arrays that says when it is torn.

magic (8 bytes) | header length (uint32) | header crc32 (uint32) | JSON header | the arrays' bytes, one after another
header  {"about": {...}, "arrays": {name: {"dtype", "shape", "offset", "nbytes", "crc32"}}}
"""

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"FLEETARR"
_HEAD = struct.Struct("<8sII")


class TornFileError(Exception):
    """The file is not whole: cut short, overwritten, or not ours."""


def write_arrays(path: Path, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write beside, fsync, rename. The arrays must hold still meanwhile."""
    rows, offset = {}, 0
    for name, array in arrays.items():
        crc = zlib.crc32(np.ascontiguousarray(array).data) if array.size else 0
        rows[name] = {
            "dtype": array.dtype.str,
            "shape": array.shape,
            "offset": offset,
            "nbytes": array.nbytes,
            "crc32": crc,
        }
        offset += array.nbytes
    header = json.dumps({"about": about, "arrays": rows}).encode()
    beside = path.with_name(f".{path.name}.tmp")
    with open(beside, "wb") as file:
        file.write(_HEAD.pack(MAGIC, len(header), zlib.crc32(header)))
        file.write(header)
        for array in arrays.values():
            if array.size:
                file.write(np.ascontiguousarray(array).data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What `write_arrays` wrote, as (about, read-only arrays). Raises TornFileError, OSError."""
    data = path.read_bytes()
    if len(data) < _HEAD.size:
        raise TornFileError(f"{path.name}: {len(data)} bytes, not even a header")
    magic, length, crc = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + length]
    if magic != MAGIC or zlib.crc32(text) != crc:
        raise TornFileError(f"{path.name}: broken header")
    header = json.loads(text)
    base = _HEAD.size + length
    arrays = {}
    for name, row in header["arrays"].items():
        part = memoryview(data)[base + row["offset"] : base + row["offset"] + row["nbytes"]]
        if len(part) != row["nbytes"] or (len(part) and zlib.crc32(part) != row["crc32"]):
            raise TornFileError(f"{path.name}: array {name} is torn, {len(part)} of {row['nbytes']} bytes")
        arrays[name] = np.frombuffer(part, np.dtype(row["dtype"])).reshape(row["shape"])
    return header["about"], arrays
