"""A script that writes the chart's values.schema.json, so that Helm refuses wrong or misspelt values.

    python deploy/helm/values_schema.py

The part `config` is made from the configuration's own types and limits. The parts `adapters` and `executors` are
made from the entries of values.yaml. The other parts are defined here.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fleetcast.service.config import ADAPTER_MODES, UNKNOWN_USE, Config  # noqa: E402
from fleetcast.service.config_checks import LIMITS  # noqa: E402

CHART = ROOT / "deploy" / "helm" / "fleetcast"
SCHEMA = CHART / "values.schema.json"
OF_THE_CHART = {  # keys that the chart sets itself
    "api": ("host", "port", "grpc_port", "board", "tls_cert", "tls_key", "client_ca"),
    "adapters": ("adapter", "executor"),
    "external_metrics": ("port", "tls_cert", "tls_key", "client_ca", "names"),
}
SHOWN_ELSEWHERE = ("default", "title", "description")
Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITIES: Schema = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
OPTION: Schema = {"anyOf": [{"type": ["string", "number", "boolean"]}, {"type": "array", "items": TEXT}, TEXTS]}


def make_table_schema(**fields: Schema) -> Schema:
    """Return the schema of an object with these fields and no others."""
    return {"type": "object", "additionalProperties": False, "properties": fields}


def make_array_schema(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def make_enum_schema(*values: str) -> Schema:
    return {"enum": list(values)}


PATH: Schema = {"type": "string", "pattern": "^/"}
RESOURCES = make_table_schema(requests=QUANTITIES, limits=QUANTITIES)
RULE = make_table_schema(
    **{key: make_array_schema(TEXT) for key in ("apiGroups", "resources", "resourceNames", "verbs", "nonResourceURLs")}
)
TOLERATION = make_table_schema(
    key=TEXT,
    operator=make_enum_schema("Exists", "Equal"),
    value=TEXT,
    effect=TEXT,
    tolerationSeconds={"type": "integer"},
)
VALUES = {
    "global": {"type": "object"},  # of a chart that has this one in it
    "image": make_table_schema(
        repository=NAME,
        tag=TEXT,
        pullPolicy=make_enum_schema("Always", "IfNotPresent", "Never"),
        pullSecrets=make_array_schema(NAME),
    ),
    "tokens": make_table_schema(secret=NAME),
    "tls": make_table_schema(secret=TEXT, clients=FLAG),
    "api": make_table_schema(
        host=NAME, port=PORT, grpcPort=PORT, replicas={"type": "integer", "minimum": 0}, resources=RESOURCES
    ),
    "control": make_table_schema(resources=RESOURCES),
    "state": make_table_schema(size=NAME, storageClass=TEXT, whenDeleted=make_enum_schema("Retain", "Delete")),
    "files": {"type": "object", "propertyNames": {"pattern": r"^[\w.-]+$"}, "additionalProperties": TEXT},
    "mounts": make_array_schema(
        {**make_table_schema(secret=NAME, configMap=NAME, path=PATH), "required": ["path"], "maxProperties": 2}
    ),
    "env": make_array_schema({**make_table_schema(name=NAME, value=TEXT, secret=NAME, key=NAME), "required": ["name"]}),
    "serviceAccount": make_table_schema(annotations=TEXTS),
    "rights": make_array_schema({**RULE, "required": ["verbs"]}),
    "nodePolicy": make_table_schema(enabled=FLAG),
    "networkPolicy": make_table_schema(enabled=FLAG, **{"from": make_array_schema({"type": "object"})}),
    "podDisruptionBudget": make_table_schema(enabled=FLAG),
    "serviceMonitor": make_table_schema(
        enabled=FLAG, labels=TEXTS, interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}
    ),
    "withdrawOnDelete": make_table_schema(enabled=FLAG, timeoutSeconds={"type": "integer", "minimum": 1}),
    "nodeSelector": TEXTS,
    "tolerations": make_array_schema(TOLERATION),
    "priorityClassName": TEXT,
    "podAnnotations": TEXTS,
}
OF_ADAPTERS = {  # the fields that an entry of `adapters` or `executors` may have
    "enabled": FLAG,
    "mode": make_enum_schema(*ADAPTER_MODES),
    "options": {"type": "object", "additionalProperties": OPTION},
    "port": PORT,
    "secret": NAME,
    "names": make_array_schema(NAME),
    "apiService": FLAG,
    "caBundle": {"type": "string", "pattern": "^[A-Za-z0-9+/=]*$"},
}


def make_schema() -> Schema:
    """Return the schema of all values."""
    written = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    fields = {**VALUES, "config": _make_config_schema()}
    for table in ("adapters", "executors"):
        entries = {name: _make_adapter_schema(entry) for name, entry in written[table].items()}
        fields[table] = make_table_schema(**entries)
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, **make_table_schema(**{name: fields[name] for name in ("global", *written)})}


def _make_adapter_schema(entry: dict[str, Any]) -> Schema:
    return make_table_schema(**{key: OF_ADAPTERS[key] for key in entry})


def _make_config_schema() -> Schema:
    """Return the schema of `config`: keys of config.toml that the chart does not set, with their limits."""
    made = msgspec.json.schema(Config)
    sections = _simplify_schema(made["$defs"]["Config"], made["$defs"])["properties"]
    del sections["state"]
    for name, (least, most) in LIMITS.items():
        section, _, key = name.partition(".")
        sections[section]["properties"][key] |= {"minimum": least, "maximum": most}
    for key in ("unknown_use", "unheard"):
        sections["placer"]["properties"][key] = make_enum_schema(*UNKNOWN_USE)
    for section, keys in OF_THE_CHART.items():
        fields = sections[section]["properties"] if section in sections else {}
        for key in keys:
            fields.pop(key, None)
    return make_table_schema(**{name: section for name, section in sections.items() if section["properties"]})


def _simplify_schema(part: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a schema with references resolved, and without titles, descriptions and defaults.

    The omitted texts and defaults are already in values.yaml and config.toml.
    """
    if isinstance(part, list):
        return [_simplify_schema(one, definitions) for one in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _simplify_schema(definitions[part["$ref"].rpartition("/")[2]], definitions)
    if "properties" in part:
        inner = {key: _simplify_schema(value, definitions) for key, value in part["properties"].items()}
        needed = {"required": part["required"]} if part.get("required") else {}
        return {**make_table_schema(**inner), **needed}
    return {key: _simplify_schema(value, definitions) for key, value in part.items() if key not in SHOWN_ELSEWHERE}


def format_schema() -> str:
    return json.dumps(make_schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(format_schema(), encoding="utf-8")
