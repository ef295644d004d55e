"""A parser of kernel log lines into time, host and text, in the forms of all common tools.

    rsyslog, journalctl -o short       Feb 23 16:24:18 n001 kernel: NVRM: …    no year, the node's own time zone
    journalctl -o short-iso            2025-02-23T16:24:18+0000 n001 kernel: NVRM: …    also with fractions or a blank
    journalctl -o short-full           Sun 2025-02-23 16:24:18 UTC n001 kernel: NVRM: …
    journalctl -o short-unix           1740327858.283302 n001 kernel: NVRM: …
    journalctl -o json                 {"__REALTIME_TIMESTAMP": "…", "_HOSTNAME": "n001", "_TRANSPORT": "kernel", …}
    syslog of RFC 5424                 <4>1 2025-02-23T16:24:18.2+00:00 n001 kernel - - - NVRM: …
    dmesg                              [ 3098.275513] NVRM: …                  seconds since the node booted
    dmesg -T                           [Sun Feb 23 16:24:18 2025] NVRM: …      the node's own time zone
    dmesg -x, --time-format iso        kern  :warn  : 2025-01-21T04:41:44,283302+00:00 NVRM: …
    /dev/kmsg, pstore                  6,3964,206764307,-;NVRM: …    <4>[ 3098.275513] NVRM: …

A line of any other form is a bad record. A line with an impossible day or hour is a bad record as well. Syslog
lines of programs other than the kernel are left out, because any program may write them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from functools import lru_cache

import msgspec

from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import RecordError

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
DAY_MS = 86_400_000
MAX_LINE_CHARACTERS = 2_048  # the kernel prints at most half as many
_HOUR_S = 3600.0
# Abbreviations of one zone only; a stamp with any other counts as one without a zone.
_ZONES = {
    **{"UTC": 0, "GMT": 0, "WET": 0, "CET": 1, "WEST": 1, "CEST": 2, "EET": 2, "EEST": 3, "MSK": 3, "HKT": 8, "JST": 9},
    **{"KST": 9, "AEST": 10, "AEDT": 11, "EST": -5, "EDT": -4, "CDT": -5, "MDT": -6, "PST": -8, "PDT": -7},
}

_ISO = r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d(?::?\d\d)?)?)"
_CLOCK = r"(\d\d):(\d\d):(\d\d)(?:\.\d{1,9})?"
_MONTH = rf"({'|'.join(MONTHS)})"
_ZONE = r"(?:(?P<zone>[A-Z]{2,5}|[+-]\d\d:?\d\d) )?"
_BOOTED = r"\[ {0,12}\d{1,12}\.\d{1,9}\]"
_kernel = re.compile(
    rf"(?:{_ZONE}(?P<host>\S{{1,253}}) (?:kern\.\w{{3,7}} )?)?kernel(?:\[\d{{1,7}}\])?: ?(?:{_BOOTED} ?)?"
)
_program = re.compile(rf"{_ZONE}(?:\S{{1,253}} )?(?:\w+\.\w+ )?[^\s:\[]{{1,64}}(?:\[[^\]\s]{{0,64}}\])?:(?: |$)")
_message = re.compile(  # how messages begin that the ring buffer holds without a program's name
    r"(?:\[\.\.\.\] )?NVRM: |nvidia|mlx5|amdgpu |pcieport |pciehp|\[drm|\[Hardware Error\]|AER: |PCIe Bus Error"
    r"|\{\d{1,9}\}\[Hardware|[0-9a-f]{4}:[0-9a-f]{2}:|(?:PCI|pci) |\[ *[TC]\d{1,9}\] "
)
_headless = re.compile(rf"{_ZONE}\S{{1,253}} (?:NVRM: |mlx5_core |amdgpu )")  # a template of syslog left "kernel:" out
_syslog = re.compile(
    rf"(?:\d{{1,9}} )?(?:<\d{{1,3}}>)?1 (?:{_ISO}|-) (?P<host>\S{{1,255}}) (?P<program>\S{{1,48}}) "
    rf"\S{{1,128}} \S{{1,32}} (?:-|(?:\[(?:[^\]\\]|\\.){{1,1500}}\])+)(?: |$)\ufeff?(?:{_BOOTED} ?)?"
)
_iso = re.compile(rf"(?:[A-Z][a-z]{{2}} )?{_ISO} ")
_decoded = re.compile(r"(\w{1,10}) {0,8}:\w{1,10} {0,8}: ")
_kmsg = re.compile(r"\d{1,5},\d{1,20},(\d{1,18}),[^;]{0,40};")
_unix = re.compile(r"(\d{9,11}(?:\.\d{1,9})?) ")
_short = re.compile(rf"(?:[A-Z][a-z]{{2}},? )?{_MONTH} {{1,2}}(\d{{1,2}}) (?:(\d{{4}}) )?{_CLOCK}(?: (\d{{4}}))? ")
_human = re.compile(rf"\[\w{{3}} {_MONTH} {{1,2}}(\d{{1,2}}) {_CLOCK} (\d{{4}})\] ?")
_relative = re.compile(rf"\[{_MONTH} ?(\d{{1,2}}) (\d\d):(\d\d)\] ?")
_boot = re.compile(r"\[ {0,12}(\d{1,12}(?:\.\d{1,9})?)(?: +<[ \d.]{1,20}>)?\] ?")
_priority = re.compile(r"<\d{1,3}>")
_stream = re.compile(r"\x1e|data: ")  # of journalctl -o json-seq and json-sse


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a kernel log.

    text: empty if another program wrote the line. boot_ms: milliseconds from the boot of the node to
    the line, if the line states them. host: empty if unknown. hostless: the line names no host although
    lines of this form usually do, so it may come from another machine.
    """

    text: str
    time_ms: int | None = None
    boot_ms: float | None = None
    host: str = ""
    hostless: bool = False


class _Journal(msgspec.Struct):
    """An entry of `journalctl -o json`. A message that is not UTF-8 is a list of bytes."""

    message: str | list[int] | None = msgspec.field(name="MESSAGE")
    realtime_us: str | int = msgspec.field(name="__REALTIME_TIMESTAMP")
    hostname: str = msgspec.field(name="_HOSTNAME", default="")
    transport: str = msgspec.field(name="_TRANSPORT", default="")
    program: str = msgspec.field(name="SYSLOG_IDENTIFIER", default="")


_journal = msgspec.json.Decoder(_Journal).decode
NOTHING = LogLine("")


def parse_log_line(line: str, now_ms: int, utc_offset_s: float = 0.0) -> LogLine:
    """Parse one line of a kernel log. `utc_offset_s`: the offset from UTC of times without a time zone.

    Raises RecordError `unknown_form` or `bad_time`.

    >>> parse_log_line("Feb 23 16:24:18 n001 kernel: NVRM: hello", 1_740_400_000_000)
    LogLine(text='NVRM: hello', time_ms=1740327858000, boot_ms=None, host='n001', hostless=False)
    """
    line = line[:MAX_LINE_CHARACTERS].strip("\r\n")
    if (framed := _stream.match(line)) is not None:
        line = line[framed.end() :]
    if line.startswith("{") and _message.match(line) is None:
        return _parse_journal_line(line)
    if (found := _syslog.match(line)) is not None:
        return _parse_or_refuse(_parse_syslog_line, found, line, now_ms, utc_offset_s)
    line = _priority.sub("", line, count=1) if line.startswith("<") else line
    if (decoded := _decoded.match(line)) is not None and decoded[1] != "kern":
        return NOTHING
    line = line[decoded.end() :] if decoded is not None else line
    for pattern, read in _FORMATS:
        found = pattern.match(line)
        if found is not None:
            return _parse_or_refuse(read, found, line, now_ms, utc_offset_s)
    return _parse_after_dmesg_time(line)


def _parse_or_refuse(read: "_Read", found: re.Match[str], line: str, now_ms: int, utc_offset_s: float) -> LogLine:
    try:
        return read(found, line[found.end() :], now_ms, utc_offset_s)
    except (ValueError, OverflowError):
        raise RecordError("bad_time", f"no such day or hour: {line[:120]!r}") from None


def _parse_journal_line(line: str) -> LogLine:
    try:
        entry = _journal(line)
    except (ValueError, RecursionError) as error:
        why = explain_decode_error(error, _journal, line.encode("utf-8", "replace"))
        raise RecordError("unknown_form", f"no entry of journalctl -o json ({why}): {line[:120]!r}") from None
    if (entry.transport or entry.program) != "kernel" or entry.message is None:
        return NOTHING
    if isinstance(entry.message, list):
        good = bytes(byte for byte in entry.message if 0 <= byte < 256)
        text = good.decode("utf-8", "replace")
    else:
        text = entry.message
    digits = str(entry.realtime_us)[:18]
    if not (digits.isascii() and digits.isdecimal()):
        raise RecordError("bad_time", f"__REALTIME_TIMESTAMP {digits!r}, expected microseconds since 1970")
    return LogLine(text, int(digits) // 1000, host=entry.hostname, hostless=not entry.hostname)


def _parse_after_wall_time(rest: str, time_ms: int, utc_offset_s: float) -> LogLine:
    """Parse the rest of a line after its wall-clock time. Raises RecordError if the form of the rest is unknown.

    The rest is a time zone, a host and a program, or a bare message. Lines of programs other than the kernel
    give NOTHING.
    """
    found = _kernel.match(rest)
    if found is not None:
        if zone := found["zone"]:
            time_ms -= round(1000 * (_parse_zone_offset_s(zone, utc_offset_s) - utc_offset_s))
        host = found["host"] or ""
        return LogLine(rest[found.end() :], time_ms, host=host, hostless=not host)
    if _message.match(rest) is not None:
        return LogLine(rest, time_ms)
    if _program.match(rest) is not None and _headless.match(rest) is None:
        return NOTHING
    raise _make_form_error(rest)


def _parse_zone_offset_s(zone: str, utc_offset_s: float) -> float:
    if zone[0] in "+-":
        sign = -1 if zone[0] == "-" else 1
        return sign * (int(zone[1:3]) * _HOUR_S + int(zone[-2:]) * 60)
    return _ZONES[zone] * _HOUR_S if zone in _ZONES else utc_offset_s


def _parse_after_dmesg_time(rest: str, time_ms: int | None = None, boot_ms: float | None = None) -> LogLine:
    """Parse the rest of a line after dmesg's time. A collector may have written a host before the message."""
    found = _kernel.match(rest)
    if found is not None:
        return LogLine(rest[found.end() :], time_ms, boot_ms, found["host"] or "")
    if time_ms is None and boot_ms is None and _message.match(rest) is None:
        raise _make_form_error(rest)
    return LogLine(rest, time_ms, boot_ms)


def _make_form_error(line: str) -> RecordError:
    return RecordError("unknown_form", f"expected a line as of rsyslog, journalctl or dmesg: {line[:120]!r}")


def _make_timezone(utc_offset_s: float) -> timezone:
    return timezone(timedelta(seconds=utc_offset_s))


@lru_cache(4_096)  # lines come in bursts
def _parse_iso_ms(text: str, utc_offset_s: float) -> int:
    time = datetime.fromisoformat(text.replace(",", "."))
    return _convert_to_ms(time if time.tzinfo else time.replace(tzinfo=_make_timezone(utc_offset_s)))


def _convert_to_ms(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


def _parse_syslog_line(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    """Parse a line of RFC 5424, in which "-" means unknown."""
    if found["program"] != "kernel":
        return NOTHING
    if found[1] is None:
        raise ValueError("a line without its time")
    host = "" if found["host"] == "-" else found["host"]
    return LogLine(rest, _parse_iso_ms(found[1], utc_offset_s), host=host, hostless=not host)


def _parse_iso_line(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    return _parse_after_wall_time(rest, _parse_iso_ms(found[1], utc_offset_s), utc_offset_s)


def _parse_unix_line(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    return _parse_after_wall_time(rest, int(float(found[1]) * 1000), 0.0)


def _parse_ctime_line(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    month, day, hour, minute, second, year = found.groups()
    return _parse_after_dmesg_time(
        rest, _convert_date_parts((year, month, day, hour, minute, second), now_ms, utc_offset_s)
    )


def _parse_reltime_line(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    month, day, hour, minute = found.groups()
    return _parse_after_dmesg_time(
        rest, _convert_date_parts((None, month, day, hour, minute, "0"), now_ms, utc_offset_s)
    )


def _parse_short_line(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    month, day, year, hour, minute, second, late_year = found.groups()
    time_ms = _convert_date_parts((year or late_year, month, day, hour, minute, second), now_ms, utc_offset_s)
    return _parse_after_wall_time(rest, time_ms, utc_offset_s)


def _convert_date_parts(parts: tuple[str | None, str, str, str, str, str], now_ms: int, utc_offset_s: float) -> int:
    """Convert (year, month, day, hour, minute, second) to Unix ms. Raises ValueError if there is no such date.

    A date without a year gets the latest year in which it is at most a day ahead.
    """
    year, month, day, hour, minute, second = parts
    zone = _make_timezone(utc_offset_s)
    this_year = datetime.fromtimestamp(now_ms / 1000, zone).year
    years = [int(year)] if year else range(this_year + 1, this_year - 8, -1)  # 29 February may be eight years ago
    for candidate in years:
        rest = (MONTHS.index(month) + 1, int(day), int(hour), int(minute), int(second))
        try:
            time_ms = _convert_to_ms(datetime(candidate, *rest, tzinfo=zone))
        except ValueError:
            continue
        if year or time_ms <= now_ms + DAY_MS:
            return time_ms
    raise ValueError("no year has this day")


def _parse_kmsg_line(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    return _parse_after_dmesg_time(rest, boot_ms=int(found[1]) / 1000)


def _parse_uptime_line(found: re.Match[str], rest: str, now_ms: int, utc_offset_s: float) -> LogLine:
    return _parse_after_dmesg_time(rest, boot_ms=round(float(found[1]) * 1000, 3))


_Read = Callable[[re.Match[str], str, int, float], LogLine]
_FORMATS: tuple[tuple[re.Pattern[str], _Read], ...] = (
    (_iso, _parse_iso_line),
    (_boot, _parse_uptime_line),
    (_short, _parse_short_line),
    (_human, _parse_ctime_line),
    (_relative, _parse_reltime_line),
    (_kmsg, _parse_kmsg_line),
    (_unix, _parse_unix_line),
)
