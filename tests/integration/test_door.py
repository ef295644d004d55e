"""The door of a running service: tokens from the environment to the audit, slow clients, a replica, the console."""

import base64
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from playwright.sync_api import expect

from fleetcast.service.board.board import Section
from tests.integration.console.page import CHROMIUM, browser  # noqa: F401
from tests.integration.service_process import Service
from tests.ports import free_port
from tests.service.api_world import publish, sections

pytestmark = pytest.mark.integration

SECRETS = {name: f"{name}-{'s3cret' * 4}" for name in ("reader", "poster", "scheduler", "operator")}
SECRET = "s3cret" * 2  # of exporters
TOKENS = f"""
# who may ask
reader    read        {SECRETS["reader"]}
poster    events      {SECRETS["poster"]}
scheduler read,place  {SECRETS["scheduler"]}
operator  admin       {SECRETS["operator"]}
"""


def event(sequence: int) -> dict[str, Any]:
    return {"job": "a", "sequence": sequence, "time_ms": time.time_ns() // 1_000_000, "type": "submitted", "gang": 1}


def page_of(node: str) -> bytes:
    return f'DCGM_FI_DEV_SM_CLOCK{{gpu="0",UUID="GPU-{node}",Hostname="{node}"}} 1980\n'.encode()


@pytest.fixture
def closed(folder_server: tuple[Path, str], start_service: Callable[..., Service]) -> Service:
    """A whole service with tokens and one exporter, ready."""
    root, url = folder_server
    (root / "metrics").write_bytes(page_of("n1"))
    (root / "topology.toml").write_text('[[rack]]\nname = "r1"\nnodes = ["n1"]\ngpus = 8\ngpu_model = "H100"\n')
    service = start_service(
        variables={"FLEETCAST_TOKENS": TOKENS, "FLEETCAST_LOG_FORMAT": "json", "FLEETCAST_LOG_LEVEL": "debug"},
        token=SECRETS["operator"],
        scrape={
            "targets": [f"{url}?token={SECRET}", f"http://me:{SECRET}@127.0.0.1:9/m?token={SECRET} n1"],
            "interval_s": 5.0,
        },
        fleet={"topology": str(root / "topology.toml")},
    )
    service.until("ready", lambda: service.get("/readyz"), 60)
    return service


def test_tokens_hold_from_the_environment_to_the_audit(closed: Service) -> None:
    def ask(who: str, method: str, path: str, body: Any = None) -> int:
        closed.token = SECRETS.get(who, who)
        return closed.request(method, path, body)[0]

    placement = {"request_id": "a", "job": "b", "user": "mallory"}
    assert ask("", "GET", "/v1/fleet") == ask("x" * 30, "GET", "/v1/fleet") == 401
    assert ask("", "GET", "/metrics") == ask("", "GET", "/openapi.json") == 401
    assert ask("", "GET", "/healthz") == ask("", "GET", "/readyz") == ask("", "GET", "/") == 200
    assert ask("reader", "GET", "/v1/fleet") == ask("reader", "GET", "/metrics") == 200
    assert ask("reader", "POST", "/v1/events", event(1)) == ask("poster", "GET", "/v1/fleet") == 403
    assert ask("poster", "POST", "/v1/events", event(1)) == 202
    assert ask("poster", "POST", "/v1/placements", placement) == 403
    assert ask("scheduler", "POST", "/v1/placements", placement) == 200
    assert ask("scheduler", "GET", "/v1/audit") == 403
    closed.token = SECRETS["operator"]
    rows = closed.get("/v1/audit")["rows"]
    assert [(row["caller"], row["request_id"]) for row in rows] == [("scheduler", "a")]
    no_secret_shows(closed)


def no_secret_shows(closed: Service) -> None:
    """Not in the lists of processes, not in what is logged at the level debug, not in any file of the state."""
    for pid in closed.pids().values():
        assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    closed.until("the exporter that is away is told of", lambda: "is down, trying on" in closed.log())
    assert "s3cret" not in closed.log()
    roles = {json.loads(line)["role"] for line in closed.log().splitlines()}
    assert {"supervisor", "api"} <= roles <= {"supervisor", "pipeline", "api", "placer"}
    for path in ("/v1/ingestion", "/metrics", "/readyz"):
        assert "s3cret" not in json.dumps(closed.request("GET", path)[1])
    for file in (closed.folder / "state").rglob("*"):
        assert file.stat().st_mode & 0o077 == 0, file
        assert not file.is_file() or file.suffix == ".toml" or b"s3cret" not in file.read_bytes(), file


def test_the_placer_answers_nobody_but_those_who_may(closed: Service) -> None:
    def ask(authorization: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", closed.port + 1, timeout=60)
        connection.request("GET", "/queue", headers={"Authorization": authorization} if authorization else {})
        status = connection.getresponse().status
        connection.close()
        return status

    basic = base64.b64encode(f"anybody:{SECRETS['reader']}".encode()).decode()
    assert ask("") == ask("Bearer nonsense-nonsense") == 401
    assert ask(f"Bearer {SECRETS['poster']}") == 403
    assert ask(f"Basic {basic}") == 200


def test_the_console_asks_for_a_token_and_streams_with_it(closed: Service, browser: Any) -> None:  # noqa: F811
    page = browser.new_page()
    page.goto(f"http://127.0.0.1:{closed.port}/")
    page.locator("#ask-token").fill(SECRETS["poster"])
    page.keyboard.press("Enter")
    expect(page.locator("#ask .why")).to_contain_text("this needs a token with the scope read")
    page.locator("#ask-token").fill(SECRETS["reader"])
    page.keyboard.press("Enter")
    expect(page.locator(".node")).to_have_count(1)

    def streams() -> bool:
        _, text, _ = closed.request("GET", "/metrics")
        return "fleetcast_stream_clients 1.0" in text

    closed.until("the stream is open", streams)
    page.close()


def test_an_address_beyond_loopback_needs_tokens(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[api]\nhost = '0.0.0.0'\n")
    command = [sys.executable, "-m", "fleetcast.cli.main", "run", "--config", str(tmp_path / "c.toml")]
    for role in ([], ["--role", "api"]):
        ended = subprocess.run(
            [*command, *role, "--state", str(tmp_path / "var")], capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 2
        assert "api.host = '0.0.0.0': beyond loopback" in ended.stderr


# -- one api process over a board made by hand


class Api:
    """One api process with a state folder of its own."""

    def __init__(self, folder: Path, *, port: int = 0, variables: dict[str, str] | None = None, **api: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.port = port or free_port()
        config = {"state": str(folder), "api": {"port": self.port, **api}, "placer": {"port": self.port + 1}}
        (folder / "api.toml").write_text(tomli_w.dumps(config))
        command = [
            sys.executable,
            "-m",
            "fleetcast.cli.main",
            "run",
            "--role",
            "api",
            "--config",
            str(folder / "api.toml"),
        ]
        self.process = subprocess.Popen(command, env={**os.environ, **(variables or {})})
        self.until(lambda: self.ask("GET", "/healthz")[0] == 200)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status 0 when nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()
        except OSError:
            return 0, {}, b""
        finally:
            connection.close()

    def until(self, check: Callable[[], Any], limit_s: float = 150.0) -> None:
        deadline = time.monotonic() + limit_s
        while not check():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def api(folder: Path, **more: Any) -> Iterator[Api]:
    made = Api(folder, **more)
    try:
        yield made
    finally:
        made.kill()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_a_replica_serves_the_board_of_another_api_and_sends_on_what_changes_something(tmp_path: Path) -> None:
    token = SECRETS["operator"]
    variables = {"FLEETCAST_TOKENS": TOKENS}
    bearer = {"Authorization": f"Bearer {token}"}
    (tmp_path / "primary").mkdir()
    writer = publish(tmp_path / "primary", now_ms())
    port = free_port()
    board = f"http://127.0.0.1:{port}/v1/board"
    with (
        api(tmp_path / "primary", port=port, variables=variables) as primary,
        api(tmp_path / "replica", board=board, variables=variables | {"FLEETCAST_BOARD_TOKEN": token}) as replica,
    ):

        def same(path: str) -> bool:
            first, second = primary.ask("GET", path, **bearer), replica.ask("GET", path, **bearer)
            return first[0] == second[0] == 200 and first[2] == second[2]

        for path in ("/v1/nodes/n002", "/v1/risk/nodes", "/v1/demand", "/v1/board"):
            replica.until(lambda path=path: same(path))
        assert replica.ask("GET", "/v1/nodes/n002")[0] == 401

        newer = now_ms()
        writer.publish(sections(newer), newer)
        urgent = json.dumps({"rows": [{"node": "n001", "type": "lost"}]}).encode()
        writer.publish_urgent([Section("doc.urgent", urgent, newer)], newer)
        replica.until(lambda: str(newer).encode() in replica.ask("GET", "/v1/nodes/n002", **bearer)[2])
        replica.until(lambda: same("/v1/board?part=urgent"))

        status, _, body = replica.ask("POST", "/v1/events", event(1), **bearer)
        assert (status, json.loads(body)["accepted"]) == (202, 1)
        status, _, body = primary.ask("POST", "/v1/events", event(1), **bearer)
        assert (status, json.loads(body)["duplicates"]) == (202, 1)
        assert not (tmp_path / "replica" / "inbox").exists()

        primary.kill()
        replica.until(lambda: int(replica.ask("GET", "/v1/nodes/n002", **bearer)[1]["age"]) >= 2)
        assert replica.ask("POST", "/v1/events", event(2), **bearer)[0] == 503
        status, _, body = replica.ask("GET", "/readyz")
        assert status == 503
        assert "does not answer" in json.loads(body)["missing"][0]

        newest = now_ms()
        writer.publish(sections(newest), newest)
        with api(tmp_path / "primary", port=port, variables=variables):
            replica.until(lambda: str(newest).encode() in replica.ask("GET", "/v1/nodes/n002", **bearer)[2])
            replica.until(lambda: replica.ask("GET", "/readyz")[0] == 200)


def test_a_replica_without_the_right_token_says_so_and_keeps_asking(tmp_path: Path) -> None:
    (tmp_path / "primary").mkdir()
    publish(tmp_path / "primary", now_ms())
    port = free_port()
    with (
        api(tmp_path / "primary", port=port, variables={"FLEETCAST_TOKENS": TOKENS}),
        api(tmp_path / "replica", board=f"http://127.0.0.1:{port}/v1/board") as replica,
    ):
        replica.until(lambda: b"FLEETCAST_BOARD_TOKEN must hold a token" in replica.ask("GET", "/readyz")[2])
        assert replica.ask("GET", "/v1/fleet")[0] == 503


def test_slow_clients_and_too_many_of_them_do_not_keep_others_out(tmp_path: Path) -> None:
    publish(tmp_path, now_ms())
    limits = {"max_connections": 40, "header_timeout_s": 8.0, "body_timeout_s": 8.0}
    with api(tmp_path, **limits) as server:
        first = [  # they stop within their body: a request without a whole head keeps no place
            b"POST /v1/events HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{",
            b"POST /v1/events HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n3e8\r\n{",
        ]
        slow = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(40)]
        for number, sock in enumerate(slow):
            sock.sendall(first[number % 2])
        refused = server.ask("GET", "/v1/fleet")
        while refused[0] != 503:  # 0: hung up on before we had asked; 200: a place was free again
            assert refused[0] in (0, 200)
            if refused[0] == 200:
                slow.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
                slow[-1].sendall(first[0])
            refused = server.ask("GET", "/v1/fleet")
        dripping = threading.Thread(target=drip, args=(slow,))
        dripping.start()
        assert (refused[0], refused[1]["retry-after"]) == (503, "5")
        assert json.loads(refused[2])["type"] == "urn:fleetcast:problem:too_many_connections"
        server.until(lambda: server.ask("GET", "/v1/fleet")[0] == 200)
        dripping.join()
        statuses = Counter(all_of(sock)[9:12] for sock in slow)
        assert statuses[b"408"] == 40  # as many as there are places
        assert set(statuses) <= {b"408", b"503", b""}  # empty: it gave way before its head had arrived
        counted = f'fleetcast_api_refused_connections_total{{status="408"}} {statuses[b"408"]}.0'
        assert counted.encode() in server.ask("GET", "/metrics")[2]


def drip(socks: list[socket.socket]) -> None:
    """A byte on each, now and then, until the server hangs up on all."""
    alive = list(socks)
    while alive:
        for sock in list(alive):
            try:
                sock.sendall(b"x")
            except OSError:
                alive.remove(sock)
        time.sleep(0.3)


def all_of(sock: socket.socket) -> bytes:
    parts = []
    with sock:
        try:
            while part := sock.recv(65_536):
                parts.append(part)
        except ConnectionResetError:
            pass
    return b"".join(parts)
