"""A metric's name and selector, and the value that a Kubernetes autoscaler is told."""

import contextlib
import dataclasses
import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import RequestError, UnknownEntity
from fleetcast.schedulers.adapter import NotKnown
from fleetcast.schedulers.external_metrics import (
    METRIC,
    VERSION,
    ExternalMetrics,
    add_selector_defaults,
    format_quantity,
    make_api_resource_list,
)
from tests.schedulers.small_demand import small_demand
from tests.schedulers.small_fleet import weather

LLAMA = "queue=serve,class=inference,group=llama-70b,target=request_rate"


def asked(selector: str = "", metric: str = METRIC, **more: Any) -> Any:
    body = json.dumps({"metric": metric, "selector": selector}).encode()
    known = dataclasses.replace(weather({"n1": 0.1}), demand=small_demand(), **more)
    return json.loads(ExternalMetrics().verbs["value"].answer(known, body))


def test_an_answer_is_a_list_of_one_value_as_kubernetes_reads_it() -> None:
    assert asked(LLAMA + ",quantile=0.5,horizon_s=300") == {
        "kind": "ExternalMetricValueList",
        "apiVersion": VERSION,
        "metadata": {},
        "items": [
            {
                "metricName": METRIC,
                "metricLabels": {
                    "queue": "serve",
                    "pool": "all",
                    "class": "inference",
                    "group": "llama-70b",
                    "target": "request_rate",
                    "quantile": "0.5",
                    "horizon_s": "300",
                },
                "timestamp": "2025-10-09T08:53:20Z",
                "value": "40",
            }
        ],
    }


def test_without_a_selector_it_is_what_the_whole_fleet_wants() -> None:
    assert asked()["items"][0]["value"] == "830"


@pytest.mark.parametrize("selector", ["horizon_s=90", "horizon_s==90", "horizon_s in (90)", " horizon_s = 90 , "])
def test_every_way_to_write_one_value_means_the_same(selector: str) -> None:
    assert asked(selector)["items"][0]["value"] == "812500m"


@pytest.mark.parametrize(
    ("selector", "says"),
    [
        ("pool!=serve", "expected label=value"),
        ("pool in (a,b)", "expected label=value"),
        ("!pool", "expected label=value"),
        ("pool", "expected label=value"),
        ("app=web", "the labels are queue, pool, class, group, target, quantile, horizon_s"),
        ("queue=serve,pool=h100", "set queue or pool"),
        ("horizon_s=soon", "horizon_s = 'soon': expected a number"),
        ("horizon_s=nan", "set one from 0 to 600"),
        ("horizon_s=-1", "set one from 0 to 600"),
        ("quantile=0.99", "set one from 0.1 to 0.9"),
    ],
)
def test_a_selector_that_means_no_number_is_refused_with_what_is_expected(selector: str, says: str) -> None:
    with pytest.raises(RequestError, match=says.replace("(", r"\(")):
        asked(selector)


def test_requests_are_those_of_served_models_unless_the_selector_says_otherwise() -> None:
    short = "queue=serve,group=llama-70b,target=request_rate,horizon_s=300"
    assert asked(short) == asked(LLAMA + ",horizon_s=300")
    assert (add_selector_defaults("")["class"], add_selector_defaults("target=wanted")["class"]) == ("all", "all")
    with pytest.raises(UnknownEntity, match="class 'all'"):
        asked(f"{short},class=all")


def test_what_there_is_not_is_named() -> None:
    with pytest.raises(UnknownEntity, match="there is fleetcast_demand"):
        asked(metric="queue_length")
    with pytest.raises(UnknownEntity, match="pool 'here'"):
        asked("pool=here")


def test_without_a_forecast_there_is_no_answer_at_all() -> None:
    value = ExternalMetrics().verbs["value"]
    with pytest.raises(NotKnown):
        value.answer(dataclasses.replace(weather({"n1": 0.1}), demand=None), json.dumps({"metric": METRIC}).encode())
    assert value.stale(b"{}") is None


@given(st.floats(0, 1e6))
def test_a_quantity_is_never_less_than_the_value_and_at_most_a_thousandth_more(value: float) -> None:
    text = format_quantity(value)
    told = Fraction(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)
    assert -1e-8 <= float(told) - value <= 0.001 + 1e-8


@given(st.text(max_size=40))
def test_any_text_is_a_selector_or_is_refused(text: str) -> None:
    with contextlib.suppress(RequestError):
        assert set(add_selector_defaults(text)) == set(add_selector_defaults(""))


@given(
    st.sampled_from([METRIC, "other", "", "ünï/\0"]),
    st.lists(st.tuples(st.sampled_from([*add_selector_defaults(""), "app"]), st.text(max_size=6)), max_size=4),
)
def test_whatever_is_asked_there_is_a_number_or_a_refusal(metric: str, labels: list[tuple[str, str]]) -> None:
    with contextlib.suppress(RequestError, UnknownEntity, NotKnown):
        told = asked(",".join(f"{name}={value}" for name, value in labels), metric)
        assert len(told["items"]) == 1


def test_nobody_can_list_watch_or_delete_through_it() -> None:
    assert [row["verbs"] for row in make_api_resource_list()["resources"]] == [["get"]]
