"""A load generator for HTTP: keep-alive connections without pipelining, on uvloop, on one core.

In a closed loop, a connection sends its next request once it has the answer. This measures answers per
second. In an open loop, requests are due at fixed times, and latency counts from these times. So a server that
stalls is charged for all requests that were due in the meantime.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import uvloop

OPEN_LOOP_STEP_S = 0.0005
PATIENCE_S = 10.0

Check = Callable[[bytes, bytes], None]
"""(head, body) of an answer; raises AssertionError when it is not right."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request as bytes, the status that its answer must have, and an optional check of the answer."""

    wire: bytes
    status: bytes = b"200"
    check: Check | None = None


@dataclass(slots=True)
class LoadResult:
    """The result of a run of the load generator.

    latency_s: one value for each answer. checked: the number of answers whose body was checked.
    """

    seconds: float = 0.0
    latency_s: list[float] = field(default_factory=list)
    checked: int = 0

    @property
    def rate(self) -> float:
        return len(self.latency_s) / self.seconds

    def compute_quantile_ms(self, q: float) -> float:
        return float(np.quantile(self.latency_s, q)) * 1000


def make_get(path: str, check: Check | None = None) -> LoadRequest:
    return LoadRequest(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode(), check=check)


def make_post(path: str, body: bytes, status: bytes = b"200", kind: str = "application/json") -> LoadRequest:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return LoadRequest(head.encode() + body, status)


def run_closed_loop(
    port: int, ask: Callable[[], LoadRequest | None], *, connections: int, seconds: float
) -> LoadResult:
    """Send requests in a closed loop for `seconds`, or until `ask` returns None."""
    load: LoadResult = uvloop.run(_run_closed(port, ask, connections, seconds))
    return load


def run_open_loop(
    port: int, ask: Callable[[], LoadRequest], *, connections: int, seconds: float, rate: float
) -> LoadResult:
    """Send `rate` requests a second, evenly spaced, for `seconds`."""
    load: LoadResult = uvloop.run(_run_open(port, ask, connections, round(seconds * rate), rate))
    return load


async def _run_closed(port: int, ask: Callable[[], LoadRequest | None], connections: int, seconds: float) -> LoadResult:
    load = LoadResult()
    lines = [await _open_connection(port, load) for _ in range(connections)]
    began = time.perf_counter()
    end = began + seconds

    def send_next(line: _LoadConnection) -> None:
        now = time.perf_counter()
        wanted = ask() if now < end else None
        if wanted is None:
            line.close()
        else:
            line.send(wanted, now, send_next)

    for line in lines:
        send_next(line)
    await asyncio.wait_for(asyncio.gather(*(line.closed for line in lines)), seconds + PATIENCE_S)
    load.seconds = time.perf_counter() - began
    return load


async def _run_open(port: int, ask: Callable[[], LoadRequest], connections: int, total: int, rate: float) -> LoadResult:
    load = LoadResult()
    lines = [await _open_connection(port, load) for _ in range(connections)]
    idle = deque(lines)
    due: deque[tuple[LoadRequest, float]] = deque()

    def send_due_request(line: _LoadConnection) -> None:
        if due:
            line.send(*due.popleft(), send_due_request)
        else:
            idle.append(line)

    began = time.perf_counter() + OPEN_LOOP_STEP_S
    sent = 0
    while sent < total:
        until = min(total, int((time.perf_counter() - began) * rate) + 1)
        for number in range(sent, until):
            due.append((ask(), began + number / rate))
        sent = max(sent, until)
        while due and idle:
            send_due_request(idle.popleft())
        await asyncio.sleep(OPEN_LOOP_STEP_S)
    deadline = time.perf_counter() + PATIENCE_S
    while len(idle) < connections:
        assert time.perf_counter() < deadline, "requests stay without an answer"
        await asyncio.sleep(OPEN_LOOP_STEP_S)
    load.seconds = time.perf_counter() - began
    for line in lines:
        line.close()
    return load


async def _open_connection(port: int, load: LoadResult) -> "_LoadConnection":
    _, line = await asyncio.get_running_loop().create_connection(lambda: _LoadConnection(load), "127.0.0.1", port)
    return line


class _LoadConnection(asyncio.Protocol):
    """A connection that sends one request at a time."""

    def __init__(self, load: LoadResult) -> None:
        self.load = load
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._buffer = b""
        self._ask: LoadRequest | None = None
        self._begin = 0.0
        self._then: Callable[[_LoadConnection], None] = _LoadConnection.close

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def send(self, ask: LoadRequest, begin: float, then: "Callable[[_LoadConnection], None]") -> None:
        """Send a request. begin: when it was due, by `perf_counter`. then: called once the answer has arrived."""
        self._ask, self._begin, self._then = ask, begin, then
        self._transport.write(ask.wire)

    def data_received(self, data: bytes) -> None:
        self._buffer = data = self._buffer + data if self._buffer else data
        head = data.find(b"\r\n\r\n")
        if head < 0:
            return
        at = data.find(b"content-length: ") + 16
        length = int(data[at : data.find(b"\r", at)])
        if len(data) < head + 4 + length:
            return
        self._buffer = b""
        try:
            self._record_answer(data, head)
        except AssertionError as error:
            if not self.closed.done():
                self.closed.set_exception(error)
            self._transport.abort()

    def _record_answer(self, data: bytes, head: int) -> None:
        """Check and count an answer. head: the length of its head in bytes."""
        ask = self._ask
        assert ask is not None, "an answer without a request"
        self._ask = None
        self.load.latency_s.append(time.perf_counter() - self._begin)
        assert data[9:12] == ask.status, data[:600]
        if ask.check is not None:
            self.load.checked += 1
            ask.check(data[:head], data[head + 4 :])
        self._then(self)

    def close(self) -> None:
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            if self._ask is None:
                self.closed.set_result(None)
            else:
                self.closed.set_exception(error or ConnectionError("the server hung up"))
