"""The ledger: decisions, intents, the queue and the audit trail in one SQLite file, written before the reply.

    decisions   request_id → the request as it was and the reply, byte for byte; `cursor` only grows
    intents     what a placement holds until the job is seen running, ends, expires or is cancelled
    queue       requests that wait, with the reply they were given
    audit       who asked for what; append-only, triggers refuse anything else

One process writes. A retry of a request gets the same bytes, a refusal and a restart included. SQLite finds most
damage, not all: a page is checked when it is read, and all of them when the file is opened.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fleet.errors import RequestError
from fleet.requests import Decision, PlacementRequest, RankPlacement
from placement.ledger_file import LAST_LINE, LedgerFile, encode
from placement.ledger_rows import (
    Committed,
    Intent,
    IntentState,
    LedgerAway,
    LedgerError,
    QueueEntry,
    typed,
    typed_bytes,
)
from placement.ledger_schema import AUDIT_COLUMNS

__all__ = ["Committed", "Intent", "IntentState", "Ledger", "LedgerAway", "LedgerError", "QueueEntry", "encode"]

_decode_request = msgspec.json.Decoder(PlacementRequest).decode
_decode_decision = msgspec.json.Decoder(Decision).decode
_decode_ranks = msgspec.json.Decoder(tuple[RankPlacement, ...]).decode


_decode_models = msgspec.json.Decoder(dict[str, str]).decode


SETTLED_WORDS = {
    IntentState.EXPIRED: "did not start in time: its GPUs are free again",
    IntentState.CANCELLED: "was cancelled before it started: its GPUs are free again",
}


@dataclass(slots=True)
class _Memory:
    """What is asked for all the time, equal to the file between two transactions."""

    intents: dict[str, Intent]
    queue: dict[str, QueueEntry]
    position: int


class Ledger(LedgerFile):
    """Opens or creates the file. Raises LedgerError when it cannot be trusted; `version` grows with every change.

    `position` is the highest audit_id ever written.
    """

    def __init__(self, path: Path) -> None:
        self.version = 0
        self._kept: _Memory | None = None
        super().__init__(path)

    def _start(self) -> None:
        super()._start()
        self._kept = self._load()

    def _undo(self) -> None:
        self._kept = None

    def _load(self) -> _Memory:
        with self._readable():
            return _Memory(
                {intent.request_id: intent for intent in self._load_intents()},
                {entry.request.request_id: entry for entry in self._load_queue()},
                self._db.execute(LAST_LINE).fetchone()[0],
            )

    @property
    def _memory(self) -> _Memory:
        if self._kept is None:
            with self._trusted():
                self._kept = self._load()
        return self._kept

    @property
    def position(self) -> int:
        return self._memory.position

    # -- decisions

    def replay(self, request: PlacementRequest) -> bytes | None:
        """The reply this request got before, None when it is new; RequestError when its id had another body."""
        rows = self._rows("SELECT body, reply FROM decisions WHERE request_id = ?", [request.request_id])
        if not rows:
            entry = self._memory.queue.get(request.request_id)
            if entry is None:
                return None
            rows = [(encode(entry.request), entry.reply)]
        ((body, reply),) = rows
        with self._readable():
            kept = typed_bytes(reply)
        if body != encode(request):
            raise RequestError(
                f"request_id {request.request_id!r} was used before with another body; choose a new one", "request_id"
            )
        return kept

    def find(self, request_id: str) -> bytes | None:
        """The reply of a request, queued or decided."""
        rows = self._rows("SELECT reply FROM decisions WHERE request_id = ?", [request_id])
        if rows:
            with self._readable():
                return typed_bytes(rows[0][0])
        entry = self._memory.queue.get(request_id)
        return entry.reply if entry else None

    def _decision(self, request_id: str) -> Decision | None:
        """The stored decision, for the line of audit that tells of its end."""
        reply = self.find(request_id)
        with self._readable():
            return _decode_decision(reply) if reply is not None else None

    def commit(self, request: PlacementRequest, decision: Decision, now_ms: int, caller: str, action: str) -> bytes:
        """Store a final decision with its intent and its line of audit; returns the reply's bytes."""
        reply = encode(decision)
        with self.transaction():
            self._db.execute(
                "INSERT INTO decisions (request_id, body, reply, outcome, job, attempt, time_ms) "
                "VALUES (?,?,?,?,?,?,?)",
                [
                    *(request.request_id, encode(request), reply, decision.outcome),
                    *(request.job_name, request.attempt, now_ms),
                ],
            )
            if decision.outcome == "placed":
                self._hold(request, decision, now_ms)
            if request.request_id in self._memory.queue:
                self._db.execute("DELETE FROM queue WHERE request_id = ?", [request.request_id])
                del self._memory.queue[request.request_id]
            self.note(request.request_id, now_ms, caller, action, decision.sentence, decision)
        self.version += 1
        return reply

    def decisions_after(self, cursor: int, limit: int) -> list[Committed]:
        """Stored decisions in the order of their commit."""
        rows = self._rows(
            "SELECT cursor, request_id, reply, outcome, job, attempt, time_ms FROM decisions "
            "WHERE cursor > ? ORDER BY cursor LIMIT ?",
            [cursor, limit],
        )
        with self._readable():
            return [typed(Committed, row) for row in rows]

    # -- intents

    def _hold(self, request: PlacementRequest, decision: Decision, now_ms: int) -> None:
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
        self._db.execute(
            "INSERT INTO intents VALUES (?,?,?,?,?,?,?,?,?,?)",
            [
                *(intent.request_id, intent.job, intent.attempt, encode(intent.ranks), intent.cpus),
                *(intent.host_memory_gib, intent.limit_s, now_ms, intent.expires_ms, IntentState.ACTIVE.value),
            ],
        )
        self._memory.intents[intent.request_id] = intent

    def active_intents(self) -> list[Intent]:
        """Promises that nothing has been seen of, oldest first."""
        return list(self._memory.intents.values())

    def intent_state(self, request_id: str) -> IntentState | None:
        rows = self._rows("SELECT state FROM intents WHERE request_id = ?", [request_id])
        with self._readable():
            return IntentState(rows[0][0]) if rows else None

    def settle(self, states: Iterable[tuple[str, IntentState]], now_ms: int, caller: str = "placer") -> int:
        """Move active intents to their last state; returns how many there were."""
        rows = [(request_id, state) for request_id, state in states if request_id in self._memory.intents]
        if not rows:
            return 0
        with self.transaction():
            for request_id, state in rows:
                self._db.execute("UPDATE intents SET state = ? WHERE request_id = ?", [state.value, request_id])
                job = self._memory.intents.pop(request_id).job
                if state in SETTLED_WORDS:
                    sentence = f"{job} {SETTLED_WORDS[state]}"
                    self.note(request_id, now_ms, caller, state.value, sentence, self._decision(request_id))
        self.version += 1
        return len(rows)

    def _load_intents(self) -> list[Intent]:
        rows = self._db.execute(
            "SELECT request_id, job, attempt, ranks, cpus, host_memory_gib, limit_s, created_ms, expires_ms "
            "FROM intents WHERE state = 'active' ORDER BY created_ms, rowid"
        )
        return [typed(Intent, (*row[:3], _decode_ranks(row[3]), *row[4:])) for row in rows]

    # -- queue

    def enqueue(self, request: PlacementRequest, decision: Decision, now_ms: int, caller: str) -> bytes:
        """Store a waiting request and the reply it is given."""
        reply = encode(decision)
        with self.transaction():
            self._db.execute("INSERT INTO queue VALUES (?,?,?,?)", [request.request_id, encode(request), reply, now_ms])
            self._memory.queue[request.request_id] = QueueEntry(request, reply, now_ms)
            self.note(request.request_id, now_ms, caller, "queue", decision.sentence, decision)
        self.version += 1
        return reply

    def queued(self) -> list[QueueEntry]:
        """Waiting entries in order of arrival."""
        return list(self._memory.queue.values())

    def is_queued(self, request_id: str) -> bool:
        return request_id in self._memory.queue

    def _load_queue(self) -> list[QueueEntry]:
        rows = self._db.execute("SELECT body, reply, queued_ms FROM queue ORDER BY queued_ms, rowid")
        return [typed(QueueEntry, (_decode_request(body), reply, queued_ms)) for body, reply, queued_ms in rows]

    # -- audit

    def note(
        self, request_id: str, now_ms: int, caller: str, action: str, sentence: str, decision: Decision | None = None
    ) -> None:
        """Append one line to the audit trail."""
        said = decision or Decision(request_id=request_id, decision_id="", outcome="refused", sentence=sentence)
        with self.transaction():
            self._db.execute(
                "INSERT INTO audit (time_ms, caller, action, request_id, decision_id, board_as_of_ms, models, "
                "sentence) VALUES (?,?,?,?,?,?,?,?)",
                [
                    *(now_ms, caller, action, request_id, said.decision_id, said.board_as_of_ms),
                    *(encode(said.models).decode(), sentence),
                ],
            )
            self._memory.position += 1

    def accept(self, sentence: str, now_ms: int, caller: str) -> None:
        """Write down that somebody took a loss or a change of the state upon himself; `sentence` says which."""
        self.note("", now_ms, caller, "accept", sentence)

    def audit(self, limit: int, after: int | None = None, request_id: str | None = None) -> list[dict[str, Any]]:
        """Lines of the audit trail: the newest first, or those after an `audit_id` in order."""
        where, values = ["1 = 1"], list[Any]()
        if after is not None:
            where, values = [*where, "audit_id > ?"], [*values, after]
        if request_id is not None:
            where, values = [*where, "request_id = ?"], [*values, request_id]
        order = "ASC" if after is not None else "DESC"
        query = f"SELECT {', '.join(AUDIT_COLUMNS)} FROM audit WHERE {' AND '.join(where)}"
        found = self._rows(f"{query} ORDER BY audit_id {order} LIMIT ?", [*values, limit])
        rows = [dict(zip(AUDIT_COLUMNS, row, strict=True)) for row in found]
        with self._readable():
            for row in rows:
                row["models"] = _decode_models(row["models"])
        return rows
