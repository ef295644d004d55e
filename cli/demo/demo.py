"""`fleetcast demo`: a simulated fleet, the whole service on it, and an honest report at the end."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetcast.cli.demo.guards import lock_empty_folder, refuse_taken_ports, refuse_unknown_token
from fleetcast.cli.demo.monitor import DemoRun
from fleetcast.cli.demo.processes import (
    DemoOptions,
    end_process,
    make_demo_clock,
    make_simulation_command,
    spawn_process,
    wait_for_file,
    write_config,
)
from fleetcast.cli.demo.screen import DemoScreen
from fleetcast.cli.kit.options import AtOption, SpeedOption, check_outputs
from fleetcast.cli.kit.screen import echo, echo_text


def demo(
    seconds: Annotated[
        float | None, typer.Option(help="Stop after this many wall seconds [until Ctrl-C].", min=0)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of faults, workloads and the job generator.", min=0)] = 1,
    speed: SpeedOption = 15.0,
    at: AtOption = "2020-05-12T20:25",
    input: Annotated[str, typer.Option(help="`trace`: jobs of a trace; `h100`: recorded H100 runs.")] = "trace",
    faults: Annotated[Path | None, typer.Option(help="A TOML file of fault kinds and rates.")] = None,
    port: Annotated[
        int, typer.Option(help="Port of the API and the console; the placer takes the next.", min=1, max=65_534)
    ] = 8080,
    folder: Annotated[Path, typer.Option(help="Folder of the run, emptied at the start.")] = Path("var/demo"),
    story: Annotated[
        bool, typer.Option(help="Under large gangs a node throttles and another one fails; an urgent gang arrives.")
    ] = True,
    worth: Annotated[bool, typer.Option(help="Simulate a day with a risk-blind engine and with ours.")] = True,
    kafka: Annotated[str, typer.Option(help="HOST:PORT of brokers: telemetry takes the way through Kafka.")] = "",
    json_path: Annotated[str | None, typer.Option("--json", help="Write the report here; - is stdout.")] = None,
) -> None:
    """Run a simulated fleet of 133 nodes x 8 GPUs and the whole service on it.

    Jobs are those of the Helios "Venus" trace if FLEETCAST_DATA holds it. Otherwise a seeded generator makes
    similar jobs. More jobs join them, so that there is a queue for five hours of fleet time. Exporter pages are
    scraped over HTTP like those of any exporter. Faults are injected, and the engine places the jobs.

    Examples:

      fleetcast demo                                   watch it at http://127.0.0.1:8080/, end with Ctrl-C

      fleetcast demo --seconds 60 --json out.json      bounded; the exit code says whether it went well

      fleetcast demo --input h100                      recorded telemetry of real 8 x H100 runs instead

      fleetcast demo --kafka 127.0.0.1:9092            the service reads a Kafka topic, and scrapes no exporter
    """
    if input not in ("trace", "h100"):
        raise typer.BadParameter(f"{input!r}: must be trace or h100", param_hint="--input")
    if input == "h100" and faults is not None:
        raise typer.BadParameter("has no effect with --input h100: recorded runs have their own", param_hint="--faults")
    check_outputs(Path(json_path) if json_path is not None else None)
    options = DemoOptions(seconds, seed, speed, at, input, faults, port, folder, story, worth, kafka)
    report, problems = asyncio.run(_run_demo(options))
    if json_path is not None:
        text = json.dumps(report, indent=2) + "\n"
        if json_path == "-":
            echo_text(text, nl=False)
        else:
            Path(json_path).write_text(text, encoding="utf-8")
    if problems:
        echo("fleetcast demo: " + "; ".join(problems), err=True)
        raise typer.Exit(1)


async def _run_demo(options: DemoOptions) -> tuple[dict[str, Any], list[str]]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    clock = make_demo_clock(options)
    refuse_taken_ports(options.port)
    refuse_unknown_token()
    with lock_empty_folder(options.folder) as folder, DemoScreen(options.port) as screen:
        simulation = await spawn_process(folder, "simulation.log", make_simulation_command(options, folder, clock))
        service = None
        try:
            screen.print_sentence("starting the simulated fleet")
            # The service starts while the simulation still plays its past: targets.txt is read once it is there.
            first = "queues.toml" if options.input == "trace" else "targets.txt"
            await wait_for_file(folder / first, simulation, folder / "simulation.log")
            config = write_config(options, folder, clock)
            service = await spawn_process(folder, "service.log", ["run", "--config", str(config)])
            run = DemoRun(options, folder, screen, stop)
            return await run.run_until_done(simulation, service)
        finally:
            for process in (simulation, service):
                await end_process(process)
