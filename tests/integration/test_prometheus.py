"""Every query of every dashboard and alert, asked of a real Prometheus that scrapes the running service.

The fleet is simulated, with faults; somebody asks, posts and errs, and tells of the jobs of the day before; a model of
run times is fitted and promoted, so that nothing is empty for want of traffic or of history. A
query must return what its panel can show: one number, lines with the labels of their legend, or a table's columns.
Queries are asked again until the faults that they are about have been seen. Windows that outlast a test are shortened
(`$__rate_interval`, and offsets); nothing else of a query is changed.
"""

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetcast.features.past_runs import COLUMN, FEATURES
from fleetcast.models.run_times.duration import DurationModel
from fleetcast.models.run_times.rows import RunRows
from fleetcast.models.versions.card import Card
from fleetcast.models.versions.registry import Registry
from tests.dashboards.grafana import (
    DASHBOARDS,
    LEGEND,
    SELECTOR,
    Query,
    grouped_by,
    load,
    queries,
    rules,
    substituted,
    variables,
)
from tests.integration.prometheus_process import Prometheus
from tests.integration.service_process import Service
from tests.integration.simulated_fleet import SimulatedFleet

pytestmark = pytest.mark.integration

NODES = 24
SEEN_WITHIN_S = 400.0
WINDOW_S = 3600  # longer than this fleet lives
RATE = {"__rate_interval": "15s"}
OFFSET = re.compile(r"offset 1h")
TOLERANCE = 1e-6
MINUTE_MS = 60_000


class Traffic(threading.Thread):
    """Asks and posts a little of everything, and errs now and then."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self.service = service
        self.ended = threading.Event()
        self.round = 0

    def run(self) -> None:
        while not self.ended.wait(0.5):
            self.round += 1
            self._once()

    def _once(self) -> None:
        service = self.service
        fleet = service.get("/v1/fleet")
        now_ms = fleet["as_of_ms"] if fleet else 0
        service.get("/v1/risk/nodes?limit=3")
        service.request("GET", "/v1/nodes/nobody")
        event = {"job": "waits", "sequence": self.round % 5, "time_ms": now_ms, "type": "submitted", "queue": "patient"}
        service.request("POST", "/v1/events", [event, event | {"gang": -1}])
        request = {"request_id": f"r{self.round}", "gpus_per_node": 1, "dry_run": True}
        service.request("POST", "/v1/placements", request)
        service.request("POST", "/v1/placements", {"request_id": "same", "gpus_per_node": 1 + self.round % 2})

    def stop(self) -> None:
        self.ended.set()
        self.join(30)


class World:
    """The fleet, its service, the Prometheus that scrapes it, and the traffic."""

    def __init__(self, fleet: SimulatedFleet, prometheus: Prometheus) -> None:
        self.service = fleet.service
        self.prometheus = prometheus
        self.instance = f"127.0.0.1:{self.service.port}"

    def values(self, board: dict[str, Any]) -> dict[str, str]:
        """A value for every variable, out of what its own query offers; the most telling where there is a choice."""
        chosen = dict(RATE)
        telling = {
            "node": 'max by (node) (fleetcast_node_flagged) and on (node) fleetcast_node_gpus{state="running"} > 0',
            "queue": 'max by (queue) (fleetcast_demand_now_gpus{queue="all"})',
            "pool": 'max by (pool) (fleetcast_demand_now_gpus{pool="all"})',
            "target": 'max by (target) (fleetcast_demand_now_gpus{target="wanted"})',
        }
        for name, query in variables(board).items():
            selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query).groups()  # type: ignore[union-attr]
            offered = {row["metric"][label] for row in self.prometheus.instant(substituted(selector, chosen))}
            wanted = [row["metric"][name] for row in self.prometheus.instant(telling[name])] if name in telling else []
            chosen[name] = next((value for value in wanted if value in offered), self.instance)
        return chosen


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    fleet = SimulatedFleet(folder, NODES, teams=True)
    try:
        prometheus = Prometheus(folder, f"127.0.0.1:{fleet.service.port}")
        traffic = Traffic(fleet.service)
        tell_of_yesterday(fleet.service)
        fit_run_times(fleet.service)
        traffic.start()
        yield World(fleet, prometheus)
        traffic.stop()
        prometheus.stop()
    finally:
        fleet.stop()


def tell_of_yesterday(service: Service) -> None:
    """A job every twenty minutes of a day, each for forty."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while (fleet := service.get("/v1/fleet")) is None:
        assert time.monotonic() < deadline, service.log()
        time.sleep(0.5)
    for number in range(72):
        at_ms = fleet["as_of_ms"] - (number + 3) * 20 * MINUTE_MS
        about = {"job": f"yesterday-{number}", "attempt": 1}
        events = [
            {"type": "submitted", "sequence": 1, "time_ms": at_ms, "queue": "past", "gpus_per_node": 1 + number % 3},
            {"type": "started", "sequence": 2, "time_ms": at_ms + MINUTE_MS, "nodes": ["elsewhere"]},
            {"type": "finished", "sequence": 3, "time_ms": at_ms + 40 * MINUTE_MS},
        ]
        status, answer, _ = service.request("POST", "/v1/events", [about | event for event in events])
        assert status in (200, 202), answer


def fit_run_times(service: Service) -> None:
    """A small model of run times that serves, and a card that says when its history ended."""
    rng = np.random.default_rng(0)
    features = np.full((200, len(FEATURES)), np.nan, np.float32)
    features[:, COLUMN["log_gpus"]] = np.log(rng.choice([1.0, 8.0], 200))
    at_s = np.sort(rng.uniform(0, 1e6, 200))
    model = DurationModel(seed=1, threads=1).fit(RunRows(features, at_s, at_s, at_s + rng.lognormal(7, 1, 200)), 2e6)
    registry, now_ms = Registry(service.folder / "state" / "models"), service.get("/v1/fleet")["as_of_ms"]
    card = Card(kind="duration", created_ms=now_ms, made_by="a test", seed=1, fitted_until_ms=now_ms - 60 * MINUTE_MS)
    registry.promote("duration", registry.add_version("duration", model.save, card), force=True)


def numbers(rows: Sequence[dict[str, Any]]) -> list[float]:
    """All values of an answer, without NaN (a ratio of nothing by nothing)."""
    points = [point for row in rows for point in (row["values"] if "values" in row else [row["value"]])]
    return [value for _, text in points if not math.isnan(value := float(text))]


def complaint(query: Query, rows: Sequence[dict[str, Any]]) -> str:
    """What a person would miss on this panel, "" when it shows what it promises."""
    found = numbers(rows)
    if not found:
        return "no data"
    field = query.panel["fieldConfig"]["defaults"]
    if min(found) < field.get("min", -math.inf) - TOLERANCE or max(found) > field.get("max", math.inf) + TOLERANCE:
        return f"values from {min(found)} to {max(found)}, outside the axis"
    if query.panel["type"] == "stat" and len(rows) != 1:
        return f"{len(rows)} values, where one is shown"
    is_table = query.panel["type"] == "table"
    labels = grouped_by(query.expr) if is_table else set(LEGEND.findall(query.target.get("legendFormat", "")))
    if not all(labels <= set(row["metric"]) for row in rows):
        return f"rows without some of {sorted(labels)}"
    return ""


NOT_HERE = (
    "fleetcast_demand_requests",  # the simulation serves no models
    "fleetcast_model_drift_",  # a fitted model is scored when as many runs as it asks for have ended
    "fleetcast_model_shadow_loss_ratio",  # there is no challenger
    "fleetcast_node_risk_matured_forecasts",  # forecasts mature in an hour, longer than this fleet lives
    "fleetcast_node_risk_mean_forecast_ratio",
    "fleetcast_node_risk_observed_ratio",
    "fleetcast_node_risk_brier_skill_ratio",
    "fleetcast_spike_load_ratio",  # no adapter of the simulation tells its speed, so nothing has a capacity
    "fleetcast_tls_certificate_expiry_timestamp_seconds",  # its api speaks plain HTTP
    'culprit=~"$node',  # who is flagged need not hold a job back,
    'weakest="$node"',  # nor be the weakest of a gang
)
"""What this fleet cannot tell."""


def is_here(expr: str) -> bool:
    return not any(name in expr for name in NOT_HERE)


def ask(prometheus: Prometheus, query: Query, values: dict[str, str]) -> list[dict[str, Any]]:
    expr = OFFSET.sub("offset 5s", substituted(query.expr, values))
    return prometheus.instant(expr) if query.instant else prometheus.range(expr, WINDOW_S)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_gives_what_its_panel_shows(world: World, path: Path) -> None:
    board = load(path)
    pending = {str(query): query for query in queries(board) if is_here(query.expr)}
    complaints: dict[str, str] = {}
    deadline = time.monotonic() + SEEN_WITHIN_S
    while pending and time.monotonic() < deadline:
        values = world.values(board)
        for name, query in list(pending.items()):
            complaints[name] = complaint(query, ask(world.prometheus, query, values))
            if not complaints[name]:
                del pending[name]
        time.sleep(1.0)
    assert not pending, "\n".join(f"{name}: {complaints[name]}" for name in pending)


def until_none_is_left(missing: set[str], found: Callable[[set[str]], set[str]]) -> None:
    """Asks again until everything was found at some time."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while missing and time.monotonic() < deadline:
        missing = missing - found(missing)
        time.sleep(0.5)
    assert not missing


def raised(world: World, *names: str) -> None:
    """Waits until each alert was pending or firing at some time."""

    def found(missing: set[str]) -> set[str]:
        return {row["labels"]["alertname"] for row in world.prometheus.get("alerts")["alerts"]}

    until_none_is_left(set(names), found)


def test_faults_of_the_fleet_raise_alerts(world: World) -> None:
    raised(world, "FleetcastNodeDrainNow", "FleetcastNodeFlagged", "FleetcastJobSlow")


def test_troubles_of_the_service_raise_alerts(world: World) -> None:
    pids = world.service.pids()
    os.kill(pids["placer"], signal.SIGSTOP)
    os.kill(pids["pipeline"], signal.SIGSTOP)
    try:
        raised(world, "FleetcastPlacerDown", "FleetcastBoardStale")
    finally:
        os.kill(pids["pipeline"], signal.SIGCONT)
        os.kill(pids["placer"], signal.SIGCONT)


def test_prometheus_knows_all_that_the_alerts_ask_for(world: World) -> None:
    """Server errors are there since the placer was away. What ended meanwhile counts: the last gang may have."""

    def find_scraped(missing: set[str]) -> set[str]:
        return {selector for selector in missing if world.prometheus.instant(f"last_over_time({selector}[1d])")}

    asked = {selector for rule in rules() for selector in SELECTOR.findall(rule["expr"]) if is_here(selector)}
    until_none_is_left(asked, find_scraped)
    told = {rule["name"]: rule for group in world.prometheus.get("rules")["groups"] for rule in group["rules"]}
    assert set(told) == {rule["alert"] for rule in rules()}
    assert {name: rule["lastError"] for name, rule in told.items() if rule["health"] != "ok"} == {}
