"""The one protocol between Fleetcast and outside schedulers and autoscalers.

    board → Weather → Adapter.wishes → limits → Port.write      we write   (service.adapters)
    question → Verb.answer, or Verb.stale                       we answer  (service.api.answerers)

An adapter translates and does nothing else: no clock, no socket, no file. Whatever has one is the host's or the port's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from fleet.errors import FleetcastError
from schedulers.weather import Weather

Seen = Mapping[str, Mapping[str, str]]  # key → field → value: what the other system holds, ours and others'


class NotKnown(FleetcastError):
    """The weather lacks what an answer needs: the caller gets the stale answer."""


class Verb(NamedTuple):
    """A question that others ask. `answer` may raise NotKnown, or RequestError for another shape.

    `stale` is the neutral answer without fresh weather, or None where the caller is better served by an error at once.
    """

    answer: Callable[[Weather, bytes], bytes]
    stale: Callable[[bytes], bytes | None]


class Write(NamedTuple):
    """A wish about one field of the other system. value None: take ours back.

    `seen` is what the field held when the wish was made: a port writes nothing over anything else. When a limit is
    reached, withdrawals go first, then what it costs most to leave undone.
    """

    key: str
    field: str
    value: str | None
    seen: str | None
    why: str
    cost: int = 0


class WriteOutcome(StrEnum):
    """The outcome of a write. OBSERVED: nothing was written, since the adapter only observes."""

    DONE = "done"
    CONFLICT = "conflict"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    OBSERVED = "observed"


class Adapter(Protocol):
    """A language of another system. A pure answerer wishes nothing, a pure writer has no verbs."""

    @property
    def verbs(self) -> Mapping[str, Verb]: ...

    @property
    def fields(self) -> frozenset[str]:
        """The fields that are ours: no other is ever written."""

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterable[Write]:
        """Return the changes that the adapter asks for. Without weather, it takes everything of ours back.

        If a part of the weather is None, it takes back what restricts.
        """


class Port(Protocol):
    """The only input and output, one for an outside system. SourceError or OSError while it is away."""

    async def read(self) -> Seen: ...

    async def write(self, batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        """One outcome for each write, in order."""

    async def close(self) -> None:
        """May be called before the first reading, and twice."""


class Door(NamedTuple):
    """A writer, ready for use: what `use` of a configured adapter makes of its options.

    needs_starts: it reads `Weather.starts`, for which the host asks the placer. batch: the most writes that its port
    takes at once. news: where the other system waits for what is written, a number that moves whenever it asks for
    something. Such a door is looked at as soon as that moves, and is told at once that there is no fresh board.
    """

    adapter: Adapter
    port: Port
    needs_starts: bool = False
    batch: int = 100
    news: Callable[[], int] | None = None


def take_back(
    seen: Seen, fields: Iterable[str], why: str, costs: Mapping[str, int] = MappingProxyType({})
) -> Iterator[Write]:
    """Yield a withdrawal of each of these fields that is present. costs: by field, of those that others suffer from."""
    ours = frozenset(fields)
    for key, values in seen.items():
        for field in sorted(ours & values.keys()):
            yield Write(key, field, None, values[field], why, costs.get(field, 0))
