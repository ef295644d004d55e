"""The source "kernel_log": follows kernel log files (paths or globs) and delivers node events.

The first of these that is known decides the node of a line:

1. the name before `=` (`n7=/mnt/n7/dmesg*`)
2. the text in place of `{node}`
3. the option `node`
4. the host that the line names
5. for lines of dmesg, which name no host: the host on which this process runs

`utc_offset_s`: the offset from UTC of times without a time zone.
"""

import asyncio
import glob
import logging
import platform
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.ingest.kernel_log.events import KernelReader
from fleetcast.ingest.kernel_log.log_files import READ_BYTES, LogFile
from fleetcast.ingest.node_names import check_name
from fleetcast.ingest.source import Batch, Source, read_options
from fleetcast.ingest.tally import RunningTally

logger = logging.getLogger(__name__)

LONGEST_POLL_S = 3600.0  # wall
SCAN_S = 5.0  # wall; how often globs are looked up
MOST_FILES = 20_000
FILES_A_TURN = 500  # some ten milliseconds of the loop, where none has anything new
MAX_UTC_OFFSET_S = 86_399.0
NODE = "{node}"
_named = re.compile(r"([^/=\s]{1,253})=(.+)")


class KernelLogOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    paths: list[str]
    name: str = "kernel_log"
    node: str = ""
    poll_s: float = 0.2  # wall
    utc_offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One entry of the option `paths`: a glob, and the way in which its files name their node."""

    glob: str
    node: str
    node_of: re.Pattern[str] | None

    @classmethod
    def parse(cls, entry: str, node: str) -> "_Pattern":
        named = _named.fullmatch(entry)
        if named is not None:
            return cls(named[2], check_name(named[1]), None)
        if NODE not in entry:
            return cls(entry, check_name(node) if node else "", None)
        head, _, tail = entry.partition(NODE)
        if NODE in tail:
            raise ConfigError(f"pipeline.sources kernel_log: paths {entry!r}: expected {NODE} once")
        shape = f"{_translate_glob(head)}([^/]+?){_translate_glob(tail)}"
        return cls(f"{head}*{tail}", "", re.compile(shape))

    def find_files(self) -> Iterator[tuple[str, str]]:
        """Yield (path, node) of the matching files that exist now."""
        for path in sorted(glob.glob(self.glob)):
            if self.node_of is None:
                yield path, self.node
            elif (found := self.node_of.fullmatch(path)) is not None:
                yield path, found[1]


def _translate_glob(pattern: str) -> str:
    """Convert a glob into a regular expression whose `*` and `?` match within one folder."""
    special = {"*": "[^/]*", "?": "[^/]"}
    return "".join(special.get(letter) or re.escape(letter) for letter in pattern)


@dataclass(slots=True)
class _FollowedFile:
    file: LogFile
    reader: KernelReader


class KernelLogSource(Source):
    """The source `kernel_log`.

    Its position is the offset in each followed file, and the time at which the node of each file
    booted.
    """

    def __init__(self, entities: Entities, clock: Clock, options: Mapping[str, Any]) -> None:
        given = read_options("kernel_log", options, KernelLogOptions)
        if not given.paths or not all(given.paths):
            raise ConfigError("pipeline.sources kernel_log: paths: expected at least one file or glob")
        if any("\0" in path for path in given.paths):
            raise ConfigError(f"pipeline.sources kernel_log: paths {given.paths!r}: a path holds no NUL")
        if not 0 < given.poll_s <= LONGEST_POLL_S:
            expected = f"expected more than 0, at most {LONGEST_POLL_S:g}"
            raise ConfigError(f"pipeline.sources kernel_log: poll_s = {given.poll_s}: {expected}")
        if not abs(given.utc_offset_s) <= MAX_UTC_OFFSET_S:
            raise ConfigError(
                f"pipeline.sources kernel_log: utc_offset_s = {given.utc_offset_s}: expected less than a day"
            )
        self.name = given.name
        self._options = given
        self._patterns = [_Pattern.parse(entry, given.node) for entry in given.paths]
        self._clock = clock
        self._followed: dict[str, _FollowedFile] = {}
        self._places: dict[str, Any] = {}
        self._scanned_s = -SCAN_S
        self._rates: deque[tuple[float, int]] = deque(maxlen=64)
        self._bad = 0
        self._turn = 0
        self._read_since_rest = 0  # files since the last rest
        self._unreadable: set[str] = set()
        self._nameless: set[str] = set()  # files whose folder is no name of a node
        self._absent: set[str] = set()  # entries that match nothing
        self._closed = False

    async def next(self) -> Batch:
        while not self._closed:
            batch, more = self._read_batch()
            if batch.get_tally().all:
                return batch
            await asyncio.sleep(0.0 if more else self._options.poll_s)
        raise StopAsyncIteration

    def position(self) -> dict[str, Any]:
        here = {
            path: {
                **row.file.position(),
                "boot_ms": row.reader.boot_ms,
                "boot_stamp_ms": row.reader.last_boot_stamp_ms,
            }
            for path, row in self._followed.items()
        }
        return {**self._places, **here}

    def seek(self, position: Mapping[str, Any]) -> None:
        self._close_files()
        self._places = dict(position)
        self._scanned_s = -SCAN_S

    def health(self) -> dict[str, Any]:
        """Return the source's row of the ingestion document.

        `up`: at least one file exists, and all files can be read. `files`: the number of followed files.
        `backlog_bytes`: the number of unread bytes in these files.
        """
        now_s = time.monotonic()
        recent = [row for row in self._rates if row[0] > now_s - 60.0]
        backlog = self.backlog_bytes()
        return {
            "name": self.name,
            "kind": "kernel_log",
            "rate_per_s": round(sum(count for _, count in recent) / 60.0, 2),
            "lag_s": 0.0 if not backlog else None,
            "bad": self._bad,
            "up": bool(self._followed) and not self._unreadable,
            "files": len(self._followed),
            "unreadable": len(self._unreadable),
            "lost": sum(row.file.lost for row in self._followed.values()),
            "backlog_bytes": backlog,
        }

    def backlog_bytes(self) -> int:
        """Return the number of unread bytes in the files that can be read."""
        return sum(row.file.backlog_bytes() for path, row in self._followed.items() if path not in self._unreadable)

    async def close(self) -> None:
        self._closed = True
        self._close_files()

    def _close_files(self) -> None:
        for row in self._followed.values():
            row.file.close()
        self._followed.clear()

    def _read_batch(self) -> tuple[Batch, bool]:
        """Read about a quarter of a megabyte of new lines from the files in turn.

        Returns the batch, and whether there may be more lines now.
        """
        self._follow_new_files()
        events, bad, room, tally = [], [], READ_BYTES, RunningTally()
        turn = list(self._followed)
        turn = turn[self._turn % max(1, len(turn)) :] + turn[: self._turn % max(1, len(turn))]
        for path in turn[:FILES_A_TURN]:
            row = self._followed[path]
            lines = self._read_lines(path, row.file)
            if lines:
                found, errors = row.reader.read(lines, self._clock.now_ms())
                events += found
                bad += errors
                tally.add_tally(row.reader.tally)
            room -= sum(map(len, lines))
            self._turn += 1
            self._read_since_rest += 1
            if room <= 0:
                break
        self._bad += len(bad)
        if events:
            self._rates.append((time.monotonic(), len(events)))
        more = room <= 0 or self._read_since_rest < len(turn)
        self._read_since_rest = self._read_since_rest if more and room > 0 else 0
        return Batch(node_events=tuple(events), bad=tuple(bad), tally=tally.make_tally()), more

    def _read_lines(self, path: str, file: LogFile) -> list[bytes]:
        try:
            lines = file.read()
        except OSError as error:
            if path not in self._unreadable:
                logger.warning("%s: cannot read %s: %s, trying again", self.name, path, error.strerror)
            self._unreadable.add(path)
            file.close()
            return []
        self._unreadable.discard(path)
        return lines

    def _follow_new_files(self) -> None:
        """Start to follow new files. A file that was deleted keeps its position."""
        if time.monotonic() - self._scanned_s < SCAN_S:
            return
        self._scanned_s = time.monotonic()
        for pattern in self._patterns:
            files = list(pattern.find_files())
            self._log_missing_files(pattern.glob, bool(files))
            for path, node in files:
                known = path in self._followed or path in self._nameless
                if not known and len(self._followed) + len(self._nameless) < MOST_FILES:
                    self._add_file(path, node)

    def _log_missing_files(self, pattern: str, is_there: bool) -> None:
        if is_there:
            self._absent.discard(pattern)
        elif pattern not in self._absent:
            self._absent.add(pattern)
            logger.warning("%s: no file %s, looking for it every %.0f s", self.name, pattern, SCAN_S)

    def _add_file(self, path: str, node: str) -> None:
        try:
            whose = check_name(node) if node else ""
        except ConfigError as error:
            self._bad += 1
            self._nameless.add(path)
            logger.warning("%s: %s: %s, leaving it out", self.name, path, RecordError("bad_name", str(error)))
            return
        place = self._places.pop(path, {})
        reader = KernelReader(whose, self._options.utc_offset_s, fallback=platform.node())
        reader.boot_ms = float(place.get("boot_ms", 0.0))
        reader.last_boot_stamp_ms = float(place.get("boot_stamp_ms", -1.0))
        self._followed[path] = _FollowedFile(LogFile(Path(path), place), reader)
