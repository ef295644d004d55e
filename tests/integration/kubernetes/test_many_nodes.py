"""The adapter `nodes` marks a thousand nodes while the forecast changes, gives them up, and takes all of it back."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.nodes import FAILURE_EXPECTED
from fleetcast.schedulers.nodes import MARK
from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.kubernetes.test_nodes import STALE_S, Marking, fill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes

NODES = tuple(f"k{number:04d}" for number in range(1000))
FIRST, LAST = NODES[:50], NODES[-1]
PATIENT_S = 300.0  # for each of its passes; this machine may be busy
Marks = tuple[str, str | None, bool]  # status of the condition, the label, whether there is a taint of ours
CLEAN, LOW, HIGH, UNKNOWN = ("", None, False), ("False", "low", False), ("True", "high", True), ("Unknown", None, False)


@pytest.fixture
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ControlPlane]:
    made = ControlPlane(needed(kubernetes, request), tmp_path, authorization="RBAC")
    try:
        fill(made, NODES)
        yield made
    finally:
        made.stop()


def marks_of(node: dict[str, Any]) -> Marks:
    status = next((row["status"] for row in node["status"]["conditions"] if row["type"] == FAILURE_EXPECTED), "")
    tainted = any(row["key"] == MARK for row in node["spec"].get("taints", []))
    return status, node["metadata"]["labels"].get(MARK), tainted


class Boards(threading.Thread):
    """A board each second; a test sets what it says."""

    def __init__(self, marking: Marking) -> None:
        super().__init__(daemon=True)
        self.risk, self.age_s = dict.fromkeys(FIRST, 0.9), 0.0
        self._marking, self._over = marking, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.wait(1.0):
            self._marking.publish(self.age_s, **self.risk)

    def end(self) -> None:
        self._over.set()
        self.join()


def test_a_thousand_nodes_are_marked_changed_given_up_and_taken_back(plane: ControlPlane, tmp_path: Path) -> None:
    def counted(marks: Marks) -> int:
        time.sleep(0.5)  # a list of all nodes is work
        return sum(marks_of(node) == marks for node in plane.items("/api/v1/nodes"))

    def until(what: str, check: Callable[[], bool]) -> None:
        began = time.monotonic()
        plane.until(what, check, PATIENT_S)
        print(f"{what}: {time.monotonic() - began:.1f} s; ", end="")

    print(f"\n{len(NODES)} nodes: ", end="")
    marking = Marking(plane, tmp_path, "PreferNoSchedule", NODES)
    boards = Boards(marking)
    try:
        until("a tenth of the first pass", lambda: counted(LOW) > len(NODES) / 10)
        boards.risk[LAST] = 0.9
        until("a band that changes meanwhile", lambda: marks_of(marking.node(LAST)) == HIGH)
        assert counted(LOW) + counted(HIGH) < len(NODES), "it did not wait for the whole pass"
        until("the rest", lambda: counted(LOW) + counted(HIGH) == len(NODES))
        boards.risk[LAST] = 0.0
        until("a band that changes after it", lambda: marks_of(marking.node(LAST)) == LOW)
        boards.age_s = 2 * STALE_S
        until("an old board", lambda: counted(UNKNOWN) == len(NODES))
        began = time.monotonic()
        marking.cli("withdraw", "nodes")
        print(f"withdrawal: {time.monotonic() - began:.1f} s; ", end="")
        assert counted(CLEAN) == len(NODES)
    finally:
        boards.end()
        marking.end()
