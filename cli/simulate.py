"""`fleetcast simulate`: the simulated fleet in a process of its own."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A simulated GPU fleet that meets Fleetcast only through exporter pages and its HTTP API.\n\n"
    "Example:  fleetcast simulate cluster --out var/fleet --api http://127.0.0.1:8080",
)


@app.callback()
def _group() -> None:
    """Keep `cluster` a word of the command while it is the only one."""


@app.command("cluster")
def cluster(
    out: Annotated[Path, typer.Option(help="Run folder: topology, targets, truth, story, status.")],
    api: Annotated[
        str, typer.Option(help="Where the product's API listens; its token: FLEETCAST_TOKEN.")
    ] = "http://127.0.0.1:8080",
    epoch_ms: Annotated[int | None, typer.Option(help="Fleet time at --wall-ms [the shifted --at].")] = None,
    wall_ms: Annotated[int | None, typer.Option(help="Machine time of the start [now].")] = None,
    speed: Annotated[float, typer.Option(help="How much faster than real time the fleet runs.")] = 15.0,
    seed: Annotated[int, typer.Option(help="Seed of workloads, faults and the job generator.")] = 1,
    at: Annotated[str, typer.Option(help="Where in the trace to begin (UTC).")] = "2020-05-12T20:25",
    input: Annotated[str, typer.Option(help="`trace`: jobs of a trace; `h100`: recorded runs.")] = "trace",
    story: Annotated[bool, typer.Option(help="Make a node under the largest gang throttle.")] = True,
    faults: Annotated[Path | None, typer.Option(help="A TOML file of fault kinds and rates.")] = None,
    nodes: Annotated[int, typer.Option(help="Nodes of eight GPUs.", min=1)] = 133,
    port: Annotated[int, typer.Option(help="Port of the exporter pages [a free one].")] = 0,
) -> None:
    """Run a fleet: exporter pages over HTTP, jobs sent to the product's queue, seeded faults.

    `fleetcast demo` runs this and the product together. Alone:

      fleetcast simulate cluster --out var/fleet

      fleetcast run --config FILE

    FILE names [fleet] topology = "var/fleet/topology.toml", [scrape] targets = ["file:var/fleet/targets.txt"] and
    the [clock] that this command prints.
    """
    import asyncio
    import time

    from cli.data import data_folder
    from fleet.clock import ScaledClock
    from simulator.cluster import FleetSpec
    from simulator.run import SimulationOptions, run_simulation
    from simulator.traces import parse_time_ms, shifted_start_ms

    if input not in ("trace", "h100"):
        raise typer.BadParameter(f"{input!r}: must be trace or h100", param_hint="--input")
    if not speed > 0:
        raise typer.BadParameter(f"{speed}: must be greater than 0", param_hint="--speed")
    wall_ms = time.time_ns() // 1_000_000 if wall_ms is None else wall_ms
    try:
        start_ms = shifted_start_ms(parse_time_ms(at), wall_ms)
    except ValueError as error:
        raise typer.BadParameter(f"{at!r}: {error}", param_hint="--at") from None
    options = SimulationOptions(
        out=out,
        api=api,
        clock=ScaledClock(start_ms if epoch_ms is None else epoch_ms, wall_ms, speed),
        data=data_folder(),
        seed=seed,
        at=at,
        input=input,
        story=story,
        faults=faults,
        port=port,
        spec=FleetSpec(nodes=nodes),
    )
    clock = options.clock
    typer.echo(f"[clock] epoch_ms = {clock.epoch_ms}, wall_ms = {clock.wall_ms}, speed = {clock.speed:g}", err=True)
    asyncio.run(run_simulation(options))
