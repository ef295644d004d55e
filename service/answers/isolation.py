"""The isolation of a GPU, as a scheduler expects it."""

from typing import Any

import msgspec


class IsolationCheck(msgspec.Struct):
    """ok: null where it cannot be seen; reason: what would tell, or what a true rests on."""

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
