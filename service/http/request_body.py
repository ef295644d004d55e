"""Reading of request bodies, whose size is limited both as sent and as inflated.

The headers cannot raise the limit. All bytes count against `body_budget`.
"""

import asyncio
import contextlib
import itertools
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from fleetcast.fleet.decode_faults import MISSING, Fault, explain_json_error, find_json_faults, format_value
from fleetcast.service.http.body_budget import CLOSING, BodyBudget, Lease
from fleetcast.service.http.problems import MOST_ERRORS, FieldError, Problem

T = TypeVar("T")
LEASE = "fleetcast.lease"  # in the scope of a request
DISCARD_BYTES = 2**28
DISCARD_S = 3.0  # wall
MOST_MEMBERS = 10_000
PIECE_BYTES = 65_536
GZIP, ZLIB, RAW_DEFLATE = 31, 15, -15  # window bits that tell zlib which format


def get_body_lease(request: Request) -> Lease:
    """Return the request's lease, or an unlimited one if the server gave it none."""
    lease = request.scope.get(LEASE)
    return lease if isinstance(lease, Lease) else BodyBudget().make_lease()


def decode_json_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a JSON body.

    Raises problem 422, which names every wrong key with its value. Raises problem 400 if the body is not
    JSON.
    """
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            raise make_body_problem(
                list(itertools.islice(find_json_faults(error, decoder, body), MOST_ERRORS))
            ) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Problem(400, "not_json", f"the body is not JSON: {explain_json_error(error)}") from None


def make_body_problem(faults: Sequence[Fault]) -> Problem:
    """Return a 422 problem for the faults of a body.

    `errors` lists all faults. The sentence names all unknown keys if there are several. Otherwise, it names
    the first fault.
    """
    unknown = [fault for fault in faults if fault.label == "unknown_key"]
    names = ", ".join(fault.field for fault in unknown)
    detail = f"unknown keys: {names}" if len(unknown) > 1 else faults[0].sentence
    errors = [FieldError(fault.field, _shorten_value(fault.value), fault.expected) for fault in faults]
    return Problem(422, "bad_request", detail, errors=errors)


def _shorten_value(value: Any) -> Any:
    """Return a short form of a value for a problem: lists, objects and huge numbers become short texts."""
    if value is MISSING:
        return None
    is_small = isinstance(value, str | float | None) or (isinstance(value, int) and abs(value) < 2**63)
    return value if is_small else format_value(value)


async def read_body(request: Request, most: int) -> bytes:
    """Return the body of a request, inflated if it was sent as gzip or deflate.

    Raises problem 413 if the body is too large, 400 if it is broken, 415 if its encoding is unknown, and 503
    if there is no room.
    """
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "", "gzip", "x-gzip", "deflate"):
        detail = f"content-encoding {coding!r}: expected gzip, deflate or none"
        raise Problem(415, "unknown_coding", detail, headers={"accept-encoding": "gzip, deflate"})
    data = await read_raw_body(request, most)
    if coding in ("identity", ""):
        return data
    return await asyncio.to_thread(inflate, data, coding, most, get_body_lease(request).grow)


async def read_raw_body(request: Request, most: int) -> bytes:
    """Return the body of a request as it was sent.

    Raises problem 413 if it has more than `most` bytes, and 503 if other requests use all the room.
    """
    chunks, lease = request.stream(), get_body_lease(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        await _discard_rest_of_body(request, chunks)
        raise make_too_large_problem(f"{declared[:20]} bytes", most)
    parts: list[bytes] = []
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        try:
            if size > most:
                raise make_too_large_problem(f"at least {size} bytes", most)
            lease.grow(len(chunk))
        except Problem:
            parts.clear()
            lease.release()
            await _discard_rest_of_body(request, chunks)
            raise
        parts.append(chunk)
    return b"".join(parts)


async def _discard_rest_of_body(request: Request, chunks: AsyncIterator[bytes]) -> None:
    """Read and discard the rest of a body, up to a limit.

    Without this, a client that still sends would get a reset instead of the answer.
    """
    if "100-continue" in request.headers.get("expect", "").lower():
        return  # it waits for our word before it sends
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            async for chunk in chunks:
                size += len(chunk)
                if size > DISCARD_BYTES:
                    return


def make_too_large_problem(what: str, most: int) -> Problem:
    """Return a 413 problem that closes the connection.

    Without closing, the server would parse the unread rest of the body as the next request.
    """
    return Problem(413, "too_large", f"the body has {what}, at most {most} are accepted", headers=CLOSING)


def inflate(data: bytes, coding: str, most: int, grow: Callable[[int], None] = lambda size_bytes: None) -> bytes:
    """Inflate data to at most `most` bytes. Several gzip members in a row form one body.

    `grow` is called with the size of each inflated piece. Raises problem 413 or 400.
    """
    bits = GZIP if "gzip" in coding else ZLIB if data[:1] and data[0] & 0x0F == 8 else RAW_DEFLATE
    parts: list[bytes] = []
    at = size = members = 0
    while at < len(data):
        stream = zlib.decompressobj(bits)
        members += 1
        if members > MOST_MEMBERS:
            raise _make_encoding_problem(coding, f"it has more than {MOST_MEMBERS} members")
        while not stream.eof:
            piece = data[at : at + PIECE_BYTES]  # what a member leaves over is copied: never more than a piece
            if not piece:
                raise _make_encoding_problem(coding, "it ends too early")
            try:
                parts.append(stream.decompress(piece, most - size + 1))
            except zlib.error as error:
                raise _make_encoding_problem(coding, str(error)) from None
            size += len(parts[-1])
            if size > most:
                raise make_too_large_problem(f"more than {most} bytes when inflated", most)
            grow(len(parts[-1]))
            at += len(piece) - len(stream.unused_data)
    return b"".join(parts)


def _make_encoding_problem(coding: str, why: str) -> Problem:
    return Problem(400, "broken_encoding", f"the {coding} body cannot be inflated: {why}")
