"""The limits of connections, against a real server in this process. Limits are short, and nothing is timed."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from fleetcast.service.http import connections
from fleetcast.service.http.addresses import Networks
from fleetcast.service.http.connection_pool import ConnectionLimits, ConnectionPool
from fleetcast.service.http.connections import LimitedProtocol, LimitedServer, make_limited_protocol
from fleetcast.service.http.listening import bind_socket

LIMITS = ConnectionLimits(max_connections=8, header_timeout_s=0.2, body_timeout_s=0.2)
BIG = b"x" * 2**20
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[Streams]]  # (address that it comes from)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, unless asked to answer /early; /big is more than a socket holds, /slow takes its time."""
    if scope["path"] != "/early":
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        if message["type"] == "http.disconnect":
            return
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
    body = BIG * 32 if scope["path"] == "/big" else b"fine"
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def served(
    work: Callable[[Connect], Awaitable[Any]],
    monkeypatch: pytest.MonkeyPatch,
    limits: ConnectionLimits = LIMITS,
    refused: list[int] | None = None,
    tick_s: float = 0.1,
) -> tuple[Any, list[int]]:
    """What `work` gives, and the statuses of the refusals."""
    monkeypatch.setattr(connections, "TICK_S", tick_s)
    refused = [] if refused is None else refused

    async def run() -> Any:
        pool = ConnectionPool(limits)
        config = uvicorn.Config(
            app, http=make_limited_protocol(pool, refused.append), lifespan="off", log_config=None, ws="none"
        )
        sock = bind_socket("127.0.0.1", 0, "port")
        server = LimitedServer(config, sock, pool)
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = sock.getsockname()[1]
        opened: list[asyncio.StreamWriter] = []

        async def connect(address: str = "127.0.0.1") -> Streams:
            streams = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            opened.append(streams[1])
            return streams

        try:
            return await asyncio.wait_for(work(connect), 30)
        finally:
            for writer in opened:
                writer.close()
            server.should_exit = server.force_exit = True
            await asyncio.wait_for(task, 30)
            sock.close()

    return asyncio.run(run()), refused


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side closes; a reset, as what we still send then causes, takes nothing of it away."""
    heard = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await reader.read(65_536):
            heard += piece
    return heard


async def told(streams: Streams, *parts: bytes) -> bytes:
    """All that the server says to `parts` until it closes."""
    reader, writer = streams
    for part in parts:
        writer.write(part)
    return await all_of(reader)


@pytest.mark.parametrize(
    "sent",
    [b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\nx-a: b\r\n", b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nabc"],
)
def test_a_request_that_stops_halfway_is_told_408(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connect: Connect) -> bytes:
        return await told(await connect(), sent)

    answer, refused = served(work, monkeypatch)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"content-type: application/problem+json" in answer
    assert refused == [408]


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_a_drop_now_and_then_does_not_keep_a_connection(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connect: Connect) -> bytes:
        reader, writer = await connect()
        writer.write(first)
        heard = asyncio.ensure_future(all_of(reader))
        for drop in [b"GET / HTTP/1.1\r\n", *[b"x-a: b\r\n"] * 1000]:
            if heard.done():
                break
            writer.write(drop)
            await asyncio.sleep(0.05)
        return await heard

    answer, _ = served(work, monkeypatch)
    assert b"HTTP/1.1 408 " in answer
    assert answer.startswith(b"HTTP/1.1 200 " if first else b"HTTP/1.1 408 ")


@pytest.mark.parametrize("drops", [b"", b"\r\n"])
def test_a_connection_that_never_asks_is_closed_without_a_word(drops: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connect: Connect) -> bytes:
        return await told(await connect(), drops)

    assert served(work, monkeypatch) == (b"", [])


def test_time_that_we_take_is_not_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connect: Connect) -> bytes:
        request = b"POST /slow HTTP/1.1\r\ncontent-length: 2\r\n\r\nab"
        return await told(await connect(), request, request.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))

    answer, refused = served(work, monkeypatch)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert refused == []


def test_the_rest_of_a_body_that_was_answered_already_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connect: Connect) -> bytes:
        return await told(await connect(), b"POST /early HTTP/1.1\r\ncontent-length: 99\r\n\r\nabc")

    answer, refused = served(work, monkeypatch)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert refused == []


def test_a_client_that_does_not_take_its_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WRITE_TIMEOUT_S", 0.3)

    refused: list[int] = []

    async def work(connect: Connect) -> int:
        reader, writer = await connect()
        writer.write(b"GET /big HTTP/1.1\r\n\r\n")
        while not refused:
            await asyncio.sleep(0.05)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(32 * 2**20)
        return 0

    assert served(work, monkeypatch, refused=refused) == (0, [408])


BEGUN = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"  # its body does not come
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def working(connect: Connect, count: int) -> list[Streams]:
    """Connections whose requests are under way. A ready answer follows each only when its body has come."""
    opened = [await connect() for _ in range(count)]
    for _, writer in opened:
        writer.write(BEGUN)
    return opened


async def answered(connect: Connect) -> list[bytes]:
    """The answers to one request after another, until one is not 200."""
    answers = [await told(await connect(), REQUEST)]
    while answers[-1].startswith(b"HTTP/1.1 200 "):
        answers.append(await told(await connect(), REQUEST))
    return answers


def test_more_connections_than_allowed_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connect: Connect) -> tuple[bytes, bytes]:
        held = await working(connect, LIMITS.max_connections)
        while_full = (await answered(connect))[-1]
        held.pop()[1].close()
        later = b""
        while not later.startswith(b"HTTP/1.1 200 "):  # until the server has noticed
            later = await told(await connect(), REQUEST)
        return while_full, later

    limits = ConnectionLimits(LIMITS.max_connections, 60.0, 60.0)
    (while_full, later), refused = served(work, monkeypatch, limits)
    assert while_full.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 5\r\n" in while_full
    assert later.endswith(b"fine")
    assert refused[0] == 503


def test_a_request_under_way_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connect: Connect) -> list[bytes]:
        held = await working(connect, LIMITS.max_connections)
        await answered(connect)
        crowd = [await connect() for _ in range(3)]  # they wait, and say nothing
        reader, writer = held[-1]
        writer.write(b"123456789")
        answer = await reader.readuntil(b"fine")
        writer.close()
        return [answer, *[await told(streams, REQUEST) for streams in crowd]]

    answers, _ = served(work, monkeypatch, ConnectionLimits(LIMITS.max_connections, 60.0, 60.0))
    assert [answer.split(b" ")[1] for answer in answers] == [b"200", b"503", b"503", b"503"]


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"])
def test_connections_that_ask_for_nothing_keep_nobody_out(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones, ones that stop in their first head, and ones that rest after an answer; far more than places."""

    async def work(connect: Connect) -> list[bytes]:
        answers = []
        for _ in range(10 * LIMITS.max_connections):
            reader, writer = await connect()
            writer.write(sent)
            if sent.endswith(b"\r\n\r\n"):
                await reader.readuntil(b"fine")
            if _ % 10 == 9:
                answers.append(await told(await connect(), REQUEST))
        return answers

    answers, refused = served(work, monkeypatch, ConnectionLimits(LIMITS.max_connections, 60.0, 60.0))
    assert [answer.split(b" ")[1] for answer in answers] == [b"200"] * LIMITS.max_connections
    assert set(refused) <= {503}  # those that had begun a head are told


def test_whoever_is_refused_hears_it_however_many_wait_to_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, connections beyond places and refusals were reset until the first ones ran out of time."""
    limits = ConnectionLimits(LIMITS.max_connections, 60.0, 60.0, max_refused=4)

    async def work(connect: Connect) -> list[bytes]:
        await working(connect, LIMITS.max_connections)
        await answered(connect)
        answers = []
        for _ in range(30):
            await connect()
            answers.append(await told(await connect(), REQUEST))
        return answers

    answers, _ = served(work, monkeypatch, limits)
    assert [answer.split(b" ")[1] for answer in answers] == [b"503"] * 30


def test_one_address_takes_no_places_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    request = REQUEST
    limits = ConnectionLimits(LIMITS.max_connections, 60.0, 60.0, 3, Networks(["127.0.0.9"]))

    async def work(connect: Connect) -> list[bytes]:
        held = [await connect("127.0.0.2") for _ in range(3)]
        crowd = [await connect("127.0.0.2") for _ in range(2)]
        answers = [await told(crowd[0], request), await told(await connect("127.0.0.3"), request)]
        trusted = [await connect("127.0.0.9") for _ in range(4)]
        answers += [await told(streams, request) for streams in (trusted[3], held[0])]
        later = b""
        while not later.startswith(b"HTTP/1.1 200 "):  # until the server has noticed that a place is free
            later = await told(await connect("127.0.0.2"), request)
        return answers

    answers, refused = served(work, monkeypatch, limits)
    assert [answer.split(b" ")[1] for answer in answers] == [b"429", b"200", b"200", b"200"]
    assert b"\r\nretry-after: 5\r\n" in answers[0]
    assert b"3 connections of 127.0.0.2 are open" in answers[0]
    assert set(refused) == {429}


def test_nothing_is_kept_of_connections_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    protocols: list[Any] = []
    whole = LimitedProtocol.connection_made

    def connection_made(self: Any, transport: Any) -> None:
        protocols.append(self)
        whole(self, transport)

    monkeypatch.setattr(LimitedProtocol, "connection_made", connection_made)

    async def work(connect: Connect) -> int:
        for number in range(30):
            opened = [await connect(f"127.0.0.{2 + number % 3}") for _ in range(3)]
            for _, writer in opened:
                writer.close()
        pool = protocols[0].pool
        while len(protocols) < 90 or pool._of_address or pool.used:
            await asyncio.sleep(0.01)
        return len(pool._silent) + len(pool._resting) + len(pool._refused)

    limits = ConnectionLimits(64, 60.0, 60.0, 1, Networks([]))
    assert served(work, monkeypatch, limits)[0] == 0


def test_a_stop_does_not_wait_for_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connect: Connect) -> bytes:
        return await told(await connect(), REQUEST)

    assert served(work, monkeypatch, tick_s=3600.0)[0].startswith(b"HTTP/1.1 200 ")


def test_a_head_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connect: Connect) -> bytes:
        return await told(
            await connect(), b"GET / HTTP/1.1\r\n", *[b"x-%d: %b\r\n" % (n, b"y" * 8000) for n in range(9)]
        )

    answer, refused = served(work, monkeypatch, ConnectionLimits(8, 60.0, 60.0))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert refused == [431]


def test_what_is_no_http_is_a_problem_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(connect: Connect) -> bytes:
        return await told(await connect(), b"\x16\x03\x01 hello\r\n\r\n")

    answer, refused = served(work, monkeypatch)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in answer
    assert refused == [400]
