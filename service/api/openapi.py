"""The OpenAPI document, made from the route table and the types of request and answer bodies.

Each route has an example.
"""

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from fleetcast.service.http.problems import MEDIA_TYPE, ProblemBody
from fleetcast.service.http.table import ANY_FILE, Param, Row

REFERENCE = "#/components/schemas/{name}"
DESCRIPTION = (
    "Forecasts for GPU fleets: node risk, stragglers, demand, placements. Times are Unix milliseconds (_ms), durations "
    "seconds (_s), ratios 0..1. Every body about the fleet says as_of_ms, and the Age header how old that is. Too "
    "slow a connection gets 408, one too many 503, too large a head 431."
)

Json = dict[str, Any]  # a part of the document

PLAIN: dict[Any, Json] = {
    str: {"type": "string"},
    bytes: {"type": "string", "format": "binary"},
    dict: {"type": "object"},
}
REFUSED = (401, 403, 429)
TOO_MUCH = (413, 503)  # a body, or those of all requests
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "basic": {"type": "http", "scheme": "basic", "description": "any user name; the token is the password"},
}


def make_openapi_document(
    rows: Sequence[Row], version: str, base: Mapping[str, Any] | None = None, *, needs_token: bool = False
) -> Json:
    """Return the OpenAPI 3.1 document of the route table, merged into `base` (FastAPI's document).

    needs_token: whether routes require a token.
    """
    types = list({id(kind): kind for row in rows for kind in (row.answer, *row.body) if _has_schema(kind)}.values())
    schemas, components = msgspec.json.schema_components([*types, ProblemBody], ref_template=REFERENCE)
    schema_of = {id(kind): schema for kind, schema in zip(types, schemas, strict=False)}
    paths: dict[str, Json] = {}
    for row in rows:
        if row.path != ANY_FILE:
            operation = _describe_operation(row, schema_of) | _make_security_requirement(row, needs_token)
            paths.setdefault(_format_path(row.path), {})[row.method.lower()] = operation
    merged = dict(base or {})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Fleetcast", "version": version, "description": DESCRIPTION},
        "paths": {**merged.get("paths", {}), **paths},
        "components": {
            "schemas": {**merged.get("components", {}).get("schemas", {}), **components},
            "securitySchemes": SCHEMES,
        },
    }


def _make_security_requirement(row: Row, needs_token: bool) -> Json:
    """Return the security requirement of a route. An open route has an empty one."""
    if row.is_open:
        return {"security": []}
    ways: list[dict[str, list[str]]] = [] if needs_token else [{}]
    return {"security": [*ways, *({name: [row.required_scope.value]} for name in SCHEMES)]}


def _has_schema(kind: Any) -> bool:
    return kind is not None and kind not in PLAIN


def _format_path(path: str) -> str:
    return path.replace(":path}", "}")


def _describe_operation(row: Row, schema_of: Mapping[int, Any]) -> Json:
    problems = (*row.problems, *((403,) if row.is_open else REFUSED), *(TOO_MUCH if row.body else ()))
    operation: Json = {
        "operationId": _make_operation_id(row),
        "summary": row.summary,
        "tags": [row.tag],
        "parameters": [
            *_describe_path_parameters(row.path),
            *(_describe_parameter(param) for param in row.params or ()),
        ],
        "responses": {
            **_describe_answers(row, schema_of),
            **{str(status): {"description": HTTPStatus(status).phrase} for status in row.empty},
            **{str(status): _describe_problem(status) for status in problems},
        },
    }
    if row.body:
        content = {"schema": _describe_body(row, schema_of), "example": row.body_example}
        operation["requestBody"] = {"required": True, "content": dict.fromkeys(row.takes, content)}
    return operation


def _describe_body(row: Row, schema_of: Mapping[int, Any]) -> Json:
    """Return the schema of a request body.

    If the body has several types, it is one object of any of these types, or an array of such objects.
    """
    kinds = [PLAIN.get(kind) or schema_of[id(kind)] for kind in row.body]
    if len(kinds) == 1:
        only: Json = kinds[0]
        return only
    return {"anyOf": [*kinds, {"type": "array", "items": {"anyOf": kinds}}]}


def _make_operation_id(row: Row) -> str:
    words = re.findall(r"[a-z0-9_]+", _format_path(row.path).removeprefix("/v1"))
    return "_".join([row.method.lower(), *words]) if words else f"{row.method.lower()}_root"


def _describe_answers(row: Row, schema_of: Mapping[int, Any]) -> Json:
    if row.answer is None:
        return {}
    content: Json = {"schema": PLAIN.get(row.answer) or schema_of[id(row.answer)]}
    if row.example is not None:
        content["example"] = row.example
    return {str(row.status): {"description": HTTPStatus(row.status).phrase, "content": {row.media_type: content}}}


def _describe_problem(status: int) -> Json:
    schema = {"$ref": REFERENCE.format(name=ProblemBody.__name__)}
    return {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": schema}}}


def _describe_path_parameters(path: str) -> list[Json]:
    names = re.findall(r"{(\w+)(?::path)?}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _describe_parameter(param: Param) -> Json:
    schema: Json = {"type": {str: "string", int: "integer", float: "number"}[param.kind]}
    for key, value in (("minimum", param.least), ("maximum", param.most), ("default", param.default)):
        if value is not None:
            schema[key] = value
    if param.choices:
        schema["enum"] = list(param.choices)
    return {"name": param.name, "in": "query", "required": False, "description": param.text, "schema": schema}
