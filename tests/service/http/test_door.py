"""Connections in their TLS handshake are bounded, by address and in all, and keep nobody out."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
import uvloop

from fleetcast.service.config import ApiConfig
from fleetcast.service.http.addresses import Networks
from fleetcast.service.http.connection_pool import ConnectionLimits, ConnectionPool
from fleetcast.service.http.connections import LimitedServer, make_limited_protocol
from fleetcast.service.http.door import Listener
from fleetcast.service.http.tls import Tls
from tests.service.certificate_files import Authority

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    while message.get("more_body"):
        message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    pair = Authority(tmp_path_factory.mktemp("door"), "ca").sign("server")
    return Tls(ApiConfig(tls_cert=str(pair.cert), tls_key=str(pair.key)))


def trusting(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


Work = Callable[[int, ConnectionPool, Listener], Awaitable[Any]]


def served(tls: Tls, limits: ConnectionLimits, work: Work) -> tuple[Any, int]:
    """Return what `work` returns, and how many handshakes failed."""
    dropped: list[int] = []

    async def run() -> Any:
        pool = ConnectionPool(limits)
        config = uvicorn.Config(app, http=make_limited_protocol(pool), lifespan="off", log_config=None, ws="none")
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            server = LimitedServer(config, sock, pool, tls, lambda: dropped.append(1))
            task = asyncio.ensure_future(server.serve())
            await settled(lambda: server.started)
            try:
                return await asyncio.wait_for(work(sock.getsockname()[1], pool, server.door), 60)
            finally:
                server.should_exit = server.force_exit = True
                await task
                assert not pool.used
                assert not pool._refused

    return uvloop.run(run()), len(dropped)


async def ask(port: int, tls: Tls, address: str = "127.0.0.1") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(tls), local_addr=(address, 0))
    writer.write(REQUEST)
    answer = await reader.read()
    writer.close()
    return answer


async def silent(port: int, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that does not even begin its handshake."""
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def settled(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.01)


def test_a_silent_address_takes_only_its_own_places(tls: Tls) -> None:
    limits = ConnectionLimits(64, 60.0, 60.0, 3, Networks([]))

    async def work(port: int, pool: ConnectionPool, door: Listener) -> list[bytes]:
        opened = [await silent(port, "127.0.0.2") for _ in range(3)]
        await settled(lambda: pool.used == 3)
        answers = [await ask(port, tls, "127.0.0.2"), await ask(port, tls, "127.0.0.3")]
        for _, writer in opened:
            writer.close()
        await settled(lambda: not pool.used)
        return [*answers, await ask(port, tls, "127.0.0.2")]

    answers, dropped = served(tls, limits, work)
    assert [answer.split(b" ")[1] for answer in answers] == [b"429", b"200", b"200"]
    assert answers[1].endswith(b"https")
    assert dropped == 3  # those that went without a word


def test_silent_connections_give_way_during_their_handshake(tls: Tls) -> None:
    async def work(port: int, pool: ConnectionPool, door: Listener) -> tuple[list[bytes], list[bytes]]:
        opened = [await silent(port) for _ in range(8)]
        await settled(lambda: pool.used == 4)
        answers = [await ask(port, tls) for _ in range(3)]
        closed = [await reader.read() for reader, _ in opened[:4]]
        for _, writer in opened:
            writer.close()
        return answers, closed

    (answers, closed), _ = served(tls, ConnectionLimits(4, 60.0, 60.0), work)
    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
    assert closed == [b""] * 4


def test_a_handshake_that_takes_too_long_is_ended(tls: Tls) -> None:
    async def work(port: int, pool: ConnectionPool, door: Listener) -> bytes:
        reader, writer = await silent(port)
        answer = await reader.read()
        writer.close()
        return answer

    assert served(tls, ConnectionLimits(header_timeout_s=0.2), work) == (b"", 1)


def test_more_connections_than_allowed_are_refused_by_https(tls: Tls) -> None:
    async def work(port: int, pool: ConnectionPool, door: Listener) -> bytes:
        held = [await asyncio.open_connection("127.0.0.1", port, ssl=trusting(tls)) for _ in range(2)]
        for _, writer in held:
            writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n")
        await settled(lambda: pool.used == 2 and not pool._silent)
        answer = await ask(port, tls)
        for _, writer in held:
            writer.close()
        return answer

    answer, _ = served(tls, ConnectionLimits(2, 60.0, 60.0), work)
    assert answer.startswith(b"HTTP/1.1 503 ")


def test_a_closed_door_accepts_nobody_and_leaves_nothing(tls: Tls) -> None:
    doors: list[Listener] = []
    with socket.socket() as client:  # it outlives the server

        async def work(port: int, pool: ConnectionPool, door: Listener) -> bytes:
            doors.append(door)
            client.connect(("127.0.0.1", port))
            await settled(lambda: pool.used == 1)
            return await ask(port, tls)

        answer, _ = served(tls, ConnectionLimits(header_timeout_s=60.0), work)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert not doors[0]._arriving
