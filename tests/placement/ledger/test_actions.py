"""Actions in the ledger's file: kept whole over kills and damage, each change with its audit line."""

import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fleetcast.fleet import failpoints
from fleetcast.fleet.errors import ConflictError
from fleetcast.placement.actions.action import JobAction
from fleetcast.placement.actions.life import ActionRecord, ActionState, IllegalTransition
from fleetcast.placement.ledger.ledger import Ledger, LedgerError
from fleetcast.placement.ledger.schema import explain_schema_mismatch, read_schema
from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.service.placer.gang_losses import GANG_LOSSES
from fleetcast.service.placer.promised_sets import PROMISED_SETS
from tests.placement.actions.action_world import make_action

S = ActionState


def insert(ledger: Ledger, action: JobAction, now_ms: int = 1) -> ActionRecord:
    return ledger.actions.insert(action, now_ms, "queue")


def changes(ledger: Ledger) -> Iterator[None]:
    """One transaction after the other; stops after each."""
    table = ledger.actions
    for number in range(3):
        insert(ledger, make_action(f"j{number}"), number)
        yield
    for job, state, why in (
        ("j0", S.SENT, ""),
        ("j1", S.WITHDRAWN, "urgent was cancelled"),
        ("j0", S.ACCEPTED, ""),
        ("j0", S.SEEN, "telemetry"),
    ):
        record = table.find_open_action_of(job)
        assert record is not None
        table.enter(record, state, 10, "agents", why)
        yield
    with ledger.transaction():
        insert(ledger, make_action("j0"), 20)
        insert(ledger, make_action("j3"), 20)
    yield


def fill(ledger: Ledger) -> None:
    for _ in changes(ledger):
        pass


def stored(ledger: Ledger) -> list[ActionRecord]:
    return ledger.actions.read_after(0, 100)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    fill(ledger)
    before, open_before = stored(ledger), ledger.actions.list_open()
    ledger.close()
    again = Ledger(tmp_path / "l")
    assert (stored(again), again.actions.list_open()) == (before, open_before)
    assert [(row.action.job, row.state) for row in before] == [
        ("j2", S.PROPOSED), ("j1", S.WITHDRAWN), ("j0", S.SEEN), ("j0", S.PROPOSED), ("j3", S.PROPOSED),
    ]  # fmt: skip
    assert [step.state for step in before[2].life] == [S.PROPOSED, S.SENT, S.ACCEPTED, S.SEEN]
    assert before[2].action_id.endswith("-1")
    assert before[3].action_id == before[2].action_id[:-1] + "2", "the same key once more"
    assert again.actions.find_action(before[1].action_id) == before[1]
    assert again.actions.find_action("nothing") is None
    again.close()
    assert verify_ledger(tmp_path / "l").is_intact


def test_each_change_has_a_line_and_the_lines_number_is_its_cursor(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    fill(ledger)
    lines = {row["audit_id"]: row for row in ledger.read_audit_trail(100)}
    assert len(lines) == 9
    for record in stored(ledger):
        line = lines[record.changed]
        assert (line["action"], line["request_id"]) == (f"action_{record.state}", record.action_id)
    assert lines[5]["sentence"].startswith("withdrawn: urgent was cancelled; stops attempt 1 of j1 (4 GPUs)")
    assert [row.action.job for row in ledger.actions.read_after(7, 1)] == ["j0"]
    assert [row.action.job for row in ledger.actions.read_after(0, 9, state="proposed", job="j3")] == ["j3"]
    assert ledger.actions.read_after(0, 2, newest=True) == ledger.actions.read_after(0, 100)[-2:]
    ledger.close()


def test_a_state_twice_writes_nothing_and_an_illegal_one_neither(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    record = insert(ledger, make_action())
    position = ledger.position
    assert ledger.actions.enter(record, S.PROPOSED, 2, "ada") is record
    with pytest.raises(IllegalTransition, match="is proposed: it cannot become seen"):
        ledger.actions.enter(record, S.SEEN, 2, "ada")
    assert ledger.position == position
    assert ledger.actions.list_open() == [record]
    ledger.close()


def test_a_write_that_fails_leaves_the_memory_as_the_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    record = insert(ledger, make_action())

    def fail(point: str) -> float:
        if point == "ledger.before_commit":
            raise OSError(28, "No space left on device")
        return 1.0

    failpoints.set_hook(fail)
    try:
        with pytest.raises(OSError, match="No space"):
            ledger.actions.enter(record, S.SENT, 2, "placer")
        with pytest.raises(OSError, match="No space"):
            insert(ledger, make_action("another"))
    finally:
        failpoints.set_hook(None)
    assert ledger.actions.list_open() == stored(ledger) == [record]
    ledger.close()


def test_a_kill_at_any_write_leaves_a_state_that_was_written(tmp_path: Path) -> None:
    """The actions after each transaction, and after a kill before or after each commit: always one of the first."""
    straight = Ledger(tmp_path / "straight")
    written = [stored(straight), *(stored(straight) for _ in changes(straight))]
    straight.close()
    found = []
    for kills in range(1, 20):
        path = tmp_path / f"l{kills}"
        child = os.fork()
        if not child:
            left = [kills]

            def hook(point: str, left: list[int] = left) -> float:
                if point.startswith("ledger."):
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                return 1.0

            failpoints.set_hook(hook)
            fill(Ledger(path))
            os._exit(0)
        os.waitpid(child, 0)
        ledger = Ledger(path)
        found.append(written.index(stored(ledger)))
        assert [row for row in stored(ledger) if row.is_open] == ledger.actions.list_open()
        ledger.close()
        assert verify_ledger(path).is_intact
    assert found == sorted(found)
    assert set(found) == set(range(len(written)))


def test_a_file_cut_off_at_any_byte_has_actions_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = Ledger(path)
    written = [stored(ledger), *(stored(ledger) for _ in changes(ledger))]
    log = path.with_name("l-wal").read_bytes()
    found = []
    for cut in sorted({*range(0, len(log), len(log) // 60), len(log)}):
        torn = tmp_path / f"cut{cut}" / "l"
        torn.parent.mkdir()
        shutil.copy(path, torn)
        torn.with_name("l-wal").write_bytes(log[:cut])
        again = Ledger(torn)
        found.append(written.index(stored(again)))
        again.close()
        assert verify_ledger(torn).is_intact
    ledger.close()
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, len(written) - 1)


@pytest.mark.parametrize("column", ["wish", "job", "queue", "state", "body", "life", "why", "changed", "checksum"])
def test_what_somebody_changed_is_not_served_and_is_found(tmp_path: Path, column: str) -> None:
    ledger = Ledger(tmp_path / "l")
    record = insert(ledger, make_action())
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "l", isolation_level=None)) as db:
        db.execute(f"UPDATE actions SET {column} = CAST(replace({column}, 'e', 'f') || '0' AS BLOB)")
    assert "action" in {finding.kind for finding in verify_ledger(tmp_path / "l").findings}
    with pytest.raises(LedgerError, match="is not what was written"):
        Ledger(tmp_path / "l").actions.find_action(record.action_id)


def test_a_row_whose_checksum_was_made_again_does_not_fit_its_line(tmp_path: Path) -> None:
    from fleetcast.placement.ledger.chain import compute_action_checksum

    ledger = Ledger(tmp_path / "l")
    insert(ledger, make_action())
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "l", isolation_level=None)) as db:
        row = list(db.execute("SELECT * FROM actions").fetchone()[:-1])
        row[7] = "because"
        db.execute("UPDATE actions SET why = ?, checksum = ?", [row[7], compute_action_checksum(row)])
    (finding,) = verify_ledger(tmp_path / "l").findings
    assert (finding.kind, finding.sentence) == ("action", f"action {row[0]!r} is not what line 1 speaks for")


def test_an_action_that_was_deleted_is_missed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    fill(ledger)
    ledger.close()
    with closing(sqlite3.connect(tmp_path / "l", isolation_level=None)) as db:
        db.execute("DELETE FROM actions WHERE job = 'j1'")
    (finding,) = verify_ledger(tmp_path / "l").findings
    assert finding.sentence == "4 actions are stored, the trail speaks of 5"


# -- back to an earlier version


def test_a_ledger_goes_back_to_version_3_and_forward_again(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = Ledger(path)
    fill(ledger)
    ledger.record_marks(actions={"paused_by": "ada"}, **{PROMISED_SETS: [{}], GANG_LOSSES: [{}]}, another=1)
    before = stored(ledger)
    with pytest.raises(ConflictError, match="3 actions are open"):
        ledger.downgrade(30, "ada")
    for record in ledger.actions.list_open():
        ledger.actions.enter(record, S.WITHDRAWN, 30, "ada")
    ledger.downgrade(31, "ada")
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
        assert explain_schema_mismatch(read_schema(db), 3) == ""
        assert not [row for row in read_schema(db) if "action" in row]
        assert db.execute("SELECT count(*) FROM audit WHERE stored != ''").fetchone() == (0,)
    copy = Ledger(tmp_path / "l.v4")
    assert {row.action_id for row in stored(copy)} == {row.action_id for row in before}
    copy.close()
    again = Ledger(path)  # the start of this version, which migrates it
    assert stored(again) == []
    assert again.list_marks() == {"another": 1}
    assert insert(again, make_action()).action_id.endswith("-1")
    assert again.read_audit_trail(2)[1]["sentence"] == ("the ledger has version 3 from now on; its actions are in l.v4")
    again.close()
    assert verify_ledger(path).is_intact
