"""`python -m cli.compare --seed N`: what risk-aware placement is worth on a day of the demonstration, as JSON."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer


def worth_of_a_day(seed: int, data: Path, at: str, seeds: int) -> dict[str, Any]:
    """Measure detection on a small fleet, then play the day for every seed, with and without risk."""
    from cli.detection import measure_detection
    from fleet.topology import Topology
    from ingest.topology import parse_toml
    from simulator.cluster import FleetSpec
    from simulator.compare import compare
    from simulator.replay import fast_forward
    from simulator.traces import load_trace

    spec = FleetSpec()
    now_ms = time.time_ns() // 1_000_000
    trace = load_trace(data, nodes=spec.nodes, gpus_per_node=spec.gpus, now_ms=now_ms, at=at, seed=seed)
    topology = Topology.build(parse_toml(spec.topology_toml()))
    replay = fast_forward(trace, topology)
    worth = compare(trace, replay, topology, measure_detection(seed), seed=seed, seeds=seeds)
    return worth | {"jobs": trace.note}


def main(
    seed: Annotated[int, typer.Option(help="First seed; the same seed gives the same numbers.")] = 1,
    seeds: Annotated[int, typer.Option(help="How many days to simulate.", min=2)] = 16,
    at: Annotated[str, typer.Option(help="Where in the trace the day begins (UTC).")] = "2020-05-12T20:25",
) -> None:
    """Simulate a day with a risk-blind engine and with ours: GPU-hours lost to faults and stragglers.

    Example:  python -m cli.compare --seed 1
    """
    import json

    from cli.data import data_folder

    typer.echo(json.dumps(worth_of_a_day(seed, data_folder(), at, seeds)))


if __name__ == "__main__":
    typer.run(main)
