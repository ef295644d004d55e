"""`fleetcast simulate`: runs the simulated fleet in a separate process, and experiments on it."""

import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli.kit.options import AtOption, SpeedOption
from fleetcast.cli.kit.screen import echo, echo_text

if TYPE_CHECKING:
    from fleetcast.fleet.clock import ScaledClock
    from fleetcast.simulator.faults.fault_file import FaultFile
    from fleetcast.simulator.run import SimulationOptions

KAFKA_PARTITIONS, KAFKA_TOPIC = 8, "fleetcast.telemetry"
ApiOption = Annotated[str, typer.Option(help="Where the product's API listens; its token: FLEETCAST_TOKEN.")]
UnrulyOption = Annotated[
    float, typer.Option(help="Share of job agents that refuse, hang, lie, reply late or twice, or die.", min=0, max=1)
]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A simulated GPU fleet that meets Fleetcast only through exporter pages and its HTTP API.\n\n"
    "Example:  fleetcast simulate cluster --out var/fleet --api http://127.0.0.1:8080",
)


@app.command("day")
def simulate_day(
    seed: Annotated[int, typer.Option(help="First seed; the same seed gives the same numbers.", min=0)] = 1,
    seeds: Annotated[int, typer.Option(help="How many days to simulate.", min=2)] = 16,
    at: AtOption = "2020-05-12T20:25",
) -> None:
    """Simulate a day with a risk-blind engine and with ours.

    Prints the GPU-hours lost to faults and stragglers.

    Example:  fleetcast simulate day --seed 1
    """
    import json

    from fleetcast.cli.lab.data import find_data_folder

    echo(json.dumps(measure_day_worth(seed, find_data_folder(), at, seeds)))


@app.command("starts")
def simulate_starts(
    seed: Annotated[int, typer.Option(help="First seed of the job generator.", min=0)] = 1,
    seeds: Annotated[int, typer.Option(help="How many fleets to simulate.", min=1)] = 5,
    hours: Annotated[float, typer.Option(help="Of fleet time, each.", min=0.1, max=10_000)] = 3.0,
    warm_up: Annotated[float, typer.Option(help="Hours before these, without start times.", min=0, max=10_000)] = 0.0,
    at: AtOption = "2020-05-12T20:25",
    teams: Annotated[bool, typer.Option("--teams", help="Three teams share the fleet; else one line.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="A site without any history: its first days.")] = False,
    nodes: Annotated[int, typer.Option(help="Nodes of eight GPUs.", min=1, max=1000)] = 133,
    reclaim: Annotated[
        bool, typer.Option("--reclaim", help="With --teams: also with jobs that stop for teams.")
    ] = False,
) -> None:
    """Simulate the demo's queue without its telemetry, and report how accurate start times were.

    Prints one JSON line for each seed. `--reclaim` prints two: one without and one with jobs that stop for
    teams below their guarantee. If FLEETCAST_DATA has the Venus trace, its jobs are used for
    every seed. Otherwise the generator draws them. `first` evaluates the first answer to each request,
    compared with the average of the queue's last waits.

    Example:  fleetcast simulate starts --seeds 5
    """
    import asyncio
    import itertools
    import json
    import tempfile

    import msgspec

    from fleetcast.cli.lab.data import find_data_folder
    from fleetcast.cli.lab.waiting_fleet import make_waiting_fleet

    if reclaim and not teams:
        raise typer.BadParameter("needs --teams", param_hint="--reclaim")
    arms = (False, True) if reclaim else (False,)
    for fleet_seed, reclaims in itertools.product(range(seed, seed + seeds), arms):
        size: dict[str, Any] = {"nodes": nodes, "hours": warm_up + hours, "is_cold": cold, "reclaims": reclaims}
        with tempfile.TemporaryDirectory() as folder:
            try:
                fleet = make_waiting_fleet(
                    Path(folder), find_data_folder(), fleet_seed, at, time.time_ns() // 1_000_000, teams, **size
                )
            except ValueError as error:
                raise typer.BadParameter(f"{at!r}: {error}", param_hint="--at") from None
            record = asyncio.run(fleet.run_for(hours * 3600, warm_up * 3600))
        about: dict[str, Any] = {"seed": fleet_seed, "hours": hours, "teams": teams, "cold": cold, "jobs": fleet.jobs}
        about |= {"warm_up": warm_up} if warm_up else {}
        if fleet.agents is not None:
            about["stops"] = fleet.agents.stops
        first = fleet.first.make_summary() | ({"kinds": fleet.make_kind_summary()} if reclaim else {})
        echo(json.dumps({**about, "record": msgspec.to_builtins(record), "first": first}))


@app.command("cluster")
def simulate_cluster(
    out: Annotated[Path, typer.Option(help="Run folder: topology, targets, truth, story, status.")],
    api: ApiOption = "http://127.0.0.1:8080",
    epoch_ms: Annotated[
        int | None, typer.Option(help="Fleet time at --wall-ms [the shifted --at].", min=0, max=2**47)
    ] = None,
    wall_ms: Annotated[int | None, typer.Option(help="Machine time of the start [now].", min=0, max=2**47)] = None,
    speed: SpeedOption = 15.0,
    seed: Annotated[int, typer.Option(help="Seed of workloads, faults and the job generator.", min=0)] = 1,
    at: AtOption = "2020-05-12T20:25",
    input: Annotated[str, typer.Option(help="`trace`: jobs of a trace; `h100`: recorded runs.")] = "trace",
    story: Annotated[
        bool, typer.Option(help="Under large gangs a node throttles and another one fails; an urgent gang arrives.")
    ] = True,
    faults: Annotated[Path | None, typer.Option(help="A TOML file of fault kinds and rates.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of eight GPUs [133].", min=1, max=100_000)] = None,
    teams: Annotated[bool, typer.Option("--teams", help="Deal the jobs to teams and write their queues.toml.")] = False,
    unruly: UnrulyOption = 0.0,
    port: Annotated[int, typer.Option(help="Port of the exporter pages [a free one].", min=0, max=65_535)] = 0,
    kafka: Annotated[str, typer.Option(help="HOST:PORT of brokers: telemetry goes there, too.")] = "",
    kafka_topic: Annotated[
        str | None,
        typer.Option(help=f"With --kafka: its topic, which is created if it does not exist [{KAFKA_TOPIC}]."),
    ] = None,
) -> None:
    """Run a fleet: exporter pages over HTTP, jobs sent to the product's queue, seeded faults.

    `fleetcast demo` runs this and the product together. Alone:

      fleetcast simulate cluster --out var/fleet

      fleetcast run --config FILE

    FILE names [fleet] topology = "var/fleet/topology.toml", [scrape] targets = ["file:var/fleet/targets.txt"] and
    the [clock] that this command prints.

    With --kafka the fleet's telemetry is on a topic as well, for a source `kafka` instead of [scrape].
    """
    from fleetcast.cli.lab.data import find_data_folder
    from fleetcast.simulator.hardware.cluster import FleetSpec
    from fleetcast.simulator.run import SimulationOptions

    if input not in ("trace", "h100"):
        raise typer.BadParameter(f"{input!r}: must be trace or h100", param_hint="--input")
    unused = {"--teams": teams, "--unruly": unruly > 0, "--faults": faults is not None, "--nodes": nodes is not None}
    if input == "h100" and (names := [name for name, is_set in unused.items() if is_set]):
        raise typer.BadParameter("has no effect with --input h100", param_hint=", ".join(names))
    if kafka_topic is not None and not kafka:
        raise typer.BadParameter("has no effect: add --kafka HOST:PORT", param_hint="--kafka-topic")
    options = SimulationOptions(
        out=out,
        api=api,
        clock=_make_clock(at, epoch_ms, wall_ms, speed),
        data=find_data_folder(),
        seed=seed,
        at=at,
        input=input,
        story=story,
        faults=faults,
        port=port,
        spec=FleetSpec() if nodes is None else FleetSpec(nodes=nodes),
        teams=teams,
        unruly_share=unruly,
    )
    _run_cluster(options, kafka, kafka_topic or KAFKA_TOPIC)


@app.command("faults")
def write_fault_run(
    out: Annotated[Path | None, typer.Option(help="Data folder: writes faults/simulated/NAME-SEED in it.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of everything that is drawn [the defaults].")] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the file's.", min=0)] = None,
    recorded: Annotated[bool, typer.Option("--recorded", help="Inject into the recorded H100 runs instead.")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show the settings as a file; do no more.")
    ] = False,
) -> None:
    """Write telemetry, job events and the truth of a fleet with faults and benign look-alikes.

    `fleetcast evaluate` reads these files.

    Examples:

      fleetcast simulate faults --print-config > faults.toml

      fleetcast simulate faults --config faults.toml --out var/data --seed 7
    """
    from msgspec.structs import replace

    from fleetcast.simulator.faults.fault_file import FaultFile, format_fault_file, read_fault_file

    file = FaultFile() if config is None else read_fault_file(config)
    file = file if seed is None else replace(file, seed=seed)
    if print_config and (out is not None or recorded):
        name = "--out" if out is not None else "--recorded"
        raise typer.BadParameter("has no effect with --print-config", param_hint=name)
    if print_config:
        echo_text(format_fault_file(file), nl=False)
        return
    if out is None:
        raise typer.BadParameter("is needed: a data folder, such as var/data", param_hint="--out")
    _write_faults(file, out, recorded)


@app.command("steps")
def convert_step_times(
    out: Annotated[Path, typer.Option(help="Data folder: writes telemetry/rendered/NAME in it.")],
    seed: Annotated[int, typer.Option(help="Seed of patterns and noise.", min=0)] = 1,
    series: Annotated[int, typer.Option(help="Runs of Megatron at most, over the range of step times.", min=1)] = 24,
) -> None:
    """Convert real step times to the telemetry that they would have left, with the true period and steps.

    Reads faults/megatron_step_times and faults/straggler_bytedance below FLEETCAST_DATA. Writes
    telemetry at intervals of 0.05, 0.5, 1 and 15 s.

      fleetcast simulate steps --out var/data
    """
    from fleetcast.cli.lab.data import find_data_folder
    from fleetcast.simulator.hardware.rendered_steps import render_steps

    written = render_steps(find_data_folder(), out, seed, series, say=lambda line: echo(line, err=True))
    echo(f"{len(written)} folders below {out}", err=True)


@app.command("compare")
def compare_telemetry(
    seed: Annotated[int, typer.Option(help="Seed of the simulated side.", min=0)] = 1,
) -> None:
    """Compare healthy simulated telemetry with recorded H100 runs.

    Prints a Kolmogorov-Smirnov distance for each quantity: 0 is the same distribution, 1 has nothing in
    common. Reads telemetry/h100-phases below FLEETCAST_DATA.

      fleetcast simulate compare --seed 2
    """
    from fleetcast.cli.lab.data import find_data_folder
    from fleetcast.simulator.hardware.h100 import FOLDER
    from fleetcast.simulator.hardware.realism import HEADER, compare_with_recordings

    rows = list(compare_with_recordings(find_data_folder(), seed))
    if not rows:
        echo(f"no recorded run in {find_data_folder() / FOLDER}; set FLEETCAST_DATA", err=True)
        raise typer.Exit(2)
    echo_text("\n".join([HEADER, *(row.format_row() for row in rows)]))


def measure_day_worth(seed: int, data: Path, at: str, seeds: int) -> dict[str, Any]:
    """Measure detection on a small fleet, then simulate a day for every seed, with and without risk.

    Returns the GPU-hours that are lost in both cases.
    """
    from fleetcast.cli.lab.detection import measure_detection
    from fleetcast.fleet.topology import Topology
    from fleetcast.ingest.topology.load import parse_toml_nodes
    from fleetcast.simulator.days.compare import compare_arms
    from fleetcast.simulator.days.replay import fast_forward_trace
    from fleetcast.simulator.days.traces import load_trace
    from fleetcast.simulator.hardware.cluster import FleetSpec

    spec = FleetSpec()
    now_ms = time.time_ns() // 1_000_000
    trace = load_trace(data, nodes=spec.nodes, gpus_per_node=spec.gpus, now_ms=now_ms, at=at, seed=seed)
    topology = Topology.build(parse_toml_nodes(spec.format_topology_toml()))
    replay = fast_forward_trace(trace, topology)
    worth = compare_arms(trace, replay, topology, measure_detection(seed), seed=seed, seeds=seeds)
    return worth | {"jobs": trace.note}


def _make_clock(at: str, epoch_ms: int | None, wall_ms: int | None, speed: float) -> "ScaledClock":
    """Return the clock of the simulation. Raises BadParameter if `at` is not a time."""
    from fleetcast.fleet.clock import ScaledClock
    from fleetcast.simulator.days.traces import parse_time_ms, shift_start_ms

    wall_ms = time.time_ns() // 1_000_000 if wall_ms is None else wall_ms
    try:
        start_ms = shift_start_ms(parse_time_ms(at), wall_ms)
    except ValueError as error:
        raise typer.BadParameter(f"{at!r}: {error}", param_hint="--at") from None
    return ScaledClock(start_ms if epoch_ms is None else epoch_ms, wall_ms, speed)


def _run_cluster(options: "SimulationOptions", kafka: str, topic: str) -> None:
    """Run the simulated fleet, and write its telemetry to a topic if brokers are named."""
    import asyncio

    from fleetcast.simulator.run import run_simulation

    clock = options.clock
    echo(f"[clock] epoch_ms = {clock.epoch_ms}, wall_ms = {clock.wall_ms}, speed = {clock.speed:g}", err=True)
    if kafka:
        asyncio.run(_run_in_parallel(run_simulation(options), _write_telemetry(options, kafka, topic)))
    else:
        asyncio.run(run_simulation(options))


def _write_faults(file: "FaultFile", out: Path, recorded: bool) -> None:
    from fleetcast.simulator.instrument import simulate_faults

    def say(line: str) -> None:
        echo(line, err=True)

    if recorded:
        from fleetcast.cli.lab.data import find_data_folder
        from fleetcast.simulator.faults.recorded_faults import inject_faults

        inject_faults(file, find_data_folder(), out, say)
    else:
        simulate_faults(file, out, say)


async def _run_in_parallel(main: Awaitable[None], other: Awaitable[None]) -> None:
    """Run `main` and `other` in parallel. When one of them ends, cancel the other."""
    import asyncio

    work, beside = asyncio.ensure_future(main), asyncio.ensure_future(other)
    await asyncio.wait([work, beside], return_when=asyncio.FIRST_COMPLETED)
    for task in (work, beside):
        if not task.done():
            task.cancel()
    ended = await asyncio.gather(work, beside, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


async def _write_telemetry(options: "SimulationOptions", brokers: str, topic: str) -> None:
    """Write the fleet's telemetry to a Kafka topic, by scraping its pages as any scraper would."""
    import asyncio

    from fleetcast.clients.kafka import KafkaWriter
    from fleetcast.fleet.entities import Entities
    from fleetcast.ingest.kafka.output import Output, find_node_blocks, forward_batches
    from fleetcast.ingest.kafka.source import read_kafka_options
    from fleetcast.ingest.pages.scrape import Scraper
    from fleetcast.ingest.topology.load import load_topology
    from fleetcast.service.config import ScrapeConfig

    writer = await asyncio.to_thread(KafkaWriter, read_kafka_options({"brokers": brokers, "telemetry": topic}))
    await asyncio.to_thread(writer.create_missing_topics, {topic: KAFKA_PARTITIONS})
    targets, topology = options.out / "targets.txt", options.out / "topology.toml"
    while not targets.exists():
        await asyncio.sleep(0.1)
    blocks = find_node_blocks(load_topology(topology)) if topology.exists() else {}
    entities = Entities()
    scraper = Scraper(entities, [f"file:{targets}"], ScrapeConfig(timeout_s=15.0), options.clock)
    try:
        await forward_batches(scraper, entities, Output(writer, topic), blocks, "binary")
    finally:
        await scraper.close()
        await asyncio.to_thread(writer.close)
