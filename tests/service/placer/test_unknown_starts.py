"""What the queue says where nothing tells the run time of the jobs that run, and how old its start times are."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.requests import PlacementRequest
from tests.service.placer_world import NOW_MS, HandBoard, World


@dataclass
class FirstHourBoard(HandBoard):
    """A site at which no job has ended yet. limit_s: of the jobs that run."""

    limit_s: float | None = None

    def sections(self) -> dict[str, Any]:
        found = super().sections()
        rows = msgspec.json.decode(found["jobs.running"])
        rows = [row | {"limit_s": self.limit_s, "started_ms": NOW_MS - 60_000} for row in rows]
        return found | {
            "durations": msgspec.json.encode({"by_gpus": {}, "all": None}),
            "jobs.running": msgspec.json.encode(rows),
        }


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Sixteen nodes, all held, and a request that waits."""
    world = World(tmp_path)
    world.board.jobs = {"a": range(8), "b": range(8, 16)}
    world.board.publish()
    world.service.enqueue(PlacementRequest(request_id="x", gang=2, gpus_per_node=8, user="ada"), "me")
    yield world
    world.close()


def sampled(world: World, limit_s: float | None = None) -> dict[str, Any]:
    FirstHourBoard(world.config.board, world.board.jobs, limit_s=limit_s).publish()
    world.step()
    asyncio.run(world.starts.refresh())
    found: dict[str, Any] = world.ask("GET", "/queue").json()
    return found


def test_the_queue_has_no_start_time_where_nothing_tells_a_run_time(world: World) -> None:
    page = sampled(world)
    (row,) = page["rows"]
    assert (row["start_ms"], row["by"]) == (None, None)
    assert "when it starts is not known: behind 2 jobs whose run time is not known ('a', 'b')" in row["why"]
    assert (page["reservation"]["holds_p"], page["reservation"]["basis"]) == (None, "prior")
    assert "run time is not known" in page["reservation"]["reason"]
    assert [(row["ends_ms"], row["by"]) for row in page["releases"]] == [(None, "prior")] * 2
    assert page["room"]["opens_ms"] is None
    why = world.ask("GET", "/queue/x/why").json()
    assert (why["start_ms"], why["ladder"][-1]["code"]) == (None, "start")
    assert "not known" in why["sentence"]
    found = asyncio.run(world.starts.estimate(PlacementRequest(request_id="new", gpus_per_node=8, user="ada")))
    assert (found.start_ms, found.by) == (None, None)


def test_room_counts_the_gpus_of_requests_whose_start_is_not_known(world: World) -> None:
    assert sampled(world)["room"]["waiting_gpus"] == 16


def test_a_start_time_that_limits_tell_says_so(world: World) -> None:
    page = sampled(world, limit_s=7200.0)
    (row,) = page["rows"]
    assert row["by"] == page["room"]["by"] == page["reservation"]["by"] == page["reservation"]["basis"] == "limit"
    assert row["start_ms"]["p90"] <= NOW_MS + 7_200_000
    assert row["why"].endswith(" by time limits")
    assert world.ask("GET", "/queue/x/why").json()["sentence"].endswith(" by time limits")


def test_a_first_answer_without_a_start_time_counts_as_unanswered(world: World) -> None:
    sampled(world)
    world.board.jobs = {}
    world.board.as_of_ms += 60_000
    world.clock.advance(60)
    world.board.publish()
    world.step()
    world.starts.record_outcomes()
    assert world.ask("GET", "/queue").json()["record"]["first"] == {
        **{"n": 0, "by_p10": None, "by_p50": None, "by_p90": None, "unanswered": 1, "n_p50": 0, "n_p90": 0}
    }


def test_start_times_and_room_carry_when_they_were_sampled(world: World) -> None:
    assert world.ask("GET", "/queue").json()["starts_as_of_ms"] is None
    sampled(world, limit_s=7200.0)
    world.clock.advance(40)
    page = world.ask("GET", "/queue").json()
    assert page["as_of_ms"] == NOW_MS + 40_000
    assert page["starts_as_of_ms"] == page["room"]["as_of_ms"] == NOW_MS
    assert world.ask("GET", "/queue/x/why").json()["starts_as_of_ms"] == NOW_MS
    world.starts.record_outcomes()
    assert "fleetcast_start_times_age_seconds 40.0" in world.ask("GET", "/metrics").text
