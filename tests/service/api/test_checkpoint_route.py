"""How often to checkpoint: from the risk of a job's own nodes and what its checkpoints take."""

from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.models.jobs.checkpointing import compute_ettr, make_checkpoint_plan
from fleetcast.service.api.app import create_app
from fleetcast.service.api.routes.checkpoint import _describe_failure_rate
from fleetcast.service.board.board import Section
from fleetcast.service.pipeline.publish import encode
from tests.service.api_world import NOW_MS, Client, config, publish


def asked(folder: Path, seen: dict[str, Any]) -> dict[str, Any]:
    publish(folder).publish([Section("doc.fingerprints", encode({"team/a": seen}), NOW_MS)], NOW_MS)
    with Client(create_app(config(folder), ManualClock(NOW_MS))) as client:
        body: dict[str, Any] = client.get("/v1/jobs/team/a/checkpoint").json()
        return body


def test_the_interval_follows_the_risk_of_its_nodes_and_its_cost(tmp_path: Path) -> None:
    body = asked(tmp_path, {"checkpoint_cost_s": 30.0, "checkpoint_cost_basis": "measured", "checkpoint_every_s": 9e3})
    assert body["failure_rate_per_day"] == pytest.approx(0.5108, abs=1e-3)  # n001 fails within a day with 0.4
    assert body["interval_s"] == pytest.approx((2 * 30 * 86_400 / 0.5108) ** 0.5, rel=1e-3)
    assert body["expected_ettr"] > body["ettr_now"]
    assert "every 53 min: 1 node fails once in 47 h and" in body["sentence"]


@pytest.mark.parametrize(
    ("nodes", "rate", "said"),
    [
        (1, 0.00342, "1 node fails once in 292 days"),
        (2, 0.0001, "2 nodes fail once in 27 years"),
        (4096, 1.0, "4,096 nodes fail once a day"),
        (512, 3.328, "512 nodes fail 3.3 times a day"),
        (9000, 1234.5, "9,000 nodes fail 1,234 times a day"),
    ],
)
def test_a_rate_is_told_as_people_say_it(nodes: int, rate: float, said: str) -> None:
    assert _describe_failure_rate(nodes, rate) == said


def test_without_a_cost_nothing_is_made_up(tmp_path: Path) -> None:
    body = asked(tmp_path, {"checkpoint_cost_s": None})
    assert (body["interval_s"], body["expected_ettr"]) == (None, None)
    assert body["sentence"] == "No event reports what a checkpoint of it takes."


def test_a_job_without_nodes_and_one_that_nobody_knows(tmp_path: Path) -> None:
    publish(tmp_path)
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
        assert client.get("/v1/jobs/b/checkpoint").json()["sentence"] == "It holds no nodes now."
        assert client.get("/v1/jobs/none/checkpoint").status_code == 404


def test_a_job_that_was_not_looked_at_yet_and_one_that_is_over_say_so(tmp_path: Path) -> None:
    publish(tmp_path).publish([Section("doc.fingerprints", encode({}), NOW_MS)], NOW_MS)
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
        runs, over = (client.get(f"/v1/jobs/{job}/checkpoint").json() for job in ("team/a", "c"))
    assert runs["sentence"] == "It was not looked at yet; ask again in some seconds."
    assert over["sentence"] == "It is failed: there is nothing left to checkpoint."
    assert runs["interval_s"] is over["interval_s"] is None


@pytest.mark.parametrize(("cost_s", "rate"), [(1.0, 0.01), (30.0, 3.3), (120.0, 40.0)])
def test_no_other_interval_is_much_better(cost_s: float, rate: float) -> None:
    plan = make_checkpoint_plan(cost_s, rate)
    others = [compute_ettr(plan.interval_s * factor, cost_s, rate) for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)]
    assert plan.expected_ettr > max(others) - 0.01
