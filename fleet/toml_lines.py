"""A decoder of TOML files. Its errors name the line, the key, the value and the likely correction.

The parser gives no line numbers, so this module finds them in the text.
"""

import re
import tomllib
from typing import TypeVar

import msgspec

from fleetcast.fleet.decode_faults import Path, find_first_fault
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.toml_text import read_toml

LONGEST_LINE = 1_000  # longer lines hold no header or key that a message is about
PLAIN = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
HEADER = re.compile(r"^\s*(\[{1,2})(.+?)\]{1,2}\s*(#.*)?$")
KEY = re.compile(r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
NAMED = re.compile(
    r"(?P<key>[a-z_]\w*(?:\[\d+\])?(?:\.\w+(?:\[\d+\])?)*)"  # placer.max_risk, pipeline.sources[0]
    r"(?: [\w.:-]+?: (?:options\.)?(?P<option>\w+))?"  # slurm: options.interval_s
)
_Table = TypeVar("_Table", bound=msgspec.Struct)


def decode_toml(text: str, kind: type[_Table]) -> _Table:
    """Decode a text as a struct. Raises ConfigError that names the line, the key and the fix."""
    try:
        document = read_toml(text)
    except ValueError as error:
        raise ConfigError(f"not valid TOML: {error}") from None
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        fault = find_first_fault(error, kind, document, toml=True)
        raise ConfigError(f"line {find_nearest_line(find_key_lines(text), fault.path)}: {fault.sentence}") from None


def prepend_line_number(text: str, message: str) -> str:
    r"""Prepend the line number to a message that begins with a key of the text.

    >>> prepend_line_number("[placer]\n\nmax_risk = 5\n", "placer.max_risk = 5: must lie in (0, 1]")
    'line 3: placer.max_risk = 5: must lie in (0, 1]'
    """
    named = NAMED.match(message)
    if named is None:
        return message
    lines, path = find_key_lines(text), parse_key_path(named["key"])
    if path[0] not in {known[0] for known in lines}:
        return message
    if named["option"] and (*path, "options") in lines:
        path = (*path, "options", named["option"])
    return f"line {find_nearest_line(lines, path)}: {message}"


def parse_key_path(key: str) -> Path:
    """Split a key as a user writes it into keys and indices.

    >>> parse_key_path("pipeline.sources[0].use")
    ('pipeline', 'sources', 0, 'use')
    """
    return tuple(int(part[1:-1]) if part[0] == "[" else part for part in re.findall(r"\w+|\[\d+\]", key))


def find_key_lines(text: str) -> dict[Path, int]:
    r"""Return (path of a table or key) → its line, counted from 1.

    The path of the n-th table of a list contains n, counted from 0.

    >>> find_key_lines('[a."b/c"]\nx = 1\n[[d]]\n[[d]]\ny = 2\n')[("d", 1, "y")]
    5
    """
    found: dict[Path, int] = {}
    table: Path = ()
    counts: dict[Path, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST_LINE:
            continue
        if header := HEADER.match(line):
            table = _insert_table_indices(_split_dotted_key(header[2]), counts)
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            found.setdefault(table, number)
        elif key := KEY.match(line):
            found.setdefault((*table, *_split_dotted_key(key[1])), number)
    return found


def _insert_table_indices(names: Path, counts: dict[Path, int]) -> Path:
    """Return the path with an index after each name of a list of tables: that of the list's latest table.

    The last name gets no index.
    """
    path: Path = ()
    for place, name in enumerate(names, 1):
        path = (*path, name)
        if place < len(names) and path in counts:
            path = (*path, counts[path])
    return path


def find_nearest_line(lines: dict[Path, int], path: Path) -> int:
    """Return the line of a path, or of its longest beginning that has a line.

    The line of a list is that of its first table. Returns 1 if no part has a line.
    """
    while path:
        found = lines.get(path) or lines.get((*path, 0))
        if found:
            return found
        path = path[:-1]
    return 1


def _split_dotted_key(dotted: str) -> Path:
    if PLAIN.fullmatch(dotted):
        return tuple(dotted.split("."))
    try:
        value: object = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return (dotted,)
    names: list[str] = []
    while isinstance(value, dict):
        name, value = next(iter(value.items()))
        names.append(name)
    return tuple(names)
