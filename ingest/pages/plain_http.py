"""The client that fetches exporter pages. Over plain HTTP it needs about half the CPU of aiohttp.

    PageClient.fetch ── http://host:port/path ── _Connection, one request at a time, kept alive per address
                    └─ https, users in URLs, and for UNUSUAL_S peers that httptools cannot read ── aiohttp

Both ways give the same pages and failures. All limits of aiohttp apply here as well: the time, the bytes
of the body as sent and unpacked, and the bytes of the head.
"""

import asyncio
import io
import ipaddress
import logging
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import aiohappyeyeballs
import httptools

from fleetcast.ingest.pages.fetch import FetchedPage, FetchError, fetch, make_request_headers, open_session, unpack_page

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

UNUSUAL_S = 3600.0  # wall; how long aiohttp fetches from a peer whose answer httptools could not read
RESOLVED_S = 300.0  # wall; how long the addresses of a name are used for new connections
NEXT_ADDRESS_S = 0.25  # wall; when the next address of a name is tried while one does not answer
_BUFFER_BYTES = 262_144
_HEAD_BYTES = 8190  # of a head, as aiohttp allows for one line
_OVERHEAD = 16  # bytes on the wire per byte of a body: a chunk of one byte takes six
_ADDRCONFIG = socket.AI_ADDRCONFIG & getattr(socket, "AI_MASK", -1)  # 0 where getaddrinfo does not support it

_PLAIN_URL = re.compile(
    r"http://(?:[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?(?:/[a-z0-9._~!$&'()*+,;=:@/?%-]*)?",
    re.IGNORECASE | re.ASCII,
)
_NUMERIC_HOST = re.compile(r"[0-9][0-9a-fx.]*")  # the system reads 127.1 and 0x7f000001 as addresses, too

Address = tuple[str, int]


class _UnusualAnswer(Exception):
    """An answer that httptools cannot read, or one with an endless head. aiohttp may be able to read it."""


@dataclass(frozen=True, slots=True)
class _Request:
    address: Address
    data: bytes


@lru_cache(maxsize=32_768)
def _make_plain_request(url: str) -> _Request | None:
    """Return the request for a URL of plain HTTP, or None if the URL needs aiohttp."""
    if not _PLAIN_URL.fullmatch(url) or "/." in url:
        return None
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
        if _NUMERIC_HOST.fullmatch(host):
            ipaddress.IPv4Address(host)
    except ValueError:
        return None
    if port == 0:
        return None
    port = port or 80
    named = f"[{host}]" if ":" in host else host
    headers = {"Host": named if port == 80 else f"{named}:{port}", **make_request_headers(url)}
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return _Request((host, port), "\r\n".join(lines).encode())


@dataclass(frozen=True, slots=True)
class _Answer:
    """The headers, with names in lower case, and the body of an answer with status 200."""

    headers: dict[bytes, bytes]
    body: bytes

    def get_header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("utf-8", "surrogateescape")


class _Connection(asyncio.BufferedProtocol):
    """A connection that carries one request at a time. The parser calls the methods `on_*`.

    All connections of a client share one buffer: the event loop fills it and the parser reads it at once.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._answer: asyncio.Future[None] | None = None  # None: no request is in flight
        self._has_spoken_unasked = False

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def close(self) -> None:
        self._transport.abort()

    async def send_request(self, url: str, request: bytes, max_body_bytes: int) -> _Answer:
        """Send a request and return its answer. Raises FetchError or _UnusualAnswer.

        An error or a cancellation closes the connection, except in one case. After a complete answer with a status
        other than 200, the method raises FetchError and leaves the connection open.
        """
        if self._has_spoken_unasked:
            raise _UnusualAnswer("bytes before the request")
        if not self.is_open:
            raise FetchError("disconnected", f"{url}: Server disconnected")
        self._parser = httptools.HttpResponseParser(self)
        self._url, self._limit = url, max_body_bytes
        self._headers: dict[bytes, bytes] = {}
        self._has_head = self._is_complete = False
        self._body = io.BytesIO()
        self._wire_bytes = self._body_bytes = 0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._answer
            return _Answer(self._headers, self._body.getvalue())
        except asyncio.CancelledError:
            self._answer = None
            self.close()
            raise
        finally:  # the parser refers to this connection: without it, no garbage collector is needed to free both
            del self._parser, self._headers, self._body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        answer = self._answer
        if answer is None:
            self._has_spoken_unasked = True
            self.close()
            return
        self._wire_bytes += nbytes
        began_in_head = not self._has_head
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._close_with_error(_UnusualAnswer(str(error)))
            return
        if answer.done():  # its status is not 200, or the fetch was cancelled
            if not self._is_complete:
                self.close()
        elif self._wire_bytes > _HEAD_BYTES + _OVERHEAD * self._body_bytes:
            why = f"more than {_HEAD_BYTES} bytes of headers and trailers"
            self._close_with_error(
                _UnusualAnswer(why) if began_in_head else FetchError("bad_http", f"{self._url}: {why}")
            )
        elif self._is_complete:
            self._complete_answer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is None:
            return
        if not self._has_head:
            self._close_with_error(FetchError("disconnected", f"{self._url}: {exc or 'Server disconnected'}"))
        elif exc is None and self._headers.keys().isdisjoint((b"content-length", b"transfer-encoding")):
            self._complete_answer()  # the end of the connection is the end of the body
        else:
            end = f"ends after {self._body_bytes} bytes of its body{f': {exc}' if exc else ''}"
            self._close_with_error(FetchError("truncated", f"{self._url}: {end}"))

    def on_message_begin(self) -> None:
        if self._is_complete:  # a second answer to one request
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # a line behind the body is no header
            self._headers.setdefault(name.lower(), value.strip())

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._has_head:
            return
        if 100 <= status < 200:  # such as 100-continue: the answer is yet to come
            self._headers.clear()
            return
        self._has_head = True
        if status != 200:
            reason = "redirect" if 300 <= status < 400 else "http_status"
            self._set_error(FetchError(reason, f"{self._url} answered {status}"))
        elif self._headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            self._close_with_error(_UnusualAnswer(f"Transfer-Encoding {self._headers[b'transfer-encoding']!r}"))
        elif (length := int(self._headers.get(b"content-length", b"0"))) > self._limit:
            self._close_with_error(FetchError("too_large", f"{self._url}: {length} bytes, limit {self._limit}"))

    def on_body(self, body: bytes) -> None:
        if self._answer is None or self._is_complete:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._limit:
            self._close_with_error(FetchError("too_large", f"{self._url}: more than {self._limit} bytes"))
        else:
            self._body.write(body)

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head
        if self._is_complete and not self._parser.should_keep_alive():
            self.close()

    def _complete_answer(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(None)

    def _close_with_error(self, error: Exception) -> None:
        self.close()
        self._set_error(error)

    def _set_error(self, error: Exception) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)


async def resolve_host(host: str, port: int) -> Sequence[aiohappyeyeballs.AddrInfoType]:
    """Return the socket addresses of a host name and port. Raises OSError if the name is unknown."""
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=_ADDRCONFIG)


class _AddressCache:
    """A cache of the addresses of host names. An answer is used for RESOLVED_S.

    All fetches from one host share one lookup. If these fetches time out, the lookup continues, so that the next
    fetch finds its answer.
    """

    def __init__(self) -> None:
        self._known: dict[Address, tuple[float, Sequence[aiohappyeyeballs.AddrInfoType]]] = {}
        self._lookups: dict[Address, asyncio.Task[Sequence[aiohappyeyeballs.AddrInfoType]]] = {}

    async def find_addresses(self, address: Address) -> Sequence[aiohappyeyeballs.AddrInfoType]:
        """Return the socket addresses of a host and port.

        Raises OSError if the host name is unknown, and ValueError if the text cannot be a host name.
        """
        until, found = self._known.get(address, (0.0, []))
        if until > asyncio.get_running_loop().time():
            return found
        try:
            return socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:  # a name
            pass
        if address not in self._lookups:
            self._lookups[address] = asyncio.create_task(resolve_host(*address))
            self._lookups[address].add_done_callback(partial(self._record_addresses, address))
        return await asyncio.shield(self._lookups[address])

    def _record_addresses(
        self, address: Address, lookup: asyncio.Task[Sequence[aiohappyeyeballs.AddrInfoType]]
    ) -> None:
        del self._lookups[address]
        if not lookup.cancelled() and lookup.exception() is None:
            self._known[address] = (asyncio.get_running_loop().time() + RESOLVED_S, lookup.result())

    def forget_addresses(self, address: Address) -> None:
        self._known.pop(address, None)

    def drop_expired_addresses(self, now: float) -> None:
        self._known = {address: entry for address, entry in self._known.items() if entry[0] > now}

    async def close(self) -> None:
        """Cancel the lookups that still run."""
        lookups = list(self._lookups.values())
        for lookup in lookups:
            lookup.cancel()
        await asyncio.gather(*lookups, return_exceptions=True)


class PageClient:
    """A client that fetches pages. It keeps a connection alive for `keepalive_s` after an answer.

    It does not limit connections, because a target has at most one request in flight. Create it in a running
    event loop.
    """

    def __init__(self, timeout_s: float, keepalive_s: float) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._timeout_s, self._keepalive_s = timeout_s, keepalive_s
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._idle: dict[Address, list[tuple[float, _Connection]]] = {}  # with the time of the last answer
        self._names = _AddressCache()
        self._unusual: dict[str, float] = {}  # URL -> until when aiohttp fetches it
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(keepalive_s, self._close_idle_connections)

    async def fetch(self, url: str, max_body_bytes: int) -> FetchedPage:
        """Fetch a page of at most `max_body_bytes`, both packed and unpacked. Raises FetchError."""
        request = _make_plain_request(url)
        if request is None or url in self._unusual:
            return await self._fetch_with_session(url, max_body_bytes)
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return await self._fetch_plain_page(url, request, max_body_bytes)
                except _UnusualAnswer as error:
                    logger.info("%s: %s: aiohttp fetches it for %.0f s", url, error, UNUSUAL_S)
                    self._unusual[url] = self._loop.time() + UNUSUAL_S
                    return await self._fetch_with_session(url, max_body_bytes)
        except TimeoutError:
            raise FetchError("timeout", url) from None

    async def close(self) -> None:
        """Close all connections. Requests in flight must have been cancelled."""
        self._timer.cancel()
        for connections in self._idle.values():
            for _, connection in connections:
                connection.close()
        self._idle.clear()
        await self._names.close()
        if self._session is not None:
            await self._session.close()
        await asyncio.sleep(0)  # the event loop closes the sockets

    async def _fetch_with_session(self, url: str, max_body_bytes: int) -> FetchedPage:
        if self._session is None:
            self._session = open_session(self._timeout_s, self._keepalive_s)
        return await fetch(self._session, url, max_body_bytes)

    async def _fetch_plain_page(self, url: str, request: _Request, max_body_bytes: int) -> FetchedPage:
        """Fetch a page over an idle connection, or over a new one.

        If the peer closes the connection, tries once more over a new one. Raises FetchError.
        """
        connection = self._pop_idle_connection(request.address) or await self._connect(url, request.address)
        try:
            answer = await self._send_and_release(connection, url, request, max_body_bytes)
        except FetchError as error:
            if error.reason != "disconnected":
                raise
            connection = await self._connect(url, request.address)
            answer = await self._send_and_release(connection, url, request, max_body_bytes)
        encoding, content_type = answer.get_header(b"content-encoding"), answer.get_header(b"content-type")
        return unpack_page(answer.body, encoding, content_type, max_body_bytes, url)

    async def _send_and_release(
        self, connection: _Connection, url: str, request: _Request, max_body_bytes: int
    ) -> _Answer:
        """Send a request and return its answer. Afterwards the connection is idle if it is still open."""
        try:
            return await connection.send_request(url, request.data, max_body_bytes)
        finally:
            if connection.is_open:
                self._idle.setdefault(request.address, []).append((self._loop.time(), connection))

    def _pop_idle_connection(self, address: Address) -> _Connection | None:
        """Return the open idle connection that was used last, or None if there is none."""
        connections = self._idle.get(address, [])
        while connections:
            _, connection = connections.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self, url: str, address: Address) -> _Connection:
        """Open a connection.

        Raises FetchError `refused`, `unreachable`, or `bad_http` if the name cannot be looked up. The next attempt
        looks the name up again, also after a timeout.
        """
        try:
            found = await self._names.find_addresses(address)
            sock = await aiohappyeyeballs.start_connection(found, happy_eyeballs_delay=NEXT_ADDRESS_S)
            _, connection = await self._loop.create_connection(lambda: _Connection(self._buffer), sock=sock)
        except BaseException as error:
            self._names.forget_addresses(address)
            if isinstance(error, ValueError):  # such as UnicodeError, for an empty label
                raise FetchError("bad_http", f"{url}: {error}") from None
            if isinstance(error, OSError | RuntimeError):  # uvloop raises RuntimeError for a socket that is in use
                refused = isinstance(error, ConnectionRefusedError)
                raise FetchError("refused" if refused else "unreachable", f"{url}: {error}") from None
            raise
        return connection

    def _close_idle_connections(self) -> None:
        """Close the connections that no request has used for `keepalive_s`, and schedule the next call."""
        now = self._loop.time()
        for address, connections in list(self._idle.items()):
            fresh = []
            for used_at, connection in connections:
                if connection.is_open and used_at > now - self._keepalive_s:
                    fresh.append((used_at, connection))
                else:
                    connection.close()
            if fresh:
                self._idle[address] = fresh
            else:
                del self._idle[address]
        self._names.drop_expired_addresses(now)
        self._unusual = {url: until for url, until in self._unusual.items() if until > now}
        self._timer = self._loop.call_later(self._keepalive_s, self._close_idle_connections)
