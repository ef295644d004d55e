"""The answer to a batch of events."""

import msgspec


class RefusedRecord(msgspec.Struct):
    index: int
    reason: str


class EventsAnswer(msgspec.Struct):
    accepted: int
    duplicates: int
    rejected: list[RefusedRecord]
