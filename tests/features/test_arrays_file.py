"""Files of arrays: everything comes back, what repeats takes little room, and a damaged block is found."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fleetcast.features.arrays_file import MAGIC, TornFileError, read_arrays, write_arrays
from tests.fuzz.bounds import examples

DTYPES = st.sampled_from(["<f4", "<f8", "<i8", "|u1", "|b1", "<u4"])
REPEATED = st.integers(1, 400)


@examples(150)
@given(
    array=arrays_of.arrays(DTYPES, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)),
    times=REPEATED,
)
def test_every_array_comes_back(tmp_path_factory: pytest.TempPathFactory, array: Any, times: int) -> None:
    path = tmp_path_factory.mktemp("a") / "a.arrays"
    written = {"one": array, "many": np.repeat(array[None, ...], times, axis=0), "turned": array.T}
    write_arrays(path, {"of": 1}, written)
    about, found = read_arrays(path)
    assert about == {"of": 1}
    for name, value in written.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("value", [np.nan, 0.0, 41.0])
def test_values_that_stay_the_same_take_next_to_nothing(tmp_path: Path, value: float) -> None:
    rows = np.full((40, 126, 64), value, np.float32)
    write_arrays(tmp_path / "a", {}, {"rows": rows})
    assert (tmp_path / "a").stat().st_size < rows.nbytes / 100


def test_random_values_are_stored_as_they_are(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random(10_000)
    write_arrays(tmp_path / "a", {}, {"rows": rows})
    assert rows.nbytes < (tmp_path / "a").stat().st_size < rows.nbytes + 300


def test_a_file_without_blocks_is_read(tmp_path: Path) -> None:
    """Snapshots of earlier versions have none."""
    path = tmp_path / "a"
    path.write_bytes(_file({}, bytes(8000)))
    np.testing.assert_array_equal(read_arrays(path)[1]["a"], np.zeros(1000))


@pytest.mark.parametrize(
    ("row", "block"),
    [
        ({"packed": True}, b"no block of lz4"),
        ({"packed": True}, b""),
        ({"packed": True, "shape": [2**50]}, b"\x1f\x00\x01\x00"),
        ({"packed": True, "shape": [-1, -1000]}, b"\x1f\x00\x01\x00"),
        ({"packed": True, "shape": [0]}, b"\x1f\x00\x01\x00"),
        ({"packed": 7}, bytes(8000)),
    ],
)
def test_a_block_that_is_none_is_a_torn_file(tmp_path: Path, row: dict[str, Any], block: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(_file(row, block))
    with pytest.raises(TornFileError, match="a"):
        read_arrays(path)


def _file(row: dict[str, Any], block: bytes) -> bytes:
    """A file of one array of a thousand numbers, stored as `block`, with the right checksums."""
    usual = {"dtype": "<f8", "shape": [1000], "offset": 0, "nbytes": len(block), "crc32": zlib.crc32(block)}
    header = json.dumps({"about": {}, "arrays": {"a": usual | row}, "last": True}).encode()
    return struct.pack("<8sII", MAGIC, len(header), zlib.crc32(header)) + header + block
