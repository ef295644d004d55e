"""Which host a line of a kernel log belongs to, when it was written, and what became of each line."""

import asyncio
import platform
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import NodeEvent
from fleetcast.ingest.kernel_log.events import KernelReader
from fleetcast.ingest.kernel_log.log_lines import MONTHS
from fleetcast.ingest.kernel_log.source import KernelLogSource
from fleetcast.ingest.source import Batch
from tests.fuzz.bounds import examples

FIELD = Path(__file__).parents[2] / "field"
NOW_MS = round(datetime(2026, 11, 25, 23, 0, tzinfo=UTC).timestamp() * 1000)
XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."


def followed(*paths: Path, node: str = "") -> Batch:
    options = {"paths": [str(path) for path in paths], "node": node}
    source = KernelLogSource(Entities(), ManualClock(NOW_MS), options)

    async def scenario() -> Batch:
        batch = await source.next()
        await source.close()
        return batch

    return asyncio.run(scenario())


def told(events: "tuple[NodeEvent, ...] | list[NodeEvent]") -> dict[str, str]:
    return {event.node: datetime.fromtimestamp(event.time_ms / 1000, UTC).isoformat() for event in events}


def test_the_host_and_the_time_of_a_line_are_read() -> None:
    batch = followed(FIELD / "14-kernel-log-rfc5424.log", FIELD / "15-kernel-log-short-full.log")
    assert told(batch.node_events) == {
        "n017": "2026-11-25T22:00:01.123000+00:00",
        "n020": "2023-10-03T17:39:29.100000+00:00",
        "n019": "2026-11-25T22:00:01+00:00",
        "n021": "2026-11-25T22:00:01.123000+00:00",
    }
    assert all(event.code == 79 for event in batch.node_events)
    assert (batch.bad, batch.get_tally().read) == ((), 4)


def test_a_form_that_is_not_understood_drains_nobody(tmp_path: Path) -> None:
    log = tmp_path / "all.log"
    lines = (f"2026/11/25 22:00:01 n1 kernel {XID}", f"Nov 25 22:00:01 kernel: {XID}", f"[ 12.5] {XID}", "usb 1-1: new")
    log.write_text("\n".join((*lines, "", "")))
    batch = followed(log)
    assert list(told(batch.node_events)) == [platform.node()], "dmesg alone speaks of this host"
    assert [error.reason for error in batch.bad] == ["unknown_form", "bad_name"]
    assert "2026/11/25" in batch.bad[0].detail
    tally = batch.get_tally()
    assert (tally.all, tally.read, tally.refused) == (4, 1, 2)
    assert list(told(followed(log, node="n9").node_events)) == ["n9"], "the option names the host"


@pytest.mark.parametrize("stamp", ["Nov 25 22:00:01", "2026-11-25T22:00:01Z", "Wed 2026-11-25 22:00:01 UTC"])
def test_a_message_without_its_program_is_a_bad_record_and_no_line_of_another_program(
    tmp_path: Path, stamp: str
) -> None:
    """A template of syslog may leave "kernel:" out. Any user may write such a line, so it is no evidence either."""
    (tmp_path / "kern.log").write_text(f"{stamp} n017 {XID}\n{stamp} n017 sshd[7]: NVRM: hello\n")
    batch = followed(tmp_path / "kern.log")
    assert batch.node_events == ()
    assert [error.reason for error in batch.bad] == ["unknown_form"]


@pytest.mark.parametrize("year", [1970, 1999, 2286])
def test_an_absurd_time_is_a_bad_record(year: int) -> None:
    events, bad = KernelReader().read([f"{year}-12-01T00:00:00+00:00 n1 kernel: {XID}".encode()], NOW_MS)
    assert (events, [error.reason for error in bad]) == ([], ["absurd_time"])


FORMS = {
    "rfc5424": "<4>1 {iso}.000+00:00 {host} kernel - - - {text}",
    "bare rfc5424": "1 {iso}Z {host} kernel 0 - - [    1.5] {text}",
    "short-iso": "{iso}+0000 {host} kernel: {text}",
    "rsyslog": "{iso}.000000+00:00 {host} kernel: [    1.5] {text}",
    "blank": "{day} {clock} {host} kernel: {text}",
    "short-full": "{weekday} {day} {clock} UTC {host} kernel: {text}",
    "short-unix": "{unix}.000000 {host} kernel: {text}",
    "json": '{{"__REALTIME_TIMESTAMP":"{unix}000000","_HOSTNAME":"{host}","_TRANSPORT":"kernel","MESSAGE":"{text}"}}',
    "rfc3164": "<4>{month} {dd:>2} {clock} {host} kernel: {text}",
    "rfc3164 with a year": "{month} {dd:>2} {year} {clock} {host} kernel: {text}",
    "forwarded dmesg": "[{weekday} {month} {dd:>2} {clock} {year}] {host} kernel: {text}",
}
HOSTS = st.sampled_from(["n1", "gpu-07.example.org", "10.0.0.7", "UTC", "kernel", "n_1", "N1"])


@given(st.sampled_from(sorted(FORMS)), HOSTS, st.integers(0, 360 * 86_400))
@examples(300)
def test_every_form_has_the_same_host_and_the_same_time(form: str, host: str, age_s: int) -> None:
    time = datetime.fromtimestamp(NOW_MS // 1000 - age_s, UTC)
    line = FORMS[form].format(
        iso=time.strftime("%Y-%m-%dT%H:%M:%S"),
        day=time.strftime("%Y-%m-%d"),
        clock=time.strftime("%H:%M:%S"),
        weekday=time.strftime("%a"),
        unix=int(time.timestamp()),
        month=MONTHS[time.month - 1],
        dd=time.day,
        year=time.year,
        host=host,
        text=XID,
    )
    reader = KernelReader(fallback="collector")
    events, bad = reader.read([line.encode()], NOW_MS)
    assert not bad
    assert [(event.node, event.time_ms) for event in events] == [(host, int(time.timestamp()) * 1000)]


ANY_LINE = st.one_of(
    st.binary(max_size=80), st.builds("{} {}".format, st.text(max_size=40), st.just(XID)).map(str.encode)
)


@given(st.lists(ANY_LINE))
@examples(150)
def test_what_became_of_each_line_adds_up(lines: list[bytes]) -> None:
    rows = [row for line in lines for row in line.splitlines()]
    reader = KernelReader(fallback="collector")
    events, bad = reader.read(rows, NOW_MS)
    assert reader.tally.all == sum(1 for row in rows if row.strip())
    assert (reader.tally.read, reader.tally.refused) == (len(events), len(bad))
