"""Every spelling of a kernel log's line gives when, which host and what."""

from datetime import UTC, datetime

import pytest

from ingest.kernel_log.log_lines import NOTHING, LogLine, read_line


def at(*parts: int) -> int:
    return round(datetime(*parts, tzinfo=UTC).timestamp() * 1000)  # type: ignore[misc, arg-type]


NOW_MS = at(2025, 3, 1, 12, 0, 0)
THEN = at(2025, 2, 23, 16, 24, 18)
JOURNAL = (
    '{"__REALTIME_TIMESTAMP":"1740327858283302","_HOSTNAME":"n1","_TRANSPORT":"kernel","MESSAGE":"NVRM: x","P":"3"}'
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Feb 23 16:24:18 n1 kernel: NVRM: x", LogLine("NVRM: x", THEN, host="n1")),
        ("Feb 23 16:24:18 n1 kernel: [ 3098.275513] NVRM: x", LogLine("NVRM: x", THEN, host="n1")),
        ("2025-02-23T16:24:18+0000 n1 kernel: NVRM: x", LogLine("NVRM: x", THEN, host="n1")),
        ("2025-02-23T17:24:18.250000+01:00 n1 kernel: NVRM: x", LogLine("NVRM: x", THEN + 250, host="n1")),
        ("1740327858.283302 n1 kernel: NVRM: x", LogLine("NVRM: x", THEN + 283, host="n1")),
        (JOURNAL, LogLine("NVRM: x", THEN + 283, host="n1")),
        ("[Sun Feb 23 16:24:18 2025] NVRM: x", LogLine("NVRM: x", THEN)),
        ("[Sun Feb  2 16:24:18 2025] NVRM: x", LogLine("NVRM: x", at(2025, 2, 2, 16, 24, 18))),
        ("[Sun Feb 23 16:24:18 2025] n1 kernel: NVRM: x", LogLine("NVRM: x", THEN, host="n1")),
        ("kern  :warn  : 2025-02-23T16:24:18,283302+00:00 NVRM: x", LogLine("NVRM: x", THEN + 283)),
        ("[ 3098.275513] NVRM: x", LogLine("NVRM: x", boot_ms=3098275.513)),
        ("<4>[ 3098.275513] NVRM: x", LogLine("NVRM: x", boot_ms=3098275.513)),
        ("6,3964,206764307,-;NVRM: x", LogLine("NVRM: x", boot_ms=206764.307)),
        ("n1 kernel: NVRM: x", LogLine("NVRM: x", host="n1")),
        ("NVRM: x", LogLine("NVRM: x")),
        ("[Sun Feb 31 16:24:18 2025] NVRM: x", LogLine("NVRM: x")),
    ],
)
def test_a_line_is_read_whoever_wrote_it(line: str, expected: LogLine) -> None:
    assert read_line(line + "\n", NOW_MS) == expected


@pytest.mark.parametrize(
    "line",
    [
        "Feb 23 16:24:18 n1 sshd[12]: NVRM: Xid (PCI:0000:9b:00): 79, forged",
        "2025-02-23T16:24:18+0000 n1 python: NVRM: x",
        "user  :info  : 2025-02-23T16:24:18,283302+00:00 NVRM: x",
        '{"_TRANSPORT":"syslog","MESSAGE":"NVRM: x"}',
        '{"_TRANSPORT":"kernel","MESSAGE":nul',
    ],
)
def test_only_the_kernel_is_believed(line: str) -> None:
    assert read_line(line, NOW_MS) == NOTHING


def test_a_message_of_the_journal_that_is_no_text_is_read_as_far_as_it_goes() -> None:
    line = '{"_TRANSPORT":"kernel","__REALTIME_TIMESTAMP":"x","MESSAGE":[78,86,255,300,-1]}'
    assert read_line(line, NOW_MS) == LogLine("NV\ufffd")


def test_stamps_without_a_zone_are_the_nodes_own_time() -> None:
    assert read_line("[Sun Feb 23 16:24:18 2025] x", NOW_MS, 3600.0).time_ms == THEN - 3_600_000
    assert read_line("Feb 23 16:24:18 n1 kernel: x", NOW_MS, -3600.0).time_ms == THEN + 3_600_000


@pytest.mark.parametrize(
    ("now", "stamp", "year"),
    [
        (at(2026, 1, 1, 0, 5, 0), "Dec 31 23:59:59", 2025),  # read in the new year
        (at(2025, 12, 31, 23, 59, 0), "Jan  1 00:00:10", 2026),  # a clock a minute ahead
        (at(2027, 3, 1, 0, 0, 0), "Feb 29 10:00:00", 2024),  # the last leap year
        (at(2026, 6, 1, 0, 0, 0), "Jun  1 00:00:00", 2026),
    ],
)
def test_a_stamp_without_a_year_is_of_the_latest_that_fits(now: int, stamp: str, year: int) -> None:
    time_ms = read_line(f"{stamp} n1 kernel: x", now).time_ms
    assert time_ms is not None
    assert datetime.fromtimestamp(time_ms / 1000, UTC).year == year
