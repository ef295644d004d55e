"""The bodies of the answers: every example of a route is what its type says, and holds no key that the type lacks."""

import inspect
from typing import Any

import msgspec
import pytest

from fleetcast.service.api.routes.all import ROWS
from fleetcast.service.http.table import Row

TYPED = [row for row in ROWS if row.example is not None and inspect.isclass(row.answer)]
TYPED = [row for row in TYPED if issubclass(row.answer, msgspec.Struct)]


def held(example: Any, body: Any) -> bool:
    """Whether `body` has all that `example` has; it may have defaults beside it."""
    if isinstance(example, dict):
        return isinstance(body, dict) and all(name in body and held(part, body[name]) for name, part in example.items())
    if isinstance(example, list | tuple):
        return len(example) == len(body) and all(map(held, example, body))
    return bool(example == body)


def test_most_routes_have_a_typed_answer() -> None:
    assert len(TYPED) > 25


@pytest.mark.parametrize("row", TYPED, ids=lambda row: f"{row.method} {row.path}")
def test_a_route_s_example_decodes_strictly_and_loses_nothing(row: Row) -> None:
    body = msgspec.json.decode(msgspec.json.encode(row.example), type=row.answer, strict=True)
    example, again = (msgspec.json.decode(msgspec.json.encode(part)) for part in (row.example, body))
    assert held(example, again)
