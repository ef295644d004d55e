"""A decoder of job and node events from JSON.

Each record becomes one event, or a RecordError whose text names the offending value.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import structs

from fleetcast.fleet.decode_faults import explain_json_error, find_first_json_fault, format_value
from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import (
    Checkpoint,
    Failed,
    JobEvent,
    NodeEvent,
    NodeLost,
    Phase,
    Queued,
    Resized,
    Started,
    Step,
    Submitted,
)
from fleetcast.fleet.events import Preempted as PreemptedEvent
from fleetcast.fleet.node_names import explain_node_name_fault, is_node_name
from fleetcast.fleet.requests import MAX_MODELS, WHOLE_GPU, Gang

FUTURE_LIMIT_MS = 60_000
NO_FUTURE_LIMIT_MS = 2**62
YEAR_2000_MS = 946_684_800_000
MAX_RECORD_BYTES = 1_048_576
MAX_MESSAGE_LENGTH = 8_192
MAX_COUNT = 2**53  # what every JSON reader can hold exactly
MAX_AMOUNT = 1e12  # of seconds, GiB, tokens in a row: more is a mistake, and sums must stay finite
LEAST_STEP_S = 1e-6  # a shorter step than a microsecond is a mistake, and quotients must stay finite
MAX_GPU_INDEX = 1_023
MAX_GANG = 1_000_000
MAX_QUEUES = 64  # of one attempt that waits in several
MAX_TASKS = 4_000_001  # of one array: Slurm's own limit
MAX_LABELS = 64

NODE_HEAD = b'{"node":'  # how most node events begin, ours among them
_decode_job = msgspec.json.Decoder(JobEvent).decode
_decode_node = msgspec.json.Decoder(NodeEvent).decode
_decode_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

Identity = tuple[str, str, str | int, int]


def identify_event(event: JobEvent | NodeEvent) -> Identity:
    """Return the identity of an event. Repeats of an event have equal identities.

    It is ("job", job, attempt, sequence) or ("node", node, source, sequence).
    """
    if isinstance(event, NodeEvent):
        return "node", event.node, event.source, event.sequence
    return "job", event.job, event.attempt, event.sequence


def decode_event(
    record: bytes, now_ms: int, future_limit_ms: int = FUTURE_LIMIT_MS, *, archived: bool = False
) -> JobEvent | NodeEvent:
    """Decode one JSON object as an event that arrived at `now_ms`. Raises RecordError.

    archived: also accept events that we derived ourselves, which have sequences below 0.

    >>> decode_event(b'{"job": "a", "sequence": 1, "time_ms": 5, "type": "finished"}', now_ms=10)
    Finished(job='a', attempt=1, sequence=1, time_ms=5)
    """
    if len(record) > MAX_RECORD_BYTES:
        raise RecordError("record_too_large", f"{len(record)} bytes, at most {MAX_RECORD_BYTES}")
    try:
        event = _decode(record)
    except (ValueError, RecursionError) as error:  # msgspec's and the unicode errors are ValueErrors
        event = _decode_as_node_event(record, error)
    check_event(event, now_ms, future_limit_ms, archived=archived)
    return event


def _decode(record: bytes) -> JobEvent | NodeEvent:
    if record.startswith(NODE_HEAD):
        with contextlib.suppress(ValueError, RecursionError):
            return _decode_node(record)
    event: JobEvent = _decode_job(record)
    return event


def check_event(
    event: JobEvent | NodeEvent, now_ms: int, future_limit_ms: int = FUTURE_LIMIT_MS, *, archived: bool = False
) -> None:
    """Check the limits of an event that types cannot express: its time, counts and names.

    Raises RecordError.
    """
    if type(event) is not Step or not is_usual_step(event, now_ms + future_limit_ms):
        check_fields(event, now_ms, future_limit_ms, archived=archived)


def is_usual_step(event: Step, latest_ms: int) -> bool:
    """Return True if a step event is certain to pass `check_fields`.

    Most records are such events, and this single expression is faster.
    """
    return (
        YEAR_2000_MS <= event.time_ms <= latest_ms
        and 0 <= event.sequence <= MAX_COUNT
        and 0 <= event.attempt <= MAX_COUNT
        and 0 < len(event.job) <= MAX_NAME_LENGTH
        and event.job.isprintable()
        and 0 <= event.step <= MAX_COUNT
        and LEAST_STEP_S <= event.duration_s <= MAX_AMOUNT
        and (event.rank is None or 0 <= event.rank <= MAX_COUNT)
        and (event.stage is None or 0 <= event.stage <= MAX_COUNT)
        and (event.tokens is None or 0 <= event.tokens <= MAX_COUNT)
        and event.sequence_length is None
        and event.parts is None
        and not event.node
        and not event.gpus
    )


def check_fields(
    event: JobEvent | NodeEvent, now_ms: int, future_limit_ms: int = FUTURE_LIMIT_MS, *, archived: bool = False
) -> None:
    """Check each field of an event. Raises RecordError."""
    _check_time(event.time_ms, now_ms, future_limit_ms)
    _check_count("sequence", abs(event.sequence) if archived else event.sequence)
    if isinstance(event, NodeEvent):
        _check_node_event(event)
    else:
        _check_name("job", event.job)
        _check_count("attempt", event.attempt)
        check = _CHECKS.get(type(event))
        if check is not None:
            check(event)


def _decode_as_node_event(record: bytes, error: Exception) -> NodeEvent:
    """Decode the record as a node event if it has a node event's keys. Otherwise raise `error` as a RecordError."""
    if not isinstance(error, msgspec.ValidationError):
        raise make_malformed_error(error) from None
    try:
        keys = _decode_keys(record)
    except (ValueError, RecursionError) as reason:
        raise make_malformed_error(reason, record, dict[str, Any]) from None
    if "job" in keys or not ("node" in keys and "source" in keys):
        raise make_malformed_error(error, record, _decode_job) from None
    try:
        return _decode_node(record)
    except (ValueError, RecursionError) as reason:
        raise make_malformed_error(reason, record, _decode_node) from None


def make_malformed_error(error: Exception, record: bytes = b"", decode: Any = None) -> RecordError:
    """Convert a decoder's error into a RecordError with a short reason and the first fault.

    decode: the decoder that refused the record, or its type.
    """
    if isinstance(error, UnicodeDecodeError):
        return RecordError("not_utf8", f"byte 0x{error.object[error.start]:02x}: {error.reason}")
    if isinstance(error, RecursionError):
        return RecordError("too_deep", "nested too deeply")
    if isinstance(error, msgspec.ValidationError):
        try:
            fault = find_first_json_fault(error, decode, record)
        except (ValueError, RecursionError) as broken:
            return make_malformed_error(broken)
        return RecordError(fault.label, fault.sentence)
    return RecordError("truncated" if "truncated" in str(error) else "not_json", explain_json_error(error))


def _check_time(time_ms: int, now_ms: int, limit_ms: int) -> None:
    if time_ms > now_ms + limit_ms:
        ahead = f"{(time_ms - now_ms) / 1000:.0f} s" if time_ms < MAX_COUNT else "far"
        raise RecordError("future", f"time_ms {format_value(time_ms)} is {ahead} ahead of the clock")
    if time_ms < 0:
        raise RecordError("negative", f"time_ms {time_ms}")
    if time_ms < YEAR_2000_MS <= now_ms:
        raise RecordError("too_old", f"time_ms {time_ms} lies before the year 2000; are these seconds?")


def _check_count(field: str, value: int | None, most: int = MAX_COUNT) -> None:
    if value is None:
        return
    if value < 0:
        raise RecordError("negative", f"{field} {format_value(value)}")
    if value > most:
        raise RecordError("out_of_range", f"{field} {format_value(value)}, at most {most}")


def _check_amount(field: str, value: float | None) -> None:
    if value is None:
        return
    if value < 0:
        raise RecordError("negative", f"{field} {format_value(value)}")
    if value > MAX_AMOUNT:
        raise RecordError("out_of_range", f"{field} {format_value(value)}, at most {MAX_AMOUNT:.0e}")


def _check_text(field: str, value: str, most: int = MAX_NAME_LENGTH) -> None:
    if len(value) > most:
        raise RecordError("too_long", f"{field} {format_value(value)}, at most {most} characters")


def _check_label(field: str, value: str) -> None:
    _check_text(field, value)
    if value and not value.isprintable():
        raise RecordError("bad_name", f"{field} {format_value(value)} has characters that cannot be printed")


def _check_name(field: str, value: str) -> None:
    if not value:
        raise RecordError("empty_name", f"{field} is empty")
    _check_label(field, value)


def _check_node(field: str, value: str) -> None:
    if not is_node_name(value):
        _check_name(field, value)
        raise RecordError("bad_name", f"{field}: {explain_node_name_fault(value)}")


def _check_gang(gang: Gang | int) -> None:
    sizes = gang if isinstance(gang, Gang) else Gang(gang, gang)
    if not 1 <= sizes.min <= sizes.desired <= MAX_GANG or not 1 <= sizes.step <= MAX_GANG:
        limits = f"1 <= min <= desired <= {MAX_GANG} and 1 <= step <= {MAX_GANG}"
        raise RecordError("bad_value", f"gang {format_value(gang)}: expected {limits}")


_SUBMITTED_NAMES = [field.name for field in structs.fields(Submitted) if field.type is str]
_SUBMITTED_AMOUNTS = [field.name for field in structs.fields(Submitted) if field.type == float | None]


def _check_submitted_event(event: Submitted) -> None:
    for field in _SUBMITTED_NAMES:
        _check_label(field, getattr(event, field))
    if len(event.gpu_models) > MAX_MODELS:
        raise RecordError("too_long", f"{len(event.gpu_models)} gpu_models, at most {MAX_MODELS}")
    for name in event.gpu_models:
        _check_label("gpu_models", name)
    if len(event.queues) > MAX_QUEUES:
        raise RecordError("too_long", f"{len(event.queues)} queues, at most {MAX_QUEUES}")
    for name in event.queues:
        _check_label("queues", name)
    _check_count("tasks", event.tasks, MAX_TASKS)
    _check_share(event.gpu_share)
    _check_gang(event.gang)
    _check_count("gpus_per_node", event.gpus_per_node, MAX_GPU_INDEX + 1)
    _check_count("priority", abs(event.priority))
    _check_count("cpus", event.cpus)
    _check_count("deadline_ms", event.deadline_ms)
    for field in _SUBMITTED_AMOUNTS:
        _check_amount(field, getattr(event, field))
    if len(event.labels) > MAX_LABELS:
        raise RecordError("too_long", f"{len(event.labels)} labels, at most {MAX_LABELS}")
    for name, value in event.labels.items():
        _check_label("label", name)
        _check_label(f"labels.{name}", value)


def _check_ranks(event: Started | Resized) -> None:
    if isinstance(event, Resized) and not event.ranks and not event.nodes:
        raise RecordError("missing_field", "ranks and nodes are empty: a resized attempt still holds a node")
    for node in event.nodes:
        _check_node("nodes", node)
    for place in event.ranks:
        _check_count("rank", place.rank)
        _check_node("node", place.node)
        _check_gpus(place.gpus)
        if place.gpu_share is not msgspec.UNSET:
            _check_share(place.gpu_share)
            if len(place.gpus) != 1:
                raise RecordError(
                    "bad_value", f"gpu_share is a part of one GPU, gpus {format_value(place.gpus)} are not one"
                )


def _check_share(share: int | None) -> None:
    if share is not None and not 1 <= share <= WHOLE_GPU:
        raise RecordError("out_of_range", f"gpu_share {format_value(share)}: thousandths of a GPU, 1..{WHOLE_GPU}")


def _check_gpus(gpus: tuple[int, ...]) -> None:
    if gpus:
        _check_count("gpus", min(gpus))
        _check_count("gpus", max(gpus), MAX_GPU_INDEX)
        if len(set(gpus)) != len(gpus):
            raise RecordError("bad_value", f"gpus {format_value(gpus)} names a GPU twice")


def _check_rank_place(event: Phase | Step) -> None:
    """Check the rank, node and GPUs that an event states. Raises RecordError."""
    _check_count("rank", event.rank)
    if event.node:
        _check_node("node", event.node)
    _check_gpus(event.gpus)


def _check_step_event(event: Step) -> None:
    _check_rank_place(event)
    _check_count("step", event.step)
    _check_amount("duration_s", event.duration_s)
    if 0 < event.duration_s < LEAST_STEP_S:
        raise RecordError(
            "out_of_range", f"duration_s {format_value(event.duration_s)}, 0 or at least {LEAST_STEP_S:.0e}"
        )
    for field in ("stage", "tokens"):
        _check_count(field, getattr(event, field))
    _check_amount("sequence_length", event.sequence_length)
    if event.parts is not None:
        for field in ("compute", "communication", "data", "other"):
            _check_amount(f"parts.{field}", getattr(event.parts, field))


def _check_checkpoint_event(event: Checkpoint) -> None:
    _check_count("bytes", event.bytes)
    _check_text("target", event.target, MAX_MESSAGE_LENGTH)


def _check_failed_event(event: Failed) -> None:
    if event.node:
        _check_node("node", event.node)
    _check_text("message", event.message, MAX_MESSAGE_LENGTH)


def _check_preempted_event(event: PreemptedEvent) -> None:
    _check_label("by", event.by)
    _check_text("reason", event.reason, MAX_MESSAGE_LENGTH)


def _check_lost_event(event: NodeLost) -> None:
    _check_node("node", event.node)
    _check_text("reason", event.reason, MAX_MESSAGE_LENGTH)


def _check_queued_event(event: Queued) -> None:
    _check_text("reason", event.reason, MAX_MESSAGE_LENGTH)


def _check_node_event(event: NodeEvent) -> None:
    _check_node("node", event.node)
    _check_name("source", event.source)
    _check_count("gpu", event.gpu, MAX_GPU_INDEX)
    if isinstance(event.code, int):
        _check_count("code", event.code)
    elif event.code is not None:
        _check_label("code", event.code)
        if not event.code.isascii():  # "²" is a digit to Python and no number
            raise RecordError("bad_value", f"code {format_value(event.code)}, expected ASCII")
    _check_text("message", event.message, MAX_MESSAGE_LENGTH)
    _check_text("advice", event.advice, MAX_MESSAGE_LENGTH)
    for field in ("check", "device"):
        value = getattr(event, field)
        if value:
            _check_label(field, value)
    if event.probability is not None and not 0 <= event.probability <= 1:
        raise RecordError("out_of_range", f"probability {format_value(event.probability)}, expected 0 to 1")


_CHECKS: dict[type, Callable[[Any], None]] = {
    Submitted: _check_submitted_event,
    Started: _check_ranks,
    Resized: _check_ranks,
    Phase: _check_rank_place,
    Step: _check_step_event,
    Checkpoint: _check_checkpoint_event,
    Failed: _check_failed_event,
    PreemptedEvent: _check_preempted_event,
    NodeLost: _check_lost_event,
    Queued: _check_queued_event,
}
