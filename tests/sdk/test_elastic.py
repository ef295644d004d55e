"""The agents of an elastic job, as processes that sleep, against the api and a real placer."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.actions.action import ActionKind
from tests.placement.actions.action_world import make_action
from tests.sdk.door import Door, opened
from tests.service.placer_world import NOW_MS
from tests.service.served_placer import ServedPlacer, serve_placer

from fleetcast_client import Reporter, elastic, reporter  # isort: skip

LIMIT_S = 30.0
ENDS_AT_FILE = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedPlacer]:
    monkeypatch.setattr(reporter, "POLL_S", 0.02)
    monkeypatch.setattr(elastic, "EVERY_S", 0.02)
    with serve_placer(tmp_path) as found:
        yield found


class Run:
    """An elastic job on n1 and n2 that runs in a thread. Its agents end when the file `end` exists."""

    def __init__(self, served: ServedPlacer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.control = served.world.service.actions
        self.end = folder / "end"
        self.started: list[tuple[str, Mapping[str, str], subprocess.Popen[Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.refused_node = ""
        self.report = Reporter(served.url, job="big", attempt=1, rank=0)
        tell = self.report.tell

        def record(type: str, fields: dict[str, Any]) -> None:
            self.events.append({"type": type, **fields})
            tell(type, fields)

        monkeypatch.setattr(self.report, "tell", record)
        places = [{"rank": 0, "node": "n1", "gpus": [0, 1]}, {"rank": 1, "node": "n2", "gpus": [0, 1]}]
        self.job = elastic.ElasticJob(self.report, places, self.start, {"queue": "research"})
        self.outcome = ""
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.until(lambda: len(self.started) == 2)

    def _run(self) -> None:
        self.outcome = self.job.run()

    def start(self, place: Any, variables: Mapping[str, str]) -> "subprocess.Popen[Any]":
        if place["node"] == self.refused_node:
            raise OSError("no route to it")
        command = [sys.executable, "-c", ENDS_AT_FILE, str(self.end)]
        self.started.append((place["node"], variables, subprocess.Popen(command, env=os.environ | variables)))
        return self.started[-1][2]

    def send(self, **changes: Any) -> Any:
        (record,) = self.control.propose([make_action(by_ms=NOW_MS + 10**6, gpus=1.0, **changes)], NOW_MS).opened
        assert self.control.send([record.action_id], NOW_MS)
        self.until(self.report.pending_actions)
        (action,) = self.report.pending_actions()
        return action

    def running(self) -> list[str]:
        return [node for node, _, process in self.started if process.poll() is None]

    def until(self, check: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not check():
            assert time.monotonic() < deadline, f"{self.events}, {self.running()} run"
            time.sleep(0.01)

    def close(self) -> str:
        """End the agents, and return the outcome of the job."""
        self.end.touch()
        self.thread.join(LIMIT_S)
        self.report.close(0.0)
        return self.outcome


@pytest.fixture
def run(served: ServedPlacer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(served, tmp_path, monkeypatch)
    yield run
    run.close()


def at(*nodes: str) -> tuple[RankPlacement, ...]:
    return tuple(RankPlacement(7, node, (1,)) for node in nodes)


def test_agents_change_only_after_the_loop_has_accepted(run: Run) -> None:
    action = run.send(kind=ActionKind.REPLACE, ranks=at("n1"), places=at("n3"))
    time.sleep(0.3)
    assert run.running() == ["n1", "n2"]
    assert run.report.accept(action)
    run.until(lambda: run.running() == ["n2", "n3"])
    run.until(lambda: run.events[-1]["type"] == "resized")
    assert [(rank["rank"], rank["node"], rank["gpus"]) for rank in run.events[-1]["ranks"]] == [
        (0, "n2", [0, 1]),
        (1, "n3", [1]),
    ]
    node, variables, _ = run.started[-1]
    assert (node, variables) == (
        "n3",
        {"FLEETCAST_JOB": "big", "FLEETCAST_ATTEMPT": "1", "FLEETCAST_NODE": "n3"},
    )
    assert run.close() == "finished"
    assert [event["type"] for event in run.events] == ["submitted", "started", "resized", "finished"]
    sequences = [event["sequence"] for event in run.events]
    assert sequences == sorted(set(sequences))


def test_a_job_that_ends_after_an_accepted_stop_is_preempted(run: Run) -> None:
    action = run.send()
    assert run.report.accept(action)
    assert run.close() == "preempted"
    assert run.events[-1] == {"type": "preempted", "sequence": elastic.ENDED, "by": "urgent"}


def test_agents_that_do_not_end_after_an_accepted_stop_are_stopped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "END_S", 0.1)
    assert run.report.accept(run.send())
    run.until(lambda: run.running() == [])
    run.thread.join(LIMIT_S)
    assert run.outcome == "preempted"


def test_a_member_without_an_agent_is_replaced_though_no_loop_accepts(run: Run) -> None:
    run.started[0][2].kill()
    run.until(lambda: run.running() == ["n2"])
    run.send(kind=ActionKind.SHRINK, ranks=at("n2"))
    time.sleep(0.3)
    assert run.running() == ["n2"], "only a replacement of lost members needs no checkpoint"
    (row,) = run.control.list_open()
    run.control.refuse(row.action_id, "big", 1, "", NOW_MS, "")
    run.control.propose(
        [make_action(kind=ActionKind.REPLACE, ranks=at("n1"), places=at("n3"), by_ms=NOW_MS + 10**6)], NOW_MS
    )
    (row,) = run.control.list_open()
    assert run.control.send([row.action_id], NOW_MS)
    run.until(lambda: run.running() == ["n2", "n3"])


def test_an_agent_that_cannot_start_refuses_the_action_and_the_job_goes_on(run: Run) -> None:
    run.refused_node = "n3"
    action = run.send(kind=ActionKind.GROW, ranks=(), places=at("n3"))
    assert run.report.accept(action)
    run.until(lambda: not run.control.list_open())
    assert run.control.get_action(action["action_id"]).why == "an agent cannot start: no route to it"
    assert run.running() == ["n1", "n2"]


def test_an_agent_that_ends_with_an_error_fails_the_job(run: Run) -> None:
    run.started[0][2].kill()
    assert run.close() == "failed"
    assert run.events[-1]["message"] == "exit status by node: n1: -9"


def test_a_job_of_no_scheduler_reports_its_own_stop_on_rank_0() -> None:
    with opened(Door()) as door:
        for rank in (0, 1):
            report = Reporter(door.url, job="big", attempt=1, rank=rank)
            report.preempted({"payer": "urgent"})
            assert report.flush()
            report.close(0.0)
    (event,) = door.events
    assert (event["type"], event["by"]) == ("preempted", "urgent")
