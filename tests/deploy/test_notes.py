"""The lines of the chart's NOTES.txt for KEDA and for an autoscaler, with every condition true: our answerers answer.

What Helm makes of them for a release: tests/integration/outside/helm/test_notes.py.
"""

import re
from pathlib import Path

import pytest

from tests.deploy.notes import asked_by, forecast_of, snippets, things, trigger_of

NOTES = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "fleetcast" / "templates" / "NOTES.txt"


@pytest.fixture(scope="module")
def lines() -> dict[str, str]:
    text = re.sub(r"^ *\{\{-?[^}]*\}\}\n", "", NOTES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return snippets(re.sub(r"\{\{[^}]*\}\}", "x", text))


def test_what_keda_asks_for_is_forecast(lines: dict[str, str]) -> None:
    trigger = trigger_of(lines["scaledobject.yaml"])
    assert forecast_of(trigger.series).target == "request_rate"
    assert (trigger.per_replica, trigger.horizon_s) == (10.0, 300.0)


def test_kedas_authentication_is_that_of_the_trigger(lines: dict[str, str]) -> None:
    made = things(lines["scaledobject.yaml"])
    (external,) = (row for row in made["ScaledObject"]["spec"]["triggers"] if row["type"] == "external")
    assert external["authenticationRef"] == made["TriggerAuthentication"]["metadata"]


def test_what_the_autoscaler_asks_for_is_forecast(lines: dict[str, str]) -> None:
    assert forecast_of(asked_by(lines["hpa.yaml"])).group == "served"
