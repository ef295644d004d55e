"""A server of exporter pages over HTTP on loopback: `/{node}/dcgm/metrics` and `/{node}/node/metrics`.

The server uses plain asyncio, to serve hundreds of 75 kB pages a second. A line that it broke on purpose is
counted only after the response with that line has been sent.
"""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from fleetcast.fleet.clock import Clock

ADVANCE_MS = 2000
LONGEST_REQUEST = 65_536
BLANK_WAY = 3  # DCGM prints 9223372036854775794 where it has no value: missing, not bad
BREAKABLE = (
    b"DCGM_FI_DEV_POWER_USAGE{",
    b"DCGM_FI_DEV_GPU_TEMP{",
    b"DCGM_FI_DEV_MEM_COPY_UTIL{",
    b"node_infiniband_port_data_received_bytes_total{",
)


class PageSource(Protocol):
    """The interface of a source of pages: a simulated fleet or recorded runs."""

    time_ms: int | None

    def list_targets(self) -> Iterable[tuple[str, str]]:
        """Return the (node, exporter) pair of every page."""

    def advance(self, now_ms: int) -> None: ...

    def render_page(self, node: str, exporter: str, now_ms: int | None = None) -> bytes: ...

    def is_answering(self, node: str, exporter: str) -> bool: ...

    def get_delay_s(self, node: str) -> float: ...


@dataclass(slots=True)
class Breakage:
    """A generator of broken lines: it breaks one line in a `share` of the pages.

    One time in four it only blanks the number of a DCGM line, as DCGM does.
    """

    rng: np.random.Generator
    share: float = 0.003

    def break_line(self, page: bytes) -> tuple[bytes, int]:
        """Break a line of the page with probability `share`.

        Returns the page, and the number of its lines that no decoder can read.
        """
        if self.rng.random() >= self.share:
            return page, 0
        name = BREAKABLE[int(self.rng.integers(len(BREAKABLE)))]
        begins = [at + 1 for at in _find_occurrences(page, b"\n" + name)]
        if not begins:
            return page, 0
        begin = begins[int(self.rng.integers(len(begins)))]
        end = page.index(b"\n", begin)
        way = int(self.rng.integers(4 if name.startswith(b"DCGM") else BLANK_WAY))
        return page[:begin] + _damage_line(page[begin:end], way) + page[end:], int(way != BLANK_WAY)


def _find_occurrences(page: bytes, text: bytes) -> list[int]:
    found = []
    at = page.find(text)
    while at >= 0:
        found.append(at)
        at = page.find(text, at + 1)
    return found


def _damage_line(line: bytes, way: int) -> bytes:
    """Break a line in one of four ways.

    It is cut off within the labels, loses its number, leaves a label open, or gets DCGM's number for "no data".
    """
    if way == 0:
        return line[: line.index(b"{") + 9]
    if way == 1:
        return line[: line.rindex(b"}") + 1] + b" n/a"
    if way == BLANK_WAY:
        return line[: line.rindex(b"}") + 1] + b" 9223372036854775794"
    return line.replace(b'",', b",", 1)


class ExporterServer:
    """A server of a source's pages at the clock's time. Requests advance the source."""

    def __init__(self, source: PageSource, clock: Clock, breakage: Breakage | None = None) -> None:
        self.source = source
        self.bad_records_injected = 0
        self.pages_served = 0
        self._clock = clock
        self._breakage = breakage
        self._targets = {f"/{node}/{exporter}/metrics": (node, exporter) for node, exporter in source.list_targets()}
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    @property
    def paths(self) -> list[str]:
        return list(self._targets)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def list_urls(self, host: str = "127.0.0.1") -> list[str]:
        """Return the URLs of all pages, as scrape targets. The server must be listening."""
        return [f"http://{host}:{self.port}{path}" for path in self._targets]

    async def start(self, host: str, port: int) -> None:
        """Start to listen. Port 0 chooses a free port."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), host, port)

    async def close(self) -> None:
        """Stop listening and drop open connections."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.abort_connection()
            await self._server.wait_closed()

    def make_response(self, path: str) -> "ExporterResponse":
        """Return the response to a GET request for `path`."""
        if path == "/":
            return ExporterResponse(200, json.dumps(self._make_status()).encode(), content_type=b"application/json")
        target = self._targets.get(path)
        if target is None:
            return ExporterResponse(404, b"no such exporter\n")
        now_ms = self._clock.now_ms()
        if self.source.time_ms is None or now_ms - self.source.time_ms >= ADVANCE_MS:
            self.source.advance(now_ms)
        node, exporter = target
        if not self.source.is_answering(node, exporter):
            return ExporterResponse(0, b"")
        page = self.source.render_page(node, exporter, now_ms)
        delay_s = self.source.get_delay_s(node) if exporter == "dcgm" else 0.0
        if self._breakage is None or delay_s > 0:
            return ExporterResponse(200, page, delay_s=delay_s)
        page, bad = self._breakage.break_line(page)
        return ExporterResponse(200, page, bad)

    def _make_status(self) -> dict[str, int]:
        return {"bad_records_injected": self.bad_records_injected, "pages": self.pages_served}


@dataclass(frozen=True, slots=True)
class ExporterResponse:
    """The response to one request.

    Status 0 closes the connection without an answer, as a host that is gone does.
    """

    status: int
    body: bytes
    bad: int = 0
    delay_s: float = 0.0
    content_type: bytes = b"text/plain; version=0.0.4; charset=utf-8"

    def format_head(self) -> bytes:
        reason = {200: b"OK", 404: b"Not Found", 405: b"Method Not Allowed", 503: b"Service Unavailable"}[self.status]
        return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (
            self.status,
            reason,
            self.content_type,
            len(self.body),
        )


class _Connection(asyncio.Protocol):
    """One keep-alive connection. It answers requests in order."""

    def __init__(self, server: ExporterServer) -> None:
        self._server = server
        self._buffer = b""
        self._unsent = (0, 0)  # pages and bad lines written but not yet taken by the kernel
        self._waiting: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)
        self._server._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server._connections.discard(self)
        if self._waiting is not None:
            self._waiting.cancel()
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._serve_requests()
        if len(self._buffer) > LONGEST_REQUEST:
            self.abort_connection()

    def resume_writing(self) -> None:
        """Count the written pages as sent, because the write buffer is empty."""
        self._count_sent_pages()

    def abort_connection(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _serve_requests(self) -> None:
        while self._waiting is None and self._transport is not None and b"\r\n\r\n" in self._buffer:
            head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
            method, _, rest = head.partition(b" ")
            path = rest.partition(b" ")[0].decode("latin-1").partition("?")[0]
            answer = self._server.make_response(path) if method == b"GET" else ExporterResponse(405, b"GET only\n")
            if answer.delay_s > 0:
                self._waiting = asyncio.get_running_loop().call_later(
                    answer.delay_s, self._send_delayed_response, answer
                )
            else:
                self._send_response(answer)

    def _send_delayed_response(self, answer: ExporterResponse) -> None:
        self._waiting = None
        self._send_response(answer)
        self._serve_requests()

    def _send_response(self, answer: ExporterResponse) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if answer.status == 0:
            transport.abort()
            return
        pages, bad = self._unsent
        self._unsent = (pages + (answer.status == 200), bad + answer.bad)
        transport.write(answer.format_head() + answer.body)
        if transport.get_write_buffer_size() == 0:
            self._count_sent_pages()

    def _count_sent_pages(self) -> None:
        pages, bad = self._unsent
        self._unsent = (0, 0)
        self._server.pages_served += pages
        self._server.bad_records_injected += bad
