"""The gate: who serves, and that only the past moves it."""

import json

import numpy as np

from fleetcast.models.demand.gate import Gate
from fleetcast.models.demand.naive import FORECASTERS
from fleetcast.models.demand.units import compute_pinball_loss
from fleetcast.models.forecast import QUANTILES, Panel

STEPS = (1, 6, 18, 36, 72, 144)
NAMES = [forecaster.name for forecaster in FORECASTERS]


def panel(values):
    names = tuple(f"s{n}" for n in range(len(values)))
    return Panel("running", names, 600, 0, values, np.full(len(values), np.nan))


def run(values, every=6, first=144, gate=None):
    """Every forecast that a gate serves over the series: {origin: Served}, and the gate."""
    one = panel(values)
    gate = gate or Gate(NAMES, STEPS, one.names)
    origins = np.arange(first, one.bins, every)
    raw = np.stack([forecaster.forecast(one, origins, STEPS) for forecaster in FORECASTERS])
    served = {}
    for bin in range(first, one.bins):
        gate.score_bin(bin, values[:, bin])
        if (bin - first) % every == 0:
            served[bin] = gate.issue_forecast(bin, raw[:, :, :, (bin - first) // every])
    return served, gate


def walk(bins, seed=0, level=5000.0):
    return (level + np.cumsum(np.random.default_rng(seed).normal(0, 5, bins)))[None]


def squares(bins):
    """On for half of each day, off for the other, with a little noise."""
    return (100 + 400 * (np.arange(bins) % 144 < 72) + np.random.default_rng(1).normal(0, 3, bins))[None]


def loss(served, values, at):
    gaps = [
        compute_pinball_loss(one.values[:, at], values[:, origin + STEPS[at]])
        for origin, one in served.items()
        if origin + STEPS[at] < values.shape[1]
    ]
    return float(np.mean(gaps[len(gaps) // 2 :]))


def persistence(values, origins):
    raw = FORECASTERS[0].forecast(panel(values), np.array(origins), STEPS)
    return {origin: type("S", (), {"values": raw[:, :, n]}) for n, origin in enumerate(origins)}


def test_random_walks_cost_what_persistence_costs():
    """Up to three hours it serves; beyond, a month of a walk may look as if it came back, and the mean hedges."""
    values = np.concatenate([walk(3000, seed) for seed in range(4)])
    served, _ = run(values, every=12)
    models = np.stack([one.model for one in served.values()])
    assert (models[:, :3] == "persistence").mean() > 0.9
    assert not np.isin(models, ("seasonal_naive", "recent_level")).any()
    base = persistence(values, list(served))
    for at in range(len(STEPS)):
        assert loss(served, values, at) <= 1.01 * loss(base, values, at)


def test_a_daily_square_wave_is_served_by_another_and_much_better():
    values = squares(4000)
    served, gate = run(values)
    base = persistence(values, list(served))
    last = served[max(served)].model[:, 0]
    for at in (2, 3, 4):
        assert last[at] != "persistence"
        assert loss(served, values, at) < 0.7 * loss(base, values, at)
    assert gate.list_accuracy()[0]["origins"] > 3000


def test_every_lead_has_its_own_model():
    """A day ahead persistence says the same as the seasonal naive, half a day ahead the opposite."""
    served, _ = run(squares(4000))
    last = served[max(served)].model[:, 0].tolist()
    assert last[4:] == ["seasonal_naive", "persistence"]


def test_counts_are_served_in_whole_numbers_until_an_outcome_is_none():
    gate = Gate(["persistence"], (1,), ("idle", "rate"), whole=np.array([True, False]))
    raw = np.linspace(0.0, 1.8, len(QUANTILES))[None, :, None, None] + np.zeros((1, 1, 1, 2))
    assert gate.make_served_forecast(raw).values[:, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert np.allclose(gate.make_served_forecast(raw).values[:, 0, 1], raw[0, :, 0, 1])
    gate.score_bin(0, np.array([0.5, np.nan]))
    assert np.allclose(gate.make_served_forecast(raw).values[:, 0, 0], raw[0, :, 0, 0])


def test_with_few_outcomes_persistence_serves_and_a_clear_gain_is_soon_seen():
    values = squares(144 * 7)
    served, _ = run(values)
    assert set(served[144 + 36].model[:, 0]) == {"persistence"}
    assert "persistence" not in served[max(served)].model[:5, 0]


def test_the_mean_follows_who_is_right_and_shadows_have_no_part_in_it():
    outcomes = np.random.default_rng(0).normal(0, 1, 900)
    spread = np.linspace(-1.0, 1.0, len(QUANTILES))
    gate = Gate(["persistence", "theta", "told"], (1,), ("a",), shadows=("told",))
    raw = 50 + spread[None, :, None, None] + np.zeros((3, 1, 1, 1))
    for origin, outcome in enumerate(outcomes[:-1]):
        gate.score_bin(origin, np.array([50 + outcome]))
        raw[1:] = 50 + outcomes[origin + 1] + spread[None, :, None, None] / 10
        gate.issue_forecast(origin, raw)
    last = gate._make_candidates(raw)[-1, 3, 0, 0]
    assert abs(last - raw[1, 3, 0, 0]) < 0.05
    raw[1:] = np.nan
    assert np.array_equal(gate._make_candidates(raw)[-1], raw[0])


def test_what_comes_later_moves_no_earlier_forecast():
    values = walk(3000)
    other = values.copy()
    other[:, 2000:] += 300
    ours, theirs = run(values)[0], run(other)[0]
    for origin, one in ours.items():
        same = np.array_equal(one.values, theirs[origin].values)
        assert same == (origin < 2000)


def test_bounds_hold_and_a_forecaster_that_cannot_is_stood_in_for():
    gate = Gate(["persistence", "shy"], (1,), ("a",), ceiling=np.array([10.0]))
    raw = np.full((2, len(QUANTILES), 1, 1), np.nan)
    raw[0, :, 0, 0] = np.linspace(-5, 25, len(QUANTILES))
    for origin in range(1000):
        gate.score_bin(origin, np.array([9.0]))
        served = gate.issue_forecast(origin, raw)
    assert served.values.min() >= 0.0
    assert served.values.max() <= 10.0
    assert served.model[0, 0] == "persistence"


def test_who_says_nothing_changes_nothing_of_what_is_served():
    values = np.concatenate([squares(2500), walk(2500)])
    known, _ = run(values)
    one = panel(values)
    gate = Gate([*NAMES, "silent"], STEPS, one.names)
    origins = np.arange(144, one.bins, 6)
    raw = np.stack([forecaster.forecast(one, origins, STEPS) for forecaster in FORECASTERS])
    raw = np.concatenate([raw, np.full_like(raw[:1], np.nan)])
    for bin in range(144, one.bins):
        gate.score_bin(bin, values[:, bin])
        if (bin - 144) % 6 == 0:
            served = gate.issue_forecast(bin, raw[:, :, :, (bin - 144) // 6])
            np.testing.assert_array_equal(served.values, known[bin].values)


def test_an_outcome_above_the_ceiling_raises_it():
    gate = Gate(["persistence"], (1,), ("a", "b"), ceiling=np.array([10.0, 10.0]))
    gate.score_bin(0, np.array([12.0, np.nan]))
    served = gate.issue_forecast(0, np.full((1, len(QUANTILES), 1, 2), 20.0))
    assert served.values[3, 0].tolist() == [12.0, 10.0]


def test_unknown_outcomes_teach_nothing():
    gate = Gate(NAMES, (1,), ("a", "b"))
    raw = np.ones((3, len(QUANTILES), 1, 2))
    for origin in range(50):
        gate.score_bin(origin, np.array([np.nan, 1.0]))
        gate.issue_forecast(origin, raw)
    record = gate.list_accuracy()
    assert record[0] == {"wql_vs_best_naive": None, "coverage_80": None, "origins": 0}
    assert record[1]["origins"] == 49


def test_offsets_bring_coverage_to_its_level():
    rng = np.random.default_rng(3)
    gate = Gate(["persistence"], (1,), ("a",))
    narrow = np.array([-0.2, -0.15, -0.1, 0.0, 0.1, 0.15, 0.2])[None, :, None, None] + 10
    hits = []
    served = gate.issue_forecast(-1, narrow)
    for origin, outcome in enumerate(rng.normal(10, 1, 4000)):
        gate.score_bin(origin, np.array([outcome]))
        hits.append(served.values[1, 0, 0] <= outcome <= served.values[5, 0, 0])
        served = gate.issue_forecast(origin, narrow)
    assert abs(np.mean(hits[2000:]) - 0.8) < 0.04


def test_a_gate_goes_on_after_a_restart_as_if_nothing_had_been():
    values = np.concatenate([walk(2400), squares(2400)])
    straight, _ = run(values)
    _, gate = run(values[:, :1500])
    about, arrays = gate.dump()
    again = Gate(NAMES, STEPS, gate.series)
    again.load(json.loads(json.dumps(about)), arrays)
    rest, _ = run(values, first=1500, gate=again)
    origin = max(rest)
    assert np.array_equal(rest[origin].model, straight[origin].model)
    assert np.array_equal(rest[origin].values, straight[origin].values)


def test_who_is_farther_from_persistence_than_it_was_ever_right_does_not_serve():
    gate = Gate(["persistence", "oracle"], (1,), ("a",))
    spread = np.linspace(-1.0, 1.0, len(QUANTILES))
    levels = np.where(np.arange(900) % 2, 60.0, 40.0)

    def forecasts(level, next_one):
        return np.stack([level + spread, next_one + spread])[:, :, None, None]

    for bin in range(899):
        gate.score_bin(bin, levels[[bin]])
        gate.issue_forecast(bin, forecasts(levels[bin], levels[bin + 1]))
    gate.score_bin(899, levels[[899]])
    assert gate.make_served_forecast(forecasts(60.0, 40.0)).model[0, 0] == "oracle"
    assert gate.make_served_forecast(forecasts(90.0, 50.0)).model[0, 0] == "oracle"  # one spike is no shift
    for bin in (900, 901, 902):
        gate.score_bin(bin, np.array([90.0]))
    assert gate.make_served_forecast(forecasts(90.0, 62.0)).model[0, 0] == "oracle"
    assert gate.make_served_forecast(forecasts(90.0, 50.0)).model[0, 0] == "persistence"


def test_a_gate_takes_nothing_of_an_older_layout():
    _, gate = run(walk(500))
    about, arrays = gate.dump()
    del arrays["apart"]
    assert not Gate(NAMES, STEPS, gate.series).load(about, arrays)


def test_series_come_and_go():
    values = np.concatenate([walk(2000), squares(2000)])
    _, gate = run(values)
    other = Gate(NAMES, STEPS, ("new", "s1"))
    other.load(*gate.dump())
    assert other.list_accuracy()[1] == gate.list_accuracy()[1]
    assert other.list_accuracy()[0]["origins"] == 0
