"""A decoder of request bodies: one object, an array, JSON lines, or CloudEvents 1.0 (three modes).

    application/json, or none               {…}  or  [{…}, …]  or one object a line, recognised by content
    ce-specversion header                   CloudEvents binary: the body is the event
    application/cloudevents+json            CloudEvents structured: the event is in `data` (or `data_base64`)
    application/cloudevents-batch+json      an array of structured CloudEvents

The good records of a body are accepted even if others are bad. A truncated array gives its complete records and
one error.
"""

import base64
import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from fleetcast.fleet.decode_faults import format_value
from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.ingest.inbox.job_events import FUTURE_LIMIT_MS, MAX_COUNT, decode_event, make_malformed_error

MAX_RECORDS = 200_000
MAX_REJECTED = 10_000
CLOUD_EVENT = "application/cloudevents+json"
CLOUD_EVENT_BATCH = "application/cloudevents-batch+json"
LINES = frozenset({"application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines"})

MANY_COMMAS = 1_000_000
BLANKS = " \t\r\n"
_BLANK = re.compile(f"[{BLANKS}]*")
_LINE = re.compile(rb"[^\n]+")

_raw = msgspec.json.Decoder(msgspec.Raw).decode
_raw_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class DecodedRecord(msgspec.Struct, frozen=True, gc=False):
    """A good record: its index in the body, its bytes, and the decoded event."""

    index: int
    raw: bytes
    event: JobEvent | NodeEvent


@dataclass(slots=True)
class DecodedBody:
    """The records of a body, good and bad."""

    records: list[DecodedRecord] = field(default_factory=list)
    rejected: list[tuple[int, RecordError]] = field(default_factory=list)
    refused_starts: set[tuple[str, int]] = field(default_factory=set)  # attempts whose records say that they run

    def __len__(self) -> int:
        return len(self.records) + len(self.rejected)


class CloudEvent(msgspec.Struct):
    """The CloudEvents 1.0 envelope. Extension attributes are allowed and ignored."""

    specversion: str
    id: str
    source: str
    type: str
    datacontenttype: str = "application/json"
    data: msgspec.Raw = msgspec.Raw()
    data_base64: str = ""


_cloud_event = msgspec.json.Decoder(CloudEvent).decode


def decode_body(
    body: bytes, now_ms: int, headers: Mapping[str, str] | None = None, future_limit_ms: int = FUTURE_LIMIT_MS
) -> DecodedBody:
    """Decode every record of a request body, and list rejected ones by index.

    `headers`: names in lower case.

    >>> decode_body(b'[{"job": "a", "sequence": 1, "time_ms": 5, "type": "finished"}, [5]]', now_ms=10).rejected
    [(1, RecordError('wrong_type: is [5], must be an object of keys and values'))]
    """
    decoded = DecodedBody()
    is_full = False
    for index, part in enumerate(split_body(body, headers or {})):
        if index >= MAX_RECORDS or len(decoded.rejected) >= MAX_REJECTED:
            if not is_full:
                why = f"the rest was not read: at most {MAX_RECORDS} records in a body, at most {MAX_REJECTED} bad ones"
                decoded.rejected.append((index, RecordError("too_many", why)))
                is_full = True
            if index >= 2 * MAX_RECORDS:
                break
            _add_refused_start(part, decoded)
            continue
        try:
            if isinstance(part, RecordError):
                raise part
            decoded.records.append(DecodedRecord(index, part, decode_event(part, now_ms, future_limit_ms)))
        except RecordError as error:
            decoded.rejected.append((index, error.with_traceback(None)))  # a traceback would keep the record alive
            _add_refused_start(part, decoded)
    return decoded


class _Head(msgspec.Struct):
    """The job, attempt and type of a refused record. They are readable even if other fields are wrong."""

    job: str
    type: str
    attempt: int = 1


_decode_head = msgspec.json.Decoder(_Head).decode
RUNS = frozenset({"started", "resized", "phase", "step", "checkpoint"})  # types of events of a job that runs


def _add_refused_start(part: bytes | RecordError, decoded: DecodedBody) -> None:
    """Add a refused record's attempt to `refused_starts` if the record shows that the attempt runs."""
    if isinstance(part, RecordError):
        return
    with contextlib.suppress(ValueError, RecursionError):
        head = _decode_head(part)
        if head.type in RUNS and len(head.job) <= MAX_NAME_LENGTH and 0 <= head.attempt <= MAX_COUNT:
            decoded.refused_starts.add((head.job, head.attempt))


def split_body(body: bytes, headers: Mapping[str, str]) -> Iterable[bytes | RecordError]:
    """Split a body into the bytes of its records, in order, without decoding them.

    Where the framing is broken, the result has an error instead of a record.
    """
    body = body.removeprefix(b"\xef\xbb\xbf").strip()
    if not body:
        return ()
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if "ce-specversion" in headers:
        return (_check_binary_event(body, headers),)
    if kind == CLOUD_EVENT:
        return (_unwrap_cloud_event(body),)
    if kind == CLOUD_EVENT_BATCH:
        return (part if isinstance(part, RecordError) else _unwrap_cloud_event(part) for part in _split_array(body))
    if kind in LINES:
        return _split_lines(body)
    if body[:1] == b"[":
        return _split_array(body)
    return _split_ndjson(body)


def _split_ndjson(body: bytes) -> Iterable[bytes | RecordError]:
    if b"\n" not in body:
        return (body,)
    try:
        _raw(body)
    except (ValueError, RecursionError):
        return _split_lines(body)
    return (body,)


def _split_lines(body: bytes) -> Iterator[bytes]:
    return (line for line in (found.group().strip() for found in _LINE.finditer(body)) if line)


def _split_array(body: bytes) -> Iterable[bytes | RecordError]:
    if body.count(b",") > MANY_COMMAS:  # perhaps millions of records, of which only the first are looked at
        return _scan_array_elements(body, RecordError("not_json", "the array breaks off"))
    try:
        return map(bytes, _raw_list(body))
    except (ValueError, RecursionError) as error:
        return _scan_array_elements(body, make_malformed_error(error))


def _scan_array_elements(body: bytes, error: RecordError) -> Iterator[bytes | RecordError]:
    """Yield the complete records of an array one by one. Where the array is broken, yield `error`."""
    text = body.decode("utf-8", "surrogateescape")
    scan = json.JSONDecoder().raw_decode
    at = _skip_blanks(text, 1)
    more = text[at : at + 1] != "]"
    while more:
        try:
            _, end = scan(text, at)
        except (ValueError, RecursionError):
            yield error
            return
        yield text[at:end].encode("utf-8", "surrogateescape")
        at = _skip_blanks(text, end)
        more = text[at : at + 1] == ","
        at = _skip_blanks(text, at + 1) if more else at
    if text[at : at + 1] != "]" or text[at + 1 :].strip(BLANKS):
        yield error


def _skip_blanks(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _check_binary_event(body: bytes, headers: Mapping[str, str]) -> bytes | RecordError:
    missing = [name for name in ("ce-id", "ce-source", "ce-type") if not headers.get(name)]
    if headers["ce-specversion"] != "1.0":
        return RecordError("cloud_event", f"ce-specversion {format_value(headers['ce-specversion'])}, expected '1.0'")
    if missing:
        return RecordError("cloud_event", f"header {missing[0]} is missing")
    return body


def _unwrap_cloud_event(body: bytes) -> bytes | RecordError:
    """Return the bytes of the event inside a CloudEvents envelope, or an error."""
    try:
        envelope = _cloud_event(body)
    except (ValueError, RecursionError) as error:
        broken = make_malformed_error(error, body, _cloud_event)
        return RecordError("cloud_event", str(broken)) if isinstance(error, msgspec.ValidationError) else broken
    if envelope.specversion != "1.0":
        return RecordError("cloud_event", f"specversion {format_value(envelope.specversion)}, expected '1.0'")
    if envelope.data_base64:
        try:
            return base64.b64decode(envelope.data_base64, validate=True)
        except ValueError as error:  # binascii's, and what is not ASCII
            return RecordError("cloud_event", f"data_base64: {error}")
    content = envelope.datacontenttype.partition(";")[0].strip().lower()
    if not (content == "application/json" or content.endswith("+json")):
        return RecordError("cloud_event", f"datacontenttype {format_value(content)}, expected application/json")
    data = bytes(envelope.data)
    return data if data else RecordError("cloud_event", "data is missing")
