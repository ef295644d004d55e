"""What the ledger knows of the service's state: its identity, its position, and marks of the other parts."""

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.placement.ledger.file import read_ledger_identity
from fleetcast.placement.ledger.ledger import Ledger, LedgerError
from fleetcast.placement.ledger.old_bodies import SAID_AFTER

VERSION_1 = Path(__file__).parents[2] / "data" / "ledger-v1.sqlite"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path)
    yield ledger
    ledger.close()


def refuse(ledger: Ledger, request_id: str) -> None:
    decision = Decision(request_id=request_id, decision_id="d", outcome="refused", sentence="refused: no room")
    ledger.commit_decision(PlacementRequest(request_id=request_id), decision, 1, "ada", "refuse")


def stored(path: Path) -> dict[str, str]:
    """Return what another process reads from the table `state`, without the rows that every ledger has."""
    with closing(sqlite3.connect(path)) as db:
        return dict(db.execute("SELECT key, value FROM state WHERE key != ?", [SAID_AFTER]))


def test_an_identity_is_written_once(path: Path) -> None:
    ledger = Ledger(path)
    assert ledger.identity == ""
    ledger.set_identity("s-1")
    ledger.set_identity("s-1")
    assert stored(path) == {"identity": '"s-1"'}
    with pytest.raises(LedgerError, match=r"belongs to the state s-1, not to s-2"):
        ledger.set_identity("s-2")
    ledger.close()
    ledger = Ledger(path)
    assert ledger.identity == "s-1"
    ledger.close()


def test_the_position_survives_whatever_is_deleted(path: Path) -> None:
    ledger = Ledger(path)
    assert ledger.position == 0
    for name in "abc":
        refuse(ledger, name)
    assert ledger.position == 3
    ledger._db.execute("DROP TRIGGER audit_is_not_deleted")
    ledger._db.execute("DELETE FROM audit")
    ledger.close()
    ledger = Ledger(path)
    assert ledger.position == 3
    refuse(ledger, "d")
    assert [row["audit_id"] for row in ledger.read_audit_trail(9)] == [4]
    ledger.close()


def test_what_is_rolled_back_has_no_position(ledger: Ledger) -> None:
    def die() -> None:
        with ledger.transaction():
            refuse(ledger, "a")
            assert ledger.position == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        die()
    assert ledger.position == 0


def test_only_the_first_opening_finds_the_file_new(path: Path) -> None:
    for was_new in (True, False):
        ledger = Ledger(path)
        assert ledger.was_new is was_new
        ledger.close()
    path.write_bytes(b"")
    ledger = Ledger(path)
    assert ledger.was_new
    ledger.close()


def test_a_mark_joins_the_next_transaction(ledger: Ledger, path: Path) -> None:
    ledger.record_marks(generation=7, board={"as_of_ms": 5})
    assert ledger.list_marks() == {"generation": 7, "board": {"as_of_ms": 5}}
    assert stored(path) == {}
    refuse(ledger, "a")
    assert stored(path) == {"mark.generation": "7", "mark.board": '{"as_of_ms":5}'}


def test_a_mark_inside_a_transaction_is_on_disk_with_it(ledger: Ledger, path: Path) -> None:
    with ledger.transaction():
        ledger.record_marks(generation=None)
    assert stored(path) == {"mark.generation": "null"}


def test_a_mark_that_is_known_writes_nothing(ledger: Ledger) -> None:
    with ledger.transaction():
        ledger.record_marks(generation=7)
    before = ledger._db.total_changes
    ledger.record_marks(generation=7)
    with ledger.transaction():
        pass
    assert ledger._db.total_changes == before


def test_a_mark_outlives_a_later_transaction_that_fails_and_the_process_that_closes(path: Path) -> None:
    ledger = Ledger(path)
    ledger.record_marks(generation=7)
    roll_back(ledger)
    assert stored(path) == {}
    ledger.close()
    ledger = Ledger(path)
    assert ledger.list_marks() == {"generation": 7}
    ledger.close()


def test_who_accepts_a_loss_stands_in_the_audit(ledger: Ledger) -> None:
    ledger.record_acceptance("the board was lost", 12, "ada")
    (row,) = ledger.read_audit_trail(9)
    assert (row["action"], row["caller"], row["time_ms"], row["sentence"]) == (
        "accept",
        "ada",
        12,
        "the board was lost",
    )


def test_a_look_at_a_ledger_tells_identity_and_position_and_changes_nothing(path: Path) -> None:
    assert read_ledger_identity(path) is None
    path.touch()
    assert read_ledger_identity(path) is None
    ledger = Ledger(path)
    assert read_ledger_identity(path) == ("", 0)
    ledger.set_identity("s-1")
    refuse(ledger, "a")
    assert read_ledger_identity(path) == ("s-1", 1), "while the placer has it open"
    ledger.close()
    before = path.read_bytes()
    assert read_ledger_identity(path) == ("s-1", 1)
    assert path.read_bytes() == before


def test_a_look_at_a_ledger_of_version_1_tells_its_position(path: Path) -> None:
    shutil.copy(VERSION_1, path)
    assert read_ledger_identity(path) == ("", 18)


@pytest.mark.parametrize("garbage", [b"no database" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_look_at_what_is_no_ledger_is_told(path: Path, garbage: bytes) -> None:
    path.write_bytes(garbage)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite cannot be read"):
        read_ledger_identity(path)


def roll_back(ledger: Ledger, change: Callable[[], None] = lambda: None) -> None:
    def fail() -> None:
        with ledger.transaction():
            change()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_memory_is_after_a_rollback_as_before_the_transaction(path: Path) -> None:
    ledger = Ledger(path)
    with ledger.transaction():
        ledger.record_marks(a=1)
    ledger.record_marks(waiting=[2])
    owner = SimpleNamespace(sent=())
    version = ledger.version, ledger.actions.version

    def change() -> None:
        with ledger.transaction():
            ledger.restore_after_rollback(owner)
            ledger.record_marks(a=3, new=4)
            owner.sent = ("x",)
        assert ledger.list_marks() == {"a": 3, "waiting": [2], "new": 4}

    roll_back(ledger, change)
    assert (ledger.list_marks(), owner.sent) == ({"a": 1, "waiting": [2]}, ())
    assert (ledger.version, ledger.actions.version) > version, "nothing that was made from it counts as current"
    with ledger.transaction():
        ledger.restore_after_rollback(owner)
        owner.sent = ("y",)
    assert stored(path) == {"mark.a": "1", "mark.waiting": "[2]"}
    roll_back(ledger)
    assert owner.sent == ("y",), "the next rollback restores nothing of an earlier transaction"
    ledger.close()
