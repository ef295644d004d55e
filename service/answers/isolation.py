"""The isolation of a GPU, compared with what the scheduler expects."""

from typing import Any

import msgspec


class IsolationCheck(msgspec.Struct):
    """The comparison of one expected field with the observed value.

    ok: null if the field cannot be observed. reason: why it cannot be observed. For a confirmed field, the
    reason says what limits the evidence. Null if there is nothing to explain.
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
