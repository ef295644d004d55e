"""One request to an ASGI application in this process, and what came back: no socket, no HTTP parser, no client."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

App = Callable[[Any, Any, Any], Awaitable[None]]
Message = MutableMapping[str, Any]
MOST_WAIT_S = 60.0  # wall; nothing here waits for anybody, so it means a deadlock


class Unlawful(AssertionError):
    """The application broke a rule of ASGI or of HTTP, or one of ours."""


@dataclass(frozen=True, slots=True)
class Asked:
    """target: path and query, percent-encoded ASCII; `leaves`: the client goes away when its chunks are sent."""

    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    chunks: tuple[bytes, ...] = ()
    leaves: bool = False

    def scope(self) -> dict[str, Any]:
        """As uvicorn makes it."""
        path, _, query = self.target.partition("?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode("ascii"),
            "query_string": query.encode("ascii"),
            "root_path": "",
            "headers": list(self.headers),
            "client": ("127.0.0.1", 4711),
            "server": ("127.0.0.1", 8080),
            "state": {},
        }


@dataclass(slots=True)
class Answered:
    """`status` 0: nothing was answered, as is right where the client went away."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False


class _Exchange:
    """The two channels of one request; holds the application to the order of messages."""

    def __init__(self, asked: Asked) -> None:
        self.chunks = list(asked.chunks) or [b""]
        self.leaves = asked.leaves
        self.answered = Answered()
        self._parts: list[bytes] = []
        self._over = asyncio.Event()

    async def receive(self) -> Message:
        if self.chunks:
            chunk = self.chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(self.chunks) or self.leaves}
        if not self.leaves:
            await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        answered = self.answered
        if message["type"] == "http.response.start":
            if answered.status:
                raise Unlawful("answered twice")
            answered.status = message["status"]
            answered.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            return
        if not answered.status or answered.is_whole:
            raise Unlawful(f"{message['type']} {'after its end' if answered.is_whole else 'before its start'}")
        self._parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            answered.body, answered.is_whole = b"".join(self._parts), True
            self._over.set()


async def ask(app: App, asked: Asked) -> Answered:
    """What the application answers; raises whatever it lets out, and Unlawful where it breaks the protocol."""
    exchange = _Exchange(asked)
    async with asyncio.timeout(MOST_WAIT_S):
        await app(asked.scope(), exchange.receive, exchange.send)
    if not exchange.answered.is_whole and not asked.leaves:
        raise Unlawful("no whole answer")
    return exchange.answered
