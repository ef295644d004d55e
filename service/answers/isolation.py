"""The isolation of a GPU, compared with the expectation of a scheduler."""

from typing import Any

import msgspec


class IsolationCheck(msgspec.Struct):
    """The check of one expected field.

    ok: null if it cannot be observed. reason: what would show it, or what a true depends on.
    """

    field: str
    expected: Any
    observed: Any
    ok: bool | None
    as_of_ms: int
    reason: str | None = None


class Isolation(msgspec.Struct):
    as_of_ms: int
    ok: bool | None
    checks: list[IsolationCheck]
    sentence: str
