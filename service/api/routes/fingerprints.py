"""Routes for the fingerprint of one job, the GPU use of all jobs, and load peaks."""

from typing import get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.models.jobs.spikes import DomainKind
from fleetcast.models.jobs.utilisation import VERDICTS
from fleetcast.service.answers.fingerprints import Fingerprint, Spikes, Utilisation
from fleetcast.service.answers.jobs import JobRow
from fleetcast.service.api.routes.aged_answer import make_aged_answer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.routes.jobs import require_job_row
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.http.table import Param, Query, Row, encode

MAX_ROWS = 100_000


async def answer_fingerprint(request: Request, context: Context, query: Query) -> Response:
    """Answer with the fingerprint of one running job."""
    cache, board = context.cache, context.cache.get_board()
    name = request.path_params["job"]
    parts = cache.get_document(board, "doc.fingerprints", dict[str, msgspec.Raw])
    if name in parts:
        return make_aged_answer(
            context, board, msgspec.json.decode(parts[name], type=_FingerprintTime).as_of_ms, encode(parts[name])
        )
    as_of_ms = cache.get_as_of_ms(board, "doc.fingerprints")
    return make_aged_answer(
        context, board, as_of_ms, encode(_make_empty_fingerprint(require_job_row(cache, board, name), as_of_ms))
    )


class _FingerprintTime(msgspec.Struct):
    as_of_ms: int


def _make_empty_fingerprint(row: JobRow, as_of_ms: int) -> Fingerprint:
    """Return a fingerprint without values, for a job that does not run or has not been evaluated yet."""
    why = (
        "it was not looked at yet" if row.state == "running" else f"it is {row.state}: only what runs has a fingerprint"
    )
    return Fingerprint(
        job=row.job,
        attempt=row.attempt,
        as_of_ms=as_of_ms,
        class_told=row.class_,
        unheard_reason=why,
        period_reason=why,
    )


async def answer_utilisation(request: Request, context: Context, query: Query) -> Response:
    """Answer with the GPU use of the running jobs, the most wasteful job first."""
    cache, board = context.cache, context.cache.get_board()
    as_of_ms = cache.get_as_of_ms(board, "doc.utilisation")
    rows = cache.get_document(board, "doc.utilisation", list[dict[str, object]])
    chosen = [row for row in rows if query["verdict"] is None or row["verdict"] == query["verdict"]]
    chosen = sorted(chosen, key=_compute_wasted_gpu_seconds, reverse=True)[: query["limit"]]
    return make_aged_answer(
        context, board, as_of_ms, encode({"as_of_ms": as_of_ms, **_read_evaluated_counts(cache, board), "rows": chosen})
    )


def _read_evaluated_counts(cache: BoardCache, board: Board) -> dict[str, int]:
    looked_ms: dict[str, int] = cache.get_document(board, "doc.jobs_looked", dict[str, int])
    return looked_ms


def _compute_wasted_gpu_seconds(row: dict[str, object]) -> float:
    """Return the idle GPU-seconds of a job, or 0 if they are unknown."""
    idle_s, gpus = row["idle_s"], row["gpus"]
    return float(idle_s) * float(gpus) if isinstance(idle_s, int | float) and isinstance(gpus, int) else 0.0


async def answer_spikes(request: Request, context: Context, query: Query) -> Response:
    """Answer with the future load peaks, by domain."""
    cache, board = context.cache, context.cache.get_board()
    as_of_ms = cache.get_as_of_ms(board, "doc.spikes")
    rows = cache.get_document(board, "doc.spikes", list[dict[str, object]])
    chosen = [row for row in rows if query["domain_kind"] in (None, row["domain_kind"])][: query["limit"]]
    return make_aged_answer(
        context, board, as_of_ms, encode({"as_of_ms": as_of_ms, **_read_evaluated_counts(cache, board), "rows": chosen})
    )


ROWS = (
    Row(
        "GET",
        "/v1/spikes",
        answer_spikes,
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
                    "capacity_reason": "no setting states how fast the store writes",
                    "jobs": 7,
                }
            ],
        },
    ),
    Row(
        "GET",
        "/v1/jobs/{job:path}/fingerprint",
        answer_fingerprint,
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
            "checkpoint_every_basis": "told",
            "pause_every_s": 1199.4,
            "pause_reason": "",
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
        answer_utilisation,
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
