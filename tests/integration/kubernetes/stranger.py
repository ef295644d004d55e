"""Somebody else on a port of ours, who answers every question in the same way."""

import contextlib
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.service.certificate_files import Pair


class Heard:
    """What came: connections, and the paths that were asked for."""

    def __init__(self) -> None:
        self.connections = 0
        self.paths: list[str] = []


@contextlib.contextmanager
def stranger(port: int, status: int = 200, body: bytes = b"<html>", shown: Pair | None = None) -> Iterator[Heard]:
    """By HTTP, with TLS where there is a certificate to show."""
    heard = Heard()

    class Other(BaseHTTPRequestHandler):
        def setup(self) -> None:
            heard.connections += 1
            super().setup()

        def do_GET(self) -> None:
            heard.paths.append(self.path)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Other)
    if shown:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(shown.cert, shown.key)
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield heard
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
