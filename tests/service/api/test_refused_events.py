"""A connection without a place pauses the expiry of promises only if its caller may send events."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvicorn

from fleetcast.fleet.clock import ManualClock
from fleetcast.service.api.app import create_app
from fleetcast.service.api.role import make_api_protocol
from fleetcast.service.api.routes.context import Context
from fleetcast.service.board.board import BoardReader
from fleetcast.service.config import Config
from fleetcast.service.http.access import Access, parse_tokens
from fleetcast.service.http.addresses import Networks
from fleetcast.service.http.connection_pool import ConnectionLimits, ConnectionPool
from fleetcast.service.http.connections import LimitedServer
from fleetcast.service.http.listening import bind_socket
from fleetcast.service.listening import API, ListeningReader
from tests.service.api_world import NOW_MS, publish

PLACES, OWN_PLACES = 8, 3
TOKENS = {name: f"{name}-{'x' * 16}" for name in ("poster", "reader", "operator")}
LINES = f"""
poster events {TOKENS["poster"]}
reader read {TOKENS["reader"]}
operator admin {TOKENS["operator"]}
"""


def head(token: str = "", method: str = "POST", path: str = "/v1/events") -> bytes:
    bearer = f"authorization: Bearer {token}\r\n" if token else ""
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n{bearer}\r\n".encode()


STRANGERS = {
    "nothing": b"\x00",
    "half a head": b"POST /v1/events HTTP/1.1\r\nhost: loc",
    "no token": head(),
    "a wrong token": head("y" * 20),
    "a token that only reads": head(TOKENS["reader"]),
    "another method": head(TOKENS["poster"], "PUT"),
    "another route": head(TOKENS["operator"], path="/v1/placements"),
    "no HTTP": b"\x16\x03\x01 hello\r\n\r\n",
}
SENDERS = {
    "an event": head(TOKENS["poster"]),
    "an event of the operator": head(TOKENS["operator"]),
    "a query": head(TOKENS["poster"], path="/v1/events?a=b"),
    "a webhook": head(TOKENS["poster"], path="/v1/webhooks/torchelastic"),
}


class Api:
    """An api behind a real socket. Its time passes in `interruption` alone."""

    def __init__(self, folder: Path) -> None:
        publish(folder)
        self.clock = ManualClock(NOW_MS)
        self.config = Config(state=str(folder))
        self.app = create_app(self.config, self.clock, access=Access(parse_tokens(LINES, "here")))
        self.context: Context = self.app.state.context
        self.opened: list[asyncio.StreamWriter] = []
        self.port = 0

    def run(self, work: Callable[[], Awaitable[None]]) -> None:
        async def serve() -> None:
            limits = ConnectionLimits(PLACES, 60.0, 60.0, OWN_PLACES, Networks(["127.0.0.1"]))
            protocol = make_api_protocol(self.context, ConnectionPool(limits))
            config = uvicorn.Config(self.app, http=protocol, log_config=None, ws="none")
            with bind_socket("127.0.0.1", 0, "port") as sock:
                self.port = sock.getsockname()[1]
                server = LimitedServer(config, sock, protocol.pool)
                task = asyncio.ensure_future(server.serve())
                while not server.started:
                    await asyncio.sleep(0.01)
                try:
                    await asyncio.wait_for(work(), 60)
                finally:
                    for writer in self.opened:
                        writer.close()
                    server.should_exit = server.force_exit = True
                    await task

        asyncio.run(serve())

    async def send(self, data: bytes, address: str = "127.0.0.1") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        self.opened.append(writer)
        writer.write(data)
        return reader

    async def work(self, count: int, address: str = "127.0.0.1") -> None:
        """Use places up by requests whose bodies do not come."""
        for number in range(1, count + 1):
            await self.send(head(TOKENS["poster"]) + b"{", address)
            while self.context.bodies.used_bytes < number:
                await asyncio.sleep(0.01)

    def since_ms(self) -> int:
        self.context.listening.write_statement()
        board = BoardReader(self.config.board).latest()
        assert board is not None
        return ListeningReader(self.config.folder).read_statements(board)[API].since_ms

    @contextlib.contextmanager
    def interruption(self, expected: bool) -> Iterator[None]:
        """Check whether what happens inside interrupts the api's statement."""
        before_ms = self.since_ms()
        self.clock.advance(1)
        yield
        assert self.since_ms() == (self.clock.now_ms() if expected else before_ms)


async def answer(reader: asyncio.StreamReader) -> bytes:
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await reader.read(65_536):
            heard += piece
    return heard


@pytest.mark.parametrize("said", STRANGERS)
def test_strangers_without_a_place_pause_nothing(tmp_path: Path, said: str) -> None:
    api = Api(tmp_path)

    async def work() -> None:
        await api.work(PLACES)
        with api.interruption(expected=False):
            for _ in range(3):
                assert (await answer(await api.send(STRANGERS[said]))).startswith(b"HTTP/1.1 503 ")

    api.run(work)


@pytest.mark.parametrize("said", SENDERS)
def test_refused_events_of_a_caller_that_may_send_them_pause_expiry(tmp_path: Path, said: str) -> None:
    api = Api(tmp_path)

    async def work() -> None:
        await api.work(PLACES)
        with api.interruption(expected=True):
            assert (await answer(await api.send(SENDERS[said]))).startswith(b"HTTP/1.1 503 ")

    api.run(work)


def test_events_beyond_the_limit_of_an_address_pause_expiry_too(tmp_path: Path) -> None:
    api = Api(tmp_path)

    async def work() -> None:
        await api.work(OWN_PLACES, "127.0.0.2")
        with api.interruption(expected=False):
            assert (await answer(await api.send(head(), "127.0.0.2"))).startswith(b"HTTP/1.1 429 ")
        with api.interruption(expected=True):
            assert (await answer(await api.send(SENDERS["an event"], "127.0.0.2"))).startswith(b"HTTP/1.1 429 ")

    api.run(work)


def test_half_sent_heads_that_give_way_pause_nothing(tmp_path: Path) -> None:
    api = Api(tmp_path)

    async def work() -> None:
        with api.interruption(expected=False):
            first = [await api.send(STRANGERS["half a head"]) for _ in range(PLACES)]
            await asyncio.gather(*[api.send(STRANGERS["half a head"]) for _ in range(PLACES)])
            for reader in first:
                assert (await answer(reader)).startswith(b"HTTP/1.1 503 ")

    api.run(work)
