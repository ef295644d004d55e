import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import Decision, PlacementRequest, RankPlacement
from fleetcast.placement.ledger.chain import NO_HASH, hash_line
from fleetcast.placement.ledger.ledger import IntentState, Ledger, LedgerError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    ledger = Ledger(path)
    yield ledger
    ledger.close()


def placed(request_id: str, node: str = "n001") -> Decision:
    return Decision(
        request_id=request_id,
        decision_id=f"d-{request_id}",
        outcome="placed",
        sentence=f"placed 2 GPUs on {node}",
        ranks=(RankPlacement(0, node, (0, 1)),),
        nodes=3,
        candidates=1,
        rejected={"busy": 2},
        expires_ms=5_000,
        models={"risk": "rules"},
    )


def refused(request_id: str) -> Decision:
    return Decision(request_id=request_id, decision_id="d-x", outcome="refused", sentence="refused: no room")


def test_a_retry_gets_the_same_bytes_after_a_restart(path: Path) -> None:
    requests = [PlacementRequest(request_id="a", cpus=4), PlacementRequest(request_id="b")]
    first = Ledger(path)
    replies = [
        first.commit_decision(requests[0], placed("a"), 1_000, "me", "place"),
        first.commit_decision(requests[1], refused("b"), 1_000, "me", "place"),
    ]
    first.close()
    second = Ledger(path)
    assert [second.find_stored_reply(request) for request in requests] == replies
    assert second.find_reply("a") == replies[0]
    assert [intent.request_id for intent in second.list_active_intents()] == ["a"]
    assert second.list_active_intents()[0].gpus == 2
    second.close()


def test_another_body_under_the_same_id_is_refused(ledger: Ledger) -> None:
    ledger.commit_decision(PlacementRequest(request_id="a"), placed("a"), 1, "", "place")
    with pytest.raises(RequestError, match="another body") as caught:
        ledger.find_stored_reply(PlacementRequest(request_id="a", gang=2))
    assert caught.value.field == "request_id"
    ledger.enqueue(PlacementRequest(request_id="q"), refused("q"), 1, "")
    with pytest.raises(RequestError, match="another body"):
        ledger.find_stored_reply(PlacementRequest(request_id="q", priority=5))


def test_an_intent_holds_until_it_is_settled(ledger: Ledger) -> None:
    for name in ("a", "b"):
        ledger.commit_decision(PlacementRequest(request_id=name), placed(name), 1, "", "place")
    before = ledger.version
    ledger.finish_intents([("a", IntentState.SEEN), ("nobody", IntentState.SEEN)], 2)
    assert ledger.version > before
    assert [intent.request_id for intent in ledger.list_active_intents()] == ["b"]
    assert ledger.read_intent_state("a") is IntentState.SEEN
    assert ledger.read_intent_state("nobody") is None
    assert ledger.finish_intents([("b", IntentState.EXPIRED)], 3) == 1
    assert ledger.finish_intents([], 4) == 0
    assert "did not start in time" in ledger.read_audit_trail(1)[0]["sentence"]


def test_a_queued_request_moves_to_the_decisions_when_placed(path: Path) -> None:
    request = PlacementRequest(request_id="a", priority=3)
    ledger = Ledger(path)
    waiting = ledger.enqueue(request, refused("a"), 7, "me")
    assert ledger.find_stored_reply(request) == waiting
    ledger.close()
    ledger = Ledger(path)
    assert [(entry.request, entry.queued_ms) for entry in ledger.list_queue_entries()] == [(request, 7)]
    final = ledger.commit_decision(request, placed("a"), 9, "me", "place from queue")
    assert ledger.list_queue_entries() == []
    assert ledger.find_stored_reply(request) == final != waiting
    ledger.close()


def test_decisions_are_polled_by_cursor(ledger: Ledger) -> None:
    for name in "abc":
        ledger.commit_decision(PlacementRequest(request_id=name), placed(name), 1, "", "place")
    first = ledger.read_decisions_after(0, 2)
    assert [row.request_id for row in first] == ["a", "b"]
    assert [row.request_id for row in ledger.read_decisions_after(first[-1].cursor, 10)] == ["c"]


def test_what_fails_half_way_leaves_nothing_behind(ledger: Ledger) -> None:
    ledger.enqueue(PlacementRequest(request_id="a"), refused("a"), 1, "")

    def commit_and_die() -> None:
        with ledger.transaction():
            ledger.commit_decision(PlacementRequest(request_id="a"), placed("a"), 1, "", "place")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        commit_and_die()
    assert ledger.list_active_intents() == []
    assert ledger.is_queued("a")
    assert ledger.read_decisions_after(0, 10) == []


def test_a_ledger_that_cannot_be_written_says_so_and_promises_nothing(ledger: Ledger, path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    ledger._db.execute("PRAGMA busy_timeout = 10")
    with pytest.raises(LedgerError, match="cannot be used now: database is locked"):
        ledger.commit_decision(PlacementRequest(request_id="a"), placed("a"), 1, "", "place")
    other.close()
    assert ledger.list_active_intents() == []
    assert ledger.find_reply("a") is None


def test_the_audit_trail_is_append_only(ledger: Ledger, path: Path) -> None:
    ledger.commit_decision(PlacementRequest(request_id="a"), placed("a"), 11, "alice", "place")
    ledger.commit_decision(PlacementRequest(request_id="b"), refused("b"), 12, "bob", "place")
    assert [row["caller"] for row in ledger.read_audit_trail(10)] == ["bob", "alice"]
    (row,) = ledger.read_audit_trail(10, request_id="a")
    assert row["models"] == {"risk": "rules"}
    assert row["sentence"] == "placed 2 GPUs on n001"
    assert [row["audit_id"] for row in ledger.read_audit_trail(10, after=1)] == [2]
    other = sqlite3.connect(path)
    replaced = "INSERT OR REPLACE INTO audit SELECT 1, 1, 'x', '', '', '', 1, '{}', '', '', '', ''"
    for statement in ("DELETE FROM audit", "UPDATE audit SET caller = 'x'", replaced):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            other.execute(statement)
    other.close()


def test_the_end_of_a_placement_is_audited_with_the_decision_that_it_ends(ledger: Ledger) -> None:
    ledger.commit_decision(PlacementRequest(request_id="a"), placed("a"), 11, "alice", "place")
    ledger.finish_intents([("a", IntentState.CANCELLED)], 12, "bob")
    ended, began = ledger.read_audit_trail(10)
    assert (ended["caller"], ended["action"], ended["time_ms"]) == ("bob", "cancelled", 12)
    for column in ("request_id", "decision_id", "board_as_of_ms", "models"):
        assert ended[column] == began[column]


def test_what_could_not_be_rolled_back_in_memory_is_read_from_the_file_again(ledger: Ledger, path: Path) -> None:
    ledger.commit_decision(PlacementRequest(request_id="a"), placed("a"), 1, "", "place")
    ledger._db.execute("CREATE TEMP TRIGGER full BEFORE INSERT ON main.audit BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(LedgerError, match="full"):
        ledger.finish_intents([("a", IntentState.EXPIRED)], 2)
    assert [intent.request_id for intent in ledger.list_active_intents()] == ["a"]
    ledger._db.execute("DROP TRIGGER full")
    assert ledger.finish_intents([("a", IntentState.EXPIRED)], 3) == 1


def test_a_row_that_is_no_request_is_damage(path: Path) -> None:
    ledger = Ledger(path)
    ledger.enqueue(PlacementRequest(request_id="a"), refused("a"), 1, "")
    ledger._db.execute("UPDATE queue SET body = X'7b22'")
    ledger.close()
    with pytest.raises(LedgerError, match=r"ledger\.sqlite is damaged"):
        Ledger(path)


def test_a_page_that_breaks_while_the_file_is_open_is_told_and_nothing_is_promised(path: Path) -> None:
    ledger = Ledger(path)
    for number in range(200):
        ledger.commit_decision(PlacementRequest(request_id=f"r{number}"), refused(f"r{number}"), 1, "", "refuse")
    ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    size = int(ledger._db.execute("PRAGMA page_size").fetchone()[0])
    ledger.close()
    ledger = Ledger(path)
    ledger._db.execute("PRAGMA cache_size = 0")
    whole = path.read_bytes()
    path.write_bytes(whole[: 2 * size] + b"\xff" * (len(whole) - 2 * size))
    with pytest.raises(LedgerError, match="is damaged"):
        [ledger.find_reply(f"r{number}") for number in range(200)]
    with pytest.raises(LedgerError):
        ledger.commit_decision(PlacementRequest(request_id="new"), placed("new"), 1, "", "place")
    ledger.close()
    with pytest.raises(LedgerError, match="is damaged"):
        Ledger(path)


@pytest.mark.parametrize("garbage", [b"this is not a database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_named_not_overwritten(path: Path, garbage: bytes) -> None:
    path.write_bytes(garbage)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite"):
        Ledger(path)
    assert path.read_bytes() == garbage


def test_a_ledger_of_a_later_version_is_left_alone(path: Path) -> None:
    Ledger(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(LedgerError, match="version 99"):
        Ledger(path)


def test_the_reply_is_the_decision_in_json(ledger: Ledger) -> None:
    reply = ledger.commit_decision(PlacementRequest(request_id="a"), placed("a"), 1, "", "place")
    assert msgspec.json.decode(reply, type=Decision) == placed("a")


@pytest.mark.parametrize(
    "change", ["UPDATE queue SET reply = 7", "UPDATE queue SET queued_ms = 'soon'", "UPDATE intents SET cpus = 'four'"]
)
def test_a_value_of_another_type_is_damage(path: Path, change: str) -> None:
    ledger = Ledger(path)
    ledger.commit_decision(PlacementRequest(request_id="a"), placed("a"), 1_000, "me", "place")
    ledger.enqueue(PlacementRequest(request_id="b"), refused("b"), 1_000, "me")
    ledger.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(change)
    with pytest.raises(LedgerError, match="damaged"):
        Ledger(path)


def test_an_audit_line_that_is_no_json_is_damage(ledger: Ledger, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        line = (1, 1, "a", "place", "r", "d", 0, "{", "s", "", NO_HASH)
        db.execute("INSERT INTO audit VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", [*line, hash_line(line)])
    with pytest.raises(LedgerError, match="damaged"):
        ledger.read_audit_trail(10)
