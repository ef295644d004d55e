"""The parts of a gRPC servicer: calls and streams.

Each maps the bytes of a message to those of another message.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import Message

Ask = Callable[[str, bytes], bytes]  # a verb of the servicer's answerer and a question -> its answer
Call = Callable[[Ask, bytes], bytes]
Watch = Callable[[Ask, bytes], AsyncIterator[bytes]]


@dataclass(frozen=True, slots=True)
class GrpcService:
    """One foreign protocol.

    answerer: its name in the registry. service: `package.Service`.
    calls, streams: methods by name. A method raises DecodeError for an invalid message, and the errors of its
    verb.
    """

    answerer: str
    service: str
    calls: Mapping[str, Call]
    streams: Mapping[str, Watch] = field(default_factory=dict)


def encoded(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data
