"""Advice on moves in `GET /fragmentation`: the jobs that could make room for the largest waiting gang elsewhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetcast.service.http.access import Access, parse_tokens
from fleetcast.service.placer.http import make_app
from tests.placement.ledger.test_migrate import dump
from tests.service.placer.test_reclaim import FILE, OLD_S, AdvisedBoard, AdvisedWorld
from tests.service.placer_world import GPUS, NOW_MS

MOVES = FILE.replace('"advise"', '"off"') + '[moves]\nmode = "advise"\n'


class MovesBoard(AdvisedBoard):
    """A board on which some jobs hold only the first GPUs of their nodes. part: job → how many on each."""

    part: dict[str, int]

    def sections(self) -> dict[str, Any]:
        found = super().sections()
        holders = found["gpu.job"] = np.array(found["gpu.job"])
        for number, (job, nodes) in enumerate(self.jobs.items()):
            for node in nodes:
                holders[node, self.part.get(job, GPUS) :] = np.where(
                    holders[node, self.part.get(job, GPUS) :] == number, -1, holders[node, self.part.get(job, GPUS) :]
                )
        return found


class MovesWorld(AdvisedWorld):
    """Two half full nodes, and jobs on all others: a gang of one whole node fits only if one half moves."""

    def __init__(self, folder: Path, text: str = MOVES) -> None:
        super().__init__(folder, text)
        self.board = MovesBoard(self.config.board)
        self.board.queue_of, self.board.more, self.board.part = {}, {}, {"half": 4, "other": 4}

    def begin(self, **more: Any) -> None:
        self.fill(full=("lender", 14), half=("lender", 1), other=("lender", 1))
        self.wait_for("p", "owed", 1, **more)
        self.pass_at(OLD_S)

    def advice(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", "/fragmentation")["moves"]
        return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MovesWorld]:
    world = MovesWorld(tmp_path)
    yield world
    world.close()


def test_the_cheapest_job_moves_to_where_it_fits(world: MovesWorld) -> None:
    world.board.more = {"half": {"checkpoint_ms": NOW_MS + 1000 * (OLD_S - 10), "gpus": 4}, "other": {"gpus": 4}}
    world.begin()
    before = dump(world.config.ledger)
    found = world.advice()
    assert dump(world.config.ledger) == before
    assert (found["code"], found["request_id"], found["gpus"]) == ("found", "p", 8)
    (move,) = found["moves"]
    assert (move["kind"], move["job"], move["gpus"], move["executor"]) == ("move", "half", 4, "advice")
    assert {rank["node"] for rank in move["ranks"]} == {"n15"}
    assert {rank["node"] for rank in move["places"]} == {"n16"}
    assert (found["ranks"][0]["node"], len(found["ranks"][0]["gpus"])) == ("n15", 8)
    assert move["cost"]["lost"] == pytest.approx(4 * 10)
    assert found["cost_gpu_s"] == move["cost_gpu_s"] == pytest.approx(4 * 310)
    assert found["sentence"].startswith("1 move would let p (8 GPUs) in now, at 0.3 GPU-hours; ")
    assert move["sentence"] == "moves attempt 1 of half (4 GPUs) for request p: a waiting gang fits then"


def test_a_start_time_gives_the_gain(world: MovesWorld) -> None:
    world.begin()
    assert world.advice()["gain_gpu_s"] is None
    start_ms = world.clock.now_ms() + 3_600_000
    world.service.backlog.starts = {"p": (start_ms, start_ms, start_ms)}
    world.beat(0)
    found = world.advice()
    assert found["gain_gpu_s"] == 8 * 3600
    assert found["sentence"].endswith("waiting would cost 8.0 GPU-hours")


@pytest.mark.parametrize(
    "more", [{"preemptible": False}, {"queue": "unknown"}, {"started_ms": NOW_MS + 1000 * (OLD_S - 60)}]
)
def test_a_job_that_may_not_stop_does_not_move(world: MovesWorld, more: dict[str, Any]) -> None:
    world.board.more = {"half": more}
    world.begin()
    assert [move["job"] for move in world.advice()["moves"]] == ["other"]


def test_no_move_helps_a_gang_in_a_full_fleet_or_a_gang_that_does_not_wait(world: MovesWorld) -> None:
    world.board.more = {"half": {"preemptible": False}, "other": {"preemptible": False}}
    world.begin()
    found = world.advice()
    assert (found["code"], found["moves"], found["request_id"]) == ("no_place", [], "p")
    world.ask("DELETE", "/queue/p")
    found = world.advice()
    assert (found["code"], found["request_id"]) == ("none_waits", "")


def test_without_the_mode_the_answer_says_nothing_of_moves(tmp_path: Path) -> None:
    world = MovesWorld(tmp_path, FILE)
    world.begin()
    assert "moves" not in world.ask("GET", "/fragmentation")
    world.close()


def test_a_bound_token_gets_no_advice(world: MovesWorld) -> None:
    world.begin()
    world.app = make_app(world.service, access=Access(parse_tokens("lead read 123456789abcdefghi queues=owed", "test")))
    world.ask("GET", "/fragmentation", 403, headers={"authorization": "Bearer 123456789abcdefghi"})
