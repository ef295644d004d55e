"""The description of a gRPC service by its calls and streams.

Each call maps the bytes of a request to the bytes of an answer. Each stream maps them to many answers.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import Message

Ask = Callable[[str, bytes], bytes]  # a verb of the servicer's answerer and a question -> its answer
Call = Callable[[Ask, bytes], bytes]
Watch = Callable[[Ask, bytes], AsyncIterator[bytes]]


@dataclass(frozen=True, slots=True)
class GrpcService:
    """The gRPC service of one foreign protocol.

    answerer: the name of the adapter that answers. service: the service's name, as `package.Service`. calls,
    streams: functions by method name. They raise DecodeError for an invalid message, and the errors of the
    adapter's verb.
    """

    answerer: str
    service: str
    calls: Mapping[str, Call]
    streams: Mapping[str, Watch] = field(default_factory=dict)


def encode_message(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data
