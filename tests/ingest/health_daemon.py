"""A small HTTP or HTTPS server that answers as health daemons do, with what a test tells it."""

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Daemon:
    """pages: path (without its query) -> JSON-able answer, or raw bytes; `status` of every answer."""

    pages: dict[str, Any] = field(default_factory=dict)
    status: int = 200
    asked: list[str] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def running(daemon: Daemon, certificate: Path | None = None) -> Iterator[Daemon]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            daemon.asked.append(self.path)
            daemon.logins.append(self.headers.get("authorization", ""))
            page = daemon.pages.get(self.path.partition("?")[0], [])
            body = page if isinstance(page, bytes) else json.dumps(page).encode()
            self.send_response(daemon.status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    scheme = "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    daemon.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield daemon
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def make_certificate(folder: Path) -> Path:
    """A self-signed certificate of 127.0.0.1 with its key, in one file."""
    key, certificate, both = folder / "key.pem", folder / "cert.pem", folder / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return both
