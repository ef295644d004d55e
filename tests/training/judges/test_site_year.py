"""The simulated year of a site: other rates by seed, the same numbers again, and a gate that waits for failures."""

import numpy as np

from fleetcast.training.judges.site_year import YOUNG, evaluate_year, find_first_failures_ms
from fleetcast.training.sets.simulated_year import draw_plan, simulate_year


def test_a_seed_gives_the_same_year_again_and_another_one_other_rates():
    first, again, other = (simulate_year(draw_plan(20, 60, seed, faults=5.0)) for seed in (1, 1, 2))
    assert (first.columns == again.columns).all()
    assert (first.begun["fail"].time_ms == again.begun["fail"].time_ms).all()
    assert draw_plan(20, 60, 1).wears != draw_plan(20, 60, 2).wears
    assert len(first) != len(other) or (first.columns != other.columns).any()


def test_failures_end_and_nodes_that_are_away_have_no_row():
    days = simulate_year(draw_plan(20, 60, 1, faults=8.0))
    assert len(days.begun["fail"].node) > 8
    assert len(days) < 20 * 60
    assert np.isfinite(days.faults.end_day).mean() > 0.8


def test_the_judge_says_when_the_gate_opens_and_when_it_does_not(monkeypatch):
    monkeypatch.setattr(
        "fleetcast.training.judges.site_year.draw_plan", lambda nodes, seed: draw_plan(nodes, 150, seed, faults=6.0)
    )
    said = []
    results = evaluate_year(40, 1, said.append)
    assert any(line.startswith("gate, whole year: serves: log loss") for line in said)
    assert f"gate, {YOUNG} failures: does not serve: {YOUNG} failures, 50 needed" in " ".join(said)
    assert {row.method for row in results.rows} == {"ours", "shipped", "base_rate"}
    assert find_first_failures_ms(simulate_year(draw_plan(20, 60, 1, faults=8.0))) > 0
