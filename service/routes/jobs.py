"""Jobs: what runs, waits and lately ended; one job; who slows it down."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleet.errors import UnknownEntity
from service.archived_jobs import Found
from service.board import Board
from service.documents import job_detail, job_row
from service.estimates import NO_RUNS
from service.feed import BoardFeed
from service.interference import NOW as CO_RUNS
from service.interference import blamed
from service.routes import shapes
from service.routes.context import Context
from service.routes.estimate import ask, start_of
from service.routes.table import Param, Query, Row, answer, encode

STATES = get_args(shapes.JobState)
MAX_ROWS = 100_000
OVER = "it is over"
NOT_TOLD = "nothing was known of jobs like it when it came; of one that came just now it is told within seconds"
LIST_PARAMS = (
    Param("state", str, "only jobs in this state", choices=STATES),
    Param("limit", int, "at most this many rows", MAX_ROWS, least=1, most=MAX_ROWS),
)


async def jobs(request: Request, context: Context, query: Query) -> Response:
    """Running, queued and lately ended jobs, in that order."""
    feed, board = context.feed, context.feed.board()
    as_of_ms = feed.as_of_ms(board, "doc.jobs")
    rows = feed.document(board, "doc.jobs", list[msgspec.Raw])
    if query["state"] is not None:
        heads = feed.document(board, "doc.jobs", list[Head])
        rows = [row for row, head in zip(rows, heads, strict=True) if head.state == query["state"]]
    return answer(context, board, as_of_ms, encode({"as_of_ms": as_of_ms, "rows": rows[: query["limit"]]}))


class Head(msgspec.Struct):
    """What a row is chosen by."""

    job: str
    attempt: int
    state: str


def find_job(feed: BoardFeed, board: Board, name: str) -> dict[str, Any]:
    """The row of a job's latest attempt."""
    row = _row(feed, board, name)
    if row is None:
        raise UnknownEntity(f"no job {name[:200]!r} runs, waits or ended within the last hour")
    return row


def _row(feed: BoardFeed, board: Board, name: str) -> dict[str, Any] | None:
    latest = feed.kept(board, "latest_attempts", lambda: _latest(feed.document(board, "doc.jobs", list[Head])))
    if name not in latest:
        return None
    row: dict[str, Any] = msgspec.json.decode(feed.document(board, "doc.jobs", list[msgspec.Raw])[latest[name]])
    return row


def _latest(heads: list[Head]) -> dict[str, int]:
    """The place of each job's latest attempt."""
    latest: dict[str, int] = {}
    for place, head in enumerate(heads):
        if head.job not in latest or head.attempt > heads[latest[head.job]].attempt:
            latest[head.job] = place
    return latest


def part_of(feed: BoardFeed, board: Board, section: str, name: str) -> dict[str, Any] | None:
    """What a section says of one job."""
    parts = feed.document(board, section, dict[str, msgspec.Raw])
    return msgspec.json.decode(parts[name]) if name in parts else None


async def job(request: Request, context: Context, query: Query) -> Response:
    """One job's latest attempt, with its placement and last events; of one that is over, as the archive has them."""
    feed, board = context.feed, context.feed.board()
    name = request.path_params["job"]
    row = _row(feed, board, name)
    as_of_ms = feed.as_of_ms(board, "doc.job")
    if row is None:
        body = {"as_of_ms": as_of_ms, **await _archived(context, name)}
        return answer(context, board, as_of_ms, encode(body))
    detail = part_of(feed, board, "doc.job", name) or {"placement": [], "events": []}
    asked = detail.pop("asks", None)
    body = {"as_of_ms": as_of_ms, **row, **detail, "start_ms": None, "source": "board"}
    reasons = {name: why for name, why in _reasons(row["state"]).items() if body.get(name) is None}
    if row["state"] == "queued":
        body["start_ms"], why = await _start(request, context, row, asked)
        reasons |= {"start_ms": why} if why else {}
    return answer(context, board, as_of_ms, encode({**body, "reasons": reasons}))


async def _archived(context: Context, name: str) -> dict[str, Any]:
    """What the archive tells of a job. Raises UnknownEntity that says where was looked, SourceError."""
    nowhere = f"no job {name[:200]!r} runs, waits or ended within the last hour"
    if context.mirror is not None:
        raise UnknownEntity(f"{nowhere}; this api is a replica without an archive: {context.mirror.url} has one to ask")
    if not context.archived.enabled:
        key = "archive.look_s = 0" if context.config.archive.enabled else "archive.enabled = false"
        raise UnknownEntity(f"{nowhere}; {key}, so those that ended before are not looked for")
    found = await context.archived.find(name)
    if found.attempt is None:
        raise UnknownEntity(f"{nowhere}, and the archive has no event of it{_as_far_as(found)}")
    attempt = found.attempt
    row = job_row(attempt, context.clock.now_ms(), {}, slow=False)
    reasons = _reasons(attempt.state if attempt.over_ms is not None else "ended")
    if attempt.over_ms is None:
        reasons["ended_ms"] = f"nobody told of its end, or the archive has it not yet{_as_far_as(found)}"
    return {**row, **job_detail(attempt), "start_ms": None, "source": "archive", "reasons": reasons}


def _as_far_as(found: Found) -> str:
    """How far back was looked, where not everything was."""
    if found.stopped_ms is None:
        return ""
    since = datetime.fromtimestamp(found.stopped_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%MZ")
    return f"; it was read back to {since}, then archive.look_s was over"


def _reasons(state: str) -> dict[str, str]:
    """Why what may be null is, in this state; the start of a job that waits has reasons of its own."""
    match state:
        case "queued":
            return {"run_s": NOT_TOLD, "remaining_s": "it waits"}
        case "running":
            return {"run_s": NOT_TOLD, "remaining_s": NO_RUNS, "start_ms": "it has started"}
        case _:
            return {"run_s": "nothing was told before it was over", "remaining_s": OVER, "start_ms": OVER}


async def _start(
    request: Request, context: Context, row: Mapping[str, Any], asked: Mapping[str, Any] | None
) -> tuple[dict[str, int] | None, str]:
    """When a job that waits should start, as the placer says; or why nobody says so."""
    if not asked:
        return None, "nobody told what it asks for"
    wanted = {"request_id": row["job"], "queue": row["queue"], "user": row["user"], "class": row["class"], **asked}
    start = start_of(await ask(request, context, encode(wanted)))
    if start.answer is None:
        return None, start.why
    start_ms = start.answer.get("start_ms")
    told = start.answer.get("reasons") or {"start_ms": start.answer.get("sentence")}
    return start_ms, "" if start_ms else str(told.get("start_ms") or "the placer does not say")


NO_SCORE = {
    "slow": None,
    "since_ms": None,
    "observed_step_s": None,
    "expected_step_s": None,
    "ratio": None,
    "culprit": {"kind": "nobody", "name": None, "share": None},
    "cause": "unknown",
    "sentence": "No step times and no peers to compare yet, so nothing is known of stragglers.",
}


async def stragglers(request: Request, context: Context, query: Query) -> Response:
    """Whether a job is slow, since when, and who or what slows it."""
    feed, board = context.feed, context.feed.board()
    name = request.path_params["job"]
    score = part_of(feed, board, "doc.stragglers", name)
    if score is None:
        find_job(feed, board, name)
    elif CO_RUNS in board:
        score |= blamed(score, part_of(feed, board, CO_RUNS, name))
    as_of_ms = feed.as_of_ms(board, "doc.stragglers")
    return answer(context, board, as_of_ms, encode({**(score or NO_SCORE), "as_of_ms": as_of_ms}))


JOB = {
    "job": "train-42",
    "attempt": 1,
    "state": "running",
    "class": "training",
    "user": "ada",
    "queue": "train",
    "gpus": 64,
    "nodes": ["n041", "n042"],
    "submitted_ms": 1759990000000,
    "started_ms": 1759991000000,
    "ended_ms": None,
    "remaining_s": {"p50": 5400.0, "p90": 31000.0},
    "slow": True,
}

ROWS = (
    Row(
        "GET",
        "/v1/jobs",
        jobs,
        "Running, queued and lately ended jobs",
        "jobs",
        params=LIST_PARAMS,
        answer=shapes.Jobs,
        problems=(422, 503),
        example={"as_of_ms": 1760000000000, "rows": [JOB]},
    ),
    Row(
        "GET",
        "/v1/jobs/{job:path}/stragglers",
        stragglers,
        "Whether a job is slow, and who or what slows it",
        "jobs",
        answer=shapes.Stragglers,
        problems=(404, 503),
        example={
            "as_of_ms": 1760000000000,
            "slow": True,
            "since_ms": 1759999880000,
            "observed_step_s": 2.9,
            "expected_step_s": 1.6,
            "ratio": 1.81,
            "culprit": {"kind": "node", "name": "n042", "share": 0.94},
            "cause": "compute",
            "sentence": "Steps take 2.9 s, usual 1.6: n042 computes 1.8 times as long as its peers.",
        },
    ),
)

JOB_ROWS = (
    Row(
        "GET",
        "/v1/jobs/{job:path}",
        job,
        "One job: placement, phase and last events",
        "jobs",
        answer=shapes.JobAnswer,
        problems=(404, 503),
        example={
            "as_of_ms": 1760000000000,
            **JOB,
            "placement": [{"rank": 0, "node": "n041", "gpus": [0, 1, 2, 3, 4, 5, 6, 7]}],
            "events": [{"type": "step", "job": "train-42", "sequence": 9, "time_ms": 1760000000000, "step": 7}],
            "run_s": {"p50": 6200.0, "p90": 33000.0, "p99": 61000.0},
            "model": "duration-0003",
            "start_ms": None,
            "source": "board",
            "reasons": {"start_ms": "it has started"},
        },
    ),
)
