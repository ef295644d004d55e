import dataclasses

import pytest

from fleetcast.fleet.errors import RequestError
from fleetcast.schedulers.adapter import Write
from fleetcast.schedulers.buffers import (
    CLASS,
    GPUS,
    HORIZON,
    LEAST,
    MOST,
    POOL,
    QUANTILE,
    REPLICAS,
    THEIRS,
    CapacityBuffers,
    read_annotations,
)
from fleetcast.schedulers.weather import DemandKey, Weather
from tests.schedulers.small_fleet import NOW_MS, wanted

ASKS = {POOL: "serve", GPUS: "8"}


def wish(weather: Weather | None, **values: str) -> Write | None:
    """Of one buffer that opts in; `values` are further ones, with the last part of their names."""
    named = {"fleetcast.io/" + name.replace("_", "-"): value for name, value in values.items() if name != "replicas"}
    seen = ASKS | named | ({REPLICAS: values["replicas"]} if "replicas" in values else {})
    wishes = list(CapacityBuffers().wishes(weather, {"serve/ahead": seen}))
    assert len(wishes) <= 1
    return wishes[0] if wishes else None


def replicas(weather: Weather | None, **values: str) -> str | None:
    """What is wished; "as it is" where nothing is."""
    found = wish(weather, **values)
    return found.value if found else "as it is"


def board(now: float, *p90: float) -> Weather:
    return Weather(1, NOW_MS, NOW_MS, None, wanted(now, *p90))


def test_there_is_room_for_what_will_be_wanted_above_now() -> None:
    #          now  1 min 10 min 1 h                     (65 - 40) / 8 = 3.1
    found = wish(board(40, 44.0, 65.0, 400.0))
    assert found == Write("serve/ahead", REPLICAS, "4", None, "p90 of wanted GPUs within 10 min is 65, now 40", cost=25)


def test_a_burst_that_is_nearer_than_a_cold_start_still_has_its_room() -> None:
    assert replicas(board(40, 65.0, 40.0)) == "4"


def test_horizon_quantile_class_and_bounds_are_the_users() -> None:
    assert replicas(board(40, 44.0, 65.0, 400.0), horizon_s="3600") == "45"
    assert replicas(board(40, 44.0, 65.0, 400.0), horizon_s="30") == "1"
    assert replicas(board(40, 65.0), quantile="0.5") == "as it is"
    assert replicas(board(40, 65.0), min="2", max="3") == "3"
    assert replicas(board(40, 65.0), min="5", replicas="9") is None
    assert replicas(board(40, 65.0), **{"class": "inference"}) == "as it is"
    ((_, row),) = wanted(40, 65.0).items()
    inference = {DemandKey("serve", "inference", "all", "wanted"): row}
    assert replicas(Weather(1, NOW_MS, NOW_MS, None, inference), **{"class": "inference"}) == "4"


def test_it_grows_at_once_and_shrinks_when_clearly_less_is_wanted() -> None:
    held = {"replicas": "4"}
    assert replicas(board(40, 73.0), **held) == "5"
    assert replicas(board(40, 64.0), **held) == "as it is"  # 64 * 1.03 - 40 = 25.9 GPUs
    assert replicas(board(40, 62.0), **held) == "3"  # 62 * 1.03 - 40 = 23.9
    assert replicas(board(40, 30.0), **held) is None


def test_the_pods_that_it_was_made_for_take_its_place() -> None:
    assert replicas(board(72, 72.0), replicas="4") == "1"  # within the slack
    assert replicas(board(72, 68.0), replicas="4") is None


@pytest.mark.parametrize(
    "weather",
    [
        None,
        Weather(1, NOW_MS, NOW_MS),
        Weather(1, NOW_MS, NOW_MS, None, {}),
        dataclasses.replace(board(40, 65.0), now_ms=NOW_MS + 600_001),
        board(40),
    ],
)
def test_without_a_forecast_that_is_new_it_goes_back_to_the_minimum(weather: Weather | None) -> None:
    found = wish(weather, replicas="4")
    assert found is not None
    assert (found.value, found.seen) == (None, "4")
    assert found.why == "withdrawn" if weather is None else "forecast of" in found.why


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (GPUS, "eight", "fleetcast.io/gpus-per-replica = 'eight': must be a whole number from 1 on"),
        (GPUS, "0", "= '0': must be a whole number from 1 on"),
        (LEAST, "-1", "fleetcast.io/min = '-1'"),
        (LEAST, "99999999999999", "fleetcast.io/min"),
        (MOST, "", "fleetcast.io/max = ''"),
        (QUANTILE, "nan", "fleetcast.io/quantile = 'nan': must be a number above 0"),
        (HORIZON, "10m", "fleetcast.io/horizon-s = '10m'"),
    ],
)
def test_a_mistake_is_named_and_leaves_the_buffer_at_its_minimum(name: str, value: str, says: str) -> None:
    wishes = CapacityBuffers().wishes(board(40, 65.0), {"serve/ahead": ASKS | {REPLICAS: "4", name: value}})
    (found,) = wishes
    assert found.value is None
    assert says in found.why


def test_a_maximum_below_the_minimum_is_a_mistake() -> None:
    found = wish(board(40, 65.0), min="3", max="2", replicas="4")
    assert found is not None
    assert found.why == "fleetcast.io/max = 2: must be at least fleetcast.io/min = 3"


def test_a_buffer_that_no_longer_opts_in_is_taken_back() -> None:
    (found,) = CapacityBuffers().wishes(board(40, 65.0), {"serve/ahead": {LEAST: "1", REPLICAS: "4"}})
    assert (found.value, found.why) == (None, "it has no annotation fleetcast.io/queue or fleetcast.io/pool now")


def test_replicas_that_somebody_else_holds_are_theirs() -> None:
    seen = {"serve/ahead": {**ASKS, CLASS: "all", THEIRS: "9"}}
    assert not list(CapacityBuffers().wishes(board(40, 65.0), seen))
    assert not list(CapacityBuffers().wishes(None, seen))


def test_a_raised_minimum_is_followed() -> None:
    assert replicas(board(40, 40.0), min="2", replicas="0") is None


def test_a_buffer_is_of_a_queue_or_of_a_pool_of_machines() -> None:
    size = {"fleetcast.io/gpus-per-replica": "8"}
    of_queue, of_pool = (
        read_annotations(size | {"fleetcast.io/queue": "serve"}),
        read_annotations(size | {"fleetcast.io/pool": "h100"}),
    )
    assert (of_queue.queue, of_queue.pool, of_queue.owner_text) == ("serve", "all", "queue serve")
    assert (of_pool.queue, of_pool.pool, of_pool.owner_text) == ("all", "h100", "pool h100")
    with pytest.raises(RequestError, match=r"leave it out if there is fleetcast.io/queue = 'serve'"):
        read_annotations(size | {"fleetcast.io/queue": "serve", "fleetcast.io/pool": "h100"})
