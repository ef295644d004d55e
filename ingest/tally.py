"""The tally of a batch: what happened to each record that a source read.

A page's records are its sample lines. The law: read + refused + ignored + unread = all. A *read* record
became a sample or an event, or a part of one. A *refused* one is bad, and its reason is counted elsewhere. An
*ignored* one was understood, and a `SkipRule` skips it. All other records are *unread*.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any

import msgspec

MAX_UNREAD_NAMES = 20


class SkipRule(IntEnum):
    """A rule that skips a record although the record was understood.

    The values begin at 16. The roles of lines (`fleetcast.ingest.pages.page_shape`) use the values
    below, so that one byte can hold either.
    """

    REPEATED = 16  # another record says the same: one GPU under several pods, an aggregate, a storm of one error
    OTHER_PART = 17  # of a device, a CPU mode, a rank or a link that no sample covers
    NOT_USED = 18  # a known record that no forecast needs
    EXPORTER = 19  # about the exporter's own process, or about the scrape
    NO_DATA = 20  # the number that stands for "not available"
    INCOMPLETE = 21  # a part of a sum whose other parts are broken
    NOT_HARDWARE = 22  # a log line that says nothing of the hardware
    OTHER_PROGRAM = 23  # a log line of another program than the kernel


@dataclass(frozen=True, slots=True)
class RecordTally:
    """Counts of records by what happened to them.

    names: the first unread names, each once. unknown_fields: the number of unused fields in read records.
    """

    read: int = 0
    refused: int = 0
    ignored: Mapping[SkipRule, int] = field(default_factory=dict)
    unread: int = 0
    names: tuple[str, ...] = ()
    unknown_fields: int = 0

    @property
    def all(self) -> int:
        return self.read + self.refused + sum(self.ignored.values()) + self.unread

    @classmethod
    def sum(cls, parts: Iterable["RecordTally"]) -> "RecordTally":
        """Return the sum of several tallies."""
        total = RunningTally()
        for part in parts:
            total.add_tally(part)
        return total.make_tally()


_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@lru_cache
def _list_field_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(row.encode_name for row in msgspec.structs.fields(kind))


def count_unknown_fields(record: bytes, kind: type[msgspec.Struct]) -> int:
    """Return the number of fields of a JSON object that its struct does not have. Returns 0 for other JSON.

    >>> class Job(msgspec.Struct):
    ...     id: int
    >>> count_unknown_fields(b'{"id": 7, "colour": "red"}', Job)
    1
    """
    try:
        return len(_keys(record).keys() - _list_field_names(kind))
    except (ValueError, RecursionError):
        return 0


class RunningTally:
    """The sum of tallies since the start of a source."""

    def __init__(self) -> None:
        self._read = self._refused = self._unread = self._unknown_fields = 0
        self._ignored: Counter[SkipRule] = Counter()
        self._names: dict[str, None] = {}

    def add_tally(self, tally: RecordTally) -> None:
        self._read += tally.read
        self._refused += tally.refused
        self._unread += tally.unread
        self._unknown_fields += tally.unknown_fields
        for rule, count in tally.ignored.items():
            self._ignored[rule] += count
        if tally.names and len(self._names) < MAX_UNREAD_NAMES:
            for name in tally.names[: MAX_UNREAD_NAMES - len(self._names)]:
                self._names[name] = None

    def make_tally(self) -> RecordTally:
        return RecordTally(
            self._read, self._refused, dict(self._ignored), self._unread, tuple(self._names), self._unknown_fields
        )

    def make_document(self, pending: RecordTally | None = None) -> dict[str, Any]:
        """Return the sum, including `pending`, as `/v1/ingestion` shows it.

        `all` is the total of the counts.
        """
        tally = self.make_tally() if pending is None else RecordTally.sum((self.make_tally(), pending))
        return {
            "all": tally.all,
            "read": tally.read,
            "refused": tally.refused,
            "ignored": sum(tally.ignored.values()),
            "unread": tally.unread,
            "ignored_by": {rule.name.lower(): count for rule, count in tally.ignored.items()},
            "unread_names": list(tally.names),
            "unknown_fields": tally.unknown_fields,
        }
