"""A training loop that is asked to stop, against the api and a real placer."""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetcast.placement.actions.life import ActionState
from tests.placement.actions.action_world import make_action
from tests.service.placer_world import NOW_MS
from tests.service.served_placer import ServedPlacer, serve_placer

from fleetcast_client import Client, Reporter, reporter  # isort: skip


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedPlacer]:
    monkeypatch.setattr(reporter, "POLL_S", 0.02)
    with serve_placer(tmp_path) as found:
        yield found


def send(served: ServedPlacer, job: str = "big", **changes: object) -> str:
    control = served.world.service.actions
    action = make_action(job, by_ms=NOW_MS + 10**6, gpus=1.0, **changes)
    (record,) = control.propose([action], NOW_MS).opened
    assert control.send([record.action_id], NOW_MS)
    return record.action_id


def state_of(served: ServedPlacer, action_id: str) -> ActionState:
    return served.world.service.actions.get_action(action_id).state


def test_a_training_loop_sees_the_action_and_accepts_it_at_its_checkpoint(served: ServedPlacer) -> None:
    action_id = send(served)
    send(served, "another-job")
    report = Reporter(served.url, job="big", attempt=1, rank=0)
    stopped_at = None
    for step in range(2000):
        if actions := report.pending_actions():
            assert (actions[0]["kind"], actions[0]["grace_s"]) == ("preempt", 120.0)
            assert report.accept(actions[0])
            stopped_at = step
            break
        time.sleep(0.005)
    assert stopped_at is not None
    assert state_of(served, action_id) is ActionState.ACCEPTED
    assert report.pending_actions() == []
    report.close(0.0)


def test_a_refusal_has_its_reason_and_an_ended_action_counts_no_more(
    served: ServedPlacer, caplog: pytest.LogCaptureFixture
) -> None:
    action_id = send(served)
    report = Reporter(served.url, job="big", attempt=1, rank=0)
    (row,) = Client(served.url).actions(job="big", state="open")["rows"]
    assert report.refuse(row, "a checkpoint is being read")
    assert served.world.service.actions.get_action(action_id).why == "a checkpoint is being read"
    with caplog.at_level(logging.WARNING):
        assert not report.accept(row)
    assert "is refused (a checkpoint is being read)" in caplog.text
    report.close(0.0)


def test_an_action_of_another_attempt_or_executor_is_not_shown(served: ServedPlacer) -> None:
    send(served, attempt=2)
    send(served, "slow", executor="slurm")
    for job in ("big", "slow"):
        report = Reporter(served.url, job=job, attempt=1, rank=0)
        report.pending_actions()
        time.sleep(0.3)
        assert report.pending_actions() == []
        report.close(0.0)


def test_a_call_waits_for_nothing_and_raises_nothing_while_the_service_is_away(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "POLL_S", 0.01)
    report = Reporter("http://127.0.0.1:9", job="big", attempt=1, rank=0)
    with caplog.at_level(logging.WARNING):
        began = time.perf_counter()
        assert report.pending_actions() == []
        assert time.perf_counter() - began < 1.0
        time.sleep(0.3)
    assert caplog.text.count("no actions can be read") == 1, "once, not with every poll"
    report.close(0.0)
    assert Reporter("", job="big").pending_actions() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_polls_nothing(served: ServedPlacer) -> None:
    send(served)
    report = Reporter(served.url, job="big", attempt=1, rank=0)
    while not report.pending_actions():
        time.sleep(0.01)
    child = os.fork()
    if not child:
        os._exit(len(report.pending_actions()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    report.close(0.0)
