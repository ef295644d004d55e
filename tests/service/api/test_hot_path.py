"""The hot path gives the answer that the ordinary way gives, or leaves the request to it."""

import asyncio
import base64
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from fleetcast.fleet.clock import ManualClock
from fleetcast.service.api.app import create_app
from fleetcast.service.api.hot_path import HotPath, HotProtocol, make_hot_protocol
from fleetcast.service.http.access import Access, parse_tokens
from fleetcast.service.http.connection_pool import ConnectionLimits, ConnectionPool
from fleetcast.service.http.connections import make_limited_protocol
from tests.service.api_world import NOW_MS, config, publish

PLAIN = b"GET /v1/nodes/n002 HTTP/1.1\r\nhost: localhost\r\n\r\n"
TOKEN = "0123456789abcdef"


def app_of(folder: Path, access: Access | None = None) -> FastAPI:
    publish(folder)
    return create_app(config(folder), ManualClock(NOW_MS + 7_900), access=access or Access())


@pytest.fixture
def hot(tmp_path: Path) -> HotPath:
    return HotPath(app_of(tmp_path).state.context)


def request(headers: bytes = b"", path: bytes = b"/v1/nodes/n002", version: bytes = b"1.1") -> bytes:
    return b"GET " + path + b" HTTP/" + version + b"\r\nHost: localhost\r\n" + headers + b"\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        b"User-Agent: curl/8.0\r\nAccept: */*\r\n",
        b"Connection: keep-alive\r\nAccept-Encoding: gzip, deflate\r\n",
        b"connection: Keep-Alive \r\nx-empty:\r\n",
    ],
)
def test_a_plain_request_is_answered_from_its_bytes(hot: HotPath, headers: bytes) -> None:
    answer = hot.answer_request(request(headers))
    assert answer is not None
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == b'{"node": "n002", "as_of_ms": 1760000000000, "state": "ok"}'
    assert b"age: 7\r\n" in head
    assert b"content-length: %d" % len(body) in head


@pytest.mark.parametrize(
    "asked",
    [
        request(path=b"/v1/nodes/nobody"),
        request(path=b"/v1/nodes/n%30%302"),
        request(path=b"/v1/nodes/n002?horizon_s=1"),
        request(path=b"/v1/nodes/"),
        request(path="/v1/nodes/ä".encode()),
        request(path=b"/v1/fleet"),
        request(version=b"1.0"),
        request(b"Connection: close\r\n"),
        request(b"Connection: keep-alive\r\nConnection: close\r\n"),
        request(b"Connection: upgrade\r\n"),
        request(b"Content-Length: 0\r\n"),
        request(b"Transfer-Encoding: chunked\r\n"),
        request(b"Expect: 100-continue\r\n"),
        request(b"no colon\r\n"),
        request(b"x: " + b"y" * 4096 + b"\r\n"),
        request(b"X: a\nContent-Length: 5\r\n"),
        request(b"X: a\x00b\r\n"),
        request(b"X: a\r\n continued\r\n"),
        request()[:-2],
        request() + request(),
        request() + b"x",
        b"POST" + request()[3:],
        b"HEAD" + request()[3:],
    ],
)
def test_everything_else_is_left_to_the_ordinary_way(hot: HotPath, asked: bytes) -> None:
    assert hot.answer_request(asked) is None


def test_a_name_that_is_not_ours_is_left_to_the_ordinary_way(hot: HotPath, tmp_path: Path) -> None:
    asked = request().replace(b"localhost", b"evil.example:8080")
    assert hot.answer_request(asked) is None
    assert hot.answer_request(request().replace(b"localhost", b"10.0.0.7:8080"))
    closed = HotPath(app_of(tmp_path, Access(parse_tokens(f"reader read {TOKEN}", "the test"))).state.context)
    assert closed.answer_request(asked[:-2] + b"Authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n")


def test_headers_that_are_kept_are_bounded(hot: HotPath) -> None:
    for number in range(3000):
        assert hot.answer_request(request(b"x-trace: %d\r\n" % number))
    assert len(hot._in_order) <= 1024


def test_before_the_first_board_the_ordinary_way_says_so(tmp_path: Path) -> None:
    app = create_app(config(tmp_path), ManualClock(NOW_MS), access=Access())
    assert HotPath(app.state.context).answer_request(PLAIN) is None


def test_with_tokens_only_those_who_may_read_are_answered(tmp_path: Path) -> None:
    tokens = parse_tokens(f"reader read {TOKEN}\nposter events {TOKEN}-other", "the test")
    hot = HotPath(app_of(tmp_path, Access(tokens)).state.context)
    basic = base64.b64encode(f"user:{TOKEN}".encode())
    assert hot.answer_request(request(b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"))
    assert hot.answer_request(request(b"authorization: basic " + basic + b"\r\n"))
    assert hot.answer_request(request()) is None
    assert hot.answer_request(request(b"Authorization: Bearer " + TOKEN.encode() + b"-other\r\n")) is None
    assert hot.answer_request(request(b"Authorization: Bearer nonsense\r\n")) is None


class Wire(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@contextmanager
def connection(
    folder: Path,
    limits: ConnectionLimits = ConnectionLimits(),  # noqa: B008
) -> Iterator[tuple[asyncio.Runner, HotProtocol, Wire]]:
    """One connection to the application, without a socket."""
    app = app_of(folder)
    settings = uvicorn.Config(
        app, http=make_hot_protocol(app.state.context, make_limited_protocol(ConnectionPool(limits))), log_config=None
    )
    settings.load()
    state = uvicorn.Server(settings).server_state
    state.default_headers = [(b"date", b"today")]
    with asyncio.Runner() as runner:

        async def open_one() -> tuple[HotProtocol, Wire]:
            protocol, wire = settings.http_protocol_class(settings, state, {}), Wire()  # type: ignore[call-arg]
            protocol.connection_made(wire)
            assert isinstance(protocol, HotProtocol)
            return protocol, wire

        yield runner, *runner.run(open_one())


def settle(runner: asyncio.Runner, protocol: HotProtocol) -> None:
    """Until the application has answered, and what waits behind that as well."""

    async def answered() -> None:
        await asyncio.sleep(0)
        while protocol.tasks:
            await asyncio.wait(protocol.tasks)
            await asyncio.sleep(0)

    runner.run(answered())


def parts(sent: bytes) -> tuple[bytes, set[bytes], bytes]:
    head, _, body = sent.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    return status, set(headers), body


def test_both_ways_give_the_same_answer(tmp_path: Path) -> None:
    with connection(tmp_path) as (runner, protocol, wire):
        protocol.data_received(PLAIN)
        hot, wire.sent = wire.sent, b""
        protocol.data_received(PLAIN[:20])
        protocol.data_received(PLAIN[20:])
        assert wire.sent == b""
        settle(runner, protocol)
        assert parts(hot) == parts(wire.sent)


def test_requests_that_come_together_are_answered_in_order(tmp_path: Path) -> None:
    with connection(tmp_path) as (runner, protocol, wire):
        protocol.data_received(request(path=b"/healthz") + PLAIN)
        protocol.data_received(PLAIN)
        settle(runner, protocol)
        assert [b"n002" in answer for answer in wire.sent.split(b"HTTP/1.1 200 OK")[1:]] == [False, True, True]


def test_a_body_that_looks_like_a_request_is_a_body(tmp_path: Path) -> None:
    head = b"POST /v1/unknown HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(PLAIN)
    with connection(tmp_path) as (runner, protocol, wire):
        protocol.data_received(head)
        settle(runner, protocol)  # the 404 is sent before the body has come
        assert wire.sent.startswith(b"HTTP/1.1 404")
        wire.sent = b""
        protocol.data_received(PLAIN)
        settle(runner, protocol)
        assert b"n002" not in wire.sent


def test_a_connection_too_many_is_refused_here_too(tmp_path: Path) -> None:
    with connection(tmp_path, ConnectionLimits(max_connections=0)) as (_, protocol, wire):
        protocol.data_received(PLAIN)
        assert wire.sent.startswith(b"HTTP/1.1 503")
        assert wire.is_closed


def test_hot_answers_are_counted_and_keep_the_connection_open(tmp_path: Path) -> None:
    with connection(tmp_path) as (_, protocol, wire):
        protocol.data_received(PLAIN)
        protocol.data_received(PLAIN)
        assert wire.sent.count(b"HTTP/1.1 200 OK") == 2
        page = protocol.hot.context.metrics.make_page()
        assert 'fleetcast_http_requests_total{method="GET",route="/v1/nodes/{node}",status="200"} 2.0' in page
        assert 'fleetcast_http_request_seconds_count{route="/v1/nodes/{node}"} 2.0' in page
        assert protocol._deadline == float("inf")
        assert not wire.is_closed
        protocol.connection_lost(None)
