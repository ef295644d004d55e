"""The model of the autoscaler that the benchmark of KEDA plays."""

import numpy as np
import pytest

from fleetcast.benchmarks.answers.keda import make_served_forecasts
from fleetcast.benchmarks.kit.autoscale import (
    COLD_S,
    DAY,
    ReplicaSet,
    compute_wish,
    draw_office_ramp,
    match_replica_hours,
    simulate_autoscaler,
)

STEP = np.concatenate([np.full(60, 8.0), np.full(60, 80.0)])


def test_within_a_tenth_nothing_changes() -> None:
    assert compute_wish(109.0, 10.0, 10) == 10
    assert compute_wish(111.0, 10.0, 10) == 12
    assert compute_wish(80.0, 10.0, 10) == 8


def test_it_grows_at_most_twofold_or_by_four_in_a_look() -> None:
    replicas = ReplicaSet([0.0])
    grown = []
    for look in range(4):
        replicas.evaluate(15.0 * look, [1000.0], 10.0)
        grown.append(len(replicas.warm_at))
    assert grown == [5, 10, 20, 40]


def test_it_shrinks_to_the_largest_wish_of_five_minutes_the_newest_first() -> None:
    replicas = ReplicaSet([0.0, 0.0, 0.0])
    replicas.evaluate(0.0, [50.0], 10.0)
    assert len(replicas.warm_at) == 5
    for now_s in range(15, 300, 15):
        replicas.evaluate(float(now_s), [10.0], 10.0)
    assert len(replicas.warm_at) == 5
    replicas.evaluate(300.0, [10.0], 10.0)
    assert replicas.warm_at == [0.0]


def test_new_replicas_are_cold_and_a_metric_without_a_value_counts_for_nothing() -> None:
    replicas = ReplicaSet([0.0])
    replicas.evaluate(0.0, [30.0, float("nan")], 10.0)
    assert (replicas.count_warm_replicas(0.0), replicas.count_warm_replicas(COLD_S)) == (1, 3)


def test_a_step_that_is_foreseen_finds_warm_replicas() -> None:
    alone = simulate_autoscaler(STEP, None, 10.0)
    told = np.concatenate([STEP[8:], np.full(8, 80.0)])  # eight minutes ahead
    both = simulate_autoscaler(STEP, told, 10.0)
    assert alone.cold_s >= COLD_S
    assert both.cold_s == both.short == 0
    assert both.replica_hours > alone.replica_hours


def test_the_peer_of_equal_cost_costs_as_much() -> None:
    rates = draw_office_ramp(2, 3)
    peer = match_replica_hours(rates, 16.0, 1.1 * simulate_autoscaler(rates, None, 16.0).replica_hours)
    assert peer.replica_hours == pytest.approx(1.1 * simulate_autoscaler(rates, None, 16.0).replica_hours, rel=0.02)


def test_a_forecast_knows_nothing_of_what_comes_later() -> None:
    rates = draw_office_ramp(2, 3)
    first = len(rates) - DAY + 600
    other = rates.copy()
    other[first + 3 :] *= 5
    told, changed = (make_served_forecasts(one[: first + 6], first) for one in (rates, other))
    for quantile, values in told.items():
        np.testing.assert_array_equal(values[:3], changed[quantile][:3])
        assert np.isfinite(values).all()
    assert (told[0.9][3:] != changed[0.9][3:]).any()
