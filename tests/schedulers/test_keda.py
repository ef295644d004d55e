"""KEDA's external scaler: triggers in, numbers out."""

import json
import math
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.errors import RequestError
from fleetcast.models.demand.forecaster import HORIZONS_S, TARGETS
from fleetcast.models.demand.rows import DemandRow, Prescale
from fleetcast.schedulers import keda
from fleetcast.schedulers.adapter import NotKnown
from fleetcast.schedulers.demand_value import OLDEST_S
from fleetcast.schedulers.keda import LONGEST_S, SERVING, KedaAdapter, compute_wanted_demand, read_trigger
from fleetcast.schedulers.weather import DemandKey, Weather
from fleetcast.service.pipeline.demand import histories
from tests.schedulers.small_fleet import NOW_MS

KEY = DemandKey("serve", "inference", "llama", "request_rate")
METADATA = {
    "scalerAddress": "fleetcast:9443",
    "queue": "serve",
    "group": "llama",
    "target": "request_rate",
    "targetPerReplica": "8",
    "horizonSeconds": "300",
}
QUANTILES = [0.1, 0.5, 0.9]


def row(issued_ms: int = NOW_MS, lead_s: float | None = None, **more: Any) -> DemandRow:
    """Of 10 requests a second now: p90 rises to 20 in a minute, 80 in five, 200 in ten."""
    values = [[5.0, 10.0, 20.0], [10.0, 40.0, 100.0], [20.0, 80.0, 200.0]]
    made = DemandRow(
        queue=KEY.queue,
        class_=KEY.class_,
        group=KEY.group,
        target=KEY.target,
        now=10.0,
        model="persistence",
        issued_ms=issued_ms,
        horizons_s=[60, 300, 600],
        quantiles=QUANTILES,
        values=values,  # type: ignore[arg-type]
        record=None,
        prescale=Prescale(2, lead_s=lead_s),
    )
    return msgspec.structs.replace(made, **more)


def weather(one: DemandRow | None = None, age_s: float = 0.0) -> Weather:
    return Weather(1, NOW_MS, NOW_MS + round(1000 * age_s), demand={KEY: one or row()})


def value(given: Weather, **more: str) -> float:
    return compute_wanted_demand(given, read_trigger(METADATA | more))


def ask(verb: str, given: Weather | None = None, metadata: dict[str, str] | None = None, **more: Any) -> Any:
    body = json.dumps({"metadata": METADATA if metadata is None else metadata, **more}).encode()
    return json.loads(KedaAdapter().verbs[verb].answer(given or weather(), body))


def test_the_metric_is_a_quantile_at_the_moment_when_a_new_replica_is_warm() -> None:
    assert value(weather()) == 80.0
    assert value(weather(), quantile="0.5") == 40.0
    assert value(weather(), horizonSeconds="60") == 20.0


def test_between_horizons_and_between_quantiles_it_is_a_straight_line() -> None:
    assert value(weather(), horizonSeconds="180") == pytest.approx(50.0)
    assert value(weather(), horizonSeconds="30") == pytest.approx(15.0)
    assert value(weather(), horizonSeconds="0") == 10.0
    assert value(weather(), quantile="0.7") == pytest.approx(60.0)


def test_the_age_of_a_forecast_counts_towards_the_horizon() -> None:
    assert value(weather(age_s=120.0), horizonSeconds="180") == 80.0
    assert value(weather(age_s=60.0), horizonSeconds="0") == 20.0


def test_without_a_horizon_the_measured_cold_start_is_taken() -> None:
    metadata = {name: text for name, text in METADATA.items() if name != "horizonSeconds"}
    trigger = read_trigger(metadata)
    assert compute_wanted_demand(weather(row(lead_s=60.0)), trigger) == 20.0
    with pytest.raises(NotKnown, match="set horizonSeconds"):
        compute_wanted_demand(weather(), trigger)


def test_the_specification_needs_no_weather() -> None:
    told = {"metricName": "fleetcast-request-rate", "targetSize": 8.0}
    assert ask("metric_spec", Weather(1, NOW_MS, NOW_MS)) == told
    body = json.dumps({"metadata": METADATA}).encode()
    assert json.loads(KedaAdapter().verbs["metric_spec"].stale(body) or b"") == told


def test_the_value_has_the_name_that_was_asked_for() -> None:
    assert ask("metrics") == {"metricName": "fleetcast-request-rate", "value": 80.0}
    assert ask("metrics", metricName="other")["metricName"] == "other"


@pytest.mark.parametrize(("activation", "active"), [("79.9", True), ("80", False), ("500", False)])
def test_a_trigger_is_active_above_its_activation(activation: str, active: bool) -> None:
    assert ask("is_active", metadata=METADATA | {"activation": activation}) == {"active": active}


def test_nothing_wanted_is_zero_and_not_active() -> None:
    idle = weather(row(now=0.0, values=[[0.0] * 3, [0.0] * 3, [-0.2] * 3]))
    assert value(idle) == 0.0
    assert ask("is_active", idle) == {"active": False}


@pytest.mark.parametrize("verb", ["metrics", "is_active"])
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (Weather(1, NOW_MS, NOW_MS), "no forecast of demand now"),
        (Weather(1, NOW_MS, NOW_MS, demand={}), "no forecast of queue 'serve', class 'inference', group 'llama'"),
        (weather(age_s=OLDEST_S + 1), "is 601 s old"),
        (weather(row(values=[[None] * 3] * 3)), "no forecast of request_rate 300 s ahead"),
        (weather(row(values=[[1.0] * 3, [1.0] * 3, [math.inf] * 3])), "no forecast of request_rate 300 s ahead"),
    ],
)
def test_what_is_not_known_is_no_number(verb: str, given: Weather, why: str) -> None:
    with pytest.raises(NotKnown, match=why):
        ask(verb, given)


@pytest.mark.parametrize("verb", ["metrics", "is_active"])
def test_a_stale_answer_is_an_error(verb: str) -> None:
    assert KedaAdapter().verbs[verb].stale(json.dumps({"metadata": METADATA}).encode()) is None


BAD = [
    ({"target": "requests"}, "target = 'requests': set one of arriving, running"),
    ({"class": "batch-job"}, "class = 'batch-job': set one of all, training"),
    ({"quantile": "ninety"}, "quantile = 'ninety': set a number from 0 to 1"),
    ({"quantile": "nan"}, "quantile = 'nan'"),
    ({"targetPerReplica": "0"}, "targetPerReplica = '0': set a number from 1e-06"),
    ({"targetPerReplica": "inf"}, "targetPerReplica = 'inf'"),
    ({"horizonSeconds": "-1"}, "horizonSeconds = '-1': set a number from 0 to 259200"),
    ({"horizonSeconds": ""}, "horizonSeconds = ''"),
    ({"activation": "-0.1"}, "activation = '-0.1'"),
    ({"quantil": "0.5"}, "quantil = '0.5': no such key; known are queue, pool, class"),
]


@pytest.mark.parametrize(("more", "why"), BAD)
@pytest.mark.parametrize("verb", ["metric_spec", "metrics", "is_active"])
def test_bad_metadata_is_refused_with_key_value_and_fix_fresh_or_stale(
    verb: str, more: dict[str, str], why: str
) -> None:
    body = json.dumps({"metadata": METADATA | more}).encode()
    for answer in (
        lambda: KedaAdapter().verbs[verb].answer(weather(), body),
        lambda: KedaAdapter().verbs[verb].stale(body),
    ):
        with pytest.raises(RequestError) as refused:
            answer()
        assert why in str(refused.value)


@pytest.mark.parametrize("missing", ["target", "targetPerReplica"])
def test_a_key_without_a_default_must_be_there(missing: str) -> None:
    metadata = {name: text for name, text in METADATA.items() if name != missing}
    with pytest.raises(RequestError, match=f"{missing} is missing: set"):
        read_trigger(metadata)


def test_what_the_forecast_does_not_reach_is_refused() -> None:
    with pytest.raises(RequestError, match=r"scalerMetadata quantile = 0.95: set one from 0.1 to 0.9"):
        value(weather(), quantile="0.95")
    with pytest.raises(RequestError, match="scalerMetadata horizon of 700 s: set one from 0 to 600"):
        value(weather(), horizonSeconds="700")


@pytest.mark.parametrize("body", [b'{"metadata": {"pool": 3}}', b"[]"])
def test_a_question_of_another_shape_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        KedaAdapter().verbs["metrics"].answer(weather(), body)


def test_the_class_of_what_is_served_needs_not_be_named() -> None:
    assert read_trigger(METADATA).series.class_ == SERVING
    assert read_trigger(METADATA | {"target": "running"}).series.class_ == "all"


def test_targets_and_horizons_are_those_that_are_forecast() -> None:
    assert (keda.TARGETS, SERVING) == (TARGETS, histories.SERVING)
    assert max(HORIZONS_S) == LONGEST_S


def test_a_trigger_is_of_a_queue_or_of_a_pool_of_machines() -> None:
    base = {"target": "wanted", "targetPerReplica": "8"}
    assert read_trigger(base | {"pool": "h100"}).series == ("all", "all", "all", "wanted", "h100")
    assert read_trigger(base | {"queue": "train"}).series == ("train", "all", "all", "wanted", "all")
    with pytest.raises(RequestError, match="pool = 'h100': leave it out if there is queue = 'train'"):
        read_trigger(base | {"queue": "train", "pool": "h100"})
