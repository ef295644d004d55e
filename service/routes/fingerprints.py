"""What jobs look like from their telemetry: one job's fingerprint, and what all of them make of their GPUs."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from models.utilisation import VERDICTS, Verdict
from service.board import Board
from service.feed import BoardFeed
from service.routes.context import Context
from service.routes.jobs import find_job, part_of
from service.routes.table import Param, Query, Row, answer, encode

MAX_ROWS = 100_000
DomainKind = Literal["rack", "rail", "power", "storage"]


class Quantiles(msgspec.Struct):
    """Unix ms."""

    p10: int
    p50: int
    p90: int


class Expected(msgspec.Struct):
    """A reading of the whole job at that time from now; template: of the phase that its cycle will be in then."""

    metric: str
    horizon_s: int
    p10: float
    p50: float
    p90: float
    basis: Literal["template", "level"]


class Fingerprint(msgspec.Struct, rename={"class_": "class"}):
    """`class` is what telemetry looks like, `class_told` what the job was submitted as; null where nobody knows.

    looked_ms: null where it was not looked at. last_checkpoint_ms: when the last one that ended began.
    unheard_reason: why telemetry tells nothing of it, where it does not: too few of its GPUs are heard of here.
    """

    job: str
    attempt: int
    as_of_ms: int
    looked_ms: int | None
    class_: str | None
    class_p: float | None
    class_told: str
    gpus_heard: int
    unheard_reason: str
    period_s: float | None
    period_basis: Literal["steps", "telemetry"] | None
    period_reason: str
    phase: str | None
    phase_since_ms: int | None
    phase_ends_ms: Quantiles | None
    next_checkpoint_ms: Quantiles | None
    last_checkpoint_ms: int | None
    checkpoint_every_s: float | None
    checkpoint_cost_s: float | None
    checkpoint_cost_basis: Literal["measured", "told"] | None
    next_evaluation_ms: Quantiles | None
    expected: list[Expected]


class UseRow(msgspec.Struct, rename={"class_": "class"}):
    """Of the last `span_s`, ten minutes at most; null where not known, and `reason` why. `busy` is GPU utilisation."""

    job: str
    class_: str
    gpus: int
    gpus_heard: int
    looked_ms: int
    user: str
    span_s: float | None
    loaded_share: float | None
    busy: float | None
    sm_active: float | None
    tensor_active: float | None
    mfu: float | None
    mfu_reason: str
    data_share: float | None
    communication_share: float | None
    idle_s: float | None
    held_gpu_memory_gib: float | None
    verdict: Verdict
    reason: str


class Utilisation(msgspec.Struct):
    """jobs_looked: of those that run, how many were looked at so far; the others come next."""

    as_of_ms: int
    jobs_looked: int
    jobs_running: int
    rows: list[UseRow]


class Spike(msgspec.Struct):
    """The minute of the next 15 whose p90 is highest; p50 and p90 are of that minute. capacity: null where unknown."""

    domain_kind: DomainKind
    domain: str
    quantity: str
    unit: str
    peak_ms: int
    p50: float
    p90: float
    capacity: float | None
    capacity_reason: str
    jobs: int


class Spikes(msgspec.Struct):
    """Of the jobs that were looked at so far; jobs: how many of them add to the row."""

    as_of_ms: int
    jobs_looked: int
    jobs_running: int
    rows: list[Spike]


async def fingerprint(request: Request, context: Context, query: Query) -> Response:
    """One running job's fingerprint."""
    feed, board = context.feed, context.feed.board()
    name = request.path_params["job"]
    found = part_of(feed, board, "doc.fingerprints", name)
    if found is None:
        found = _unseen(find_job(feed, board, name), feed.as_of_ms(board, "doc.fingerprints"))
    return answer(context, board, found["as_of_ms"], encode(found))


def _unseen(row: Mapping[str, Any], as_of_ms: int) -> dict[str, Any]:
    """A job that does not run, or was not looked at yet."""
    state = row["state"]
    why = "it was not looked at yet" if state == "running" else f"it is {state}: only what runs has a fingerprint"
    about = {"job": row["job"], "attempt": row["attempt"], "as_of_ms": as_of_ms, "looked_ms": None}
    classes = {"class": None, "class_p": None, "class_told": row["class"]}
    unheard = {"gpus_heard": 0, "unheard_reason": why}
    nothing = dict.fromkeys(("period_s", "period_basis", "phase", "phase_since_ms"))
    later = dict.fromkeys(("phase_ends_ms", "next_checkpoint_ms", "next_evaluation_ms"))
    of_checkpoints = ("last_checkpoint_ms", "checkpoint_every_s", "checkpoint_cost_s", "checkpoint_cost_basis")
    checkpoints = dict.fromkeys(of_checkpoints)
    return {**about, **classes, **unheard, **nothing, "period_reason": why, **later, **checkpoints, "expected": []}


async def utilisation(request: Request, context: Context, query: Query) -> Response:
    """What running jobs make of their GPUs, those that hold most for nothing first."""
    feed, board = context.feed, context.feed.board()
    as_of_ms = feed.as_of_ms(board, "doc.utilisation")
    rows = feed.document(board, "doc.utilisation", list[dict[str, object]])
    chosen = [row for row in rows if query["verdict"] is None or row["verdict"] == query["verdict"]]
    chosen = sorted(chosen, key=_wasted, reverse=True)[: query["limit"]]
    return answer(context, board, as_of_ms, encode({"as_of_ms": as_of_ms, **_looked(feed, board), "rows": chosen}))


def _looked(feed: BoardFeed, board: Board) -> dict[str, int]:
    told: dict[str, int] = feed.document(board, "doc.jobs_looked", dict[str, int])
    return told


def _wasted(row: dict[str, object]) -> float:
    """GPU seconds without work."""
    idle_s, gpus = row["idle_s"], row["gpus"]
    return float(idle_s) * float(gpus) if isinstance(idle_s, int | float) and isinstance(gpus, int) else 0.0


async def spikes(request: Request, context: Context, query: Query) -> Response:
    """Load peaks ahead, by domain."""
    feed, board = context.feed, context.feed.board()
    as_of_ms = feed.as_of_ms(board, "doc.spikes")
    rows = feed.document(board, "doc.spikes", list[dict[str, Any]])
    chosen = [row for row in rows if query["domain_kind"] in (None, row["domain_kind"])][: query["limit"]]
    return answer(context, board, as_of_ms, encode({"as_of_ms": as_of_ms, **_looked(feed, board), "rows": chosen}))


ROWS = (
    Row(
        "GET",
        "/v1/spikes",
        spikes,
        "Load peaks of the next 15 minutes, summed over jobs by rack, rail group, power domain and checkpoint store",
        "fleet",
        params=(
            Param("domain_kind", str, "only domains of this kind", choices=get_args(DomainKind)),
            Param("limit", int, "at most this many rows", MAX_ROWS, least=1, most=MAX_ROWS),
        ),
        answer=Spikes,
        problems=(422, 503),
        example={
            "as_of_ms": 1760000000000,
            "jobs_looked": 240,
            "jobs_running": 240,
            "rows": [
                {
                    "domain_kind": "storage",
                    "domain": "lustre",
                    "quantity": "checkpoint_bytes_per_s",
                    "unit": "B/s",
                    "peak_ms": 1760000390000,
                    "p50": 2.1e10,
                    "p90": 4.2e10,
                    "capacity": None,
                    "capacity_reason": "nothing tells how fast the store writes",
                    "jobs": 7,
                }
            ],
        },
    ),
    Row(
        "GET",
        "/v1/jobs/{job:path}/fingerprint",
        fingerprint,
        "A running job's class, period, phase, and when it checkpoints next",
        "jobs",
        answer=Fingerprint,
        problems=(404, 503),
        example={
            "job": "train-42",
            "attempt": 1,
            "as_of_ms": 1760000000000,
            "looked_ms": 1760000000000,
            "class": "training",
            "class_p": 0.97,
            "class_told": "training",
            "gpus_heard": 64,
            "unheard_reason": "",
            "period_s": 1.62,
            "period_basis": "steps",
            "period_reason": "",
            "phase": "steady",
            "phase_since_ms": 1759991090000,
            "phase_ends_ms": {"p10": 1760000410000, "p50": 1760000420000, "p90": 1760000440000},
            "next_checkpoint_ms": {"p10": 1760000410000, "p50": 1760000420000, "p90": 1760000440000},
            "last_checkpoint_ms": 1759999220000,
            "checkpoint_every_s": 1200.0,
            "checkpoint_cost_s": 31.0,
            "checkpoint_cost_basis": "measured",
            "next_evaluation_ms": None,
            "expected": [
                {
                    "metric": "power_w",
                    "horizon_s": 300,
                    "basis": "level",
                    "p10": 34_100.0,
                    "p50": 35_210.0,
                    "p90": 36_900.0,
                }
            ],
        },
    ),
    Row(
        "GET",
        "/v1/utilisation",
        utilisation,
        "What running jobs make of their GPUs, those that hold most for nothing first",
        "jobs",
        params=(
            Param("verdict", str, "only jobs with this verdict", choices=VERDICTS),
            Param("limit", int, "at most this many rows", MAX_ROWS, least=1, most=MAX_ROWS),
        ),
        answer=Utilisation,
        problems=(422, 503),
        example={
            "as_of_ms": 1760000000000,
            "jobs_looked": 240,
            "jobs_running": 240,
            "rows": [
                {
                    "job": "notebook-7",
                    "class": "interactive",
                    "gpus": 2,
                    "gpus_heard": 2,
                    "looked_ms": 1759999990000,
                    "user": "ada",
                    "span_s": 600.0,
                    "loaded_share": 1.0,
                    "busy": 0.0,
                    "sm_active": 0.0,
                    "tensor_active": 0.0,
                    "mfu": None,
                    "mfu_reason": "the job has no label flops_per_token",
                    "data_share": None,
                    "communication_share": None,
                    "idle_s": 1800.0,
                    "held_gpu_memory_gib": 131.5,
                    "verdict": "abandoned",
                    "reason": "",
                }
            ],
        },
    ),
)
