"""The ledger: decisions, intents, the queue and the audit trail in one SQLite file.

    decisions   request_id → the request and the reply, byte for byte; `cursor` only grows
    intents     the GPUs that a placement holds until the job runs, ends, expires or is cancelled
    queue       waiting requests, each with the reply that its caller received
    audit       what each caller did; append-only, triggers refuse anything else

The ledger writes before the placer replies. One process writes. A retry of a request gets the same bytes,
even after a restart. SQLite finds damaged pages and indexes when the file opens. Checksums of rows and a
hash chain of the audit (`fleetcast.placement.ledger.chain`) find other damage. The ledger serves no row that
does not match. It raises a LedgerError that names the damaged part.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet.errors import ConflictError, RequestError
from fleetcast.fleet.requests import Decision, PlacementRequest, RankPlacement
from fleetcast.placement.ledger.actions import DROPPED, ActionTable
from fleetcast.placement.ledger.chain import (
    NO_HASH,
    QUEUED,
    ChainHead,
    compute_decision_checksum,
    compute_intent_checksum,
    compute_queue_checksum,
    encode,
    hash_line,
)
from fleetcast.placement.ledger.charges import ChargeTable
from fleetcast.placement.ledger.file import LAST_NUMBER, LedgerFile
from fleetcast.placement.ledger.migrate import DOWNGRADED, drop_actions
from fleetcast.placement.ledger.old_bodies import FIND_OLD_LINE, SAID_AFTER, leaves_out_default
from fleetcast.placement.ledger.rows import (
    SETTLED_WORDS,
    CommittedDecision,
    Intent,
    IntentState,
    LedgerError,
    LedgerUnavailable,
    QueueEntry,
    check_bytes,
    convert_row,
)
from fleetcast.placement.ledger.schema import AUDIT_COLUMNS
from fleetcast.placement.queues.charges import Charge

__all__ = ["CommittedDecision", "Intent", "IntentState", "Ledger", "LedgerError", "LedgerUnavailable", "QueueEntry"]

INSERT_LINE = f"INSERT INTO audit VALUES ({','.join('?' * len(AUDIT_COLUMNS))})"
logger = logging.getLogger(__name__)
DECISIONS = "SELECT cursor, request_id, body, reply, outcome, job, attempt, time_ms, checksum FROM decisions"
_decode_request = msgspec.json.Decoder(PlacementRequest).decode
_decode_decision = msgspec.json.Decoder(Decision).decode
_decode_ranks = msgspec.json.Decoder(tuple[RankPlacement, ...]).decode


_decode_models = msgspec.json.Decoder(dict[str, str]).decode


@dataclass(slots=True)
class _CachedRows:
    """The rows that are cached in memory. Between two transactions they are equal to the file."""

    intents: dict[str, Intent]
    queue: dict[str, QueueEntry]
    head: ChainHead
    position: int  # the highest audit_id ever written
    cursor: int  # of the last decision ever written


class Ledger(LedgerFile):
    """The ledger's SQLite file with its decisions, intents, queue and audit trail.

    Constructing this opens the file. Raises LedgerError if the file cannot be trusted. `version` grows
    with every change. The ledger then calls `on_change`.
    """

    def __init__(self, path: Path) -> None:
        self.version = 0
        self.on_change: Callable[[], None] = lambda: None
        self._cached: _CachedRows | None = None
        self.charges = ChargeTable(self)
        self.actions = ActionTable(self, self.record_audit_line, lambda: self.position)
        super().__init__(path)

    def _load_state(self) -> None:
        super()._load_state()
        cached = self._cached = self._read_rows()
        self.charges.reload_rows()
        self.actions.reload_rows()
        self._record_facts({SAID_AFTER: self._state.get(SAID_AFTER, cached.position)})
        if cached.position > cached.head.audit_id:
            logger.error(
                "%s: lines %d..%d are missing at the end of its audit trail: `fleetcast audit verify` says more",
                *(self.path, cached.head.audit_id + 1, cached.position),
            )

    def _count_change(self) -> None:
        self.version += 1
        self.on_change()

    def _drop_cache(self) -> None:
        self._cached = None
        self.version += 1  # what was made from this version may contain what was rolled back
        self.charges.clear_cache()
        self.actions.clear_cache()

    def _read_rows(self) -> _CachedRows:
        with self.translate_decode_errors():
            return _CachedRows(
                {intent.request_id: intent for intent in self._load_intents()},
                {entry.request.request_id: entry for entry in self._load_queue()},
                self._load_head(),
                self._db.execute(LAST_NUMBER["audit"]).fetchone()[0],
                self._db.execute(LAST_NUMBER["decisions"]).fetchone()[0],
            )

    @property
    def _cached_rows(self) -> _CachedRows:
        if self._cached is None:
            with self._translate_errors():
                self._cached = self._read_rows()
        return self._cached

    @property
    def position(self) -> int:
        return self._cached_rows.position

    @property
    def head(self) -> ChainHead:
        """The newest line of the audit trail.

        If a copy of it is stored elsewhere, a later comparison shows whether any line up to it was changed.
        """
        return self._cached_rows.head

    def find_hash_and_head(self, audit_id: int) -> tuple[str | None, ChainHead]:
        """Return the hash of a line of the audit trail, and the head of the trail.

        The hash is None if there is no such line.
        """
        found = self.read_rows("SELECT hash FROM audit WHERE audit_id = ?", [audit_id])
        return found[0][0] if found else None, self.head

    # -- decisions

    def find_stored_reply(self, request: PlacementRequest) -> bytes | None:
        """Return the stored reply to this request, or None if the request is new.

        Raises RequestError if its id was used with another body.
        """
        found = self._find_body_and_reply(request.request_id)
        if found is None:
            entry = self._cached_rows.queue.get(request.request_id)
            if entry is None:
                return None
            found = encode(entry.request), entry.reply
        body, reply = found
        if body != encode(request) and not self._was_stored_with_default(body, request):
            raise RequestError(
                f"request_id {request.request_id!r} was used before with another body; choose a new one", "request_id"
            )
        return reply

    def _was_stored_with_default(self, body: bytes, request: PlacementRequest) -> bool:
        """Return whether a body differs only by `preemptible = false`, which was the default when it was stored."""
        if not leaves_out_default(body, request):
            return False
        return bool(self.read_rows(FIND_OLD_LINE, [self._state[SAID_AFTER], request.request_id]))

    def find_reply(self, request_id: str) -> bytes | None:
        """Return the reply of a request, queued or decided. Returns None if the request is unknown."""
        found = self._find_body_and_reply(request_id)
        if found is not None:
            return found[1]
        entry = self._cached_rows.queue.get(request_id)
        return entry.reply if entry else None

    def _find_body_and_reply(self, request_id: str) -> tuple[bytes, bytes] | None:
        """Return body and reply of a decided request, or None."""
        rows = self.read_rows(f"{DECISIONS} WHERE request_id = ?", [request_id])
        if not rows:
            return None
        with self.translate_decode_errors():
            _, _, body, reply, *_ = self._check_decision_row(rows[0])
            return check_bytes(body), check_bytes(reply)

    def find_request_by_id(self, request_id: str) -> PlacementRequest | None:
        """Return a decided or waiting request. Returns None if it is unknown."""
        stored, waiting = self._find_body_and_reply(request_id), self._cached_rows.queue.get(request_id)
        if stored is None:
            return waiting.request if waiting else None
        with self.translate_decode_errors():
            return _decode_request(stored[0])

    def find_request(self, job: str, attempt: int) -> PlacementRequest | None:
        """Return the request by which an attempt was placed, or None."""
        where = "WHERE job = ? AND attempt = ? AND outcome = 'placed' ORDER BY cursor DESC LIMIT 1"
        rows = self.read_rows(f"{DECISIONS} {where}", [job, attempt])
        if not rows:
            return None
        with self.translate_decode_errors():
            return _decode_request(check_bytes(self._check_decision_row(rows[0])[2]))

    def _check_decision_row(self, row: Sequence[Any]) -> Sequence[Any]:
        return self.check_row(f"the decision of request {row[1]!r}", row, compute_decision_checksum)

    def _find_decision(self, request_id: str) -> Decision | None:
        """Return the stored decision, for the audit line about its end."""
        reply = self.find_reply(request_id)
        with self.translate_decode_errors():
            return _decode_decision(reply) if reply is not None else None

    def commit_decision(
        self,
        request: PlacementRequest,
        decision: Decision,
        now_ms: int,
        caller: str,
        action: str,
        charge: Charge | None = None,
    ) -> bytes:
        """Store a final decision with its intent, charge and audit line. Returns the reply's bytes."""
        reply = encode(decision)
        with self.transaction():
            self._cached_rows.cursor += 1
            row = (
                *(self._cached_rows.cursor, request.request_id, encode(request), reply, decision.outcome),
                *(request.job_name, request.attempt, now_ms),
            )
            checksum = compute_decision_checksum(row)
            self._db.execute("INSERT INTO decisions VALUES (?,?,?,?,?,?,?,?,?)", [*row, checksum])
            if decision.outcome == "placed":
                self._add_intent(request, decision, now_ms)
                if charge is not None:
                    self.charges.open_charge(charge)
            if request.request_id in self._cached_rows.queue:
                self._db.execute("DELETE FROM queue WHERE request_id = ?", [request.request_id])
                del self._cached_rows.queue[request.request_id]
            self.record_audit_line(request.request_id, now_ms, caller, action, decision.sentence, decision, checksum)
        self._count_change()
        return reply

    @property
    def cursor(self) -> int:
        """The cursor of the last decision ever written."""
        return self._cached_rows.cursor

    def read_decisions_after(self, cursor: int, limit: int) -> list[CommittedDecision]:
        """Return up to `limit` stored decisions after a cursor, in the order of their commit."""
        rows = self.read_rows(f"{DECISIONS} WHERE cursor > ? ORDER BY cursor LIMIT ?", [cursor, limit])
        with self.translate_decode_errors():
            return [convert_row(CommittedDecision, (*row[:2], *row[3:])) for row in map(self._check_decision_row, rows)]

    def read_decisions(self, cursors: Sequence[int]) -> list[CommittedDecision]:
        """Return stored decisions with these cursors, in the order of their commit."""
        marks = ",".join("?" * len(cursors))
        rows = self.read_rows(f"{DECISIONS} WHERE cursor IN ({marks}) ORDER BY cursor", cursors)
        with self.translate_decode_errors():
            return [convert_row(CommittedDecision, (*row[:2], *row[3:])) for row in map(self._check_decision_row, rows)]

    def read_newest_requests(self, limit: int) -> list[PlacementRequest]:
        """Return the most recently decided requests, the oldest of them first."""
        rows = self.read_rows(f"{DECISIONS} ORDER BY cursor DESC LIMIT ?", [limit])
        with self.translate_decode_errors():
            return [_decode_request(self._check_decision_row(row)[2]) for row in reversed(rows)]

    # -- intents

    def _add_intent(self, request: PlacementRequest, decision: Decision, now_ms: int) -> None:
        intent = Intent(
            request_id=request.request_id,
            job=request.job_name,
            attempt=request.attempt,
            ranks=decision.ranks,
            cpus=float(request.cpus or 0),
            host_memory_gib=request.host_memory_gib or 0.0,
            limit_s=request.limit_s,
            created_ms=now_ms,
            expires_ms=decision.expires_ms,
        )
        row = intent.make_row(IntentState.ACTIVE)
        self._db.execute("INSERT INTO intents VALUES (?,?,?,?,?,?,?,?,?,?,?)", [*row, compute_intent_checksum(row)])
        self._cached_rows.intents[intent.request_id] = intent

    def list_active_intents(self) -> list[Intent]:
        """Return the intents whose jobs have neither started nor ended according to events, oldest first."""
        return list(self._cached_rows.intents.values())

    def read_intent_state(self, request_id: str) -> IntentState | None:
        rows = self.read_rows("SELECT * FROM intents WHERE request_id = ?", [request_id])
        with self.translate_decode_errors():
            return IntentState(self._check_intent_row(rows[0])[-1]) if rows else None

    def _check_intent_row(self, row: Sequence[Any]) -> Sequence[Any]:
        return self.check_row(f"the intent of request {row[0]!r}", row, compute_intent_checksum)

    def finish_intents(self, states: Iterable[tuple[str, IntentState]], now_ms: int, caller: str = "placer") -> int:
        """Move active intents to their final states. Returns the number of intents that were active and moved."""
        rows = [(request_id, state) for request_id, state in states if request_id in self._cached_rows.intents]
        if not rows:
            return 0
        with self.transaction():
            for request_id, state in rows:
                intent = self._cached_rows.intents.pop(request_id)
                changed = [state.value, compute_intent_checksum(intent.make_row(state)), request_id]
                self._db.execute("UPDATE intents SET state = ?, checksum = ? WHERE request_id = ?", changed)
                if state in SETTLED_WORDS:
                    self.charges.close_charge(intent.job, intent.attempt, now_ms, state.value)
                    sentence = f"{intent.job} {SETTLED_WORDS[state]}"
                    self.record_audit_line(
                        request_id, now_ms, caller, state.value, sentence, self._find_decision(request_id)
                    )
        self._count_change()
        return len(rows)

    def _load_intents(self) -> list[Intent]:
        states = ", ".join(f"'{state}'" for state in IntentState)
        odd = self._db.execute(
            f"SELECT request_id, state FROM intents WHERE state NOT IN ({states}) LIMIT 1"
        ).fetchone()
        if odd:  # a full scan: it may have been active, and no index leads to it any more
            raise self._make_damage_error(f"the intent of request {odd[0]!r} is {odd[1]!r}")
        rows = self._db.execute("SELECT * FROM intents WHERE state = 'active' ORDER BY created_ms, rowid")
        return [
            convert_row(Intent, (*row[:3], _decode_ranks(row[3]), *row[4:-1]))
            for row in map(self._check_intent_row, rows)
        ]

    # -- queue

    def enqueue(self, request: PlacementRequest, decision: Decision, now_ms: int, caller: str) -> bytes:
        """Store a waiting request and its reply."""
        reply = encode(decision)
        with self.transaction():
            row = (request.request_id, encode(request), reply, now_ms)
            checksum = compute_queue_checksum(row)
            self._db.execute("INSERT INTO queue VALUES (?,?,?,?,?)", [*row, checksum])
            self._cached_rows.queue[request.request_id] = QueueEntry(request, reply, now_ms)
            self.record_audit_line(request.request_id, now_ms, caller, QUEUED, decision.sentence, decision, checksum)
        self._count_change()
        return reply

    def list_queue_entries(self) -> list[QueueEntry]:
        """Return waiting entries in order of arrival."""
        return list(self._cached_rows.queue.values())

    def is_queued(self, request_id: str) -> bool:
        return request_id in self._cached_rows.queue

    def _load_queue(self) -> list[QueueEntry]:
        rows = self._db.execute("SELECT * FROM queue ORDER BY queued_ms, rowid")
        entries = []
        for row in rows:
            _, body, reply, queued_ms = self.check_row(f"the queue's entry {row[0]!r}", row, compute_queue_checksum)
            entries.append(convert_row(QueueEntry, (_decode_request(body), reply, queued_ms)))
        return entries

    # -- audit

    def record_audit_line(
        self,
        request_id: str,
        now_ms: int,
        caller: str,
        action: str,
        sentence: str,
        decision: Decision | None = None,
        stored: str = "",
    ) -> None:
        """Append one line to the audit trail. `stored` is the checksum of the row that is written with it."""
        said = decision or Decision(request_id=request_id, decision_id="", outcome="refused", sentence=sentence)
        with self.transaction():
            memory = self._cached_rows
            memory.position += 1
            line = (
                *(memory.position, now_ms, caller, action, request_id, said.decision_id, said.board_as_of_ms),
                *(encode(said.models).decode(), sentence, stored, memory.head.hash),
            )
            memory.head = ChainHead(memory.position, hash_line(line))
            self._db.execute(INSERT_LINE, [*line, memory.head.hash])

    def record_acceptance(self, sentence: str, now_ms: int, caller: str) -> None:
        """Record in the audit trail that `caller` accepted a loss or a change of the service's state.

        sentence: describes the loss or change.
        """
        self.record_audit_line("", now_ms, caller, "accept", sentence)

    def downgrade(self, now_ms: int, caller: str) -> None:
        """Make the file one of version 3, which has no actions, and close it. A copy of it lies next to it.

        Raises ConflictError while an action is open, because an earlier program would forget it.
        """
        if open_now := self.actions.list_open():
            raise ConflictError(f"{len(open_now):,} actions are open: pause actions, then go back once they have ended")
        copy = self.copy_file()
        with self.transaction():
            sentence = f"the ledger has version {DOWNGRADED} from now on; its actions are in {copy.name}"
            self.record_audit_line("", now_ms, caller, DROPPED, sentence)
            drop_actions(self._db)
        self.close()

    def read_audit_trail(
        self, limit: int, after: int | None = None, request_id: str | None = None
    ) -> list[dict[str, Any]]:
        """Return lines of the audit trail: the newest first, or those after an `audit_id` in order."""
        where, values = ["1 = 1"], list[Any]()
        if after is not None:
            where, values = [*where, "audit_id > ?"], [*values, after]
        if request_id is not None:
            where, values = [*where, "request_id = ?"], [*values, request_id]
        order = "ASC" if after is not None else "DESC"
        found = self._read_lines(f"{' AND '.join(where)} ORDER BY audit_id {order} LIMIT ?", [*values, limit])
        if request_id is None:
            with self.translate_decode_errors():
                self._check_links(found if after is not None else found[::-1])
        return self._decode_audit_rows(found)

    def read_audit_lines(self, audit_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return the lines of the audit trail with these numbers, the oldest first."""
        marks = ",".join("?" * len(audit_ids))
        return self._decode_audit_rows(self._read_lines(f"audit_id IN ({marks}) ORDER BY audit_id", audit_ids))

    def _read_lines(self, where: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        found = self.read_rows(f"SELECT {', '.join(AUDIT_COLUMNS)} FROM audit WHERE {where}", values)
        with self.translate_decode_errors():
            for line in found:
                self.check_row(f"line {line[0]!r} of the audit trail", line, hash_line)
        return found

    def _decode_audit_rows(self, found: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        with self.translate_decode_errors():
            rows = [dict(zip(AUDIT_COLUMNS, line, strict=True)) for line in found]
            for row in rows:
                row["models"] = _decode_models(row["models"])
        return rows

    def _check_links(self, lines: Sequence[Sequence[Any]]) -> None:
        """Raise LedgerError if a line does not follow the line before it."""
        for (*_, before), (audit_id, *_, previous, _) in pairwise(lines):
            if before != previous:
                raise self._make_damage_error(f"something is missing before line {audit_id} of the audit trail")

    def _load_head(self) -> ChainHead:
        """Load the newest line of the audit trail, even if that line was changed.

        `fleetcast audit verify` reports such a change. Later lines are checked against the hash of this line.
        """
        rows = self._db.execute("SELECT audit_id, hash FROM audit ORDER BY audit_id DESC LIMIT 1").fetchall()
        return convert_row(ChainHead, rows[0]) if rows else ChainHead(0, NO_HASH)
