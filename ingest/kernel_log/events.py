"""A converter of kernel log lines into node events, for followed files and pushed lines.

An event is identified by its kind, its device and an interval of five seconds, so a storm of one
error is one event. Its time is the time of the line. If a line states only the time since boot, its
date is inferred from the node's newest line. A time ahead of our clock becomes now. A line from
before 2000, or from ten years ahead, is a bad record.
"""

import contextlib
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.fleet.events import NodeEvent
from fleetcast.ingest.inbox.job_events import FUTURE_LIMIT_MS, YEAR_2000_MS
from fleetcast.ingest.kernel_log.log_lines import DAY_MS, LogLine, parse_log_line
from fleetcast.ingest.kernel_log.messages import TELLING, KernelFinding, MessageReader
from fleetcast.ingest.node_names import check_name
from fleetcast.ingest.tally import RecordTally, SkipRule

SOURCE: Final = "kernel-log"
STORM_MS: Final = 5_000
MESSAGE_CHARACTERS: Final = 1_000
MOST_NODES: Final = 200_000  # that one stream may tell of
ABSURD_MS: Final = 3_650 * DAY_MS  # ahead
MOST_REMEMBERED: Final = 4_096
_HASH_BITS: Final = 20
_HASH_MASK: Final = (1 << _HASH_BITS) - 1


@dataclass(slots=True)
class KernelReader:
    """A reader of one stream of kernel log lines.

    `node`: the node of all lines. If it is empty, each line names its node. `fallback`: the node of lines from a
    ring buffer, which name no node. boot_ms: when the node booted, in Unix ms, 0 until known. `utc_offset_s`: the
    offset from UTC of times without a time zone. tally: counts of the lines of the last call.
    """

    node: str = ""
    utc_offset_s: float = 0.0
    fallback: str = ""
    boot_ms: float = 0.0
    last_boot_stamp_ms: float = -1.0
    repeats: int = 0
    tally: RecordTally = field(default_factory=RecordTally)
    _readers: dict[str, MessageReader] = field(default_factory=dict)
    _last: dict[tuple[str, int], int] = field(default_factory=dict)

    def read(self, lines: Iterable[bytes], now_ms: int) -> tuple[list[NodeEvent], list[RecordError]]:
        """Return the new events in these lines, and the errors of unreadable lines."""
        rows = [row for row in lines if row.strip()]
        self._infer_boot_time(rows, now_ms)
        events, bad = [], []
        ignored = Counter[SkipRule]()
        for row in rows:
            if TELLING.search(row) is None:
                ignored[SkipRule.NOT_HARDWARE] += 1
                continue
            try:
                event = self._make_event(
                    parse_log_line(row.decode("utf-8", "replace"), now_ms, self.utc_offset_s), now_ms
                )
            except RecordError as error:
                bad.append(error.with_traceback(None))
                continue
            if isinstance(event, SkipRule):
                ignored[event] += 1
            elif self._is_new_event(event):
                events.append(event)
            else:
                ignored[SkipRule.REPEATED] += 1
        self.tally = RecordTally(len(events), len(bad), ignored)
        return events, bad

    def _infer_boot_time(self, rows: list[bytes], now_ms: int) -> None:
        """Infer the boot time from the newest line, which was written now or earlier."""
        stamp = None
        with contextlib.suppress(RecordError, IndexError):
            stamp = parse_log_line(rows[-1].decode("utf-8", "replace"), now_ms).boot_ms
        if stamp is None:
            return
        booted_ms = now_ms - stamp
        if self.boot_ms == 0.0 or stamp < self.last_boot_stamp_ms:
            self.boot_ms = booted_ms
        self.boot_ms = min(self.boot_ms, booted_ms)
        self.last_boot_stamp_ms = stamp

    def _make_event(self, line: LogLine, now_ms: int) -> NodeEvent | SkipRule:
        if not line.text:
            return SkipRule.OTHER_PROGRAM
        node = self.node or line.host or ("" if line.hostless else self.fallback)
        reader = self._readers.get(node)
        if reader is None:
            if len(self._readers) >= MOST_NODES:
                raise RecordError("too_many_nodes", f"more than {MOST_NODES:,}: {node[:80]!r}")
            reader = self._readers[node] = MessageReader()
        finding = reader.read(line.text)
        if finding is None:
            return SkipRule.NOT_HARDWARE
        return make_node_event(finding, _check_node_name(node), self._choose_time_ms(line, now_ms))

    def _choose_time_ms(self, line: LogLine, now_ms: int) -> int:
        time_ms = line.time_ms
        if time_ms is None and line.boot_ms is not None and self.boot_ms:
            time_ms = round(self.boot_ms + line.boot_ms)
        if time_ms is None:
            return now_ms
        if time_ms > now_ms + ABSURD_MS or time_ms < min(now_ms, YEAR_2000_MS):
            day = f"{time_ms / DAY_MS:,.0f} days after 1970"
            raise RecordError("absurd_time", f"{day}, expected 2000 to now: {line.text[:120]!r}")
        return now_ms if time_ms > now_ms + FUTURE_LIMIT_MS else time_ms

    def _is_new_event(self, event: NodeEvent) -> bool:
        """Return whether no equal event of its node lies within five seconds of this event.

        The reader remembers a new event, so a storm of one error gives one event.
        """
        key = (event.node, event.sequence & _HASH_MASK)
        last_ms = self._last.pop(key, None)
        if last_ms is not None and abs(event.time_ms - last_ms) < STORM_MS:
            self._last[key] = last_ms
            self.repeats += 1
            return False
        self._last[key] = event.time_ms
        if len(self._last) > MOST_REMEMBERED:
            self._last.pop(next(iter(self._last)))
        return True


def make_node_event(finding: KernelFinding, node: str, time_ms: int) -> NodeEvent:
    """Convert a finding into a node event with this node and time."""
    what = f"{finding.type}|{finding.code}|{finding.check}|{finding.severity}|{finding.device}"
    return NodeEvent(
        node=node,
        source=SOURCE,
        sequence=(time_ms // STORM_MS << _HASH_BITS) | (zlib.crc32(what.encode()) & _HASH_MASK),
        time_ms=time_ms,
        type=finding.type,
        code=finding.code,
        message=finding.message[:MESSAGE_CHARACTERS],
        check=finding.check,
        severity=finding.severity,
        device=finding.device,
        advice=finding.advice,
    )


def _check_node_name(node: str) -> str:
    try:
        return check_name(node)
    except ConfigError as error:
        raise RecordError("bad_name", f"no node is named for a line: {error}") from None
