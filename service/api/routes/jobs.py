"""Routes for jobs: a list of running, waiting and recently ended jobs, one job, and why a job is slow."""

import re
from datetime import UTC, datetime
from typing import TypeVar, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import UnknownEntity
from fleetcast.placement.elastic.shrink import PAUSE_S
from fleetcast.placement.elastic.speed import SPEED_EXPONENT
from fleetcast.placement.machines.running_jobs import DEFAULT_RESTART_S
from fleetcast.service.answers.jobs import ChangeTimes, JobAnswer, JobRow, Jobs, JobState, LearntTimes, Stragglers
from fleetcast.service.api.archived_jobs import ArchiveSearchResult
from fleetcast.service.api.estimates import NO_RUNS, PlacerEstimate
from fleetcast.service.api.routes.aged_answer import make_aged_answer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.routes.estimate import parse_start_estimate, request_start_estimate
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.http.access import Caller, get_admitted_caller
from fleetcast.service.http.table import Param, Query, Row, encode
from fleetcast.service.pipeline.documents import make_job_detail, make_job_row
from fleetcast.service.pipeline.jobs.interference import NOW as CO_RUNS
from fleetcast.service.pipeline.jobs.interference import explain_by_co_run
from fleetcast.service.pipeline.jobs.verdicts import SECTION as VERDICTS
from fleetcast.service.pipeline.learnt_times import NOTHING_LEARNT
from fleetcast.service.pipeline.learnt_times import SECTION as LEARNT_SECTION

T = TypeVar("T")
Object = dict[str, object]  # JSON that goes on as it is
STATES = get_args(JobState)
MAX_ROWS = 100_000
GIVEN_AGAIN = re.compile(
    r".*[0-9]@[0-9]{9,11}"
)  # a number of Slurm and a submission: see `fleetcast.ingest.slurm.job_numbers`
OVER = "it is over"
NOT_RUNNING = "it does not run"
NO_ESTIMATE = "nothing was known of jobs like it when it came; of one that came just now it is known within seconds"
decode_row = msgspec.json.Decoder(JobRow).decode
LIST_PARAMS = (
    Param("state", str, "only jobs in this state", choices=STATES),
    Param("limit", int, "at most this many rows", MAX_ROWS, least=1, most=MAX_ROWS),
)


async def answer_jobs(request: Request, context: Context, query: Query) -> Response:
    """Answer with the running, queued and recently ended jobs, in that order."""
    cache, board = context.cache, context.cache.get_board()
    as_of_ms = cache.get_as_of_ms(board, "doc.jobs")
    rows, caller = cache.get_document(board, "doc.jobs", list[msgspec.Raw]), get_admitted_caller(request)
    if query["state"] is not None or caller.queues:
        heads = cache.get_document(board, "doc.jobs", list[JobRowHead])
        state = query["state"]
        shown = [state in (None, head.state) and may_read_job(caller, head) for head in heads]
        rows = [row for row, is_shown in zip(rows, shown, strict=True) if is_shown]
    return make_aged_answer(context, board, as_of_ms, encode({"as_of_ms": as_of_ms, "rows": rows[: query["limit"]]}))


class JobRowHead(msgspec.Struct):
    """The fields of a job's row that the selection of rows needs."""

    job: str
    attempt: int
    state: str
    queue: str = ""
    queues: tuple[str, ...] = ()
    submitted_ms: int | None = None


def may_read_job(caller: Caller, row: JobRowHead | JobRow) -> bool:
    """Return whether the caller may read one of the queues in which a job waits or ran."""
    return any(map(caller.may_read_queue, row.queues or (row.queue,)))


def require_job_row(cache: BoardCache, board: Board, name: str) -> JobRow:
    """Return the row of a job's latest attempt. Raises UnknownEntity."""
    row = find_job_row(cache, board, name)
    if row is None:
        raise UnknownEntity(f"no job {name[:200]!r} runs, waits or ended within the last hour")
    return row


def find_job_row(cache: BoardCache, board: Board, name: str) -> JobRow | None:
    """Return the row of a job's latest attempt, or None if no job has this name."""
    latest = cache.get_or_derive(
        board,
        "latest_attempts",
        lambda: _index_latest_attempts(cache.get_document(board, "doc.jobs", list[JobRowHead])),
    )
    if name not in latest:
        return None
    return decode_row(cache.get_document(board, "doc.jobs", list[msgspec.Raw])[latest[name]])


def _index_latest_attempts(heads: list[JobRowHead]) -> dict[str, int]:
    """Return job name → index of the job's latest attempt."""
    latest: dict[str, int] = {}
    for place, head in enumerate(heads):
        if head.job not in latest or head.attempt > heads[latest[head.job]].attempt:
            latest[head.job] = place
    return latest | _map_reused_numbers(latest, heads)


def _map_reused_numbers(latest: dict[str, int], heads: list[JobRowHead]) -> dict[str, int]:
    """Return further names → index, for jobs whose number Slurm has reused.

    The number alone then names the newest job. The first job had the bare number as its name. It gets
    another name that ends with its submission time, so that clients can still request it.
    """
    found: dict[str, int] = {}
    for name in sorted(filter(GIVEN_AGAIN.fullmatch, latest), key=lambda name: int(name.rpartition("@")[2])):
        number = name.rpartition("@")[0]
        first = latest.get(number)
        if first is not None and heads[first].submitted_ms is not None:
            found[f"{number}@{(heads[first].submitted_ms or 0) // 1000}"] = first
        found[number] = latest[name]
    return found


def decode_job_part(cache: BoardCache, board: Board, section: str, name: str, kind: type[T]) -> T | None:
    """Decode the part of a board section about one job. Returns None if there is none."""
    parts = cache.get_document(board, section, dict[str, msgspec.Raw])
    return msgspec.json.decode(parts[name], type=kind) if name in parts else None


async def answer_job(request: Request, context: Context, query: Query) -> Response:
    """Answer with one job's latest attempt, its placement and its last events.

    A job that is no longer on the board is read from the archive.
    """
    cache, board = context.cache, context.cache.get_board()
    name, caller = request.path_params["job"], get_admitted_caller(request)
    row = find_job_row(cache, board, name)
    as_of_ms = cache.get_as_of_ms(board, "doc.job")
    if caller.queues and (row is None or not may_read_job(caller, row)):
        raise UnknownEntity(f"no job {name[:200]!r} of your queues runs, waits or ended within the last hour")
    if row is None:
        body = {"as_of_ms": as_of_ms, **await _read_archived_job(context, name)}
        return make_aged_answer(context, board, as_of_ms, encode(body))
    name = row.job  # a number stands for the newest job that has it
    detail = decode_job_part(cache, board, "doc.job", name, Object) or {"placement": [], "events": []}
    asks = detail.pop("asks", None)
    change_times = find_change_times(cache, board, name) if row.state == "running" else None
    body = {
        **{"as_of_ms": as_of_ms, **msgspec.to_builtins(row), **detail},
        **{"start_ms": None, "change_times": change_times},
    }
    reasons = {name: why for name, why in _explain_null_fields(row.state).items() if body.get(name) is None}
    if row.state == "queued" and not caller.queues:
        body["start_ms"], why = await _estimate_start(request, context, row, asks)
        reasons |= {"start_ms": why} if why else {}
    return make_aged_answer(context, board, as_of_ms, encode({**body, "reasons": reasons}))


def find_change_times(cache: BoardCache, board: Board, name: str) -> ChangeTimes:
    """Return what a stop and a change of size of a running job are expected to cost, learnt or by default."""
    learnt = None
    if LEARNT_SECTION in board:  # boards of earlier versions lack it
        learnt = decode_job_part(cache, board, LEARNT_SECTION, name, LearntTimes)
    known = msgspec.structs.asdict(learnt or NOTHING_LEARNT)
    defaults = {"restart_s": DEFAULT_RESTART_S, "resize_pause_s": PAUSE_S, "speed_exponent": SPEED_EXPONENT}
    values = {field: defaults[field] if value is None else value for field, value in known.items()}
    return ChangeTimes(**values, learnt=[field for field, value in known.items() if value is not None])


async def _read_archived_job(context: Context, name: str) -> Object:
    """Return the archive's record of a job.

    Raises UnknownEntity that says how far back the search went. Raises SourceError if the archive fails.
    """
    nowhere = f"no job {name[:200]!r} runs, waits or ended within the last hour"
    if context.mirror is not None:
        raise UnknownEntity(f"{nowhere}; this api is a replica without an archive: {context.mirror.url} has one to ask")
    if not context.archived.enabled:
        key = "archive.look_s = 0" if context.config.archive.enabled else "archive.enabled = false"
        raise UnknownEntity(f"{nowhere}; {key}, so those that ended before are not looked for")
    found = await context.archived.find_job(name)
    if found.attempt is None:
        raise UnknownEntity(f"{nowhere}, and the archive has no event of it{_describe_search_range(found)}")
    attempt = found.attempt
    row = make_job_row(attempt, context.clock.now_ms(), {}, slow=False)
    reasons = _explain_null_fields(attempt.state if attempt.over_ms is not None else "ended")
    if attempt.over_ms is None:
        reasons["ended_ms"] = f"no event reports its end, or the archive has it not yet{_describe_search_range(found)}"
    detail: Object = msgspec.to_builtins(make_job_detail(attempt))
    detail.pop("asks", None)
    return {**msgspec.to_builtins(row), **detail, "start_ms": None, "source": "archive", "reasons": reasons}


def _describe_search_range(found: ArchiveSearchResult) -> str:
    """Describe how far back the archive was searched. Returns "" if it was searched completely."""
    if found.stopped_ms is None:
        return ""
    since = datetime.fromtimestamp(found.stopped_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%MZ")
    return f"; it was read back to {since}, then archive.look_s was over"


def _explain_null_fields(state: str) -> dict[str, str]:
    """Return field → the reason why the field is null in this state.

    The start of a waiting job has other reasons.
    """
    match state:
        case "queued":
            return {"run_s": NO_ESTIMATE, "remaining_s": "it waits", "change_times": NOT_RUNNING}
        case "promised":
            return {
                "run_s": NO_ESTIMATE,
                "remaining_s": "it has not started",
                "start_ms": "its GPUs are promised already",
                "change_times": NOT_RUNNING,
            }
        case "blocked":
            return {
                "run_s": NO_ESTIMATE,
                "remaining_s": "it has not started",
                "start_ms": "it may not start yet",
                "change_times": NOT_RUNNING,
            }
        case "running":
            return {"run_s": NO_ESTIMATE, "remaining_s": NO_RUNS, "start_ms": "it has started"}
        case _:
            return {
                "run_s": "nothing was predicted before it was over",
                **dict.fromkeys(("remaining_s", "start_ms", "change_times"), OVER),
            }


async def estimate_similar_start(
    request: Request, context: Context, row: JobRow, request_id: str, asks: object, **more: object
) -> PlacerEstimate:
    """Return the placer's estimate of when a job with the same needs would start.

    asks: the keys with which the job was submitted. more: further keys for the request to the placer.
    """
    if not isinstance(asks, dict) or not asks:
        return PlacerEstimate(None, "no event reports what it asks for")
    like = {"request_id": request_id, "queue": row.queue, "user": row.user, "class": row.class_, **more, **asks}
    return parse_start_estimate(await request_start_estimate(request, context, encode(like)))


async def _estimate_start(
    request: Request, context: Context, row: JobRow, asks: object
) -> tuple[dict[str, int] | None, str]:
    """Return quantiles of when a waiting job should start, by the placer's estimate, in Unix ms.

    If they are unknown, return None and the reason.
    """
    start = await estimate_similar_start(request, context, row, row.job, asks)
    if start.answer is None:
        return None, start.why
    start_ms = start.answer.start_ms
    sentences = start.answer.reasons or {"start_ms": start.answer.sentence}
    return start_ms, "" if start_ms else sentences.get("start_ms") or "the placer does not say"


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


async def answer_stragglers(request: Request, context: Context, query: Query) -> Response:
    """Answer whether a job is slow, since when, and which member or cause slows it down."""
    cache, board = context.cache, context.cache.get_board()
    name = request.path_params["job"]
    as_of_ms = cache.get_as_of_ms(board, "doc.stragglers")
    score = decode_job_part(cache, board, "doc.stragglers", name, Object)
    if score is None:
        score = _find_last_verdict(cache, board, name)
    elif CO_RUNS in board:
        score |= explain_by_co_run(score, decode_job_part(cache, board, CO_RUNS, name, Object))
    return make_aged_answer(context, board, as_of_ms, encode({"judged_ms": as_of_ms, **score, "as_of_ms": as_of_ms}))


def _find_last_verdict(cache: BoardCache, board: Board, name: str) -> Object:
    """Return the last verdict on the pace of an ended job. If there was none, return one without values.

    Raises UnknownEntity if neither the job nor a verdict is known.
    """
    verdict = decode_job_part(cache, board, VERDICTS, name, Object) if VERDICTS in board else None
    if verdict is None:
        require_job_row(cache, board, name)
        return {**NO_SCORE, "judged_ms": None}
    row, attempt = find_job_row(cache, board, name), verdict.pop("attempt", None)
    return verdict if row is None or row.attempt == attempt else {**NO_SCORE, "judged_ms": None}


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
        answer_jobs,
        "Running, queued and lately ended jobs",
        "jobs",
        by_queue=True,
        params=LIST_PARAMS,
        answer=Jobs,
        problems=(422, 503),
        example={"as_of_ms": 1760000000000, "rows": [JOB]},
    ),
    Row(
        "GET",
        "/v1/jobs/{job:path}/stragglers",
        answer_stragglers,
        "Whether a job is slow, and who or what slows it",
        "jobs",
        answer=Stragglers,
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
            "judged_ms": 1760000000000,
            "not_observed": ["step times of each rank"],
            "sentence": "Steps take 2.9 s, usual 1.6: n042 computes 1.8 times as long as its peers.",
        },
    ),
)

JOB_ROWS = (
    Row(
        "GET",
        "/v1/jobs/{job:path}",
        answer_job,
        "One job: placement, phase and last events",
        "jobs",
        by_queue=True,
        answer=JobAnswer,
        problems=(404, 503),
        example={
            "as_of_ms": 1760000000000,
            **JOB,
            "placement": [{"rank": 0, "node": "n041", "gpus": [0, 1, 2, 3, 4, 5, 6, 7]}],
            "events": [
                {
                    "type": "step",
                    "job": "train-42",
                    "sequence": 9,
                    "time_ms": 1760000000000,
                    "step": 7,
                    "duration_s": 1.6,
                }
            ],
            "run_s": {"p50": 6200.0, "p90": 33000.0, "p99": 61000.0},
            "model": "duration-0003",
            "start_ms": None,
            "change_times": {
                "restart_s": 142.0,
                "resize_pause_s": 120.0,
                "speed_exponent": 0.9,
                "learnt": ["restart_s"],
            },
            "source": "board",
            "reasons": {"start_ms": "it has started"},
        },
    ),
)
