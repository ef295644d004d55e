"""The protocol between Fleetcast and outside schedulers and autoscalers.

    board → Weather → Adapter.wishes → limits → Port.write      we write   (fleetcast.service.adapters)
    question → Verb.answer, or Verb.stale                       we answer  (fleetcast.service.api.answerers)

An adapter only translates. It has no clock, socket or file. The process that runs it (its host) has the
clock, and its port has the connection.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from fleetcast.fleet.errors import FleetcastError
from fleetcast.schedulers.weather import Weather

Seen = Mapping[str, Mapping[str, str]]  # key → field → value: what the other system holds, ours and others'


class NotKnown(FleetcastError):
    """The error for an answer that needs data which the weather lacks. The caller then gets the stale answer."""


class Verb(NamedTuple):
    """A kind of question that other systems ask.

    `answer` may raise NotKnown, or RequestError for a question of the wrong form. `stale` returns the
    neutral answer for the time without fresh weather. It is None if an immediate error is better for the caller.
    """

    answer: Callable[[Weather, bytes], bytes]
    stale: Callable[[bytes], bytes | None]


class Write(NamedTuple):
    """A wish to change one field of the other system. value: None withdraws our value.

    `seen` is the field's value when the wish was made. A port writes nothing if the field now has another
    value. If a limit allows only some writes, withdrawals come first. Then come the wishes whose omission costs
    most.
    """

    key: str
    field: str
    value: str | None
    seen: str | None
    why: str
    cost: int = 0


class WriteOutcome(StrEnum):
    """The outcome of a write. OBSERVED: nothing was written, because the adapter only observes."""

    DONE = "done"
    CONFLICT = "conflict"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    OBSERVED = "observed"


class Adapter(Protocol):
    """An adapter, which translates between Fleetcast and another system.

    An adapter that only answers has no wishes. An adapter that only writes has no verbs.
    """

    @property
    def verbs(self) -> Mapping[str, Verb]: ...

    @property
    def fields(self) -> frozenset[str]:
        """The fields that the adapter owns. It never writes any other field."""

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterable[Write]:
        """Return the changes that the adapter wants in the other system.

        Without weather, it withdraws everything that it wrote. If the weather lacks only the part that it needs, it
        withdraws restrictions.
        """


class Port(Protocol):
    """The connection to an outside system. All input and output goes through it.

    Methods raise SourceError or OSError while the system does not answer.
    """

    async def read(self) -> Seen: ...

    async def write(self, batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        """Write a batch, and return one outcome for each write, in order."""

    async def close(self) -> None:
        """Close the port. May be called before the first reading, and twice."""


class Door(NamedTuple):
    """A writer that is ready for use, made from the options of a configured adapter.

    needs_starts: whether it reads `Weather.starts`, for which the host polls the placer. batch: the largest
    number of writes that its port accepts at once. news: set if the other system waits for writes. This function
    returns a number that changes whenever that system requests something. The host polls such a door as soon as
    the number changes, even if there is no fresh board. follow_news: called once with a function. The port then
    calls that function at each change of `news`, in the host's event loop. Without follow_news, the host reads
    the number 20 times a second.
    """

    adapter: Adapter
    port: Port
    needs_starts: bool = False
    batch: int = 100
    news: Callable[[], int] | None = None
    follow_news: Callable[[Callable[[], None]], None] | None = None


def withdraw_fields(
    seen: Seen, fields: Iterable[str], why: str, costs: Mapping[str, int] = MappingProxyType({})
) -> Iterator[Write]:
    """Yield a withdrawal of each of these fields that is present.

    costs: field → cost of not withdrawing it.
    """
    ours = frozenset(fields)
    for key, values in seen.items():
        for field in sorted(ours & values.keys()):
            yield Write(key, field, None, values[field], why, costs.get(field, 0))
