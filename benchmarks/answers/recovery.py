"""A gang of 2,000 GPUs under a recorded trace of faults: the minutes that it loses per failure, by kind of recovery.

The trace of 400 nodes is `faults/infinitehbd` of FLEETCAST_DATA. Without it the benchmark is left out with a
message. `restart` starts the whole gang anew, `one-node swap` replaces one node as Kueue does and else restarts,
and ours takes the cheapest step of the ladder. Each case is the mean over the seeds, which choose the gang's
nodes and draw the warnings.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.gang_outages import (
    GangLife,
    GangRun,
    NodeFaults,
    Recover,
    draw_warnings,
    read_faults,
    recover_by_ladder,
    restart_gang,
    swap_one_node,
)
from fleetcast.placement.recovery.steps import RecoveryTimes

SIZES = (20,)  # seeds
NODES, MEMBERS = 400, 250
TRACE = Path("faults/infinitehbd/fault_intervals.parquet")
CHECKPOINTS_S = (60.0, 10.0)
FORESEEN = 0.5
FREE: tuple[tuple[str, int, bool], ...] = (
    ("nothing free", 0, False),
    ("three free", 3, False),
    ("three free, refilled", 3, True),
)
WARNED = ((0.4, None, ""), (0.15, None, ""), (0.15, True, ", followed all the same"))
RESTART, SWAP, OURS = "restart", "one-node swap", "ours"


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield the records for each number of seeds."""
    path = Path(os.environ.get("FLEETCAST_DATA", "../shared/data")) / TRACE
    if not path.is_file():
        print(f"recovery: no trace of faults at {path}, set FLEETCAST_DATA", file=sys.stderr)
        return
    faults = read_faults(path, NODES)
    for seeds in sizes:
        for checkpoint_s in CHECKPOINTS_S:
            yield from _compare_arms(RecoveryTimes(checkpoint_s=checkpoint_s), faults, seeds)


def _compare_arms(times: RecoveryTimes, faults: NodeFaults, seeds: int) -> Iterator[dict[str, Any]]:
    size = {"seeds": seeds, "s a checkpoint": round(times.checkpoint_s)}
    for where, free, refills in FREE:
        scene = Scene(faults, times, free, refills, seeds)
        restart, _ = scene.measure(f"{RESTART}, {where}", restart_gang, size)
        yield restart
        swap, swap_min = scene.measure(f"{SWAP}, {where}", swap_one_node, size)
        yield swap
        ours, ours_min = scene.measure(f"{OURS}, {where}", recover_by_ladder, size, peer=(SWAP, swap_min))
        yield ours
        for precision, follow, how in WARNED if times.checkpoint_s == CHECKPOINTS_S[0] else WARNED[:1]:
            case = f"{OURS}, {where}, half foreseen at precision {precision:g}{how}"
            yield scene.measure(case, recover_by_ladder, size, (OURS, ours_min), (precision, follow))[0]


class Scene:
    """Runs of one gang by seed, with the same free nodes and times."""

    def __init__(self, faults: NodeFaults, times: RecoveryTimes, free: int, refills: bool, seeds: int) -> None:
        self._faults, self._times, self._free, self._refills, self._seeds = faults, times, free, refills, seeds

    def play(self, recover: Recover, warned: tuple[float, bool | None] | None = None) -> list[GangLife]:
        """Play each seed. warned: precision of the warnings, and whether they are followed (None: by cost)."""
        lives = []
        for seed in range(self._seeds):
            warnings = None
            if warned:
                drawn = draw_warnings(self._faults, FORESEEN, warned[0], np.random.default_rng([seed, 1]))
                warnings = replace(drawn, follow=warned[1])
            rng = np.random.default_rng(seed)
            gang = (MEMBERS, self._free, self._times, recover, rng)
            lives.append(GangRun(self._faults, *gang, warnings, self._refills).play())
        return lives

    def measure(
        self,
        case: str,
        recover: Recover,
        size: dict[str, int],
        peer: tuple[str, float] | None = None,
        warned: tuple[float, bool | None] | None = None,
    ) -> tuple[dict[str, Any], float]:
        """Return the record of one arm, and its mean minutes lost per failure."""
        began_s = time.process_time()
        lives = self.play(recover, warned)
        minutes = float(np.mean([life.minutes_per_failure for life in lives]))
        facts = f"ETTR {100 * np.mean([life.ettr for life in lives]):.2f} %"
        record = make_record("recovery", f"{case}: {facts}", size, [minutes], "min/failure",
                             cpu_s=time.process_time() - began_s, peer=peer)  # fmt: skip
        return record, minutes
