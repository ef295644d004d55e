"""POST /v1/webhooks/slurm-jobcomp: accept Slurm's messages about completed jobs.

The answer is 200, because Slurm's Elasticsearch plugin resends after 202.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta, timezone

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import JobEvent, Queued, Submitted
from fleetcast.ingest.inbox.event_body import DecodedBody, DecodedRecord
from fleetcast.ingest.lifecycle import (
    ENDED,
    EXPLAINED,
    STARTED,
    SUBMITTED,
    compute_queued_sequence,
    compute_submitted_sequence,
)
from fleetcast.ingest.slurm.job_numbers import (
    JobNumbers,
    NumberedJob,
    hash_user_and_name,
    parse_job_number,
    parse_slurm_id,
)
from fleetcast.ingest.slurm.jobcomp import read_completions
from fleetcast.ingest.slurm.jobs import Site, SlurmJob, encode_checked_event, make_job_events
from fleetcast.ingest.slurm.records import ReadRecords
from fleetcast.service.answers.events import EventsAnswer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.routes.events import (
    IN_A_THREAD_BYTES,
    accept_records,
    read_event_body,
    record_unreadable_body,
)
from fleetcast.service.http.access import Scope
from fleetcast.service.http.problems import Problem, make_unprocessable_problem
from fleetcast.service.http.table import Param, Query, Row

MOST_OFFSET_S = 86_399.0
MOST_PREFIX = 64
RECORDS_A_TURN = 20  # some milliseconds of the loop
PARAMS = (
    Param("prefix", str, "put before the ids of jobs, where several clusters send", ""),
    Param(
        "utc_offset_s",
        float,
        "zone of jobcomp/filetxt's times; the others are in UTC",
        0.0,
        least=-MOST_OFFSET_S,
        most=MOST_OFFSET_S,
    ),
)


class KnownAttempt(msgspec.Struct):
    """An attempt in the board's list of jobs."""

    job: str
    attempt: int
    submitted_ms: int | None = None
    user: str = ""
    state: str = ""
    queue: str = ""
    queues: tuple[str, ...] = ()


async def answer_slurm_jobcomp(request: Request, context: Context, query: Query) -> Response:
    """Accept every good record of the body. Unknown jobs without GPUs are ignored."""
    context.get_event_writer()
    prefix = query["prefix"]
    if len(prefix) > MOST_PREFIX or not prefix.isprintable():
        raise make_unprocessable_problem("prefix", prefix[:80], f"at most {MOST_PREFIX} printable characters")
    try:
        body = await read_event_body(request, context, "what Slurm's plugins, scripts or commands write")
    except Problem as problem:
        await record_unreadable_body(context, problem)
        raise
    now_ms = context.clock.now_ms()
    zone = timezone(timedelta(seconds=query["utc_offset_s"]))
    if len(body) < IN_A_THREAD_BYTES:
        read = read_completions(body, now_ms, zone)
    else:
        read = await asyncio.to_thread(read_completions, body, now_ms, zone)
    response = await accept_records(
        request, context, await translate_completions(read, prefix, context, now_ms), now_ms
    )
    response.status_code = 200
    return response


async def translate_completions(read: ReadRecords[SlurmJob], prefix: str, context: Context, now_ms: int) -> DecodedBody:
    """Translate the records into events. Bad records are numbered after the events.

    Other tasks can run between two records.
    """
    decoded = DecodedBody()
    bad = list(read.bad)
    numbers, known = read_attempt_numbers(context), read_known_attempts(context)
    for place, job in enumerate(read.rows):
        if place % RECORDS_A_TURN == RECORDS_A_TURN - 1:
            await asyncio.sleep(0)
        if not job.tasks:  # all tasks of this array have started, each with a record of its own
            continue
        try:
            numbered = _assign_attempt(_resolve_job_name(job, prefix, context), prefix, numbers, context)
            row = known.get((prefix + numbered.id, numbered.attempt or 1))
            stated = make_job_events(numbered, Site(prefix=prefix))
            events = stated if row is None else [_correct_sequence(event, row, numbered, now_ms) for event in stated]
            raws = [encode_checked_event(event, now_ms) for event in events]
            for event, raw in zip(events, raws, strict=True):
                decoded.records.append(DecodedRecord(len(decoded.records), raw, event))
        except _SkippedJob:
            continue
        except RecordError as error:
            bad.append(error.with_traceback(None))
    decoded.rejected.extend((len(decoded.records) + place, error) for place, error in enumerate(bad))
    return decoded


class _SkippedJob(Exception):
    """The exception that skips an unknown job without GPUs."""


def _resolve_job_name(job: SlurmJob, prefix: str, context: Context) -> SlurmJob:
    """Return the record with the right job name. Several jobs on the board may have the same Slurm number."""
    number = parse_job_number(job.id)
    rows = _find_attempts_by_number(context).get(prefix + number, ())
    jobs: dict[str, NumberedJob] = {}
    for row in rows:
        suffix = row.job.removeprefix(parse_slurm_id(row.job))
        submit_s, (user, _) = (
            (row.submitted_ms or 0) // 1000,
            hash_user_and_name(SlurmJob(id="", states=(), user=row.user)),
        )
        known = jobs.get(suffix, NumberedJob(suffix, submit_s, submit_s, row.attempt, user, is_counted=True))
        known.first_s, known.last_s = min(known.first_s, submit_s), max(known.last_s, submit_s)
        known.attempt = max(known.attempt, row.attempt)
        jobs[suffix] = known
    if not jobs:
        return job
    return JobNumbers({number: sorted(jobs.values(), key=lambda one: one.last_s)}).name_job(job)


def _find_attempts_by_number(context: Context) -> dict[str, list[KnownAttempt]]:
    """Return Slurm job number → submitted attempts on the board.

    The number begins with the prefix of the cluster.
    """
    board, cache = context.cache.latest(), context.cache
    if board is None or "doc.jobs" not in board:
        return {}
    return cache.get_or_derive(
        board, "attempts_by_number", lambda: _group_attempts_by_number(read_known_attempts(context).values())
    )


def _group_attempts_by_number(rows: Iterable[KnownAttempt]) -> dict[str, list[KnownAttempt]]:
    found: dict[str, list[KnownAttempt]] = {}
    for row in rows:
        if row.submitted_ms is not None:
            found.setdefault(parse_job_number(row.job), []).append(row)
    return found


def _assign_attempt(
    job: SlurmJob, prefix: str, numbers: dict[str, list[tuple[int, int]]], context: Context
) -> SlurmJob:
    """Return the record with its attempt number. For a known job without GPUs, only its end remains.

    Raises _SkippedJob for an unknown job without GPUs.
    """
    name = prefix + job.id
    attempt = job.attempt or context.slurm_attempts.find_attempt(name, job.submit_ms, numbers.get(name, ()))
    job = replace(job, attempt=attempt)
    if job.submit_ms is None or job.has_gpus:
        return job
    ours = (SUBMITTED, STARTED, ENDED, EXPLAINED)
    is_recent = any(("job", name, attempt, sequence) in context.recent for sequence in ours)
    if not is_recent and name not in numbers:
        raise _SkippedJob
    return replace(job, submit_ms=None, start_ms=None, end_ms=job.end_ms or job.start_ms or job.submit_ms)


def _correct_sequence(event: JobEvent, row: KnownAttempt, job: SlurmJob, now_ms: int) -> JobEvent:
    """Return the event. If the board shows another state of the job, give the event a later sequence number.

    The board may show another queue. It may also show a released job as blocked, or a blocked job as
    released.
    """
    if isinstance(event, Submitted) and (row.queue, row.queues) != (event.queue or row.queue, event.queues):
        since_ms = job.start_ms or job.end_ms if job.holds_nodes or job.end_state else now_ms
        return msgspec.structs.replace(event, sequence=compute_submitted_sequence(event.time_ms, since_ms or now_ms))
    if isinstance(event, Queued) and row.state == ("queued" if event.blocked else "blocked"):
        later = compute_queued_sequence(row.submitted_ms or event.time_ms, now_ms)
        return msgspec.structs.replace(event, sequence=later, time_ms=now_ms)
    return event


def read_known_attempts(context: Context) -> dict[tuple[str, int], KnownAttempt]:
    """Return (job, attempt) → its row on the board. Empty before the first board."""
    board, cache = context.cache.latest(), context.cache
    if board is None or "doc.jobs" not in board:
        return {}
    rows = cache.get_document(board, "doc.jobs", list[KnownAttempt])
    return cache.get_or_derive(board, "known_attempts", lambda: {(row.job, row.attempt): row for row in rows})


def read_attempt_numbers(context: Context) -> dict[str, list[tuple[int, int]]]:
    """Return job → [(submission in Unix ms, attempt)] from the board. Empty before the first board."""
    board = context.cache.latest()
    if board is None or "doc.jobs" not in board:
        return {}
    cache = context.cache
    return cache.get_or_derive(
        board,
        "submissions",
        lambda: _group_submissions_by_job(cache.get_document(board, "doc.jobs", list[KnownAttempt])),
    )


def _group_submissions_by_job(rows: list[KnownAttempt]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        if row.submitted_ms is not None:
            found.setdefault(row.job, []).append((row.submitted_ms, row.attempt))
    return found


ROWS = (
    Row(
        "POST",
        "/v1/webhooks/slurm-jobcomp",
        answer_slurm_jobcomp,
        "Completed jobs of Slurm's jobcomp plugins; environments of its prologs and epilogs",
        "events",
        params=PARAMS,
        scope=Scope.EVENTS,
        body=(dict,),
        body_example={
            "jobid": 7,
            "state": "FAILED",
            "exit_code": "3:0",
            "@submit": "2026-11-21T17:03:00",
            "@start": "2026-11-21T17:03:39",
            "@end": "2026-11-21T18:04:12",
            "nodes": "n[041-042]",
            "total_nodes": 2,
            "partition": "train",
            "username": "ada",
            "job_name": "llama",
            "tres_alloc": "cpu=32,mem=512G,node=2,gres/gpu=16",
        },
        answer=EventsAnswer,
        example={"accepted": 3, "duplicates": 0, "rejected": []},
        problems=(400, 413, 415, 422, 429, 503),
    ),
)
