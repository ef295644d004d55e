"""Advice on jobs to stop: what a pass proposes for a request that is owed GPUs, and how the advice ends."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.service.config import PlacerConfig
from tests.service.placer.test_queues import QueueWorld
from tests.service.placer_world import GPUS, NODES, NOW_MS, HandBoard

OLD_S = 2000
FILE = """
[policy]
reclaim = "advise"
[class.urgent]
preempts = ["batch"]
[class.batch]
[queue.owed]
guaranteed = {gpu = 64}
[queue.lender]
guaranteed = {gpu = 64}
[queue.batch]
class = "batch"
[queue.front]
class = "urgent"
"""


class AdvisedBoard(HandBoard):
    """A board whose jobs belong to queues. `more`: job → further fields of its row."""

    queue_of: dict[str, str]
    more: dict[str, dict[str, Any]]

    def sections(self) -> dict[str, Any]:
        found = super().sections()
        rows = msgspec.json.decode(found["jobs.running"])
        for row in rows:
            row |= {"queue": self.queue_of[row["job"]], **self.more.get(row["job"], {})}
            row["held"] = {f"n{node + 1:02d}": GPUS * 1000 for node in self.jobs[row["job"]]}
        return found | {"jobs.running": msgspec.json.encode(rows)}


class AdvisedWorld(QueueWorld):
    """A placer on a fleet full of jobs: each holds whole nodes and began long ago. Actions may take all GPUs."""

    placer = PlacerConfig(taken_queue_share=1.0, taken_fleet_share=1.0)

    def __init__(self, folder: Path, text: str = FILE) -> None:
        super().__init__(folder, text)
        self.board = AdvisedBoard(self.config.board)
        self.board.queue_of, self.board.more = {}, {}

    def fill(self, **jobs: tuple[str, int]) -> None:
        """Fill the fleet. jobs: name → (queue, nodes)."""
        first = 0
        for name, (queue, nodes) in jobs.items():
            self.board.jobs[name] = range(first, first + nodes)
            self.board.queue_of[name] = queue
            first += nodes
        assert first == NODES
        self.beat(0)

    def wait_for(self, request_id: str, queue: str, nodes: int, **more: Any) -> None:
        body = {"request_id": request_id, "queue": queue, "gang": nodes, "gpus_per_node": GPUS, **more}
        assert self.ask("POST", "/queue", 202, json=body)["outcome"] == "queued"

    def list_proposed(self) -> dict[str, str]:
        """Return job → payer of the proposed actions."""
        rows = [row for row in self.service.actions.list_open() if row.state == "proposed"]
        return {row.action.job: row.action.payer for row in rows}

    def pass_at(self, seconds: float) -> None:
        self.beat(1000 * seconds)
        self.step()


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = AdvisedWorld(tmp_path)
    yield world
    world.close()


def test_a_queue_within_its_guarantee_is_advised_to_take_back_the_cheapest_job(world: AdvisedWorld) -> None:
    world.board.more = {"saved": {"checkpoint_ms": NOW_MS + 1000 * (OLD_S - 10)}}
    world.fill(own=("owed", 4), saved=("lender", 4), old=("lender", 8))
    world.wait_for("p", "owed", 4)
    world.pass_at(OLD_S)
    assert world.list_proposed() == {"saved": "p"}
    (record,) = world.service.actions.list_open()
    assert (record.action.gpus, record.action.reason.code, len(record.action.ranks)) == (32, "guarantee", 4)
    assert record.action.cost.lost == pytest.approx(32 * 10)
    assert record.action.cost.restart == 32 * 300
    why = world.ask("GET", "/queue/p/why")
    assert {"reclaim": "would stop 1 job for it (saved), at 2.8 GPU-hours of lost work"}.items() <= {
        step["code"]: step["sentence"] for step in why["ladder"]
    }.items()


def test_a_repeated_pass_proposes_nothing_twice_and_a_changed_one_withdraws(world: AdvisedWorld) -> None:
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    world.wait_for("p", "owed", 4)
    world.pass_at(OLD_S)
    first = world.service.actions.list_open()
    world.pass_at(30)
    assert world.service.actions.list_open() == first
    world.ask("DELETE", "/queue/p")
    world.pass_at(30)
    assert world.service.actions.list_open() == []
    ended = world.service.actions.get_action(first[0].action_id)
    assert (ended.state, ended.why) == ("withdrawn", "no request waits")


def test_nothing_is_proposed_while_reclaim_is_off(tmp_path: Path) -> None:
    world = AdvisedWorld(tmp_path, FILE.replace("advise", "off"))
    world.fill(own=("owed", 4), old=("lender", 12))
    world.wait_for("p", "owed", 4)
    world.pass_at(OLD_S)
    assert world.list_proposed() == {}
    assert "reclaim" not in [step["code"] for step in world.ask("GET", "/queue/p/why")["ladder"]]
    world.close()


@pytest.mark.parametrize(
    ("queue", "more", "said"),
    [
        ("owed", {"old": {"preemptible": False}}, "stops no job: 1 job protected by owner or queue"),
        ("owed", {"old": {"started_ms": NOW_MS + 1000 * (OLD_S - 60)}}, "stops no job: 1 job with too short a run yet"),
        ("owed", {"old": {"gpus": 0}}, "stops no job: 1 job of unknown size"),
        ("lender", {}, "stops no job: "),
    ],
)
def test_jobs_that_may_not_be_stopped_are_named_by_their_reason(
    world: AdvisedWorld, queue: str, more: dict[str, Any], said: str
) -> None:
    world.board.more = more
    world.fill(old=("lender", 16))
    world.wait_for("p", queue, 4)
    world.pass_at(OLD_S)
    assert world.list_proposed() == {}
    (found,) = [step["sentence"] for step in world.ask("GET", "/queue/p/why")["ladder"] if step["code"] == "reclaim"]
    assert found.startswith(said)


def test_a_class_stops_the_queues_that_it_preempts_beyond_their_guarantees(world: AdvisedWorld) -> None:
    world.fill(held=("owed", 8), spare=("lender", 6), low=("batch", 2))
    world.wait_for("u", "front", 2)
    world.pass_at(OLD_S)
    assert world.list_proposed() == {"low": "u"}
    assert world.service.actions.list_open()[0].action.reason.code == "class"


def test_jobs_that_end_soon_are_waited_for(tmp_path: Path) -> None:
    world = AdvisedWorld(tmp_path, FILE.replace("[class.urgent]", "preempt_after_s = 4000\n[class.urgent]"))
    world.fill(own=("owed", 4), old=("lender", 12))
    world.wait_for("p", "owed", 4)
    world.pass_at(OLD_S)
    assert world.list_proposed() == {}
    (said,) = [step["sentence"] for step in world.ask("GET", "/queue/p/why")["ladder"] if step["code"] == "reclaim"]
    assert said.startswith("stops no job: jobs that end within")
    world.close()


def test_a_request_waits_for_its_patience_before_a_job_would_stop(world: AdvisedWorld) -> None:
    world.fill(own=("owed", 4), old=("lender", 4), big=("lender", 8))
    world.beat(1000 * OLD_S)
    world.wait_for("p", "owed", 4)
    world.pass_at(30)
    (said,) = [step["sentence"] for step in world.ask("GET", "/queue/p/why")["ladder"] if step["code"] == "reclaim"]
    assert said == "stops no job yet: it has waited 30 of 300 s"
    assert world.list_proposed() == {}
    world.pass_at(300)
    assert world.list_proposed() == {"old": "p"}


def test_a_bound_of_lost_work_forbids_the_stop(tmp_path: Path) -> None:
    world = AdvisedWorld(tmp_path, FILE.replace("[class.urgent]", "preempt_gpu_h_per_h = 1\n[class.urgent]"))
    world.fill(own=("owed", 4), old=("lender", 4), big=("lender", 8))
    world.wait_for("p", "owed", 4)
    world.pass_at(OLD_S)
    assert world.list_proposed() == {}
    (said,) = [step["sentence"] for step in world.ask("GET", "/queue/p/why")["ladder"] if step["code"] == "reclaim"]
    assert said.endswith("preempt_gpu_h_per_h allows 1")
    world.close()


@pytest.mark.parametrize(("mode", "ignored"), [("advise", []), ("off", ["checkpoint_cost_s", "preemptible"])])
def test_what_stops_read_of_a_request_is_not_ignored(tmp_path: Path, mode: str, ignored: list[str]) -> None:
    world = AdvisedWorld(tmp_path, FILE.replace("advise", mode))
    world.beat(0)
    facts = {"queue": "owed", "gang": 1, "gpus_per_node": GPUS, "preemptible": True, "checkpoint_cost_s": 60}
    assert world.ask("POST", "/placements", json={"request_id": "p", "dry_run": True, **facts})["ignored"] == ignored
    world.close()
