"""The pipeline as a process: its sources from the configuration, its end on SIGTERM with a last snapshot."""

import asyncio
import contextlib
import functools
import logging
import signal
from pathlib import Path

from fleet.clock import Clock
from fleet.entities import Entities
from fleet.topology import Topology
from ingest.inbox import InboxSource
from ingest.scrape import Scraper
from ingest.source import Source
from ingest.topology import load_topology
from service.config import Config
from service.pipeline import Pipeline, said
from service.plugins import load

logger = logging.getLogger(__name__)


def open_sources(config: Config, clock: Clock, entities: Entities) -> list[Source]:
    """The inbox, the scraper where there are targets, and the sources that the configuration names."""
    sources: list[Source] = [InboxSource(config.inbox)]
    if config.scrape.targets:
        limit_s = config.pipeline.future_limit_s
        sources.append(Scraper(entities, config.scrape.targets, config.scrape, clock, future_limit_s=limit_s))
    plugins = config.pipeline.sources
    return sources + [load("pipeline.sources", row.use)(entities, clock, row.options) for row in plugins]


async def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT, then take a last snapshot."""
    clock = config.make_clock()
    topology = load_topology(Path(config.fleet.topology)) if config.fleet.topology else Topology.build([])
    pipeline = Pipeline(config, clock, topology, functools.partial(open_sources, config, clock))

    work = asyncio.ensure_future(pipeline.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work
    with said("save the last snapshot", "the next start replays the inbox"):
        await pipeline.save()
    await pipeline.close()
    logger.info("pipeline: stopped after %d ticks", pipeline.vitals.ticks)
