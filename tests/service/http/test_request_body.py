"""Compressed bodies: the same bytes however they are cut into members, and never more work than they are worth."""

import gzip
import random
import zlib

import pytest

from fleetcast.service.http.problems import Problem
from fleetcast.service.http.request_body import MOST_MEMBERS, PIECE_BYTES, inflate

MOST = 2**22


@pytest.mark.parametrize("members", [1, 2, 7])
def test_members_in_a_row_are_one_body(members: int) -> None:
    noise = [random.Random(member).randbytes(PIECE_BYTES + member) for member in range(members)]
    packed = b"".join(map(gzip.compress, noise))
    assert inflate(packed, "gzip", MOST) == b"".join(noise)


@pytest.mark.parametrize("level", [0, 9])
def test_a_stream_of_many_pieces_is_inflated(level: int) -> None:
    data = b"fleet" * 200_000
    assert inflate(zlib.compress(data, level), "deflate", MOST) == data


def test_the_limit_holds_over_all_members() -> None:
    packed = gzip.compress(bytes(600)) * 2
    assert len(inflate(packed, "gzip", 1200)) == 1200
    with pytest.raises(Problem, match="more than 1199 bytes"):
        inflate(packed, "gzip", 1199)


@pytest.mark.parametrize(("member", "coding"), [(b"\x03\x00", "deflate"), (gzip.compress(b"", mtime=0), "gzip")])
def test_empty_members_without_number_are_refused(member: bytes, coding: str) -> None:
    assert inflate(member * MOST_MEMBERS, coding, MOST) == b""
    with pytest.raises(Problem, match="more than 10000 members"):
        inflate(member * 500_000, coding, MOST)
