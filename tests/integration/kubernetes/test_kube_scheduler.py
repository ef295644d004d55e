"""A real kube-scheduler asks a real Fleetcast: pods follow its scores, and go on without it."""

import http.server
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from fleetcast.service.board.board import BoardWriter, Section
from tests.integration.kubernetes.control_plane import ControlPlane, extender
from tests.integration.kubernetes.fleet import DRAINED, HALF_USED, HEALTHY, NODES, SICKLY, WatchedFleet
from tests.integration.test_api_process import serving

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes

BUDGET_S = 15.0  # three pods, two questions of 200 ms each, and a machine that has other things to do


def resident(plane: ControlPlane) -> None:
    """What the job event says that runs on the half used node, as a pod."""
    plane.add_pod("resident", 6, nodeName=HALF_USED)


def on(*names: str) -> dict[str, Any]:
    """An affinity to some nodes."""
    match = [{"key": "kubernetes.io/hostname", "operator": "In", "values": list(names)}]
    required = {"nodeSelectorTerms": [{"matchExpressions": match}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


@pytest.mark.parametrize("names_only", [True, False], ids=["nodeCacheCapable", "whole nodes"])
def test_pods_follow_our_scores_and_avoid_risky_nodes(
    plane: ControlPlane, fleet: WatchedFleet, names_only: bool
) -> None:
    resident(plane)
    with plane.scheduler(extender(fleet.url, nodeCacheCapable=names_only)):
        assert plane.place("small", 2) == HALF_USED  # fills the broken node to its last GPU
        assert {plane.place("whole-1", 8), plane.place("whole-2", 8)} == set(HEALTHY)
        assert plane.place("last-resort", 8) == SICKLY
        plane.add_pod("waits", 8)
        why = plane.until("why it waits", lambda: plane.why_pending("waits"))
    assert "fleetcast: drained since" in why, why
    assert "SM clock 990 MHz" in why, why
    assert "nodeName" not in plane.pod("waits")["spec"]


def test_without_us_pods_go_to_the_risky_nodes_too(plane: ControlPlane) -> None:
    with plane.scheduler():
        assert {plane.place(f"pod-{number}", 8) for number in range(len(NODES))} == set(NODES)


def test_pods_without_gpus_never_ask(plane: ControlPlane, fleet: WatchedFleet) -> None:
    with plane.scheduler(extender(fleet.url)):
        assert plane.place("web", 0, **on(DRAINED)) == DRAINED


def test_nobody_is_evicted_from_a_node_that_would_be_of_no_use(plane: ControlPlane, fleet: WatchedFleet) -> None:
    """By itself the scheduler evicts those of the least priority: here, the pod on the drained node."""
    for name, priority in (("least", 10), ("little", 20), ("much", 1000)):
        plane.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": name}, "value": priority})
    healthy = HEALTHY[0]
    for extenders, expected in (((), DRAINED), ((extender(fleet.url),), healthy)):
        plane.clear_pods()
        plane.add_pod("on-drained", 8, nodeName=DRAINED, priorityClassName="least")
        plane.add_pod("on-healthy", 8, nodeName=healthy, priorityClassName="little")
        with plane.scheduler(*extenders):
            assert plane.place("urgent", 8, priorityClassName="much", **on(DRAINED, healthy)) == expected


def test_a_token_goes_into_the_url(plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler can be told nothing but a URL. With the wrong token it goes on without us."""
    token = "0123456789abcdef0123"
    monkeypatch.setenv("FLEETCAST_TOKENS", f"kube-scheduler read {token}")
    publish_drained(tmp_path, DRAINED)
    with serving(tmp_path) as (_, port):
        for password in (token, "not-the-token-0123"):
            plane.clear_pods()
            url = f"http://kube-scheduler:{password}@127.0.0.1:{port}/v1/adapters/kube"
            with plane.scheduler(extender(url)) as log:
                if password == token:
                    plane.add_pod("asks", 8, **on(DRAINED))
                    assert "fleetcast: drained" in plane.until("its word", lambda: plane.why_pending("asks"))
                else:
                    assert plane.place("asks", 8, **on(DRAINED)) == DRAINED
                    assert "code 401" in log.read_text()  # and the URL, token and all: README warns of it


def test_by_a_board_of_an_hour_ago_no_node_is_refused_or_preferred(plane: ControlPlane, tmp_path: Path) -> None:
    publish_drained(tmp_path, DRAINED)
    with serving(tmp_path) as (_, port):
        url = f"http://127.0.0.1:{port}/v1/adapters/kube"
        with plane.scheduler(extender(url)) as log:
            plane.add_pod("fresh", 1, **on(DRAINED))
            plane.until("why it waits", lambda: plane.why_pending("fresh"))
            plane.clear_pods()
            publish_drained(tmp_path, DRAINED, age_s=3600)
            plane.until("neutral scores", lambda: len(scores(url)) == 1)
            assert {plane.place(f"old-{number}", 8) for number in range(len(NODES))} == set(NODES)
            assert "rror" not in log.read_text(), "it was answered each time"


def scores(url: str) -> set[int]:
    """The different scores of all nodes."""
    answer = httpx.post(f"{url}/prioritize", json={"Pod": {}, "NodeNames": list(NODES)}, timeout=30)
    return {row["Score"] for row in answer.json()}


def publish_drained(state: Path, node: str, age_s: float = 0.0) -> None:
    """A board that says of one node that it is drained."""
    drained = np.array([name == node for name in NODES])
    parts = {
        "names.node": "\n".join(NODES).encode(),
        "node.risk": np.full((3, 4, len(NODES)), 0.001),
        "node.state": drained.astype(np.int8),
        "gpu.usable": np.ones((len(NODES), 8), bool),
        "gpu.job": np.full((len(NODES), 8), -1, np.int32),
        "risk.reason": b"{}",
    }
    now_ms = time.time_ns() // 1_000_000 - int(age_s * 1000)
    BoardWriter(state / "board").publish([Section(name, data, now_ms) for name, data in parts.items()], now_ms)


def three_pods(plane: ControlPlane, what: str) -> set[str]:
    """The nodes of three small pods, all bound within the budget."""
    began = time.monotonic()
    placed = {plane.place(f"{what}-{number}", 1, BUDGET_S) for number in range(3)}
    assert time.monotonic() - began < BUDGET_S
    return placed


def test_it_goes_on_when_we_hang_or_die_and_follows_us_again_after(plane: ControlPlane, fleet: WatchedFleet) -> None:
    resident(plane)
    with plane.scheduler(extender(fleet.url)) as log:
        fleet.signal("supervisor", signal.SIGSTOP)  # it would put things right at once
        try:
            fleet.signal("api", signal.SIGSTOP)
            three_pods(plane, "hang")
            assert "Client.Timeout" in log.read_text() or "deadline exceeded" in log.read_text()
            fleet.signal("api", signal.SIGKILL)
            three_pods(plane, "dead")
            assert "connection refused" in log.read_text()
        finally:
            fleet.signal("supervisor", signal.SIGCONT)
        fleet.service.until("a new api", lambda: fleet.service.get("/healthz"))
        plane.clear_pods()
        resident(plane)
        assert plane.place("well", 2) == HALF_USED


Reply = Callable[[dict[str, Any]], tuple[int, bytes]]


def as_json(value: Any) -> tuple[int, bytes]:
    return 200, json.dumps(value).encode()


def nonsense(asked: dict[str, Any]) -> tuple[int, bytes]:
    return 200, b'{"NodeNames": [[[ \xff'


def names_not_asked(asked: dict[str, Any]) -> tuple[int, bytes]:
    return as_json({"NodeNames": ["nowhere"], "FailedNodes": {"elsewhere": "?"}, "Error": ""})


def scores_out_of_range(asked: dict[str, Any]) -> tuple[int, bytes]:
    return as_json(
        [{"Host": name, "Score": score} for name, score in zip(asked["NodeNames"], (-7, 10**9), strict=False)]
    )


def broken(asked: dict[str, Any]) -> tuple[int, bytes]:
    return 500, b"{}"


def error(asked: dict[str, Any]) -> tuple[int, bytes]:
    return as_json({"NodeNames": [], "Error": "a bug of ours"})


class Liar:
    """Answers every question as `reply` says."""

    def __init__(self) -> None:
        self.reply: Reply = nonsense
        self.asked: list[str] = []
        liar = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                liar.asked.append(self.path)
                status, body = liar.reply(asked)
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.stop()


def test_it_goes_on_when_we_lie(plane: ControlPlane, liar: Liar) -> None:
    with plane.scheduler(extender(liar.url)):
        for reply in (nonsense, names_not_asked, scores_out_of_range, broken, error):
            liar.reply, liar.asked = reply, []
            assert three_pods(plane, reply.__name__.replace("_", "-")) <= set(NODES)
            assert {"/filter", "/prioritize"} <= set(liar.asked), reply
            plane.clear_pods()
