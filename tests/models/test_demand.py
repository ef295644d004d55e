"""Demand forecasts: their shape, their gate, what they keep."""

import json
import time

import numpy as np

from models.demand import BIN_MS, HORIZONS_S, DemandDesk, forecast_demand
from models.forecast import QUANTILES

NOW_MS = 2_916_000 * BIN_MS
DAY_BINS = 144


def walk(bins, seed=0, level=500.0):
    moves = np.random.default_rng(seed).normal(0, 5, bins)
    return np.clip(level + np.cumsum(moves), 0, 1000)


def daily(bins):
    """The same day again and again, with a little noise."""
    hours = np.arange(bins) / 6
    return 500 + 300 * np.sin(hours * 2 * np.pi / 24) + np.random.default_rng(1).normal(0, 3, bins)


def test_rows_have_the_keys_and_shapes_of_the_contract():
    (row,) = forecast_demand({("train", "running"): walk(2000)}, NOW_MS, {"train": 1064})
    keys = "pool class group target now model issued_ms horizons_s quantiles values record"
    assert set(keys.split()) <= set(row)
    assert set(row["record"]) == {"wql_vs_best_naive", "coverage_80", "origins"}
    assert row["horizons_s"] == list(HORIZONS_S)
    assert np.shape(row["values"]) == (len(row["quantiles"]), len(HORIZONS_S))
    json.dumps(row, allow_nan=False)


def test_running_stays_between_zero_and_capacity():
    (row,) = forecast_demand({("train", "running"): walk(2000, level=1050.0)}, NOW_MS, {"train": 1000})
    assert np.max(row["values"]) <= 1000
    (row,) = forecast_demand({("train", "queued"): walk(2000, level=2.0)}, NOW_MS)
    assert np.min(row["values"]) >= 0


def test_persistence_serves_a_random_walk():
    (row,) = forecast_demand({("train", "running"): walk(4032)}, NOW_MS, {"train": 1064})
    assert row["models"][:5] == ["persistence"] * 5  # at twelve hours and more a clipped walk has a level
    assert row["record"]["origins"] > 100


def test_a_challenger_that_wins_serves():
    (row,) = forecast_demand({("train", "running"): daily(4032)}, NOW_MS, {"train": 1064})
    assert row["models"][HORIZONS_S.index(21600)] == "seasonal_naive"
    assert row["models"][HORIZONS_S.index(43200)] == "seasonal_naive"


def test_without_enough_origins_persistence_serves():
    (row,) = forecast_demand({("train", "running"): daily(3 * DAY_BINS)}, NOW_MS, {"train": 1064})
    assert row["models"][-1] == "persistence"


def test_a_single_value_gets_a_spread_and_no_record():
    (row,) = forecast_demand({("train", "running"): np.array([np.nan, np.nan, 400.0])}, NOW_MS, {"train": 1064})
    assert row["record"] == {"wql_vs_best_naive": None, "coverage_80": None, "origins": 0}
    widths = np.array(row["values"][-1]) - np.array(row["values"][0])
    assert (np.diff(widths) > 0).all()
    assert row["values"][3] == [400.0] * len(HORIZONS_S)


def test_a_series_without_any_value_has_no_row():
    assert forecast_demand({("train", "running"): np.full(10, np.nan)}, NOW_MS) == []


def test_retests_grow_bin_by_bin_to_the_same_record_as_all_at_once():
    history, key = walk(2400), ("train", "running")
    desk = DemandDesk()
    for back in range(12, -1, -1):
        rows = desk.update({key: history[: len(history) - back]}, NOW_MS - back * BIN_MS)
    fresh = DemandDesk().update({key: history}, NOW_MS)
    assert rows[0]["record"]["origins"] >= fresh[0]["record"]["origins"]
    assert rows[0]["model"] == fresh[0]["model"]
    assert np.allclose(rows[0]["values"], fresh[0]["values"], rtol=0.02)


def test_the_fan_holds_the_forecast_of_an_hour_ago_against_what_came():
    history, key = walk(2000), ("train", "running")
    desk = DemandDesk()
    desk.update({key: history}, NOW_MS, {"train": 1064})
    fan = desk.record()["train|running"]
    assert fan["history"][-1] == [NOW_MS, round(float(history[-1]), 1)]
    assert [len(point) for point in fan["forecast"]] == [6] * len(HORIZONS_S)
    assert fan["old_issued_ms"] == NOW_MS - 3_600_000  # after a start: from what was known then
    past = DemandDesk()
    past.update({key: history[:-6]}, NOW_MS - 3_600_000, {"train": 1064})
    assert len(fan["old"]) == len(HORIZONS_S)
    assert np.isclose(fan["old"][2][2], history[-7], atol=5)


def test_what_was_issued_survives_a_restart():
    history, key = walk(2000), ("train", "running")
    desk = DemandDesk()
    desk.update({key: history[:-6]}, NOW_MS - 6 * BIN_MS)
    issued = desk.record()["train|running"]["forecast"]
    again = DemandDesk()
    again.load(json.loads(json.dumps(desk.dump())))
    again.update({key: history}, NOW_MS)
    old = again.record()["train|running"]["old"]
    assert [[point[0], point[2]] for point in old] == [[point[0], point[3]] for point in issued]


def test_a_call_between_two_bins_is_cheap():
    series = {(pool, target): walk(1500) for pool in ("all", "train") for target in ("a", "b", "c", "running")}
    desk = DemandDesk()
    desk.update(series, NOW_MS)
    took = []
    for second in range(1, 4):
        began = time.perf_counter()
        desk.update(series, NOW_MS + second * 1000)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.2  # measured: 6 ms


class Period97:
    """Knows that everything comes again after 97 bins."""

    name = "period_97"

    def forecast(self, panel, origins, steps):
        at = [[origins - 96 + (step - 1) % 97] for step in steps]
        return np.stack([panel.values.T[rows[0]] for rows in at])[None].repeat(len(QUANTILES), axis=0)


def test_a_challenger_of_the_operator_serves_when_it_wins():
    history = np.tile(np.random.default_rng(2).uniform(100, 900, 97), 40)
    (row,) = DemandDesk([Period97()]).update({("train", "queued"): history}, NOW_MS)
    assert row["models"][:-1] == ["period_97"] * (len(HORIZONS_S) - 1)  # a day ahead the gate keeps too few origins
