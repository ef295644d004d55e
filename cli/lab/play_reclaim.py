"""`fleetcast play --reclaim`: plays in which running jobs may be stopped for requests within a guarantee."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast, get_args

from fleetcast.cli.kit.screen import echo

if TYPE_CHECKING:
    from fleetcast.placement.play.faults import NodeFault
    from fleetcast.training.judges.played import PlayScene, Tick
    from fleetcast.training.judges.played_reclaim import CheckpointDraw, ReclaimMethod, ReclaimNumbers

HEAD = (
    f"{'method':<15} {'patience':>8} {'mean wait':>10} {'p99':>10} {'entitled':>9} {'at once':>8} {'their p99':>10}"
    f" {'stops':>6} {'most':>5} {'lost GPU-h':>11} {'restarts':>9}"
)


def play_reclaim_methods(
    scene: "PlayScene",
    wanted: list[str] | None,
    patience_s: Sequence[float],
    draw: "CheckpointDraw",
    show_progress: Callable[[str, "PlayScene"], AbstractContextManager["Tick"]],
    faults: "Sequence[NodeFault]" = (),
) -> "list[ReclaimNumbers]":
    """Play the methods that stop jobs, print a table with a row for each play, and return the statistics.

    wanted: methods, None for all of them. patience_s: each method that stops jobs is played with each of these.
    Raises ConfigError for an unknown method, or for a scene without a file of queues.
    """
    from fleetcast.fleet.errors import ConfigError
    from fleetcast.training.judges.played_reclaim import ReclaimMethod, play_reclaim

    if scene.tree is None:
        raise ConfigError("--reclaim needs --queues FILE, in which a queue is `guaranteed` GPUs")
    names: tuple[ReclaimMethod, ...] = get_args(ReclaimMethod)
    for name in wanted or ():
        if name not in names:
            raise ConfigError(f"--policy {name}: with --reclaim, expected one of {', '.join(names)}")
    found = []
    echo(HEAD)
    for method in cast(tuple["ReclaimMethod", ...], tuple(dict.fromkeys(wanted)) if wanted else names):
        for seconds in [0.0] if method == "no_preemption" else list(dict.fromkeys(patience_s)):
            with show_progress(method, scene) as tick:
                found.append(play_reclaim(scene, method, seconds, draw, tick, faults))
            echo(_format_row(found[-1]))
    return found


def _format_row(one: "ReclaimNumbers") -> str:
    """Format the statistics of one play as a row of the table."""
    patience = "-" if one.method == "no_preemption" else f"{one.patience_s:,.0f} s"
    at_once = "-" if one.at_once is None else f"{one.at_once:.1%}"
    p99 = "-" if one.entitled_p99_wait_s is None else f"{one.entitled_p99_wait_s:,.0f} s"
    mean = "-" if one.entitled_mean_wait_s is None else f"{one.entitled_mean_wait_s:,.0f} s"
    stops = f"{one.stops:>6,} {one.most_stops:>5} {one.lost_gpu_h:>11,.1f} {one.restart_gpu_h:>9,.1f}"
    return (
        f"{one.method:<15} {patience:>8} {f'{one.mean_wait_s:,.0f} s':>10} {f'{one.p99_wait_s:,.0f} s':>10} {mean:>9}"
        f" {at_once:>8} {p99:>10} {stops}"
    )
