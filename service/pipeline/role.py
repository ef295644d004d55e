"""The pipeline process. It opens its sources, and saves a last snapshot on SIGTERM."""

import asyncio
import contextlib
import functools
import gc
import inspect
import logging
import resource
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.inbox.divided import DividedInbox
from fleetcast.ingest.inbox.inbox import InboxSource
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.scrape import Scraper
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.shares import WHOLE, Share
from fleetcast.ingest.source import Source, check_source_class
from fleetcast.ingest.topology.load import load_topology
from fleetcast.service.config import Config, PluginConfig
from fleetcast.service.disk_errors import log_disk_errors
from fleetcast.service.exit_reason import announce_ready, make_pipeline_name
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.plugins import call_plugin, load_plugin

logger = logging.getLogger(__name__)

OPEN_FILES = 65_536
ARCHIVE = "archive"  # stands beside the sources' names in a snapshot
BUILT_IN = {  # `pipeline.sources.use` -> a class made with (entities, clock, options); options it knows or ConfigError
    "kafka": "fleetcast.ingest.kafka.source:KafkaSource",
    "slurm": "fleetcast.ingest.slurm.source:SlurmSource",
    "kubernetes": "fleetcast.ingest.kubernetes.source:KubernetesSource",
    "kernel_log": "fleetcast.ingest.kernel_log.source:KernelLogSource",
    "gpud": "fleetcast.ingest.health.gpud:GpudSource",
    "ufm": "fleetcast.ingest.health.ufm:UfmSource",
    "sysfs": "fleetcast.ingest.ports.sysfs:SysfsSource",
    "perfquery": "fleetcast.ingest.ports.perfquery:PerfquerySource",
    "history": "fleetcast.ingest.archive.source:ArchiveSource",
}


def open_sources(config: Config, clock: Clock, entities: Entities, share: Share = WHOLE) -> list[Source]:
    """Open the inbox, the scraper if there are targets, and the sources in the configuration.

    If there are several pipelines, each gets a share of the inbox, of the targets, and of the sources whose
    class sets `divides`. The first pipeline gets all other sources.
    """
    sources: list[Source] = [
        DividedInbox(InboxSource(config.inbox, writes=_make_write_decoder(config, entities)), entities, share)
    ]
    if config.scrape.targets:
        limit_s = config.pipeline.future_limit_s
        scraper = Scraper(entities, config.scrape.targets, config.scrape, clock, future_limit_s=limit_s)
        scraper.choose = share.scrapes
        sources.append(scraper)
    for number, row in enumerate(config.pipeline.sources):
        try:
            sources += _open_source(row, clock, entities, share)
        except ConfigError as error:
            message = str(error).replace("pipeline.sources", f"pipeline.sources[{number}]", 1)
            raise ConfigError(message) from None
    _check_names(sources)
    return sources


def _open_source(row: PluginConfig, clock: Clock, entities: Entities, share: Share) -> Iterator[Source]:
    """Yield the source of a configuration entry. Yield nothing if another pipeline runs it."""
    found = load_plugin(f"pipeline.sources.use (built in: {', '.join(BUILT_IN)})", BUILT_IN.get(row.use, row.use))
    kind = check_source_class(found, f"pipeline.sources.use = {row.use!r}") if isinstance(found, type) else found
    if getattr(kind, "divides", False) and share.instances > 1:
        options = {**row.options, "instance": share.instance, "instances": share.instances}
        yield _make_source(row.use, kind, entities, clock, options)
    elif share.is_first:
        yield _make_source(row.use, kind, entities, clock, row.options)


def _make_source(use: str, kind: Any, entities: Entities, clock: Clock, options: Mapping[str, Any]) -> Source:
    where = f"pipeline.sources.use = {use!r}"
    try:
        inspect.signature(kind).bind(entities, clock, options)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: expected a class or a function made with (entities, clock, options)") from None
    source: Source = call_plugin("pipeline.sources.use", use, kind, entities, clock, options)
    check_source_class(type(source), where)
    if not (isinstance(source.name, str) and source.name):
        raise ConfigError(f"{where}: its name is {source.name!r}: expected a string")
    return source


def _check_names(sources: Sequence[Source]) -> None:
    """Check that the names of the sources differ. Raises ConfigError if two are equal.

    A snapshot stores positions by name. With equal names, a source could continue at the position of another
    one.
    """
    for name, count in Counter([ARCHIVE, *(source.name for source in sources)]).items():
        if count > 1:
            raise ConfigError(
                f"pipeline.sources: name = {name!r} is used already: expected one of its own for each source"
            )


def _make_write_decoder(config: Config, entities: Entities) -> WriteDecoder:
    resolver = ExporterResolver(entities)
    limit_ms = round(config.pipeline.future_limit_s * 1000)
    inventory = resolver.inventory
    return WriteDecoder(
        resolver, future_limit_ms=limit_ms, models=inventory.get_gpu_models, machines=inventory.machines
    )


def raise_open_file_limit() -> None:
    """Raise the process's limit of open files above the system's soft limit, often 1,024.

    In a large fleet, the process follows thousands of logs and connects to thousands of targets.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def reduce_garbage_collection() -> None:
    """Freeze all present objects, and make garbage collection rare.

    A tick makes many objects, and few of them are garbage. By default, collections took a sixth of a tick at
    10,000 GPUs. They also took most of the time in which a save copies tables.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


async def _announce_when_ready(pipeline: Pipeline, folder: Path, name: str) -> None:
    await pipeline.has_published.wait()
    announce_ready(folder, name)


async def serve(config: Config, instance: int = 0) -> None:
    """Run a pipeline until SIGTERM or SIGINT, then save a last snapshot. instance: the pipeline's number."""
    raise_open_file_limit()
    clock = config.make_clock()
    topology = load_topology(Path(config.fleet.topology)) if config.fleet.topology else Topology.build([])
    gc.disable()  # what is imported and restored is no garbage, and a collection visits a whole fleet
    share = Share.from_topology(instance, config.pipeline.instances, topology)
    pipeline = Pipeline(config, clock, topology, functools.partial(open_sources, config, clock, share=share), share)

    reduce_garbage_collection()
    work = asyncio.ensure_future(pipeline.run())
    ready = asyncio.ensure_future(_announce_when_ready(pipeline, config.folder, make_pipeline_name(instance)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work
    ready.cancel()
    with log_disk_errors("save the last snapshot", "the next start replays the inbox"):
        await pipeline.save()
    await pipeline.close()
    logger.info("pipeline: stopped after %d ticks", pipeline.metrics.ticks)
