"""A decoder of events of the elastic launchers torchelastic (torchrun) and NVRx (ft_launcher).

    Event: a worker or an agent FAILED      failed, with the category that its error states, and the node
    Event: agent of group rank 0 SUCCEEDED  finished: it has waited for the others
    Event or RdzvEvent: a rendezvous        phase init, with the rank if the record states one
    a cycle of NVRx's cycle file            started, and its active nodes as a resize (standby nodes only hold GPUs)

The number of an attempt is torchelastic's restarts + 1, or NVRx's attempt + 1, unless the request states it.
"""

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from fleetcast.fleet.decode_faults import format_value
from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.fleet.events import Failed, FailureCategory, Finished, JobEvent, Phase, Resized, Started
from fleetcast.ingest.inbox.event_body import MAX_RECORDS, MAX_REJECTED, DecodedBody, DecodedRecord, split_body
from fleetcast.ingest.inbox.job_events import check_event, make_malformed_error
from fleetcast.ingest.kubernetes.failures import classify_exit
from fleetcast.ingest.lifecycle import ENDED, RESIZED, STARTED
from fleetcast.ingest.node_names import expand_nodes

MESSAGE_LENGTH = 2_000
CYCLES = RESIZED + (1 << 16)  # behind the resizes that a scheduler tells
MOST_CYCLES = 1 << 18
AGENTS = ENDED << 1  # behind the end, before the blocks of the ranks
AGENT_BITS = 31
SINCE_S, A_SECOND = 1_700_000_000, 8
_SIGNAL = re.compile(r"got signal: (?:15|2)\b|\bSIG(?:TERM|INT)\b")


class Metadata(msgspec.Struct):
    """The metadata of a torchelastic Event. Other fields are skipped."""

    run_id: str = ""
    state: str = ""
    hostname: str | None = None
    global_rank: int | None = None
    group_rank: int | None = None
    raw_error: str | None = None
    agent_restarts: int | None = None


class ElasticRecord(msgspec.Struct):
    """One record: a torchelastic Event, an RdzvEvent, or a cycle of NVRx. Its keys show which kind it is."""

    name: str = ""
    source: str = ""
    timestamp: int = 0
    metadata: Metadata | None = None
    run_id: str = ""
    message: str = ""
    hostname: str = ""
    node_state: str = ""
    rank: int | None = None
    job_id: str | int | None = None
    attempt_index: int = 0
    cycle_number: int | None = None
    cycle_start_time: str | float | None = None
    active_nodes: str | list[str] | None = None


_record = msgspec.json.Decoder(ElasticRecord).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Sender:
    """The job and attempt that a request states for all its records.

    `job` is empty and `attempt` is 0 if the records name them.
    """

    job: str = ""
    attempt: int = 0


def decode(body: bytes, headers: Mapping[str, str], sender: Sender, now_ms: int, future_limit_ms: int) -> DecodedBody:
    """Decode a request body into job events, in their order, and list its bad records.

    headers: names in lower case. sender: what the request states for all records.
    """
    decoded = DecodedBody()
    for index, part in enumerate(split_body(body, headers)):
        if index >= MAX_RECORDS or len(decoded.rejected) >= MAX_REJECTED:
            why = RecordError("too_many", f"the rest was not read: at most {MAX_RECORDS} records")
            decoded.rejected.append((index, why))
            break
        try:
            if isinstance(part, RecordError):
                raise part
            for event in make_job_events(_decode_record(part), sender, now_ms, zlib.crc32(part)):
                check_event(event, now_ms, future_limit_ms)
                decoded.records.append(DecodedRecord(index, _encode(event), event))
        except RecordError as error:
            decoded.rejected.append((index, error.with_traceback(None)))
    return decoded


def _decode_record(part: bytes) -> ElasticRecord:
    try:
        return _record(part)
    except (ValueError, RecursionError) as error:
        raise make_malformed_error(error, part, _record) from None


def make_job_events(record: ElasticRecord, sender: Sender, now_ms: int, mark: int = 0) -> Iterable[JobEvent]:
    """Convert one record into job events. Raises RecordError.

    mark: a number that stays the same when the sender repeats the record.
    """
    if record.cycle_number is not None:
        return _make_cycle_events(record, sender, now_ms)
    if record.node_state:
        return _make_rendezvous_events(record, sender, now_ms, mark)
    if record.metadata is not None:
        return _make_agent_events(record, record.metadata, sender, now_ms, mark)
    raise RecordError("missing_field", "neither metadata, node_state nor cycle_number: which kind of record is it?")


def _choose_job(sender: Sender, *stated: str) -> str:
    job = sender.job or next(filter(None, stated), "")
    if not job or job.lower() == "none":
        raise RecordError("missing_field", "no run_id that names the job: start it with --rdzv-id, or say ?job=")
    return job


def _make_agent_events(
    record: ElasticRecord, about: Metadata, sender: Sender, now_ms: int, mark: int
) -> list[JobEvent]:
    restarts = about.agent_restarts or 0
    if not 0 <= restarts < 2**31:
        raise RecordError("out_of_range", f"agent_restarts {format_value(restarts)}")
    at_ms = record.timestamp or now_ms
    same: dict[str, Any] = {"job": _choose_job(sender, about.run_id), "attempt": sender.attempt or restarts + 1}
    state = about.state.upper()
    if state == "FAILED" and record.source in ("WORKER", "AGENT"):
        error = parse_failure(about.raw_error or "")
        rank = "" if about.global_rank is None else f"rank {about.global_rank}: "
        message = f"{rank}{error.message or 'it failed and said nothing'}"[:MESSAGE_LENGTH]
        node = about.hostname or ""
        return [Failed(**same, sequence=ENDED, time_ms=at_ms, category=error.category, node=node, message=message)]
    if state == "SUCCEEDED" and record.source == "AGENT" and about.group_rank == 0:
        return [Finished(**same, sequence=ENDED, time_ms=at_ms)]
    if "RENDEZVOUS" in (state, record.source):
        sequence = _make_sequence(record.timestamp, mark)
        return [Phase(**same, sequence=sequence, time_ms=at_ms, name="init", rank=about.group_rank)]
    return []


def _make_rendezvous_events(record: ElasticRecord, sender: Sender, now_ms: int, mark: int) -> list[JobEvent]:
    """Return the job events of a RdzvEvent, which states neither a time nor the agent's restarts."""
    if record.node_state.upper() not in ("INIT", "RUNNING"):
        return []
    same: dict[str, Any] = {"job": _choose_job(sender, record.run_id), "attempt": sender.attempt or 1}
    return [Phase(**same, sequence=_make_sequence(0, mark), time_ms=now_ms, name="init", rank=record.rank)]


def _make_cycle_events(record: ElasticRecord, sender: Sender, now_ms: int) -> list[JobEvent]:
    number = record.cycle_number or 0
    if not 0 <= number < MOST_CYCLES or not 0 <= record.attempt_index < 2**31:
        said = f"cycle_number {format_value(number)}, attempt_index {format_value(record.attempt_index)}"
        raise RecordError("out_of_range", said)
    job = _choose_job(sender, "" if record.job_id is None else str(record.job_id))
    at_ms = _parse_time_ms(record.cycle_start_time, now_ms)
    nodes = _parse_nodes(record.active_nodes)
    if not nodes:
        return []
    same: dict[str, Any] = {"job": job, "attempt": sender.attempt or record.attempt_index + 1, "time_ms": at_ms}
    resized = Resized(**same, sequence=CYCLES + number, nodes=nodes)
    return [resized] if number else [Started(**same, sequence=STARTED, nodes=nodes), resized]


def _parse_nodes(stated: str | list[str] | None) -> tuple[str, ...]:
    """Return the node names in a list, or in a text in Slurm's notation. Raises RecordError."""
    if not stated:
        return ()
    if isinstance(stated, list):
        return tuple(stated)
    try:
        return tuple(expand_nodes(stated))
    except ConfigError as error:
        raise RecordError("bad_value", f"active_nodes: {error}") from None


def _parse_time_ms(stated: str | float | None, now_ms: int) -> int:
    """Convert RFC 3339 or Unix seconds to Unix ms. Returns `now_ms` if no time is stated.

    Raises RecordError.
    """
    if stated is None or stated == "":
        return now_ms
    try:
        if isinstance(stated, str):
            time = datetime.fromisoformat(stated)
            return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
        return round(stated * 1000)
    except (ValueError, OverflowError):
        raise RecordError(
            "bad_value", f"cycle_start_time {format_value(stated)}: expected RFC 3339 or seconds"
        ) from None


def _make_sequence(timestamp_ms: int, mark: int) -> int:
    """Return the sequence number of an agent's event. If the event states a time, the number increases with it."""
    if timestamp_ms <= 0:
        return AGENTS + mark % (1 << AGENT_BITS)
    return AGENTS + ((timestamp_ms // 1000 - SINCE_S) * A_SECOND + mark % A_SECOND) % (1 << AGENT_BITS)


class Failure(msgspec.Struct, frozen=True):
    """The category and the message of a worker's error."""

    category: FailureCategory
    message: str


class _Details(msgspec.Struct):
    py_callstack: str = ""


class _Message(msgspec.Struct, rename={"extra_info": "extraInfo"}):
    message: str = ""
    extra_info: _Details | None = None


class _ErrorFile(msgspec.Struct):
    """The error file that `@record` writes for a worker.

    It is {"message": {"message", "extraInfo"}}, or {"message": text}.
    """

    message: _Message | str = ""
    exitcode: int | None = None


def parse_failure(raw_error: str) -> Failure:
    """Return the failure that the text of a worker's error file states.

    >>> parse_failure('{"message": {"message": "RuntimeError: NCCL error: remote process exited"}}').category
    'network'
    >>> parse_failure("Traceback …: Process 7 got signal: 15 SIGTERM").category
    'cancelled'
    """
    text, code = raw_error, 1
    try:
        error = msgspec.json.decode(raw_error, type=_ErrorFile)
        text = error.message if isinstance(error.message, str) else error.message.message
        code = error.exitcode if error.exitcode is not None else 1
    except (ValueError, RecursionError):
        pass  # a traceback, whose end says what it was
    text = text.strip()[-MESSAGE_LENGTH:]
    if _SIGNAL.search(text):
        return Failure("cancelled", text)
    if not text:
        return Failure("unknown", text)
    if code < 0:  # subprocess' way to say which signal ended it
        code = 128 - code
    return Failure(classify_exit(code, "", text[-1000:]), text)
