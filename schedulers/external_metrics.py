"""Kubernetes' external metrics: one metric, whose label selector chooses a demand forecast.

    GET …/namespaces/NAMESPACE/fleetcast_demand?labelSelector=queue=serve,target=request_rate,horizon_s=600

If the forecast is stale, the answer is an error. An autoscaler then keeps its replicas, and reports that the
metric is missing.
"""

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from fleetcast.fleet.errors import RequestError, UnknownEntity
from fleetcast.schedulers.adapter import Seen, Verb, Write
from fleetcast.schedulers.demand_value import compute_demand_value, find_fresh_row
from fleetcast.schedulers.keda import SERVING
from fleetcast.schedulers.weather import DemandKey, Weather

GROUP = "external.metrics.k8s.io"
VERSION = f"{GROUP}/v1beta1"
METRIC = "fleetcast_demand"
DEFAULTS: Mapping[str, str] = {
    "queue": "all",
    "pool": "all",
    "class": "all",
    "group": "all",
    "target": "wanted",
    "quantile": "0.9",
    "horizon_s": "300",
}
EQUAL = re.compile(r"([\w./-]+) *==? *([\w.-]*)")
ONE_OF = re.compile(r"([\w./-]+) +in +\( *([\w.-]*) *\)")


class MetricQuestion(msgspec.Struct):
    """A metric's name, and a label selector in Kubernetes' notation."""

    metric: str
    selector: str = ""


class ExternalMetrics:
    """The adapter `external_metrics`, which answers with one forecast value, in GPUs or requests/s.

    The answer is an ExternalMetricValueList. Raises UnknownEntity for an unknown metric or series,
    RequestError for an invalid selector, and NotKnown without a forecast.
    """

    fields: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.verbs = {"value": Verb(_answer_value, lambda body: None)}

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterable[Write]:
        return ()


def _answer_value(weather: Weather, body: bytes) -> bytes:
    asked = msgspec.json.decode(body, type=MetricQuestion)
    if asked.metric != METRIC:
        raise UnknownEntity(f"no metric {asked.metric[:200]!r}: there is {METRIC}")
    labels = add_selector_defaults(asked.selector)
    key = DemandKey(labels["queue"], labels["class"], labels["group"], labels["target"], labels["pool"])
    row = find_fresh_row(weather, key)
    value = compute_demand_value(
        row, _parse_number(labels, "quantile"), _parse_number(labels, "horizon_s"), weather.now_ms
    )
    item = {
        "metricName": METRIC,
        "metricLabels": labels,
        "timestamp": datetime.fromtimestamp(row.issued_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": format_quantity(value),
    }
    return msgspec.json.encode(
        {"kind": "ExternalMetricValueList", "apiVersion": VERSION, "metadata": {}, "items": [item]}
    )


def add_selector_defaults(selector: str) -> dict[str, str]:
    """Return the labels of a selector, with defaults for the missing ones. Raises RequestError.

    >>> add_selector_defaults("queue=serve,quantile in (0.5)")["queue"], add_selector_defaults("")["quantile"]
    ('serve', '0.9')
    """
    asked = _parse_selector(selector)
    serving = {"class": SERVING} if asked.get("target") == "request_rate" else {}
    if asked.get("queue", "all") != "all" and asked.get("pool", "all") != "all":
        raise RequestError("labelSelector: set queue or pool, since a series is of one of them", "labelSelector")
    return {**DEFAULTS, **serving, **asked}


def _parse_selector(selector: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in selector.split(","))):
        found = EQUAL.fullmatch(part) or ONE_OF.fullmatch(part)
        if found is None:
            raise RequestError(f"labelSelector {part[:200]!r}: expected label=value", "labelSelector")
        name, value = found.groups()
        if name not in DEFAULTS:
            known = ", ".join(DEFAULTS)
            raise RequestError(f"labelSelector {part[:200]!r}: the labels are {known}", "labelSelector")
        labels[name] = value
    return labels


def format_quantity(value: float) -> str:
    """Format a number as a Kubernetes quantity, rounded up to thousandths.

    >>> format_quantity(12.5), format_quantity(7.0), format_quantity(0.0001)
    ('12500m', '7', '1m')
    """
    thousandths = math.ceil(round(value * 1000, 6))
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)


def _parse_number(labels: Mapping[str, str], name: str) -> float:
    try:
        return float(labels[name])
    except ValueError:
        raise RequestError(f"label {name} = {labels[name]!r}: expected a number", name) from None


def make_api_resource_list() -> dict[str, Any]:
    """Return the APIResourceList, for discovery.

    Its only verb is `get`. So no client tries to list, watch or delete the metrics.
    """
    resource = {
        "name": METRIC,
        "singularName": "",
        "namespaced": True,
        "kind": "ExternalMetricValueList",
        "verbs": ["get"],
    }
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": VERSION, "resources": [resource]}


def make_api_group() -> dict[str, Any]:
    version = {"groupVersion": VERSION, "version": VERSION.rpartition("/")[2]}
    return {"kind": "APIGroup", "apiVersion": "v1", "name": GROUP, "versions": [version], "preferredVersion": version}


def make_failure_status(code: int, reason: str, message: str) -> dict[str, Any]:
    """Return a Kubernetes Status, the body of every error."""
    status_body = {"status": "Failure", "message": message, "reason": reason, "code": code}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **status_body}
