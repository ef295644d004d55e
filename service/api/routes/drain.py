"""The route that predicts the effects of draining a node now.

It counts jobs and GPUs on the board. The placer estimates when the interrupted jobs would restart.
"""

from collections.abc import Mapping

import msgspec
import numpy as np
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import UnknownEntity
from fleetcast.fleet.nodes import NodeState
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS
from fleetcast.service.answers.jobs import JobRow, RemainingTime
from fleetcast.service.api.routes.aged_answer import make_aged_answer
from fleetcast.service.api.routes.checkpoint import CheckpointFacts
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.routes.jobs import Object, decode_job_part, estimate_similar_start, require_job_row
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.board.free import (
    count_promised_gpus,
    describe_window,
    find_placeable_nodes,
    find_unheld_gpus,
    read_gpu_use,
)
from fleetcast.service.board.gpu_use import Occupant, describe_gpu_use, format_gpu_count
from fleetcast.service.config import PlacerConfig
from fleetcast.service.http.table import Query, Row, encode
from fleetcast.service.pipeline.documents import round_probability

MOST_ASKED = 4  # jobs that the placer is asked about
NOT_ASKED = f"the placer is asked about the {MOST_ASKED} largest jobs only"
NOT_PLAYED = "the placer does not play the queue on a smaller fleet"
DAY = RISK_HORIZONS_S.index(86_400)


class HitJob(msgspec.Struct, rename={"class_": "class"}):
    """A job that draining the node would interrupt.

    `restart_ms`: when the job would restart elsewhere, behind the jobs that wait. GPUs that the job itself
    would free on other nodes do not count as free for it. `restart_reason`: why `restart_ms` is null.
    """

    job: str
    attempt: int
    class_: str
    gpus: int
    gpus_here: int
    nodes: int
    running_s: float | None
    remaining_s: RemainingTime | None
    last_checkpoint_s: float | None
    next_checkpoint_ms: dict[str, int] | None
    restart_ms: dict[str, int] | None
    restart_reason: str


class PoolCounts(msgspec.Struct):
    """Numbers of GPUs in a node's pool, with and without the node."""

    in_service: bool
    pool: str
    gpus_lost: int
    gpus_free_here: int
    gpus_free_now: int
    gpus_free_after: int
    gpus_in_service_now: int
    gpus_in_service_after: int


class Drain(msgspec.Struct):
    """The effects of draining a node.

    `gpus_lost`: usable GPUs that leave the pool. Free GPUs count only on nodes in service. `p_day`:
    probability that the node fails anyway within a day. `unknown_gpus`: busy GPUs of the node that no event
    explains. `promised`: request → GPUs of the node, for placed requests whose jobs no event shows running.
    `kept_by`: windows and reservations that withhold the node.
    """

    node: str
    as_of_ms: int
    in_service: bool
    pool: str
    gpus_lost: int
    gpus_free_here: int
    gpus_free_now: int
    gpus_free_after: int
    gpus_in_service_now: int
    gpus_in_service_after: int
    p_day: float | None
    jobs: list[HitJob]
    unknown_gpus: int
    promised: dict[str, int]
    kept_by: str
    queue_delay_s: float | None
    queue_reason: str
    sentence: str


async def answer_drain_effects(request: Request, context: Context, query: Query) -> Response:
    """Answer with the effects of draining a node now. The request itself drains nothing."""
    cache, board = context.cache, context.cache.get_board()
    name = request.path_params["node"]
    rows = cache.get_node_answers(board).rows
    row = rows.get(name.encode())
    if row is None:
        raise UnknownEntity(f"no node {name[:200]!r}; {len(rows)} known")
    as_of_ms = cache.get_as_of_ms(board, "gpu.job")
    about = _count_pool_gpus(cache, board, row, context.config.placer)
    jobs = await _list_hit_jobs(request, context, board, _count_gpus_by_job(cache, board, row), name, as_of_ms)
    unknown, promised = _find_non_job_use(board, row)
    window = describe_window(board, name)
    p_day = np.nan_to_num(board.array("node.risk")[RISK_KINDS.index("fail"), DAY], nan=-1.0)[row]
    body = Drain(
        node=name,
        as_of_ms=as_of_ms,
        **structs.asdict(about),
        p_day=round_probability(float(p_day)) if p_day >= 0 else None,
        jobs=jobs,
        unknown_gpus=unknown,
        promised=promised,
        kept_by=window,
        queue_delay_s=None,
        queue_reason=NOT_PLAYED,
        sentence=_describe_effects(name, about, jobs, describe_gpu_use(unknown, [*promised.items()]), window),
    )
    return make_aged_answer(context, board, as_of_ms, encode(body))


def _count_gpus_by_job(cache: BoardCache, board: Board, row: int) -> dict[str, int]:
    """Return job → number of GPUs that the job holds on a node, the largest number first."""
    cache.get_section(board, "gpu.job")
    holder = board.array("gpu.job")[row]
    names = board.names("names.job")
    counts = {names[at]: int((holder == at).sum()) for at in dict.fromkeys(holder[holder >= 0].tolist())}
    return dict(sorted(counts.items(), key=lambda pair: -pair[1]))


def _find_non_job_use(board: Board, row: int) -> tuple[int, dict[str, int]]:
    """Return how many GPUs of a node are in unknown use, and request → GPUs of the node promised to it."""
    use = read_gpu_use(board)
    if row >= len(use):
        return 0, {}
    return int((use[row] == Occupant.UNKNOWN).sum()), count_promised_gpus(board, row)


def _count_pool_gpus(cache: BoardCache, board: Board, row: int, placer: PlacerConfig) -> PoolCounts:
    cache.get_section(board, "node.pool")
    pool = board.array("node.pool")
    usable, free = board.array("gpu.usable"), find_unheld_gpus(board, placer)
    n = min(len(pool), len(usable))  # a topology of this moment may know more nodes than were scored
    open_here = find_placeable_nodes(board, placer)[:n] & (pool[:n] == pool[row])
    in_service = (board.array("node.state")[:n] == NodeState.IN_SERVICE) & (pool[:n] == pool[row])
    able = (usable[:n] & in_service[:, None]).sum(axis=1)
    free_each = (usable[:n] & free[:n] & open_here[:, None]).sum(axis=1)
    lost, free_here = (int(able[row]), int(free_each[row])) if row < n else (0, 0)
    return PoolCounts(
        in_service=bool(row < n and in_service[row]),
        pool=board.names("names.pool")[pool[row]] if pool[row] >= 0 else "",
        gpus_lost=lost,
        gpus_free_here=free_here,
        gpus_free_now=int(free_each.sum()),
        gpus_free_after=int(free_each.sum()) - free_here,
        gpus_in_service_now=int(able.sum()),
        gpus_in_service_after=int(able.sum()) - lost,
    )


async def _list_hit_jobs(
    request: Request, context: Context, board: Board, held: Mapping[str, int], node: str, now_ms: int
) -> list[HitJob]:
    cache, jobs = context.cache, []
    for place, (name, gpus_here) in enumerate(held.items()):
        row = require_job_row(cache, board, name)
        looked = "doc.fingerprints" in board
        facts = decode_job_part(cache, board, "doc.fingerprints", name, CheckpointFacts) if looked else None
        facts = facts or CheckpointFacts()
        asks = (decode_job_part(cache, board, "doc.job", name, Object) or {}).get("asks")
        start, why = (
            (None, NOT_ASKED) if place >= MOST_ASKED else await _estimate_restart(request, context, row, asks, node)
        )
        jobs.append(
            HitJob(
                job=name,
                attempt=row.attempt,
                class_=row.class_,
                gpus=row.gpus,
                gpus_here=gpus_here,
                nodes=len(row.nodes),
                running_s=None if row.started_ms is None else max(0.0, (now_ms - row.started_ms) / 1000),
                remaining_s=row.remaining_s,
                last_checkpoint_s=_compute_unsaved_seconds(facts.last_checkpoint_ms, now_ms),
                next_checkpoint_ms=facts.next_checkpoint_ms,
                restart_ms=start,
                restart_reason=why,
            )
        )
    return jobs


def _compute_unsaved_seconds(last_ms: int | None, now_ms: int) -> float | None:
    """Return how many seconds of work a restart would repeat, or None if no complete checkpoint is known."""
    return None if last_ms is None else round(max(0.0, (now_ms - last_ms) / 1000), 1)


async def _estimate_restart(
    request: Request, context: Context, row: JobRow, asks: object, node: str
) -> tuple[dict[str, int] | None, str]:
    """Return quantiles of when an interrupted job would start elsewhere if submitted now, in Unix ms.

    If they are unknown, return None and the reason.
    """
    start = await estimate_similar_start(request, context, row, f"{row.job} again", asks, avoid_nodes=[node])
    if start.answer is None:
        return None, start.why
    start_ms = start.answer.start_ms
    return start_ms, "" if start_ms else start.answer.sentence or "the placer does not say"


def _describe_effects(name: str, about: PoolCounts, jobs: list[HitJob], others: str, window: str) -> str:
    """Describe the effects in a sentence.

    others: the use of the node's GPUs by work other than jobs. window: what withholds the node. Each of them
    is "" if there is none.
    """
    if not about.in_service:
        return f"{name} is out of service already{f' ({window})' if window else ''}: draining it changes nothing."
    pool = f" of pool {about.pool}" if about.pool else ""
    lost = f"takes {format_gpu_count(about.gpus_lost)} out of service"
    left = f"leaves {about.gpus_free_after} of {about.gpus_free_now} free GPUs{pool}"
    if jobs:
        total = sum(job.gpus for job in jobs)
        whose = f"{len(jobs)} job{'s' if len(jobs) > 1 else ''} with {format_gpu_count(total)}"
        beside = f" Next to them: {others}." if others else ""
        return f"Draining {name} now interrupts {whose}, {lost} and {left}.{beside}"
    if others:
        return f"{others[0].upper()}{others[1:]}: draining {name} would interrupt that, {lost} and {left}."
    if window:
        return f"Nothing runs here, and the node is {window}: draining {name} interrupts no job, {lost} and {left}."
    return (
        f"Nothing runs here: draining {name} interrupts no job, takes {format_gpu_count(about.gpus_lost)} and {left}."
    )


ROWS = (
    Row(
        "GET",
        "/v1/nodes/{node}/drain",
        answer_drain_effects,
        "What would change if a node were drained now: jobs, GPUs and starts; nothing is drained by asking",
        "risk",
        answer=Drain,
        problems=(404, 503),
        example={
            "node": "n042",
            "as_of_ms": 1760000000000,
            "in_service": True,
            "pool": "train",
            "gpus_lost": 8,
            "gpus_free_here": 0,
            "gpus_free_now": 236,
            "gpus_free_after": 236,
            "gpus_in_service_now": 1048,
            "gpus_in_service_after": 1040,
            "p_day": 0.12,
            "jobs": [
                {
                    "job": "train-42",
                    "attempt": 1,
                    "class": "training",
                    "gpus": 64,
                    "gpus_here": 8,
                    "nodes": 8,
                    "running_s": 9000.0,
                    "remaining_s": {"p50": 5400.0, "p90": 31000.0},
                    "last_checkpoint_s": 780.0,
                    "next_checkpoint_ms": {"p10": 1760000410000, "p50": 1760000420000, "p90": 1760000440000},
                    "restart_ms": {"p10": 1760000000000, "p50": 1760001200000, "p90": 1760003600000},
                    "restart_reason": "",
                }
            ],
            "unknown_gpus": 0,
            "promised": {},
            "kept_by": "",
            "queue_delay_s": None,
            "queue_reason": NOT_PLAYED,
            "sentence": "Draining n042 now interrupts 1 job with 64 GPUs, takes 8 GPUs out of service and leaves 236 "
            "of 236 free GPUs of pool train.",
        },
    ),
)
