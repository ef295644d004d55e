"""Verification that a ledger's audit chain, replies, intents, queue, charges and actions are unchanged.

It only reads, and the placer may write at the same time. Rows are read one by one in one
transaction, so a ledger of any size takes little memory. An attacker who can write the file can
also recompute its hashes. So only a chain head stored elsewhere can show that the chain was cut
short or rewritten.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet import files
from fleetcast.fleet.requests import Decision
from fleetcast.placement.ledger.actions import ACTION, DROPPED
from fleetcast.placement.ledger.chain import (
    CHARGE_TABLE_CHECKSUMS,
    CHECKSUMS,
    NO_HASH,
    QUEUED,
    ChainHead,
    compute_action_checksum,
    encode,
    hash_line,
)
from fleetcast.placement.ledger.file import LAST_NUMBER
from fleetcast.placement.ledger.migrate import MIGRATED
from fleetcast.placement.ledger.rows import SETTLED_WORDS, LedgerError
from fleetcast.placement.ledger.schema import (
    AUDIT_COLUMNS,
    SCHEMA_VERSION,
    explain_schema_mismatch,
    find_missing_statements,
    read_schema,
)

MOST_FINDINGS = 100
PROPOSED = f"{ACTION}proposed"


@dataclass(frozen=True, slots=True)
class LedgerFinding:
    """A part of the ledger that is not as it was written.

    kind: file, line, missing, tail, head, reply, intent, queue, charge,
    action.
    """

    kind: str
    sentence: str
    audit_id: int | None = None
    request_id: str | None = None


@dataclass(slots=True)
class LedgerVerdict:
    """The counts and findings of `verify_ledger`."""

    head: ChainHead = field(default_factory=ChainHead)
    held: int | None = None  # the line with the head to look for; None: not there, or no head
    lines: int = 0
    unchained: int = 0  # the first lines, which version 1 wrote and migration chained
    replies: int = 0
    waiting: int = 0
    intents: int = 0
    actions: int = 0
    findings: list[LedgerFinding] = field(default_factory=list)
    left_out: int = 0  # findings beyond `MOST_FINDINGS`

    @property
    def is_intact(self) -> bool:
        return not self.findings

    def add_finding(self, kind: str, sentence: str, audit_id: int | None = None, request_id: Any = None) -> None:
        if len(self.findings) == MOST_FINDINGS:
            self.left_out += 1
            return
        name = None if request_id is None else str(request_id)
        self.findings.append(LedgerFinding(kind, sentence, audit_id, name))


def verify_ledger(path: Path, head: str = "") -> LedgerVerdict:
    """Check the whole ledger.

    head: a hash that the chain must contain. Raises LedgerError if the file does not exist, is no ledger or
    has another version.
    """
    if not path.is_file():
        raise LedgerError(f"{path}: there is no ledger")
    try:
        with closing(files.connect_to_read(path)) as db:
            db.execute("BEGIN")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise LedgerError(
                    f"{path} has version {version}, a chain has version {SCHEMA_VERSION}: "
                    "the placer migrates an earlier one when it starts"
                )
            return _check_ledger(db, head)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from None


def _check_ledger(db: sqlite3.Connection, head: str) -> LedgerVerdict:
    verdict = LedgerVerdict()
    found = read_schema(db)
    if why := explain_schema_mismatch(found, SCHEMA_VERSION):
        verdict.add_finding("file", why)
        return verdict
    for name in find_missing_statements(found):
        verdict.add_finding("file", f"{name} was removed from the file: what it prevented may have been done")
    for (said,) in db.execute(f"PRAGMA integrity_check({MOST_FINDINGS})"):
        if said != "ok":
            verdict.add_finding("file", f"SQLite says: {said}")
    trail = _Trail(db, verdict, head)
    for check in (
        trail.check_trail,
        lambda: _check_intents(db, verdict),
        lambda: _check_queue(db, verdict),
        lambda: _check_charges(db, verdict),
        lambda: _check_actions(db, verdict, trail.proposed),
    ):
        with _report_damage(verdict):
            check()
    return verdict


@contextmanager
def _report_damage(verdict: LedgerVerdict) -> Iterator[None]:
    """Report damage that stops a check as a finding, so that the next check can begin."""
    try:
        yield
    except (sqlite3.DatabaseError, ValueError, TypeError, RecursionError) as error:
        verdict.add_finding("file", f"the rest cannot be read: {error}")


class _Trail:
    """A check of the audit trail, line by line, and of the replies that its lines refer to."""

    def __init__(self, db: sqlite3.Connection, verdict: LedgerVerdict, head: str) -> None:
        self.db = db
        self.verdict = verdict
        self.expected_head = head
        self.decided = 0
        self.waiting = 0
        self.proposed = 0  # actions, since the table of actions was made
        self.settled: Counter[str] = Counter()

    def check_trail(self) -> None:
        verdict = self.verdict
        for row in self.db.execute(f"SELECT {', '.join(AUDIT_COLUMNS)} FROM audit ORDER BY audit_id"):
            self._check_line(row)
            self._check_written_row(row)
        self._check_end()
        for row in self.db.execute("SELECT * FROM decisions ORDER BY cursor"):
            verdict.replies += 1
            _check_checksum(verdict, "reply", f"the decision of request {row[1]!r}", "decisions", row, row[1])
        if verdict.replies != self.decided:
            verdict.add_finding(
                "reply", f"{verdict.replies:,} replies are stored, the trail speaks of {self.decided:,}"
            )
        for state in SETTLED_WORDS:
            (count,) = self.db.execute("SELECT count(*) FROM intents WHERE state = ?", [state.value]).fetchone()
            if count != self.settled[state]:
                spoken = self.settled[state]
                verdict.add_finding("intent", f"{count:,} intents are {state}, the trail speaks of {spoken:,}")
        (waiting,) = self.db.execute("SELECT count(*) FROM queue").fetchone()
        if waiting != self.waiting:
            verdict.add_finding("queue", f"{waiting:,} requests wait, the trail speaks of {self.waiting:,}")

    def _check_line(self, row: tuple[Any, ...]) -> None:
        verdict, before = self.verdict, self.verdict.head
        audit_id, previous, written = row[0], row[-2], row[-1]
        verdict.lines += 1
        if audit_id != before.audit_id + 1:
            first, last = before.audit_id + 1, audit_id - 1
            verdict.add_finding("missing", f"lines {first}..{last} are missing before line {audit_id}", audit_id)
        elif previous != before.hash:
            verdict.add_finding(
                "line", f"the chain breaks at line {audit_id}: it does not follow on the one before", audit_id
            )
        if hash_line(row[:-1]) != written:
            verdict.add_finding("line", f"the chain breaks at line {audit_id}: it is not what was written", audit_id)
        if written == self.expected_head:
            verdict.held = audit_id
        self.settled[row[3]] += 1
        self.proposed = 0 if row[3] == DROPPED else self.proposed + (row[3] == PROPOSED)
        verdict.head = ChainHead(audit_id, str(written))

    def _check_written_row(self, row: tuple[Any, ...]) -> None:
        """Check that the row written together with an audit line still exists and is unchanged."""
        audit_id, action, request_id, stored = row[0], row[3], row[4], row[9]
        if not stored:
            return
        decision = self._read_checksum("decisions", request_id)
        if action == QUEUED and decision is not None:
            return  # it waits no more
        if action == QUEUED:
            self.waiting += 1
            kind, what, found = "queue", "the queue's entry", self._read_checksum("queue", request_id)
        else:
            self.decided += 1
            kind, what, found = "reply", "the decision", decision
        if found != stored:
            how = "is gone" if found is None else f"is not what line {audit_id} speaks for"
            self.verdict.add_finding(kind, f"{what} of request {request_id!r} {how}", None, request_id)

    def _read_checksum(self, table: str, request_id: Any) -> Any:
        found = self.db.execute(f"SELECT checksum FROM {table} WHERE request_id = ?", [request_id]).fetchone()
        return found[0] if found else None

    def _check_end(self) -> None:
        verdict = self.verdict
        (last,) = self.db.execute(LAST_NUMBER["audit"]).fetchone()
        if last > verdict.head.audit_id:
            sentence = f"lines {verdict.head.audit_id + 1}..{last} are missing at the end"
            verdict.add_finding("tail", sentence, verdict.head.audit_id + 1)
        if self.expected_head == NO_HASH:
            verdict.held = 0
        elif self.expected_head and verdict.held is None:
            sentence = (
                "that head is not in the chain: lines up to it were cut off or rewritten, or it is another ledger's"
            )
            verdict.add_finding("head", sentence)
        rows = self.db.execute("SELECT value FROM state WHERE key = ?", [MIGRATED]).fetchall()
        verdict.unchained = int(msgspec.json.decode(rows[0][0])["lines"]) if rows else 0


def _check_intents(db: sqlite3.Connection, verdict: LedgerVerdict) -> None:
    """Check that each intent is unchanged and holds the GPUs that its decision gave.

    Each placement must have an intent.
    """
    rows = db.execute(
        "SELECT intents.*, decisions.outcome, decisions.reply FROM intents LEFT JOIN decisions USING (request_id)"
    )
    for *row, outcome, reply in rows:
        verdict.intents += 1
        what = f"the intent of request {row[0]!r}"
        if not _check_checksum(verdict, "intent", what, "intents", row, row[0]):
            continue
        if outcome != "placed" or encode(msgspec.json.decode(reply, type=Decision).ranks) != row[3]:
            verdict.add_finding("intent", f"{what} holds other GPUs than its decision gave", None, row[0])
    without = db.execute(
        "SELECT request_id FROM decisions WHERE outcome = 'placed' "
        "AND NOT EXISTS (SELECT 1 FROM intents WHERE intents.request_id = decisions.request_id)"
    )
    for (request_id,) in without:
        verdict.add_finding("intent", f"the intent of request {request_id!r} is gone", None, request_id)


def _check_queue(db: sqlite3.Connection, verdict: LedgerVerdict) -> None:
    for row in db.execute("SELECT * FROM queue ORDER BY rowid"):
        verdict.waiting += 1
        _check_checksum(verdict, "queue", f"the queue's entry {row[0]!r}", "queue", row, row[0])


def _check_charges(db: sqlite3.Connection, verdict: LedgerVerdict) -> None:
    """Check that charges and credits are unchanged."""
    for table, checksum in CHARGE_TABLE_CHECKSUMS.items():
        for row in db.execute(f"SELECT * FROM {table}"):
            if checksum(row[:-1]) != row[-1]:
                verdict.add_finding("charge", f"row {row[0]!r} of {table} is not what was written")


def _check_actions(db: sqlite3.Connection, verdict: LedgerVerdict, proposed: int) -> None:
    """Check that each action is unchanged and agrees with its newest audit line.

    proposed: the number of actions that the trail mentions.
    """
    rows = db.execute(
        "SELECT actions.*, audit.action, audit.request_id, audit.decision_id FROM actions "
        "LEFT JOIN audit ON audit.audit_id = actions.changed"
    )
    for *row, written, word, subject, spoken in rows:
        verdict.actions += 1
        action_id, state = row[0], row[4]
        if compute_action_checksum(row) != written:
            verdict.add_finding("action", f"action {action_id!r} is not what was written", None, action_id)
        elif (word, subject, spoken) != (f"{ACTION}{state}", action_id, written):
            sentence = f"action {action_id!r} is not what line {row[-1]} speaks for"
            verdict.add_finding("action", sentence, None, action_id)
    if verdict.actions != proposed:
        verdict.add_finding("action", f"{verdict.actions:,} actions are stored, the trail speaks of {proposed:,}")


def _check_checksum(verdict: LedgerVerdict, kind: str, what: str, table: str, row: Any, request_id: Any) -> bool:
    *values, written = row
    if CHECKSUMS[table](values) == written:
        return True
    verdict.add_finding(kind, f"{what} is not what was written", None, request_id)
    return False
