"""`fleetcast play --elastic`: plays in which a share of the large jobs are elastic gangs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from fleetcast.cli.kit.screen import echo

if TYPE_CHECKING:
    from fleetcast.training.judges.played import PlayScene, Tick
    from fleetcast.training.judges.played_elastic import ElasticNumbers

HEAD = (
    f"{'method':<8} {'elastic':>7} {'exponent':>8} {'mean wait':>10} {'completion':>10} {'p99':>10} {'least p99':>10}"
    f" {'p99 delay':>10} {'work':>12} {'shrinks':>8} {'grows':>6}"
)


def play_elastic_methods(
    scene: "PlayScene",
    shares: Sequence[float],
    exponents: Sequence[float],
    seed: int,
    show_progress: Callable[[str, "PlayScene"], AbstractContextManager["Tick"]],
) -> "list[ElasticNumbers]":
    """Play elastic gangs and gangs of fixed size, print a table with a row for each play, and return the statistics.

    shares: of the large jobs, which are elastic. exponents: of the speed of a gang. Each share is played once with a
    fixed size, and once with each exponent.
    """
    from fleetcast.training.judges.played_elastic import play_elastic

    found = []
    echo(HEAD)
    for share in dict.fromkeys(shares):
        for exponent in (None, *dict.fromkeys(exponents)):
            with show_progress("rigid" if exponent is None else "elastic", scene) as tick:
                found.append(play_elastic(scene, share, exponent, seed, tick))
            echo(_format_row(found[-1]))
    return found


def _format_row(one: "ElasticNumbers") -> str:
    """Format the statistics of one play as a row of the table."""
    exponent = "-" if one.exponent is None else f"{one.exponent:g}"
    seconds = (
        *(one.mean_wait_s, one.mean_completion_s, one.p99_completion_s),
        *(one.least_p99_completion_s, one.p99_delay_s),
    )
    times = " ".join(f"{f'{value:,.0f} s':>10}" for value in seconds)
    work = f"{one.work_gpu_h:,.0f} GPU-h"
    return (
        f"{'rigid' if one.exponent is None else 'elastic':<8} {one.share:>7.0%} {exponent:>8} {times} {work:>12}"
        f" {one.shrinks:>8,} {one.grows:>6,}"
    )
