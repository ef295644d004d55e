"""Parsing of an HTTP request's head, for connections that are refused."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import httptools


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The method, path and headers of a request. Header names are in lower case."""

    method: str
    path: str
    headers: Sequence[tuple[bytes, bytes]]


class _Recorder:
    """A set of callbacks for the HTTP parser. They record the parts of the head."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


def read_head(data: bytes) -> RequestHead | None:
    r"""Parse the head of the first request in `data`. Returns None if it is incomplete or not HTTP.

    >>> read_head(b"POST /v1/events?x HTTP/1.1\r\nHost: a\r\n\r\n")
    RequestHead(method='POST', path='/v1/events', headers=[(b'host', b'a')])
    """
    recorder = _Recorder()
    parser = httptools.HttpRequestParser(recorder)
    with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
        parser.feed_data(data)
    if not recorder.is_complete:
        return None
    try:
        path = httptools.parse_url(recorder.url).path or b""
    except httptools.HttpParserInvalidURLError:
        return None
    return RequestHead(parser.get_method().decode("ascii"), path.decode("latin-1"), recorder.headers)
