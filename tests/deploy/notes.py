"""The lines for other schedulers that the chart's NOTES.txt prints, read as our own answerers read them."""

import re
from typing import Any

import yaml

from fleetcast.features.request_series import RequestSeries
from fleetcast.models.demand.rows import DemandRow
from fleetcast.schedulers.demand_value import find_fresh_row
from fleetcast.schedulers.external_metrics import METRIC, add_selector_defaults
from fleetcast.schedulers.keda import Trigger, read_trigger
from fleetcast.schedulers.weather import DemandKey, Weather
from fleetcast.service.pipeline.demand.histories import read_request_rates
from tests.schedulers.small_demand import row
from tests.schedulers.small_fleet import NOW_MS


def snippets(text: str) -> dict[str, str]:
    """By the name of the file that they belong into."""
    return dict(re.findall(r"^# ([\w.-]+): [^\n]*\n(.*?)^# end$", text, re.MULTILINE | re.DOTALL))


def things(snippet: str) -> dict[str, Any]:
    """Its objects by kind."""
    return {thing["kind"]: thing for thing in yaml.safe_load_all(snippet) if thing}


def trigger_of(snippet: str) -> Trigger:
    """Raises RequestError, where KEDA would be told INVALID_ARGUMENT."""
    (external,) = (row for row in things(snippet)["ScaledObject"]["spec"]["triggers"] if row["type"] == "external")
    return read_trigger(external["metadata"])


def asked_by(snippet: str) -> DemandKey:
    """The series that the autoscaler asks about, through the selector as the API server writes it."""
    (metric,) = (row["external"]["metric"] for row in things(snippet)["HorizontalPodAutoscaler"]["spec"]["metrics"])
    assert metric["name"] == METRIC
    labels = add_selector_defaults(
        ",".join(f"{name}={value}" for name, value in metric["selector"]["matchLabels"].items())
    )
    return DemandKey(labels["queue"], labels["class"], labels["group"], labels["target"], labels["pool"])


def forecast_of(key: DemandKey) -> DemandRow:
    """Of a service that serves the model `served` in the queue `serve`. Raises UnknownEntity for a series that it never
    has."""
    requests = RequestSeries()
    requests.record(NOW_MS, {("serve", "served"): (5.0, 1)})
    found = read_request_rates(requests, NOW_MS).keys
    keys = [DemandKey(one.queue, one.class_, one.group, "request_rate", one.pool) for one in found]
    demand = {one: row(one, 5.0, [[5.0, 5.0, 5.0]] * 3) for one in keys}
    return find_fresh_row(Weather(1, NOW_MS, NOW_MS, demand=demand), key)
