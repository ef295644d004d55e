"""Lines of a kernel log → when, which host, what; whatever tool wrote them.

    journalctl -o short        Feb 23 16:24:18 n001 kernel: NVRM: …           no year, the node's own time zone
    journalctl -o short-iso    2025-02-23T16:24:18+0000 n001 kernel: NVRM: …  also with fractions, and rsyslog's own
    journalctl -o short-unix   1740327858.283302 n001 kernel: NVRM: …
    journalctl -o json         {"__REALTIME_TIMESTAMP": "…", "_HOSTNAME": "n001", "_TRANSPORT": "kernel", "MESSAGE": …}
    dmesg                      [ 3098.275513] NVRM: …                         seconds since the node booted
    dmesg -T                   [Sun Feb 23 16:24:18 2025] NVRM: …             the node's own time zone
    dmesg --decode --time-format iso    kern  :warn  : 2025-01-21T04:41:44,283302+00:00 NVRM: …
    /dev/kmsg, pstore          6,3964,206764307,-;NVRM: …    <4>[ 3098.275513] NVRM: …

Syslog lines of other programs than the kernel are not read: anyone may write them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from functools import lru_cache

import msgspec

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
DAY_MS = 86_400_000
MAX_LINE_CHARACTERS = 2_048  # the kernel prints at most half as many

_ISO = r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)"
_CLOCK = r"(\d\d):(\d\d):(\d\d)"
_BOOT = r"\[ {0,12}(\d{1,12}(?:\.\d{1,9})?)\]"
_kernel = re.compile(r"(?:(?P<host>[^\s:]{1,253}) )?kernel: ?(?:\[ {0,12}\d{1,12}\.\d{1,9}\] ?)?")
_iso = re.compile(_ISO + " ")
_decoded = re.compile(r"\w{1,10} {0,8}:\w{1,10} {0,8}: " + _ISO + " ")
_kmsg = re.compile(r"\d{1,5},\d{1,20},(\d{1,18}),[^;]{0,40};")
_unix = re.compile(r"(\d{9,11}(?:\.\d{1,9})?) ")
_short = re.compile(rf"({'|'.join(MONTHS)}) {{1,2}}(\d{{1,2}}) {_CLOCK}(?:\.\d{{1,9}})? ")
_human = re.compile(rf"\[\w{{3}} ({'|'.join(MONTHS)}) {{1,2}}(\d{{1,2}}) {_CLOCK} (\d{{4}})\] ?")
_boot = re.compile(_BOOT + " ?")
_priority = re.compile(r"<\d{1,3}>")


@dataclass(frozen=True, slots=True)
class LogLine:
    """boot_ms: since the node booted; host: empty if unknown; text: empty where the line is not the kernel's."""

    text: str
    time_ms: int | None = None
    boot_ms: float | None = None
    host: str = ""


class _Journal(msgspec.Struct):
    """An entry of `journalctl -o json`; a message that is not UTF-8 comes as a list of bytes."""

    message: str | list[int] | None = msgspec.field(name="MESSAGE", default=None)
    realtime_us: str = msgspec.field(name="__REALTIME_TIMESTAMP", default="")
    hostname: str = msgspec.field(name="_HOSTNAME", default="")
    transport: str = msgspec.field(name="_TRANSPORT", default="")


_journal = msgspec.json.Decoder(_Journal).decode
NOTHING = LogLine("")


def read_line(line: str, now_ms: int, utc_offset_s: float = 0.0) -> LogLine:
    """Read one line; never raises. `utc_offset_s`: the zone of stamps that name none.

    >>> read_line("Feb 23 16:24:18 n001 kernel: NVRM: hello", 1_740_400_000_000)
    LogLine(text='NVRM: hello', time_ms=1740327858000, boot_ms=None, host='n001')
    """
    line = line[:MAX_LINE_CHARACTERS].strip("\r\n")
    if line.startswith("{"):
        return _of_journal(line)
    line = _priority.sub("", line, count=1) if line.startswith("<") else line
    for pattern, read in _FORMATS:
        found = pattern.match(line)
        if found is not None:
            try:
                return read(found, line[found.end() :], now_ms, utc_offset_s)
            except (ValueError, OverflowError):  # no such day or hour
                return _of_ring(line[found.end() :])
    return _of_ring(line)


def _of_journal(line: str) -> LogLine:
    try:
        entry = _journal(line)
    except (ValueError, RecursionError):
        return NOTHING
    if entry.transport != "kernel" or entry.message is None:
        return NOTHING
    if isinstance(entry.message, list):
        good = bytes(byte for byte in entry.message if 0 <= byte < 256)
        text = good.decode("utf-8", "replace")
    else:
        text = entry.message
    digits = entry.realtime_us[:18]
    time_ms = int(digits) // 1000 if digits.isascii() and digits.isdecimal() else None
    return LogLine(text, time_ms, host=entry.hostname)


def _of_syslog(rest: str, time_ms: int) -> LogLine:
    """Read what follows syslog's time: a host, and a program that must be the kernel."""
    found = _kernel.match(rest)
    return NOTHING if found is None else LogLine(rest[found.end() :], time_ms, host=found["host"] or "")


def _of_ring(rest: str, time_ms: int | None = None, boot_ms: float | None = None) -> LogLine:
    """Read what follows dmesg's time; a collector may have put a host before it."""
    found = _kernel.match(rest)
    if found is None:
        return LogLine(rest, time_ms, boot_ms)
    return LogLine(rest[found.end() :], time_ms, boot_ms, found["host"] or "")


def _zone(utc_offset_s: float) -> timezone:
    return timezone(timedelta(seconds=utc_offset_s))


@lru_cache(4_096)  # lines come in bursts
def _of_iso(text: str, utc_offset_s: float) -> int:
    time = datetime.fromisoformat(text.replace(",", "."))
    return _ms(time if time.tzinfo else time.replace(tzinfo=_zone(utc_offset_s)))


def _ms(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def _read_iso(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    return _of_syslog(rest, _of_iso(found[1], utc_offset_s))


def _read_decoded(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    if not found[0].startswith("kern"):
        return NOTHING
    return _of_ring(rest, _of_iso(found[1], utc_offset_s))


def _read_unix(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    return _of_syslog(rest, int(float(found[1]) * 1000))


def _read_human(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    month, day, hour, minute, second, year = found.groups()
    parts = (int(year), MONTHS.index(month) + 1, int(day), int(hour), int(minute), int(second))
    return _of_ring(rest, _ms(datetime(*parts, tzinfo=_zone(utc_offset_s))))


def _read_short(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    """The latest year in which the stamp is not more than a day ahead."""
    month, day, hour, minute, second = found.groups()
    zone = _zone(utc_offset_s)
    this_year = datetime.fromtimestamp(now_ms / 1000, zone).year
    for year in range(this_year + 1, this_year - 8, -1):  # 29 February may be eight years ago
        try:
            parts = (year, MONTHS.index(month) + 1, int(day), int(hour), int(minute), int(second))
            time_ms = _ms(datetime(*parts, tzinfo=zone))
        except ValueError:
            continue
        if time_ms <= now_ms + DAY_MS:
            return _of_syslog(rest, time_ms)
    return NOTHING


def _read_kmsg(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    return _of_ring(rest, boot_ms=int(found[1]) / 1000)


def _read_boot(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    return _of_ring(rest, boot_ms=round(float(found[1]) * 1000, 3))


_Read = Callable[[re.Match[str], str, int, float], LogLine]
_FORMATS: tuple[tuple[re.Pattern[str], _Read], ...] = (
    (_iso, _read_iso),
    (_boot, _read_boot),
    (_short, _read_short),
    (_human, _read_human),
    (_decoded, _read_decoded),
    (_kmsg, _read_kmsg),
    (_unix, _read_unix),
)
