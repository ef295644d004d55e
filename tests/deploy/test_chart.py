"""The chart without Helm: its values, its schema, its rights. What it renders: tests/integration/outside/helm."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fleetcast.service.doors import ANSWERERS, EXECUTORS, WRITERS

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "fleetcast"
EXAMPLES = ROOT / "examples"
HARMLESS = {"get", "list", "watch", "patch"}
MADE_BY = "made by `python deploy/helm/values_schema.py`: run it"


def document(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


VALUES, RIGHTS = document(CHART / "values.yaml"), document(CHART / "rights.yaml")
TABLES = ("adapters", "executors")
EXAMPLES_OF_RIGHTS = {
    **{f"kubernetes-{name}.yaml": RIGHTS["adapters"][name] for name in ("buffers", "kueue", "nodes")},
    "kubernetes-executor.yaml": RIGHTS["executors"]["kubernetes"],
}
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def refusal(path: str, value: object) -> str:
    """What the schema says when one value is another; empty when nothing. path: `adapters.nodes.mode`."""
    values = json.loads(json.dumps(VALUES))
    *folders, last = path.split(".")
    inner = values
    for name in folders:
        inner = inner.setdefault(name, {})
    inner[last] = value
    return "; ".join(error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(values))


def objects(part: Any) -> list[Any]:
    """Every schema of an object, at any depth."""
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    found = [one for value in inner for one in objects(value)]
    return [*found, part] if isinstance(part, dict) and part.get("type") == "object" else found


def test_the_schema_is_that_of_the_configuration_and_of_the_values() -> None:
    spec = importlib.util.spec_from_file_location("values_schema", CHART.parent / "values_schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (CHART / "values.schema.json").read_text(encoding="utf-8") == module.format_schema(), MADE_BY


def test_the_schema_is_one_and_the_values_of_the_chart_keep_it() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(VALUES)
    assert set(SCHEMA["properties"]) == {"global", *VALUES}


def test_no_object_of_the_schema_takes_what_it_does_not_name() -> None:
    open_ended = [one for one in objects(SCHEMA) if one.get("additionalProperties") in (None, True)]
    assert [one for one in open_ended if one != {"type": "object"}] == []
    assert len(open_ended) == 2  # `global`, and a peer of networkPolicy.from, which is Kubernetes' own type


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("nosuch", 1), ("adapters.nosuch", {}), ("adapters.nodes.nosuch", 1), ("adapters.nodes.mode", "sometimes")),
        *(("config.fleet.nmae", "x"), ("config.nosuch", {}), ("config.api.port", 1), ("config.pipeline.tick_s", -1)),
        *(
            ("config.adapters.adapter", []),
            ("config.adapters.executor", []),
            ("api.port", 70_000),
            ("tls.secret", None),
            ("files", {"a/b": ""}),
        ),
        *(("executors.kubernetes.mode", "act"), ("executors.nosuch", {})),
        *(("rights", [{"verb": ["get"]}]), ("tolerations", [{"kye": "x"}]), ("adapters.keda.mode", "write")),
        *(("config.placer.unknown_use", "sometimes"), ("config.pipeline.sources", [{"uses": "x"}])),
    ],
)
def test_a_value_that_is_none_is_refused(path: str, value: object) -> None:
    assert refusal(path, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("config.fleet.name", "east"), ("config.scrape", {"targets": ["http_sd:http://targets/"], "interval_s": 5})),
        *(("adapters.nodes.options", {"taint": "NoSchedule", "n": 1, "f": 0.5, "b": True, "l": ["a"]}), ("global", {})),
        ("config.pipeline.sources", [{"use": "kafka", "options": {"topics": ["a"]}}]),
        *(("files", {"topology.toml": "x"}), ("env", [{"name": "A", "secret": "s", "key": "k"}])),
        ("mounts", [{"secret": "s", "path": "/run/s"}]),
    ],
)
def test_a_value_that_is_one_is_taken(path: str, value: object) -> None:
    assert refusal(path, value) == ""


def test_every_adapter_has_its_values() -> None:
    adapters = VALUES["adapters"]
    assert [name for name in WRITERS if "mode" not in adapters.get(name, {})] == [], "an entry in values.yaml"
    assert [name for name in ANSWERERS if name not in adapters] == [], "an entry in values.yaml"
    assert {entry["mode"] for entry in adapters.values() if "mode" in entry} == {"observe"}
    assert [name for name, entry in adapters.items() if entry["enabled"]] == ["kube"]


def test_every_executor_of_the_chart_is_built_in_and_off() -> None:
    assert set(VALUES["executors"]) <= set(EXECUTORS)
    assert [entry["mode"] for entry in VALUES["executors"].values() if not entry["enabled"]] == ["observe"]


@pytest.mark.parametrize("table", TABLES)
def test_no_part_may_do_more_than_read_and_patch(table: str) -> None:
    """An executor may also read pods and evict them."""
    assert set(RIGHTS[table]) <= {name for name, entry in VALUES[table].items() if "mode" in entry}
    for rule in (rule for rules in RIGHTS[table].values() for rule in rules):
        assert set(rule) == {"apiGroups", "resources", "verbs"}
        evicts = table == "executors" and rule["resources"] == ["pods/eviction"]
        assert set(rule["verbs"]) <= ({"create"} if evicts else HARMLESS)
        words = ",".join(rule["resources"])
        assert not re.search(r"\*|secrets|serviceaccounts|roles|bindings", words)
        assert "pods" not in words or table == "executors"
        assert "*" not in rule["apiGroups"]


@pytest.mark.parametrize("name", EXAMPLES_OF_RIGHTS)
def test_the_chart_grants_what_the_example_does(name: str) -> None:
    things = [thing for thing in yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")) if thing]
    rules = [rule for thing in things if thing["kind"] == "ClusterRole" for rule in thing["rules"]]
    assert sorted(map(str, EXAMPLES_OF_RIGHTS[name])) == sorted(map(str, rules))


def test_the_chart_has_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = document(CHART / "Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (project["version"], project["version"])
    assert chart["name"] == project["name"]


def test_the_image_runs_as_the_user_that_the_chart_names() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    pod = (CHART / "templates" / "_helpers.tpl").read_text(encoding="utf-8")
    assert re.search(r"^USER (\d+)$", text, re.MULTILINE)[1] == re.search(r"runAsUser: (\d+)", pod)[1]  # type: ignore[index]
