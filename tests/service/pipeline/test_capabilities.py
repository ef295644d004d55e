"""A capability is a line in a list: its section is on the board, its metrics are on the page, its work runs."""

import asyncio
from pathlib import Path

import fleetcast.service.pipeline.pipeline
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import MemorySource
from fleetcast.service.board.board import BoardReader, Section
from fleetcast.service.config import Config
from fleetcast.service.exposition import Page
from fleetcast.service.pipeline.capabilities import CAPABILITIES
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.pipeline.run_times.forecasts import RunForecasts
from fleetcast.service.pipeline.state import FleetState
from fleetcast.service.pipeline.tick import Tick

NOW_MS = 1_789_000_000_000
MOST_LINES = 210


class Census(Capability):
    """Counts nodes; beside the ticks, it notes which state it was given, until it is cancelled."""

    def __init__(self) -> None:
        self.worked_on: FleetState | None = None
        self.was_cancelled = False

    def make_sections(self, tick: Tick) -> list[Section]:
        return [Section("doc.census", str(len(tick.topology)).encode(), tick.now_ms)]

    def make_page(self, tick: Tick) -> bytes:
        page = Page()
        page.add_number("census_nodes", "Nodes.", len(tick.topology))
        return page.encode()

    async def work(self, state: FleetState) -> None:
        self.worked_on = state
        try:
            await asyncio.Event().wait()
        finally:
            self.was_cancelled = True


def test_a_capability_of_the_list_is_published_and_works(tmp_path: Path) -> None:
    topology = Topology.build([NodeSpec(name, 8) for name in ("n1", "n2", "n3")])
    pipeline = Pipeline(
        Config(state=str(tmp_path)),
        ManualClock(NOW_MS),
        topology,
        lambda entities: [MemorySource([])],
        makes=(*CAPABILITIES, lambda setting, made: Census()),
    )

    async def live() -> None:
        running = asyncio.create_task(pipeline.run())
        while not pipeline.metrics.ticks:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        await pipeline.close()

    asyncio.run(asyncio.wait_for(live(), 60))
    board = BoardReader(pipeline.config.board).latest()
    assert board is not None
    assert board.json("doc.census") == 3
    assert b"\nfleetcast_census_nodes 3\n" in board.text("metrics.fleet")
    census = pipeline.capabilities[Census]
    assert census.worked_on is pipeline.state
    assert census.was_cancelled


def test_a_save_waits_until_no_thread_changes_what_a_capability_keeps(tmp_path: Path) -> None:
    pipeline = Pipeline(Config(state=str(tmp_path)), ManualClock(NOW_MS), Topology.build([]), lambda entities: [])

    async def save_while_forecasting() -> list[str]:
        order, runs = [], pipeline.capabilities[RunForecasts]
        async with runs.free:
            saving = asyncio.create_task(pipeline.save())
            await asyncio.sleep(0.05)
            order += ["saved"] if pipeline.snapshot.whole else ["forecast"]
        await saving
        return [*order, "saved"] if pipeline.snapshot.whole else order

    assert asyncio.run(save_while_forecasting()) == ["forecast", "saved"]


def test_the_pipeline_stays_a_pump_a_tick_and_a_save() -> None:
    assert fleetcast.service.pipeline.pipeline.__file__ is not None
    assert len(Path(fleetcast.service.pipeline.pipeline.__file__).read_text().splitlines()) < MOST_LINES
