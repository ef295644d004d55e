"""The pipeline as a process: its sources from the configuration, its end on SIGTERM with a last snapshot."""

import asyncio
import contextlib
import functools
import gc
import inspect
import logging
import resource
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet.clock import Clock
from fleet.entities import Entities
from fleet.errors import ConfigError
from fleet.topology import Topology
from ingest.divided_inbox import DividedInbox
from ingest.exporters import ExporterResolver
from ingest.inbox import InboxSource
from ingest.scrape import Scraper
from ingest.shares import WHOLE, Share
from ingest.source import Source
from ingest.topology import load_topology
from ingest.write_decoder import WriteDecoder
from service.config import Config
from service.disk_trouble import said
from service.last_words import works_again
from service.pipeline import Pipeline
from service.plugins import load
from service.process_memory import keep_one_heap

logger = logging.getLogger(__name__)

OPEN_FILES = 65_536
METHODS = ("next", "position", "seek", "close")  # that each source has
ARCHIVE = "archive"  # stands beside the sources' names in a snapshot
BUILT_IN = {  # `pipeline.sources.use` -> a class made with (entities, clock, options); options it knows or ConfigError
    "kafka": "ingest.kafka:KafkaSource",
    "slurm": "ingest.slurm:SlurmSource",
    "kubernetes": "ingest.kubernetes:KubernetesSource",
    "kernel_log": "ingest.kernel_log:KernelLogSource",
    "gpud": "ingest.gpud:GpudSource",
    "ufm": "ingest.ufm:UfmSource",
    "sysfs": "ingest.sysfs:SysfsSource",
    "perfquery": "ingest.perfquery:PerfquerySource",
    "history": "ingest.archive_source:ArchiveSource",
}


def open_sources(config: Config, clock: Clock, entities: Entities, share: Share = WHOLE) -> list[Source]:
    """The inbox, the scraper where there are targets, and the sources that the configuration names.

    Of several pipelines each has its share of inbox and targets. A source whose class says `divides` takes its share
    by the options `instance` and `instances`; any other runs in the first pipeline alone.
    """
    sources: list[Source] = [
        DividedInbox(InboxSource(config.inbox, writes=_write_decoder(config, entities)), entities, share)
    ]
    if config.scrape.targets:
        limit_s = config.pipeline.future_limit_s
        scraper = Scraper(entities, config.scrape.targets, config.scrape, clock, future_limit_s=limit_s)
        scraper.choose = share.scrapes
        sources.append(scraper)
    for row in config.pipeline.sources:
        kind = load(f"pipeline.sources.use (built in: {', '.join(BUILT_IN)})", BUILT_IN.get(row.use, row.use))
        divides = getattr(kind, "divides", False) and share.instances > 1
        if divides:
            options = {**row.options, "instance": share.instance, "instances": share.instances}
            sources.append(_made(row.use, kind, entities, clock, options))
        elif share.first:
            sources.append(_made(row.use, kind, entities, clock, row.options))
    _check_names(sources)
    return sources


def _made(use: str, kind: Any, entities: Entities, clock: Clock, options: Mapping[str, Any]) -> Source:
    try:
        inspect.signature(kind).bind(entities, clock, options)
    except (TypeError, ValueError):
        raise ConfigError(
            f"pipeline.sources.use = {use!r}: expected a class made with (entities, clock, options)"
        ) from None
    source: Source = kind(entities, clock, options)
    lacks = [name for name in METHODS if not callable(getattr(source, name, None))]
    if lacks or not isinstance(getattr(source, "name", None), str):
        raise ConfigError(
            f"pipeline.sources.use = {use!r}: lacks {', '.join(lacks) or 'a name that is a string'}: "
            f"expected a source, with a name and the methods {', '.join(METHODS)}"
        )
    return source


def _check_names(sources: Sequence[Source]) -> None:
    """A snapshot keeps positions by name: of two with one name, one would go on where the other was."""
    for name, count in Counter([ARCHIVE, *(source.name for source in sources)]).items():
        if count > 1:
            raise ConfigError(f"pipeline.sources: name = {name!r} is taken: expected one of its own for each source")


def _write_decoder(config: Config, entities: Entities) -> WriteDecoder:
    resolver = ExporterResolver(entities)
    limit_ms = round(config.pipeline.future_limit_s * 1000)
    return WriteDecoder(resolver, future_limit_ms=limit_ms, models=resolver.inventory.models)


def allow_open_files() -> None:
    """Followed logs and connections to targets are thousands in a large fleet, and the system's soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def spare_the_collector() -> None:
    """What there is now stays: no collection need look at it. And the many objects of a tick are hardly ever garbage.

    With Python's own thresholds, collections took most of the time in which a save copies the tables of 10,000 GPUs,
    and about a sixth of a tick.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


async def serve(config: Config, instance: int = 0) -> None:
    """Run one of the pipelines until SIGTERM or SIGINT, then take a last snapshot."""
    keep_one_heap()
    allow_open_files()
    clock = config.make_clock()
    topology = load_topology(Path(config.fleet.topology)) if config.fleet.topology else Topology.build([])
    gc.disable()  # what is restored is no garbage
    share = Share.of(instance, config.pipeline.instances, topology)
    pipeline = Pipeline(config, clock, topology, functools.partial(open_sources, config, clock, share=share), share)
    works_again(config.folder, f"pipeline-{instance}" if instance else "pipeline")

    spare_the_collector()
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
