"""Followed kernel logs: grown, rotated, truncated, gone; each line once, from wherever the last process was."""

import asyncio
import math
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from fleetcast.checks import check_source
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.events import NodeEvent
from fleetcast.ingest.kernel_log import source as kernel_log
from fleetcast.ingest.kernel_log.log_files import LogFile
from fleetcast.ingest.kernel_log.source import KernelLogSource

NOW_MS = 1_763_700_000_000


def line(code: int, minute: int = 0) -> str:
    return f"2025-11-21T04:{minute:02d}:00+0000 n1 kernel: NVRM: Xid (PCI:0000:9b:00): {code}, said\n"


def source(*paths: str, **options: Any) -> KernelLogSource:
    return KernelLogSource(Entities(), ManualClock(NOW_MS), {"paths": list(paths), "poll_s": 0.01, **options})


async def taken(made: KernelLogSource, events: int) -> list[NodeEvent]:
    found: list[NodeEvent] = []
    while len(found) < events:
        found += (await asyncio.wait_for(made.next(), 60)).node_events
    return found


def codes(made: KernelLogSource, events: int) -> list[object]:
    return [event.code for event in asyncio.run(taken(made, events))]


def test_a_log_is_read_from_its_beginning_and_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text(line(79) + "Feb 23 n1 sshd: nothing\n" + line(31)[:-1])
    made = source(str(path))
    assert codes(made, 1) == [79]
    with open(path, "a") as file:
        file.write("\n" + line(48))
    assert codes(made, 2) == [31, 48]
    assert made.health() | {"rate_per_s": 0} == {
        **{"name": "kernel_log", "kind": "kernel_log", "rate_per_s": 0, "lag_s": 0.0, "bad": 0, "up": True},
        **{"files": 1, "unreadable": 0, "lost": 0, "backlog_bytes": 0},
    }


def test_the_contract_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kern.log"
    path.write_text("".join(line(code, minute) for minute, code in enumerate((79, 48, 74, 31))))
    size = len(line(79))
    monkeypatch.setattr(kernel_log, "READ_BYTES", size)
    monkeypatch.setattr(LogFile.read, "__defaults__", (size,))
    check_source(lambda: source(str(path)), batches=4)


def test_what_was_renamed_is_read_to_its_end_before_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text(line(79))
    made = source(str(path))
    assert codes(made, 1) == [79]
    with open(path, "a") as file:
        file.write(line(31, 1))
    path.rename(tmp_path / "kern.log.1")
    path.write_text(line(48, 2))
    assert codes(made, 2) == [31, 48]


@pytest.mark.parametrize("gone", [False, True])
def test_a_rotation_while_nobody_reads_loses_only_what_is_gone(tmp_path: Path, gone: bool) -> None:
    path = tmp_path / "kern.log"
    path.write_text(line(79))
    first = source(str(path))
    assert codes(first, 1) == [79]
    place = first.position()
    asyncio.run(first.close())
    path.write_text(line(79) + line(31, 1))
    path.rename(tmp_path / "kern.log.1")
    path.write_text(line(48, 2))
    if gone:
        os.remove(tmp_path / "kern.log.1")
    second = source(str(path))
    second.seek(place)
    expected = [48] if gone else [31, 48]
    assert codes(second, len(expected)) == expected
    assert second.health()["lost"] == int(gone)


def test_a_log_that_was_truncated_and_grew_past_its_old_size_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "kern.log"
    path.write_text(line(79))
    made = source(str(path))
    assert codes(made, 1) == [79]
    path.write_text(line(48, 3) + line(31, 4))  # copytruncate keeps the inode
    assert codes(made, 2) == [48, 31]


def test_nodes_are_named_by_the_entry_the_path_or_the_line(tmp_path: Path) -> None:
    bare = "[Fri Nov 21 04:00:00 2025] NVRM: Xid (PCI:0000:9b:00): 79, said\n"
    for name, text in (("a/kern.log", bare), ("b/kern.log", line(79)), ("own.log", bare), ("syslog", line(79))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    entries = (f"{tmp_path}/{{node}}/kern.log", f"n7={tmp_path}/own.log", f"{tmp_path}/sys*")
    found = asyncio.run(taken(source(*entries), 4))
    assert sorted(event.node for event in found) == ["a", "b", "n1", "n7"]
    assert [event.node for event in asyncio.run(taken(source(f"{tmp_path}/own.log"), 1))] == [platform.node()]
    assert [event.node for event in asyncio.run(taken(source(f"{tmp_path}/own.log", node="x"), 1))] == ["x"]


def test_new_files_of_a_glob_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "SCAN_S", 0.0)
    made = source(f"{tmp_path}/*.log")
    assert made.health()["up"] is False
    (tmp_path / "n1.log").write_text(line(79))
    assert codes(made, 1) == [79]
    assert made.health()["up"] is True


def test_a_long_backlog_is_read_in_pieces_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kern.log"
    path.write_text("x" * 5000 + "\n" + line(79))
    monkeypatch.setattr(LogFile.read, "__defaults__", (1000,))
    assert codes(source(str(path)), 1) == [79]


def test_many_files_are_asked_some_at_a_time_and_all_before_a_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_log, "FILES_A_TURN", 2)
    for number in range(5):
        (tmp_path / f"{number}.log").write_text(line(48 + number))
    followed = source(str(tmp_path / "*.log"))
    turns = [followed._read_batch() for _ in range(6)]
    assert [len(batch) for batch, _ in turns] == [2, 2, 1, 0, 0, 0]
    assert [more for _, more in turns] == [True, True, False, True, True, False]
    asyncio.run(followed.close())


def test_a_path_where_nothing_is_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_log, "SCAN_S", 0.0)
    followed = source(str(tmp_path / "kern.log"))
    for _ in range(3):
        followed._follow_new_files()
    assert [record.getMessage() for record in caplog.records] == [
        f"kernel_log: no file {tmp_path / 'kern.log'}, looking for it every 0 s"
    ]
    (tmp_path / "kern.log").write_text(line(79))
    followed._follow_new_files()
    assert (followed.health()["files"], len(caplog.records)) == (1, 1)
    asyncio.run(followed.close())


def test_a_folder_that_is_no_node_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "SCAN_S", 0.0)
    for name in ("a b", "n1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kern.log").write_text(line(79))
    followed = source(str(tmp_path / "{node}" / "kern.log"))
    for _ in range(3):
        followed._follow_new_files()
    assert (followed.health()["bad"], followed.health()["files"]) == (1, 1)
    asyncio.run(followed.close())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"paths": []}, "at least one file"),
        ({"paths": ["x"], "poll_s": 0.0}, "poll_s"),
        ({"paths": ["x"], "poll_s": math.inf}, "poll_s"),
        ({"paths": ["x\0"]}, "NUL"),
        ({"paths": ["x"], "utc_offset_s": 1e6}, "utc_offset_s"),
        ({"paths": ["/{node}/{node}"]}, "once"),
        ({"paths": ["x"], "node": "a/b"}, "no name"),
        ({"path": "x"}, "path"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        KernelLogSource(Entities(), ManualClock(NOW_MS), options)
