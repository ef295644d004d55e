"""The pipeline as a process: its sources from the configuration, its end on SIGTERM with a last snapshot."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

from fleet.entities import Entities
from fleet.topology import Topology
from ingest.inbox import InboxSource
from ingest.scrape import Scraper
from ingest.source import Source
from ingest.topology import load_topology
from service.config import Config
from service.pipeline import Pipeline, said

logger = logging.getLogger(__name__)


async def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT, then take a last snapshot."""
    clock = config.make_clock()
    topology = load_topology(Path(config.fleet.topology)) if config.fleet.topology else Topology.build([])
    scrapers: list[Scraper] = []

    def sources(entities: Entities) -> Sequence[Source]:
        if config.scrape.targets:
            limit_s = config.pipeline.future_limit_s
            scrapers[:] = [Scraper(entities, config.scrape.targets, config.scrape, clock, future_limit_s=limit_s)]
        return [InboxSource(config.inbox), *scrapers]

    pipeline = Pipeline(
        config, clock, topology, sources, lambda: {k: v for scraper in scrapers for k, v in scraper.models().items()}
    )
    work = asyncio.ensure_future(pipeline.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work
    with said("save the last snapshot", "the next start replays the inbox"):
        await pipeline.save()
    await pipeline.close()
    logger.info("pipeline: stopped after %d ticks", pipeline.ticks)
