"""The HTTP connections of a server: how many there may be, and how long each may take. Times are wall time.

uvicorn's protocol with deadlines: `header_timeout_s` for a request's head, `body_timeout_s` for its body,
`WRITE_TIMEOUT_S` to take some of an answer. One check of all connections a second: a request costs no timer.

    too many connections    503 and Retry-After    a head or body that comes too slowly    408
    too many of an address  429 and Retry-After    what is no HTTP                         400
    a head too large        431
"""

import contextlib
import logging
import math
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.http.addresses import LOOPBACK, Networks, counted_as
from service.http.certificates import NAMES, ClientCertificate, client_certificate
from service.http.problems import Problem

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 65_536
WRITE_TIMEOUT_S = 30.0
TURNED_AWAY = 256  # connections above the limit that are told so; those above are dropped
TURNED_AWAY_EACH = 8  # the same of one address
SPARE_FILES = 256  # descriptors for everything that is no connection
SWEEP_TICKS = 10  # uvicorn's main loop ticks ten times a second


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What the clients of one server may take up; no address that is `trusted` has too many connections."""

    max_connections: int = 1024
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    max_connections_per_address: int = 256
    trusted: Networks = field(default_factory=lambda: Networks(LOOPBACK))


class LimitedProtocol(HttpToolsProtocol):
    """One connection; subclasses set `limits`, and `refused`, which hears the status of each refusal."""

    limits = ConnectionLimits()
    of_address: ClassVar[Counter[tuple[str, bool]]] = Counter()  # by address and `is_too_many`: open connections
    refused: Callable[[int], None] = staticmethod(lambda status: None)

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._in_head = False
        self._head_bytes = 0
        self._deadline = time.monotonic() + self.limits.header_timeout_s  # of a head or body; inf while we answer
        self._unsent = 0
        self._unsent_since = 0.0
        self.is_too_many = False
        self._address = ""  # that the connection is counted with; empty: with none
        self._of_crowd = False
        self.certificate: ClientCertificate | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        host = self.client[0] if self.client else ""
        self.certificate = client_certificate(transport.get_extra_info("ssl_object"))
        self._address = counted_as(host) if host and host not in self.limits.trusted else ""
        self._of_crowd = self._is_crowded(False, self.limits.max_connections_per_address)
        self.is_too_many = self._of_crowd or self._comes_last()
        too_many = len(self.connections) > self.limits.max_connections + TURNED_AWAY
        if too_many or (self.is_too_many and self._is_crowded(True, TURNED_AWAY_EACH)):
            transport.abort()
        self.of_address[self._address, self.is_too_many] += 1

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        counted = self._address, self.is_too_many
        self.of_address[counted] -= 1
        if self.of_address[counted] <= 0:
            del self.of_address[counted]

    def _is_crowded(self, is_too_many: bool, most: int) -> bool:
        """Whether so many connections of the same address are open."""
        return self._address != "" and self.of_address[self._address, is_too_many] >= most

    def _comes_last(self) -> bool:
        """Whether others hold all places: an open connection keeps its own."""
        most = self.limits.max_connections
        return len(self.connections) > most < sum(not getattr(one, "is_too_many", False) for one in self.connections)

    def data_received(self, data: bytes) -> None:
        if self.is_too_many:
            self._refuse_one_too_many()
            return
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.refuse(431, "head_too_large", f"the head of a request has at most {MAX_HEAD_BYTES:,} bytes")
        elif self._deadline == math.inf and self._idle():  # bytes that began nothing
            self._deadline = time.monotonic() + self.limits.header_timeout_s

    def _refuse_one_too_many(self) -> None:
        if self._of_crowd:
            most = self.limits.max_connections_per_address
            self.refuse(429, "too_many_connections", f"{most:,} connections of {self._address} are open: use those")
        else:
            self.refuse(503, "too_many_connections", f"{self.limits.max_connections:,} connections are open")

    def names(self) -> tuple[str, ...]:
        """The names on the client's certificate, if any."""
        return self.certificate.names() if self.certificate is not None else ()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.certificate is not None:
            cast(dict[str, Any], self.scope)[NAMES] = self.names()
        self._in_head, self._head_bytes = True, 0
        if self._deadline == math.inf:
            self._deadline = time.monotonic() + self.limits.header_timeout_s

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._deadline = time.monotonic() + self.limits.body_timeout_s
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._deadline = math.inf
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "not_http", msg)

    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def sweep(self, now: float) -> None:
        """Close the connection if it is late; `now` is the monotonic clock."""
        if self.transport.is_closing():
            return
        if now > self._deadline:
            self._expire(now)
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent:
            self._unsent_since = now
        elif now - self._unsent_since > WRITE_TIMEOUT_S:
            self.refused(408)
            self.transport.abort()
        self._unsent = unsent

    def _expire(self, now: float) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self._deadline = now + self.limits.body_timeout_s
        elif not self._in_head and self._idle():  # nothing came, or the rest of a body that was answered already
            self.transport.close()
        else:
            part = "head" if self._in_head else "body"
            self.refuse(408, "too_slow", f"the {part} of the request did not arrive in time")

    def refuse(self, status: int, code: str, detail: str) -> None:
        """Answer with a problem, unless another answer is under way, and close."""
        self.refused(status)
        head_is_next = self._idle() and not self.pipeline
        body_is_read = not self._in_head and not self.pipeline and self.cycle and not self.cycle.response_started
        if head_is_next or body_is_read:
            self.transport.write(_answer(Problem(status, code, detail, headers=HEADERS.get(status, {}))))
        self.transport.close()


HEADERS = {503: {"retry-after": "5"}, 429: {"retry-after": "5"}}


def _answer(problem: Problem) -> bytes:
    """The bytes of an answer after which the connection is closed."""
    response = problem.response("")
    head = [b"HTTP/1.1 %d %b" % (problem.status, problem.body("")["title"].encode())]
    head += [name + b": " + value for name, value in (*response.raw_headers, (b"connection", b"close"))]
    return b"\r\n".join([*head, b"", bytes(response.body)])


def protocol_of(
    limits: ConnectionLimits, refused: Callable[[int], None] = lambda status: None
) -> type[LimitedProtocol]:
    """The class for `uvicorn.Config(http=…)`."""
    own = {"limits": limits, "of_address": Counter(), "refused": staticmethod(refused)}
    return type("Protocol", (LimitedProtocol,), own)


class LimitedServer(uvicorn.Server):
    """Looks after its connections, and leaves the signals to its caller: uvicorn would raise them again at its end.

    Calls `on_started` once it answers.
    """

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None] | None = None) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_started is not None:
            self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, LimitedProtocol):
                    connection.sweep(now)
        return await super().on_tick(counter)


def allow_files(connections: int) -> None:
    """Raise the soft limit of open files to what so many connections need, as far as the hard limit lets us."""
    wanted = connections + TURNED_AWAY + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            logger.warning("%d open files are allowed, %d connections may need %d", allowed, connections, wanted)
