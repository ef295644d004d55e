"""The ledger's actions: a table in its file. Each change of an action has a line in the audit trail.

A change of an action and its audit line are on disk before the placer publishes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from fleetcast.fleet.requests import Decision
from fleetcast.placement.actions.action import JobAction, make_action_id
from fleetcast.placement.actions.life import ActionRecord, ActionState, LifeStep
from fleetcast.placement.actions.words import describe_change
from fleetcast.placement.ledger.chain import compute_action_checksum, encode
from fleetcast.placement.ledger.file import LedgerFile
from fleetcast.placement.ledger.rows import check_bytes

ACTION = "action_"  # begins the audit's word for each state of an action
DROPPED = "actions_dropped"  # the audit's word for a file that went back to version 3
INSERT = "INSERT INTO actions VALUES (?,?,?,?,?,?,?,?,?,?)"
UPDATE = "UPDATE actions SET state = ?, life = ?, why = ?, changed = ?, checksum = ? WHERE action_id = ?"
LAST_WITH_KEY = "SELECT * FROM actions WHERE wish = ? ORDER BY rowid DESC LIMIT 1"
OPEN_ONES = "open"
OPEN_STATES = "state IN ('proposed', 'sent', 'accepted')"
OPEN_ROWS = f"SELECT * FROM actions WHERE {OPEN_STATES} ORDER BY changed"
AT_OR_BELOW = "queue = ? OR queue > ? AND queue < ?"
_decode_action = msgspec.json.Decoder(JobAction).decode
_decode_life = msgspec.json.Decoder(tuple[LifeStep, ...]).decode


@dataclass(slots=True)
class _OpenActions:
    """The open actions in memory, by id and by job. Between two transactions they are equal to the file."""

    by_id: dict[str, ActionRecord] = field(default_factory=dict)
    by_job: dict[str, str] = field(default_factory=dict)

    def update(self, record: ActionRecord) -> None:
        if record.is_open:
            self.by_id[record.action_id] = record
            self.by_job[record.action.job] = record.action_id
        elif self.by_id.pop(record.action_id, None) is not None:
            del self.by_job[record.action.job]


class ActionTable:
    """The actions of one open ledger file. A job has at most one open action. `version` grows with every change.

    `append_line`: a function that appends a line to the audit trail, as `Ledger.record_audit_line` does.
    `get_position`: a function that returns the number of the trail's newest line.
    """

    def __init__(self, ledger: LedgerFile, append_line: Callable[..., None], get_position: Callable[[], int]) -> None:
        self._ledger = ledger
        self._append_line = append_line
        self._get_position = get_position
        self._cached: _OpenActions | None = None
        self.version = 0

    def clear_cache(self) -> None:
        self._cached = None
        self.version += 1

    def reload_rows(self) -> None:
        """Read the open actions from the file into memory again. Raises LedgerError if a row is corrupt."""
        self._cached = found = _OpenActions()
        for row in self._ledger.read_rows(OPEN_ROWS):
            found.update(self._decode_row(row))

    @property
    def _open(self) -> _OpenActions:
        if self._cached is None:
            self.reload_rows()
        assert self._cached is not None
        return self._cached

    def list_open(self) -> list[ActionRecord]:
        """Return the open actions, the oldest first."""
        return list(self._open.by_id.values())

    def find_open_action_of(self, job: str) -> ActionRecord | None:
        """Return the open action on a job, or None."""
        action_id = self._open.by_job.get(job)
        return None if action_id is None else self._open.by_id[action_id]

    def find_action(self, action_id: str) -> ActionRecord | None:
        """Return an action, open or ended. Returns None if it is unknown."""
        if (found := self._open.by_id.get(action_id)) is not None:
            return found
        rows = self._ledger.read_rows("SELECT * FROM actions WHERE action_id = ?", [action_id])
        return self._decode_row(rows[0]) if rows else None

    def find_last_with_key(self, key: str) -> ActionRecord | None:
        """Return the newest action with a key, or None."""
        rows = self._ledger.read_rows(LAST_WITH_KEY, [key])
        return self._decode_row(rows[0]) if rows else None

    def read_after(
        self,
        changed: int,
        limit: int,
        *,
        state: str | None = None,
        queue: str | None = None,
        job: str | None = None,
        own: Sequence[str] = (),
        newest: bool = False,
    ) -> list[ActionRecord]:
        """Return up to `limit` actions that changed after an audit line, in the order of their changes.

        state: a state, or OPEN_ONES for all open states. queue: this queue and those below it. own: only queues
        that are at or below one of these. newest: return the last `limit` of them instead of the first.
        """
        where, values = ["changed > ?"], list[str | int]([changed])
        if state == OPEN_ONES:
            where = [*where, OPEN_STATES]
        elif state is not None:
            own_index = "+" if job is not None else ""  # a job has few actions, and a state may have most of all
            where, values = [*where, f"{own_index}state = ?"], [*values, state]
        if job is not None:
            where, values = [*where, "job = ?"], [*values, job]
        for names in ((queue,) if queue is not None else (), own):
            if names:
                where.append(f"({' OR '.join([AT_OR_BELOW] * len(names))})")
                values += [value for name in names for value in (name, f"{name}/", f"{name}0")]  # 0 follows /
        order = "changed DESC" if newest else "changed"
        query = f"SELECT * FROM actions WHERE {' AND '.join(where)} ORDER BY {order} LIMIT ?"
        rows = [self._decode_row(row) for row in self._ledger.read_rows(query, [*values, limit])]
        return rows[::-1] if newest else rows

    def count_by_kind_and_state(self) -> dict[tuple[str, str], int]:
        """Return (kind, state) → number of open actions."""
        counts: dict[tuple[str, str], int] = {}
        for record in self._open.by_id.values():
            key = (record.action.kind.value, record.state.value)
            counts[key] = counts.get(key, 0) + 1
        return counts

    def insert(self, action: JobAction, now_ms: int, caller: str) -> ActionRecord:
        """Write a new action as proposed, and return it. The caller must check first that it may be proposed."""
        last = self.find_last_with_key(key := action.compute_key())
        number = 1 if last is None else int(last.action_id.rpartition("-")[2]) + 1
        life = (LifeStep(ActionState.PROPOSED, now_ms),)
        return self._write(ActionRecord(make_action_id(key, number), action, life), now_ms, caller)

    def enter(self, record: ActionRecord, state: ActionState, now_ms: int, caller: str, why: str = "") -> ActionRecord:
        """Write that an action enters a state, and return it. Nothing is written if it already has this state.

        Raises IllegalTransition if the state cannot follow the present one.
        """
        entered = record.enter(state, now_ms, why)
        return entered if entered is record else self._write(entered, now_ms, caller)

    def _write(self, record: ActionRecord, now_ms: int, caller: str) -> ActionRecord:
        with self._ledger.transaction():
            record = replace(record, changed=self._get_position() + 1)
            row = _make_row(record)
            checksum = compute_action_checksum(row)
            if record.state is ActionState.PROPOSED:
                self._ledger.execute_in_transaction(INSERT, [*row, checksum])
            else:
                changed = [record.state.value, encode(record.life), record.why, record.changed, checksum]
                self._ledger.execute_in_transaction(UPDATE, [*changed, record.action_id])
            sentence = describe_change(record)
            # An action has no decision. Its line gets the id and the checksum, and nothing else of this one.
            line = Decision(request_id=record.action_id, decision_id=checksum, outcome="refused", sentence=sentence)
            self._append_line(record.action_id, now_ms, caller, f"{ACTION}{record.state}", sentence, line)
            self._open.update(record)
        self.version += 1
        return record

    def _decode_row(self, row: Sequence[Any]) -> ActionRecord:
        with self._ledger.translate_decode_errors():
            values = self._ledger.check_row(f"action {row[0]!r}", row, compute_action_checksum)
            action_id, _, _, _, state, body, life, why, changed = values
            record = ActionRecord(
                action_id, _decode_action(check_bytes(body)), _decode_life(check_bytes(life)), why, changed
            )
            if record.state != state:
                raise ValueError(f"action {action_id!r} is {state!r}")
        return record


def _make_row(record: ActionRecord) -> tuple[Any, ...]:
    """Return the action's columns in the file, without the checksum."""
    action = record.action
    return (
        *(record.action_id, action.compute_key(), action.job, action.queue, record.state.value),
        *(encode(action), encode(record.life), record.why, record.changed),
    )
