"""The HTTP connections of a server: their deadlines, and the refusal of connections without a place.

This is uvicorn's protocol with three deadlines in wall time. `header_timeout_s` limits the head of a
request, and `body_timeout_s` its body. `WRITE_TIMEOUT_S` limits how long a client may receive nothing of
an answer. All connections are checked once a second, so a request needs no timer of its own.
`service/http/connection_pool.py` decides which connections get a place.

    too many connections                    503 and Retry-After
    too many connections from one address   429 and Retry-After
    a head that is too large                431
    a head or body that arrives too slowly  408
    a message that is not HTTP              400
"""

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fleetcast.service.http.certificates import NAMES, ClientCertificate, read_client_certificate
from fleetcast.service.http.connection_pool import ConnectionLimits, ConnectionPlace, ConnectionPool
from fleetcast.service.http.door import Listener
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.request_head import RequestHead, read_head
from fleetcast.service.http.tls import Tls

MAX_HEAD_BYTES = 65_536
WRITE_TIMEOUT_S = 30.0
TICK_S = 1.0
TICKS_PER_TICK = 10  # what uvicorn counts meanwhile: its own main loop ticks ten times a second


class LimitedProtocol(HttpToolsProtocol):
    """One HTTP connection with limits.

    Subclasses set `pool`, `refused` and `turned_away`. `refused` is called with the status of each refusal.
    `turned_away` is called for a connection without a place, with its request and the names on its
    certificate.
    """

    pool = ConnectionPool(ConnectionLimits())
    refused: Callable[[int], None] = staticmethod(lambda status: None)
    turned_away: Callable[[RequestHead, Sequence[str]], None] = staticmethod(lambda head, names: None)

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.limits = self.pool.limits
        self.place: ConnectionPlace | None = None  # set by the door that accepted the connection
        self._in_head = False
        self._head_bytes = 0
        self._deadline = time.monotonic() + self.limits.header_timeout_s  # of a head or body; inf while we answer
        self._unsent = 0
        self._unsent_since = 0.0
        self.is_too_many = False
        self.certificate: ClientCertificate | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.certificate = read_client_certificate(transport.get_extra_info("ssl_object"))
        if self.place is None:  # a server of the event loop accepted it
            self.place = self.pool.add_connection(self.client[0] if self.client else "", self._yield_place)
        self.place.close = self._yield_place
        self.is_too_many = self.place.refusal != ""
        if not self.place.is_open:  # it gave way while it was handed over
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.place is not None:
            self.pool.remove_connection(self.place)

    def _yield_place(self) -> None:
        """Close the connection so that another one gets its place.

        If the client has begun a request, answer it first.
        """
        if self._in_head and not self.is_too_many and self.scheme == "http":
            self.refuse(503, "too_many_connections", "the place was needed before the head of the request was complete")
        elif self.is_too_many or self.scheme == "https" or self.cycle is None:
            self.transport.abort()
        else:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.is_too_many:
            if not self.transport.is_closing():
                self._refuse_excess_connection(data)
            return
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.refuse(431, "head_too_large", f"the head of a request has at most {MAX_HEAD_BYTES:,} bytes")
        elif self._deadline == math.inf and self._is_idle():  # bytes that began nothing
            self._deadline = time.monotonic() + self.limits.header_timeout_s

    def _refuse_excess_connection(self, data: bytes) -> None:
        assert self.place is not None
        head = read_head(data)
        if head is not None:
            self.turned_away(head, self.list_certificate_names())
        if self.place.refusal == "address":
            most, address = self.limits.max_connections_per_address, self.place.address
            self.refuse(429, "too_many_connections", f"{most:,} connections of {address} are open: use those")
        else:
            self.refuse(503, "too_many_connections", f"{self.limits.max_connections:,} connections are open")

    def list_certificate_names(self) -> tuple[str, ...]:
        """Return the names on the client's certificate, if any."""
        return self.certificate.list_valid_names() if self.certificate is not None else ()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.certificate is not None:
            cast(dict[str, Any], self.scope)[NAMES] = self.list_certificate_names()
        self._in_head, self._head_bytes = True, 0
        if self._deadline == math.inf:
            self._deadline = time.monotonic() + self.limits.header_timeout_s

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._deadline = time.monotonic() + self.limits.body_timeout_s
        if self.place is not None:
            self.pool.mark_working(self.place)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._deadline = math.inf
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.place is not None and self._is_idle():
            self.pool.mark_resting(self.place)

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "not_http", msg)

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def close_if_overdue(self, now: float) -> None:
        """Close the connection if it has passed a deadline. `now`: seconds of the monotonic clock."""
        if self.transport.is_closing():
            return
        if now > self._deadline:
            self._end_overdue_request(now)
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent:
            self._unsent_since = now
        elif now - self._unsent_since > WRITE_TIMEOUT_S:
            self.refused(408)
            self.transport.abort()
        self._unsent = unsent

    def _end_overdue_request(self, now: float) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self._deadline = now + self.limits.body_timeout_s
        elif not self._in_head and self._is_idle():  # nothing came, or the rest of a body that was answered already
            self.transport.close()
        else:
            part = "head" if self._in_head else "body"
            self.refuse(408, "too_slow", f"the {part} of the request did not arrive in time")

    def refuse(self, status: int, code: str, detail: str) -> None:
        """Answer with a problem, and close the connection. If another answer has begun, only close it."""
        self.refused(status)
        head_is_next = self._is_idle() and not self.pipeline
        body_is_read = not self._in_head and not self.pipeline and self.cycle and not self.cycle.response_started
        if head_is_next or body_is_read:
            self.transport.write(_encode_answer(Problem(status, code, detail, headers=HEADERS.get(status, {}))))
        self.transport.close()


HEADERS = {503: {"retry-after": "5"}, 429: {"retry-after": "5"}}


def _encode_answer(problem: Problem) -> bytes:
    """Encode a problem as an HTTP answer that closes the connection."""
    response = problem.make_response("")
    head = [b"HTTP/1.1 %d %b" % (problem.status, problem.make_body("")["title"].encode())]
    head += [name + b": " + value for name, value in (*response.raw_headers, (b"connection", b"close"))]
    return b"\r\n".join([*head, b"", bytes(response.body)])


def make_limited_protocol(
    pool: ConnectionPool,
    refused: Callable[[int], None] = lambda status: None,
    turned_away: Callable[[RequestHead, Sequence[str]], None] = lambda head, names: None,
) -> type[LimitedProtocol]:
    """Make the protocol class for `uvicorn.Config(http=…)`. LimitedProtocol describes the arguments."""
    own = {"pool": pool, "refused": staticmethod(refused), "turned_away": staticmethod(turned_away)}
    return type("Protocol", (LimitedProtocol,), own)


class LimitedServer(uvicorn.Server):
    """A server of one listening socket. It also checks the deadlines of its connections.

    It installs no signal handlers, because uvicorn's handlers would raise the signal again at the end. It
    calls `on_started` once it can answer.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        sock: socket.socket,
        pool: ConnectionPool,
        tls: Tls | None = None,
        dropped: Callable[[], None] = lambda: None,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        self._exit = asyncio.Event()
        super().__init__(config)
        self._on_started = on_started
        self.door = Listener(sock, pool, self._make_protocol, tls, dropped)

    def _make_protocol(self, place: ConnectionPlace) -> LimitedProtocol:
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        made = cast(LimitedProtocol, self.config.http_protocol_class(config=self.config, **state))  # type: ignore[call-arg]
        made.place = place
        return made

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self.door.open()
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.door.close()
        await super().shutdown(sockets=[])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def should_exit(self) -> bool:
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()
        else:
            self._exit.clear()

    async def main_loop(self) -> None:
        """Run `on_tick` about once a second until `should_exit` is set. Setting it ends the loop at once."""
        counter = 0
        while not await self.on_tick(counter):
            counter += TICKS_PER_TICK
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit.wait(), TICK_S)

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        for connection in list(self.server_state.connections):
            if isinstance(connection, LimitedProtocol):
                connection.close_if_overdue(now)
        return await super().on_tick(counter)
