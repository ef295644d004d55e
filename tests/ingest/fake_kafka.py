"""A Kafka in memory, for tests of what reads it: topics are lists, brokers can be away, retention can pass."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fleetcast.clients.kafka_records import Gap, Message, OutgoingRecord, Place
from fleetcast.fleet.errors import SourceError


@dataclass(slots=True)
class FakeBrokers:
    """What the brokers hold; survives its readers."""

    logs: dict[Place, list[Message]] = field(default_factory=dict)
    begins: dict[Place, int] = field(default_factory=dict)
    committed: dict[Place, int] = field(default_factory=dict)
    away: bool = False

    def topic(self, name: str, partitions: int) -> None:
        for number in range(partitions):
            self.logs.setdefault((name, number), [])

    def put(
        self,
        place: Place,
        value: bytes | None,
        key: bytes | None = None,
        time_ms: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> Message:
        log = self.logs.setdefault(place, [])
        told = tuple((name, text.encode()) for name, text in (headers or {}).items())
        log.append(Message(place, len(log), time_ms, key, value, told))
        return log[-1]

    def letters(self, topic: str) -> list[Message]:
        return [message for place, log in self.logs.items() if place[0] == topic for message in log]


class FakeReader:
    """A `Reader` on them; `most` records a poll."""

    def __init__(self, brokers: FakeBrokers, most: int = 100) -> None:
        self.brokers = brokers
        self.most = most
        self.at: dict[Place, int] = {}
        self.closed = 0

    def _answer(self) -> None:
        if self.brokers.away:
            raise SourceError("kafka: no broker answers", 0.01)

    async def list_partitions(self, topic: str) -> frozenset[int]:
        self._answer()
        return frozenset(number for name, number in self.brokers.logs if name == topic)

    async def assign(self, starts: Mapping[Place, int | None]) -> None:
        self._answer()
        for place, offset in starts.items():
            if place not in self.at:
                self.at[place] = self.brokers.begins.get(place, 0) if offset is None else offset

    async def poll(self, wait_s: float) -> tuple[list[Message], list[Gap]]:
        found: list[Message] = []
        for place, offset in () if self.brokers.away else self.at.items():
            begins = self.brokers.begins.get(place, 0)
            if offset < begins:
                self.at[place] = begins
                return [], [Gap(place, offset, begins)]
            found += self.brokers.logs[place][offset : offset + self.most - len(found)]
        for message in found:
            self.at[message.place] = message.offset + 1
        return found, []

    async def read_lag(self) -> dict[Place, int]:
        return {place: len(self.brokers.logs[place]) - offset for place, offset in self.at.items()}

    async def read_end_offsets(self, places: Iterable[Place]) -> dict[Place, int]:
        self._answer()
        return {place: len(self.brokers.logs[place]) for place in places}

    async def read_keys(self, topic: str, since: Mapping[int, int], most: int) -> tuple[list[bytes], dict[int, int]]:
        self._answer()
        letters = self.brokers.letters(topic)
        return [message.key or b"" for message in letters[since.get(0, 0) :]], {0: len(letters)}

    async def send(self, records: Sequence[OutgoingRecord]) -> dict[Place, int]:
        self._answer()
        for record in records:
            log = self.brokers.logs.setdefault((record.topic, 0), [])
            place = record.topic, 0
            log.append(Message(place, len(log), record.time_ms or 0, record.key, record.value, record.headers))
        return {(record.topic, 0): len(self.brokers.logs[(record.topic, 0)]) for record in records}

    def commit(self, offsets: Mapping[Place, int]) -> None:
        self._answer()
        self.brokers.committed.update(offsets)

    async def close(self) -> None:
        self.closed += 1
