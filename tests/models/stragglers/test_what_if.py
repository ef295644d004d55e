"""Replaying a step: who costs what."""

import numpy as np
import pytest

from fleetcast.models.stragglers.what_if import attribute_slowdown, simulate_step_time

# Two stages, two micro-batches: forward 0 1, backward 0 1.
ORDER = (((0, 0), (0, 1), (1, 0), (1, 1)), ((0, 0), (1, 0), (0, 1), (1, 1)))


def test_a_step_waits_for_what_it_needs():
    #  stage 0  F0 F1 .  B0 .  B1
    #  stage 1  .  F0 B0 F1 B1
    seconds = np.ones((1, 3, 2, 2, 2))
    assert simulate_step_time(seconds, ORDER).tolist() == [6.0]
    assert simulate_step_time(seconds, ORDER, transfer_s=0.5).tolist() == [7.0]
    seconds[0, 1, 1, 0, 0] = 3.0  # one forward pass of one replica: all wait for it in the end
    assert simulate_step_time(seconds, ORDER).tolist() == [8.0]


def test_a_schedule_that_waits_for_itself_is_refused():
    with pytest.raises(ValueError, match="waits for itself"):
        simulate_step_time(np.ones((1, 1, 2, 2, 1)), (((1, 0), (0, 0)), ((0, 0), (1, 0))))


def test_operations_without_any_time_are_refused():
    with pytest.raises(ValueError, match="no operation takes any time"):
        attribute_slowdown(np.zeros((2, 2, 2, 2, 2)), ORDER)


def test_the_slow_worker_explains_what_it_costs():
    seconds = np.ones((3, 4, 2, 2, 2))
    seconds[:, 2, 1] = 2.0
    found = attribute_slowdown(seconds, ORDER)
    assert np.unravel_index(found.share.argmax(), found.share.shape) == (2, 1)
    assert found.share[2, 1] > 0.9
    assert found.by_replica.argmax() == 2
    assert found.by_stage.argmax() == 1
    assert found.slowdown == pytest.approx(found.by_replica[2], rel=0.1)
