"""The processes of a demo: the simulated fleet, and the service on it."""

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import typer

from fleetcast.cli.kit.screen import echo, echo_text
from fleetcast.fleet.process import make_child_environment

START_LIMIT_S = 240.0  # of a machine with much else to do


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command-line options of a demo."""

    seconds: float | None
    seed: int
    speed: float
    at: str
    input: str
    faults: Path | None
    port: int
    folder: Path
    story: bool
    worth: bool
    kafka: str


@dataclass(frozen=True, slots=True)
class DemoClock:
    """The fleet time and the wall time at which a demo begins."""

    epoch_ms: int
    wall_ms: int


def make_demo_clock(options: DemoOptions) -> DemoClock:
    from fleetcast.simulator.days.traces import parse_time_ms, shift_start_ms

    wall_ms = time.time_ns() // 1_000_000
    try:
        return DemoClock(shift_start_ms(parse_time_ms(options.at), wall_ms), wall_ms)
    except ValueError as error:
        raise typer.BadParameter(f"{options.at!r}: {error}", param_hint="--at") from None


def make_simulation_command(options: DemoOptions, folder: Path, clock: DemoClock) -> list[str]:
    command = ["simulate", "cluster", "--out", str(folder), "--api", f"http://127.0.0.1:{options.port}"]
    command += ["--epoch-ms", str(clock.epoch_ms), "--wall-ms", str(clock.wall_ms), "--speed", str(options.speed)]
    command += ["--seed", str(options.seed), "--at", options.at, "--input", options.input]
    command += ["--story" if options.story else "--no-story"]
    command += ["--teams"] if options.input == "trace" else []
    command += ["--kafka", options.kafka, "--kafka-topic", _make_topic_name(clock)] if options.kafka else []
    return command + (["--faults", str(options.faults)] if options.faults else [])


def _make_topic_name(clock: DemoClock) -> str:
    """Return the name of a Kafka topic for this run alone.

    The records of other runs have other times, so runs must not share a topic.
    """
    return f"fleetcast.demo-{clock.wall_ms}"


def write_config(options: DemoOptions, folder: Path, clock: DemoClock) -> Path:
    import msgspec

    from fleetcast.service.config import (
        ClockConfig,
        Config,
        FleetConfig,
        PipelineConfig,
        PlacerConfig,
        PluginConfig,
        ScrapeConfig,
        override_config,
        save_config,
    )

    topology = folder / "topology.toml"
    config = Config(
        state=str(folder / "state"),
        fleet=FleetConfig(name="venus" if options.input == "trace" else "h100", topology=str(topology)),
        clock=ClockConfig(epoch_ms=clock.epoch_ms, wall_ms=clock.wall_ms, speed=options.speed),
        scrape=ScrapeConfig(targets=(f"file:{folder / 'targets.txt'}",), timeout_s=15.0),
        pipeline=PipelineConfig(snapshot_s=40.0 * options.speed),
    )
    if options.kafka:
        read: dict[str, str | int | float | bool | list[str]]
        read = {"brokers": options.kafka, "telemetry": _make_topic_name(clock), "events": "", "group": ""}
        sources = (PluginConfig(use="kafka", options=read),)
        pipeline = msgspec.structs.replace(config.pipeline, sources=sources)
        config = msgspec.structs.replace(config, scrape=ScrapeConfig(timeout_s=15.0), pipeline=pipeline)
    if (queues := folder / "queues.toml").exists():
        # A quarter of an hour holds the stories of a day, so more is taken within an hour than any limit allows.
        placer = PlacerConfig(queues=str(queues), taken_queue_share=1.0, taken_fleet_share=1.0)
        config = msgspec.structs.replace(config, placer=placer)
    if options.input == "h100":  # one node is idle with a model loaded: the demo's request may have it
        config = msgspec.structs.replace(config, placer=PlacerConfig(unknown_use="ignore"))
    if not topology.exists():
        config = msgspec.structs.replace(config, fleet=FleetConfig(name=config.fleet.name))
    path = folder / "config.toml"
    save_config(override_config(config, api_port=options.port), path)
    return path


async def spawn_process(folder: Path, log: str, command: list[str]) -> asyncio.subprocess.Process:
    with open(folder / log, "wb") as file:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fleetcast.cli.main", *command),
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=make_child_environment(),
        )


async def end_process(process: asyncio.subprocess.Process | None) -> None:
    if process is None or process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 15)
    except TimeoutError:
        process.kill()
        await process.wait()


async def wait_for_file(path: Path, process: asyncio.subprocess.Process, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not path.exists():
        if process.returncode is not None:
            raise typer.Exit(report_process_end("simulation", process.returncode, log.parent))
        if time.monotonic() > deadline:
            echo(f"the simulation wrote no {path.name} within {START_LIMIT_S:.0f} s; see {log}", err=True)
            raise typer.Exit(1)
        await asyncio.sleep(0.05)


def report_process_end(name: str, code: int, folder: Path) -> int:
    log = folder / f"{name}.log"
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:] if log.exists() else []
    echo_text("\n".join([f"the {name} ended with {code}; the end of {log}:", *tail]), err=True)
    return 1
