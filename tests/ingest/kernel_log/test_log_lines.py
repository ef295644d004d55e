"""Every spelling of a kernel log's line gives when, which host and what."""

from datetime import UTC, datetime

import pytest

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.kernel_log.log_lines import NOTHING, LogLine, parse_log_line
from tests.fuzz.law import check_words


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
        (
            "<4>1 2025-02-23T16:24:18.25+00:00 n1 kernel - - - [ 12.5] NVRM: x",
            LogLine("NVRM: x", THEN + 250, host="n1"),
        ),
        ('1 2025-02-23T16:24:18Z n1 kernel 0 id [a@1 b="\\]"][c] \ufeffNVRM: x', LogLine("NVRM: x", THEN, host="n1")),
        ("99 <4>1 2025-02-23T16:24:18Z - kernel - - - NVRM: x", LogLine("NVRM: x", THEN, hostless=True)),
        ("<4>Feb 23 16:24:18 n1 kernel: NVRM: x", LogLine("NVRM: x", THEN, host="n1")),
        ("<4>Feb 23 2025 16:24:18 n1 kernel[0]: NVRM: x", LogLine("NVRM: x", THEN, host="n1")),
        ("Feb 23 16:24:18 kernel: NVRM: x", LogLine("NVRM: x", THEN, hostless=True)),
        ("Feb 23 16:24:18.5 fe80::1 kern.warning kernel: NVRM: x", LogLine("NVRM: x", THEN, host="fe80::1")),
        ("Sun 2025-02-23 16:24:18 UTC n1 kernel: NVRM: x", LogLine("NVRM: x", THEN, host="n1")),
        ("Sun 2025-02-23 17:24:18 CET n1 kernel: NVRM: x", LogLine("NVRM: x", THEN, host="n1")),
        ("Sun 2025-02-23 14:24:18 -02:00 n1 kernel: NVRM: x", LogLine("NVRM: x", THEN, host="n1")),
        ("Sun 2025-02-23 16:24:18 XYZT n1 kernel: NVRM: x", LogLine("NVRM: x", THEN, host="n1")),
        ("2025-02-23 16:24:18.250000 n1 kernel: NVRM: x", LogLine("NVRM: x", THEN + 250, host="n1")),
        ("2025-02-23 16:24:18 HOST kernel: NVRM: x", LogLine("NVRM: x", THEN, host="HOST")),
        ("2025-02-23T16:24:18,283302+00:00 NVRM: x", LogLine("NVRM: x", THEN + 283)),
        (
            "2025-02-23T16:24:18,283302+00:00 mlx5_core 0000:05:00.0: x",
            LogLine("mlx5_core 0000:05:00.0: x", THEN + 283),
        ),
        ("kern  :warn  : [ 3098.275513] NVRM: x", LogLine("NVRM: x", boot_ms=3098275.513)),
        ("kern  :warn  : [Sun Feb 23 16:24:18 2025] NVRM: x", LogLine("NVRM: x", THEN)),
        ("[ 3098.275513 <    0.000012>] NVRM: x", LogLine("NVRM: x", boot_ms=3098275.513)),
        ("[ 3098.275513][ T1234] NVRM: x", LogLine("[ T1234] NVRM: x", boot_ms=3098275.513)),
        ("[Feb23 16:24] NVRM: x", LogLine("NVRM: x", THEN - 18_000)),
        ("\x1e" + JOURNAL, LogLine("NVRM: x", THEN + 283, host="n1")),
        ("data: " + JOURNAL, LogLine("NVRM: x", THEN + 283, host="n1")),
        (JOURNAL.replace('"_HOSTNAME":"n1",', ""), LogLine("NVRM: x", THEN + 283, hostless=True)),
        (JOURNAL.replace("_TRANSPORT", "SYSLOG_IDENTIFIER"), LogLine("NVRM: x", THEN + 283, host="n1")),
    ],
)
def test_a_line_is_read_whoever_wrote_it(line: str, expected: LogLine) -> None:
    assert parse_log_line(line + "\n", NOW_MS) == expected


@pytest.mark.parametrize(
    "line",
    [
        "Feb 23 16:24:18 n1 sshd[12]: NVRM: Xid (PCI:0000:9b:00): 79, forged",
        "2025-02-23T16:24:18+0000 n1 python: NVRM: x",
        "user  :info  : 2025-02-23T16:24:18,283302+00:00 NVRM: x",
        '{"_TRANSPORT":"syslog","__REALTIME_TIMESTAMP":"1740327858283302","MESSAGE":"NVRM: x"}',
        "<12>1 2025-02-23T16:24:18Z n1 python 7 - - NVRM: x",
        "Sun 2025-02-23 16:24:18 UTC n1 python[7]: NVRM: x",
        "Feb 23 16:24:18 n1 user.notice kernel: NVRM: x",
    ],
)
def test_only_the_kernel_is_believed(line: str) -> None:
    assert parse_log_line(line, NOW_MS) == NOTHING


def test_a_message_of_the_journal_that_is_no_text_is_read_as_far_as_it_goes() -> None:
    line = '{"_TRANSPORT":"kernel","__REALTIME_TIMESTAMP":"1740327858283302","MESSAGE":[78,86,255,300,-1]}'
    assert parse_log_line(line, NOW_MS).text == "NV\ufffd"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2025/02/23 16:24:18 n1 kernel NVRM: Xid (PCI:0000:9b:00): 79, x", "unknown_form"),
        ("n1|kernel|NVRM: x", "unknown_form"),
        ("2025-02-23T16:24:18Z stdout F [ 12.5] NVRM: x", "unknown_form"),
        ('{"time":"2025-02-23T16:24:18Z","host":"n1","message":"NVRM: x"}', "unknown_form"),
        ('{"_TRANSPORT":"kernel","MESSAGE":nul', "unknown_form"),
        ("{nel: NVRM: x", "unknown_form"),
        ("MESSAGE=NVRM: x", "unknown_form"),
        ("[  +0.000012] NVRM: x", "unknown_form"),
        ("[Sun Feb 31 16:24:18 2025] NVRM: x", "bad_time"),
        ("Feb 30 16:24:18 n1 kernel: NVRM: x", "bad_time"),
        ("<4>1 - n1 kernel - - - NVRM: x", "bad_time"),
        ('{"_TRANSPORT":"kernel","__REALTIME_TIMESTAMP":"soon","MESSAGE":"NVRM: x"}', "bad_time"),
    ],
)
def test_a_form_that_is_not_understood_is_a_bad_record_with_an_example(line: str, reason: str) -> None:
    with pytest.raises(RecordError) as error:
        parse_log_line(line, NOW_MS)
    assert error.value.reason == reason
    assert error.value.detail
    check_words(str(error.value).encode())


def test_stamps_without_a_zone_are_the_nodes_own_time() -> None:
    assert parse_log_line("[Sun Feb 23 16:24:18 2025] x", NOW_MS, 3600.0).time_ms == THEN - 3_600_000
    assert parse_log_line("Feb 23 16:24:18 n1 kernel: x", NOW_MS, -3600.0).time_ms == THEN + 3_600_000


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
    time_ms = parse_log_line(f"{stamp} n1 kernel: x", now).time_ms
    assert time_ms is not None
    assert datetime.fromtimestamp(time_ms / 1000, UTC).year == year
