"""The client over HTTPS, against a server whose certificate `openssl` made."""

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fleetcast_client import Client, Reporter, Unreachable

from tests.service.certificate_files import Authority

TAKEN: list[str] = []


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(b'{"rows": []}')

    def do_POST(self) -> None:
        TAKEN.append(self.rfile.read(int(self.headers["content-length"])).decode())
        self.answer(b'{"accepted": 1, "duplicates": 0, "rejected": []}')

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a server, and the file of its authority."""
    authority = Authority(tmp_path_factory.mktemp("tls"), "ca")
    pair = authority.sign("fleetcast")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"https://localhost:{server.server_address[1]}", authority.cert
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_authorities_of_a_file_are_trusted(served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    url, ca = served
    assert Client(url, ca=ca).queue() == {"rows": []}
    monkeypatch.setenv("FLEETCAST_CA", str(ca))
    assert Client(url).queue() == {"rows": []}


def test_others_are_not(served: tuple[str, Path], tmp_path: Path) -> None:
    url, _ = served
    for client in (Client(url, tries=1), Client(url, tries=1, ca=Authority(tmp_path, "other").cert)):
        with pytest.raises(Unreachable, match="certificate verify failed"):
            client.queue()
    assert Client(url, verify=False).queue() == {"rows": []}


@pytest.mark.parametrize("text", [None, "", "nonsense"])
def test_a_file_that_holds_no_authority_is_refused_by_its_name(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"authorities are in '.*ca\.pem': expected a file in PEM"):
        Client("https://localhost:1", ca=path)
    assert not Reporter("https://localhost:1", job="a", ca=path).enabled
    assert any("expected a file in PEM" in message for message in caplog.messages)


def test_a_training_loop_reports_over_it(served: tuple[str, Path]) -> None:
    url, ca = served
    with Reporter(url, job="a", ca=ca, every_s=0.01) as report:
        report.step_took(1.0)
        assert report.flush(30.0)
    assert json.loads(TAKEN[-1])[0]["duration_s"] == 1.0
