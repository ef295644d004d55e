"""The parts of a gRPC servicer: calls, and streams, each from the bytes of a message to the bytes of another."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import Message

Ask = Callable[[str, bytes], bytes]  # a verb of the servicer's answerer and a question -> its answer
Call = Callable[[Ask, bytes], bytes]
Watch = Callable[[Ask, bytes], AsyncIterator[bytes]]


@dataclass(frozen=True, slots=True)
class GrpcService:
    """One foreign protocol. answerer: its name in the registry; service: `package.Service`; methods by their names.

    A method raises DecodeError for what is no message, and what the verb raises.
    """

    answerer: str
    service: str
    calls: Mapping[str, Call]
    streams: Mapping[str, Watch] = field(default_factory=dict)


def encoded(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data
