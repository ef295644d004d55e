"""Row types and errors of the ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from fleetcast.fleet.errors import FleetcastError
from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.placement.ledger.chain import encode

_Row = TypeVar("_Row")


class LedgerError(FleetcastError):
    """An error about a ledger that cannot be used: damaged, foreign, of another version, or locked."""

    retry_after_s = 2.0


class LedgerUnavailable(LedgerError):
    """An error about a ledger that cannot be opened now. A later try may succeed.

    The file is locked, or its disk is full or read-only.
    """


class IntentState(StrEnum):
    ACTIVE = "active"  # holds its GPUs: nothing has been seen of the job yet
    SEEN = "seen"  # the job was seen running: occupancy holds the GPUs now
    ENDED = "ended"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


SETTLED_WORDS = {
    IntentState.EXPIRED: "did not start in time: its GPUs are free again",
    IntentState.CANCELLED: "was cancelled before it started: its GPUs are free again",
}


@dataclass(frozen=True, slots=True)
class Intent:
    """The GPUs promised to a job. `cpus` and `host_memory_gib` are those of each rank."""

    request_id: str
    job: str
    attempt: int
    ranks: tuple[RankPlacement, ...]
    cpus: float
    host_memory_gib: float
    limit_s: float | None
    created_ms: int
    expires_ms: int

    def make_row(self, state: IntentState) -> tuple[Any, ...]:
        """Return the intent's columns in the file, without the checksum.

        Negative zeros become zero, because SQLite would return them as zero and the checksum would not
        match.
        """
        amounts = (
            None if amount is None else amount + 0.0 for amount in (self.cpus, self.host_memory_gib, self.limit_s)
        )
        ranks = encode(self.ranks)
        return (
            *(self.request_id, self.job, self.attempt, ranks),
            *amounts,
            self.created_ms,
            self.expires_ms,
            state.value,
        )

    @property
    def gpus(self) -> int:
        return sum(len(rank.gpus) for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class QueueEntry:
    request: PlacementRequest
    reply: bytes
    queued_ms: int


@dataclass(frozen=True, slots=True)
class CommittedDecision:
    """A stored decision. `reply` is what the caller received, and receives again on a retry."""

    cursor: int
    request_id: str
    reply: bytes
    outcome: str
    job: str
    attempt: int
    time_ms: int


def convert_row(kind: type[_Row], row: Sequence[Any]) -> _Row:
    """Convert a row into a dataclass. Raises ValueError for a value of another type."""
    return msgspec.convert(dict(zip(kind.__annotations__, row, strict=True)), kind, builtin_types=(bytes,))


def check_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"a blob is a {type(value).__name__}")
    return value
