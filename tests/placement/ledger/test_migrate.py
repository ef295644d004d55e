"""A ledger of an earlier version becomes one of this version, whole or not at all."""

import os
import shutil
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet import failpoints, files
from fleetcast.placement.ledger.ledger import Ledger, LedgerError, LedgerUnavailable
from fleetcast.placement.ledger.schema import SCHEMA_VERSION, SCHEMAS, TABLES
from fleetcast.placement.ledger.verify import verify_ledger
from tests.forked import run_forked
from tests.placement.ledger.ledger_world import QUESTIONS, make

# Made by the program of version 1 through its own doors: placements that are active, seen, ended, cancelled and
# expired, refusals, a withdrawal, one placed out of the queue, and two requests that wait.
VERSION_1 = Path(__file__).parents[2] / "data" / "ledger-v1.sqlite"
# Made by the programs of these versions: everything of `ledger_world`, in version 3 with charges and credits, too.
LATER_VERSIONS = {version: Path(__file__).parents[2] / "data" / f"ledger-v{version}.sqlite" for version in (2, 3)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(VERSION_1, tmp_path / "ledger.sqlite"))


def content(path: Path) -> dict[str, list[Any]]:
    """The columns of version 1 of every table."""
    with closing(sqlite3.connect(path)) as db:
        columns = "PRAGMA table_info({})"
        added = ("checksum", "stored", "previous", "hash")
        found = {}
        for table in TABLES:
            names = [row[1] for row in db.execute(columns.format(table)) if row[1] not in added]
            found[table] = db.execute(f"SELECT {', '.join(names)} FROM {table} ORDER BY rowid").fetchall()
        return found | {"numbers": sorted(db.execute("SELECT * FROM sqlite_sequence"))}


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


def test_everything_of_version_1_is_there_and_verifies(path: Path) -> None:
    ledger = Ledger(path)
    assert not ledger.was_new
    assert (ledger.identity, ledger.position, ledger.head.audit_id) == ("", 18, 18)
    assert [intent.request_id for intent in ledger.list_active_intents()] == ["held-2", "held-3"]
    assert [entry.request.request_id for entry in ledger.list_queue_entries()] == ["waits-1", "waits-2"]
    assert [row.request_id for row in ledger.read_decisions_after(0, 99)][:2] == ["held-1", "seen-1"]
    ledger.record_acceptance("it goes on", 1, "ada")
    head = ledger.head
    ledger.close()
    verdict = verify_ledger(path, head.hash)
    assert verdict.findings == []
    assert (verdict.lines, verdict.unchained, verdict.replies, verdict.held) == (19, 18, 10, 19)


def test_what_was_stored_is_byte_for_byte_what_version_1_stored(path: Path) -> None:
    before = content(path)
    assert len(before["audit"]) == 18
    Ledger(path).close()
    assert content(path) == before


def test_the_replies_of_version_1_are_held_to_their_lines(path: Path) -> None:
    Ledger(path).close()
    with closing(sqlite3.connect(path)) as db:
        lines = db.execute("SELECT action, stored FROM audit").fetchall()
        stored = {row[0] for table in ("decisions", "queue") for row in db.execute(f"SELECT checksum FROM {table}")}
    assert {checksum for _, checksum in lines if checksum} == stored
    assert all(checksum for action, checksum in lines if action in ("place", "refuse", "withdraw"))


def test_the_file_as_it_was_lies_beside_it(path: Path) -> None:
    Ledger(path).close()
    copy = path.with_name("ledger.sqlite.v1")
    assert dump(copy) == dump(VERSION_1)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["ledger.sqlite", "ledger.sqlite.v1"]
    copy.replace(path)
    Ledger(path).close()
    assert verify_ledger(path).is_intact, "who goes back to it can come again"


def test_a_ledger_that_cannot_be_copied_is_left_alone(path: Path) -> None:
    path.with_name("ledger.sqlite.v1").mkdir()
    before = dump(path)
    with pytest.raises(LedgerUnavailable, match=r"cannot be copied to .*ledger\.sqlite\.v1: Is a directory"):
        Ledger(path)
    assert dump(path) == before


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A ledger that was migrated without a kill, and the number of statements that this took."""
    file = Path(shutil.copy(VERSION_1, tmp_path_factory.mktemp("straight") / "straight.sqlite"))
    return file, int(_program(file, 10**9).stdout)


@pytest.mark.parametrize("share", range(10))
def test_a_kill_in_the_middle_leaves_the_old_or_the_new(path: Path, straight: tuple[Path, int], share: int) -> None:
    """At a tenth of its statements, two tenths, …; the next start ends what was begun."""
    migrated, statements = straight
    assert statements > 50
    died = _program(path, 1 + share * statements // 10)
    assert died.returncode == -signal.SIGKILL
    _goes_on(path, migrated)


@pytest.mark.parametrize("point", [*(p for p in failpoints.POINTS if p.startswith(("migration.", "ledger.")))])
def test_a_kill_around_the_copy_and_the_commit_leaves_the_old_or_the_new(
    path: Path, tmp_path: Path, point: str
) -> None:
    straight = Path(shutil.copy(VERSION_1, tmp_path / "straight.sqlite"))
    Ledger(straight).close()
    assert _program(path, 10**9, f"{point}=kill").returncode == -signal.SIGKILL
    _goes_on(path, straight)


def _program(path: Path, statement: int, setting: str = "") -> subprocess.CompletedProcess:
    """Open a ledger in a process that is killed at this statement. It prints the number of statements otherwise."""
    done = 0

    def count(_: str) -> None:
        nonlocal done
        done += 1
        if done == statement:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect(path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        db.set_trace_callback(count)
        return db

    def run() -> None:
        failpoints.set_hook(failpoints.parse_failpoints(setting) if setting else None)
        files.connect = connect
        Ledger(path).close()
        print(done)

    return run_forked(run)


def _goes_on(path: Path, straight: Path) -> None:
    ledger = Ledger(path)
    ledger.close()
    assert dump(path) == dump(straight)
    assert dump(path.with_name("ledger.sqlite.v1")) == dump(VERSION_1)
    assert verify_ledger(path).is_intact


# -- files that are none of these


def versioned(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {version}")


def test_a_ledger_of_this_version_that_says_it_is_of_version_1_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    versioned(path, 1)
    with pytest.raises(LedgerError, match=r"is damaged .*it has version 1, but another decisions"):
        Ledger(path)


def test_a_ledger_of_version_1_that_says_it_is_of_this_version_is_damaged(path: Path) -> None:
    versioned(path, 2)
    with pytest.raises(LedgerError, match=r"is damaged .*it has version 2, but another decisions"):
        Ledger(path)


@pytest.mark.parametrize("version", [-1, SCHEMA_VERSION + 1, 99])
def test_a_ledger_of_another_version_is_left_alone(path: Path, version: int) -> None:
    versioned(path, version)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match=f"has version {version}, this program writes {SCHEMA_VERSION}"):
        Ledger(path)
    assert path.read_bytes() == before


def test_a_ledger_whose_version_was_lost_is_not_begun_anew(path: Path) -> None:
    versioned(path, 0)
    with pytest.raises(LedgerError, match="it is no ledger"):
        Ledger(path)


def test_somebody_elses_database_is_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE cats (name TEXT)")
    with pytest.raises(LedgerError, match=r"it has version 0 and cats: it is no ledger"):
        Ledger(path)


def test_a_file_that_version_1_had_begun_is_a_new_ledger(tmp_path: Path) -> None:
    """It made its tables one by one, and said its version last."""
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(SCHEMAS[1])
        db.execute("DROP TABLE audit")
    ledger = Ledger(path)
    assert ledger.was_new
    ledger.close()
    assert verify_ledger(path).is_intact


def test_what_has_no_chain_yet_is_said(path: Path, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="has version 1, a chain has version 4: the placer migrates"):
        verify_ledger(path)
    with pytest.raises(LedgerError, match="there is no ledger"):
        verify_ledger(tmp_path / "nothing.sqlite")
    (tmp_path / "text").write_text("no ledger at all\n" * 100)
    with pytest.raises(LedgerError, match="cannot be read"):
        verify_ledger(tmp_path / "text")


@pytest.mark.parametrize("version", LATER_VERSIONS)
def test_a_later_version_keeps_every_row_and_gets_the_tables_that_it_lacked(tmp_path: Path, version: int) -> None:
    path = Path(shutil.copy(LATER_VERSIONS[version], tmp_path / "ledger.sqlite"))
    before = dump(path)
    ledger = Ledger(path)
    answers = {name: ask(ledger) for name, ask in QUESTIONS.items()}
    assert len(ledger.charges.list_open_charges()) == (3 if version == 3 else 0)
    assert ledger.actions.list_open() == ledger.actions.read_after(0, 9) == []
    ledger.close()
    again = Ledger(path)
    assert {name: ask(again) for name, ask in QUESTIONS.items()} == answers
    again.close()
    assert verify_ledger(path).is_intact
    assert set(before) <= set(dump(path))
    assert dump(tmp_path / f"ledger.sqlite.v{version}") == before


@pytest.mark.parametrize("version", LATER_VERSIONS)
def test_the_answers_of_every_version_are_those_of_a_new_ledger(tmp_path: Path, version: int) -> None:
    path = Path(shutil.copy(LATER_VERSIONS[version], tmp_path / "ledger.sqlite"))
    make(tmp_path / "new.sqlite")
    ledger, new = Ledger(path), Ledger(tmp_path / "new.sqlite")
    for name, ask in QUESTIONS.items():
        if "audit" not in name:  # the sentences of the trail are those of their time
            assert ask(ledger) == ask(new), name
    ledger.close()
    new.close()


@pytest.mark.parametrize("version", LATER_VERSIONS)
@pytest.mark.parametrize("point", [*(p for p in failpoints.POINTS if p.startswith(("migration.", "ledger.")))])
def test_a_kill_leaves_a_later_version_or_the_new_one(tmp_path: Path, version: int, point: str) -> None:
    path = Path(shutil.copy(LATER_VERSIONS[version], tmp_path / "ledger.sqlite"))
    straight = Path(shutil.copy(path, tmp_path / "straight.sqlite"))
    Ledger(straight).close()
    assert _program(path, 10**9, f"{point}=kill").returncode == -signal.SIGKILL
    Ledger(path).close()
    assert dump(path) == dump(straight)
    assert verify_ledger(path).is_intact
