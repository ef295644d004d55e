"""Checksums of the ledger's rows and the hash chain of its audit trail.

Every digest is the hexadecimal SHA-256 of one JSON array: UTF-8, no spaces, only the escapes that JSON
demands, in Python `json.dumps(array, ensure_ascii=False, separators=(",", ":")).encode()`. Values are
those that SQLite returns: whole numbers and text as they are, NULL as null, a blob as standard base64, a
REAL as Python's `str` of it.

    audit.hash          ["audit", audit_id, time_ms, caller, action, request_id, decision_id,
                         board_as_of_ms, models, sentence, stored, previous]
    decisions.checksum  ["decisions", cursor, request_id, body, reply, outcome, job, attempt, time_ms]
    queue.checksum      ["queue", request_id, body, reply, queued_ms]
    intents.checksum    ["intents", request_id, job, attempt, ranks, cpus, host_memory_gib, limit_s,
                         created_ms, expires_ms, state]
    charges.checksum    ["charges", charge_id, request_id, job, attempt, leaf, user, class, held,
                         expected_s, queued_ms, held_ms, started_ms, ended_ms, outcome, used_gpu_s,
                         lost_gpu_s]
    credits.checksum    ["credits", queue, as_of_ms, earned, spent, expired]
    actions.checksum    ["actions", action_id, wish, job, queue, state, body, life, why, changed]

`models` is text: the stored, compact JSON. `previous` is the hash of the line before, 64 zeros in the
first one. `stored` is the checksum of the decision or queue entry written with the line, else empty. So a
head (an audit_id and its hash) that was stored elsewhere shows that no line up to it, and no reply, has
changed since. A line about an action has the action's id as request_id and the checksum of its row as
decision_id. `stored` is empty there, so that a program of version 3 can verify the chain.

A CRC would cost less. But an attacker who edits a reply can compute its CRC again, and the chain could
not vouch for replies. A placement pays for three digests of some 1.5 KB, which take microseconds. The
fsync that follows takes far longer.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode
NO_HASH = "0" * 64
QUEUED = "queue"  # the action of the line that is written with an entry of the queue
FLOATS = slice(4, 7)  # of an intent: cpus, host_memory_gib, limit_s


@dataclass(frozen=True, slots=True)
class ChainHead:
    """The newest line of the audit trail. audit_id is 0 if there is none."""

    audit_id: int = 0
    hash: str = NO_HASH

    @classmethod
    def parse(cls, text: str) -> "ChainHead | None":
        """Parse a head from text of the form `audit_id:hash`. Returns None if the text is not a head.

        >>> ChainHead.parse(f"12:{NO_HASH}").audit_id
        12
        """
        found = re.fullmatch(r"([1-9][0-9]{0,17}):([0-9a-f]{64})", text, re.ASCII)
        return cls(int(found[1]), found[2]) if found else None

    def __str__(self) -> str:
        return f"{self.audit_id}:{self.hash}"


def hash_line(line: Sequence[Any]) -> str:
    """Return the hash of a line: its columns from audit_id to `previous`.

    >>> hash_line((1, 0, "ada", "accept", "", "", 0, "{}", "the board was lost", "", NO_HASH))[:16]
    '836060b7cb51dfb1'
    """
    return _compute_digest("audit", line)


def compute_decision_checksum(row: Sequence[Any]) -> str:
    """Return the checksum of a decision. row: all its columns except the checksum."""
    return _compute_digest("decisions", row)


def compute_queue_checksum(row: Sequence[Any]) -> str:
    """Return the checksum of a queue entry. row: all its columns except the checksum."""
    return _compute_digest("queue", row)


def compute_intent_checksum(row: Sequence[Any]) -> str:
    """Return the checksum of an intent. row: all its columns except the checksum."""
    return _compute_digest(
        "intents", [*row[:4], *(None if value is None else str(value) for value in row[FLOATS]), *row[7:]]
    )


def compute_charge_checksum(row: Sequence[Any]) -> str:
    """Return the checksum of a charge. row: all its columns except the checksum."""
    return _compute_digest("charges", [str(value) if isinstance(value, float) else value for value in row])


def compute_credit_checksum(row: Sequence[Any]) -> str:
    """Return the checksum of a queue's credits. row: all their columns except the checksum."""
    return _compute_digest("credits", [str(value) if isinstance(value, float) else value for value in row])


def compute_action_checksum(row: Sequence[Any]) -> str:
    """Return the checksum of an action. row: all its columns except the checksum."""
    return _compute_digest("actions", row)


CHECKSUMS = {
    "decisions": compute_decision_checksum,
    "queue": compute_queue_checksum,
    "intents": compute_intent_checksum,
}
CHARGE_TABLE_CHECKSUMS = {
    "charges": compute_charge_checksum,
    "credits": compute_credit_checksum,
}  # of tables that version 2 had not


def _compute_digest(table: str, values: Sequence[Any]) -> str:
    return hashlib.sha256(encode((table, *values))).hexdigest()
