"""A service that scrapes exporters: pages as real exporters print them → scraper → pipeline → board → placer's view."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.pages.fetch import FetchedPage, FetchError
from fleetcast.ingest.pages.scrape import Scraper
from fleetcast.ingest.pages.target_spec import parse_target
from fleetcast.ingest.source import Source
from fleetcast.placement.engine import decide
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.config import Config, ScrapeConfig
from fleetcast.service.pipeline.node_past import NodePast, NodePasts, Spell
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.placer.view import ViewDecoder

NOW_MS = 1_790_000_000_000
INTERVAL_S = 15.0


class ScrapedWorld:
    """One pipeline on a clock of its own. `pages`: what each target answers, by URL; None: it hangs."""

    def __init__(
        self,
        folder: Path,
        targets: Sequence[str],
        patch: pytest.MonkeyPatch,
        topology: Topology | None = None,
        **config: Any,
    ) -> None:
        self.clock = ManualClock(NOW_MS)
        self.config = Config(state=str(folder), scrape=ScrapeConfig(targets=tuple(targets)), **config)
        self.pages: dict[str, bytes | None] = {}
        self._specs = [parse_target(text) for text in targets]
        self._topology = topology or Topology.build([])
        self._patch = patch
        self.restart()

    def restart(self) -> None:
        """Begin a pipeline on what the one before saved."""
        self.pipeline = Pipeline(self.config, self.clock, self._topology, self._sources)

    def _sources(self, entities: Entities) -> list[Source]:
        self.scraper = Scraper(entities, [], self.config.scrape, self.clock)
        self._patch.setattr(self.scraper, "_client", self)  # `fetch` answers for all targets
        self._targets = [self.scraper.make_target(spec) for spec in self._specs]
        self.scraper.targets = {target.spec.url: target for target in self._targets}
        return [self.scraper]

    async def fetch(self, url: str, max_body_bytes: int) -> FetchedPage:
        page = self.pages.get(url)
        if page is None:
            raise FetchError("timeout", "hangs")
        return FetchedPage(page, False)

    def scrape(self) -> None:
        """One round over all targets."""
        for target in self._targets:
            self.pipeline.apply_batch(asyncio.run(self.scraper.scrape(target)))

    def tick(self) -> Board:
        asyncio.run(self.pipeline.tick())
        return self.read_board()

    def read_board(self) -> Board:
        board = BoardReader(self.config.board).latest()
        assert board is not None
        return board

    def run(self, for_s: float, pages: Mapping[str, bytes | None] | None = None, every_s: float = INTERVAL_S) -> Board:
        """Scrape and tick for so many seconds. pages: what targets answer from now on, by URL or host."""
        urls = {spec.host: spec.url for spec in self._specs}
        self.pages |= {urls.get(target, target): page for target, page in (pages or {}).items()}
        for _ in range(round(for_s / every_s)):
            self.clock.advance(every_s)
            self.scrape()
            asyncio.run(self.pipeline.tick())
        return self.read_board()

    def save(self) -> None:
        asyncio.run(self.pipeline.save())

    def decide(self, **request: Any) -> Decision:
        board = BoardReader(self.config.board).latest()
        assert board is not None
        view = ViewDecoder(self.config.placer).decode_board(board).view
        return decide(PlacementRequest(request_id="r", **request), view)

    def past(self, node: str) -> NodePast:
        return self.pipeline.capabilities[NodePasts].of[node]

    def spells(self, node: str) -> list[Spell]:
        """The lanes of a node's timeline."""
        return self.past(node).signals

    def metrics(self, name: str) -> list[str]:
        """Lines of our own page about the fleet that begin with `name`."""
        board = BoardReader(self.config.board).latest()
        assert board is not None
        return [line for line in bytes(board.raw("metrics.fleet")).decode().splitlines() if line.startswith(name)]

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The answer of each node by name."""
        board = BoardReader(self.config.board).latest()
        assert board is not None
        answers, offsets = board.raw("answers.node"), board.array("answers.node.offsets").tolist()
        found = [msgspec.json.decode(answers[a:b]) for a, b in itertools.pairwise(offsets)]
        return {row["node"]: row for row in found}


def without(page: bytes, *gpus: int) -> bytes:
    """The page without the lines of these GPUs."""
    keys = [f'gpu="{gpu}"'.encode() for gpu in gpus]
    return b"\n".join(line for line in page.split(b"\n") if not any(key in line for key in keys))
