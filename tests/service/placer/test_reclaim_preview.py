"""Refused dry runs: they name what the next pass proposes for the same request, and record nothing."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.placement.ledger.test_migrate import dump
from tests.service.placer.test_act import ActWorld
from tests.service.placer.test_reclaim import FILE, OLD_S, AdvisedWorld
from tests.service.placer_world import GPUS, NODES, NOW_MS

IMPATIENT = FILE.replace('"advise"', '"advise"\npreempt_after_s = 0')


@pytest.fixture
def world(tmp_path: Path) -> Iterator[AdvisedWorld]:
    world = AdvisedWorld(tmp_path)
    yield world
    world.close()


def ask_dry_run(world: AdvisedWorld, request_id: str, queue: str, nodes: int, **more: Any) -> dict[str, Any]:
    body = {"request_id": request_id, "queue": queue, "gang": nodes, "gpus_per_node": GPUS, "dry_run": True, **more}
    found: dict[str, Any] = world.ask("POST", "/placements", json=body)
    return found


def test_a_refused_dry_run_names_the_jobs_their_costs_and_the_place_after_them(world: AdvisedWorld) -> None:
    world.board.more = {"saved": {"checkpoint_ms": NOW_MS + 1000 * (OLD_S - 10)}}
    world.fill(own=("owed", 4), saved=("lender", 4), old=("lender", 8))
    world.beat(1000 * OLD_S)
    world.ask("GET", "/queues")  # reads the board
    before = dump(world.config.ledger)
    answer = ask_dry_run(world, "p", "owed", 4)
    assert dump(world.config.ledger) == before
    assert answer["outcome"] == "refused"
    found = answer["reclaim"]
    assert (found["code"], found["sentence"]) == (
        "found",
        "would stop 1 job for it (saved), at 2.8 GPU-hours of lost work",
    )
    (action,) = found["actions"]
    assert (action["kind"], action["job"], action["queue"], action["gpus"]) == ("preempt", "saved", "lender", 32)
    assert action["executor"] == "advice"
    assert action["cost"]["lost"] == pytest.approx(32 * 10)
    assert action["cost"]["restart"] == 32 * 300
    assert found["cost_gpu_s"] == action["cost_gpu_s"] == pytest.approx(32 * 310)
    freed = {rank["node"] for rank in action["ranks"]}
    assert {rank["node"] for rank in found["ranks"]} == freed
    assert len(found["ranks"]) == 4
    assert found["not_before_ms"] == world.clock.now_ms() + 300_000
    assert world.service.ledger.list_queue_entries() == []


@pytest.mark.parametrize("seed", range(12))
def test_the_next_pass_proposes_the_set_that_the_dry_run_names(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    world = AdvisedWorld(tmp_path, IMPATIENT)
    sizes = [4, 2, 2, 4, 4] if seed % 2 else [1] * 6 + [10]
    jobs = {f"j{at}": (rng.choice(["lender", "owed", "batch"]), size) for at, size in enumerate(sizes)}
    world.board.more = {name: {"checkpoint_ms": NOW_MS + rng.randrange(1000 * OLD_S)} for name in jobs}
    world.fill(**jobs)
    world.beat(1000 * OLD_S)
    queue, nodes = rng.choice(["owed", "front", "lender"]), rng.choice([1, 2, 4])
    if seed % 3 == 0:
        world.wait_for("before", "owed", 2)
    found = ask_dry_run(world, "p", queue, nodes)["reclaim"]
    world.wait_for("p", queue, nodes)
    world.step()
    proposed = {job: payer for job, payer in world.list_proposed().items() if payer == "p"}
    assert proposed == {action["job"]: "p" for action in found["actions"]}
    steps = {step["code"]: step["sentence"] for step in world.ask("GET", "/queue/p/why")["ladder"]}
    if found["code"] != "waits":
        assert steps["reclaim"] == found["sentence"]
    else:
        assert "reclaim" not in steps
    world.close()


def test_a_placed_dry_run_and_one_without_reclaim_say_nothing_of_stops(tmp_path: Path, world: AdvisedWorld) -> None:
    world.board.jobs["own"], world.board.queue_of["own"] = range(NODES - 4), "owed"
    world.beat(0)
    placed = ask_dry_run(world, "p", "owed", 4)
    assert placed["outcome"] == "placed"
    assert "reclaim" not in placed
    (folder := tmp_path / "off").mkdir()
    off = AdvisedWorld(folder, FILE.replace("advise", "off"))
    off.fill(old=("lender", 16))
    refused = ask_dry_run(off, "p", "owed", 4)
    assert refused["outcome"] == "refused"
    assert "reclaim" not in refused
    off.close()


def test_a_dry_run_says_why_no_job_may_be_stopped(world: AdvisedWorld) -> None:
    world.board.more = {"old": {"preemptible": False}}
    world.fill(old=("lender", 16))
    world.beat(1000 * OLD_S)
    found = ask_dry_run(world, "p", "owed", 4)["reclaim"]
    assert (found["code"], found["sentence"]) == ("none", "stops no job: 1 job protected by owner or queue")
    assert found["actions"] == found["ranks"] == []
    assert found["not_before_ms"] is None


def test_a_dry_run_behind_another_request_waits_for_it(world: AdvisedWorld) -> None:
    world.fill(old=("lender", 16))
    world.beat(1000 * OLD_S)
    world.wait_for("first", "owed", 4, priority=5)
    found = ask_dry_run(world, "p", "owed", 4)["reclaim"]
    assert found["code"] == "waits"
    assert "first is next" in found["sentence"]


def test_a_dry_run_of_a_waiting_request_keeps_its_place(world: AdvisedWorld) -> None:
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    world.beat(1000 * OLD_S)
    world.wait_for("p", "owed", 4)
    queued_ms = world.clock.now_ms()
    world.beat(30_000)
    world.wait_for("later", "owed", 4)
    found = ask_dry_run(world, "p", "owed", 4)["reclaim"]
    assert found["code"] == "found"
    assert found["not_before_ms"] == queued_ms + 300_000


def test_in_the_mode_act_a_job_without_an_executor_is_not_named(tmp_path: Path) -> None:
    world = ActWorld(tmp_path)
    world.fill(a=("lender", 8), b=("lender", 8))
    world.clock.advance(OLD_S)
    world.poll("b")
    world.beat(0)
    (action,) = ask_dry_run(world, "p", "owed", 4)["reclaim"]["actions"]
    assert (action["job"], action["executor"]) == ("b", "agents")
    assert world.states() == {}
    world.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gang": 0}, "gang"),
        ({"gang": "many"}, "gang"),
        ({"limit_s": -1.0}, "limit_s"),
        ({"queue": "nowhere"}, "nowhere"),
        ({"pool": "nowhere"}, "nowhere"),
        ({"dry_run": "yes"}, "dry_run"),
        ({"request_id": ""}, "request_id"),
    ],
)
def test_a_dry_run_of_nonsense_is_refused_with_the_reason(
    world: AdvisedWorld, change: dict[str, Any], said: str
) -> None:
    world.fill(old=("lender", 16))
    body = {"request_id": "p", "queue": "owed", "gang": 4, "gpus_per_node": GPUS, "dry_run": True} | change
    assert said in world.ask("POST", "/placements", 422, json=body)["detail"]


def test_a_dry_run_without_a_fresh_board_or_with_nan_is_refused(world: AdvisedWorld) -> None:
    world.fill(old=("lender", 16))
    world.ask("POST", "/placements", 400, content=b'{"request_id": "p", "limit_s": NaN, "dry_run": true}')
    world.clock.advance(3600)
    body = {"request_id": "p", "queue": "owed", "dry_run": True}
    world.ask("POST", "/placements", 503, json=body)
