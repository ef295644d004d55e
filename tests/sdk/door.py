"""A small HTTP server that takes events in as the service does, or fails as it is told."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Door:
    """`script`: the statuses of the next answers, then 202; `opens`: no answer before that."""

    script: list[int] = field(default_factory=list)
    opens: threading.Event | None = None
    rejects: int = 0
    bodies: list[list[dict[str, Any]]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    answer: Any = None
    url: str = ""

    @property
    def events(self) -> list[dict[str, Any]]:
        """Every event that was taken, once."""
        seen = {(event["job"], event["attempt"], event["sequence"]): event for body in self.bodies for event in body}
        return list(seen.values())

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        self.tokens.append(handler.headers.get("authorization", ""))
        self.paths.append(f"{handler.command} {handler.path}")
        if self.opens is not None:
            self.opens.wait(60)
        status = self.script.pop(0) if self.script else 202
        if status == 202 and raw:
            self.bodies.append(json.loads(raw))
        body: Any = self.answer
        if body is None and status == 202:
            rejected = [{"index": index, "reason": "no"} for index in range(self.rejects)]
            body = {"accepted": 1, "duplicates": 0, "rejected": rejected}
        if status >= 400:
            body = {"type": "urn:fleetcast:problem:told", "status": status, "detail": "as told", "errors": []}
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("content-length", str(len(data)))
        if status == 503:
            handler.send_header("retry-after", "0")
        handler.end_headers()
        handler.wfile.write(data)


@contextmanager
def opened(door: Door) -> Iterator[Door]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            with suppress(ConnectionError):  # it gave up waiting
                door.take(self)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    door.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield door
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
