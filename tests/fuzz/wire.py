"""An application behind its real HTTP protocol, without sockets: bytes in, bytes out."""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

WHOLE_S, TORN_S = 20.0, 0.02  # wall: how long an answer is waited for, to a whole request and to a torn one


class Wire(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 4711), "sockname": ("127.0.0.1", 8080)})
        self.sent = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Heard:
    """`is_whole`: every request that was begun had come to its end."""

    sent: bytes
    is_closed: bool
    is_whole: bool

    def statuses(self) -> list[int]:
        """Of the answers; in order, as bodies hold no status line of ours."""
        return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n", self.sent)]

    def one(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the only answer."""
        head, _, body = self.sent.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        return int(lines[0].split()[1]), headers, body


class Door:
    """Requests to an application through a protocol class of uvicorn, each on a connection of its own."""

    def __init__(self, app: Any, http: type[HttpToolsProtocol], runner: asyncio.Runner) -> None:
        self._settings = uvicorn.Config(app, http=http, lifespan="off", log_config=None, server_header=False)
        self._settings.load()
        self._state = uvicorn.Server(self._settings).server_state
        self._state.default_headers = [(b"date", b"today")]
        self._runner = runner

    def ask(self, *packets: bytes) -> Heard:
        """What came back for the packets of one connection, whose other end then goes away."""
        return self._runner.run(self._ask(packets))

    async def _ask(self, packets: tuple[bytes, ...]) -> Heard:
        protocol, wire = self._protocol()(self._settings, self._state, {}), Wire()
        protocol.connection_made(wire)
        for packet in packets:
            if not wire.is_closed:
                protocol.data_received(packet)
        cycle = protocol.cycle
        is_whole = cycle is None or not cycle.more_body
        await self._settle(WHOLE_S if is_whole else TORN_S)
        heard = Heard(wire.sent, wire.is_closed, is_whole)
        protocol.connection_lost(None)
        await self._settle(WHOLE_S)
        return heard

    def _protocol(self) -> type[HttpToolsProtocol]:
        kind = self._settings.http_protocol_class
        assert issubclass(kind, HttpToolsProtocol)
        return kind

    async def _settle(self, wait_s: float) -> None:
        """Wait for the requests under way, also for those that begin when one ends."""
        deadline = time.monotonic() + wait_s
        await asyncio.sleep(0)
        while self._state.tasks and time.monotonic() < deadline:
            await asyncio.wait(self._state.tasks, timeout=wait_s)
            await asyncio.sleep(0)


@contextmanager
def door(app: Starlette, http: type[HttpToolsProtocol] = HttpToolsProtocol) -> Iterator[Door]:
    """The application from its start to its end."""
    with asyncio.Runner() as runner:
        life = app.router.lifespan_context(app)
        runner.run(life.__aenter__())
        try:
            yield Door(app, http, runner)
        finally:
            runner.run(life.__aexit__(None, None, None))
