"""The records of Slurm's answers: good ones, bad ones, and those in which invalid text was replaced.

People write names, comments and reasons in any encoding. A byte that is not UTF-8, a control character,
half a surrogate pair or a backslash that escapes nothing is replaced, and the record counts. NaN and
infinities are read as unknown.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from fleetcast.fleet.errors import RecordError

Parsed = TypeVar("Parsed")


class ReadRecords(Generic[Parsed]):
    """The good records of an answer, and its errors.

    doubled: ids that occurred more than once although each should occur once. replaced: the number of records
    with replaced text. unknown_fields: the number of unused fields in JSON records.
    """

    __slots__ = ("bad", "doubled", "replaced", "rows", "unknown_fields")

    def __init__(self) -> None:
        self.rows: list[Parsed] = []
        self.bad: list[RecordError] = []
        self.doubled: set[str] = set()
        self.replaced = 0
        self.unknown_fields = 0

    def add_rows(self, make: Callable[[], Iterable[Parsed]]) -> None:
        """Add the rows that `make` returns, or the error that it raises.

        A number that is out of range makes only its own record bad.
        """
        try:
            self.rows += make()
        except RecordError as error:
            self.bad.append(error.with_traceback(None))
        except (ValueError, ArithmeticError) as error:
            self.bad.append(RecordError("out_of_range", f"{type(error).__name__}: {str(error)[:200]}"))

    def parse_json(self, record: bytes, make: Callable[[bytes], Iterable[Parsed]]) -> None:
        """Add the rows that `make` parses from a JSON record.

        If the record is unreadable, it is parsed again with its invalid text replaced.
        """
        errors = len(self.bad)
        self.add_rows(lambda: make(record))
        if len(self.bad) == errors or (mended := replace_invalid_text(record)) is None:
            return
        first = self.bad.pop()
        rows = len(self.rows)
        self.add_rows(lambda: make(mended))
        if len(self.rows) > rows:
            self.replaced += 1
        else:
            self.bad[errors:] = [first]


def replace_invalid_text(record: bytes) -> bytes | None:
    """Return a JSON document with its invalid text replaced.

    Returns None if nothing had to be replaced, or if the result is still not JSON.
    """
    try:
        found = json.loads(
            _escape_backslashes(record.decode("utf-8", "replace")), strict=False, parse_constant=_read_constant_as_none
        )
        mended = json.dumps(found, ensure_ascii=False).encode("utf-8", "replace")
    except (ValueError, RecursionError):
        return None
    return None if _is_valid_json(record) else mended


_ODD_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|())')


def _escape_backslashes(text: str) -> str:
    """Escape each backslash that does not begin a JSON escape, so that it means a backslash."""
    return _ODD_ESCAPE.sub(lambda found: found[0] if found[1] is None else "\\\\", text)


def _read_constant_as_none(constant: str) -> None:
    """Return None for NaN and infinities, so that they count as unknown. JSON does not allow them."""


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _is_valid_json(record: bytes) -> bool:
    try:
        found = json.loads(record.decode("utf-8"), parse_constant=_refuse_constant)
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        return False
    return True


def count_invalid_lines(body: bytes) -> int:
    """Count the lines of a text that are not valid UTF-8."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        return sum(not _is_utf8(line) for line in body.split(b"\n"))
    return 0


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
