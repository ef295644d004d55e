"""Replaying a step: who costs what."""

import numpy as np
import pytest

from models.operation_peers import slow_workers, worker_ratios
from models.what_if import attribute, step_time

# Two stages, two micro-batches: forward 0 1, backward 0 1.
ORDER = (((0, 0), (0, 1), (1, 0), (1, 1)), ((0, 0), (1, 0), (0, 1), (1, 1)))


def test_a_step_waits_for_what_it_needs():
    #  stage 0  F0 F1 .  B0 .  B1
    #  stage 1  .  F0 B0 F1 B1
    seconds = np.ones((1, 3, 2, 2, 2))
    assert step_time(seconds, ORDER).tolist() == [6.0]
    assert step_time(seconds, ORDER, transfer_s=0.5).tolist() == [7.0]
    seconds[0, 1, 1, 0, 0] = 3.0  # one forward pass of one replica: all wait for it in the end
    assert step_time(seconds, ORDER).tolist() == [8.0]


def test_a_schedule_that_waits_for_itself_is_refused():
    with pytest.raises(ValueError, match="waits for itself"):
        step_time(np.ones((1, 1, 2, 2, 1)), (((1, 0), (0, 0)), ((0, 0), (1, 0))))


def test_the_slow_worker_explains_what_it_costs():
    seconds = np.ones((3, 4, 2, 2, 2))
    seconds[:, 2, 1] = 2.0
    found = attribute(seconds, ORDER)
    assert np.unravel_index(found.share.argmax(), found.share.shape) == (2, 1)
    assert found.share[2, 1] > 0.9
    assert found.by_replica.argmax() == 2
    assert found.by_stage.argmax() == 1
    assert found.slowdown == pytest.approx(found.by_replica[2], rel=0.1)


def test_peers_name_the_slow_worker_and_nobody_when_all_are_slow_or_two_differ():
    seconds = np.exp(np.random.default_rng(0).normal(0, 0.05, (5, 4, 2, 2, 8)))
    assert not slow_workers(seconds).any()
    assert not slow_workers(1.5 * seconds).any()
    seconds[:, 3, 0] *= 1.3
    assert np.argwhere(slow_workers(seconds).all(axis=0)).tolist() == [[3, 0]]
    assert slow_workers(seconds).sum() == 5
    assert not slow_workers(seconds[:, 2:]).any()  # of two nobody knows which is slow


def test_one_long_operation_is_not_a_slow_worker():
    seconds = np.ones((1, 4, 1, 2, 8))
    seconds[0, 1, 0, 0, 3] = 50.0
    assert worker_ratios(seconds).max() == 1.0
