import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import RequestError, UnknownEntity
from fleetcast.schedulers.adapter import NotKnown
from fleetcast.schedulers.demand_value import OLDEST_S, compute_demand_value, find_fresh_row
from fleetcast.schedulers.weather import DemandKey, Weather
from tests.fuzz.bounds import examples
from tests.schedulers.small_demand import FLEET, LLAMA, QUANTILES, row, small_demand
from tests.schedulers.small_fleet import NOW_MS

WEATHER = Weather(1, NOW_MS, NOW_MS, demand=small_demand())


def value(key: DemandKey, quantile: float, horizon_s: float, age_s: float = 0.0) -> float:
    return compute_demand_value(find_fresh_row(WEATHER, key), quantile, horizon_s, NOW_MS + round(1000 * age_s))


def test_a_horizon_of_the_forecast_has_its_own_value() -> None:
    assert [value(LLAMA, 0.9, horizon_s) for horizon_s in (60, 300)] == [32.0, 80.0]
    assert value(FLEET, 0.1, 600) == 800.0


def test_between_two_horizons_lies_a_line_and_the_first_one_begins_now() -> None:
    assert value(LLAMA, 0.9, 180) == 56.0
    assert value(LLAMA, 0.9, 30) == 26.0
    assert value(LLAMA, 0.9, 0) == 20.0


def test_a_series_that_is_not_there_is_named() -> None:
    with pytest.raises(UnknownEntity, match="group 'gpt'"):
        value(LLAMA._replace(group="gpt"), 0.9, 60)


@pytest.mark.parametrize(("quantile", "horizon_s", "field"), [(0.95, 60, "quantile"), (0.9, 601, "horizon_s")])
def test_what_no_forecast_is_of_is_refused_with_what_there_is(quantile: float, horizon_s: float, field: str) -> None:
    with pytest.raises(RequestError, match=r"set one from 0(\.1 to 0\.9| to 600)") as told:
        value(FLEET, quantile, horizon_s)
    assert told.value.field == field


def test_without_a_forecast_nothing_is_known() -> None:
    with pytest.raises(NotKnown, match="no forecast of demand"):
        find_fresh_row(dataclasses.replace(WEATHER, demand=None), FLEET)
    with pytest.raises(NotKnown, match="request_rate 400 s ahead"):
        value(LLAMA, 0.9, 400)
    assert value(LLAMA, 0.9, 300) == 80.0, "the horizon after it is not needed"


def test_the_age_of_a_forecast_counts_until_it_is_too_old() -> None:
    assert value(FLEET, 0.5, 60, age_s=240) == value(FLEET, 0.5, 300)
    assert value(FLEET, 0.5, 600, age_s=240) == value(FLEET, 0.5, 600), "no further than it reaches"
    later = dataclasses.replace(WEATHER, now_ms=NOW_MS + round(1000 * OLDEST_S) + 1000)
    with pytest.raises(NotKnown, match="is 601 s old"):
        find_fresh_row(later, FLEET)


@examples(250)
@given(st.sampled_from(QUANTILES), st.floats(0, 600))
def test_a_value_lies_within_its_row(quantile: float, horizon_s: float) -> None:
    row = small_demand()[FLEET]
    known = [row.now, *(value for value in row.values[QUANTILES.index(quantile)] if value is not None)]
    assert min(known) <= value(FLEET, quantile, horizon_s) <= max(known)


def test_a_pool_that_no_inventory_has_is_the_queue_of_that_name() -> None:
    """`pool` named a queue in earlier versions: an autoscaler that still says so keeps its number."""
    pool, queue = DemandKey("all", "all", "all", "wanted", "h100"), DemandKey("h100", "all", "all", "wanted")
    other = DemandKey("serve", "all", "all", "wanted")
    rows = {key: row(key, now, [[now] * 3] * 3) for key, now in ((pool, 1.0), (queue, 2.0), (other, 3.0))}
    seen = Weather(1, NOW_MS, NOW_MS, demand=rows)
    assert find_fresh_row(seen, pool).now == 1.0
    assert find_fresh_row(seen, DemandKey("all", "all", "all", "wanted", "serve")).now == 3.0
    with pytest.raises(UnknownEntity, match="pool 'lost'"):
        find_fresh_row(seen, DemandKey("all", "all", "all", "wanted", "lost"))
