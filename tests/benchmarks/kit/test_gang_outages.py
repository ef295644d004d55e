"""The life of a gang under faults: what each way of recovery loses."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleetcast.benchmarks.kit.gang_outages import (
    GangLife,
    GangRun,
    NodeFaults,
    Recover,
    Warnings,
    recover_by_ladder,
    restart_gang,
    swap_one_node,
)
from fleetcast.placement.recovery.steps import RecoveryTimes

TIMES = RecoveryTimes()
DAY_S = 86_400.0


def play(recover: Recover, faults: list[tuple[int, float, float]], free: int = 0, **more: Any) -> GangLife:
    """Play a gang of all but two of eight nodes. faults: node, start and length in seconds."""
    node, start, length = (np.array(column) for column in zip(*faults, strict=True))
    trace = NodeFaults(node.astype(np.int64), start.astype(float), (start + length).astype(float), 8, 10 * DAY_S)
    run = GangRun(trace, 6, free, TIMES, recover, Unshuffled(), **more)  # type: ignore[arg-type]
    return run.play()


class Unshuffled:
    """Chooses the first nodes."""

    def permutation(self, n: int) -> NDArray[np.int64]:
        return np.arange(n)

    def choice(self, values: NDArray[np.int64]) -> int:
        return int(values[0])


@pytest.mark.parametrize(
    ("recover", "free", "delay_s"),
    [(restart_gang, 0, 2700), (restart_gang, 1, 900), (swap_one_node, 0, 2700), (swap_one_node, 1, 300),
     (recover_by_ladder, 0, 420), (recover_by_ladder, 1, 300)],
)  # fmt: skip
def test_one_lost_node(recover: Recover, free: int, delay_s: float) -> None:
    life = play(recover, [(0, 600.0, DAY_S)], free)
    assert life.lost_s == pytest.approx(600 + TIMES.detection_s + delay_s)


def test_a_fault_of_no_length_needs_no_other_node() -> None:
    life = play(recover_by_ladder, [(0, 600.0, 0.0)])
    assert (life.lost_s, life.borrowed) == (600 + 300 + 300, 0)


def test_faults_during_a_swap_join_the_interruption() -> None:
    life = play(recover_by_ladder, [(0, 600.0, DAY_S), (1, 1000.0, DAY_S)], free=2)
    assert life.interruptions == 1
    assert life.lost_s == pytest.approx(600 + 400 + 300 + 300)


def test_a_fault_outside_the_gang_costs_nothing() -> None:
    assert play(restart_gang, [(7, 600.0, DAY_S), (0, DAY_S, 0.0)]).interruptions == 1


def test_an_early_swap_costs_a_checkpoint_and_a_swap() -> None:
    early = Warnings(np.array([0]), np.array([600.0]), p=0.9)
    life = play(recover_by_ladder, [(0, 2400.0, DAY_S)], free=1, warnings=early)
    assert (life.interruptions, life.failures, life.lost_s) == (0, 1, 360.0)
    ignored = Warnings(np.array([0]), np.array([600.0]), p=0.01)
    assert play(recover_by_ladder, [(0, 2400.0, DAY_S)], free=1, warnings=ignored).interruptions == 1
