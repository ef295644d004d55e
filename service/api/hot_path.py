"""The fast answer to `GET /v1/nodes/{node}`, the most frequent request.

Routing and the layers of an application cost ten times as much as sending the prebuilt answer. So the
hot path answers before the request is parsed fully. It needs a plain request for a known node, alone in
its packet. All other requests use the ordinary path, and get equal answers.
"""

import math
import re
import time
from collections.abc import Sequence
from typing import Any

from fleetcast.service.api.routes.context import Context
from fleetcast.service.board.cache import NodeAnswers
from fleetcast.service.http.access import Scope
from fleetcast.service.http.connections import LimitedProtocol
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.table import JSON, NO_STORE

ROUTE = "/v1/nodes/{node}"
BEGIN, END = b"GET /v1/nodes/", b" HTTP/1.1"
HEADERS = re.compile(rb"(?:[\w!#$%&'*+.^`|~-]+:[\t\x20-\x7e\x80-\xff]*\r\n)*\r\n")
SPECIAL = re.compile(
    rb"^(?:content-length|transfer-encoding|expect|upgrade|connection:(?!\s*keep-alive\s*$))",
    re.IGNORECASE | re.MULTILINE,
)
ANSWER_HEADERS = (
    f"content-type: {JSON}\r\ncache-control: {NO_STORE}\r\n"
    "age: %d\r\nx-fleetcast-board: %d\r\ncontent-length: %d\r\n\r\n"
).encode()
MAX_CACHED, MAX_CACHED_BYTES = 1024, 4096  # blocks of headers

Headers = list[tuple[bytes, bytes]]


class HotPath:
    """The hot path of an api process. It makes answers without status line and server headers.

    It caches parsed blocks of headers, because clients repeat them.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._in_order: dict[bytes, Headers] = {}

    def answer_request(self, request: bytes, names: Sequence[str] = ()) -> bytes | None:
        """Return the headers and body for one request, or None if the hot path cannot answer it.

        `names`: the names on the client's certificate.
        """
        if not request.startswith(BEGIN):
            return None
        began = time.perf_counter()
        line, _, block = request.partition(b"\r\n")
        headers = self._in_order.get(block)
        if headers is None:
            headers = self._parse_headers(block)
        if headers is None or not line.endswith(END) or b"%" in line or b"?" in line or not line.isascii():
            return None
        answers = self._find_readable_answers(headers, names)
        body = answers and answers.get_body(line[len(BEGIN) : -len(END)])
        if not answers or not body:
            return None
        metrics, clock = self.context.metrics, self.context.clock
        age_s = max(0, (clock.now_ms() - answers.as_of_ms) // 1000)
        metrics.observe(ROUTE, "GET", 200, time.perf_counter() - began)
        return ANSWER_HEADERS % (age_s, answers.sequence, len(body)) + body

    def _find_readable_answers(self, headers: Headers, names: Sequence[str]) -> NodeAnswers | None:
        """Return the prebuilt answers of all nodes, or None if the caller may not read them.

        Also returns None before the first board, or if the board is unreadable.
        """
        context = self.context
        try:
            if not context.access.is_open:
                context.access.authorize("GET", headers, Scope.READ, names)
            return context.cache.get_node_answers(context.cache.get_board())
        except (Problem, OSError):  # such as no descriptor left: the ordinary way answers with the reason
            return None

    def _parse_headers(self, block: bytes) -> Headers | None:
        """Return the headers with lower-case names.

        Returns None if a header changes the answer, or if the ordinary path refuses the host.
        """
        if len(block) > MAX_CACHED_BYTES or not HEADERS.fullmatch(block) or SPECIAL.search(block):
            return None
        pairs = (line.partition(b":") for line in block.split(b"\r\n") if line)
        headers = [(name.lower(), value.strip()) for name, _, value in pairs]
        try:
            self.context.access.refuse_other_sites("GET", headers)
        except Problem:
            return None
        if len(self._in_order) >= MAX_CACHED:
            self._in_order.clear()
        self._in_order[block] = headers
        return headers


class HotProtocol(LimitedProtocol):
    """A connection that tries the hot path before it parses a request. Subclasses set `hot`."""

    hot: HotPath

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._between = True  # no request has begun that has not ended

    def on_message_begin(self) -> None:
        self._between = False
        super().on_message_begin()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._between = True

    def data_received(self, data: bytes) -> None:
        answer = (
            self.hot.answer_request(data, self.list_certificate_names())
            if self._between and self._can_accept_request()
            else None
        )
        if answer is None:
            super().data_received(data)
            return
        added = b"".join(b"%b: %b\r\n" % header for header in self.server_state.default_headers)
        self.transport.write(b"HTTP/1.1 200 OK\r\n" + added + answer)
        self._deadline = math.inf
        self.on_response_complete()

    def _can_accept_request(self) -> bool:
        """Return whether the connection has a place, is idle, and can be written to."""
        return (
            not self.is_too_many and self._is_idle() and not self.flow.write_paused and not self.transport.is_closing()
        )


def make_hot_protocol(context: Context, base: type[LimitedProtocol]) -> type[HotProtocol]:
    """Make the class for `uvicorn.Config(http=…)`: a subclass of `base` with the hot path."""
    return type("Protocol", (HotProtocol, base), {"hot": HotPath(context)})
