"""The served forecasts of the pools sum to that of all, and those of classes and groups to their pool's."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.models.demand.forecaster import BIN_MS, DemandForecaster, Histories, SeriesKey
from fleetcast.models.demand.rows import DemandRow
from fleetcast.models.forecast import QUANTILES
from tests.fuzz.bounds import examples

NOW_MS = 2_916_000 * BIN_MS
MEDIAN = QUANTILES.index(0.5)
TENTH = 0.05  # a served number has one digit behind the point


def served(
    target: str, keys: Sequence[SeriesKey], ten_minute: np.ndarray, capacity: np.ndarray | None = None
) -> dict[SeriesKey, DemandRow]:
    minutes = np.repeat(ten_minute, 10, axis=1)[:, -1440:]
    ceilings = np.full(len(keys), np.nan) if capacity is None else capacity
    rows = DemandForecaster().forecast_all([Histories(target, tuple(keys), minutes, ten_minute, ceilings)], NOW_MS)
    return {SeriesKey(row.queue, row.class_, row.group): row for row in rows}


def medians(row: DemandRow) -> np.ndarray:
    return np.array(row.values[MEDIAN], float)


def assert_adds_up(found: dict[SeriesKey, DemandRow], whole: SeriesKey, parts: Sequence[SeriesKey]) -> None:
    total = sum(medians(found[part]) for part in parts)
    np.testing.assert_allclose(total, medians(found[whole]), atol=TENTH * (len(parts) + 1))


def walks(rng: np.random.Generator, pools: int, bins: int, whole: bool) -> np.ndarray:
    """(pool, bin) loads that jump, sleep and drift."""
    steps = rng.normal(0, rng.uniform(0.1, 8, (pools, 1)), (pools, bins))
    jumps = rng.choice([0.0, -60.0, 60.0], (pools, bins), p=[0.99, 0.005, 0.005])
    levels = np.maximum(rng.uniform(0, 200, (pools, 1)) + np.cumsum(steps + jumps, axis=1), 0.0)
    levels *= rng.random((pools, bins)) < rng.choice([1.0, 0.3], (pools, 1))
    return np.rint(levels) if whole else levels


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from(["running", "queued", "arriving"]), st.booleans())
@examples(25)
def test_served_medians_of_pools_sum_to_all_and_quantiles_stay_in_order(seed, pools, target, whole) -> None:
    rng = np.random.default_rng(seed)
    levels = walks(rng, pools, int(rng.integers(2, 500)), whole)
    names = [SeriesKey(f"p{number}") for number in range(pools)]
    found = served(target, [SeriesKey("all"), *names], np.concatenate([levels.sum(axis=0)[None], levels]))
    assert_adds_up(found, SeriesKey("all"), names)
    for row in found.values():
        assert (np.diff(row.values, axis=0) >= 0).all()
        assert np.min(row.values) >= 0


def test_pools_add_up_where_each_pool_has_another_winner() -> None:
    """A daily pool, a walk and a pool of arrivals in spikes: their own forecasts exceed that of the sum."""
    rng = np.random.default_rng(3)
    hours = np.arange(1500) / 6
    daily = 300 + 200 * np.sin(hours * 2 * np.pi / 24) + rng.normal(0, 3, 1500)
    walk = np.clip(300 + np.cumsum(rng.normal(0, 6, 1500)), 0, 800)
    spikes = np.where(rng.random(1500) < 0.05, 250.0, 0.0)
    keys = [SeriesKey("all"), SeriesKey("a"), SeriesKey("b"), SeriesKey("c")]
    levels = np.rint([daily + walk + spikes, daily, walk, spikes])
    assert_adds_up(served("running", keys, levels), keys[0], keys[1:])


def test_classes_and_groups_add_up_to_the_adjusted_pool() -> None:
    rng = np.random.default_rng(5)
    levels = walks(rng, 6, 400, whole=True)
    pool = {name: SeriesKey(name) for name in ("all", "a", "b")}
    parts = [SeriesKey(name, class_) for name in ("a", "b") for class_ in ("training", "inference", "batch")]
    groups = [SeriesKey("a", group=f"g{number}") for number in range(2)]
    tables = [
        levels.sum(axis=0),
        levels[:3].sum(axis=0),
        levels[3:].sum(axis=0),
        *levels,
        levels[0] + levels[1],
        levels[2],
    ]
    found = served("queued", [*pool.values(), *parts, *groups], np.array(tables))
    assert_adds_up(found, pool["all"], [pool["a"], pool["b"]])
    assert_adds_up(found, pool["a"], parts[:3])
    assert_adds_up(found, pool["b"], parts[3:])
    assert_adds_up(found, pool["a"], groups)


def test_request_rates_of_pools_add_up_to_all() -> None:
    levels = np.abs(np.random.default_rng(7).normal(40, 9, (2, 400)))
    keys = [SeriesKey(pool, "inference") for pool in ("all", "a", "b")]
    found = served("request_rate", keys, np.array([levels.sum(axis=0), *levels]))
    assert_adds_up(found, keys[0], keys[1:])


def test_a_job_that_waits_in_two_pools_counts_once_in_their_sum() -> None:
    keys = [SeriesKey("all"), SeriesKey("debug"), SeriesKey("batch")]
    found = served("queued", keys, np.full((3, 30), 8.0))
    assert [found[key].now for key in keys] == [8, 8, 8]
    assert_adds_up(found, keys[0], keys[1:])


@pytest.mark.parametrize("capacity", [300.0, 120.0])
def test_no_pool_rises_above_its_gpus(capacity: float) -> None:
    rng = np.random.default_rng(11)
    full, half = np.full(600, 100.0), np.rint(np.clip(50 + np.cumsum(rng.normal(0, 2, 600)), 10, 90))
    keys = [SeriesKey("all"), SeriesKey("full"), SeriesKey("half")]
    found = served(
        "running", keys, np.array([full + half + 5, full, half]), np.array([capacity + 100, 100.0, capacity])
    )
    assert np.max(found[keys[1]].values) <= 100
    assert_adds_up(found, keys[0], keys[1:])
