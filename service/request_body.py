"""Request bodies, bounded: never more than the limit is read or inflated, whatever the headers promise."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from service.problems import Problem

DISCARD_BYTES = 2**28
DISCARD_S = 3.0  # wall
MOST_MEMBERS = 10_000
PIECE_BYTES = 65_536
GZIP, ZLIB, RAW_DEFLATE = 31, 15, -15  # window bits that tell zlib which format


async def read_body(request: Request, most: int) -> bytes:
    """The body, inflated when it came as gzip or deflate. Problems: 413 too large, 400 broken, 415 unknown coding."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        detail = f"content-encoding {coding!r}: expected gzip, deflate or none"
        raise Problem(415, "unknown_coding", detail, headers={"accept-encoding": "gzip, deflate"})
    data = await read_raw(request, most)
    return data if coding in ("identity", "") else await asyncio.to_thread(inflate, data, coding, most)


async def read_raw(request: Request, most: int) -> bytes:
    """The body as it came. Problem 413 when it has more than `most` bytes."""
    chunks = request.stream()
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        await _discard(request, chunks)
        raise too_large(f"{declared[:20]} bytes", most)
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > most:
            parts.clear()
            await _discard(request, chunks)
            raise too_large(f"at least {size} bytes", most)
        parts.append(chunk)
    return b"".join(parts)


async def _discard(request: Request, chunks: AsyncIterator[bytes]) -> None:
    """Throw a bounded part of the rest away: who sends before he listens would see a reset, not the answer."""
    if "100-continue" in request.headers.get("expect", "").lower():
        return  # it waits for our word before it sends
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            async for chunk in chunks:
                size += len(chunk)
                if size > DISCARD_BYTES:
                    return


def too_large(what: str, most: int) -> Problem:
    """The connection is closed with the answer: a rest of the body that was not read is no next request."""
    return Problem(413, "too_large", f"the body has {what}, at most {most} are taken", headers={"connection": "close"})


def inflate(data: bytes, coding: str, most: int) -> bytes:
    """Inflate at most `most` bytes; several gzip members in a row are one body."""
    bits = GZIP if "gzip" in coding else ZLIB if data[:1] and data[0] & 0x0F == 8 else RAW_DEFLATE
    parts: list[bytes] = []
    at = size = members = 0
    while at < len(data):
        stream = zlib.decompressobj(bits)
        members += 1
        if members > MOST_MEMBERS:
            raise _broken(coding, f"it has more than {MOST_MEMBERS} members")
        while not stream.eof:
            piece = data[at : at + PIECE_BYTES]  # what a member leaves over is copied: never more than a piece
            if not piece:
                raise _broken(coding, "it ends too early")
            try:
                parts.append(stream.decompress(piece, most - size + 1))
            except zlib.error as error:
                raise _broken(coding, str(error)) from None
            size += len(parts[-1])
            if size > most:
                raise too_large(f"more than {most} bytes when inflated", most)
            at += len(piece) - len(stream.unused_data)
    return b"".join(parts)


def _broken(coding: str, why: str) -> Problem:
    return Problem(400, "broken_encoding", f"the {coding} body cannot be inflated: {why}")
