"""A client that calls an ASGI application in process: no connection, and nothing but what an application receives."""

from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

HOST = "127.0.0.1"


async def call_application(app: ASGIApp, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    """Send one request. `path` may have a query. Returns the status, and the decoded JSON of the answer."""
    plain, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "headers": [(b"host", HOST.encode()), (b"content-length", b"%d" % len(body))],
        "scheme": "http",
        "path": plain,
        "raw_path": plain.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "server": (HOST, 80),
        "client": (HOST, 123),
    }
    received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return received.pop() if received else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], msgspec.json.decode(b"".join(message.get("body", b"") for message in sent[1:]))
