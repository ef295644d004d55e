"""Functions that fetch pages with aiohttp within limits of time and size, for all clients of pages.

Few sites need aiohttp for pages, and its import costs a pipeline a tenth of a second and 8 MiB. So it is
imported only in the functions that use it.
"""

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fleetcast.fleet.redaction import redact_secrets

if TYPE_CHECKING:
    import aiohttp

_CHUNK = 65_536
_GZIP = zlib.MAX_WBITS | 16
_LOOPBACK = ("localhost", "127.", "::1")
_OPEN_METRICS = "application/openmetrics-text"
_ACCEPT = "text/plain;version=0.0.4;q=1, */*;q=0.1"


class FetchError(Exception):
    """A failed fetch of a page.

    `reason` is a short label: timeout, refused, unreachable, disconnected, truncated, http_status, redirect,
    bad_http, bad_gzip, bad_encoding, too_large. `detail` names the URL without its secrets.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = redact_secrets(detail)
        super().__init__(f"{reason}: {self.detail}")


def open_session(timeout_s: float, keepalive_s: float) -> "aiohttp.ClientSession":
    """Open one session for all targets, with connections kept alive.

    It does not limit sockets, because a target has at most one request in flight.
    """
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive_s, ttl_dns_cache=300),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


@dataclass(frozen=True, slots=True)
class FetchedPage:
    """The body of an answer, unpacked, and whether it is OpenMetrics text."""

    body: bytes
    is_open_metrics: bool


async def fetch(session: "aiohttp.ClientSession", url: str, max_body_bytes: int) -> FetchedPage:
    """Fetch a page of at most `max_body_bytes`, both packed and unpacked. Raises FetchError."""
    import aiohttp

    try:
        async with session.get(url, headers=make_request_headers(url), allow_redirects=False) as response:
            _check_status(response)
            body = await _read_body(response, max_body_bytes)
    except TimeoutError:
        raise FetchError("timeout", url) from None
    except aiohttp.ClientConnectorError as error:
        cause = getattr(error, "os_error", error)  # certificate errors carry none
        refused = isinstance(cause, ConnectionRefusedError)
        raise FetchError("refused" if refused else "unreachable", f"{url}: {cause}") from None
    except aiohttp.ClientPayloadError as error:
        raise FetchError("truncated", f"{url}: {error}") from None
    except (aiohttp.ClientConnectionError, OSError) as error:
        raise FetchError("disconnected", f"{url}: {error}") from None
    except (aiohttp.ClientError, ValueError) as error:
        raise FetchError("bad_http", f"{url}: {str(error)[:200]}") from None
    encoding, content_type = (response.headers.get(name, "") for name in ("Content-Encoding", "Content-Type"))
    return unpack_page(body, encoding, content_type, max_body_bytes, url)


def make_request_headers(url: str) -> dict[str, str]:
    """Return the headers of a request for a page.

    They accept gzip over a network, where it saves 95 % of the bytes. On loopback, packing costs more than it
    saves.
    """
    is_loopback = (urlsplit(url).hostname or "").startswith(_LOOPBACK)
    encoding = "identity" if is_loopback else "gzip"
    return {"Accept": _ACCEPT, "Accept-Encoding": encoding, "User-Agent": "Fleetcast"}


def unpack_page(body: bytes, encoding: str, content_type: str, max_body_bytes: int, url: str) -> FetchedPage:
    """Return the page in an answer's body, unpacked. Raises FetchError.

    encoding, content_type: the answer's headers Content-Encoding and Content-Type.
    """
    page = _unpack(body, encoding, max_body_bytes, url)
    return FetchedPage(page, content_type.lower().startswith(_OPEN_METRICS))


def _check_status(response: "aiohttp.ClientResponse") -> None:
    if response.status != 200:
        reason = "redirect" if 300 <= response.status < 400 else "http_status"
        raise FetchError(reason, f"{response.url} answered {response.status}")


async def _read_body(response: "aiohttp.ClientResponse", max_body_bytes: int) -> bytes:
    if (response.content_length or 0) > max_body_bytes:
        raise FetchError("too_large", f"{response.url}: {response.content_length} bytes, limit {max_body_bytes}")
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_chunked(_CHUNK):
        size += len(chunk)
        if size > max_body_bytes:
            raise FetchError("too_large", f"{response.url}: more than {max_body_bytes} bytes")
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _unpack(body: bytes, encoding: str, max_body_bytes: int, url: str) -> bytes:
    """Undo the Content-Encoding of a body. Raises FetchError.

    Unpacking stops at the limit, so a zip bomb cannot fill the memory.
    """
    if encoding.lower() in ("", "identity"):
        return body
    if encoding.lower() not in ("gzip", "x-gzip"):
        raise FetchError("bad_encoding", f"{url}: Content-Encoding {encoding!r}")
    unpacker = zlib.decompressobj(_GZIP)
    try:
        page = unpacker.decompress(body, max_body_bytes + 1)
    except zlib.error as error:
        raise FetchError("bad_gzip", f"{url}: {error}") from None
    if len(page) > max_body_bytes:
        raise FetchError("too_large", f"{url}: more than {max_body_bytes} bytes after unpacking")
    if not unpacker.eof:
        raise FetchError("truncated", f"{url}: the gzip stream ends early")
    return page
