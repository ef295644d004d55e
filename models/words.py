"""Formatting of numbers and times for people, without more digits than are known."""

from datetime import UTC, datetime
from math import isfinite

DAY_MS = 86_400_000


def format_number(value: float) -> str:
    """Format a number with at most four significant digits and a thousands separator.

    A number below 1 has two significant digits. A number that is not finite is "unknown".

    >>> format_number(1980.0), format_number(0.4375), format_number(12.34), format_number(0.0042)
    ('1,980', '0.44', '12.3', '0.0042')
    """
    size = abs(value)
    if not isfinite(value):
        return "unknown"
    if size >= 100 or value == int(value):
        return f"{round(value):,}"
    if size < 0.1:
        return f"{value:.2g}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def format_age(seconds: float) -> str:
    """Format a duration in seconds, minutes, hours or days, whichever suits it.

    >>> format_age(45), format_age(95), format_age(7300)
    ('45 s', '95 s', '2 h')
    """
    for unit, size, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{round(seconds / size)} {unit}"
    return f"{round(seconds / 86_400)} days"


def format_clock_time(time_ms: int, now_ms: int) -> str:
    """Format a time as hour and minute in UTC, with the day if it is not within the last 24 hours.

    >>> format_clock_time(50_520_000, 50_520_000)
    '14:02 UTC'
    """
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    text = f"{moment:%H:%M} UTC"
    return text if now_ms - time_ms < DAY_MS else f"{moment.day} {moment:%b} {text}"


def format_rate(bytes_per_s: float) -> str:
    """Format a rate in B/s with the prefix that suits it.

    >>> format_rate(25.2e9), format_rate(3.1e6)
    ('25.2 GB/s', '3.10 MB/s')
    """
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{format_number(bytes_per_s / size)} {unit}"
    return f"{format_number(bytes_per_s)} B/s"
