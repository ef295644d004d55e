"""The bodies of all requests share one budget, and whatever becomes of a request, its share comes back."""

import asyncio
import contextlib
import gzip
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cramjam
import pytest
import uvicorn
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.clock import ManualClock
from fleetcast.service.api.app import create_app
from fleetcast.service.api.routes.context import Context
from fleetcast.service.config import ApiConfig, Config, PlacerConfig
from fleetcast.service.http.access import Access
from fleetcast.service.http.body_budget import BodyBudget
from fleetcast.service.http.connection_pool import ConnectionLimits, ConnectionPool
from fleetcast.service.http.connections import LimitedServer, make_limited_protocol
from fleetcast.service.http.listening import bind_socket
from fleetcast.service.http.problems import Problem
from tests.fuzz.bounds import examples
from tests.service.api_world import CLOSED_PORT, NOW_MS, publish

BODY_BYTES = 2**16
BUDGET_BYTES = 2**17
EVENT = b'{"job": "a", "sequence": 1, "time_ms": 1760000000000, "type": "submitted", "gang": 1}'


# -- the budget itself


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.booleans())))
def test_leases_never_take_more_than_there_is_and_all_of_it_comes_back(steps: list[tuple[int, int, bool]]) -> None:
    refused: list[int] = []
    budget = BodyBudget(100, lambda: refused.append(1))
    leases = [budget.make_lease() for _ in range(4)]
    held, over, wanted = [0] * 4, [False] * 4, 0
    for at, size_bytes, ends in steps:
        fits = not over[at] and sum(held) + size_bytes <= 100
        if fits:
            leases[at].grow(size_bytes)
            held[at] += size_bytes
        else:
            with pytest.raises(Problem) as refusal:
                leases[at].grow(size_bytes)
            assert refusal.value.status == (413 if held[at] + size_bytes > 100 else 503)
            wanted += 1
        if ends:
            leases[at].release()
            held[at], over[at] = 0, True
        assert budget.used_bytes == sum(held)
    for lease in leases:
        lease.release()
        lease.release()
    assert budget.used_bytes == 0
    assert len(refused) == wanted


# -- the api


def api(folder: Path) -> FastAPI:
    publish(folder)
    limits = ApiConfig(max_body_bytes=BODY_BYTES, body_budget_bytes=BUDGET_BYTES)
    config = Config(state=str(folder), api=limits, placer=PlacerConfig(port=CLOSED_PORT))
    return create_app(config, ManualClock(NOW_MS), access=Access())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FastAPI, asyncio.Runner]]:
    app = api(tmp_path_factory.mktemp("bodies"))
    with asyncio.Runner() as runner:
        life = app.router.lifespan_context(app)
        runner.run(life.__aenter__())
        yield app, runner
        runner.run(life.__aexit__(None, None, None))


PATHS = ("/v1/events", "/api/v1/write", "/v1/placements", "/v1/adapters/kube/filter", "/v1/jobs/estimate", "/v1/none")
CODINGS = ("", "gzip", "deflate", "snappy", "nonsense")
ENDS = ("whole", "disconnect", "cancel", "deaf", "silence")


def packed(coding: str, body: bytes) -> bytes:
    if coding == "gzip":
        return gzip.compress(body)
    if coding == "deflate":
        return zlib.compress(body)
    return bytes(cramjam.snappy.compress_raw(body)) if coding == "snappy" else body


async def one_request(app: FastAPI, path: str, coding: str, parts: list[bytes], end: str) -> None:
    """A request that comes in parts and ends as `end` says; its handler is cancelled where nothing ends it."""
    waiting = list(parts)
    stuck = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        if waiting:
            part = waiting.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(waiting) or end != "whole"}
        if end in ("cancel", "silence"):
            stuck.set()
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if end == "deaf":
            raise OSError("nobody listens")

    content_type = b"application/x-protobuf" if path == "/api/v1/write" else b"application/json"
    headers = [(b"host", b"localhost"), (b"content-type", content_type), (b"content-encoding", coding.encode())]
    raw = path.encode()
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": raw, "query_string": b"", "headers": headers}
    task = asyncio.ensure_future(app(scope, receive, send))  # type: ignore[arg-type]
    if end in ("cancel", "silence"):
        stopped = asyncio.ensure_future(stuck.wait())
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError, OSError):
        await task


BODIES = st.sampled_from([b"", EVENT, b"[" + EVENT + b"]", b"x" * 1000, b"x" * BODY_BYTES, b"x" * (BODY_BYTES + 1)])
REQUESTS = st.tuples(
    st.sampled_from(PATHS), st.sampled_from(CODINGS), BODIES, st.integers(1, 4), st.booleans(), st.sampled_from(ENDS)
)


@given(st.lists(REQUESTS, min_size=1, max_size=5))
@examples(150)
def test_however_a_request_ends_its_share_comes_back(
    world: tuple[FastAPI, asyncio.Runner], requests: list[tuple[str, str, bytes, int, bool, str]]
) -> None:
    app, runner = world
    context: Context = app.state.context

    async def all_at_once() -> None:
        work = []
        for path, coding, body, pieces, is_broken, end in requests:
            sent = packed(coding, body)
            sent = sent[: len(sent) // 2] if is_broken else sent
            size = max(1, -(-len(sent) // pieces))
            parts = [sent[at : at + size] for at in range(0, len(sent), size)] or [b""]
            work.append(one_request(app, path, coding, parts, end))
        await asyncio.gather(*work)

    runner.run(all_at_once())
    assert context.bodies.used_bytes == 0
    assert "fleetcast_api_body_bytes 0.0" in context.metrics.make_page()


def served(app: FastAPI, work: Callable[[int], Any]) -> Any:
    """What `work` gives, with the application behind a real socket."""

    async def run() -> Any:
        pool = ConnectionPool(ConnectionLimits())
        config = uvicorn.Config(app, http=make_limited_protocol(pool), log_config=None, ws="none")
        sock = bind_socket("127.0.0.1", 0, "port")
        server = LimitedServer(config, sock, pool)
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            return await asyncio.wait_for(work(sock.getsockname()[1]), 60)
        finally:
            server.should_exit = server.force_exit = True
            await task
            sock.close()

    return asyncio.run(run())


def head(path: bytes, size_bytes: int, more: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n%b\r\n" % (path, size_bytes, more)


async def settled(check: Callable[[], bool]) -> None:
    while not check():
        await asyncio.sleep(0.01)


def test_unfinished_bodies_of_many_take_no_more_than_the_budget(tmp_path: Path) -> None:
    app = api(tmp_path)
    context: Context = app.state.context

    async def work(port: int) -> tuple[int, list[bytes], bytes]:
        held = []
        for _ in range(20):  # 20 bodies of 60,000 bytes but for the last one
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head(b"/v1/events", 60_000) + b"x" * 59_999)
            held.append((reader, writer))
        await settled(lambda: context.metrics.refused_bodies._value.get() >= 18)
        most = context.bodies.used_bytes
        for _, writer in held:
            writer.write(b"x")
        answers = sorted([await reader.readuntil(b"\r\n\r\n") for reader, _ in held])
        for _, writer in held:
            writer.close()
        await settled(lambda: context.bodies.used_bytes == 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(b"/v1/events", len(EVENT), b"content-type: application/json\r\n") + EVENT)
        later = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return most, answers, later

    most, answers, later = served(app, work)
    assert 0 < most <= BUDGET_BYTES
    busy = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
    assert len(busy) == 18
    assert all(b"\r\nretry-after: 5\r\n" in answer for answer in busy)
    assert later.startswith(b"HTTP/1.1 202 ")


@pytest.mark.parametrize("coding", ["gzip", "snappy"])
def test_what_a_body_unpacks_to_counts(tmp_path: Path, coding: str) -> None:
    app = api(tmp_path)
    context: Context = app.state.context
    others = context.bodies.make_lease()
    others.grow(BUDGET_BYTES - 20_000)
    path = "/api/v1/write" if coding == "snappy" else "/v1/events"
    statuses: list[int] = []

    async def ask() -> None:
        sent = packed(coding, b"\x0a\x00" * 25_000)
        assert len(sent) < 20_000

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def receive() -> Any:
            return {"type": "http.request", "body": sent, "more_body": False}

        kind = b"application/x-protobuf" if coding == "snappy" else b"application/json"
        headers = [(b"host", b"localhost"), (b"content-type", kind), (b"content-encoding", coding.encode())]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        async with app.router.lifespan_context(app):
            await app(scope, receive, send)  # type: ignore[arg-type]
            others.release()
            await app(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(ask())
    assert statuses[0] == 503
    assert statuses[1] in (204, 400, 422)
    assert context.bodies.used_bytes == 0


def test_a_body_that_can_never_fit_is_not_asked_for_again() -> None:
    with pytest.raises(Problem) as refusal:
        BodyBudget(10).make_lease().grow(11)
    assert refusal.value.status == 413


def test_the_length_that_a_message_claims_is_checked_before_it_is_counted(tmp_path: Path) -> None:
    """A claim of 4 GB is no reason to turn others away."""
    app = api(tmp_path)
    claim = b"\xff\xff\xff\xff\x0f" + struct.pack("<I", 0)
    statuses: list[int] = []

    async def ask() -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def receive() -> Any:
            return {"type": "http.request", "body": claim, "more_body": False}

        headers = [(b"host", b"localhost"), (b"content-type", b"application/x-protobuf")]
        scope = {"type": "http", "method": "POST", "path": "/api/v1/write", "query_string": b"", "headers": headers}
        async with app.router.lifespan_context(app):
            await app(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(ask())
    assert statuses == [413]
    assert app.state.context.metrics.refused_bodies._value.get() == 0
