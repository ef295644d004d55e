"""Roles wait for changes instead of polling. Here nothing else ends a wait: a missed wake-up would hang."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleetcast.fleet import file_changes
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.event_wait import wait_for_event
from fleetcast.service import adapters
from fleetcast.service.adapter_records import AdapterRecords
from fleetcast.service.api.broadcaster import EventBroadcaster
from fleetcast.service.board.board import BoardWriter, Section
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.config import AdapterConfig, Config, PipelineConfig
from fleetcast.service.pipeline.other_pipelines import OtherPipelines
from fleetcast.service.placer import start_times
from tests.service.adapters_world import DOORS, PORT
from tests.service.adapters_world import World as AdaptersWorld
from tests.service.api_world import NOW_MS, publish, sections
from tests.service.placer.test_queues import QueueWorld
from tests.service.placer_world import World as PlacerWorld

LONG_S, PATIENCE_S = 3600.0, 60.0
RUNNING: "list[asyncio.Future[None]]" = []


@pytest.fixture(autouse=True)
def changes_alone_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_changes, "REST_S", LONG_S)
    monkeypatch.setattr(ManualClock, "convert_to_wall_s", lambda self, fleet_s: LONG_S)


@contextlib.asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator[None]:
    """Run a role beside the test. Raises its error as soon as `until` meets it, and at the end."""
    task = asyncio.ensure_future(work)
    RUNNING.append(task)
    try:
        yield
    finally:
        RUNNING.remove(task)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(value: Callable[[], object], expected: object) -> None:
    """Wait for a value. Raises the error of a role that has ended."""
    ends_s = asyncio.get_running_loop().time() + PATIENCE_S
    while (found := value()) != expected:
        for task in RUNNING:
            if task.done():
                task.result()
        assert asyncio.get_running_loop().time() < ends_s, f"still {found}, not {expected}"
        await asyncio.sleep(0.005)


def test_the_placer_reads_each_board_and_each_file_of_queues_when_it_comes(tmp_path: Path) -> None:
    world = QueueWorld(tmp_path)

    async def run() -> None:
        async with running(world.worker.run()):
            for sequence in (1, 2, 3):
                world.board.publish()
                await until(lambda: world.service.view.board and world.service.view.board.sequence, sequence)
            world.rewrite("[queue.a]\n")
            await until(lambda: world.service.queues.file.text, "[queue.a]\n")
        assert world.worker._changes._watch is None, "the descriptor is given back, also when the task is cancelled"

    asyncio.run(run())
    world.close()


def test_a_new_file_of_queues_is_followed_by_a_pass_at_once(tmp_path: Path) -> None:
    world = QueueWorld(tmp_path)
    world.board.publish()

    async def run(client: httpx.AsyncClient) -> None:
        async with running(world.worker.run()):
            await until(lambda: world.service.view.board is None, False)
            for number in range(5):
                body = {"request_id": f"b{number}", "queue": "b", "gpus_per_node": 8}
                assert (await client.post("/queue", json=body)).status_code == 202
            await until(lambda: len(world.service.ledger.list_queue_entries()), 1)
            world.file.write_text("[queue.b]\nlimit = {gpu = 40}\n")
            await until(lambda: len(world.service.ledger.list_queue_entries()), 0)

    world.run(run)
    world.close()


def test_a_request_and_a_stop_end_the_wait_of_the_placer(tmp_path: Path) -> None:
    world = QueueWorld(tmp_path)
    world.board.publish()

    async def run(client: httpx.AsyncClient) -> None:
        working = asyncio.ensure_future(world.worker.run())
        await until(lambda: world.service.view.board is None, False)
        for name in ("a0", "a1"):
            body = {"request_id": name, "queue": "a", "gpus_per_node": 8}
            assert (await client.post("/queue", json=body)).status_code == 202
            await until(lambda: len(world.service.ledger.list_queue_entries()), 0)
        world.worker.stop()
        await asyncio.wait_for(working, PATIENCE_S)

    world.run(run)
    world.close()


def test_event_streams_show_each_board_when_it_comes(tmp_path: Path) -> None:
    async def run() -> None:
        writer, stream = publish(tmp_path), EventBroadcaster(BoardCache(tmp_path / "board"), heartbeat_s=LONG_S)
        events = stream.stream_events()
        assert b"retry" in await anext(events)
        assert b'"sequence":1' in await anext(events)
        for sequence in (2, 3, 4):
            writer.publish(sections(NOW_MS + sequence), NOW_MS + sequence)
            event = await asyncio.wait_for(anext(events), PATIENCE_S)
            assert b'"sequence":%d' % sequence in event
        urgent = {"as_of_ms": NOW_MS, "rows": [{"node": "n001", "type": "lost"}]}
        writer.publish_urgent([Section("doc.urgent", json.dumps(urgent).encode(), NOW_MS)], NOW_MS)
        assert b"event: hard" in await asyncio.wait_for(anext(events), PATIENCE_S)
        await events.aclose()
        await stream.close()

    asyncio.run(run())


def test_start_times_follow_boards_and_the_ledger_without_polling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_times, "RETRY_S", LONG_S)
    monkeypatch.setattr(start_times, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(start_times, "SHARE", math.inf)
    world, rests = PlacerWorld(tmp_path), list[float]()
    world.board.jobs = {"busy": range(16)}

    async def wait(event: asyncio.Event, most_s: float | None) -> bool:
        if event is world.starts._changed:
            rests.append(most_s or 0.0)
        return await wait_for_event(event, most_s)

    monkeypatch.setattr(start_times, "wait_for_event", wait)

    def list_sampled_requests() -> set[str]:
        return set() if world.starts.paths is None else set(world.starts.paths.starts_s)

    async def run(client: httpx.AsyncClient) -> None:
        async with running(world.starts.run()), running(world.worker.run()):
            await until(lambda: len(rests), 1)  # there is no board yet
            world.board.publish()
            await until(lambda: world.starts.paths is None, False)
            body = {"request_id": "large", "gang": 5, "gpus_per_node": 8}
            assert (await client.post("/queue", json=body)).status_code == 202
            await until(list_sampled_requests, {"large"})
            assert (await client.delete("/queue/large")).status_code == 200
            await until(list_sampled_requests, set())
        assert min(rests) == LONG_S

    world.run(run)
    world.close()


def test_a_stop_ends_the_rest_of_the_start_times(tmp_path: Path) -> None:
    world = PlacerWorld(tmp_path)
    world.board.publish()

    async def run() -> None:
        working = asyncio.ensure_future(world.starts.run())
        await until(lambda: world.starts.paths is None, False)
        world.starts.stop()
        await asyncio.wait_for(working, PATIENCE_S)

    asyncio.run(run())
    world.close()


async def serve(world: AdaptersWorld) -> None:
    """Run the adapters."""
    while True:
        world.host.begin_due_steps(world.reader.latest())
        await world.host.wait_for_change()
        if world.host.has_ended_step:
            world.host.records.write_status(world.host.make_status())


def test_adapters_follow_boards_withdrawals_and_their_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "REST_S", LONG_S)
    world = AdaptersWorld(tmp_path)

    async def run() -> None:
        async with running(serve(world)):
            for risk, band in ((0.9, "high"), (0.0, "low"), (0.9, "high")):
                world.publish(risk, 0.0)
                await until(lambda: PORT.bands().get("n1"), band)
            await until(lambda: world.host.records.read_status().adapters[0].writes, 4)
            AdapterRecords(tmp_path).mark_withdrawn("memory")
            await until(PORT.bands, {})

    asyncio.run(run())


def test_an_adapter_that_reports_its_news_is_woken_by_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "REST_S", LONG_S)
    world = AdaptersWorld(tmp_path, AdapterConfig(f"{DOORS}:following_door", name="following", mode="write"))

    async def run() -> None:
        async with running(serve(world)):
            world.publish(0.9, 0.0)
            await until(PORT.bands, {"n1": "high", "n2": "low"})
            for _ in range(3):
                await until(lambda: world.host.writers[0].status.held_back, 0)
                PORT.held = {}
                PORT.report_news()
                await until(PORT.bands, {"n1": "high", "n2": "low"})

    asyncio.run(run())


def test_steps_of_an_adapter_are_apart_however_often_its_news_move(tmp_path: Path) -> None:
    """Its own writes may be its news, as where it watches what it writes."""
    world = AdaptersWorld(tmp_path, AdapterConfig(f"{DOORS}:awaited_door", name="awaited", mode="write"))
    steps, step = 0, world.host.writers[0].step

    def count(*given: Any) -> Any:
        nonlocal steps
        steps, PORT.news = steps + 1, PORT.news + 1
        return step(*given)

    world.host.writers[0].step = count  # type: ignore[method-assign]
    world.publish(0.9, 0.0)

    async def run() -> float:
        began_s = asyncio.get_running_loop().time()
        async with running(serve(world)):
            await until(lambda: steps >= 6, True)
            return asyncio.get_running_loop().time() - began_s

    assert asyncio.run(run()) >= 5 * adapters.AWAITED_POLL_S


def test_the_first_pipeline_reads_the_board_of_another_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(state=str(tmp_path), pipeline=PipelineConfig(instances=2))
    others = OtherPipelines(config, ManualClock(NOW_MS), lambda rows: None, asyncio.Event())
    seen: list[int] = []

    def poll() -> bool:
        board = others.each[0].reader.latest()
        seen.append(0 if board is None else board.sequence)
        return False

    monkeypatch.setattr(others, "poll", poll)

    async def run() -> None:
        async with running(others.work(Any)):
            for sequence in (1, 2, 3):  # its folder comes with the first one
                writer = BoardWriter(config.get_pipeline_folder(1) / "board")
                writer.publish([Section("a", b"", NOW_MS)], NOW_MS)
                await until(lambda: seen[-1:], [sequence])

    asyncio.run(run())


def test_the_error_of_a_role_that_ends_is_raised_at_once() -> None:
    async def fail() -> None:
        raise OSError("no descriptor left")

    async def run() -> None:
        async with running(fail()):
            await until(lambda: 0, 1)

    with pytest.raises(OSError, match="no descriptor left"):
        asyncio.run(run())
