"""Connections that have not greeted yet are bounded, by address and in all, and hold up nobody."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from service.config import ApiConfig
from service.http.addresses import Networks
from service.http.connections import ConnectionLimits, LimitedServer, protocol_of
from service.http.tls import Tls
from service.http.tls_door import TlsDoor
from tests.service.certificate_files import Authority

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
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


Work = Callable[[int, TlsDoor, LimitedServer], Awaitable[Any]]


def served(tls: Tls, limits: ConnectionLimits, work: Work) -> tuple[Any, int]:
    """What `work` gives, and how many connections were dropped at the door."""
    dropped: list[int] = []

    async def run() -> Any:
        config = uvicorn.Config(app, http=protocol_of(limits), lifespan="off", log_config=None, ws="none")
        server = LimitedServer(config)
        door = TlsDoor(server, tls, limits, lambda: dropped.append(1))
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            async with door.open(sock):
                task = asyncio.ensure_future(server.serve([]))
                try:
                    return await asyncio.wait_for(work(sock.getsockname()[1], door, server), 60)
                finally:
                    server.should_exit = server.force_exit = True
                    await task

    return uvloop.run(run()), len(dropped)


async def ask(port: int, tls: Tls, address: str = "127.0.0.1") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(tls), local_addr=(address, 0))
    writer.write(REQUEST)
    answer = await reader.read()
    writer.close()
    return answer


async def settled(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.01)


def test_who_never_greets_takes_only_the_places_of_his_address(tls: Tls) -> None:
    limits = ConnectionLimits(64, 60.0, 60.0, 3, Networks([]))

    async def work(port: int, door: TlsDoor, server: LimitedServer) -> list[bytes]:
        silent = [await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(5)]
        await settled(lambda: door._of_address["127.0.0.2"] == 3)
        dropped = [await reader.read() for reader, _ in silent[3:]]
        answer = await ask(port, tls, "127.0.0.3")
        for _, writer in silent:
            writer.close()
        await settled(lambda: not door._greeting and not door._of_address)
        return [*dropped, answer, await ask(port, tls, "127.0.0.2")]

    answers, dropped = served(tls, limits, work)
    assert answers[:2] == [b"", b""]
    assert all(answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"https") for answer in answers[2:])
    assert dropped == 5  # two at once, and three that went without a word


def test_who_does_not_greet_in_time_is_dropped(tls: Tls) -> None:
    async def work(port: int, door: TlsDoor, server: LimitedServer) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        told = await reader.read()
        writer.close()
        return told

    assert served(tls, ConnectionLimits(header_timeout_s=0.2), work) == (b"", 1)


def test_more_connections_than_allowed_are_told_so_by_https(tls: Tls) -> None:
    async def work(port: int, door: TlsDoor, server: LimitedServer) -> bytes:
        held = [await asyncio.open_connection("127.0.0.1", port, ssl=trusting(tls)) for _ in range(2)]
        await settled(lambda: len(server.server_state.connections) == 2)
        answer = await ask(port, tls)
        for _, writer in held:
            writer.close()
        return answer

    answer, _ = served(tls, ConnectionLimits(2, 60.0, 60.0), work)
    assert answer.startswith(b"HTTP/1.1 503 ")


def test_a_door_that_is_closed_takes_nobody_and_leaves_nothing(tls: Tls, tmp_path: Path) -> None:
    doors: list[TlsDoor] = []
    with socket.socket() as silent:

        async def work(port: int, door: TlsDoor, server: LimitedServer) -> bytes:
            doors.append(door)
            silent.connect(("127.0.0.1", port))
            await settled(lambda: len(door._greeting) == 1)
            return await ask(port, tls)

        answer, _ = served(tls, ConnectionLimits(header_timeout_s=60.0), work)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert not doors[0]._greeting
    assert not doors[0]._of_address
