"""Records sent to Kafka and received from it, independent of the client library."""

from dataclasses import dataclass

Place = tuple[str, int]
"""(topic, partition)"""


@dataclass(frozen=True, slots=True)
class Message:
    """One Kafka record as it was sent. `value` is None for a tombstone."""

    place: Place
    offset: int
    time_ms: int  # Unix, wall: set by the sender or the broker
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap: records that the broker no longer has. Reading continued at `begins` instead of `wanted`."""

    place: Place
    wanted: int
    begins: int


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """The limits of a consumer: records per poll, bytes per fetch, and bytes per partition in a fetch."""

    max_records: int
    fetch_bytes: int
    partition_bytes: int


@dataclass(frozen=True, slots=True)
class OutgoingRecord:
    """A record to be written. `time_ms`: Unix ms, or None for now."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    time_ms: int | None = None
