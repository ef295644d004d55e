"""Speeds of jobs beside each other: the rule, what co-runs teach, the bound, and when nothing is said."""

import numpy as np
import pytest

from fleetcast.models.jobs.interference import (
    Pairs,
    compute_gpu_prior,
    compute_margin,
    compute_published_rule,
    fit_residuals,
    predict_speeds,
)
from fleetcast.models.jobs.link_overlap import CELLS, SendingTurns, compute_overlap, find_turn_ratio, fit_link

BUSY, LIGHT, UNKNOWN = (0.9, 0.5, 0.2), (0.2, 0.1, 0.1), (np.nan,) * 3
A, B, C, D = (1, 101), (2, 102), (3, 103), (4, 101)  # job, kind: D is of A's kind
NOBODY = (0, 0)


def one(load: tuple[float, ...], partner: tuple[float, ...], keys: tuple[int, int], other: tuple[int, int]) -> Pairs:
    return Pairs.from_rows([(load, partner, keys, other)])


def taught(speeds: list[float]) -> tuple[Pairs, np.ndarray]:
    """A was seen beside B that often, at these speeds, where the prior says 0.91."""
    pairs = Pairs.from_rows([(BUSY, LIGHT, A, B)] * len(speeds))
    return pairs, np.array(speeds) - compute_gpu_prior(pairs)


def test_the_prior_never_rises_with_a_load_and_is_the_rule_where_both_are_full_or_one_is_idle() -> None:
    loads = np.linspace(0, 1, 11)
    said = np.array([[compute_gpu_prior(one((u, 0, 0), (v, 0, 0), A, B))[0] for v in loads] for u in loads])
    assert (np.diff(said, axis=0) <= 0).all()
    assert (np.diff(said, axis=1) <= 0).all()
    for u, v in ((1.0, 1.0), (0.0, 1.0), (0.7, 0.0)):
        assert compute_gpu_prior(one((u, 0, 0), (v, 0, 0), A, B)) == compute_published_rule(
            np.array([u]), np.array([v])
        )


def test_without_co_runs_the_rule_speaks_and_gives_no_bound() -> None:
    found = predict_speeds(
        pairs := one(BUSY, BUSY, A, B), compute_gpu_prior(pairs), fit_residuals(Pairs.from_rows([]), np.zeros(0))
    )
    assert found.p50.tolist() == [pytest.approx(1 - 0.81 / 2)]
    assert found.known.all()
    assert found.basis == ("rule",)
    assert np.isnan(found.lower_90).all()


def test_of_two_jobs_of_which_nothing_is_known_nothing_is_said() -> None:
    found = predict_speeds(
        pairs := one(UNKNOWN, UNKNOWN, C, B), compute_gpu_prior(pairs), fit_residuals(*taught([0.6]))
    )
    assert not found.known.any()
    assert np.isnan(found.p50).all()


def test_where_one_is_known_the_other_is_taken_to_use_all_there_is() -> None:
    assert compute_gpu_prior(one(BUSY, UNKNOWN, A, NOBODY)).tolist() == [pytest.approx(1 - 0.9 / 2)]


def test_three_co_runs_move_the_speed_further_than_one_and_never_past_what_was_seen() -> None:
    pairs = one(BUSY, LIGHT, A, B)
    said = [
        predict_speeds(pairs, compute_gpu_prior(pairs), fit_residuals(*taught([0.6] * n))).p50[0] for n in (0, 1, 3, 30)
    ]
    assert pytest.approx(said[0]) == 0.91
    assert said[0] > said[1] > said[2] > said[3] > 0.6
    assert said[2] < 0.7


def test_a_job_of_the_same_kind_learns_less_than_the_job_itself() -> None:
    residuals = fit_residuals(*taught([0.6] * 3))
    own, kin, other = (residuals.compute_correction(one(UNKNOWN, UNKNOWN, keys, C))[0] for keys in (A, D, C))
    assert own < kin < 0
    assert other == 0
    assert residuals.count_observed(one(UNKNOWN, UNKNOWN, D, C)).tolist() == [3]


def test_who_was_seen_beside_this_very_partner_is_observed() -> None:
    residuals = fit_residuals(*taught([0.6] * 3))
    prior = np.ones(1)
    assert predict_speeds(one(BUSY, LIGHT, A, B), prior, residuals).basis == ("observed",)
    assert predict_speeds(one(BUSY, LIGHT, A, C), prior, residuals).basis == ("residuals",)


def test_unknown_keys_are_not_alike() -> None:
    residuals = fit_residuals(Pairs.from_rows([(UNKNOWN, UNKNOWN, NOBODY, NOBODY)] * 3), np.full(3, -0.4))
    assert residuals.compute_correction(one(UNKNOWN, UNKNOWN, NOBODY, NOBODY)).tolist() == [0.0]


def test_leave_one_out_errors_are_those_of_learning_without_the_one() -> None:
    rng = np.random.default_rng(0)
    loads = rng.uniform(0.1, 0.9, (12, 2, 3))
    rows = [(mine, other, (n % 4 + 1, 7), (n % 3 + 1, 8)) for n, (mine, other) in enumerate(loads.tolist())]
    pairs, residual = Pairs.from_rows(rows), rng.normal(0, 0.1, 12)
    errors = fit_residuals(pairs, residual).errors
    for n in range(12):
        others = np.arange(12) != n
        without = fit_residuals(pairs.select_rows(others), residual[others])
        assert errors[n] == pytest.approx(residual[n] - without.compute_correction(pairs.select_rows(np.array([n])))[0])


def test_the_bound_of_a_job_of_a_new_kind_is_made_of_errors_without_the_kinds_that_are_known() -> None:
    rng = np.random.default_rng(0)
    rows = [(BUSY, LIGHT, (n % 3 + 1, n % 3 + 1), (n % 4 + 11, n % 4 + 11)) for n in range(36)]
    pairs, residual = (
        Pairs.from_rows(rows),
        np.repeat([-0.2, 0.0, 0.1], 12)[np.arange(36) % 3 * 12] + rng.normal(0, 0.01, 36),
    )
    found = fit_residuals(pairs, residual)
    kinds = np.column_stack([pairs.keys[:, 1], pairs.partner_keys[:, 1]])
    left = []
    for kind in np.unique(kinds):
        out = (kinds == kind).any(axis=1)
        left += (
            residual[out]
            - fit_residuals(pairs.select_rows(~out), residual[~out]).compute_correction(pairs.select_rows(out))
        ).tolist()
    assert found.strange == pytest.approx(left)
    known, strange = one(BUSY, LIGHT, (1, 1), (11, 11)), one(BUSY, LIGHT, (9, 9), (11, 11))
    assert -0.06 < found.compute_slack(known)[0] < 0
    assert found.compute_slack(strange)[0] < -0.1


def test_nine_in_ten_outcomes_lie_above_the_bound() -> None:
    rng = np.random.default_rng(1)
    held = [(rng.normal(0, 0.1) >= compute_margin(rng.normal(0, 0.1, 19))) for _ in range(2000)]
    assert np.mean(held) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(("a_s", "b_s", "turns"), [(1.0, 1.01, (1, 1)), (3.0, 2.0, (2, 3)), (1.0, 1.387, None)])
def test_periods_are_rounded_to_small_whole_numbers(a_s: float, b_s: float, turns: tuple[int, int] | None) -> None:
    assert find_turn_ratio(a_s, b_s) == turns


@pytest.mark.parametrize(("a_s", "b_s"), [(0.0, 1.0), (1.0, 0.0), (np.inf, 1.0), (1.0, np.nan), (1e-300, 1e300)])
def test_what_is_no_period_has_no_turns_and_still_an_answer(a_s: float, b_s: float) -> None:
    assert find_turn_ratio(a_s, b_s) is None
    jobs = SendingTurns(a_s, 0.5), SendingTurns(b_s, 0.5)
    met = compute_overlap(*jobs)
    assert not met.locked
    assert met.speed_a == pytest.approx(1 / 1.25)
    assert fit_link(jobs).compatibility == pytest.approx(0.75)
    assert fit_link(jobs).shifts_s is None


def test_two_halves_of_a_circle_fit_when_shifted_and_not_when_aligned_and_two_wholes_never_do() -> None:
    half, whole = SendingTurns(2.0, 0.5), SendingTurns(2.0, 1.0)
    assert compute_overlap(half, half).speed_a[[0, 36]] == pytest.approx([1 / 1.5, 1.0])
    assert fit_link([half, half]).compatibility == pytest.approx(1.0)
    assert fit_link([half, half]).shifts_s == (0.0, 1.0)
    assert compute_overlap(whole, whole).speed_a == pytest.approx(0.5)
    assert fit_link([whole, whole]).compatibility == pytest.approx(0.0)


def test_compatibility_is_what_the_circle_has_room_for_at_the_best_of_all_shifts() -> None:
    """Against mean(max(0, sum of demands - capacity)) over the circle, summed at each shift of a fine grid."""
    a, b = SendingTurns(4.0, 0.4, 0.9), SendingTurns(2.0, 0.5, 0.7)
    at_s = np.arange(CELLS) / CELLS * 4.0
    wants_a = a.rate * (at_s % a.period_s < a.busy_share * a.period_s)
    excess = [
        np.maximum(0, wants_a + b.rate * ((at_s - shift_s) % b.period_s < b.busy_share * b.period_s) - 1).mean()
        for shift_s in np.arange(72) / 72 * 4.0
    ]
    assert fit_link([a, b]).compatibility == pytest.approx(1 - min(excess), abs=2 / CELLS)
    assert 0.05 < min(excess) < max(excess) - 0.05


def test_of_more_than_two_each_finds_its_place_beside_those_before_it() -> None:
    third = SendingTurns(3.0, 1 / 3)
    assert fit_link([third] * 3).compatibility == pytest.approx(1.0)
    assert sorted(fit_link([third] * 3).shifts_s or ()) == pytest.approx([0.0, 1.0, 2.0])
    assert fit_link([SendingTurns(2.0, 0.5)] * 3).compatibility == pytest.approx(0.5)
    drifting = [SendingTurns(1.0, 0.5, 0.6), SendingTurns(1.387, 0.5, 0.6), SendingTurns(1.0, 0.5, 0.6)]
    assert fit_link(drifting).shifts_s is None
    assert fit_link(drifting).compatibility == pytest.approx(1 - (3 * 0.2 + 0.8) / 8)


def test_a_link_with_room_for_all_fits_them_however_they_meet() -> None:
    assert (
        fit_link(
            [SendingTurns(1.0, 0.9, 0.3), SendingTurns(1.0, 0.9, 0.3), SendingTurns(1.387, 0.9, 0.3)]
        ).compatibility
        == 1.0
    )


def test_jobs_that_drift_meet_as_often_as_chance_has_it() -> None:
    met = compute_overlap(SendingTurns(1.0, 0.5), SendingTurns(1.387, 0.4))
    assert not met.locked
    assert met.speed_a == pytest.approx(1 / (1 + 0.5 * 0.4))
    assert met.speed_b == pytest.approx(1 / (1 + 0.4 * 0.5))


def test_a_link_with_room_for_both_slows_nobody() -> None:
    met = compute_overlap(SendingTurns(1.0, 0.9, rate=0.4), SendingTurns(1.0, 0.9, rate=0.5))
    assert met.speed_a.min() == met.speed_b.min() == 1.0
