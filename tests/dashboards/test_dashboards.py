"""The committed dashboards: what Grafana would choke on, and what a person would miss."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetcast.models.versions.drift import Drift, RecentAccuracy
from fleetcast.service.answers.fitted_models import ShadowModel
from fleetcast.service.pipeline.model_monitor import make_drift_page
from tests.dashboards.grafana import (
    DASHBOARDS,
    FOLDER,
    LEGEND,
    ROOT,
    SELECTOR,
    VARIABLE,
    grouped_by,
    load,
    queries,
    variables,
)

BUILT_IN = {"__rate_interval", "__url_time_range", "__data"}
COLUMNS = 24
every_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def boxes(board: dict[str, Any]) -> list[tuple[int, int, int, int, str]]:
    return [(*(panel["gridPos"][key] for key in "xywh"), panel.get("title", "")) for panel in board["panels"]]


def test_the_six_dashboards_are_there() -> None:
    assert [path.stem for path in DASHBOARDS] == ["demand", "fleet", "node", "queue", "service", "showback"]
    boards = [load(path) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 6


@every_dashboard
def test_panels_have_ids_of_their_own_and_lie_beside_each_other(path: Path) -> None:
    board = load(path)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for x, _, w, h, title in boxes(board):
        assert 0 <= x < x + w <= COLUMNS, title
        assert h > 0, title
    for (x, y, w, h, one), (left, top, width, height, other) in itertools.combinations(boxes(board), 2):
        assert x + w <= left or left + width <= x or y + h <= top or top + height <= y, f"{one} over {other}"


@every_dashboard
def test_every_query_asks_the_provisioned_datasource(path: Path) -> None:
    sources = yaml.safe_load((FOLDER / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    provisioned = {"type": sources[0]["type"], "uid": sources[0]["uid"]}
    board = load(path)
    assert all(row["datasource"] == provisioned for row in board["templating"]["list"])
    for query in queries(board):
        assert query.panel["datasource"] == query.target["datasource"] == provisioned, query


@every_dashboard
def test_every_panel_says_its_unit_and_names_its_lines(path: Path) -> None:
    board = load(path)
    for query in queries(board):
        if query.panel["type"] != "table":
            assert query.panel["fieldConfig"]["defaults"]["unit"], query
        if query.panel["type"] == "timeseries":
            assert query.target["legendFormat"], query
    for panel in board["panels"]:
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(refs)) == len(refs)
        assert panel["type"] == "row" or refs, panel["title"]


@every_dashboard
def test_shares_of_different_wholes_are_not_added_up(path: Path) -> None:
    for panel in load(path)["panels"]:
        drawn = panel.get("fieldConfig", {}).get("defaults", {})
        if drawn.get("unit") in ("percent", "percentunit", "s"):
            assert drawn.get("custom", {}).get("stacking", {}).get("mode", "none") == "none", panel["title"]


@every_dashboard
def test_every_variable_is_defined_before_it_is_used(path: Path) -> None:
    board = load(path)
    known = set(BUILT_IN)
    for name, values in variables(board).items():
        assert set(VARIABLE.findall(values)) <= known
        known.add(name)
    for query in queries(board):
        assert set(VARIABLE.findall(query.expr)) <= known, query
    assert all(row["description"] for row in board["templating"]["list"])


@every_dashboard
def test_every_selector_asks_one_api_so_that_replicas_do_not_add_up(path: Path) -> None:
    for query in queries(load(path)):
        for selector in SELECTOR.findall(query.expr):
            assert 'instance="$instance"' in selector, query


@every_dashboard
def test_links_lead_to_dashboards_that_exist(path: Path) -> None:
    uids = {load(other)["uid"] for other in DASHBOARDS}
    text = path.read_text(encoding="utf-8")
    for part in text.split('"url": "/d/')[1:]:
        assert part.split("?")[0] in uids
    assert load(path)["links"][0]["tags"] == ["fleetcast"]


@every_dashboard
def test_tables_show_columns_that_their_queries_give(path: Path) -> None:
    for panel in load(path)["panels"]:
        if panel["type"] != "table":
            continue
        shown = panel["transformations"][-1]["options"]["renameByName"]
        refs = [target["refId"] for target in panel["targets"]]
        values = {f"Value #{ref}" for ref in refs} if len(refs) > 1 else {"Value"}
        labels = {label for target in panel["targets"] for label in grouped_by(target["expr"])}
        assert set(shown) <= values | labels, panel["title"]


@every_dashboard
def test_a_legend_names_labels_that_the_query_keeps(path: Path) -> None:
    for query in queries(load(path)):
        kept = grouped_by(query.expr)
        for label in LEGEND.findall(query.target.get("legendFormat", "")):
            assert label in kept or " by (" not in query.expr, query


def test_all_that_is_told_of_fitted_models_is_on_a_panel() -> None:
    drift = Drift("demand", "0001", 0, 3.0, 0.8, RecentAccuracy(0.9, 0.8, 1), {})
    page = make_drift_page([drift], [ShadowModel("demand", "0002", 0.8, 0.9, 1)]).decode()
    told = set(re.findall(r"^fleetcast_model_\w+", page, re.MULTILINE))
    assert len(told) == 6
    shown = {name for query in queries(load(FOLDER / "grafana" / "demand.json")) for name in told if name in query.expr}
    assert told - shown == set()


def test_what_a_site_is_judged_by_is_on_a_panel() -> None:
    """Queue time by class and queue, use by pool and model, failures, wasted work, fragments, start times."""
    shown = " ".join(
        query.expr for name in ("queue", "showback") for query in queries(load(FOLDER / "grafana" / f"{name}.json"))
    )
    judged = (
        "class_started_wait_seconds",
        "pool_gpu_utilization_ratio",
        "failed_jobs",
        "ended_jobs",
        "start_coverage_ratio",
    )
    packing = ("fragmentation_gpus", "largest_gang_gpus", "queue_share", "queue_stand_gpus", "charged_money")
    assert [name for name in (*judged, *packing) if f"fleetcast_{name}{{" not in shown] == []
    assert all(
        f'kind="{kind}"' in shown
        for kind in ("preempted", "lost", "idle", "used", "granted", "waited", "borrowed", "lent")
    )


def test_a_band_is_filled_down_to_a_line_that_there_is() -> None:
    panels = load(FOLDER / "grafana" / "demand.json")["panels"]
    filled = 0
    for panel in (panel for panel in panels if panel["type"] == "timeseries"):
        names = {target["legendFormat"] for target in panel["targets"]}
        for override in panel["fieldConfig"]["overrides"]:
            below = [row["value"] for row in override["properties"] if row["id"] == "custom.fillBelowTo"]
            assert {override["matcher"]["options"], *below} <= names, panel["title"]
            filled += len(below)
    assert filled == 3


def test_grafana_finds_what_is_provisioned() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    mounts = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    provider = yaml.safe_load((FOLDER / "provisioning" / "dashboards" / "fleetcast.yml").read_text())["providers"][0]
    assert mounts["./dashboards/grafana"] == provider["options"]["path"]
    assert mounts["./dashboards/provisioning"] == "/etc/grafana/provisioning"
