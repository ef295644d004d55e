"""The scheduler of scheduler-plugins, with Trimaran, places pods by our forecast, and goes on whatever we do."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
import tomli_w
import yaml

from fleetcast.service.board.board import BoardWriter, Section
from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.kubernetes.stranger import stranger
from tests.integration.outside.trimaran.build import build
from tests.ports import free_port

pytestmark = [pytest.mark.outside, pytest.mark.timeout(3600)]  # the first run builds both

NODES = tuple(f"t{number:02d}" for number in range(1, 21))
FIRST, LAST = NODES[:5], NODES[-5:]
EXAMPLE = Path(__file__).parents[4] / "examples" / "trimaran.yaml"
PODS = 10
POLL_S = 30.0  # of Trimaran
ASKS_S = 55.0  # as long as it waits for an answer; its start waits for the first one
PATIENT_S = 4 * POLL_S  # this machine may be busy
ROUTE = 'route="/v1/adapters/trimaran/watcher"'


class Forecaster:
    """A board that a test publishes, and a real api role that answers from it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.board = BoardWriter(folder / "state" / "board")
        config = {"state": str(folder / "state"), "api": {"port": self.port}, "placer": {"port": self.port + 1}}
        (folder / "config.toml").write_text(tomli_w.dumps(config))
        self.start()

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "fleetcast.cli.main",
                    "run",
                    "--role",
                    "api",
                    "--config",
                    str(self.folder / "config.toml"),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def publish(self, quiet: tuple[str, ...], age_s: float = 0.0) -> None:
        """A tenth of the GPUs of these nodes is busy, of all others nine."""
        now_ms = time.time_ns() // 1_000_000 - int(age_s * 1000)
        told = np.full((2, 3, len(NODES)), np.nan, np.float32)
        told[:, 0] = [0.1 if name in quiet else 0.9 for name in NODES]
        names = Section("names.node", "\n".join(NODES).encode(), now_ms)
        self.board.publish([names, Section("node.load", told, now_ms)], now_ms)

    def asked(self) -> int:
        """How often Trimaran was answered since our start; -1 while we do not answer."""
        try:
            text = httpx.get(f"{self.url}/metrics", timeout=10).text
        except httpx.HTTPError:
            return -1
        lines = [line for line in text.splitlines() if "http_requests_total" in line and ROUTE in line]
        return int(sum(float(line.rpartition(" ")[2]) for line in lines))

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


class Trimaran:
    """A scheduler that asks a forecaster, and pods that it places."""

    def __init__(self, plane: ControlPlane, binary: Path, forecaster: Forecaster) -> None:
        self.plane, self.forecaster = plane, forecaster
        self.folder = forecaster.folder
        self._binary, self._names = binary, (f"p{number}" for number in itertools.count())

    def start(self) -> None:
        config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
        config |= {"leaderElection": {"leaderElect": False}, "podMaxBackoffSeconds": 1}
        config["clientConnection"] = {"kubeconfig": str(self.plane.kubeconfig), "qps": 500, "burst": 500}
        arguments = config["profiles"][0]["pluginConfig"][0]["args"]
        arguments["watcherAddress"] = arguments["watcherAddress"].replace(":8080", f":{self.forecaster.port}")
        path = self.folder / "scheduler.yaml"
        path.write_text(yaml.safe_dump(config))
        command = [str(self._binary), f"--config={path}", "--bind-address=127.0.0.1", f"--secure-port={free_port()}"]
        command += ["--authentication-skip-lookup", "--authorization-always-allow-paths=*"]
        with open(self.folder / "scheduler.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def heard(self, times: int = 1) -> None:
        """Returns once it has asked again: what it knows is newer than this call."""
        before = self.forecaster.asked()
        self.plane.until("a question", lambda: self.forecaster.asked() >= max(before, 0) + times, PATIENT_S)
        time.sleep(1.0)  # the answer is on its way

    def place(self, limit_s: float = POLL_S) -> Counter[str]:
        """Create PODS pods; how many each node got."""
        names = list(itertools.islice(self._names, PODS))
        for name in names:
            self.plane.add_pod(name, 0, schedulerName="forecast")
        began = time.monotonic()
        placed = Counter(self.plane.bound(name, limit_s) for name in names)
        print(f"{PODS} pods in {time.monotonic() - began:.1f} s on {dict(placed)}; ", end="")
        assert self.process.poll() is None, (self.folder / "scheduler.log").read_text()[-3000:]
        return placed


@pytest.fixture(scope="module")
def binary(request: pytest.FixtureRequest) -> Path:
    return needed(build, request)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(needed(kubernetes, request), tmp_path_factory.mktemp("plane"))
    try:
        plane.add_nodes(list(NODES), 8)
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="module")
def trimaran(cluster: ControlPlane, binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trimaran]:
    """Of one that has heard that FIRST are quiet."""
    forecaster = Forecaster(tmp_path_factory.mktemp("trimaran"))
    made = Trimaran(cluster, binary, forecaster)
    try:
        cluster.until("the api", lambda: forecaster.asked() >= 0)
        forecaster.publish(FIRST)
        made.start()
        cluster.until("the first question", lambda: forecaster.asked() > 0)
        yield made
    finally:
        made.end()
        forecaster.kill()


def test_pods_go_to_the_nodes_that_are_forecast_quiet(trimaran: Trimaran) -> None:
    assert set(trimaran.place()) <= set(FIRST)


def test_another_forecast_is_heeded_at_its_next_question(trimaran: Trimaran) -> None:
    trimaran.forecaster.publish(LAST)
    trimaran.heard()
    assert set(trimaran.place()) <= set(LAST)


def test_a_stale_board_prefers_no_node(trimaran: Trimaran) -> None:
    trimaran.forecaster.publish(LAST, age_s=3600)
    trimaran.heard()
    assert set(trimaran.place()) - set(LAST)  # by chance: ten pods on a fourth of the nodes, once in a million times


def test_while_we_stand_still_pods_are_placed_by_the_last_answer(trimaran: Trimaran) -> None:
    trimaran.forecaster.publish(FIRST)
    trimaran.heard()
    trimaran.forecaster.signal(signal.SIGSTOP)
    try:
        time.sleep(POLL_S + 1)  # a question is open, and nobody answers it
        assert set(trimaran.place()) <= set(FIRST)
    finally:
        trimaran.forecaster.signal(signal.SIGCONT)


def test_while_we_are_dead_or_somebody_else_answers_pods_are_placed_by_the_last_answer(trimaran: Trimaran) -> None:
    trimaran.forecaster.publish(LAST)
    trimaran.heard(2)  # of two, one may have been open while we stood still
    trimaran.forecaster.kill()
    assert set(trimaran.place()) <= set(LAST)
    for status, body in ((200, b"<html>"), (500, b"a bug of ours")):
        with stranger(trimaran.forecaster.port, status, body) as heard:
            trimaran.plane.until("a question", partial(bool, heard.paths), PATIENT_S)
            time.sleep(1.0)  # the answer is on its way
            assert set(heard.paths) == {"/v1/adapters/trimaran/watcher"}
            assert set(trimaran.place()) <= set(LAST)
    trimaran.forecaster.start()
    trimaran.plane.until("the api", lambda: trimaran.forecaster.asked() >= 0)
    trimaran.forecaster.publish(FIRST)
    trimaran.heard()
    assert set(trimaran.place()) <= set(FIRST)


def test_a_scheduler_that_starts_while_we_stand_still_places_pods_once_it_stops_waiting(trimaran: Trimaran) -> None:
    trimaran.forecaster.signal(signal.SIGSTOP)
    try:
        trimaran.end()
        trimaran.start()
        began = time.monotonic()
        trimaran.place(limit_s=ASKS_S + PATIENT_S)
        print(f"from its start: {time.monotonic() - began:.0f} s; ", end="")
    finally:
        trimaran.forecaster.signal(signal.SIGCONT)
