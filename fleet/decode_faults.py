"""Explanations, in plain words, of why a decoded document does not fit a struct.

`msgspec` detects that a document does not fit. This module walks through the document and the
struct's type together. For each wrong place it states the value there, the values that are allowed, and
the key that was probably meant. Every message about a wrong body, file or option comes from here, so that
no user reads a library's messages.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import inspect

from fleetcast.fleet.spelling import find_nearest_names
from fleetcast.fleet.type_words import describe_type, format_choices, list_choices

Path = tuple[str | int, ...]
SHOWN_CHARACTERS = 80
MOST_KEYS = 50  # that a message lists
MISSING: Final = msgspec.UNSET
LABELS = ("unknown_key", "missing_field", "wrong_type", "bad_value", "out_of_range")


@dataclass(frozen=True, slots=True)
class Fault:
    """One wrong place of a document.

    label: one of LABELS. value: the value at that place, MISSING if there is none. expected: what the
    place must hold, in words.
    """

    path: Path
    label: str
    why: str
    value: Any = MISSING
    expected: str = ""

    @property
    def field(self) -> str:
        """The path as a user writes it: `gang.min`, `ranks[0].node`."""
        return format_path(self.path)

    @property
    def sentence(self) -> str:
        return f"{self.field}: {self.why}" if self.path else self.why


def format_path(path: Path) -> str:
    """Format a path of keys and indices as a user writes it.

    >>> format_path(("queue", "research/nlp", "weight")), format_path(("reservation", 0, "to"))
    ('queue."research/nlp".weight', 'reservation[0].to')
    """
    words = ""
    for part in path:
        if isinstance(part, int):
            words += f"[{part}]"
        else:
            words += f".{part}" if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'."{part}"'
    return words.removeprefix(".")


def format_value(value: object) -> str:
    """Format a value for a message. Text is quoted, and long values are cut.

    >>> format_value("x"), format_value(True), format_value(None)
    ("'x'", 'true', 'null')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    is_huge = isinstance(value, int) and value.bit_length() > 1000
    text = "a number of hundreds of digits" if is_huge else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"


def suggest_key(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown key: the nearest known key, or all known keys.

    >>> suggest_key("weigth", ["weight", "limit"]), suggest_key("colour", ["weight", "limit"])
    ('; did you mean weight?', '; there are weight, limit')
    """
    found = find_nearest_names(name, known, 1)
    if found:
        return f"; did you mean {found[0]}?"
    more = f" and {len(known) - MOST_KEYS} more" if len(known) > MOST_KEYS else ""
    return f"; there are {', '.join(known[:MOST_KEYS])}{more}" if known else "; it has no keys"


def find_first_fault(
    error: Exception, kind: Any, document: object, *, strict: bool = True, toml: bool = False
) -> Fault:
    """Return the first fault of a document that `msgspec` refused with `error` for the type `kind`."""
    first = next(find_document_faults(kind, document, strict=strict, toml=toml), None)
    return first or _make_check_fault(error, document)


def _make_check_fault(error: Exception, document: object) -> Fault:
    """Return the fault that a struct's own check found. Its message comes from our code, not from msgspec."""
    place = re.search(r" - at `\$\.?([^`]*)`$", str(error))
    path = tuple(place[1].split(".")) if place and place[1] and "[" not in place[1] else ()
    if "out of range" in str(error):
        return Fault(path, "out_of_range", "holds a number that is out of range")
    return Fault(path, "bad_value", str(error.__cause__) if error.__cause__ else "does not fit", document)


def explain_json_error(error: Exception) -> str:
    """Explain why bytes are not valid JSON or MessagePack.

    >>> explain_json_error(msgspec.DecodeError("JSON is malformed: trailing comma in object (byte 7)"))
    'trailing comma in object (byte 7)'
    """
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x} at {error.start} is not UTF-8"
    if isinstance(error, msgspec.ValidationError):
        return _make_check_fault(error, None).sentence
    text = str(error).removeprefix("JSON is malformed: ").removeprefix("MessagePack data is malformed: ")
    return "it ends too early" if "truncated" in text else text


def explain_decode_error(error: Exception, decode: Any, data: bytes | msgspec.Raw) -> str:
    """Explain why `decode` refused JSON bytes: their first fault, or the reason why they are not valid JSON."""
    if not isinstance(error, msgspec.ValidationError):
        return explain_json_error(error)
    try:
        return find_first_json_fault(error, decode, data).sentence
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as broken:
        return explain_json_error(broken)


def find_first_json_fault(error: msgspec.ValidationError, decode: Any, data: bytes | msgspec.Raw) -> Fault:
    """Return the first fault of JSON bytes that a decoder refused with `error`.

    Raises the same errors as `find_json_faults`.
    """
    return next(find_json_faults(error, decode, data))


def find_json_faults(error: msgspec.ValidationError, decode: Any, data: bytes | msgspec.Raw) -> Iterator[Fault]:
    """Yield the faults, at least one, of JSON bytes that a decoder refused with `error`.

    decode: a type, a `msgspec.json.Decoder`, or the `decode` method of one. Raises the decoder's error if the
    rest of the bytes is not valid JSON.
    """
    decoder = getattr(decode, "__self__", decode)
    is_decoder = isinstance(decoder, msgspec.json.Decoder)
    kind, strict = (decoder.type, decoder.strict) if is_decoder else (decode, True)
    try:
        document = msgspec.json.decode(data)
    except msgspec.ValidationError as broken:  # a number that nothing can hold
        yield _make_check_fault(error if "out of range" in str(error) else broken, None)
        return
    found = find_document_faults(kind, document, strict=strict)
    first = next(found, None)
    yield first or _make_check_fault(error, document)
    yield from found


def find_document_faults(kind: Any, document: object, *, strict: bool = True, toml: bool = False) -> Iterator[Fault]:
    """Yield every fault of a document, in order.

    strict: text does not count as a number. toml: describe types in TOML's words.
    """
    return _Walk(strict, toml).find_faults(_type_info(kind), document, ())


_type_info: Callable[[Any], inspect.Type] = lru_cache(maxsize=512)(inspect.type_info)


class _Walk:
    """A walk through a document and its type at the same time. It yields the places where they disagree."""

    def __init__(self, strict: bool, toml: bool) -> None:
        self._strict, self._toml = strict, toml

    def _describe_type(self, kind: inspect.Type) -> str:
        return describe_type(kind, self._toml)

    def _make_type_fault(self, kind: inspect.Type, value: Any, path: Path, label: str = "wrong_type") -> Fault:
        words = self._describe_type(kind)
        return Fault(path, label, f"is {format_value(value)}, must be {words}", value, words)

    def find_faults(self, kind: inspect.Type, value: Any, path: Path) -> Iterator[Fault]:
        match kind:
            case inspect.UnionType(types=types):
                return self._find_union_faults(kind, types, value, path)
            case inspect.StructType():
                return self._find_struct_faults(kind, value, path)
            case inspect.DictType():
                return self._find_dict_faults(kind, value, path)
            case (
                inspect.ListType(item_type=item)
                | inspect.VarTupleType(item_type=item)
                | inspect.SetType(item_type=item)
                | inspect.FrozenSetType(item_type=item)
            ):
                return self._find_list_faults(kind, item, value, path)
            case inspect.TupleType(item_types=items):
                return self._find_tuple_faults(kind, items, value, path)
        return self._find_leaf_faults(kind, value, path)

    def _find_union_faults(
        self, kind: inspect.Type, types: Sequence[inspect.Type], value: Any, path: Path
    ) -> Iterator[Fault]:
        structs = [one for one in types if isinstance(one, inspect.StructType)]
        if isinstance(value, dict) and len(structs) > 1:
            yield from self._find_tagged_faults(structs, value, path)
            return
        alike = [one for one in types if _has_same_form(one, value)]
        if not alike:
            yield self._make_type_fault(kind, value, path)
            return
        each = [list(self.find_faults(one, value, path)) for one in alike]
        if all(each):
            yield from each[0] if len(each) == 1 else [self._make_type_fault(kind, value, path)]

    def _find_tagged_faults(
        self, structs: Sequence[inspect.StructType], value: Mapping[str, Any], path: Path
    ) -> Iterator[Fault]:
        key = structs[0].tag_field or "type"
        tags = {one.tag: one for one in structs}
        place, choice = (*path, key), format_choices([*map(str, tags)])
        if key not in value:
            yield Fault(place, "missing_field", f"is missing, must be {choice}", expected=choice)
        elif not isinstance(value[key], str | int) or value[key] not in tags:
            label = "bad_value" if isinstance(value[key], str) else "wrong_type"
            near = _suggest_nearest(value[key], [*map(str, tags)])
            yield Fault(place, label, f"is {format_value(value[key])}, must be {choice}{near}", value[key], choice)
        else:
            yield from self._find_struct_faults(tags[value[key]], value, path)

    def _find_struct_faults(self, kind: inspect.StructType, value: Any, path: Path) -> Iterator[Fault]:
        if not isinstance(value, dict):
            yield self._make_type_fault(kind, value, path)
            return
        known = {one.encode_name: one for one in kind.fields}
        for key, inner in value.items():
            if key in known:
                yield from self.find_faults(known[key].type, inner, (*path, key))
            elif kind.forbid_unknown_fields and key != kind.tag_field:
                why = f"no such key{suggest_key(key, [*known])}"
                yield Fault((*path, key), "unknown_key", why, inner, "no such key")
        for name, one in known.items():
            if one.required and name not in value:
                words = self._describe_type(one.type)
                yield Fault((*path, name), "missing_field", f"is missing, must be {words}", expected=words)

    def _find_dict_faults(self, kind: inspect.DictType, value: Any, path: Path) -> Iterator[Fault]:
        if not isinstance(value, dict):
            yield self._make_type_fault(kind, value, path)
            return
        for key, inner in value.items():
            for fault in self.find_faults(kind.key_type, key, path):
                why = f"is no key here: must be {fault.expected}{_suggest_nearest(key, list_choices(kind.key_type))}"
                yield Fault((*path, key), "bad_value", why, key, fault.expected)
            yield from self.find_faults(kind.value_type, inner, (*path, key))

    def _find_list_faults(self, kind: Any, item: inspect.Type, value: Any, path: Path) -> Iterator[Fault]:
        if not isinstance(value, list | tuple):
            yield self._make_type_fault(kind, value, path)
            return
        most, least = kind.max_length, kind.min_length or 0
        if most is not None and len(value) > most:
            yield Fault(path, "out_of_range", f"has {len(value)} entries, at most {most}", expected=f"at most {most}")
        if len(value) < least:
            yield Fault(
                path, "out_of_range", f"has {len(value)} entries, at least {least}", expected=f"at least {least}"
            )
        for place, inner in enumerate(value):
            yield from self.find_faults(item, inner, (*path, place))

    def _find_tuple_faults(
        self, kind: inspect.Type, items: Sequence[inspect.Type], value: Any, path: Path
    ) -> Iterator[Fault]:
        if not isinstance(value, list | tuple):
            yield self._make_type_fault(kind, value, path)
        elif len(value) != len(items):
            count = f"a list of {len(items)}"
            yield Fault(path, "wrong_type", f"has {len(value)} entries, must be {count}", value, count)
        else:
            for place, (item, inner) in enumerate(zip(items, value, strict=True)):
                yield from self.find_faults(item, inner, (*path, place))

    def _find_leaf_faults(self, kind: Any, value: Any, path: Path) -> Iterator[Fault]:
        match kind:
            case inspect.AnyType() | inspect.RawType() | inspect.CustomType():
                return
            case inspect.LiteralType(values=values):
                allowed: Sequence[Any] = values
            case inspect.EnumType(cls=cls):
                allowed = [member.value for member in cls]
            case _:
                allowed = ()
        if allowed:
            if value not in allowed or isinstance(value, bool):
                label = "bad_value" if type(value) is type(allowed[0]) else "wrong_type"
                near, words = _suggest_nearest(value, [*map(str, allowed)]), format_choices(allowed)
                yield Fault(path, label, f"is {format_value(value)}, must be {words}{near}", value, words)
        elif not _has_same_form(kind, value) and (self._strict or not _is_readable_as(kind, value)):
            yield self._make_type_fault(kind, value, path)
        elif not _is_within_bounds(kind, value):
            yield self._make_type_fault(kind, value, path, "out_of_range")
        elif isinstance(kind, inspect.DateTimeType | inspect.DateType) and not _is_readable_as(kind, value):
            yield self._make_type_fault(kind, value, path, "bad_value")


def _suggest_nearest(value: object, known: Sequence[str]) -> str:
    found = find_nearest_names(value, known, 1) if isinstance(value, str) else []
    return f"; did you mean {found[0]}?" if found else ""


_PYTHON: dict[type, tuple[type, ...]] = {
    inspect.IntType: (int,),
    inspect.FloatType: (int, float),
    inspect.StrType: (str,),
    inspect.NoneType: (type(None),),
    inspect.DictType: (dict,),
    inspect.StructType: (dict,),
    inspect.ListType: (list, tuple),
    inspect.VarTupleType: (list, tuple),
    inspect.TupleType: (list, tuple),
    inspect.SetType: (list, tuple),
    inspect.FrozenSetType: (list, tuple),
    inspect.BytesType: (str, bytes),
}


def _has_same_form(kind: inspect.Type, value: Any) -> bool:
    """Return whether a value has the type's form, such as text or a list, whatever its bounds."""
    match kind:
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.LiteralType(values=values):
            return any(type(one) is type(value) for one in values)
        case inspect.EnumType(cls=cls):
            return any(type(one.value) is type(value) for one in cls)
        case inspect.DateTimeType() | inspect.DateType():
            return isinstance(value, str) or hasattr(value, "isoformat")
    forms = _PYTHON.get(type(kind))
    return forms is None or (isinstance(value, forms) and not isinstance(value, bool))


_LEAVES: dict[type, Any] = {inspect.IntType: int, inspect.FloatType: float, inspect.BoolType: bool}


def _is_readable_as(kind: inspect.Type, value: Any) -> bool:
    """Return whether `msgspec` can read a text as this type."""
    from datetime import date, datetime

    python = _LEAVES.get(type(kind)) or {inspect.DateTimeType: datetime, inspect.DateType: date}.get(type(kind))
    if python is None:
        return False
    try:
        msgspec.convert(value, python, strict=False)
    except msgspec.ValidationError:
        return False
    return True


def _is_within_bounds(kind: Any, value: Any) -> bool:
    if isinstance(kind, inspect.StrType):
        size = len(value)
        return (kind.min_length or 0) <= size <= (math.inf if kind.max_length is None else kind.max_length) and (
            kind.pattern is None or re.search(kind.pattern, value) is not None
        )
    if not isinstance(kind, inspect.IntType | inspect.FloatType) or isinstance(value, str):
        return True
    return (
        (kind.gt is None or value > kind.gt)
        and (kind.ge is None or value >= kind.ge)
        and (kind.lt is None or value < kind.lt)
        and (kind.le is None or value <= kind.le)
    )
