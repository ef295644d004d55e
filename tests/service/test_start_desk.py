"""Start times beside the placer: what they are made of, and when they are made anew."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from features.similarity import kinds
from fleet.errors import StaleError
from fleet.requests import PlacementRequest
from placement.timeline import RUN_LEVELS
from service.estimates import shape_of_request
from service.kind_tables import LEVELS, RUN
from tests.service.placer_world import NOW_MS, HandBoard, World

NODE = PlacementRequest(request_id="x", gpus_per_node=8, user="ada")
HOUR_MS = 3_600_000


class ToldBoard(HandBoard):
    """With a model's word: every running job has an hour to go, and a job like NODE runs for two."""

    def sections(self) -> dict[str, Any]:
        other = PlacementRequest(request_id="q1", gpus_per_node=8, user="ada")
        key = next(
            key for key in kinds(shape_of_request(NODE)).values() if key in kinds(shape_of_request(other)).values()
        )
        return {
            **super().sections(),
            "jobs.running.left_s": np.full((len(self.jobs), len(LEVELS)), 3600, np.float32),
            RUN[0]: np.array([key], np.uint64),
            RUN[1]: np.full((1, len(LEVELS)), 7200, np.float32),
        }


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Sixteen nodes, all held."""
    world = World(tmp_path)
    world.board.jobs = {"a": range(8), "b": range(8, 16)}
    world.board.publish()
    yield world
    world.close()


def told(world: World) -> None:
    board = ToldBoard(world.config.board, world.board.jobs)
    board.publish()


def hours(world: World, request: PlacementRequest = NODE) -> list[float]:
    start_ms = asyncio.run(world.starts.estimate(request)).start_ms
    assert start_ms is not None
    return [round((start - NOW_MS) / HOUR_MS, 2) for start in start_ms.values()]


def test_levels_of_the_board_are_those_of_the_paths() -> None:
    assert LEVELS == RUN_LEVELS


def test_what_a_model_told_of_running_jobs_decides(world: World) -> None:
    told(world)
    assert hours(world) == [1, 1, 1]


def test_what_a_model_told_of_waiting_jobs_decides(world: World) -> None:
    world.board.jobs = {"a": range(16)}
    told(world)
    for number in range(16):
        request = PlacementRequest(request_id=f"q{number}", gpus_per_node=8, user="ada")
        world.desk.enqueue(request, "me")
    assert hours(world) == [3, 3, 3]  # all nodes are free in one hour, and taken for two


def test_without_a_models_word_finished_jobs_serve(world: World) -> None:
    low, _, high = hours(world)
    assert 0 < low < high


def test_paths_are_kept_until_they_are_due(world: World) -> None:
    async def work() -> tuple[bool, bool, bool]:
        await world.starts.refresh()
        fresh = world.starts._is_due()
        world.desk.enqueue(NODE, "me")
        world.starts._at_s -= 5
        changed = world.starts._is_due()
        await world.starts.refresh()
        world.starts._at_s -= 60
        return fresh, changed, world.starts._is_due()

    assert asyncio.run(work()) == (False, True, True)


def test_a_stale_board_gives_no_estimate(world: World) -> None:
    world.clock.advance(3600)
    with pytest.raises(StaleError):
        asyncio.run(world.starts.estimate(NODE))


def test_the_desk_stops(world: World) -> None:
    async def work() -> None:
        running = asyncio.ensure_future(world.starts.run())
        while world.starts.paths is None:
            await asyncio.sleep(0.01)
        world.starts.stop()
        await asyncio.wait_for(running, 10)
        assert running.done()

    asyncio.run(work())
