"""Kubernetes objects in YAML or JSON, as `kubectl get -o yaml` prints them.

Each value carries its line. YAML is read event by event, so that nesting and size stay bounded.
Aliases are refused, because a few of them can expand to a billion values. Tags are ignored, and every
scalar is text.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fleetcast.schedulers.imports.draft import SourceLine, is_name, parse_number

MOST_BYTES = 16 * 2**20
MOST_VALUES = 1_000_000
DEEPEST_VALUE = 40
NOTHING = (None, "", "{}", "[]")
_SCALE = {
    **{"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18},
    **{f"{name}i": 1024.0 ** (power + 1) for power, name in enumerate("KMGTPE")},
}
_QUANTITY = re.compile(r"(.*?)([numkMGTPE]|[KMGTPE]i)?", re.ASCII)


@dataclass(slots=True)
class LinedValue:
    """A value with its line: a mapping, a list, or the text of a scalar (None for null)."""

    line: int
    held: "dict[str, LinedValue] | list[LinedValue] | str | None"

    def format_value(self) -> str:
        if isinstance(self.held, dict):
            return "{" + ", ".join(f"{key}: {value.format_value()}" for key, value in self.held.items()) + "}"
        if isinstance(self.held, list):
            return "[" + ", ".join(value.format_value() for value in self.held) + "]"
        return "" if self.held is None else self.held


@dataclass(slots=True)
class Fields:
    """The fields of a mapping.

    Reading a field removes it, so the fields that remain are those that were not read.
    """

    file: str
    line: int
    name: str  # of the thing, in messages
    path: str = ""
    held: dict[str, LinedValue] = field(default_factory=dict)
    below: "list[Fields]" = field(default_factory=list)

    def find_line(self, key: str = "") -> SourceLine:
        value = self.held.get(key)
        return SourceLine(self.file, value.line if value else self.line)

    def has_value(self, key: str) -> bool:
        return key in self.held and self.held[key].held is not None

    def pop_text(self, key: str, default: str = "") -> str:
        """Remove and return a scalar. Raises ConfigError for anything else."""
        line, value = self.find_line(key), self.held.pop(key, None)
        if value is None or value.held is None:
            return default
        if not isinstance(value.held, str):
            raise line.make_error(
                f"{self.name}: {self.path}{key} is {value.format_value()[:60]}, must be a text or a number"
            )
        return value.held

    def pop_number(self, key: str, default: float) -> float:
        """Remove and return a quantity (`8`, `500m`, `1k`). Raises ConfigError if it is not a finite number."""
        line, text = self.find_line(key), self.pop_text(key)
        if not text:
            return default
        number = parse_quantity(text)
        if not math.isfinite(number):
            raise line.make_error(f"{self.name}: {self.path}{key} is {text[:40]!r}, must be a number such as 8 or 500m")
        return number

    def pop_amount(self, key: str, default: float, most: float) -> float:
        """Remove and return a quantity from 0 to `most`. Raises ConfigError for any other value."""
        line = self.find_line(key)
        return line.check_amount(f"{self.name}: {self.path}{key}", self.pop_number(key, default), most)

    def pop_table(self, key: str) -> "Fields":
        """Remove and return a mapping, empty if the key is absent. Raises ConfigError for anything else."""
        line, value = self.find_line(key), self.held.pop(key, None)
        if value is None or value.held is None:
            return Fields(self.file, line.line, self.name, f"{self.path}{key}.")
        return self._make_child(value, key)

    def pop_rows(self, key: str) -> "list[Fields]":
        """Remove and return a list of mappings, empty if the key is absent.

        Raises ConfigError for anything else.
        """
        line, value = self.find_line(key), self.held.pop(key, None)
        if value is None or value.held is None:
            return []
        if not isinstance(value.held, list):
            raise line.make_error(f"{self.name}: {self.path}{key} is {value.format_value()[:60]}, must be a list")
        return [self._make_child(row, f"{key}[{number}]") for number, row in enumerate(value.held)]

    def _make_child(self, value: LinedValue, key: str) -> "Fields":
        if not isinstance(value.held, dict):
            why = f"{self.name}: {self.path}{key} is {value.format_value()[:60]}, must be a mapping"
            raise SourceLine(self.file, value.line).make_error(why)
        child = Fields(self.file, value.line, self.name, f"{self.path}{key}.", dict(value.held))
        self.below.append(child)
        return child

    def drop_fields(self, *keys: str) -> None:
        """Remove fields that are not needed, because they do not concern queues."""
        for key in keys:
            self.held.pop(key, None)

    def drop_usual_value(self, key: str, *values: str) -> None:
        """Remove a field if it has one of the usual values."""
        if key in self.held and self.held[key].format_value() in values:
            del self.held[key]

    def list_unread_fields(self) -> Iterator[tuple[str, str]]:
        """Yield (field, value) for each field that was not read."""
        for key, value in self.held.items():
            if value.format_value() not in NOTHING:
                yield re.sub(r"\[\d+\]", "", self.path + key), value.format_value()
        for child in self.below:
            yield from child.list_unread_fields()


@dataclass(frozen=True, slots=True)
class Thing:
    """One Kubernetes object: its identity and its spec."""

    kind: str
    version: str  # with its group: kueue.x-k8s.io/v1beta2
    name: str
    namespace: str
    line: SourceLine
    spec: Fields
    top: Fields  # what stands beside the spec


def parse_quantity(text: str) -> float:
    """Parse a quantity of Kubernetes. Returns NaN if the text is not a quantity.

    >>> [parse_quantity(text) for text in ("8", "500m", "2Ki", "1e3", ".inf")]
    [8.0, 0.5, 2048.0, 1000.0, nan]
    """
    found = _QUANTITY.fullmatch(text.strip())
    return parse_number(found[1]) * _SCALE[found[2] or ""] if found else math.nan


def read_things(file: str, text: str) -> list[Thing]:
    """Return all objects of a file, including those in lists. Raises ConfigError with the line."""
    if len(text) > MOST_BYTES:
        raise SourceLine(file).make_error(f"has {len(text):,} characters, at most {MOST_BYTES:,} are read")
    things = [thing for value in _parse_documents(file, text) for thing in _parse_things(file, value)]
    if not things:
        raise SourceLine(file).make_error("there is no object in it; expected what `kubectl get … -o yaml` prints")
    return things


def _parse_things(file: str, value: LinedValue) -> Iterator[Thing]:
    if value.held is None:
        return
    if not isinstance(value.held, dict):
        why = f"{value.format_value()[:60]!r} is no object; expected what `kubectl get … -o yaml` prints"
        raise SourceLine(file, value.line).make_error(why)
    top = Fields(file, value.line, "object", "", dict(value.held))
    kind, version = top.pop_text("kind"), top.pop_text("apiVersion")
    if not kind:
        raise SourceLine(file, value.line).make_error("an object without a kind")
    if kind.endswith("List") and "items" in top.held:
        items = top.held["items"]
        if not isinstance(items.held, list | None):
            raise SourceLine(file, items.line).make_error(f"items is {items.format_value()[:60]}, must be a list")
        for item in items.held or []:
            yield from _parse_things(file, item)
        return
    top.name = kind
    metadata = top.pop_table("metadata")
    name, namespace = metadata.pop_text("name"), metadata.pop_text("namespace")
    if not name and kind != "Configuration":
        raise SourceLine(file, value.line).make_error(f"{kind} without a name")
    if name and not is_name(name):
        raise SourceLine(file, value.line).make_error(f"{kind} has {name[:60]!r} for a name, which is no name")
    top.name = metadata.name = f"{kind} {name}".strip()
    spec = top.pop_table("spec")
    spec.path = ""
    yield Thing(kind, version, name, namespace, SourceLine(file, value.line), spec, top)


def _parse_documents(file: str, text: str) -> list[LinedValue]:
    import yaml  # imported late: only `fleetcast queues import` needs it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _YamlReader(file).read_documents(yaml.parse(text, Loader=loader), yaml)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise SourceLine(file, mark.line + 1 if mark else 0).make_error(f"no valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise SourceLine(file).make_error(f"no valid YAML: {str(error)[:200]}") from None


class _YamlReader:
    """A reader that builds values from YAML's events, within bounds on their number and depth."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.count = 0
        self.open: list[LinedValue] = []
        self.keys: list[str | None] = []  # of each open mapping the key that waits for its value
        self.documents: list[LinedValue] = []

    def read_documents(self, events: Any, yaml: Any) -> list[LinedValue]:
        for event in events:
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent):
                raise SourceLine(self.file, line).make_error(
                    f"alias *{event.anchor}: aliases are not read, write it out"
                )
            if isinstance(event, yaml.ScalarEvent):
                null = event.implicit[0] and event.value in ("", "~", "null", "Null", "NULL")
                self._put_value(LinedValue(line, None if null else event.value), line)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                self._begin_collection(LinedValue(line, {} if isinstance(event, yaml.MappingStartEvent) else []), line)
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                self.open.pop()
                self.keys.pop()
        return self.documents

    def _begin_collection(self, value: LinedValue, line: int) -> None:
        if len(self.open) >= DEEPEST_VALUE:
            raise SourceLine(self.file, line).make_error(f"nested deeper than {DEEPEST_VALUE} levels")
        self._put_value(value, line)
        self.open.append(value)
        self.keys.append(None)

    def _put_value(self, value: LinedValue, line: int) -> None:
        self.count += 1
        if self.count > MOST_VALUES:
            raise SourceLine(self.file, line).make_error(f"more than {MOST_VALUES:,} values")
        held = self.open[-1].held if self.open else None
        if not self.open:
            self.documents.append(value)
        elif isinstance(held, list):
            held.append(value)
        elif isinstance(held, dict):
            self._put_in_mapping(held, value, line)

    def _put_in_mapping(self, held: dict[str, LinedValue], value: LinedValue, line: int) -> None:
        key = self.keys[-1]
        if key is not None:
            held[key] = value
            self.keys[-1] = None
            return
        if not isinstance(value.held, str | None):
            raise SourceLine(self.file, line).make_error("a key that is no text")
        if (name := value.held or "") in held:
            raise SourceLine(self.file, line).make_error(f"key {name[:60]!r} is there twice")
        self.keys[-1] = name
