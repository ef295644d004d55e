"""Demand forecasts: their shape, their gates, what adds up, what a forecaster saves."""

import json

import msgspec
import numpy as np
import pytest

from fleetcast.models.demand import contest as demand_contest
from fleetcast.models.demand.forecaster import (
    BIN_HORIZONS_S,
    BIN_MS,
    HORIZONS_S,
    DemandForecaster,
    Histories,
    SeriesKey,
)
from fleetcast.models.forecast import QUANTILES

NOW_MS = 2_916_000 * BIN_MS
DAY_BINS = 144
MEDIAN = QUANTILES.index(0.5)
TRAIN = SeriesKey("train")


def walk(bins, seed=0, level=500.0):
    moves = np.random.default_rng(seed).normal(0, 5, bins)
    return np.clip(level + np.cumsum(moves), 0, 1000)


def daily(bins):
    """The same day again and again, with a little noise."""
    hours = np.arange(bins) / 6
    return 500 + 300 * np.sin(hours * 2 * np.pi / 24) + np.random.default_rng(1).normal(0, 3, bins)


def told(ten_minute, target="running", keys=(TRAIN,), capacity=np.nan):
    """Histories of ten minutes, (series, bin) or (bin,); the minutes are theirs."""
    ten_minute = np.atleast_2d(np.asarray(ten_minute, float))
    minutes = np.repeat(ten_minute, 10, axis=1)[:, -1440:]
    return Histories(target, tuple(keys), minutes, ten_minute, np.full(len(ten_minute), float(capacity)))


def rows_of(ten_minute, now_ms=NOW_MS, forecaster=None, **about):
    return (forecaster or DemandForecaster()).forecast_all([told(ten_minute, **about)], now_ms)


def at(horizon_s):
    return HORIZONS_S.index(horizon_s)


def test_rows_have_the_keys_and_shapes_of_the_contract():
    (row,) = rows_of(walk(900), capacity=1064)
    keys = "pool class group target now model issued_ms horizons_s quantiles values record"
    assert set(keys.split()) <= set(msgspec.to_builtins(row))
    assert set(row.record) == {"wql_vs_best_naive", "coverage_80", "origins"}
    assert row.horizons_s == list(HORIZONS_S) == sorted(HORIZONS_S)
    assert (HORIZONS_S[0], HORIZONS_S[-1]) == (60, 259_200)
    assert np.shape(row.values) == (len(row.quantiles), len(HORIZONS_S))
    assert (np.diff(row.values, axis=0) >= 0).all()
    json.dumps(msgspec.to_builtins(row), allow_nan=False)


def test_running_stays_between_zero_and_capacity():
    (row,) = rows_of(walk(400, level=1050.0), capacity=1000)
    assert np.max(row.values) <= 1000
    (row,) = rows_of(walk(400, level=2.0), target="queued")
    assert np.min(row.values) >= 0


def test_a_ceiling_that_was_passed_is_none():
    """As where a pool's nodes are not known: what it ran already it may run again, call after call."""
    forecaster, history = DemandForecaster(), walk(400, level=800.0)
    for minute in range(3):
        (row,) = rows_of(history, NOW_MS + minute * 60_000, forecaster, capacity=100)
        assert np.min(row.values[MEDIAN]) > 600
        assert np.max(row.values) <= history.max() + 0.1


def test_a_day_s_history_gives_the_nearest_horizons_a_record_at_once():
    (row,) = rows_of(walk(DAY_BINS))
    assert row.record["origins"] > 100
    assert 0 < row.record["coverage_80"] <= 1
    assert row.record["wql_vs_best_naive"] is not None


def test_persistence_serves_a_random_walk():
    (row,) = rows_of(np.cumsum(np.random.default_rng(0).normal(0, 1, 2500)) + 900)
    assert row.models == ["persistence"] * len(HORIZONS_S)
    assert row.record["origins"] > 100


def test_a_forecaster_that_wins_serves_its_band():
    (row,) = rows_of(daily(2500))
    assert row.models[at(21_600)] != "persistence"
    assert row.models[at(43_200)] != "persistence"


def test_neighbouring_leads_do_not_jump_between_models():
    """A queue that empties and fills: between half an hour and three the forecast must not swing there and back."""
    rng = np.random.default_rng(3)
    level = np.clip(np.cumsum(rng.normal(0, 12, 2500)) + 240, 0, 600)
    (row,) = rows_of(level + 60 * np.sin(np.arange(2500) * 2 * np.pi / 144), target="wanted")
    half, one, three = (row.values[MEDIAN][at(horizon_s)] for horizon_s in (1800, 3600, 10_800))
    assert row.models[at(1800)] == row.models[at(3600)]
    assert min(half, three) - 60 <= one <= max(half, three) + 60


def test_a_single_value_gets_a_spread_and_no_record():
    (row,) = rows_of([np.nan, np.nan, 400.0])
    assert row.record == {"wql_vs_best_naive": None, "coverage_80": None, "origins": 0}
    widths = np.array(row.values[-1]) - np.array(row.values[0])
    assert (np.diff(widths[:2]) > 0).all()
    assert (np.diff(widths[2:]) > 0).all()
    assert row.values[MEDIAN] == [400.0] * len(HORIZONS_S)


def test_a_series_without_any_value_has_no_row():
    assert rows_of(np.full(10, np.nan)) == []
    assert len(rows_of(np.stack([walk(50), np.full(50, np.nan)]), keys=(TRAIN, SeriesKey("none")))) == 1


def test_classes_and_groups_add_up_to_their_pool():
    keys = (TRAIN, *(SeriesKey("train", name) for name in ("batch", "inference")))
    keys = (*keys, *(SeriesKey("train", group=name) for name in ("a", "b", "other")))
    parts = [walk(700, seed, 150.0) for seed in range(2)]
    groups = [0.5 * parts[0], 0.5 * parts[0] + parts[1], np.zeros(700)]
    rows = rows_of(np.stack([sum(parts), *parts, *groups]), keys=keys)
    medians = {(row.class_, row.group): np.array(row.values[MEDIAN]) for row in rows}
    pool = medians["all", "all"]
    assert np.allclose(medians["batch", "all"] + medians["inference", "all"], pool, atol=0.2)
    assert np.allclose(sum(medians["all", name] for name in ("a", "b", "other")), pool, atol=0.3)
    assert all((np.diff(row.values, axis=0) >= 0).all() and np.min(row.values) >= 0 for row in rows)


def test_the_gates_are_the_same_bin_by_bin_and_all_at_once():
    history = walk(900)
    forecaster = DemandForecaster()
    for back in range(12, -1, -1):
        rows = rows_of(history[: len(history) - back], NOW_MS - back * BIN_MS, forecaster)
    fresh = rows_of(history)
    assert rows[0].record["origins"] == fresh[0].record["origins"] > 100
    assert rows[0].model == fresh[0].model
    assert np.allclose(rows[0].values, fresh[0].values, rtol=0.01)


def test_a_long_history_is_tested_in_parts_and_serves_meanwhile(monkeypatch):
    whole = DemandForecaster()
    everything = rows_of(walk(900), forecaster=whole)[0].record["origins"]
    assert not whole.is_behind  # the contests of one series are tested in one call
    monkeypatch.setattr(demand_contest, "TESTS_A_CALL", 60)
    forecaster, tested, behind = DemandForecaster(), [], []
    for _ in range(12):
        tested.append(rows_of(walk(900), forecaster=forecaster)[0].record["origins"])
        behind.append(forecaster.is_behind)
    assert 0 < tested[0] < tested[1]
    assert tested[-1] == everything
    assert (behind[0], behind[-1]) == (True, False)


def test_a_second_call_in_a_bin_tests_nothing_again():
    forecaster, history = DemandForecaster(), walk(1000)
    first, second = (rows_of(history, forecaster=forecaster) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("version", ["this", "older"])
def test_a_restart_serves_at_once_what_it_would_have(version):
    """An older version calls a queue `pool` in its snapshot, and knows no pools of machines."""
    history = np.stack([walk(1000), walk(1000, 1)])
    keys = (TRAIN, SeriesKey("other"))
    straight, before = DemandForecaster(), DemandForecaster()
    for forecaster in (straight, before):
        rows_of(history[:, :-6], NOW_MS - 6 * BIN_MS, forecaster, keys=keys)
    about, arrays = before.dump()
    again = DemandForecaster()
    about = json.loads(json.dumps(about))
    for row in about["issued"] if version == "older" else ():
        row["pool"] = row.pop("queue")
    again.load(about, arrays)
    ours, theirs = (rows_of(history, forecaster=forecaster, keys=keys) for forecaster in (again, straight))
    assert [row.record for row in ours] == [row.record for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.models == other.models
        assert np.allclose(one.values, other.values, atol=0.11)
    assert (
        again.make_chart_record()["train|running"]["old"] == straight.make_chart_record()["train|running"]["old"] != []
    )


def test_a_pool_that_comes_later_leaves_the_records_of_the_others():
    forecaster = DemandForecaster()
    before = rows_of(walk(1000), forecaster=forecaster)
    both = rows_of(np.stack([walk(1000), walk(1000, 1)]), forecaster=forecaster, keys=(TRAIN, SeriesKey("new")))
    assert both[0].record == before[0].record
    assert both[1].record["origins"] == 0


def test_the_fan_holds_the_forecast_of_an_hour_ago_against_what_came():
    history = walk(900)
    forecaster = DemandForecaster()
    rows_of(history, forecaster=forecaster)
    fan = forecaster.make_chart_record()["train|running"]
    assert fan["history"][-1] == [NOW_MS, round(float(history[-1]), 2)]
    assert [len(point) for point in fan["forecast"]] == [6] * len(HORIZONS_S)
    assert fan["old_issued_ms"] == NOW_MS - 3_600_000  # after a start: from what was known then
    assert len(fan["old"]) == len(BIN_HORIZONS_S)
    assert np.isclose(fan["old"][2][2], history[-7], atol=5)


def test_what_was_issued_is_drawn_an_hour_later():
    history, forecaster = walk(900), DemandForecaster()
    rows_of(history[:-6], NOW_MS - 6 * BIN_MS, forecaster)
    issued = forecaster.make_chart_record()["train|running"]["forecast"]
    rows_of(history, forecaster=forecaster)
    old = forecaster.make_chart_record()["train|running"]["old"]
    assert [[point[0], point[2]] for point in old] == [[point[0], point[3]] for point in issued]


class Period97:
    """Knows that everything comes again after 97 bins."""

    name = "period_97"

    def forecast(self, panel, origins, steps):
        bins = origins[None, :] - 97 + (np.array(steps)[:, None] - 1) % 97 + 1
        values = np.where(bins >= 0, panel.values[:, np.maximum(bins, 0)], np.nan)
        return np.repeat(values.transpose(1, 2, 0)[None], len(QUANTILES), axis=0)


def test_a_challenger_of_the_operator_serves_when_it_wins_and_a_shadow_only_looks_on():
    history = np.tile(np.random.default_rng(2).uniform(100, 900, 97), 20)
    (row,) = rows_of(history, target="queued", forecaster=DemandForecaster([Period97()]))
    assert set(row.models[at(600) : at(43_200)]) == {"period_97"}
    forecaster = DemandForecaster(shadows=[Period97()])
    (row,) = rows_of(history, target="queued", forecaster=forecaster)
    assert not {"period_97", "mean"} & set(row.models)
    loss, scored = forecaster.compute_mean_losses()["queued"]["period_97"]
    assert loss < 0.5
    assert scored > 100


def test_a_restart_keeps_the_record_of_the_same_version_and_another_begins_anew():
    history = np.tile(np.random.default_rng(2).uniform(100, 900, 97), 20)
    before, again = (DemandForecaster(shadows=[Period97()]) for _ in range(2))
    before.switch_version("period_97", "demand-0001")
    rows_of(history, target="queued", forecaster=before)
    about, arrays = before.dump()
    again.load(json.loads(json.dumps(about)), arrays)
    again.switch_version("period_97", "demand-0001")
    assert again.compute_mean_losses()["queued"]["period_97"][0] < 0.5
    again.switch_version("period_97", "demand-0002")
    assert again.compute_mean_losses()["queued"]["period_97"][0] == 1.0


def test_a_forecast_of_a_half_told_past_is_made_anew():
    whole = walk(900)
    forecaster = DemandForecaster()
    rows_of(whole / 2, forecaster=forecaster)  # half of the jobs were told
    half = forecaster.make_chart_record()["train|running"]["old"]
    rows_of(whole, forecaster=forecaster)
    fan = forecaster.make_chart_record()["train|running"]
    assert np.isclose(half[0][2], whole[-7] / 2, atol=10)
    assert np.isclose(fan["old"][0][2], whole[-7], atol=10)
    assert fan["old_issued_ms"] == NOW_MS - 3_600_000


def test_a_state_that_kept_a_forecast_of_a_half_told_past_is_mended():
    whole = walk(900)
    forecaster = DemandForecaster()
    rows_of(whole / 2, now_ms=NOW_MS - 7 * BIN_MS, forecaster=forecaster)
    about, arrays = forecaster.dump()
    again = DemandForecaster()
    again.load(json.loads(json.dumps(about)), arrays)
    rows_of(whole, forecaster=again)
    fan = again.make_chart_record()["train|running"]
    assert np.isclose(fan["old"][0][2], whole[-7], atol=10)
    assert [row[0] for row in again.dump()[0]["issued"][0]["rows"]] == [NOW_MS]
