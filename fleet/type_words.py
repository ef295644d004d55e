"""Descriptions of types in plain words, for messages about documents that do not fit them."""

from collections.abc import Sequence
from typing import Any

from msgspec import inspect


def describe_type(kind: inspect.Type, toml: bool = False) -> str:
    """Describe in words which values a type accepts.

    toml: call objects tables, and do not mention null.
    """
    match kind:
        case inspect.UnionType(types=types):
            named = [one for one in types if not (toml and isinstance(one, inspect.NoneType))]
            return " or ".join(dict.fromkeys(describe_type(one, toml) for one in named))
        case inspect.LiteralType(values=values):
            return format_choices(values)
        case inspect.EnumType(cls=cls):
            return format_choices([member.value for member in cls])
        case inspect.IntType():
            return "a whole number" + _describe_bounds(kind)
        case inspect.FloatType() | inspect.DecimalType():
            return "a number" + _describe_bounds(kind)
        case inspect.StrType(max_length=most):
            return "text" if most is None else f"text of at most {most} characters"
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item) | inspect.SetType(item_type=item):
            return f"a list of {_pluralise(item, toml)}"
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)}"
        case inspect.DictType() | inspect.StructType():
            return "a table" if toml else "an object of keys and values"
    return _WORDS.get(type(kind), "something else")


_WORDS: dict[type, str] = {
    inspect.BoolType: "true or false",
    inspect.NoneType: "null",
    inspect.DateTimeType: "a date and time such as 2026-12-01T08:00:00Z",
    inspect.DateType: "a date such as 2026-12-01",
    inspect.BytesType: "text in base64",
    inspect.FrozenSetType: "a list",
}
_PLURALS: dict[type, str] = {
    inspect.StrType: "texts",
    inspect.IntType: "whole numbers",
    inspect.FloatType: "numbers",
    inspect.StructType: "objects",
    inspect.DictType: "objects",
    inspect.AnyType: "values",
    inspect.RawType: "values",
}


def _pluralise(kind: inspect.Type, toml: bool) -> str:
    word = _PLURALS.get(type(kind), "") or describe_type(kind, toml)
    return "tables" if toml and word == "objects" else word


def list_choices(kind: inspect.Type) -> list[str]:
    """Return the values of an enumeration or literal type. Returns an empty list for another type."""
    match kind:
        case inspect.LiteralType(values=values):
            return [str(value) for value in values]
        case inspect.EnumType(cls=cls):
            return [str(member.value) for member in cls]
    return []


def format_choices(values: Sequence[object]) -> str:
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def _describe_bounds(kind: Any) -> str:
    low = [f" above {kind.gt:g}"] if kind.gt is not None else []
    low += [f" of at least {kind.ge:g}"] if kind.ge is not None else []
    high = [f" below {kind.lt:g}"] if kind.lt is not None else []
    high += [f" of at most {kind.le:g}"] if kind.le is not None else []
    return " and".join(low + high)
