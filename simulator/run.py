"""The simulator's process: fleet (or recorded runs), pages, driver, story and the run folder.

    topology.toml   racks and nodes; the service may read it
    targets.txt     exporter URLs, one on each line; written last
    queues.toml     how the teams share the fleet, if there are teams; the service may read it
    truth.jsonl     faults as they happen; not for the service
    story.jsonl     turns of the story
    sim.json        status, replaced every second: jobs, events, pages served, bad lines injected

SIGTERM and SIGINT end the process. After SIGUSR1 it breaks no further page, so that both sides can count the
same broken lines.
"""

import asyncio
import itertools
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from fleetcast.fleet.clock import ScaledClock
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.events import Started, Submitted
from fleetcast.fleet.process import make_token_headers
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.toml_text import read_toml
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.topology.load import load_topology
from fleetcast.simulator.agents import JobAgents, draw_manner, has_agent
from fleetcast.simulator.days.replay import TraceReplay, fast_forward_trace
from fleetcast.simulator.days.traces import DEFAULT_AT, JobTrace, TraceJob, load_trace
from fleetcast.simulator.driver import Driver
from fleetcast.simulator.elastic_story import RESEARCH_NODES, ElasticStory, make_elastic_job
from fleetcast.simulator.faults.faults import DEMO, FaultSettings
from fleetcast.simulator.faults.truth import append_truth
from fleetcast.simulator.hardware.cluster import FleetSpec, SimulatedFleet
from fleetcast.simulator.hardware.exporters import Breakage, ExporterServer, PageSource
from fleetcast.simulator.hardware.h100 import RecordedFleet, load_recorded_fleet
from fleetcast.simulator.hardware.workload import WorkloadProfile, draw_job_profile
from fleetcast.simulator.node_story import NodeStory
from fleetcast.simulator.outbox import Outbox, ProductApi
from fleetcast.simulator.story import Story
from fleetcast.simulator.teams import RESEARCH, assign_teams, format_queues_toml
from fleetcast.simulator.urgent_story import UrgentStory

logger = logging.getLogger(__name__)

STEP_S = 0.25  # wall; the fleet moves at least this often
STATUS_S = 1.0  # wall
REQUEST_TIMEOUT_S = 15.0  # wall
BAD_SHARE = 0.003
WEEKS = 2  # of history that the product receives: enough for a week ago, and half the time to load
NODES_PER_SPARE = 64
RUSH_H = 5  # of fleet time: 20 minutes of a demonstration
IDLE_RUN = "b1"  # the baseline: its GPUs did nothing


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """The options of a simulation.

    `out`: the run folder. `api`: URL of the product. `data`: FLEETCAST_DATA. `faults`: TOML file of
    FaultSettings, or None for those of the demonstration. `unruly_share`: the share of job agents that do not
    obey actions.
    """

    out: Path
    api: str
    clock: ScaledClock
    data: Path
    seed: int = 1
    at: str = DEFAULT_AT
    input: str = "trace"
    story: bool = True
    faults: Path | None = None
    port: int = 0
    spec: FleetSpec = field(default_factory=FleetSpec)
    weeks: int = WEEKS
    teams: bool = False
    unruly_share: float = 0.0


async def run_simulation(options: SimulationOptions) -> None:
    """Run a simulation until SIGTERM or SIGINT. Raises ConfigError if an input is missing or wrong."""
    options.out.mkdir(parents=True, exist_ok=True)
    with _handle_signals() as (stop, quiet):
        if options.input == "h100":
            await _run_recorded_fleet(options, stop, quiet)
        else:
            await _run_cluster(options, stop, quiet)


async def _run_cluster(options: SimulationOptions, stop: asyncio.Event, quiet: asyncio.Event) -> None:
    spec = options.spec
    settings = load_fault_settings(options.faults)
    fleet = SimulatedFleet(spec, options.seed)
    spares = spec.nodes // NODES_PER_SPARE if options.teams else 0
    if spares:  # a smaller fleet has no nodes of its own for a queue
        spec = replace(spec, own_nodes=RESEARCH_NODES, own_pool=RESEARCH)
    spec.write_topology(options.out / "topology.toml")
    if options.teams:  # a service may start from here on
        toml = format_queues_toml(spec.nodes * spec.gpus, spares, spec.own_nodes * spec.gpus)
        _replace_file(options.out / "queues.toml", toml.encode())
    trace = load_trace(
        options.data,
        nodes=spec.nodes,
        gpus_per_node=spec.gpus,
        now_ms=options.clock.epoch_ms,
        at=options.at,
        seed=options.seed,
        rush_h=RUSH_H,
    )
    if options.teams:
        trace = assign_teams(trace, spec.pool if spec.own_nodes else "")
    topology = load_topology(options.out / "topology.toml")
    # The past leaves the spares free, and research its nodes.
    used = Topology.build(topology.nodes[: spec.nodes - spares - spec.own_nodes])
    replay = fast_forward_trace(trace, used, weeks=options.weeks)
    if spec.own_nodes:
        own = spec.names[-spec.own_nodes :]
        fleet.faults.exempt_nodes(own)
        replay = replace(replay, ongoing=(*replay.ongoing, make_elastic_job(own, spec.gpus, trace.start_ms)))
    logger.info("%s; %d jobs skipped as wider than the fleet", trace.note, trace.skipped)
    logger.info("at the start %d GPUs run, %d GPUs wait", replay.running_gpus, replay.queued_gpus)
    async with _open_session() as session:
        driver = make_driver(options, fleet, trace, replay, ProductApi(session, options.api))
        driver.start_ongoing_jobs()
        if options.teams:  # their queues.toml lets actions be sent
            driver.can_wait = has_agent
        story = Story(driver, fleet.faults, options.out / "story.jsonl")
        about = {"note": trace.note, "source": trace.source, "skipped_jobs": trace.skipped}
        agents = JobAgents(driver, lambda job: draw_manner(job, options.seed, options.unruly_share))
        works = [driver.run(), agents.run(), _advance_forever(fleet, options)] + (
            [story.run()] if options.story else []
        )
        if options.story and options.teams:
            if spec.own_nodes:
                works.append(ElasticStory(driver, story.write_turn).run())
            works.append(UrgentStory(driver, story.write_turn, trace.pool).run())
            works.append(NodeStory(driver, fleet.faults, story.write_turn).run())
        async with _serve_pages(fleet, options) as served:
            works.append(_start_faults_and_breakage(driver, fleet, settings, served))
            await _run_until_stopped(
                stop,
                works,
                served,
                options,
                quiet,
                lambda: about | driver.make_status() | {"live": driver.live.is_set()},
            )
        append_truth(options.out / "truth.jsonl", fleet.faults.pop_changed_records())


def make_driver(
    options: SimulationOptions, fleet: SimulatedFleet, trace: JobTrace, replay: TraceReplay, api: ProductApi
) -> Driver:
    """Make a driver for the jobs of the trace that arrive after the start."""

    def make_profile(job: TraceJob) -> WorkloadProfile:
        return draw_job_profile(job.job, job.gpus, job.class_, seed=options.seed)

    first = int(np.searchsorted(trace.submit_ms, trace.start_ms))
    arrivals = (trace.get_job(index) for index in range(first, len(trace)))
    return Driver(fleet, api, options.clock, replay, arrivals, make_profile, options.spec.gpus)


async def _advance_forever(fleet: SimulatedFleet, options: SimulationOptions) -> None:
    """Advance the fleet and write the truth to disk, forever, even if no pages are scraped."""
    while True:
        fleet.advance(options.clock.now_ms())
        append_truth(options.out / "truth.jsonl", fleet.faults.pop_changed_records())
        await asyncio.sleep(STEP_S)


async def _start_faults_and_breakage(
    driver: Driver, fleet: SimulatedFleet, settings: FaultSettings, served: "_PageServer"
) -> None:
    """Start faults and broken lines once the driver has sent the past.

    Before that, the product has nothing to compare with.
    """
    await driver.live.wait()
    fleet.faults.start_drawing(settings)
    served.breakage.share = BAD_SHARE


def load_fault_settings(path: Path | None) -> FaultSettings:
    """Return the settings in a TOML file, or the demonstration's if `path` is None.

    Raises ConfigError that names the key.
    """
    if path is None:
        return DEMO
    try:
        return msgspec.convert(read_toml(path.read_text(encoding="utf-8")), FaultSettings)
    except OSError as error:
        raise ConfigError(f"cannot read faults {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


# Recorded runs


async def _run_recorded_fleet(options: SimulationOptions, stop: asyncio.Event, quiet: asyncio.Event) -> None:
    fleet = load_recorded_fleet(options.data)
    (options.out / "truth.jsonl").touch()
    async with _open_session() as session:
        api = ProductApi(session, options.api)
        outbox = Outbox(api)
        works = [outbox.run(), _send_recorded_events(fleet, outbox, options)]
        running = {"running": len(find_recorded_jobs(fleet))}
        about = {
            "note": f"{len(fleet.names)} recorded H100 nodes",
            "source": "h100",
            "skipped_jobs": 0,
            "jobs": running,
            "live": True,
        }
        async with _serve_pages(fleet, options) as served:
            works.append(_start_breakage(api, served))
            await _run_until_stopped(stop, works, served, options, quiet, lambda: about)


async def _start_breakage(api: ProductApi, served: "_PageServer") -> None:
    await api.wait_until_ready("/readyz")
    served.breakage.share = BAD_SHARE


def find_recorded_jobs(fleet: RecordedFleet) -> dict[str, list[str]]:
    """Return recorded job → its nodes: `t10-node0` and `t10-node1` belong to one job.

    Nodes without a page of their GPUs are left out, because their GPUs are unknown. The baseline is
    left out as well, because it ran no job.
    """
    nodes = sorted({node for node, exporter in fleet.list_targets() if exporter == "dcgm"} - {IDLE_RUN})
    return {job: list(found) for job, found in itertools.groupby(nodes, lambda name: name.split("-")[0])}


async def _send_recorded_events(fleet: RecordedFleet, outbox: Outbox, options: SimulationOptions) -> None:
    """Send the first events of each recorded job. The jobs run as long as this process does."""
    now_ms = options.clock.now_ms()
    for job, nodes in find_recorded_jobs(fleet).items():
        ranks = tuple(RankPlacement(rank, node, tuple(range(8))) for rank, node in enumerate(nodes))
        await outbox.put(
            Submitted(job=job, sequence=0, time_ms=now_ms, queue="recorded", gang=len(nodes), gpus_per_node=8),
            Started(job=job, sequence=1, time_ms=now_ms, ranks=ranks),
        )


# The process


@dataclass(slots=True)
class _PageServer:
    server: ExporterServer
    breakage: Breakage


@asynccontextmanager
async def _serve_pages(source: PageSource, options: SimulationOptions) -> AsyncIterator[_PageServer]:
    """Serve exporter pages on loopback while the context is open.

    The targets file is written last, when all exporters answer.
    """
    breakage = Breakage(np.random.default_rng([options.seed, 5]), 0.0)
    source.advance(options.clock.now_ms())
    server = ExporterServer(source, options.clock, breakage)
    await server.start("127.0.0.1", options.port)
    try:
        _replace_file(options.out / "targets.txt", "\n".join(server.list_urls()).encode() + b"\n")
        yield _PageServer(server, breakage)
    finally:
        await server.close()


async def _run_until_stopped(
    stop: asyncio.Event,
    works: list[Any],
    served: _PageServer,
    options: SimulationOptions,
    quiet: asyncio.Event,
    status: Callable[[], dict[str, Any]],
) -> None:
    """Run the coroutines `works` and write the status until `stop`.

    An error in any of them ends the process.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in works]
            while not stop.is_set():
                if quiet.is_set():
                    served.breakage.share = 0.0
                _write_status(options, served.server, status())
                await _wait_for_signal(stop, quiet)
            for task in running:
                task.cancel()
    finally:
        _write_status(options, served.server, status())


async def _wait_for_signal(stop: asyncio.Event, quiet: asyncio.Event) -> None:
    """Wait for STATUS_S, or less if `stop` or `quiet` is set."""
    events = [event for event in (stop, quiet) if not event.is_set()]
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=STATUS_S, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _write_status(options: SimulationOptions, server: ExporterServer, status: dict[str, Any]) -> None:
    counts = {"pages_served": server.pages_served, "bad_records_injected": server.bad_records_injected}
    body = {"time_ms": options.clock.now_ms(), "seed": options.seed} | counts | status
    _replace_file(options.out / "sim.json", msgspec.json.encode(body))


def _replace_file(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def _open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S), headers=make_token_headers())


@contextmanager
def _handle_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Yield the events (stop, quiet). SIGTERM and SIGINT set `stop`, and SIGUSR1 sets `quiet`."""
    loop = asyncio.get_running_loop()
    stop, quiet = asyncio.Event(), asyncio.Event()
    handlers = {signal.SIGTERM: stop.set, signal.SIGINT: stop.set, signal.SIGUSR1: quiet.set}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield stop, quiet
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
