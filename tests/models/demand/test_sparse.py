"""Intermittent series: what is forecast of them, by whom they are served, and where nothing is said."""

import numpy as np

from fleetcast.checks import check_forecaster
from fleetcast.models.demand import sparse
from fleetcast.models.demand.forecaster import BIN_MS, HORIZONS_S, DemandForecaster, Histories, SeriesKey
from fleetcast.models.demand.naive import Persistence
from fleetcast.models.demand.sparse import SparseForecaster, compute_mixture_quantiles, is_intermittent
from fleetcast.models.demand.units import compute_pinball_loss
from fleetcast.models.forecast import QUANTILES, Panel

DAY = 144
STEPS = (1, 6, 36, 144)
NOW_MS = 2_916_000 * BIN_MS


def panel(values, target="running"):
    values = np.atleast_2d(np.asarray(values, float))
    names = tuple(f"s{n}" for n in range(len(values)))
    return Panel(target, names, 600, 0, values, np.full(len(values), np.nan))


def jobs(bins, seed=0, begins=0.01, ends=0.03):
    """(bin,) a level of one user: a run begins by chance, holds 8, 16 or 32 GPUs, and ends by chance."""
    rng = np.random.default_rng(seed)
    begin, end, size = rng.random(bins) < begins, rng.random(bins) < ends, rng.choice([8.0, 16.0, 32.0], bins)
    level, now = np.zeros(bins), 0.0
    for bin in range(bins):
        now = (size[bin] if begin[bin] else 0.0) if now == 0.0 else (0.0 if end[bin] else now)
        level[bin] = now
    return level


def bursts(bins, seed=0):
    """(bin,) arrivals: in one bin of eight, some GPUs."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(bins) < 1 / 8, rng.choice([1.0, 4.0, 8.0], bins), 0.0)


def made(bins):
    """What the suite asks about: a level with runs, bursts with holes, and one without any value."""
    values = np.stack([jobs(bins), bursts(bins), np.full(bins, np.nan)])
    values[1, bins // 3 : bins // 2] = np.nan
    values.flags.writeable = False
    return panel(values)


def losses(forecaster, values, origins):
    """(step,)"""
    found = forecaster.forecast(panel(values), origins, STEPS)[:, :, :, 0]
    return np.array(
        [compute_pinball_loss(found[:, at], values[origins + step]).mean() for at, step in enumerate(STEPS)]
    )


def test_the_suite_on_intermittent_series():
    check_forecaster(SparseForecaster, made)
    assert np.isfinite(SparseForecaster().forecast(made(2000), np.array([1999]), STEPS)[..., :2]).all()


def test_runs_and_bursts_cost_less_than_by_persistence():
    """A bin ahead a run goes on with more than 95 %: there persistence is as good as it gets."""
    origins = np.arange(1500, 5800, 7)
    for values in (jobs(6000), bursts(6000)):
        ratio = losses(SparseForecaster(), values, origins) / losses(Persistence(), values, origins)
        assert ratio[0] <= 1.0
        assert (ratio[1:] < 0.9).all(), ratio


def test_a_lead_knows_whether_there_is_demand_now():
    values = jobs(6000)
    busy = values.copy()
    values[-1], busy[-1] = 0.0, 16.0
    idle, busy = (
        SparseForecaster().forecast(panel(one), np.array([5999]), (1, 432))[:, :, 0, 0] for one in (values, busy)
    )
    assert idle[-2, 0] == 0.0
    assert (busy[1:, 0] == 16.0).all()
    assert (idle[:-1, 1] == busy[:-1, 1]).all()  # three days on it does not matter


def test_the_chance_of_any_is_that_of_the_two_states():
    ended = jobs(20_000, begins=0.02, ends=0.05)
    values = np.stack([np.append(ended, now) for now in (0.0, 8.0)])
    found = sparse._SparsePast.from_values(values, np.array([20_000]), DAY).estimate_p_any(6)[:, 0]
    usual, kept = 0.02 / 0.07, 0.93**6
    assert np.allclose(found, [usual * (1 - kept), usual + (1 - usual) * kept], atol=0.08)


def test_a_group_that_has_gone_is_forecast_at_zero():
    values = np.concatenate([jobs(3000), np.zeros(12 * DAY)])
    found = SparseForecaster().forecast(panel(values), np.array([len(values) - 1]), STEPS)
    known = found[:, :3, 0, 0]
    assert np.isfinite(known).all()
    assert (known[-2] == 0).all()


def test_series_that_are_not_intermittent_get_nothing():
    steady = 500.0 + np.random.default_rng(0).normal(0, 5, 3000)
    often = np.where(np.arange(3000) % 5 < 4, 9.0, 0.0)  # an interval of 1.25 between bins with demand
    seldom = np.where(np.arange(3000) % 4 < 3, 9.0, 0.0)  # of 1.33
    never = np.zeros(3000)
    values = np.stack([steady, often, seldom, never])
    assert is_intermittent(values, np.array([100, 2999]), DAY).tolist() == [
        [False] * 2,
        [False] * 2,
        [False, True],
        [False] * 2,
    ]
    found = SparseForecaster().forecast(panel(values), np.array([100, 2999]), STEPS)
    assert np.isfinite(found[:, :, 1, 2]).all()
    assert np.isnan(found[:, :, :, [0, 1, 3]]).all()
    assert np.isnan(found[:, :, 0]).all()


def test_a_mixture_is_zero_up_to_the_chance_of_none():
    sizes = np.sort(np.random.default_rng(0).gamma(2.0, 8.0, (2, 20_000)), axis=-1)
    found = compute_mixture_quantiles(np.array([0.0, 0.4]), sizes)
    drawn = np.where(np.arange(20_000) % 10 < 4, np.random.default_rng(1).permutation(sizes[1]), 0.0)
    assert (found[:, 0] == 0).all()
    assert np.allclose(found[:, 1], np.quantile(drawn, QUANTILES), atol=1.0)


def test_a_desk_serves_small_groups_by_it_and_nothing_else():
    bins = 12 * DAY
    values = np.stack([np.full(bins, 300.0), jobs(bins, 1), jobs(bins, 2)])
    keys = (SeriesKey("train"), SeriesKey("train", group="a"), SeriesKey("train", group="other"))
    minutes = np.repeat(values[:, -6:], 10, axis=1)
    told = Histories("running", keys, minutes, values, np.full(3, np.nan))
    forecaster = DemandForecaster(sparse=[SparseForecaster()])
    for minute in range(3):  # a contest a call learns the history
        pool, *groups = forecaster.forecast_all([told], NOW_MS + minute * 60_000)
    assert not {"sparse"} & set(pool.models)
    for row in groups:
        assert row.models[HORIZONS_S.index(21_600)] in ("sparse", "mean")
        assert row.models.count("sparse") >= 1
