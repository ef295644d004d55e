"""Servers that answer byte by byte as a test says, right or wrong, for clients of exporter pages."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

from fleetcast.ingest.pages.fetch import FetchedPage, FetchError


class Act(Enum):
    HANG = auto()  # answer no more, and leave the connection open
    CLOSE = auto()
    RESET = auto()
    NEXT = auto()  # wait for the next request on this connection
    DRIP = auto()  # from here on, send one byte at a time, with pauses
    EARLY = auto()  # first of a script: do not wait for the request
    FLOOD = auto()  # send the last bytes again and again


Script = Sequence[bytes | Act]


@dataclass
class Peer:
    """A server. Its nth connection plays the nth script, and further ones play the last."""

    scripts: Sequence[Script]
    port: int = 0
    requests: list[bytes] = field(default_factory=list)
    opened: int = 0
    closed: int = 0  # connections that the client has closed, or this server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    async def until(self, done: Callable[["Peer"], bool]) -> None:
        async with asyncio.timeout(60):
            while not done(self):
                await asyncio.sleep(0.005)


@asynccontextmanager
async def peer(*scripts: Script, host: str = "127.0.0.1") -> AsyncIterator[Peer]:
    served = Peer(scripts)
    tasks = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        script = scripts[min(served.opened, len(scripts) - 1)]
        served.opened += 1
        try:
            await _play(served, script, reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            served.closed += 1
            writer.close()

    server = await asyncio.start_server(handle, host, 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _play(served: Peer, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if script[0] is not Act.EARLY:
        served.requests.append(await reader.readuntil(b"\r\n\r\n"))
    drips, last = False, b""
    for step in script:
        if isinstance(step, bytes):
            last = step
            for at in range(len(step)) if drips else ():
                writer.write(step[at : at + 1])
                await writer.drain()
                await asyncio.sleep(0.05)
            if not drips:
                writer.write(step)
                await writer.drain()
                await asyncio.sleep(0)  # the client reads what has come so far
        elif step is Act.NEXT:
            served.requests.append(await reader.readuntil(b"\r\n\r\n"))
        elif step is Act.DRIP:
            drips = True
        elif step is Act.CLOSE:
            return
        elif step is Act.RESET:
            await asyncio.sleep(0.01)
            writer.transport.abort()
            return
        elif step is Act.FLOOD:
            while True:
                writer.write(last * (1 + 20_000 // len(last)))
                await writer.drain()
        elif step is Act.HANG:
            break
    await reader.read()  # until the client closes


async def outcome(page: Awaitable[FetchedPage]) -> tuple[str, bytes, bool]:
    """Return the reason of a failure, or "page" with the body and whether it is OpenMetrics."""
    try:
        fetched = await page
    except FetchError as error:
        return error.reason, b"", False
    return "page", fetched.body, fetched.is_open_metrics


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + end


def answer(body: bytes = b"", *headers: str, status: str = "HTTP/1.1 200 OK", length: int | None = None) -> bytes:
    """Return a whole answer. length: what Content-Length says, -1 for none."""
    length = len(body) if length is None else length
    lines = [status, *headers, *([f"Content-Length: {length}"] if length >= 0 else []), "", ""]
    return "\r\n".join(lines).encode() + body
