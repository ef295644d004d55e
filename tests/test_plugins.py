"""Every implementation of a plugin point passes its contract suite."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from numpy.typing import NDArray

from fleetcast.checks import (
    OTHER_IDS_AND_TIMES,
    check_adapter,
    check_filter,
    check_forecaster,
    check_scorer,
    check_source,
)
from fleetcast.fleet.clock import ManualClock, ScaledClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.events import Finished
from fleetcast.fleet.requests import Gang, PlacementRequest
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.inbox.inbox import InboxSource, InboxWriter
from fleetcast.ingest.pages.recorded import PageReplay, ReplaySpeed
from fleetcast.ingest.pages.scrape import Scraper
from fleetcast.ingest.source import Batch, MemorySource, Source
from fleetcast.models.demand.naive import FORECASTERS, Persistence
from fleetcast.models.demand.theta import Theta
from fleetcast.models.forecast import Forecaster, Panel
from fleetcast.placement.machines.filters import FILTERS, busy, drained, lost, risk
from fleetcast.placement.machines.options import Filter, Options
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.queues.asks import IDS_AND_TIMES
from fleetcast.schedulers.band_file import BandFile
from fleetcast.service.config import Config, PipelineConfig, PluginConfig
from fleetcast.service.doors import make_door
from fleetcast.service.pipeline import role as sources
from tests.ingest.exporter_pages import dcgm_page
from tests.placement.conftest import build
from tests.schedulers.small_fleet import weather

NOW_MS = 1_700_000_000_000
REQUESTS = (
    PlacementRequest(request_id="plain"),
    PlacementRequest(request_id="gang", gang=Gang(2, 4), gpus_per_node=8, gpu_model="h100", cluster="c"),
    PlacementRequest(
        request_id="much", cpus=1000.0, host_memory_gib=9000.0, gpu_memory_gib=80, max_risk=0.0, avoid_nodes=("n001",)
    ),
)
VIEWS = (
    build({"r01": [8, 0, 3], "r02": [8, 8]}, unplaced=[8]),
    build({"r01": [8, 8]}, p_fail=np.array([np.nan, 0.9]), state=np.array([1, 2], np.int8)),
)


def test_memory_source() -> None:
    batches = [
        Batch(
            samples=(SampleBatch.from_rows(EntityKind.GPU, [(0, 0, number, 1.0)]),),
            events=(Finished(job="a", sequence=number, time_ms=number),),
        )
        for number in range(4)
    ]
    check_source(lambda: MemorySource(batches), 4)


def test_page_replay(tmp_path: Path) -> None:
    for number in range(3):
        moment = tmp_path / str(1000 + 15_000 * number)
        moment.mkdir()
        (moment / "n001.dcgm.prom").write_bytes(dcgm_page(power_w=400.0 + number))
    check_source(lambda: PageReplay(Entities(), tmp_path, ManualClock(), ReplaySpeed(speed=None)), 3)


def test_inbox_source(tmp_path: Path) -> None:
    async def write() -> None:
        for number in range(3):
            writer = InboxWriter(tmp_path, f"w{number}", segment_bytes=1)
            for sequence in range(2):
                event = f'{{"job": "j{number}", "sequence": {sequence}, "time_ms": {NOW_MS}, "type": "finished"}}'
                await writer.append([event.encode()], NOW_MS)
            await writer.close()

    asyncio.run(write())
    check_source(lambda: InboxSource(tmp_path), 2)


def test_a_source_that_misspells_what_it_may_have_is_found_out() -> None:
    class Prunes(MemorySource):
        def prunes(self, position: dict[str, Any]) -> None:
            self.batches = []

    batches = [Batch(events=(Finished(job="a", sequence=1, time_ms=1),))]
    with pytest.raises(ConfigError, match=r"prunes is no method of a source, did you mean prune\?"):
        check_source(lambda: Prunes(batches), 1)


@dataclass(frozen=True)
class Options15:
    interval_s: float = 15.0
    timeout_s: float = 2.0
    max_body_bytes: int = 100_000
    concurrency: int = 4


class ScrapedExporter(Source):
    """A scraper with an exporter of its own, which lives as long as the scraper does."""

    name = "scrape"

    def __init__(self) -> None:
        self.scraper: Scraper | None = None

    async def next(self) -> Batch:
        if self.scraper is None:
            app = web.Application()
            app.router.add_get("/metrics", self._page)
            self.runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/metrics"
            self.scraper = Scraper(Entities(), [url], Options15(), ScaledClock(NOW_MS, NOW_MS, 150.0))
        return await self.scraper.next()

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(body=dcgm_page())

    def position(self) -> dict[str, Any]:
        assert self.scraper is not None
        return self.scraper.position()

    def seek(self, position: dict[str, Any]) -> None:
        Scraper(Entities(), [], Options15(), ManualClock()).seek(position)

    async def close(self) -> None:
        assert self.scraper is not None
        await self.scraper.close()
        await self.runner.cleanup()


def test_scraper() -> None:
    check_source(ScrapedExporter, 2, replays=False)


@pytest.mark.parametrize("forecaster", [*FORECASTERS, Theta()], ids=lambda one: one.name)
def test_forecaster(forecaster: Forecaster) -> None:
    check_forecaster(type(forecaster))


def test_a_forecaster_that_looks_ahead_is_found_out() -> None:
    class Clairvoyant(Persistence):
        name = "clairvoyant"

        def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> NDArray[np.float64]:
            return super().forecast(panel, np.minimum(origins + 1, panel.bins - 1), steps)

    with pytest.raises(AssertionError, match="saw what came later"):
        check_forecaster(Clairvoyant)


@pytest.mark.parametrize(("name", "rejects"), [*FILTERS, ("busy", busy)])
def test_filter(name: str, rejects: Filter) -> None:
    check_filter(rejects, REQUESTS, VIEWS)


@pytest.mark.parametrize("rejects", [busy, drained, lost, risk])
def test_an_operator_can_combine_a_public_filter_with_their_own(rejects: Filter) -> None:
    """These functions always give a mask. The filters of a decision skip a state or a risk that no node has."""

    def combined(request: PlacementRequest, view: ClusterView, options: Options) -> np.ndarray:
        mask = rejects(request, view, options)
        assert mask is not None
        return mask | (view.topology.gpus > 8)

    check_filter(combined, REQUESTS, VIEWS)


def test_a_filter_that_writes_into_the_view_is_found_out() -> None:
    def careless(request: PlacementRequest, view: ClusterView, options: Options) -> np.ndarray:
        view.free[0] = False
        return ~view.free.any(axis=1)

    with pytest.raises(AssertionError, match=r"wrote into view\.free"):
        check_filter(careless, REQUESTS, (build({"r01": [8, 8]}),))


def test_a_filter_that_reads_times_is_found_out() -> None:
    def short_only(request: PlacementRequest, view: ClusterView, options: Options) -> np.ndarray:
        return np.full(len(view), (request.limit_s or 0) > 3600)

    with pytest.raises(AssertionError, match="reads limit_s: a refusal is remembered"):
        check_filter(short_only, REQUESTS, VIEWS)


def test_the_suite_of_filters_tries_all_ids_and_times() -> None:
    assert OTHER_IDS_AND_TIMES.keys() == IDS_AND_TIMES


def half_free(request: PlacementRequest, view: ClusterView, options: Options) -> np.ndarray:
    return view.free.mean(axis=1)


def test_scorer() -> None:
    check_scorer(half_free, REQUESTS, VIEWS)
    with pytest.raises(AssertionError):
        check_scorer(lambda *_: 8 * half_free(*_), REQUESTS, VIEWS)


def test_adapter() -> None:
    check_adapter(BandFile(), [weather({"a": 0.0, "b": 0.9, "c": np.nan, "d": 0.1})])


def test_an_adapter_that_writes_what_others_own_is_found_out() -> None:
    class Greedy(BandFile):
        fields = frozenset({"another"})

    with pytest.raises(AssertionError, match="band is not ours"):
        check_adapter(Greedy(), [weather({"a": 0.9})])


def test_an_adapter_of_a_users_own_is_an_import_path(tmp_path: Path) -> None:
    door = make_door("fleetcast.service.ports.band_file:make_band_file_door", {"path": str(tmp_path / "bands")})
    assert isinstance(door.adapter, BandFile)


@pytest.mark.parametrize("use", sources.BUILT_IN)
def test_a_source_of_ours_names_the_option_that_it_does_not_know(use: str) -> None:
    row = PluginConfig(use, {"colour": "blue"})
    config = Config(pipeline=PipelineConfig(sources=(row,)))
    with pytest.raises(ConfigError, match=rf"pipeline.sources\[0\] {use}: options.colour: no such key"):
        sources.open_sources(config, ManualClock(), Entities())
