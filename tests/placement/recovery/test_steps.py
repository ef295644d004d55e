"""The steps of recovery, the rule of foresight, and the number of spares."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleetcast.placement.recovery.foresight import compute_least_probability, compute_set_probability, should_act_early
from fleetcast.placement.recovery.spares import compute_failure_distribution, compute_repair_risk, count_spares
from fleetcast.placement.recovery.steps import RecoveryStep, RecoveryTimes, choose_step, price_step

TIMES = RecoveryTimes()
PROBABILITIES = st.lists(st.floats(0, 1), max_size=7).map(lambda p: np.array(p, np.float64))


def test_equal_costs_follow_the_ladder() -> None:
    steps = [price_step(step, TIMES, 16) for step in reversed(RecoveryStep)]
    assert choose_step(steps).step is RecoveryStep.IN_PLACE
    assert choose_step(steps[:-1]).step is RecoveryStep.SPARE
    assert choose_step(steps[:-2]).step is RecoveryStep.FREE


def test_a_node_is_borrowed_only_if_that_costs_less_than_waiting() -> None:
    wait = price_step(RecoveryStep.WAIT, TIMES, 16)
    saved_gpu_s = 16 * (TIMES.free_after_s - TIMES.grace_s)
    cheap = price_step(RecoveryStep.BORROW, TIMES, 16, saved_gpu_s - 1)
    dear = price_step(RecoveryStep.BORROW, TIMES, 16, saved_gpu_s + 1)
    assert choose_step([wait, cheap]) is cheap
    assert choose_step([wait, dear]) is wait


@given(PROBABILITIES)
def test_the_distribution_equals_that_of_all_cases(p: NDArray[np.float64]) -> None:
    expected = np.zeros(len(p) + 1)
    for case in product((0, 1), repeat=len(p)):
        expected[sum(case)] += np.prod([one if fails else 1 - one for one, fails in zip(p, case, strict=True)])
    assert compute_failure_distribution(p) == pytest.approx(expected, abs=1e-12)


@given(PROBABILITIES, st.floats(0.001, 0.999))
def test_the_spares_are_the_least_that_are_enough(p: NDArray[np.float64], epsilon: float) -> None:
    spares, distribution = count_spares(p, epsilon), compute_failure_distribution(p)
    assert distribution[spares + 1 :].sum() <= epsilon + 1e-12
    assert spares == 0 or distribution[spares:].sum() > epsilon - 1e-12


@given(
    st.lists(st.floats(0, 0.9), min_size=1, max_size=40).map(lambda p: np.array(p, np.float64)),
    st.tuples(st.floats(0.001, 0.5), st.floats(0.001, 0.5)),
    st.tuples(st.floats(60, 1e6), st.floats(60, 1e6)),
)
def test_a_smaller_epsilon_or_a_longer_repair_never_needs_fewer_spares(
    p_fail: NDArray[np.float64], epsilons: tuple[float, float], repairs: tuple[float, float]
) -> None:
    short, long = (compute_repair_risk(p_fail, 86_400, repair_s) for repair_s in sorted(repairs))
    assert count_spares(long, epsilons[0]) >= count_spares(short, epsilons[0])
    assert count_spares(short, min(epsilons)) >= count_spares(short, max(epsilons))


@pytest.mark.parametrize(("repair_days", "spares"), [(1, 3), (6.6, 11)])
def test_repair_times_decide_the_spares_of_a_large_gang(repair_days: float, spares: int) -> None:
    p = compute_repair_risk(np.full(250, 1 - np.exp(-370 / 400 / 230)), 86_400, repair_days * 86_400)
    assert count_spares(p, 0.05) == spares


@given(st.floats(0, 1), st.floats(0, 1e5))
def test_acting_early_pays_exactly_where_the_expected_saving_is_larger(p: float, redo_s: float) -> None:
    saving_s = p * (redo_s + TIMES.detection_s)
    expense_s = (1 - p) * (TIMES.checkpoint_s + TIMES.swap_s)
    if abs(saving_s - expense_s) > 1e-6:
        assert should_act_early(p, redo_s, TIMES) == (saving_s > expense_s)


def test_more_work_at_stake_needs_less_certainty() -> None:
    assert compute_least_probability(3600, TIMES) < compute_least_probability(600, TIMES)


def test_a_set_fails_if_one_of_its_nodes_does() -> None:
    assert compute_set_probability([]) == 0
    assert compute_set_probability([0.1, 1.0]) == pytest.approx(1)
