"""The host of adapters: from boards to a file, or to a system that we make fail."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.schedulers.adapter import Write
from fleetcast.service import adapter_writer, adapters
from fleetcast.service.adapter_records import AdapterRecords, AdaptersStatus
from fleetcast.service.adapter_writer import ChangeLimit
from fleetcast.service.adapters import AdapterHost
from fleetcast.service.api.adapter_metrics import make_adapters_page
from fleetcast.service.config import AdapterConfig, AdaptersConfig
from fleetcast.service.doors import open_doors
from tests.service.adapters_world import DOORS, PORT, World


def test_bands_reach_the_other_system_and_only_changes_are_written(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.step(0.9, 0.0, 0.1)
    assert PORT.bands() == {"n1": "high", "n2": "low", "n3": "elevated"}
    status = world.step(0.8, 0.001, 0.09)
    assert (status.wishes, status.writes, status.ours, len(PORT.batches)) == (3, 3, 3, 1)
    assert world.step(0.0, 0.0, 0.1).writes == 4
    lines = world.host.records.read_newest_lines("memory", 2)
    assert (lines[0].key, lines[0].seen, lines[0].value, lines[0].outcome) == ("n1", "high", "low", "done")
    assert lines[0].why == "GPU 3: XID 79"
    assert len({line.decision for line in world.host.records.read_newest_lines("memory", 9)}) == 4


def test_who_observes_counts_and_writes_nothing(tmp_path: Path) -> None:
    row = AdapterConfig("band_file", options={"path": str(tmp_path / "bands")})
    world = World(tmp_path, row)
    for risk in (0.9, 0.9, 0.0):
        status = world.step(risk, 0.0)
    assert (status.mode, status.wishes, status.writes) == ("observe", 3, 0)
    assert not (tmp_path / "bands").exists()
    assert [line.outcome for line in world.host.records.read_newest_lines("band_file", 9)] == ["observed"] * 3


def test_a_stale_board_writes_nothing_and_a_lost_one_takes_back(tmp_path: Path) -> None:
    world = World(tmp_path, withdraw_after_s=600.0)
    world.step(0.9, 0.0)
    world.step(after_s=300.0)
    assert (PORT.bands(), len(PORT.batches)) == ({"n1": "high", "n2": "low"}, 1)
    assert world.step(after_s=301.0).withdrawn
    assert PORT.bands() == {}
    assert not world.step(0.9, 0.0).withdrawn
    assert PORT.bands() == {"n1": "high", "n2": "low"}


def test_who_is_waited_for_is_looked_at_again_for_news_and_told_at_once_that_the_board_is_stale(tmp_path: Path) -> None:
    world = World(tmp_path, AdapterConfig(f"{DOORS}:awaited_door", name="memory", mode="write"))
    world.step(0.9, 0.0)
    PORT.held = {}
    world.step(after_s=1.0)
    assert PORT.bands() == {}
    PORT.news += 1
    world.step(after_s=1.0)
    assert PORT.bands() == {"n1": "high", "n2": "low"}
    assert world.step(after_s=100.0).withdrawn
    assert PORT.bands() == {}
    PORT.held, PORT.news = {"n1": {"band": "high"}}, 2
    world.step(after_s=1.0)
    assert PORT.bands() == {}


def test_who_never_saw_a_board_takes_back_what_an_earlier_process_left(tmp_path: Path) -> None:
    world = World(tmp_path)
    PORT.held = {"n1": {"band": "high", "other": "theirs"}}
    assert not world.step(after_s=1.0).withdrawn
    assert PORT.bands() == {"n1": "high"}
    world.step(after_s=601.0)
    assert PORT.held == {"n1": {"other": "theirs"}}


def test_a_withdrawal_lasts_until_it_is_undone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.step(0.9)
    world.host.records.mark_withdrawn("memory")
    assert world.step(0.9).withdrawn
    assert world.step(0.9).withdrawn
    assert PORT.bands() == {}
    world.host.records.mark_withdrawn("memory", undo=True)
    world.step(0.9)
    assert PORT.bands() == {"n1": "high"}


def test_a_withdrawal_is_written_even_by_who_observes(tmp_path: Path) -> None:
    path = tmp_path / "bands"
    path.write_text("n1 high\nn2 low\n")
    world = World(tmp_path, AdapterConfig("band_file", options={"path": str(path)}))
    world.step(0.0)
    assert path.read_text() == "n1 high\nn2 low\n"
    asyncio.run(world.host.withdraw("band_file"))
    assert not path.exists()
    assert world.host.records.read_status().adapters[0].withdrawn


def test_what_somebody_else_wrote_meanwhile_is_left_alone_and_counted(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.step(0.0)
    PORT.other = {"n1": {"band": "theirs"}}
    assert world.step(0.9).conflicts == 1
    assert PORT.bands() == {"n1": "theirs"}


def test_a_withdrawal_is_not_over_while_something_is_left(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.step(0.9, 0.9)
    PORT.other = {"n1": {"band": "theirs"}}
    world.host.records.mark_withdrawn("memory")
    assert not world.step().withdrawn
    PORT.other = {}
    asyncio.run(world.host.withdraw("memory"))
    assert PORT.bands() == {}
    assert PORT.is_closed


def test_a_system_that_is_away_is_asked_again_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "RETRY_S", 0.0)
    monkeypatch.setattr(adapter_writer, "PORT_S", 1.0)
    memory = AdapterConfig(f"{DOORS}:memory_door", name="memory", mode="write")
    file = AdapterConfig("band_file", mode="write", options={"path": str(tmp_path / "bands")})
    world = World(tmp_path, memory, file)
    PORT.away = True
    status = world.step(0.9)
    assert (status.errors, status.error) == (1, "nobody is there")
    PORT.away, PORT.hangs = False, True
    assert world.step(after_s=0.0).error == "no answer within 1 s"
    assert (tmp_path / "bands").read_text() == "n1 high\n"
    PORT.hangs = False
    assert world.step(after_s=0.0).error == ""
    assert PORT.bands() == {"n1": "high"}


def test_few_nodes_change_a_minute_and_the_riskiest_go_first(tmp_path: Path) -> None:
    world = World(tmp_path, writes_per_minute=1, max_share=1.0)
    world.step(0.0, 0.0, 0.0)
    assert world.step(0.6, 0.9, 0.0).held_back == 1
    assert PORT.bands() == {"n1": "low", "n2": "high", "n3": "low"}
    world.step(0.6, 0.9, 0.0, after_s=20.0)
    assert PORT.bands()["n1"] == "low"
    world.step(0.6, 0.9, 0.0, after_s=41.0)
    assert PORT.bands() == {"n1": "high", "n2": "high", "n3": "low"}


def test_withdrawals_and_first_marks_are_free() -> None:
    wishes = [Write("a", "band", None, "high", ""), Write("b", "band", "high", None, "", 9)]
    wishes += [Write(key, "band", "high", "low", "", cost) for key, cost in (("c", 1), ("d", 2))]
    limit = ChangeLimit(1)
    for _ in range(2):
        due = limit.choose_writes(wishes, frozenset("acd"), 0)
        assert [write.key for write in due] == ["a", "b", "d"], "what was not made counts for nothing"
    limit.count_limited_writes(due, 0)
    assert [write.key for write in limit.choose_writes(wishes, frozenset("acd"), 59_999)] == ["a", "b"]
    assert [write.key for write in limit.choose_writes(wishes, frozenset("acd"), 60_000)] == ["a", "b", "d"]


def test_at_most_a_share_of_a_pool_is_marked(tmp_path: Path) -> None:
    world = World(tmp_path, max_share=0.4)
    world.step(0.9, 0.8, 0.7, 0.6, 0.0)
    assert [*PORT.bands().values()] == ["high", "high", "elevated", "elevated", "low"]
    assert world.host.make_status().held_down == 2


def test_a_restart_remembers_the_bands(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.step(0.9)
    world.host.records.write_status(world.host.make_status())
    world.host = AdapterHost(world.config, world.clock)
    world.step(0.25)  # between where it is left and where it is entered
    assert PORT.bands() == {"n1": "high"}


def test_the_audit_keeps_its_newest_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetcast.service.adapter_records.SEGMENT_BYTES", 1)
    world = World(tmp_path)
    for number in range(12):
        world.step(0.9 if number % 2 else 0.0)
    folder = tmp_path / "adapters"
    assert len([*folder.glob("audit-*")]) == 8
    newest = max(folder.glob("audit-*"))
    newest.write_bytes(newest.read_bytes() + b'{"cut sh')
    lines = world.host.records.read_newest_lines("memory", 99)
    assert [line.value for line in lines] == ["high", "low"] * 4


def test_the_page_of_metrics(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.step(0.9, 0.0)
    world.clock.advance(5.0)
    page = make_adapters_page(world.host.make_status(), world.clock.now_ms())
    assert 'fleetcast_adapter_writes_total{adapter="memory"} 2.0' in page
    assert 'fleetcast_adapter_seen_age_seconds{adapter="memory"} 5.0' in page
    assert 'fleetcast_adapter_withdrawn{adapter="memory"} 0.0' in page
    assert 'fleetcast_adapter_held_back{adapter="memory"} 0.0' in page
    assert 'fleetcast_adapter_marked{adapter="memory"} 2.0' in page
    assert make_adapters_page(AdaptersStatus(), 0) == ""


def test_a_status_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    records = AdapterRecords(tmp_path)
    records.write_status(AdaptersStatus(as_of_ms=5))
    (records.folder / "status").write_bytes(b"{")
    assert records.read_status() == AdaptersStatus()
    (records.folder / "status").unlink()
    (records.folder / "status").mkdir()
    assert records.read_status() == AdaptersStatus()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"use": "band_file"}], r"adapters.adapter\[0\] band_file: options.path: is missing"),
        (
            [{"use": "band_file", "options": {"path": "x", "colour": "red"}}],
            "options.colour: no such key; there are path",
        ),
        ([{"use": "lamp"}], r"adapters.adapter\[0\] lamp: adapters.adapter.use \(built in: band_file, .*\): 'lamp'"),
        ([{"use": "band_file", "name": "../x", "options": {"path": "x"}}], r"adapter\[0\].name = '../x'"),
        ([{"use": "band_file", "name": "kube", "options": {"path": "x"}}], "name = 'kube': used already"),
        ([{"use": "band_file", "options": {"path": "x"}}] * 2, r"adapters.adapter\[1\].name = 'band_file': used"),
    ],
)
def test_a_wrong_row_is_named(rows: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_doors(AdaptersConfig(adapter=tuple(AdapterConfig(**row) for row in rows)))
