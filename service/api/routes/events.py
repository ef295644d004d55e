"""POST /v1/events: accept events.

The records are decoded, checked for duplicates and written to disk. Only then are they acknowledged.
"""

import asyncio
import logging
from collections.abc import Sequence

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import RecordError, SourceError
from fleetcast.fleet.events import Failed, Finished, JobEvent, NodeEvent, Preempted, Started
from fleetcast.ingest.inbox.event_body import DecodedBody, DecodedRecord, decode_body
from fleetcast.ingest.inbox.inbox import InboxWriter
from fleetcast.ingest.inbox.job_events import Identity, identify_event
from fleetcast.ingest.inbox.records import encode_refusals
from fleetcast.ingest.inbox.segments import RecordKind
from fleetcast.placement.ledger.ledger import IntentState
from fleetcast.service.answers.events import EventsAnswer, RefusedRecord
from fleetcast.service.api.new_names import NamesOfBody
from fleetcast.service.api.recent import RecentIdentities
from fleetcast.service.api.routes.context import Context
from fleetcast.service.held_starts import has_marks, mark_refused_starts, remove_marks
from fleetcast.service.http.access import Scope
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.request_body import read_body
from fleetcast.service.http.table import JSON, NO_STORE, Query, Row, encode, get_caller_name

logger = logging.getLogger(__name__)

EXPECTED = "one event, an array, or JSON lines"
IN_A_THREAD_BYTES = 131_072
RECORDS_A_TURN = 5_000  # some ten milliseconds of the loop
STARTS_AND_ENDS = (Started, Finished, Failed, Preempted)


async def answer_events(request: Request, context: Context, query: Query) -> Response:
    """Accept every good record of the body, and refuse each bad one. Answers 422 if all records are refused."""
    context.get_event_writer()
    try:
        body = await read_event_body(request, context)
    except Problem as problem:
        await record_unreadable_body(context, problem)
        raise
    now_ms = context.clock.now_ms()
    decoded = await _decode_event_body(body, now_ms, dict(request.headers), context)
    response = await accept_records(request, context, decoded, now_ms)
    if decoded.rejected and not decoded.records:
        raise _make_all_refused_problem(msgspec.json.decode(response.body, type=EventsAnswer))
    return response


async def accept_records(request: Request, context: Context, decoded: DecodedBody, now_ms: int) -> Response:
    """Write a body's new records, and return an answer with the counts.

    Raises a 429 problem if the body has too many new names. The other records are stored, and the sender may
    send all records again.
    """
    with context.listening.hold_listening_statement():
        return await _store_new_records(request, context, decoded, now_ms)


async def _store_new_records(request: Request, context: Context, decoded: DecodedBody, now_ms: int) -> Response:
    writer = context.get_event_writer()
    await _mark_refused_promises(context, decoded)
    new = await filter_new_records(decoded.records, context.recent)
    names = context.names.make_body_names(get_caller_name(request))
    fresh = await _filter_admitted_records(new, names)
    errors = [error for _, error in decoded.rejected]
    raws = [record.raw for record, _ in fresh]
    if errors:
        keep = writer.append(raws, now_ms) if raws else asyncio.sleep(0)
        await asyncio.gather(keep, _record_refusals(writer, errors, now_ms))
    elif raws:
        await writer.append(raws, now_ms)
    limited = {id(record) for record, _ in new} - {id(record) for record, _ in fresh}
    await _remove_outdated_marks(context, [row.event for row in decoded.records if id(row) not in limited])
    for place, (_, key) in enumerate(fresh, 1):
        context.recent.add_identity(key)
        if place % RECORDS_A_TURN == 0:
            await asyncio.sleep(0)
    body = _count_outcomes(context, decoded, len(fresh), len(decoded.records) - len(new))
    if names.refused:
        raise _make_too_many_problem(context, names, body)
    return Response(encode(body), 202, {"cache-control": NO_STORE}, JSON)


async def record_unreadable_body(context: Context, problem: Problem) -> None:
    """Count a request body that cannot be read.

    If there was no memory for the body (status 503), also record an interruption of listening. The body may
    have contained the start of a placed job.
    """
    if problem.status == 503:
        context.listening.record_interruption()
    context.metrics.refused.labels(problem.code).inc()
    await _record_refusals(
        context.get_event_writer(), [RecordError(problem.code, problem.detail)], context.clock.now_ms()
    )


async def read_event_body(request: Request, context: Context, expected: str = EXPECTED) -> bytes:
    """Return the body of a request, unpacked and not empty.

    Raises problems 400, 413, 415 and 422. Each says what is expected.
    """
    kind = request.headers.get("content-type", "")
    if kind.startswith("multipart/"):
        raise Problem(415, "unknown_media_type", f"content-type {kind[:80]!r}: expected application/json")
    body = await read_body(request, context.config.api.max_body_bytes)
    if not body.strip():
        raise Problem(422, "empty_body", f"the body is empty: expected {expected}")
    return body


async def _decode_event_body(body: bytes, now_ms: int, headers: dict[str, str], context: Context) -> DecodedBody:
    limit_ms = round(context.config.pipeline.future_limit_s * 1000)
    if len(body) < IN_A_THREAD_BYTES:
        return decode_body(body, now_ms, headers, limit_ms)
    return await asyncio.to_thread(decode_body, body, now_ms, headers, limit_ms)


async def filter_new_records(
    records: Sequence[DecodedRecord], recent: RecentIdentities
) -> list[tuple[DecodedRecord, Identity]]:
    """Return the records that were not received before, each once.

    A record that another request is still writing counts as new, because that write may fail. Other tasks
    can run between two records.
    """
    fresh: dict[Identity, DecodedRecord] = {}
    for place, record in enumerate(records, 1):
        if place % RECORDS_A_TURN == 0:
            await asyncio.sleep(0)
        key = identify_event(record.event)
        if key not in recent:
            fresh.setdefault(key, record)
    return [(record, key) for key, record in fresh.items()]


async def _filter_admitted_records(
    records: Sequence[tuple[DecodedRecord, Identity]], names: NamesOfBody
) -> list[tuple[DecodedRecord, Identity]]:
    """Return the records whose names are within the bounds. Other tasks can run between two records."""
    fresh = []
    for place, (record, key) in enumerate(records, 1):
        if place % RECORDS_A_TURN == 0:
            await asyncio.sleep(0)
        if names.is_admitted(record.event, key):
            fresh.append((record, key))
    return fresh


async def _mark_refused_promises(context: Context, decoded: DecodedBody) -> None:
    """Mark the promise of each job whose start was refused. Raises SourceError."""
    found = [context.promises.find_promise(job, attempt) for job, attempt in decoded.refused_starts]
    held = [promise.request_id for promise in found if promise is not None and promise.state is IntentState.ACTIVE]
    if not held:
        return
    try:
        await asyncio.to_thread(mark_refused_starts, context.config.folder, held)
    except OSError as error:
        raise SourceError(f"cannot mark refused starts: {error.strerror or error}; nothing was stored") from None
    logger.warning("%d starts of placed jobs were refused: %s", len(held), ", ".join(held[:5]))


async def _remove_outdated_marks(context: Context, stored: Sequence[JobEvent | NodeEvent]) -> None:
    """Remove the marks of the attempts whose start or end is in the inbox. Raises SourceError.

    Without this, the promise of a job that ended while no placer watched would last forever.
    """
    if not has_marks(context.config.folder):
        return
    attempts = {(row.job, row.attempt) for row in stored if isinstance(row, STARTS_AND_ENDS)}
    found = [context.promises.find_promise(job, attempt) for job, attempt in attempts]
    try:
        remove_marks(context.config.folder, [promise.request_id for promise in found if promise is not None])
    except OSError as error:
        raise SourceError(f"cannot remove marks of refused starts: {error.strerror or error}; send all again") from None


def _make_all_refused_problem(body: EventsAnswer) -> Problem:
    """Return a 422 problem that contains the fields of the ordinary answer.

    A sender that reads only the status must notice that nothing was stored. Some programs resend a refused
    body forever (Slurm's plugin, exporters of health events). Their routes answer 2xx instead.
    """
    count = len(body.rejected)
    what = "the record was" if count == 1 else f"all {count:,} records were"
    detail = f"{what} refused, nothing was stored; {'it' if count == 1 else 'the first'}: {body.rejected[0].reason}"
    return Problem(422, "all_refused", detail, extra=msgspec.to_builtins(body))


def _make_too_many_problem(context: Context, names: NamesOfBody, body: EventsAnswer) -> Problem:
    """Count the names that each bound refused. Return the 429 problem that lists the bounds."""
    reasons = []
    for bound, count, why in names.list_reached_bounds():
        context.metrics.limited.labels(bound).inc(count)
        reasons.append(f"{why}: {count:,} new {'name was' if count == 1 else 'names were'} refused")
    context.metrics.events.labels("limited").inc(names.records)
    wait_s = max(1, round(context.clock.convert_to_wall_s(names.compute_retry_s())))
    detail = "; ".join(reasons) + f"; everything of all others was stored: send the whole body again after {wait_s} s"
    extra = {"limits": dict(names.refused), **structs.asdict(body)}
    return Problem(429, "too_many_names", detail, headers={"retry-after": str(wait_s)}, extra=extra)


async def _record_refusals(writer: InboxWriter, errors: Sequence[RecordError], now_ms: int) -> None:
    """Write the refusals to the inbox, so that the pipeline counts them.

    A full disk raises no error. Only these counts are lost.
    """
    if not errors:
        return
    try:
        await writer.append([encode_refusals(errors)], now_ms, RecordKind.REFUSED)
    except SourceError as error:
        logger.warning("%s; %d refusals are not counted", error, len(errors))


def _count_outcomes(context: Context, decoded: DecodedBody, accepted: int, duplicates: int) -> EventsAnswer:
    """Count the outcomes of a body's records, and return the answer with these counts."""
    metrics = context.metrics
    counts = {"accepted": accepted, "duplicate": duplicates, "rejected": len(decoded.rejected)}
    for outcome, count in counts.items():
        if count:
            metrics.events.labels(outcome).inc(count)
    for _, error in decoded.rejected:
        metrics.refused.labels(error.reason).inc()
    rejected = [RefusedRecord(index, str(error)) for index, error in decoded.rejected]
    return EventsAnswer(accepted, duplicates, rejected)


ROWS = (
    Row(
        "POST",
        "/v1/events",
        answer_events,
        "Job and node events: one object, an array, JSON lines or CloudEvents 1.0",
        "events",
        scope=Scope.EVENTS,
        status=202,
        body=(JobEvent, NodeEvent),
        body_example=[
            {
                "job": "train-42",
                "attempt": 1,
                "sequence": 7,
                "time_ms": 1760000000000,
                "type": "step",
                "step": 7,
                "duration_s": 1.6,
            },
            {
                "node": "n042",
                "source": "nhc",
                "sequence": 1,
                "time_ms": 1760000000000,
                "type": "drain",
                "message": "fan",
            },
        ],
        answer=EventsAnswer,
        example={
            "accepted": 2,
            "duplicates": 0,
            "rejected": [{"index": 2, "reason": "future: time_ms 1760000120000 is 120 s ahead of the clock"}],
        },
        problems=(400, 413, 415, 422, 429, 503),
    ),
)
