"""The YAML of pages on systems that cannot be had here agrees with what our adapter writes and with their contracts."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fleetcast.fleet.nodes import FAILURE_EXPECTED
from fleetcast.schedulers.bands import HIGH, LEVELS
from fleetcast.schedulers.nodes import CONDITION, FEATURE, LABEL, MARK, SLINKY, TAINT, NodeMarks
from tests.docs.pages import blocks_of
from tests.schedulers.small_fleet import weather

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "schedulers"
SCHEMA = ROOT / "deploy" / "helm" / "fleetcast" / "values.schema.json"
ACTIONS = (
    "NONE COMPONENT_RESET CONTACT_SUPPORT RUN_FIELDDIAG RESTART_VM RESTART_BM REPLACE_VM RUN_DCGMEUD RESTART_APP CUSTOM"
)
HEALTH_EVENT = {"agent", "checkName", "componentClass", "nodeName", "isFatal", "isHealthy", "message", "errorCode"}
HEALTH_EVENT |= {"entitiesImpacted", "recommendedAction", "customRecommendedAction", "generatedTimestamp", "version"}


def yaml_of(page: str) -> list[Any]:
    return [yaml.safe_load(block.code) for block in blocks_of(PAGES / page) if block.language == "yaml"]


def marks(effect: str = "", *, slinky: bool = False) -> dict[str, str | None]:
    """What a node of high risk gets, by field."""
    given = weather({"n041": 0.81}, reasons={"n041": "GPU 3: XID 63 twice"}, causes={"n041": "xid"})
    written = list(NodeMarks(effect, slinky).wishes(given, {"n041": {}}))
    assert {write.why for write in written} == {"risk 81% within 1 h: GPU 3: XID 63 twice"}
    return {write.field: write.value for write in written}


def test_slinky_is_told_what_the_page_shows() -> None:
    operator, node = yaml_of("slinky.md")
    assert operator == {"propagatedNodeConditions": [FAILURE_EXPECTED]}
    written = marks(slinky=True)
    assert node["metadata"]["annotations"] == {SLINKY: written[FEATURE]}
    assert node["metadata"]["labels"] == {MARK: written[LABEL]}
    status, _, reason = str(written[CONDITION]).partition(" ")
    sentence = f"slurm-operator: ({reason}: risk 81% within 1 h: GPU 3: XID 63 twice)"
    text = (PAGES / "slinky.md").read_text(encoding="utf-8")
    assert status == "True"
    assert sentence in text
    asked = re.findall(r"--constraint=k8s/(\w+)", text)
    assert set(asked) <= {f"risk_{level}" for level in LEVELS}


def test_nvsentinel_looks_at_the_condition_that_is_written() -> None:
    values, fault = yaml_of("nvsentinel.md")
    (policy,) = values["kubernetes-object-monitor"]["policies"]
    assert policy["resource"] == {"group": "", "version": "v1", "kind": "Node"}
    assert f'c.type == "{FAILURE_EXPECTED}" && c.status == "True"' in policy["predicate"]["expression"]
    assert set(policy["healthEvent"]) == {"componentClass", "isFatal", "message", "recommendedAction", "errorCode"}
    assert policy["healthEvent"]["recommendedAction"] in ACTIONS.split()
    event = fault["spec"]["healthEvent"]
    assert (fault["apiVersion"], fault["kind"]) == ("nvsentinel.dgxc.nvidia.com/v1", "ExternalFault")
    assert set(event) == HEALTH_EVENT
    assert (event["recommendedAction"], event["customRecommendedAction"]) == ("CUSTOM", "external-remediation")
    assert event["entitiesImpacted"] == [{"entityType": "Node", "entityValue": event["nodeName"]}]


def test_kai_steers_by_the_label_and_the_taint_that_are_written() -> None:
    (pod,) = yaml_of("kai.md")
    written = marks("NoSchedule")
    (preferred,) = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (wanted,) = preferred["preference"]["matchExpressions"]
    assert (wanted["key"], wanted["operator"]) == (MARK, "NotIn")
    assert set(wanted["values"]) < set(LEVELS)
    assert written[LABEL] in wanted["values"]
    (tolerated,) = pod["spec"]["tolerations"]
    assert (tolerated["key"], written[TAINT]) == (MARK, f"{HIGH}:{tolerated['effect']}")
    assert re.fullmatch(r"\d+(s|m|h)", pod["metadata"]["annotations"]["kai.scheduler/preemption-delay"])
    assert pod["spec"]["schedulerName"] == "kai-scheduler"


@pytest.mark.parametrize("values", yaml_of("helm.md"))
def test_the_values_that_the_guide_shows_are_ones(values: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(values)
