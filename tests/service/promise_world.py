"""The api, the pipeline and the placer of one node in one process, on one state folder and one clock."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.inbox.inbox import InboxSource
from fleetcast.ingest.source import Source
from fleetcast.placement.ledger.ledger import IntentState, Ledger
from fleetcast.service.api.app import create_app
from fleetcast.service.api.routes.context import Context
from fleetcast.service.config import Config, LimitsConfig, PlacerConfig
from fleetcast.service.http.access import Access, parse_tokens
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.service import PlacementService
from tests.service.api_world import Client

NOW_MS = 1_789_000_000_000
EXPIRES_S = 20.0
PAUSE_S = 60.0
STEP_S = 8.0
TOKENS = "ada events aaaaaaaaaaaaaaaaaaaa\nbob events bbbbbbbbbbbbbbbbbbbb\nrelay events rrrrrrrrrrrrrrrrrrrr"


def by(name: str) -> dict[str, str]:
    """Headers of a caller."""
    return {"authorization": f"Bearer {name[0] * 20}"}


class PromiseWorld:
    """`away`: the api takes nothing. Time passes in `pass_time` alone."""

    def __init__(self, folder: Path, limits: LimitsConfig, sources: tuple[Source, ...] = ()) -> None:
        placer = PlacerConfig(intent_expires_s=EXPIRES_S, outage_pause_s=PAUSE_S)
        self.config = Config(state=str(folder), limits=limits, placer=placer)
        self.clock = ManualClock(NOW_MS)
        self.sources = sources
        self.pipeline = self.open_pipeline()
        self.placer = self.open_placer()
        self.api: Client | None = None
        self.tick()

    def open_pipeline(self) -> Pipeline:
        topology = Topology.build([NodeSpec("n01", 8, "H100")])
        return Pipeline(self.config, self.clock, topology, lambda _: [InboxSource(self.config.inbox), *self.sources])

    def open_placer(self) -> PlacementService:
        return PlacementService(self.config, self.clock, Ledger(self.config.ledger), PlacerMetrics())

    @contextmanager
    def serving(self) -> Iterator[Client]:
        """The api answers meanwhile."""
        app = create_app(self.config, self.clock, access=Access(parse_tokens(TOKENS, "here")))
        with Client(app) as client:
            self.api, self.context = client, app.state.context
            try:
                yield client
            finally:
                self.api = None

    context: Context

    def tick(self) -> None:
        """The pipeline folds what is in the inbox and publishes, and the api beats."""
        inbox = self.pipeline.sources[0]

        async def fold() -> None:
            while inbox.backlog_bytes():
                self.pipeline.apply_batch(await inbox.next())
            await self.pipeline.tick()

        asyncio.run(fold())
        if self.api is not None:
            self.context.listening.write_statement()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with a board every few seconds and one at the end."""
        while seconds > 0:
            self.clock.advance(min(STEP_S, seconds))
            seconds -= STEP_S
            self.tick()

    def place(self, job: str, gpus: int = 8, **more: Any) -> str:
        """The outcome of a request."""
        request = PlacementRequest(request_id=f"r-{job}", job=job, gang=1, gpus_per_node=gpus, **more)
        return str(msgspec.json.decode(self.placer.place(request, "test"))["outcome"])

    def state(self, job: str) -> IntentState | None:
        self.placer.view.observe_fleet()
        return self.placer.ledger.read_intent_state(f"r-{job}")

    def send(self, *events: dict[str, Any], caller: str = "ada") -> httpx.Response:
        assert self.api is not None
        return self.api.post("/v1/events", json=list(events), headers=by(caller))

    def event(self, job: str, kind: str, sequence: int = 1, **more: Any) -> dict[str, Any]:
        about = {"job": job, "attempt": 1, "sequence": sequence, "time_ms": self.clock.now_ms(), "type": kind}
        return {**about, **more}

    def started(self, job: str, sequence: int = 2, **more: Any) -> dict[str, Any]:
        ranks = [{"rank": 0, "node": "n01", "gpus": list(range(8))}]
        return self.event(job, "started", sequence, **{"ranks": ranks, **more})

    def close(self) -> None:
        self.placer.ledger.close()
