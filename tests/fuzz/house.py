"""The whole service in one process, without a socket: api, inbox, pipeline, board, placer and ledger."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.applications import Starlette

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.service.api.app import create_app
from fleetcast.service.api.placer_link import FORWARDED_HEADERS, ForwardedAnswer, PlacerLink
from fleetcast.service.config import ApiConfig, Config
from fleetcast.service.http.access import Access
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.jobs.fingerprints import Fingerprints
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.pipeline.role import open_sources
from fleetcast.service.pipeline.run_times.forecasts import RunForecasts
from fleetcast.service.placer.http import make_app
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.role import QueueWorker
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.placer.start_times import StartTimeSampler
from tests.fuzz.asgi import Asked, ask
from tests.fuzz.asked import NODES

NOW_MS = 1_760_000_000_000
TICK_S = 10.0
MOST_BODY_BYTES = 2**20


class Corridor(PlacerLink):
    """The way to a placer in the same process."""

    def __init__(self, placer: Starlette) -> None:
        super().__init__("http://127.0.0.1:9")
        self.placer = placer

    async def forward_request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 15.0,
    ) -> ForwardedAnswer:
        told = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items())
        answered = await ask(self.placer, Asked(method, path, told, (body or b"",)))
        kept = {name: value for name, value in answered.headers.items() if name in FORWARDED_HEADERS}
        return ForwardedAnswer(answered.status, kept, answered.body)


class House:
    """`tick`: the pipeline takes what came in and publishes, the placer works its queue, ten seconds go by.

    `compute_plan`: what the pipeline does beside its ticks: forecasts, fingerprints, the archive and a snapshot.
    """

    def __init__(self, folder: Path) -> None:
        self.config = Config(state=str(folder), api=ApiConfig(max_body_bytes=MOST_BODY_BYTES))
        self.clock = ManualClock(NOW_MS)
        topology = Topology.build([NodeSpec(name, 8, domains={Level.RACK: "r01"}) for name in NODES])
        self.pipeline = Pipeline(
            self.config, self.clock, topology, lambda entities: open_sources(self.config, self.clock, entities)
        )
        self.service = PlacementService(self.config, self.clock, Ledger(self.config.ledger), PlacerMetrics())
        self.worker = QueueWorker(self.service)
        self.placer = make_app(self.service, self.worker.wake, starts=StartTimeSampler(self.service))
        self.api: FastAPI = create_app(self.config, self.clock, writer="api", access=Access())
        self.api.state.context.placer = Corridor(self.placer)

    async def tick(self) -> None:
        (inbox,) = self.pipeline.sources
        while inbox.backlog_bytes():
            self.pipeline.apply_batch(await inbox.next())
        if inbox.errors:  # it is guarded, and would go on
            raise RuntimeError(f"the inbox cannot be read: {inbox.last_error}")
        self.clock.advance(TICK_S)
        await self.pipeline.tick()
        await self.worker.run_due_pass()

    async def think(self) -> None:
        pipeline = self.pipeline
        await pipeline.capabilities[DemandForecasts].forecast(pipeline.state)
        await pipeline.capabilities[RunForecasts].forecast(pipeline.state)
        await pipeline.capabilities[Fingerprints].run_pass(pipeline.state)
        await pipeline.save()

    async def close(self) -> None:
        await self.pipeline.close()
        self.service.ledger.close()


@asynccontextmanager
async def house(folder: Path) -> AsyncIterator[House]:
    """From its start to its end, with a first board and forecasts."""
    made = await asyncio.to_thread(House, folder)
    async with made.api.router.lifespan_context(made.api):
        await made.think()
        await made.tick()
        yield made
        await made.tick()
    await made.close()
