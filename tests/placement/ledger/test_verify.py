"""What somebody changes in the ledger's file behind its back is not served, and is told."""

import hashlib
import json
import sqlite3
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ledger import verify as ledger_verify
from fleetcast.placement.ledger.chain import NO_HASH, compute_decision_checksum, compute_intent_checksum, hash_line
from fleetcast.placement.ledger.ledger import IntentState, Ledger, LedgerError
from fleetcast.placement.ledger.verify import LedgerVerdict, verify_ledger
from tests.fuzz.bounds import examples
from tests.placement.ledger.ledger_world import DECIDED, FAST, NEW, QUESTIONS, decision, edit, fill, make

STORED = {"decisions": "cursor", "intents": "request_id", "queue": "request_id", "audit": "audit_id"}


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        path = Path(folder) / "ledger.sqlite"
        make(path)
        yield path


def rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


def answers(path: Path) -> dict[str, Any]:
    """What a ledger serves, by question; a LedgerError where it refuses to, of all of them where it does not open."""
    try:
        ledger = Ledger(path)
    except LedgerError as error:  # a copy, whose frames keep no connection open while the file is replaced
        return dict.fromkeys(QUESTIONS, LedgerError(str(error)))
    said = {}
    with closing(ledger):
        for name, ask in QUESTIONS.items():
            try:
                said[name] = ask(ledger)
            except LedgerError as error:
                said[name] = error
    return said


def seen(verdict: LedgerVerdict) -> list[tuple[str, int | None, str | None]]:
    return [(finding.kind, finding.audit_id, finding.request_id) for finding in verdict.findings]


# -- the formula, as another program would have it


def digest(table: str, row: Any) -> str:
    values = [b64encode(value).decode() if isinstance(value, bytes) else value for value in row]
    values = [str(value) if isinstance(value, float) else value for value in values]
    return hashlib.sha256(json.dumps([table, *values], ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()


def test_another_program_can_make_the_chain_and_the_checksums_from_the_file_alone(path: Path) -> None:
    before = "0" * 64
    lines = rows(path, "SELECT * FROM audit ORDER BY audit_id")
    assert len(lines) == 10
    for *line, kept in lines:
        assert line[-1] == before
        assert digest("audit", line) == kept
        before = kept
    for table in ("decisions", "queue", "intents"):
        stored = rows(path, f"SELECT * FROM {table}")
        assert stored
        for *row, kept in stored:
            assert digest(table, row) == kept


def test_the_head_is_the_newest_line_and_goes_on_after_a_restart(path: Path) -> None:
    for _ in range(2):
        ledger = Ledger(path)
        ledger.record_acceptance("once more", 7_000, "ada")
        newest = ledger.read_audit_trail(1)[0]
        assert (ledger.head.audit_id, ledger.head.hash) == (newest["audit_id"], newest["hash"])
        ledger.close()
    assert verify_ledger(path).is_intact


def test_a_ledger_is_verified_while_it_is_written(path: Path) -> None:
    ledger = Ledger(path)
    head = ledger.head
    with ledger.transaction():
        ledger.record_acceptance("not yet on disk", 7_000, "ada")
        assert verify_ledger(path, head.hash).head == head
    assert verify_ledger(path, head.hash).lines == head.audit_id + 1
    ledger.close()


def test_an_empty_ledger_is_as_it_was_written(tmp_path: Path) -> None:
    Ledger(tmp_path / "new.sqlite").close()
    verdict = verify_ledger(tmp_path / "new.sqlite", NO_HASH)
    assert (verdict.is_intact, verdict.lines, verdict.head.hash, verdict.held) == (True, 0, NO_HASH, 0)


# -- single bytes


def cells(path: Path) -> list[tuple[str, Any, str, Any]]:
    """Every stored value but the keys that rows are found by: table, key, column, value."""
    found = []
    with closing(sqlite3.connect(path)) as db:
        for table, key in STORED.items():
            cursor = db.execute(f"SELECT * FROM {table}")
            columns = [column[0] for column in cursor.description]
            for row in cursor.fetchall():
                named = dict(zip(columns, row, strict=True))
                found += [(table, named[key], column, named[column]) for column in columns if column != key]
    return found


def mutants(value: Any) -> list[Any]:
    """The value with its first, middle and last byte changed; a number beside it; nothing, and another type."""
    if isinstance(value, float | int):
        return [value + 1]
    if value is None:
        return [5.0]
    data = value.encode() if isinstance(value, str) else value
    changed = [
        data[:place] + bytes([data[place] ^ 0x01]) + data[place + 1 :]
        for place in sorted({0, len(data) // 2, len(data) - 1} if data else ())
    ]
    changed += [] if data else [b" "]
    return [text.decode(errors="replace") for text in changed] if isinstance(value, str) else [*changed, data.decode()]


def test_no_changed_value_of_any_column_is_served_and_each_is_told(path: Path) -> None:
    whole, served = path.read_bytes(), answers(path)
    tried = 0
    for table, key, column, value in cells(path):
        for mutant in mutants(value):
            path.write_bytes(whole)
            edit(path, f"UPDATE {table} SET {column} = ? WHERE {STORED[table]} = ?", values=[mutant, key])
            where = (table, key, column, mutant)
            assert not verify_ledger(path).is_intact, where
            changed = {name: said for name, said in answers(path).items() if said != served[name]}
            if column == "request_id":  # by its old name nothing is found, so nothing is served
                changed = {name: said for name, said in changed.items() if said is not None and name != "audit of one"}
            assert all(isinstance(said, LedgerError) for said in changed.values()), (where, changed)
            tried += 1
    assert tried > 300


def test_whatever_byte_of_the_file_flips_nothing_changed_is_served(path: Path) -> None:
    whole, served = path.read_bytes(), answers(path)
    positions = {*range(0, len(whole), 211), *range(0, 100, 7)}
    for text in b"n1000,by hand,B200,waits too,cancelled,active,ledger,CREATE TABLE".split(b","):
        at = whole.find(text)
        positions |= {at, at + len(text) - 1, at + len(text) + 3} if at >= 0 else set()
    for position in sorted(positions):
        for bit in (0x01, 0x80):
            flipped = bytearray(whole)
            flipped[position] ^= bit
            path.write_bytes(flipped)
            for name, said in answers(path).items():
                few = name == "audit of one" and isinstance(said, list) and all(row in served[name] for row in said)
                assert said == served[name] or few or isinstance(said, LedgerError), (position, bit, name)


def test_a_damaged_reply_is_named_and_nothing_else_is_held_up(path: Path) -> None:
    edit(path, "UPDATE decisions SET reply = replace(reply, 'n2', 'n3') WHERE request_id = 'seen'")
    ledger = Ledger(path)
    with pytest.raises(LedgerError, match=r"is damaged \(the decision of request 'seen' is not what was written"):
        ledger.find_reply("seen")
    with pytest.raises(LedgerError, match="the decision of request 'seen'"):
        ledger.find_stored_reply(DECIDED[1])
    assert ledger.find_reply("held") is not None
    assert ledger.find_stored_reply(NEW) is None
    ledger.close()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("UPDATE intents SET ranks = replace(ranks, 'n2', 'n3') WHERE request_id = 'held'", "intent of request 'held'"),
        ("UPDATE intents SET state = 'activf' WHERE request_id = 'held'", "intent of request 'held' is 'activf'"),
        ("UPDATE queue SET body = replace(body, '3', '9') WHERE request_id = 'waits'", "queue's entry 'waits'"),
    ],
)
def test_a_ledger_whose_promises_or_queue_were_changed_is_not_opened(path: Path, change: str, named: str) -> None:
    edit(path, change)
    with pytest.raises(LedgerError, match=named):
        Ledger(path)


def test_an_index_that_lost_a_request_is_damage_not_a_second_decision(path: Path) -> None:
    """A b-tree of keys alone: what is not found there would be decided anew."""
    whole = bytearray(path.read_bytes())
    (page,) = rows(path, "SELECT rootpage FROM sqlite_master WHERE tbl_name = 'decisions' AND type = 'index'")[0]
    size = int(rows(path, "PRAGMA page_size")[0][0])
    at = whole.find(b"held", (page - 1) * size, page * size)
    assert at > 0
    whole[at] ^= 0x01
    path.write_bytes(whole)
    with pytest.raises(LedgerError, match="is damaged"):
        Ledger(path)


# -- edits by somebody who knows the tables


def test_lines_that_are_missing_in_the_middle_are_named(path: Path) -> None:
    edit(path, "DELETE FROM audit WHERE audit_id IN (3, 4)")
    verdict = verify_ledger(path)
    assert ("missing", 5, None) in seen(verdict)
    assert "lines 3..4 are missing before line 5" in [finding.sentence for finding in verdict.findings]


def test_lines_that_are_missing_at_the_end_are_told_and_the_chain_goes_on_after_them(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(path, "DELETE FROM audit WHERE audit_id > 8")
    assert ("tail", 9, None) in seen(verify_ledger(path))
    ledger = Ledger(path)
    assert "lines 9..10 are missing at the end of its audit trail" in caplog.text
    ledger.record_acceptance("it goes on", 7_000, "ada")
    ledger.close()
    assert ("missing", 11, None) in seen(verify_ledger(path))


def test_a_changed_line_breaks_the_chain_there(path: Path) -> None:
    edit(path, "UPDATE audit SET caller = 'nobody' WHERE audit_id = 5")
    assert seen(verify_ledger(path)) == [("line", 5, None)]


def test_a_changed_line_with_a_hash_of_its_own_breaks_the_chain_after_it(path: Path) -> None:
    (line,) = rows(path, "SELECT * FROM audit WHERE audit_id = 5")
    changed = [*line[:2], "nobody", *line[3:-1]]
    edit(path, "UPDATE audit SET caller = 'nobody', hash = ? WHERE audit_id = 5", values=[hash_line(changed)])
    assert seen(verify_ledger(path)) == [("line", 6, None)]


def rewritten(path: Path, change: Callable[[list[Any]], list[Any]]) -> None:
    """The whole chain made anew over changed lines, as somebody may who can write the file."""
    lines, previous = [], NO_HASH
    for row in rows(path, "SELECT * FROM audit ORDER BY audit_id"):
        line = [*change(list(row[:-2])), previous]
        previous = hash_line(line)
        lines.append([*line, previous])
    edit(path, "DELETE FROM audit")
    with closing(sqlite3.connect(path)) as db, db:
        db.executemany("INSERT INTO audit VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", lines)


def test_a_chain_that_was_rewritten_as_a_whole_shows_beside_a_head_kept_elsewhere(path: Path) -> None:
    heads = {int(row[0]): str(row[1]) for row in rows(path, "SELECT audit_id, hash FROM audit")}
    rewritten(path, lambda line: [*line[:2], "nobody" if line[0] == 5 else line[2], *line[3:]])
    assert verify_ledger(path).is_intact, "by itself it is a chain"
    assert verify_ledger(path, heads[4]).held == 4
    assert seen(verify_ledger(path, heads[10])) == [("head", None, None)]


def test_a_tail_that_was_cut_off_without_a_trace_shows_beside_a_head_kept_elsewhere(path: Path) -> None:
    (head,) = rows(path, "SELECT hash FROM audit WHERE audit_id = 10")[0]
    edit(path, "DELETE FROM audit WHERE audit_id > 9", "UPDATE sqlite_sequence SET seq = 9 WHERE name = 'audit'")
    assert verify_ledger(path).is_intact
    assert seen(verify_ledger(path, head)) == [("head", None, None)]


def test_a_reply_with_a_checksum_made_anew_contradicts_its_line(path: Path) -> None:
    (row,) = rows(path, "SELECT * FROM decisions WHERE request_id = 'refused'")
    changed = [*row[:3], row[3].replace(b"by hand", b"by head"), *row[4:-1]]
    values = [changed[3], compute_decision_checksum(changed)]
    edit(path, "UPDATE decisions SET reply = ?, checksum = ? WHERE request_id = 'refused'", values=values)
    verdict = verify_ledger(path)
    assert seen(verdict) == [("reply", None, "refused")]
    assert "is not what line 4 speaks for" in verdict.findings[0].sentence


def test_an_intent_with_a_checksum_made_anew_contradicts_its_decision(path: Path) -> None:
    (row,) = rows(path, "SELECT * FROM intents WHERE request_id = 'held'")
    changed = [*row[:3], row[3].replace(b"n2", b"n3"), *row[4:-1]]
    edit(
        path,
        "UPDATE intents SET ranks = ?, checksum = ? WHERE request_id = 'held'",
        values=[changed[3], compute_intent_checksum(changed)],
    )
    assert seen(verify_ledger(path)) == [("intent", None, "held")]


def test_an_intent_that_was_ended_in_silence_is_told(path: Path) -> None:
    (row,) = rows(path, "SELECT * FROM intents WHERE request_id = 'held'")
    checksum = compute_intent_checksum([*row[:-2], "expired"])
    edit(path, "UPDATE intents SET state = 'expired', checksum = ? WHERE request_id = 'held'", values=[checksum])
    (finding,) = verify_ledger(path).findings
    assert finding.sentence == "1 intents are expired, the trail speaks of 0"


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ("DELETE FROM decisions WHERE request_id = 'refused'", ("reply", None, "refused")),
        ("DELETE FROM intents WHERE request_id = 'held'", ("intent", None, "held")),
        ("DELETE FROM queue WHERE request_id = 'waits too'", ("reply", None, "waits too")),
    ],
)
def test_what_is_gone_is_named(path: Path, change: str, finding: tuple[str, None, str]) -> None:
    edit(path, change)
    found = seen(verify_ledger(path))
    assert (finding[0] if "queue" not in change else "queue", *finding[1:]) in found


def test_what_nobody_asked_for_is_told(path: Path) -> None:
    row = [99, "free", b"{}", b"{}", "refused", "free", 1, 1]
    edit(path, "INSERT INTO decisions VALUES (?,?,?,?,?,?,?,?,?)", values=[*row, compute_decision_checksum(row)])
    assert "6 replies are stored, the trail speaks of 5" in [
        finding.sentence for finding in verify_ledger(path).findings
    ]


def test_triggers_that_were_removed_are_told_and_made_anew(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DROP TRIGGER audit_is_not_updated")
    assert [finding.kind for finding in verify_ledger(path).findings] == ["file"]
    Ledger(path).close()
    assert "had lost its audit_is_not_updated" in caplog.text
    assert verify_ledger(path).is_intact


def test_a_trigger_of_somebody_else_is_no_part_of_a_ledger(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("CREATE TRIGGER quiet AFTER INSERT ON intents BEGIN DELETE FROM intents; END")
    assert "trigger quiet" in verify_ledger(path).findings[0].sentence
    with pytest.raises(LedgerError, match="trigger quiet that is not the ledger's"):
        Ledger(path)


def test_a_table_that_is_gone_is_damage_not_an_empty_table(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DROP TABLE intents")
    assert "no table intents" in verify_ledger(path).findings[0].sentence
    with pytest.raises(LedgerError, match="no table intents"):
        Ledger(path)


def test_many_findings_are_counted_not_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_verify, "MOST_FINDINGS", 3)
    edit(path, "UPDATE audit SET caller = 'nobody'")
    verdict = verify_ledger(path)
    assert (len(verdict.findings), verdict.left_out) == (3, 7)


# -- any history of a ledger verifies


class Histories(RuleBasedStateMachine):
    folder: Path
    count = 0

    def __init__(self) -> None:
        super().__init__()
        Histories.count += 1
        self.path = self.folder / f"{Histories.count}.sqlite"
        self.ledger = Ledger(self.path)
        self.heads = [self.ledger.head.hash]
        self.made = 0

    def teardown(self) -> None:
        self.ledger.close()

    def _new(self) -> PlacementRequest:
        self.made += 1
        return PlacementRequest(request_id=f"r{self.made}", limit_s=self.made * 1e-7, host_memory_gib=-0.0)

    def _kept(self) -> None:
        self.heads.append(self.ledger.head.hash)

    @rule(outcome=st.sampled_from(["placed", "refused"]), caller=st.text(st.characters(exclude_categories=["Cs"])))
    def decide(self, outcome: str, caller: str) -> None:
        request = self._new()
        self.ledger.commit_decision(request, decision(request, outcome), self.made, caller, "place")
        self._kept()

    @rule()
    def wait(self) -> None:
        request = self._new()
        self.ledger.enqueue(request, decision(request, "queued"), self.made, "bob")
        self._kept()

    @rule(outcome=st.sampled_from(["placed", "refused"]))
    def place_who_waits(self, outcome: str) -> None:
        with self.ledger.transaction():
            for entry in self.ledger.list_queue_entries()[:2]:
                self.ledger.commit_decision(entry.request, decision(entry.request, outcome), 5, "queue", "place")
        self._kept()

    @rule(state=st.sampled_from(list(IntentState)[1:]))
    def settle(self, state: IntentState) -> None:
        self.ledger.finish_intents([(row.request_id, state) for row in self.ledger.list_active_intents()[:2]], 7)
        self._kept()

    @rule(mark=st.integers())
    def remember(self, mark: int) -> None:
        self.ledger.record_marks(generation=mark)

    @rule()
    def fail_half_way(self) -> None:
        try:
            with self.ledger.transaction():
                self.decide("placed", "")
                self.heads.pop()
                self.ledger.record_acceptance("it was not", 8, "")
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.path)

    @invariant()
    def verifies(self) -> None:
        for head in {self.heads[0], self.heads[len(self.heads) // 2], self.heads[-1]}:
            verdict = verify_ledger(self.path, head)
            assert verdict.findings == []
            assert verdict.held is not None


def test_any_history_of_a_ledger_verifies(path: Path) -> None:
    Histories.folder = path.parent
    run_state_machine_as_test(Histories, settings=settings(examples(40), stateful_step_count=12))


def test_the_world_of_these_tests_has_something_of_everything(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    fill(ledger)
    assert [intent.request_id for intent in ledger.list_active_intents()] == ["held", "moved"]
    assert len(ledger.list_queue_entries()) == 2
    assert {row["action"] for row in ledger.read_audit_trail(99)} == {"place", "refuse", "queue", "cancelled", "accept"}
    ledger.close()
