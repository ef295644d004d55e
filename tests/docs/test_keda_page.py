"""What the page on KEDA tells an operator to write is what the scaler and the API read."""

from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from fleetcast.models.forecast import QUANTILES
from fleetcast.schedulers.keda import KEYS, read_trigger
from fleetcast.service.api.routes.demand import FILTERS
from fleetcast.service.pipeline.demand.metrics import QUANTILES as SHOWN
from tests.docs.pages import ROOT, blocks_of, text_of

PAGE = ROOT / "docs" / "schedulers" / "keda.md"


def triggers() -> list[dict[str, Any]]:
    things = [yaml.safe_load(block.code) for block in blocks_of(PAGE) if block.language == "yaml"]
    return [row for thing in things for row in thing.get("triggers", thing.get("spec", {}).get("triggers", ()))]


def test_the_trigger_is_one_that_the_scaler_reads() -> None:
    (external,) = (row["metadata"] for row in triggers() if row["type"] == "external")
    trigger = read_trigger(external)
    assert (trigger.series, trigger.per_replica, trigger.horizon_s) == (
        ("serve", "inference", "llama", "request_rate", "all"),
        8.0,
        300.0,
    )


def test_every_key_stands_in_the_table() -> None:
    rows = [line for line in text_of(PAGE).splitlines() if line.startswith("| `")]
    assert {key for key in KEYS if any(f"`{key}`" in row.split("|")[1] for row in rows)} == set(KEYS)


def test_the_url_and_the_place_of_the_value_are_right() -> None:
    (asked,) = (row["metadata"] for row in triggers() if row["type"] == "metrics-api")
    names = [name for name, _ in parse_qsl(urlsplit(asked["url"]).query)]
    assert set(names) == {param.name for param in FILTERS}
    assert asked["valueLocation"] == f"series.0.values.{QUANTILES.index(0.9)}.0"


def test_the_quantile_of_the_query_is_one_that_is_shown() -> None:
    (asked,) = (row["metadata"] for row in triggers() if row["type"] == "prometheus" and "fleetcast" in str(row))
    assert 'quantile="0.9"' in asked["query"]
    assert 0.9 in SHOWN
