"""Request bodies, bounded: never more than the limit is read or inflated, whatever the headers promise."""

import zlib

from starlette.requests import Request

from service.problems import Problem

CHUNK_BYTES = 65_536
GZIP, ZLIB, RAW_DEFLATE = 31, 15, -15  # window bits that tell zlib which format


async def read_body(request: Request, most: int) -> bytes:
    """The body, inflated when it came as gzip or deflate. Problems: 413 too large, 400 broken, 415 unknown coding."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        detail = f"content-encoding {coding!r}: expected gzip, deflate or none"
        raise Problem(415, "unknown_coding", detail, headers={"accept-encoding": "gzip, deflate"})
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_large(f"{declared[:20]} bytes", most)
    parts, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise too_large(f"more than {size} bytes", most)
        parts.append(chunk)
    data = b"".join(parts)
    return data if coding in ("identity", "") else inflate(data, coding, most)


def too_large(what: str, most: int) -> Problem:
    """The connection is closed with the answer: the rest of the body is not read."""
    return Problem(413, "too_large", f"the body has {what}, at most {most} are taken", headers={"connection": "close"})


def inflate(data: bytes, coding: str, most: int) -> bytes:
    """Inflate at most `most` bytes; several gzip members in a row are one body."""
    bits = GZIP if "gzip" in coding else ZLIB if data[:1] and data[0] & 0x0F == 8 else RAW_DEFLATE
    parts, size = [], 0
    while data:
        stream = zlib.decompressobj(bits)
        try:
            part = stream.decompress(data, most - size + 1)
        except zlib.error as error:
            raise _broken(coding, str(error)) from None
        size += len(part)
        if size > most:
            raise too_large(f"more than {most} bytes when inflated", most)
        if not stream.eof:
            raise _broken(coding, "it ends too early")
        parts.append(part)
        data = stream.unused_data
    return b"".join(parts)


def _broken(coding: str, why: str) -> Problem:
    return Problem(400, "broken_encoding", f"the {coding} body cannot be inflated: {why}")
