"""Hundreds of connections that ask for nothing, on every port of real processes with few descriptors.

And the same processes when no descriptor is left at all.
"""

import contextlib
import http.client
import json
import re
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import tomli_w

from fleetcast.clients.grpc_stubs import externalscaler_pb2 as scaler
from fleetcast.schedulers.external_metrics import METRIC, VERSION
from fleetcast.service.api.routes.all import ROWS
from tests.forked import run_forked, run_main
from tests.ports import free_ports
from tests.service.certificate_files import Authority, Pair
from tests.service.grpc_process import DemandBoard
from tests.service.grpc_world import KEDA, METADATA

FILES, CONNECTIONS = 256, 300  # what the operating system allows, and how many come
PATIENCE_S = 90.0
GRPC_BEGUN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PORTS = {
    "api": "api.port",
    "placer": "placer.port",
    "gRPC": "api.grpc_port",
    "external metrics": "external_metrics.port",
}
SAID = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nhost: loc",
    "half a TLS hello": b"\x16\x03\x01\x02\x00\x01",
    "a whole request": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "HTTP/2 settings": GRPC_BEGUN,
}


@dataclass
class Site:
    """An api and a placer, with a board that stays fresh."""

    ports: dict[str, int]
    servers: Authority
    aggregator: Pair
    log: Path

    def connection(self, port: str) -> http.client.HTTPConnection:
        if port != "external metrics":
            return http.client.HTTPConnection("127.0.0.1", self.ports[port], timeout=PATIENCE_S)
        tls = ssl.create_default_context(cafile=str(self.servers.cert))
        tls.load_cert_chain(self.aggregator.cert, self.aggregator.key)
        return http.client.HTTPSConnection("localhost", self.ports[port], context=tls, timeout=PATIENCE_S)

    def ask(self, port: str, path: str) -> tuple[int, bytes]:
        """Ask once, without another try."""
        with contextlib.closing(self.connection(port)) as connection:
            connection.request("GET", path, headers={"x-remote-user": "me"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def call(self) -> bool:
        """Ask by gRPC, on a connection of its own, without another try."""
        body = scaler.ScaledObjectRef(scalerMetadata=METADATA | {"pool": "serve"}).SerializeToString()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        with grpc.insecure_channel(f"127.0.0.1:{self.ports['gRPC']}", options) as channel:
            answer = channel.unary_unary(f"{KEDA}IsActive")(body, timeout=PATIENCE_S)
        return bool(scaler.IsActiveResponse.FromString(answer).result)

    def check(self) -> None:
        """Every port answers a newcomer at once, with what was asked for."""
        assert self.ask("api", "/healthz")[0] == 200
        status, fleet = self.ask("api", "/v1/fleet")
        assert (status, "as_of_ms" in json.loads(fleet)) == (200, True)
        assert self.ask("api", "/v1/queue")[0] == 200  # from the placer
        assert self.ask("api", "/")[0] == 200  # from a file
        assert self.ask("placer", "/healthz")[0] == 200
        assert self.ask("external metrics", f"/apis/{VERSION}")[0] == 200
        assert self.call()

    def counted(self) -> dict[str, float]:
        """Connections that the api refused or closed, by reason."""
        page = self.ask("api", "/metrics")[1].decode()
        rows = re.findall(r'^fleetcast_api_refused_connections_total\{status="(\w+)"\} (\S+)', page, re.MULTILINE)
        return {status: float(value) for status, value in rows}

    def files(self, role: str) -> int:
        """How many descriptors the process of a role has open."""
        pid = self.pids[role]
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    def __post_init__(self) -> None:
        self.pids: dict[str, int] = {}


@contextlib.contextmanager
def running(folder: Path, files: int) -> Iterator[Site]:
    """Start both roles with a limit of open files, and wait until they answer."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    servers, front = Authority(folder / "servers", "servers"), Authority(folder / "front", "front")
    ours, state = servers.sign("fleetcast"), folder / "state"
    state.mkdir()
    board = DemandBoard([state])
    board.values["serve"] = 20.0
    tls = {"tls_cert": str(ours.cert), "tls_key": str(ours.key), "client_ca": str(front.cert)}
    config = {
        "state": str(state),
        "api": {"port": ports["api"], "grpc_port": ports["gRPC"]},
        "placer": {"port": ports["placer"]},
        "external_metrics": {"port": ports["external metrics"], **tls},
    }
    (folder / "fleetcast.toml").write_text(tomli_w.dumps(config))
    site = Site(ports, servers, front.sign("front-proxy-client"), folder / "log")
    limited = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", sys.executable, "-m", "fleetcast.cli.main", "run"]
    processes = []
    with site.log.open("wb") as log:
        for role in ("placer", "api"):
            command = [*limited, "--role", role, "--config", str(folder / "fleetcast.toml")]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            site.pids[role] = processes[-1].pid
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                site.check()
                break
            except (OSError, AssertionError, grpc.RpcError, http.client.HTTPException):
                assert time.monotonic() < deadline, site.log.read_text()[-3000:]
                time.sleep(0.2)
        yield site
    finally:
        for process in processes:
            process.kill()
            process.wait()
        board.stop()


@contextlib.contextmanager
def flood(port: int, said: bytes, count: int) -> Iterator[None]:
    """Hold so many connections to a port open. Those that the other side closes stay closed."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            opened = stack.enter_context(socket.socket())
            opened.settimeout(PATIENCE_S)
            with contextlib.suppress(OSError):
                opened.connect(("127.0.0.1", port))
                opened.sendall(said)
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running(tmp_path_factory.mktemp("floods"), FILES) as made:
        yield made


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("port", PORTS)
def test_connections_that_ask_for_nothing_keep_nobody_out(site: Site, port: str, said: str) -> None:
    for _ in range(2):
        with flood(site.ports[port], SAID[said], CONNECTIONS):
            site.check()
            for role in site.pids:
                assert site.files(role) < FILES


def test_half_a_head_is_not_waited_for_on_any_port(site: Site) -> None:
    """All of them end by the deadline of a head, without a flood that takes their places."""
    said = {
        "api": SAID["half a head"],
        "placer": SAID["half a head"],
        "gRPC": GRPC_BEGUN[:9],
        "external metrics": b"\x16",
    }
    with contextlib.ExitStack() as stack:
        opened = {}
        for port, part in said.items():
            opened[port] = stack.enter_context(socket.create_connection(("127.0.0.1", site.ports[port]), PATIENCE_S))
            opened[port].sendall(part)
        for port, connection in opened.items():
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while piece := connection.recv(65_536):
                    answer += piece
            assert port not in ("api", "placer") or answer.startswith(b"HTTP/1.1 408 "), port


def test_a_flood_on_all_ports_at_once_keeps_nobody_out(site: Site) -> None:
    with contextlib.ExitStack() as stack:
        for port, said in (
            *(("gRPC", GRPC_BEGUN), ("external metrics", b""), ("api", SAID["a whole request"])),
            *(("placer", b""), ("gRPC", b""), ("api", b"")),
        ):
            stack.enter_context(flood(site.ports[port], said, CONNECTIONS))
        site.check()
    assert site.counted()["displaced"] > CONNECTIONS


class KeptConnection:
    """A connection that stays open from before until after a process has no descriptor left."""

    def __init__(self, site: Site, port: str) -> None:
        self._connection = site.connection(port)
        self._connection.connect()
        self._connection.auto_open = 0  # another connection could not be accepted
        self.ask("GET", "/healthz")  # from here on the process has accepted it

    def close(self) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, str], bytes]:
        sent = None if method in ("GET", "DELETE") else json.dumps(body)
        self._connection.request(method, path, sent, {"x-remote-user": "me"})
        answer = self._connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def until_503(self, path: str) -> tuple[dict[str, str], bytes]:
        """Ask until there is a board that was not read before."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status, headers, body = self.ask("GET", path)
            if status == 503:
                return headers, body
            assert status < 500
            assert time.monotonic() < deadline
            time.sleep(0.1)


@contextlib.contextmanager
def no_files(site: Site) -> Iterator[None]:
    """Let neither process open anything. What is open stays open."""
    try:
        for pid in site.pids.values():
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, FILES))
        yield
    finally:
        for pid in site.pids.values():
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (FILES, FILES))


def events_of(stream: http.client.HTTPResponse) -> Iterator[bytes]:
    """The names of the events in a stream, as they come."""
    while line := stream.readline():
        if line.startswith(b"event: "):
            yield line[7:].strip()


def test_without_descriptors_every_route_answers_a_problem_that_says_when_to_ask_again(site: Site) -> None:
    codes = set()
    with contextlib.closing(KeptConnection(site, "api")) as api, no_files(site):
        for row in ROWS:
            if row.path == "/v1/stream":
                continue
            path = re.sub(r"\{[^}]*\}", "n001", row.path)
            status, headers, body = api.ask(row.method, path, row.body_example or {})
            assert status < 500 or (status == 503 and headers["retry-after"]), (path, status, body)
            assert status < 400 or headers["content-type"] == "application/problem+json", (path, body)
            codes |= {json.loads(body)["type"].rpartition(":")[2]} if status == 503 else set()
        assert {"out_of_files", "unavailable"} <= codes
        assert_out_of_files(*api.until_503("/"))
        for _ in range(10):
            api.until_503("/v1/fleet")
            time.sleep(0.02)  # so that the next request looks for a newer board by itself
            assert api.ask("GET", "/v1/nodes/n001")[0] in (200, 503)
    site.check()
    assert "raise ulimit -n (systemd: LimitNOFILE)" in site.log.read_text()


def assert_out_of_files(headers: dict[str, str], body: bytes) -> None:
    assert headers["retry-after"] == "5"
    assert json.loads(body)["type"] == "urn:fleetcast:problem:out_of_files"


def test_without_descriptors_the_placer_and_the_external_metrics_answer_in_their_own_form(site: Site) -> None:
    with (
        contextlib.closing(KeptConnection(site, "placer")) as placer,
        contextlib.closing(KeptConnection(site, "external metrics")) as metrics,
        no_files(site),
    ):
        assert_out_of_files(*placer.until_503("/metrics"))
        headers, body = metrics.until_503(f"/apis/{VERSION}/namespaces/default/{METRIC}?labelSelector=pool%3Dserve")
        status = json.loads(body)
        assert (status["kind"], status["reason"], status["code"]) == ("Status", "ServiceUnavailable", 503)
        assert "no file descriptor is left" in status["message"]
        assert headers["retry-after"] == "5"
    site.check()


def test_a_stream_goes_on_after_a_time_without_descriptors(site: Site) -> None:
    with (
        contextlib.closing(site.connection("api")) as streaming,
        contextlib.closing(KeptConnection(site, "api")) as api,
    ):
        streaming.request("GET", "/v1/stream")
        stream = events_of(streaming.getresponse())
        assert next(stream) == b"board"
        with no_files(site):
            api.until_503("/v1/fleet")  # the board is one that the stream could not read either
            time.sleep(0.5)
        for _ in range(5):
            assert next(stream) == b"board"


def test_the_limits_are_reduced_to_the_open_files_and_the_log_says_so(site: Site) -> None:
    log = site.log.read_text()
    assert f"ulimit -n is {FILES}: at most 72 connections are open at once instead of api.max_connections = 1024" in log
    assert "instead of connections of the placer = 1024" in log
    assert b"fleetcast_api_max_connections 72.0" in site.ask("api", "/metrics")[1]


def test_too_few_open_files_end_the_start_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(tomli_w.dumps({"state": str(tmp_path / "state")}))

    def start() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150))
        run_main("run", "--role", "api", "--config", str(tmp_path / "c.toml"))

    ended = run_forked(start)
    assert ended.returncode == 2
    assert "ulimit -n is 150: at least 192 are needed, and 1536 for api.max_connections = 1024" in ended.stderr
