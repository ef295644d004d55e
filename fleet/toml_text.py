"""A reader of TOML from people and other programs. Before parsing, a scan limits the cost of the parser.

The parser of the standard library needs quadratic time for a long dotted key, and returns integers
of any length. `read_toml` takes time proportional to the length of each text that it accepts. Its
documents have only 64-bit integers, as TOML requires.
"""

import re
import tomllib
from collections.abc import Iterable
from typing import Any

MOST_CHARACTERS = 4_194_304
MOST_PARTS = 300_000
DEEPEST = 10
MOST_INTEGER = 2**63

_STRING_OR_COMMENT = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5}|\Z)'
    r"|'''(?:[^']|'(?!''))*+(?:'{3,5}|\Z)"
    r'|"(?:[^"\\\n]|\\.)*+(?:"|$)'
    r"|'[^'\n]*+(?:'|$)"
    r"|\#[^\n]*+",
    re.DOTALL | re.MULTILINE,
)
_PART = r"[^\s.,=\[\]{}]++"
_DEEP_KEY = re.compile(rf"(?<![^\s.,=\[\]{{}}]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{DEEPEST}}}")


def read_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text. Raises ValueError with the reason if it is not TOML or exceeds a limit."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text):,} characters, at most {MOST_CHARACTERS:,} are read")
    bare = _STRING_OR_COMMENT.sub("s", text)
    parts = sum(bare.count(sign) for sign in "=,.{[[\n")  # a table costs what two values cost
    if parts > MOST_PARTS:
        raise ValueError(f"{parts:,} lines, keys, values and tables, at most {MOST_PARTS:,} are read: split the file")
    if deep := _DEEP_KEY.search(bare):
        raise ValueError(f"the key {deep[0][:40]!r} has more than {DEEPEST} parts: nest less deep")
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} tables and arrays in each other: nest less deep") from None
    _check_values(document)
    return document


def _check_values(document: dict[str, Any]) -> None:
    """Check that no integer exceeds 64 bits and no nesting is too deep. Raises ValueError."""
    level: list[Any] = [document]
    for _ in range(DEEPEST + 1):
        inner: list[Any] = []
        for table in level:
            values: Iterable[Any] = table.values() if isinstance(table, dict) else table
            for value in values:
                if isinstance(value, dict | list):
                    inner.append(value)
                elif type(value) is int and not -MOST_INTEGER <= value < MOST_INTEGER:
                    raise ValueError(f"an integer has {value.bit_length()} bits: TOML's have at most 64")
        if not inner:
            return
        level = inner
    raise ValueError(f"more than {DEEPEST} tables and arrays in each other: nest less deep")
