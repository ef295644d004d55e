import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import RequestError, UnknownEntity
from schedulers.adapter import NotKnown
from schedulers.demand_value import value_of
from tests.schedulers.small_demand import FLEET, LLAMA, QUANTILES, small_demand


def test_a_horizon_of_the_forecast_has_its_own_value() -> None:
    assert [value_of(small_demand(), LLAMA, 0.9, horizon_s) for horizon_s in (60, 300)] == [32.0, 80.0]
    assert value_of(small_demand(), FLEET, 0.1, 600) == 800.0


def test_between_two_horizons_lies_a_line_and_the_first_one_begins_now() -> None:
    assert value_of(small_demand(), LLAMA, 0.9, 180) == 56.0
    assert value_of(small_demand(), LLAMA, 0.9, 30) == 26.0
    assert value_of(small_demand(), LLAMA, 0.9, 0) == 20.0


def test_a_series_that_is_not_there_is_named() -> None:
    with pytest.raises(UnknownEntity, match="group 'gpt'"):
        value_of(small_demand(), LLAMA._replace(group="gpt"), 0.9, 60)


@pytest.mark.parametrize(("quantile", "horizon_s", "field"), [(0.8, 60, "quantile"), (0.9, 601, "horizon_s")])
def test_what_no_forecast_is_of_is_refused_with_what_there_is(quantile: float, horizon_s: float, field: str) -> None:
    with pytest.raises(RequestError, match=r"must (be one of 0\.1, 0\.5, 0\.9|lie in 0\.\.600)") as told:
        value_of(small_demand(), FLEET, quantile, horizon_s)
    assert told.value.field == field


def test_without_a_forecast_nothing_is_known() -> None:
    with pytest.raises(NotKnown):
        value_of(None, FLEET, 0.9, 60)
    with pytest.raises(NotKnown, match="request_rate 400 s ahead"):
        value_of(small_demand(), LLAMA, 0.9, 400)
    assert value_of(small_demand(), LLAMA, 0.9, 300) == 80.0, "the horizon after it is not needed"


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(QUANTILES), st.floats(0, 600))
def test_a_value_lies_within_its_row(quantile: float, horizon_s: float) -> None:
    row = small_demand()[FLEET]
    known = [row.now, *(value for value in row.values[QUANTILES.index(quantile)] if value is not None)]
    assert min(known) <= value_of(small_demand(), FLEET, quantile, horizon_s) <= max(known)
