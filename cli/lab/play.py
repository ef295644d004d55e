"""`fleetcast play`: simulates a trace of jobs under our plan, and under other scheduling methods.

The other methods are published ones, and oracles that know the run times.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli.kit.options import HtmlOption, JsonOption, check_outputs, write_html, write_json
from fleetcast.cli.kit.screen import echo

if TYPE_CHECKING:
    from fleetcast.placement.play.faults import NodeFault
    from fleetcast.placement.queues.tree import QueueTree
    from fleetcast.training.judges.played import PlayScene, Tick
    from fleetcast.training.sets.job_sets import HistoryJobs

BAR, REDRAW_S = 30, 0.2
GPUS_PER_NODE, MAX_WAIT_H, SEED, NO_CHECKPOINTS, EXPONENT = 8, 24.0, 1, 0.2, 0.9  # defaults of options

TraceArgument = Annotated[
    Path, typer.Argument(help="A job history: a file, or the folder of a set (docs/queues.md).", metavar="TRACE")
]
NodesOption = Annotated[int | None, typer.Option(min=1, max=20_000, help="Nodes of the fleet.")]
EachOption = Annotated[
    int | None, typer.Option("--gpus-per-node", min=1, max=1024, help=f"With --nodes [{GPUS_PER_NODE}].")
]
CapacityOption = Annotated[
    int | None, typer.Option(min=1, max=10_000_000, help="Instead of nodes: GPUs or cores, wherever they are.")
]
QueuesOption = Annotated[Path | None, typer.Option(help="The file of queues; without it all jobs are in one.")]
PolicyOption = Annotated[list[str] | None, typer.Option(help="Only this method; repeat it [all].", metavar="NAME")]
MaxWaitOption = Annotated[
    float | None,
    typer.Option(
        min=0.01, max=1e6, help=f"Without --queues: hours after which no other job passes one [{MAX_WAIT_H:g}]."
    ),
]
RefusedOption = Annotated[
    float, typer.Option(min=0, max=0.9, help="Share of starts that are refused outside, the same in every run.")
]
ReclaimOption = Annotated[
    list[float] | None,
    typer.Option(
        min=0,
        max=1e6,
        metavar="SECONDS",
        help="Stop running jobs for requests within their queue's guarantee that waited so long; repeat it.",
    ),
]
NoCheckpointsOption = Annotated[
    float | None,
    typer.Option(min=0, max=1, help=f"With --reclaim: share of jobs that never write a checkpoint [{NO_CHECKPOINTS}]."),
]
SeedOption = Annotated[
    int | None,
    typer.Option(min=0, help=f"With --reclaim: seed of the checkpoints. With --elastic: of the elastic jobs [{SEED}]."),
]
ElasticOption = Annotated[
    list[float] | None,
    typer.Option(
        min=0, max=1, metavar="SHARE", help="Let this share of the jobs of 8 or more GPUs be elastic gangs; repeat it."
    ),
]
ExponentOption = Annotated[
    list[float] | None,
    typer.Option(min=0, max=1, help=f"With --elastic: n members run at the speed n ** this; repeat it [{EXPONENT}]."),
]
FaultsOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With --reclaim: a CSV of node,start,end,kind, in seconds.")
]


def play(
    trace: TraceArgument,
    nodes: NodesOption = None,
    gpus_per_node: EachOption = None,
    capacity: CapacityOption = None,
    queues: QueuesOption = None,
    policy: PolicyOption = None,
    max_wait_h: MaxWaitOption = None,
    refused: RefusedOption = 0.0,
    reclaim: ReclaimOption = None,
    no_checkpoints: NoCheckpointsOption = None,
    seed: SeedOption = None,
    faults: FaultsOption = None,
    elastic: ElasticOption = None,
    exponent: ExponentOption = None,
    json: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Simulate jobs under the plan that serves, with its queues, and under other scheduling methods.

    The other methods are published ones, and oracles, which know more than a plan can. All methods run all jobs on the
    same machine. A plan knows a run time only once the job has ended. `seconds` are CPU time.

    With --reclaim, jobs of queues that borrow are stopped for requests within a guarantee. It plays `no_preemption`,
    and at each patience `youngest_first` (Kueue's order) and `by_cost` (the least lost work). A stopped job repeats its
    work since its last checkpoint, needs 300 s to restart, and keeps its place in the queue. Each job draws its time
    between checkpoints: 10 min to 4 h, log-uniform. Nodes of --faults count from 1. A fault stops the jobs on its node,
    but `drain` lets them end.

    With --elastic, gangs run with a quarter of their members or more. They give members above this minimum to the next
    request, and grow back when no request waits for the GPUs. Each change of size is a pause of 120 s. `rigid` plays
    the same gangs at a fixed size.

    Examples:

      fleetcast play jobs.csv --nodes 133

      fleetcast play jobs.csv --nodes 133 --queues queues.toml --policy ours --policy one_queue --html play.html

      fleetcast play jobs.csv --capacity 8192 --json -

      fleetcast play jobs.csv --nodes 133 --queues queues.toml --reclaim 0 --reclaim 300

      fleetcast play jobs.csv --nodes 133 --elastic 0.3 --elastic 0.6 --exponent 0.9 --exponent 0.8
    """
    check_outputs(json, html=html)
    _check_reclaim_options(reclaim, faults, no_checkpoints, nodes, html)
    _check_elastic_options(elastic, exponent, reclaim, policy, html)
    _check_plain_options(seed, max_wait_h, queues, has_draws=bool(reclaim or elastic))
    machine, seed = _parse_machine_size(nodes, gpus_per_node, capacity), SEED if seed is None else seed
    scene, about = _make_scene(trace, machine, queues, MAX_WAIT_H if max_wait_h is None else max_wait_h, refused)
    if elastic:
        from fleetcast.cli.lab.play_elastic import play_elastic_methods

        gangs = play_elastic_methods(scene, elastic, exponent or [EXPONENT], seed, _show_progress)
        write_json(json, {**about, "elastic": gangs, "seed": seed})
    elif reclaim:
        from fleetcast.cli.lab.play_reclaim import play_reclaim_methods
        from fleetcast.training.judges.played_reclaim import CheckpointDraw

        draw = CheckpointDraw(seed, NO_CHECKPOINTS if no_checkpoints is None else no_checkpoints)
        plays = play_reclaim_methods(scene, policy, reclaim, draw, _show_progress, _read_faults(faults, scene))
        write_json(json, {**about, "reclaim": plays, "checkpoints": draw, "faults": str(faults or "")})
    else:
        _play_methods(scene, about, policy, json, html)


def _check_reclaim_options(
    reclaim: list[float] | None,
    faults: Path | None,
    no_checkpoints: float | None,
    nodes: int | None,
    html: Path | None,
) -> None:
    """Raise ConfigError if an option does not go together with --reclaim."""
    from fleetcast.fleet.errors import ConfigError

    if reclaim and html is not None:
        raise ConfigError("--html: the page has no plays with --reclaim; use --json")
    if faults is not None and not (reclaim and nodes):
        raise ConfigError("--faults needs --reclaim and --nodes: stopped jobs repeat work since their checkpoints")
    if no_checkpoints is not None and not reclaim:
        raise ConfigError(f"--no-checkpoints {no_checkpoints:g} has no effect: add --reclaim SECONDS")


def _check_elastic_options(
    elastic: list[float] | None,
    exponent: list[float] | None,
    reclaim: list[float] | None,
    policy: list[str] | None,
    html: Path | None,
) -> None:
    """Raise ConfigError if an option does not go together with --elastic."""
    from fleetcast.fleet.errors import ConfigError

    if elastic and html is not None:
        raise ConfigError("--html: the page has no plays with --elastic; use --json")
    if elastic and (reclaim or policy):
        raise ConfigError("--elastic plays the plan that serves: leave out --reclaim and --policy")
    if exponent and not elastic:
        raise ConfigError(f"--exponent {exponent[0]:g} has no effect: add --elastic SHARE")


def _check_plain_options(seed: int | None, max_wait_h: float | None, queues: Path | None, *, has_draws: bool) -> None:
    """Raise ConfigError for an option that the other options leave without effect. has_draws: something is drawn."""
    from fleetcast.fleet.errors import ConfigError

    if seed is not None and not has_draws:
        raise ConfigError(f"--seed {seed} has no effect: nothing is drawn without --reclaim or --elastic")
    if max_wait_h is not None and queues is not None:
        raise ConfigError(
            f"--max-wait-h {max_wait_h:g} has no effect with --queues {queues}: set max_wait_h in its [policy]"
        )


def _make_scene(
    trace: Path, machine: tuple[int, int], queues: Path | None, max_wait_h: float, refused: float
) -> "tuple[PlayScene, dict[str, Any]]":
    """Return the scene to play, and what the JSON says of it. Raises FleetcastError if no job can be played."""
    from fleetcast.fleet.errors import FleetcastError
    from fleetcast.training.judges.played import make_scene

    table, left_out = _read_trace(trace)
    tree = None if queues is None else _read_queue_tree(queues, machine[1] * max(1, machine[0]))
    scene, refusals = make_scene(table, *machine, tree, max_wait_h * 3600, refused)
    skipped = [f"{count:,} jobs: {reason}" for reason, count in (left_out + refusals).most_common()]
    for line in skipped:
        echo(f"skipped {line}", err=True)
    if not len(scene.trace):
        raise FleetcastError(f"{trace}: no job that can be played")
    size = {"jobs": len(scene.trace), "nodes": scene.nodes, "gpus": scene.gpus}
    return scene, {"trace": str(trace), **size, "queues": str(queues or ""), "skipped": skipped}


def _play_methods(
    scene: "PlayScene", about: dict[str, Any], policy: list[str] | None, json: Path | None, html: Path | None
) -> None:
    """Play the methods without stops, print a line for each, and write the JSON and the page."""
    from fleetcast.training.judges.played import play_method
    from fleetcast.training.judges.played_numbers import (
        compute_play_numbers,
        describe_fairness_price,
        measure_use_over_time,
    )
    from fleetcast.training.reports.play_report import render_play_report

    found, starts = [], {}
    for method in _choose_methods(scene, policy):
        with _show_progress(method, scene) as tick:
            played = play_method(scene, method, tick)
        found.append(compute_play_numbers(scene, played))
        starts[method] = played.start_s
        wait = found[-1].wait
        echo(f"{method:<20} mean wait {wait.mean_s:,.0f} s, p99 {wait.p99_s:,.0f} s, longest {wait.max_s:,.0f} s")
    price = describe_fairness_price(found)
    if price:
        echo(price)
    over_time = measure_use_over_time(scene, starts)
    write_json(json, {**about, "price": price, "methods": found, "over_time": over_time})
    write_html(html, lambda: render_play_report(scene, found, over_time, about["skipped"]))


def _read_faults(path: Path | None, scene: "PlayScene") -> "list[NodeFault]":
    """Read the faults of a file for the nodes of a scene. No file has none. Raises ConfigError if it is invalid."""
    from fleetcast.training.judges.played_faults import read_node_faults

    return [] if path is None else read_node_faults(path, scene.nodes)


def _parse_machine_size(nodes: int | None, each: int | None, capacity: int | None) -> tuple[int, int]:
    """Return (nodes, GPUs of each node), or (0, all GPUs) if only the number of all GPUs is given.

    Raises ConfigError if nodes and a capacity are given, or neither, or GPUs of each node with a capacity.
    """
    from fleetcast.fleet.errors import ConfigError

    if (nodes is None) == (capacity is None):
        raise ConfigError("name the machine: either --nodes 133 --gpus-per-node 8, or --capacity 1064")
    if capacity is not None and each is not None:
        why = f"--capacity {capacity} counts GPUs wherever they are; leave one out, or name --nodes"
        raise ConfigError(f"--gpus-per-node {each} has no effect: {why}")
    return (0, capacity) if capacity is not None else (nodes or 0, each or GPUS_PER_NODE)


def _read_trace(path: Path) -> "tuple[HistoryJobs, Counter[str]]":
    """Read the jobs of a trace. Raises ConfigError if the file has no job history."""
    from fleetcast.fleet.errors import ConfigError
    from fleetcast.training.sets.job_sets import read_jobs

    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; `fleetcast data list` names job histories")
    table, skipped = read_jobs(path)
    if not len(table):
        reasons = "; ".join(skipped) or "no table with the columns job,submit_s,run_s,gpus, or of another known layout"
        raise ConfigError(f"{path}: no job in it: {reasons}")
    return table, skipped


def _read_queue_tree(path: Path, gpus: int) -> "QueueTree":
    """Read the queue tree of a file for a machine of `gpus` GPUs.

    Raises ConfigError if the file is invalid.
    """
    from fleetcast.cli.queues import read_tree
    from fleetcast.placement.queues.tree import ANY

    return read_tree(path, {ANY: float(gpus)})


def _choose_methods(scene: "PlayScene", wanted: list[str] | None) -> list[str]:
    """Return the scheduling methods to simulate. If none is named, return all of them.

    Raises ConfigError for a method that is unknown, or that this scene cannot run.
    """
    from fleetcast.fleet.errors import ConfigError
    from fleetcast.training.judges.played import METHODS_PLAYED
    from fleetcast.training.judges.queue import ON_LIMITS

    playable = scene.list_methods()
    for name in wanted or ():
        if name in METHODS_PLAYED and name not in playable:
            needs = "a trace with time limits" if name in ON_LIMITS else "--queues FILE"
            raise ConfigError(f"--policy {name}: needs {needs}")
        if name not in playable:
            raise ConfigError(f"--policy {name}: expected one of {', '.join(playable)}")
    return list(dict.fromkeys(wanted)) if wanted else playable


@contextmanager
def _show_progress(method: str, scene: "PlayScene") -> "Iterator[Tick]":
    """Yield a function that draws a progress bar on stderr: the share of the trace's time that has passed.

    The function draws nothing if stderr is no terminal.
    """
    first_s, last_s = scene.trace.submit_s[0], scene.trace.submit_s[-1]
    drawn_s = [0.0]

    def draw_bar(now_s: float) -> None:
        if time.monotonic() - drawn_s[0] < REDRAW_S:
            return
        drawn_s[0] = time.monotonic()
        share = min(1.0, (now_s - first_s) / max(1.0, last_s - first_s))
        filled = "█" * round(BAR * share)
        sys.stderr.write(f"\r{method:<20} {filled:<{BAR}} {share:4.0%}")
        sys.stderr.flush()

    shown = sys.stderr.isatty()
    yield draw_bar if shown else lambda now_s: None
    if shown:
        sys.stderr.write(f"\r{'':<{BAR + 28}}\r")
