"""One number of the forecast for Ray's loops: fresh or None, whatever is answered, and never a wait."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleetcast_client.ahead import Asked, DemandAhead, Series, interpolate_forecast
from fleetcast_client.errors import ApiError, Unreachable
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import FleetcastError
from fleetcast.schedulers import demand_value
from fleetcast.schedulers.weather import DemandKey
from tests.fuzz.bounds import examples
from tests.schedulers.small_demand import FLEET, LLAMA, QUANTILES, row, small_demand
from tests.schedulers.small_fleet import NOW_MS
from tests.sdk.door import Door, opened

OF_LLAMA = Series("all", "inference", "llama-70b", "request_rate", 0.9, 300, "serve")


def told(now: float = 20.0, issued_ms: int = 1, key: DemandKey = LLAMA) -> dict[str, Any]:
    """An answer of `/v1/demand` whose p90 five minutes ahead is four times what it is now."""
    made = row(key, now, [[now, 2 * now, None], [now, 2 * now, None], [now, 4 * now, None]], issued_ms=issued_ms)
    return {"as_of_ms": 1, "series": json.loads(msgspec.json.encode([made]))}


def told_else(**more: Any) -> dict[str, Any]:
    answer = told(issued_ms=2)
    return {**answer, "series": [{**answer["series"][0], **more}]}


class Hand:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


quantiles = st.sampled_from(QUANTILES) | st.floats(0, 1)


@examples(500)
@given(st.sampled_from([FLEET, LLAMA]), quantiles, st.floats(0, 700), st.integers(0, 600_000))
def test_a_value_is_the_one_that_the_doors_of_the_service_give(
    key: DemandKey, quantile: float, horizon_s: float, age_ms: int
) -> None:
    body = json.loads(msgspec.json.encode(small_demand()[key]))
    try:
        wanted = demand_value.compute_demand_value(small_demand()[key], quantile, horizon_s, NOW_MS + age_ms)
    except FleetcastError:
        with pytest.raises(ValueError, match="forecast"):
            interpolate_forecast(body, quantile, horizon_s, age_ms / 1000)
    else:
        assert interpolate_forecast(body, quantile, horizon_s, age_ms / 1000) == wanted


def test_the_value_of_a_series_is_asked_for_by_its_names(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    with opened(Door([200, 200], answer=told())) as door:
        ahead = DemandAhead(OF_LLAMA, Asked(door.url, str(token)))
        assert ahead.value() is None
        ahead.poll_once()
        assert ahead.value() == 80.0
        token.write_text("two\n")
        ahead.poll_once()
    assert door.tokens == ["Bearer one", "Bearer two"], "a token that was renewed is read anew"
    assert door.paths[0] == "GET /v1/demand?class=inference&group=llama-70b&target=request_rate&queue=serve"


def test_a_forecast_that_is_told_again_and_again_grows_old_all_the_same() -> None:
    clock = Hand()
    with opened(Door([200] * 4, answer=told())) as door:
        ahead = DemandAhead(OF_LLAMA, Asked(door.url, stale_s=180), clock)
        ahead.poll_once()
        clock.now_s += 179
        ahead.poll_once()
        assert ahead.value() == 80.0
        clock.now_s += 1
        assert ahead.value() is None
        ahead.poll_once()
        assert ahead.value() is None, "it is no news"
        door.answer = told(30.0, issued_ms=2)
        ahead.poll_once()
        assert ahead.value() == 120.0


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (500, None, ApiError),
        (503, None, ApiError),
        (200, [], TypeError),
        (200, {}, KeyError),
        (200, {"series": None}, TypeError),
        (200, {"series": [{"queue": "serve"}]}, KeyError),
        (200, told(key=FLEET), ValueError),
        (200, told_else(values=[[1]]), IndexError),
        (200, told_else(now="many", values=[["x"] * 3] * 3), TypeError),
        (200, "<html>", TypeError),
    ],
)
def test_whatever_is_answered_the_value_of_before_stays_until_it_is_old(
    status: int, answer: Any, error: type[Exception]
) -> None:
    clock = Hand()
    with opened(Door([200, status], answer=told())) as door:
        ahead = DemandAhead(OF_LLAMA, Asked(door.url, stale_s=180), clock)
        ahead.poll_once()
        door.answer = answer
        with pytest.raises(error):
            ahead.poll_once()
        assert ahead.value() == 80.0
        clock.now_s += 180
        assert ahead.value() is None


def test_two_services_that_tell_old_forecasts_in_turn_are_not_believed_for_ever() -> None:
    clock = Hand()
    with opened(Door([200] * 20, answer=told())) as door:
        ahead = DemandAhead(OF_LLAMA, Asked(door.url, stale_s=180), clock)
        for at in range(20):
            door.answer = told(issued_ms=1 + at % 2)
            ahead.poll_once()
            clock.now_s += 15
        assert ahead.value() is None


def test_requests_are_of_inference_where_no_class_is_named() -> None:
    assert Series(target="request_rate").check().job_class == "inference"
    assert (Series().check().job_class, Series(job_class="batch", target="request_rate").check().job_class) == (
        "all",
        "batch",
    )


def test_a_service_that_is_gone_is_unreachable() -> None:
    with opened(Door()) as door:
        pass
    with pytest.raises(Unreachable):
        DemandAhead(OF_LLAMA, Asked(door.url)).poll_once()


def test_the_thread_goes_on_after_errors_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with opened(Door([500, 500, 200, 200, 200, 200], answer=told())) as door:
        ahead = DemandAhead(OF_LLAMA, Asked(door.url, every_s=0.01))
        ahead.start()
        ahead.start()
        until(lambda: len(caplog.records) >= 2 and len(door.paths) > 4)
        ahead.stop()
    until(lambda: not any(thread.name == "fleetcast-demand" for thread in threading.enumerate()))
    said = [record.getMessage() for record in caplog.records]
    assert ["no forecast" in line for line in said] == [True, False], said
    assert "as told" in said[0]
    assert ahead.value() is not None


def test_a_value_never_waits_for_a_service_that_hangs() -> None:
    held = threading.Event()
    with opened(Door(opens=held, answer=told())) as door:
        ahead = DemandAhead(OF_LLAMA, Asked(door.url, every_s=0.01, timeout_s=0.05))
        ahead.start()
        until(lambda: len(door.paths) > 1)
        assert ahead.value() is None
        ahead.stop()
        held.set()


@pytest.mark.parametrize(
    ("series", "asked", "names"),
    [
        (Series(quantile=90), Asked("http://127.0.0.1:1"), "quantile is 90"),
        (Series(horizon_s=-1), Asked("http://127.0.0.1:1"), "horizon_s is -1"),
        (Series(), Asked("fleetcast:8080"), "URL is 'fleetcast:8080'"),
        (Series(), Asked("http://127.0.0.1:1", every_s=0), "every_s is 0"),
        (Series(), Asked("http://127.0.0.1:1", stale_s=float("nan")), "stale_s is nan"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(series: Series, asked: Asked, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        DemandAhead(series, asked)
