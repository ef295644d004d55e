"""A part of the state that is lost, old, or another site's: nothing is placed until it is put back or accepted."""

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.inbox.inbox import InboxSource, InboxWriter
from fleetcast.placement.ledger.ledger import LedgerError
from fleetcast.service.config import Config
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.state_folder import lock_role
from fleetcast.service.state_identity import find_doubts
from fleetcast.service.state_parts import read_state_parts
from tests.service.placer_world import NOW_MS, World

NODES = ("n01", "n02", "n03", "n04")
LEDGER_FILES = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm")


class Site(World):
    """A real pipeline and a real placer on one state folder, in process."""

    def __init__(self, folder: Path, now_ms: int = NOW_MS, starts: bool = True) -> None:
        self.folder = folder
        self.config = Config(state=str(folder))
        self.clock = ManualClock(now_ms)
        if starts:
            self.start()

    def start(self) -> None:
        topology = Topology.build([NodeSpec(name, 8, "H100") for name in NODES])
        inbox = self.config.inbox
        self.pipeline = Pipeline(self.config, self.clock, topology, lambda _: [InboxSource(inbox)])
        super().start()
        self.turn()

    def turn(self) -> None:
        """What is in the inbox is folded, a board published, and the placer looks at it."""

        async def fold() -> None:
            source = self.pipeline.sources[0]
            self.clock.advance(10)
            while source.backlog_bytes():
                self.pipeline.apply_batch(await source.next())
            await self.pipeline.tick()

        asyncio.run(fold())
        self.step()

    def save(self) -> None:
        asyncio.run(self.pipeline.save())

    def tell(self, job: str, node: str) -> None:
        """A job that took a node whole. Each call is a writer of its own, so a segment of its own."""
        ranks = [{"rank": 0, "node": node, "gpus": list(range(8))}]
        event = {"job": job, "attempt": 1, "sequence": 1, "time_ms": NOW_MS, "type": "started", "ranks": ranks}

        async def append() -> None:
            writer = InboxWriter(self.config.inbox, "api")
            await writer.append([msgspec.json.encode(event)], NOW_MS)
            await writer.close()

        asyncio.run(append())

    def live(self) -> bytes:
        """Some jobs and saves, so that the inbox is pruned, and a promise; returns the reply that promised."""
        for job, node in (("a", "n01"), ("b", "n02")):
            self.tell(job, node)
            self.turn()
            self.save()
        self.save()
        reply = self.promise("p").content
        self.turn()
        return reply

    def promise(self, request_id: str) -> httpx.Response:
        return self.ask("POST", "/placements", {"request_id": request_id, "gpus_per_node": 8})

    def doubted(self) -> list[str]:
        return [doubt["part"] for doubt in self.ask("GET", "/healthz").json()["doubts"]]

    def on_disk(self) -> list[str]:
        return [doubt.part for doubt in find_doubts(read_state_parts(self.config))]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "site")
    yield made
    made.close()


def state(*words: str, folder: Path, exit_code: int = 0) -> str:
    """What `fleetcast state ...` prints."""
    result = CliRunner().invoke(app, ["state", *words, "--state", str(folder)])
    assert result.exit_code == exit_code, result.output
    return result.output


# -- what gets lost -----------------------------------------------------------------------------------------------


def copy_ledger(path: Path, to: Path) -> None:
    """By SQLite's own backup, as the documentation says."""
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(to)) as copy:
        source.backup(copy)


def no_ledger(folder: Path, _: Path) -> None:
    for name in LEDGER_FILES:
        (folder / name).unlink(missing_ok=True)


def empty_ledger(folder: Path, _: Path) -> None:
    no_ledger(folder, _)
    (folder / "ledger.sqlite").write_bytes(b"")


def old_ledger(folder: Path, old: Path) -> None:
    no_ledger(folder, old)
    copy_ledger(old / "ledger.sqlite", folder / "ledger.sqlite")


def only_the_ledger(folder: Path, _: Path) -> None:
    for name in ("board", "snapshot", "inbox"):
        shutil.rmtree(folder / name)


def no_snapshots(folder: Path, _: Path) -> None:
    shutil.rmtree(folder / "snapshot")


def no_board(folder: Path, _: Path) -> None:
    shutil.rmtree(folder / "board")


def no_inbox(folder: Path, _: Path) -> None:
    shutil.rmtree(folder / "inbox")


def no_segments(folder: Path, _: Path) -> None:
    for path in (folder / "inbox").glob("*.seg"):
        path.unlink()


def old_snapshot_and_board(folder: Path, old: Path) -> None:
    for name in ("snapshot", "board"):
        shutil.rmtree(folder / name)
        shutil.copytree(old / name, folder / name)


def anothers_ledger(folder: Path, _: Path) -> None:
    other = Site(folder.parent / "other")
    other.live()
    other.close()
    no_ledger(folder, _)
    copy_ledger(other.config.ledger, folder / "ledger.sqlite")


Loss = Callable[[Path, Path], None]
LOSSES: list[tuple[Loss, set[str], str]] = [
    (no_ledger, {"ledger"}, "the ledger is new, and the "),
    (empty_ledger, {"ledger"}, "the ledger is new, and the "),
    (old_ledger, {"ledger"}, "the ledger ends at line 0, and the "),
    (only_the_ledger, {"snapshot", "board", "inbox"}, "the snapshots are gone, and the ledger had seen number "),
    (no_snapshots, {"snapshot"}, "the snapshots are gone, and the "),
    (no_board, {"board"}, "the board is gone, and the "),
    (no_inbox, {"inbox"}, "the inbox is gone or was emptied"),
    (no_segments, {"inbox"}, "the inbox lacks what the "),
    (old_snapshot_and_board, {"snapshot"}, "the snapshot is older than what is left of the inbox: "),
    (anothers_ledger, {"ledger"}, "the ledger of the state "),
]
each_loss = pytest.mark.parametrize(("lose", "parts", "words"), LOSSES, ids=[row[0].__name__ for row in LOSSES])


@dataclass(frozen=True, slots=True)
class Past:
    """A site that lived and was killed. `reply`: that of its promise. `old` and `whole`: copies of its folder, an old
    one and one as it was at the kill."""

    site: Site
    reply: bytes
    old: Path
    whole: Path


@pytest.fixture(scope="module")
def past_once(tmp_path_factory: pytest.TempPathFactory) -> Past:
    """Let a site live, once for all tests. They get copies of its folders."""
    folder = tmp_path_factory.mktemp("past")
    site, old, whole = Site(folder / "site"), folder / "old", folder / "whole"
    site.tell("first", "n03")
    site.turn()
    site.save()
    shutil.copytree(site.folder, old)
    copy_ledger(site.config.ledger, old / "copy.sqlite")
    no_ledger(old, old)
    (old / "copy.sqlite").rename(old / "ledger.sqlite")
    reply = site.live()
    site.close()
    shutil.copytree(site.folder, whole)
    return Past(site, reply, old, whole)


@pytest.fixture
def past(past_once: Past, tmp_path: Path) -> Iterator[Past]:
    """A past in folders of this test's own. Its site is not started."""
    shutil.copytree(past_once.old.parent, tmp_path, dirs_exist_ok=True)
    site = Site(tmp_path / "site", past_once.site.clock.now_ms(), starts=False)
    yield Past(site, past_once.reply, tmp_path / "old", tmp_path / "whole")
    site.close()


@each_loss
def test_nothing_is_placed_and_what_was_lost_is_named(past: Past, lose: Loss, parts: set[str], words: str) -> None:
    site = past.site
    lose(site.folder, past.old)
    site.start()
    answers = [
        site.promise("p"),
        site.promise("q"),
        site.ask("POST", "/queue", {"request_id": "r"}),
        site.ask("DELETE", "/placements/p"),
        site.ask("DELETE", "/queue/r"),
    ]
    assert [answer.status_code for answer in answers] == [503] * 5
    assert words in answers[1].json()["detail"]
    assert answers[1].json()["detail"].endswith("put back, or accepted: fleetcast state show")
    assert set(site.doubted()) == parts
    assert set(site.on_disk()) >= parts
    found = site.ask("GET", "/healthz").json()["doubts"]
    assert all(doubt["since_ms"] >= NOW_MS for doubt in found)
    assert f"fleetcast_placer_state_doubts {len(found)}.0" in site.ask("GET", "/metrics").text
    assert site.ask("GET", "/queue").status_code == 200
    site.restart()
    site.save()
    site.restart()
    site.save()
    assert set(site.doubted()) == parts, "it lasts over restarts and snapshots"


@each_loss
def test_what_is_put_back_is_taken_without_a_question(past: Past, lose: Loss, parts: set[str], words: str) -> None:
    site = past.site
    lose(site.folder, past.old)
    site.start()
    assert set(site.doubted()) == parts
    site.save()
    site.close()
    for name in ("ledger.sqlite", "snapshot", "board", "inbox"):
        if name.partition(".")[0] in parts or lose in (only_the_ledger, old_snapshot_and_board):
            put_back(past.whole, site.folder, name)
    site.start()
    assert site.doubted() == []
    assert site.on_disk() == []
    assert site.promise("p").content == past.reply
    assert site.promise("q").json()["outcome"] == "refused"  # a, b and first run, p is promised the fourth


def put_back(whole: Path, folder: Path, name: str) -> None:
    for path in folder.glob(f"{name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in whole.glob(f"{name}*"):
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)


@each_loss
def test_it_goes_on_once_it_is_accepted(past: Past, lose: Loss, parts: set[str], words: str) -> None:
    site = past.site
    lose(site.folder, past.old)
    site.start()
    site.close()
    said = state("accept", folder=site.folder)
    assert "it means: " in said
    site.start()
    assert site.doubted() == []
    assert site.promise("new").status_code == 200
    row = next(row for row in site.ask("GET", "/audit").json()["rows"] if row["action"] == "accept")
    assert "is accepted as it is, and is " in row["sentence"]
    site.turn()
    site.save()
    site.turn()
    site.close()
    site.start()
    assert site.doubted() == site.on_disk() == []
    assert "there is nothing to accept" in state("accept", folder=site.folder)
    # what was lost comes back too late: others were promised meanwhile what it had
    site.close()
    put_back(past.whole, site.folder, "ledger.sqlite")
    site.start()
    assert site.doubted() == ["ledger"]
    assert site.promise("late").status_code == 503


def test_a_running_site_takes_an_acceptance_over(past: Past) -> None:
    site = past.site
    only_the_ledger(site.folder, past.old)
    site.start()
    before = site.service.ledger.identity
    with lock_role(site.config, "placer"):
        assert "the placer runs" in state("accept", folder=site.folder)
    site.turn()
    site.turn()
    assert site.doubted() == []
    assert site.service.ledger.identity not in ("", before)
    assert site.promise("new").json()["outcome"] == "placed"
    assert site.service.ledger.read_audit_trail(9)[-1]["sentence"]
    assert [row["action"] for row in site.service.ledger.read_audit_trail(9)].count("accept") == 1


def test_the_ledger_that_is_taken_from_a_running_placer_ends_it(site: Site) -> None:
    """It would go on writing into a file that nobody finds again."""
    site.live()
    no_ledger(site.folder, site.folder)
    assert site.promise("q").status_code == 503
    with pytest.raises(LedgerError, match="was removed or replaced while the placer ran"):
        site.turn()


# -- what is no loss ------------------------------------------------------------------------------------------------


def test_a_new_folder_is_asked_no_questions_and_gets_one_identity(site: Site) -> None:
    site.turn()
    assert site.doubted() == site.on_disk() == []
    site.save()
    parts = read_state_parts(site.config).list_named_parts()
    assert {part.identity for part in parts.values()} == {site.service.ledger.identity} != {""}
    site.restart()
    assert site.doubted() == []


def test_kills_and_a_torn_snapshot_are_mended_as_ever(site: Site) -> None:
    reply = site.live()
    site.tell("c", "n03")
    site.turn()
    site.close()  # killed: what came after the last snapshot is in the inbox
    newest = max(int(path.name) for path in (site.folder / "snapshot").iterdir())
    (site.folder / "snapshot" / str(newest) / "state.arrays").write_bytes(b"torn")
    site.start()
    assert site.doubted() == site.on_disk() == []
    assert site.promise("p").content == reply
    assert sorted(row.job for row in site.pipeline.state.jobs.list_running()) == ["a", "b", "c"]


def test_a_board_that_was_torn_by_a_power_cut_is_no_loss(site: Site) -> None:
    site.live()
    site.close()
    (site.folder / "board" / "board").write_bytes(b"")
    site.start()
    assert site.doubted() == []


def test_a_folder_from_before_identities_is_taken_silently(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    site = Site(folder)
    site.pipeline.state_monitor = None
    site.live()
    site.close()
    (folder / "inbox" / "identity").unlink()
    no_ledger(folder, folder)
    shutil.copyfile(Path(__file__).parents[2] / "data" / "ledger-v1.sqlite", folder / "ledger.sqlite")
    lines = read_state_parts(site.config).ledger
    assert lines is not None
    assert lines.position > 0
    site.start()
    site.turn()
    assert site.doubted() == site.on_disk() == []
    assert len({part.identity for part in read_state_parts(site.config).list_named_parts().values()} - {""}) == 1
    site.close()
    site.start()
    site.close()
    no_ledger(folder, folder)
    site.start()
    assert site.doubted() == ["ledger"]
    site.close()


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("show",), ("accept",), ("show", "--json", "nowhere/there.json")])
def test_of_a_folder_that_is_not_there_nothing_is_said_to_agree(tmp_path: Path, words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["state", *words, "--state", str(tmp_path / "mistyped")])
    assert isinstance(result.exception, ConfigError)
    assert not (tmp_path / "mistyped").exists()


def test_show_tells_of_each_part_what_it_is_and_what_the_others_saw(past: Past) -> None:
    site = past.site
    body: dict[str, Any] = msgspec.json.decode(state("show", "--json", "-", folder=site.folder))
    assert body["whole"] is True
    assert [row["part"] for row in body["parts"]] == ["ledger", "snapshot", "board", "inbox"]
    assert {row["identity"] for row in body["parts"]} == {body["identity"]}
    assert set(body["parts"][0]["seen_by"]) >= {"board", "snapshot"}
    no_ledger(site.folder, past.old)
    body = msgspec.json.decode(state("show", "--json", "-", folder=site.folder, exit_code=1))
    assert body["whole"] is False
    assert body["parts"][0]["verdict"].startswith("the ledger is gone, and the ")
    assert body["parts"][0]["since_ms"] >= NOW_MS
    lines = state("show", folder=site.folder, exit_code=1)
    assert "ledger    the ledger is gone" in lines
    assert "          board saw it at line " in lines
    assert "snapshot  whole" in lines
    assert "fleetcast state accept" in lines
    site.start()
