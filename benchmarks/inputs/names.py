"""The cost of a flood of new job and node names to all roles, as real processes on loopback.

REQUESTS requests report `size` unknown jobs, and as many unknown nodes with a failed GPU. Meanwhile, other
requests ask for placements and report events of a known job.

    flood       with the default limits
    at bounds   without a limit on the names that a caller may report, so that the numbers of live jobs and of
                unknown nodes reach their own limits
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.child import ChildProcess
from fleetcast.benchmarks.kit.service import find_free_port, read_cpu_s

SIZES = (100_000,)  # jobs, and as many nodes
REQUESTS = 100
FLEET_NODES = 100
WATCHED_S = 60.0  # after the flood
CHECK_INTERVAL_S = 0.5
BEHIND_MS = 1000  # what was acknowledged is folded by then
START_S, STOP_S, PATIENCE_S = 60.0, 30.0, 60.0
ROLES = ("pipeline", "api", "placer")
CASES: Mapping[str, Mapping[str, int]] = {"flood": {}, "at bounds": {"names_at_once": 1_000_000}}


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield one record for each case and size.

    The value is the age in seconds of the oldest observed board. Fleet time is wall time here.
    """
    for size in sizes:
        for case, limits in CASES.items():
            with tempfile.TemporaryDirectory() as folder, _RunningFleet(Path(folder), limits) as fleet:
                seen = send_flood(fleet, size)
                cpu_s = fleet.sum_cpu_s()
            assert seen.placements[200], f"no placement was answered: {seen.placements}"
            assert set(seen.known) == {202}, f"what is known was refused: {seen.known}"
            line = make_record("names", f"{case}: oldest board", {"names": size}, [seen.oldest_s], "s", cpu_s=cpu_s)
            yield line | {
                "answers": dict(seen.answers),
                "known": dict(seen.known),
                "placements": dict(seen.placements),
                "peak_mib": seen.peak_mib,
                "used": seen.used,
            }


@dataclass(slots=True)
class FloodAnswers:
    """The numbers of answers by status: to the flood, to events of a known job, and to placements.

    oldest_s: the greatest age of a board in seconds. peak_mib: role -> its peak memory. used: bound on names -> how
    much of it is used.
    """

    answers: Counter[int] = field(default_factory=Counter)
    known: Counter[int] = field(default_factory=Counter)
    placements: Counter[int] = field(default_factory=Counter)
    oldest_s: float = 0.0
    peak_mib: dict[str, int] = field(default_factory=dict)
    used: dict[str, Any] = field(default_factory=dict)


def send_flood(fleet: "_RunningFleet", size: int) -> FloodAnswers:
    """Send the flood of names, and observe the fleet until WATCHED_S after the flood."""
    seen, over = FloodAnswers(), threading.Event()
    watch = threading.Thread(target=_observe_fleet, args=(fleet, seen, over))
    watch.start()
    try:
        for number in range(REQUESTS):
            status, _ = fleet.send_request("POST", "/v1/events", _make_body(number, size // REQUESTS))
            seen.answers[status] += 1
        sent_ms = time.time_ns() // 1_000_000
        time.sleep(WATCHED_S)
        seen.used = fleet.wait_for_bound_use(sent_ms)
    finally:
        over.set()
        watch.join()
    seen.peak_mib = fleet.read_peak_mib()
    return seen


def _make_body(number: int, count: int) -> bytes:
    """Return an event body with `count` unknown jobs and as many unknown nodes."""
    now_ms = time.time_ns() // 1_000_000
    names = [f"{number}-{row}" for row in range(count)]
    jobs = [{"job": f"job-{name}", "sequence": 1, "time_ms": now_ms, "type": "submitted"} for name in names]
    said = {"source": "s", "sequence": 1, "time_ms": now_ms, "type": "xid", "code": 79, "gpu": 0}
    return json.dumps([*jobs, *({"node": f"node-{name}", **said} for name in names)]).encode()


def _observe_fleet(fleet: "_RunningFleet", seen: FloodAnswers, over: threading.Event) -> None:
    step = 0
    while not over.wait(CHECK_INTERVAL_S):
        step += 1
        answer = {"job": "ours", "sequence": step + 1, "time_ms": time.time_ns() // 1_000_000, "type": "step"}
        seen.known[
            fleet.send_request("POST", "/v1/events", json.dumps({**answer, "step": step, "duration_s": 1.0}).encode())[
                0
            ]
        ] += 1
        asked = {"request_id": f"r{step}", "gang": 1, "gpus_per_node": 1, "dry_run": True}
        seen.placements[fleet.send_request("POST", "/v1/placements", json.dumps(asked).encode())[0]] += 1
        seen.oldest_s = max(seen.oldest_s, fleet.measure_board_age_s())


class _RunningFleet:
    """A running Fleetcast: FLEET_NODES nodes in a topology, one running job, and no telemetry."""

    def __init__(self, folder: Path, limits: Mapping[str, int]) -> None:
        self.folder, self.port = folder, find_free_port()
        (folder / "topology.toml").write_text(f'[[rack]]\nname = "r1"\nnodes = "n[001-{FLEET_NODES:03d}]"\ngpus = 8\n')
        config = {
            "state": str(folder / "state"),
            "fleet": {"topology": str(folder / "topology.toml")},
            "api": {"port": self.port},
            "placer": {"port": find_free_port()},
            "limits": dict(limits),
        }
        (folder / "config.toml").write_text(tomli_w.dumps(config))
        command = [sys.executable, "-m", "fleetcast.cli.main", "run", "--config", str(folder / "config.toml")]
        self._process = ChildProcess("fleetcast", command)

    def __enter__(self) -> "_RunningFleet":
        deadline = time.monotonic() + START_S
        while self.send_request("GET", "/readyz")[0] != 200:
            self._process.check_running(
                unless=f"not ready within {START_S:.0f} s" if time.monotonic() > deadline else ""
            )
            time.sleep(CHECK_INTERVAL_S)
        ranks = [{"rank": 0, "node": "n001", "gpus": [0]}]
        ours = {"job": "ours", "sequence": 1, "time_ms": time.time_ns() // 1_000_000, "type": "started", "ranks": ranks}
        assert self.send_request("POST", "/v1/events", json.dumps(ours).encode())[0] == 202
        return self

    def __exit__(self, *error: object) -> None:
        pids = self._read_pids()
        self._process.stop(STOP_S)
        for pid in pids.values():  # none is left, unless the supervisor had to be killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def send_request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """Send a request. Returns its status and decoded JSON, or (0, {}) without an answer."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, method=method)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")
        except OSError:
            return 0, {}

    def wait_for_bound_use(self, since_ms: int) -> Any:
        """Wait for a board made after `since_ms`, and return how much of each bound on names is used on it."""
        deadline = time.monotonic() + PATIENCE_S
        while (answer := self.send_request("GET", "/v1/ingestion")[1])["as_of_ms"] <= since_ms + BEHIND_MS:
            assert time.monotonic() < deadline, f"no board was made within {PATIENCE_S:.0f} s"
            time.sleep(CHECK_INTERVAL_S)
        return answer["limits"]

    def measure_board_age_s(self) -> float:
        """Return the age of the board in seconds, or 0 without an answer.

        The board's time is that of the ingestion document.
        """
        status, answer = self.send_request("GET", "/v1/ingestion")
        return time.time() - answer["as_of_ms"] / 1000 if status == 200 else 0.0

    def read_peak_mib(self) -> dict[str, int]:
        """Return role -> its peak resident memory in MiB."""
        return {
            role: _read_status_field(pid, "VmHWM") // 1024 for role, pid in self._read_pids().items() if role in ROLES
        }

    def sum_cpu_s(self) -> float:
        """Return the CPU seconds of all roles."""
        return sum(read_cpu_s(pid) for role, pid in self._read_pids().items() if role in ROLES)

    def _read_pids(self) -> dict[str, int]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "state" / "pids").read_text(encoding="utf-8").splitlines()
            return {role: int(pid) for role, pid in (line.split() for line in lines)}
        return {}


def _read_status_field(pid: int, name: str) -> int:
    """Return a number from /proc/PID/status, in KiB if it is memory. Returns 0 if the field is missing."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
