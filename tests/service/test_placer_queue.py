import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.placer_world import NOW_MS, World, rack_of_64


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.board.jobs = {"a": range(8), "b": range(8, 14)}
    world.board.publish()
    yield world
    world.close()


def queue(world: World, request_id: str, **fields: Any) -> dict[str, Any]:
    response = world.ask("POST", "/queue", {"request_id": request_id, **fields})
    assert response.status_code == 202
    answer: dict[str, Any] = response.json()
    return answer


def rows(world: World) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = world.ask("GET", "/queue").json()["rows"]
    return found


def test_what_fits_is_placed_in_the_next_pass_and_polled(world: World) -> None:
    assert queue(world, "x", gang=2, gpus_per_node=8)["outcome"] == "queued"
    world.step()
    assert rows(world) == []
    (row,) = world.ask("GET", "/placements").json()["rows"]
    assert row["outcome"] == "placed"
    assert {rank["node"] for rank in row["ranks"]} == {"n15", "n16"}
    again = world.ask("POST", "/queue", {"request_id": "x", "gang": 2, "gpus_per_node": 8})
    assert again.json()["outcome"] == "placed"


def test_the_queue_says_why_and_when(world: World) -> None:
    queue(world, **rack_of_64("head"), user="ada", tenant="t", queue="q")
    queue(world, "next", gang=3, gpus_per_node=8, limit_s=50_000)
    world.clock.advance(10)
    world.step()
    asyncio.run(world.starts.refresh())
    head, second = rows(world)
    assert set(head) >= {
        *("request_id", "position", "tenant", "queue", "user", "gang", "gpus_per_node", "priority", "waiting_s"),
        *("why", "start_ms"),
    }
    assert (head["position"], head["user"], head["tenant"], head["queue"]) == (1, "ada", "t", "q")
    assert head["waiting_s"] == 10
    waits = "waits for 64 GPUs (8 x 8 GPUs) inside one rack; 16 free GPUs fit; it is next, when a has ended; starts in "
    assert head["why"].startswith(waits)
    assert NOW_MS < head["start_ms"]["p10"] < head["start_ms"]["p50"] < head["start_ms"]["p90"]
    assert "head is next" in second["why"]


def test_the_queue_survives_a_restart_and_moves_on_with_the_board(world: World) -> None:
    reply = queue(world, **rack_of_64("head"))
    world.restart()
    assert world.ask("POST", "/queue", rack_of_64("head")).json() == reply
    world.step()
    assert len(rows(world)) == 1
    world.board.jobs = {"b": range(8, 14)}
    world.board.publish()
    world.step()
    assert rows(world) == []
    assert world.ask("GET", "/placements/head").json()["topology_level"] == "rack"


def test_placements_and_queue_share_one_ledger(world: World) -> None:
    queue(world, "q", gang=2, gpus_per_node=8)
    waiting = world.ask("POST", "/placements", {"request_id": "q", "gang": 2, "gpus_per_node": 8})
    assert waiting.json()["outcome"] == "queued"
    world.place("p", gang=2, gpus_per_node=8)
    world.step()
    assert len(rows(world)) == 1  # p holds the two free nodes


def test_a_request_is_withdrawn_for_good(world: World) -> None:
    queue(world, "x", gang=9, gpus_per_node=8)
    assert world.ask("DELETE", "/placements/x").status_code == 409
    assert world.ask("DELETE", "/queue/x").json()["state"] == "withdrawn"
    assert rows(world) == []
    assert world.ask("DELETE", "/queue/x").status_code == 409
    assert world.ask("GET", "/placements/x").json()["sentence"] == "refused: withdrawn from the queue"


def test_a_dry_run_cannot_wait(world: World) -> None:
    response = world.ask("POST", "/queue", {"request_id": "x", "dry_run": True})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "dry_run"


def test_a_pass_happens_each_period_and_at_each_board(world: World) -> None:
    world.step()
    queue(world, "x")
    world.worker.wake()
    world.step()
    assert rows(world) == []
    queue(world, "y", gang=3, gpus_per_node=8)
    world.step()
    assert rows(world)[0]["why"].startswith("waits for")
    world.step()  # nothing new, the period is not over
    world.clock.advance(6)
    world.step()
    assert rows(world)[0]["why"].startswith("waits for")


def test_an_estimate_is_answered_and_leaves_no_trace(world: World) -> None:
    queue(world, **rack_of_64("head"))
    before = rows(world)
    answer = world.ask("POST", "/estimate", {"request_id": "x", "gang": 3, "gpus_per_node": 8})
    assert answer.status_code == 200
    estimate = answer.json()
    assert set(estimate) == {"start_ms", "blocked_by", "constraint", "sentence", "as_of_ms", "by", "awaits"}
    assert NOW_MS < estimate["start_ms"]["p10"] <= estimate["start_ms"]["p50"] <= estimate["start_ms"]["p90"]
    assert {row["job"] for row in estimate["blocked_by"]} <= {"a", "b", "head"}
    assert [row["request_id"] for row in rows(world)] == [row["request_id"] for row in before]
    assert world.ask("GET", "/placements").json()["rows"] == []


def test_an_estimate_of_nonsense_is_refused(world: World) -> None:
    answer = world.ask("POST", "/estimate", {"request_id": "x", "gang": 0})
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "gang")


def test_the_queue_tells_of_the_reservation_and_what_comes_free(world: World) -> None:
    assert world.ask("GET", "/queue").json()["reservation"] is None
    queue(world, **rack_of_64("head"))
    world.step()
    asyncio.run(world.starts.refresh())
    body = world.ask("GET", "/queue").json()
    assert body["reservation"]["request_id"] == "head"
    assert 0 <= body["reservation"]["holds_p"] <= 1
    assert sum(row["gpus"] for row in body["backfill"]) == 16
    assert {row["job"] for row in body["releases"]} == {"a", "b"}
