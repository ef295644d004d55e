"""Health routes: liveness, readiness, and all metrics for Prometheus."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import SourceError
from fleetcast.service.adapter_records import AdapterRecords
from fleetcast.service.answers.fleet import Health, Readiness
from fleetcast.service.api.adapter_metrics import make_adapters_page
from fleetcast.service.api.readiness import run_checks
from fleetcast.service.api.routes.aged_answer import make_age_headers
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.telemetry import CONTENT_TYPE, format_pipeline_page, merge_pages
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.table import JSON, NO_STORE, Query, Row, encode

PLACER_PAGE_S = 0.2
PLACER_UP = "# HELP fleetcast_placer_up 1 while the placer answers.\n# TYPE fleetcast_placer_up gauge\n"


async def answer_healthz(request: Request, context: Context, query: Query) -> Response:
    """Answer that this process is alive, without any check."""
    return Response(b'{"status":"ok"}', 200, {"cache-control": NO_STORE}, JSON)


async def answer_readyz(request: Request, context: Context, query: Query) -> Response:
    """Answer whether every part that the api needs works. If not, answer 503 and list the failed checks."""
    found = await run_checks(context)
    missing = [check.sentence for check in found if not check.ok]
    if missing:
        extra = {"missing": missing, "checks": found}
        raise Problem(503, "not_ready", "; ".join(missing), headers={"retry-after": "5"}, extra=extra)
    board = context.cache.get_board()
    warming = context.cache.get_document(board, "meta").get("warming") if "meta" in board else None
    body = {"status": "ready", "as_of_ms": board.as_of_ms, "warming": warming, "checks": found}
    return Response(encode(body), 200, make_age_headers(context, board.as_of_ms, board), JSON)


async def answer_metrics(request: Request, context: Context, query: Query) -> Response:
    """Answer with all of Fleetcast's own metrics.

    They cover this process, the pipeline, the fleet on the board, the placer and the adapters.
    """
    adapters = make_adapters_page(AdapterRecords(context.config.folder).read_status(), context.clock.now_ms())
    pages = [
        context.metrics.make_page(),
        _make_pipeline_page(context),
        await _fetch_placer_page(request, context),
        adapters,
    ]
    body = merge_pages(*pages).encode() + _read_fleet_page(context)
    return Response(body, media_type=None, headers={"content-type": CONTENT_TYPE})


def _make_pipeline_page(context: Context) -> str:
    board = context.cache.latest()
    stale_after_s = context.config.compute_stale_after_s(context.clock)
    if board is None:
        return format_pipeline_page({}, None, None, stale_after_s)
    age_s = (context.clock.now_ms() - board.as_of_ms) / 1000
    try:
        ingestion = board.json("doc.ingestion")
    except KeyError:
        ingestion = {}
    return format_pipeline_page(ingestion, age_s, board.sequence, stale_after_s)


def _read_fleet_page(context: Context) -> bytes:
    """Return the metrics page that the pipeline rendered. No other page contains its metric families."""
    board = context.cache.latest()
    return bytes(board.raw("metrics.fleet")) if board is not None and "metrics.fleet" in board else b""


async def _fetch_placer_page(request: Request, context: Context) -> str:
    if context.mirror is not None:  # it is the other api's to tell
        return ""
    try:
        asked = context.placer.forward_request("GET", "/metrics", headers=context.access.make_caller_headers(request))
        answer = await asyncio.wait_for(asked, PLACER_PAGE_S)
    except (SourceError, TimeoutError):
        return PLACER_UP + "fleetcast_placer_up 0\n"
    page = answer.body.decode("utf-8", "replace") if answer.status == 200 else ""
    return PLACER_UP + "fleetcast_placer_up 1\n" + page


ROWS = (
    Row(
        *("GET", "/healthz", answer_healthz, "This process answers", "health"),
        answer=Health,
        example={"status": "ok"},
        is_open=True,
    ),
    Row(
        "GET",
        "/readyz",
        answer_readyz,
        "Ready, or 503 with what is missing",
        "health",
        answer=Readiness,
        problems=(503,),
        example={
            "status": "ready",
            "as_of_ms": 1760000000000,
            "warming": {"have_s": 240, "need_s": 1800},
            "checks": [
                {"name": "board", "ok": True, "sentence": "the board is 3 s old"},
                {"name": "history", "ok": True, "sentence": "warming: 4 of 30 minutes of history"},
            ],
        },
        is_open=True,
    ),
    Row(
        "GET",
        "/metrics",
        answer_metrics,
        "Our own metrics, for Prometheus",
        "health",
        answer=str,
        media_type="text/plain",
        example="# TYPE fleetcast_samples_total counter\nfleetcast_samples_total 812000.0\n",
    ),
)
