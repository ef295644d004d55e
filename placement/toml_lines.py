"""Find the line of a TOML file that a message is about: the parser tells of none once the file is read."""

import re
import tomllib

LONGEST_LINE = 1_000  # longer lines hold no header or key that a message is about
PLAIN = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
HEADER = re.compile(r"^\s*(\[{1,2})(.+?)\]{1,2}\s*(#.*)?$")
KEY = re.compile(r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")

Path = tuple[str | int, ...]


def lines_of(text: str) -> dict[Path, int]:
    """Where tables and their keys begin, counted from 1. The n-th table of a list has n (from 0) in its path.

    >>> lines_of('[a."b/c"]\\nx = 1\\n[[d]]\\n[[d]]\\ny = 2\\n')[("d", 1, "y")]
    5
    """
    found: dict[Path, int] = {}
    table: Path = ()
    counts: dict[Path, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST_LINE:
            continue
        if header := HEADER.match(line):
            table = _names(header[2])
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            found.setdefault(table, number)
        elif key := KEY.match(line):
            found.setdefault((*table, *_names(key[1])), number)
    return found


def line_at(lines: dict[Path, int], path: Path) -> int:
    """The line of a path, or of the longest part of it that has one; of a list its first table's."""
    while path:
        found = lines.get(path) or lines.get((*path, 0))
        if found:
            return found
        path = path[:-1]
    return 1


def _names(dotted: str) -> Path:
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
