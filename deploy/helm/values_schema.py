"""Write the chart's values.schema.json, so that Helm refuses wrong or misspelt values.

    python deploy/helm/values_schema.py

The part `config` is made from the configuration's own types and limits, `adapters` from the entries
of values.yaml. The other parts are defined here.
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
    "adapters": ("adapter",),
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


def table(**fields: Schema) -> Schema:
    """Return the schema of an object with these fields and no others."""
    return {"type": "object", "additionalProperties": False, "properties": fields}


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


PATH: Schema = {"type": "string", "pattern": "^/"}
RESOURCES = table(requests=QUANTITIES, limits=QUANTITIES)
RULE = table(**{key: many(TEXT) for key in ("apiGroups", "resources", "resourceNames", "verbs", "nonResourceURLs")})
TOLERATION = table(
    key=TEXT, operator=one_of("Exists", "Equal"), value=TEXT, effect=TEXT, tolerationSeconds={"type": "integer"}
)
VALUES = {
    "global": {"type": "object"},  # of a chart that has this one in it
    "image": table(
        repository=NAME, tag=TEXT, pullPolicy=one_of("Always", "IfNotPresent", "Never"), pullSecrets=many(NAME)
    ),
    "tokens": table(secret=NAME),
    "tls": table(secret=TEXT, clients=FLAG),
    "api": table(host=NAME, port=PORT, grpcPort=PORT, replicas={"type": "integer", "minimum": 0}, resources=RESOURCES),
    "control": table(resources=RESOURCES),
    "state": table(size=NAME, storageClass=TEXT, whenDeleted=one_of("Retain", "Delete")),
    "files": {"type": "object", "propertyNames": {"pattern": r"^[\w.-]+$"}, "additionalProperties": TEXT},
    "mounts": many({**table(secret=NAME, configMap=NAME, path=PATH), "required": ["path"], "maxProperties": 2}),
    "env": many({**table(name=NAME, value=TEXT, secret=NAME, key=NAME), "required": ["name"]}),
    "serviceAccount": table(annotations=TEXTS),
    "rights": many({**RULE, "required": ["verbs"]}),
    "nodePolicy": table(enabled=FLAG),
    "networkPolicy": table(enabled=FLAG, **{"from": many({"type": "object"})}),
    "podDisruptionBudget": table(enabled=FLAG),
    "serviceMonitor": table(enabled=FLAG, labels=TEXTS, interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}),
    "withdrawOnDelete": table(enabled=FLAG, timeoutSeconds={"type": "integer", "minimum": 1}),
    "nodeSelector": TEXTS,
    "tolerations": many(TOLERATION),
    "priorityClassName": TEXT,
    "podAnnotations": TEXTS,
}
OF_ADAPTERS = {  # the fields that an entry of `adapters` may have
    "enabled": FLAG,
    "mode": one_of(*ADAPTER_MODES),
    "options": {"type": "object", "additionalProperties": OPTION},
    "port": PORT,
    "secret": NAME,
    "names": many(NAME),
    "apiService": FLAG,
    "caBundle": {"type": "string", "pattern": "^[A-Za-z0-9+/=]*$"},
}


def schema() -> Schema:
    """Return the schema of all values."""
    written = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    entries = {name: _adapter(entry) for name, entry in written["adapters"].items()}
    fields = {**VALUES, "config": _config(), "adapters": table(**entries)}
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, **table(**{name: fields[name] for name in ("global", *written)})}


def _adapter(entry: dict[str, Any]) -> Schema:
    return table(**{key: OF_ADAPTERS[key] for key in entry})


def _config() -> Schema:
    """Return the schema of `config`: keys of config.toml that the chart does not set, with their limits."""
    made = msgspec.json.schema(Config)
    sections = _plain(made["$defs"]["Config"], made["$defs"])["properties"]
    del sections["state"]
    for name, (least, most) in LIMITS.items():
        section, _, key = name.partition(".")
        sections[section]["properties"][key] |= {"minimum": least, "maximum": most}
    for key in ("unknown_use", "unheard"):
        sections["placer"]["properties"][key] = one_of(*UNKNOWN_USE)
    for section, keys in OF_THE_CHART.items():
        fields = sections[section]["properties"] if section in sections else {}
        for key in keys:
            fields.pop(key, None)
    return table(**{name: section for name, section in sections.items() if section["properties"]})


def _plain(part: Any, definitions: dict[str, Any]) -> Any:
    """Return a part of a schema with references resolved, and without titles, descriptions and defaults.

    values.yaml and config.toml contain those.
    """
    if isinstance(part, list):
        return [_plain(one, definitions) for one in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _plain(definitions[part["$ref"].rpartition("/")[2]], definitions)
    if "properties" in part:
        inner = {key: _plain(value, definitions) for key, value in part["properties"].items()}
        needed = {"required": part["required"]} if part.get("required") else {}
        return {**table(**inner), **needed}
    return {key: _plain(value, definitions) for key, value in part.items() if key not in SHOWN_ELSEWHERE}


def text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
