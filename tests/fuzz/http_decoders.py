"""Answers of peers to the client of exporter pages."""

import asyncio
import gzip

from fleetcast.ingest.pages.fetch import FetchError
from fleetcast.ingest.pages.plain_http import _Connection, _UnusualAnswer
from tests.fuzz.decoder import Decoder

LIMIT = 20_000
PAGE = b"DCGM_FI_DEV_GPU_TEMP 61\n"
PACKED = gzip.compress(PAGE, mtime=0)
REASONS = {"disconnected", "truncated", "http_status", "redirect", "too_large", "bad_http"}


class _Transport(asyncio.Transport):
    """A transport that sends nothing and records that it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def _ask(pieces: list[bytes]) -> bytes | Exception:
    """Return the body of an answer that comes in these pieces before the peer closes, or why there is none."""
    buffer, transport = bytearray(LIMIT), _Transport()
    connection = _Connection(memoryview(buffer))
    connection.connection_made(transport)
    asked = asyncio.ensure_future(connection.send_request("http://n001:9400/metrics", b"GET", LIMIT))
    await asyncio.sleep(0)
    for piece in pieces:
        if transport.closed:
            break
        buffer[: len(piece)] = piece
        connection.buffer_updated(len(piece))
    connection.connection_lost(None)
    (found,) = await asyncio.gather(asked, return_exceptions=True)
    if isinstance(found, FetchError | _UnusualAnswer):
        whole = isinstance(found, FetchError) and found.reason in ("http_status", "redirect")
        assert transport.closed or whole
        return found
    assert not isinstance(found, BaseException), repr(found)
    assert len(found.body) <= LIMIT
    return found.body


def decode_answer(answer: bytes) -> None:
    async def both() -> None:
        whole = await _ask([answer[at : at + LIMIT] for at in range(0, len(answer), LIMIT)])
        small = await _ask([answer[at : at + 7] for at in range(0, len(answer), 7)])
        for found in (whole, small):
            assert not isinstance(found, FetchError) or found.reason in REASONS
        if isinstance(whole, bytes) and isinstance(small, bytes):
            assert whole == small

    asyncio.run(both())


ANSWERS = Decoder(
    decode_answer,
    (
        b"HTTP/1.1 200 OK\r\nContent-Length: 24\r\nContent-Type: text/plain\r\n\r\n" + PAGE,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n18;a=b\r\n" + PAGE + b"\r\n0\r\nX-Sum: 1\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + PACKED,
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 24\r\n\r\n" + PAGE,
        b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"",
    ),
    (
        b"HTTP/1.1 200 OK\r\n",
        b"Content-Length: ",
        b"Transfer-Encoding: ",
        b"chunked",
        b"\r\n\r\n",
        b"0\r\n\r\n",
        b"1\r\nx\r\n",
    ),
)

HTTP = {"answers over HTTP": ANSWERS}
