"""Routes for the overview of the fleet, the health of ingestion, and the board itself."""

import asyncio
import mmap
import os
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from fleetcast.service.answers.fitted_models import FittedModels
from fleetcast.service.answers.fleet import FleetAnswer, Ingestion
from fleetcast.service.answers.served_models import ServedModels
from fleetcast.service.api.routes.aged_answer import make_age_headers, make_aged_answer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.http.table import Param, Query, Row


async def answer_fleet(request: Request, context: Context, query: Query) -> Response:
    """Answer with the overview of the fleet, for the console's map and header."""
    return _answer_section(context, "doc.fleet")


async def answer_ingestion(request: Request, context: Context, query: Query) -> Response:
    """Answer with the sources, rates and lag of ingestion, and the number of bad records by reason."""
    return _answer_section(context, "doc.ingestion")


async def answer_served_models(request: Request, context: Context, query: Query) -> Response:
    """Answer with requests, KV cache and time to first token of every served model."""
    return _answer_section(context, "doc.served_models")


async def answer_fitted_models(request: Request, context: Context, query: Query) -> Response:
    """Answer with the fitted models in use, their recent accuracy, and the reasons to fit them again."""
    return _answer_section(context, "doc.models")


def _answer_section(context: Context, name: str) -> Response:
    """Answer with one section of the board as the whole body."""
    cache, board = context.cache, context.cache.get_board()
    body = cache.get_or_derive(board, ("body", name), lambda: bytes(cache.get_section(board, name)))
    return make_aged_answer(context, board, cache.get_as_of_ms(board, name), body)


PARTS = ("board", "urgent")
BOARD_PARAMS = (
    Param("part", str, "the scored sections, or what was published since without a tick", "board", choices=PARTS),
)


async def answer_board(request: Request, context: Context, query: Query) -> Response:
    """Answer with the board's bytes, for a reader on another host. If the caller has them, answer 304."""
    newest = context.cache.get_board()
    headers = {**make_age_headers(context, newest.as_of_ms, newest), "cache-control": "no-cache"}
    known = request.headers.get("if-none-match", "")
    tag, body = await asyncio.to_thread(_map_published_file, context.config.board / query["part"], known)
    if tag is None:
        return Response(status_code=204, headers=headers)
    headers["etag"] = tag
    if body is None:
        return Response(status_code=304, headers=headers)
    return Response(body, 200, headers, "application/octet-stream")


def _map_published_file(path: Path, known: str) -> tuple[str | None, memoryview | None]:
    """Return the ETag and the mapped bytes of a published file.

    The bytes are None if `known` contains the ETag. Both are None if there is no file.
    """
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            tag = f'"{stat.st_ino:x}-{stat.st_mtime_ns:x}"'
            return tag, None if tag in known else memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        return None, None


ROWS = (
    Row(
        "GET",
        "/v1/fleet",
        answer_fleet,
        "The fleet at a glance: totals, and a row a node",
        "fleet",
        answer=FleetAnswer,
        problems=(422, 503),
        example={
            "as_of_ms": 1760000000000,
            "name": "venus",
            "gpus": {"running": 812, "free": 228, "unusable": 16, "total": 1064, "unknown_use": 8, "window": 8},
            "queued_gpus": 88,
            "queued_jobs": 5,
            "at_risk": 1,
            "nodes": [
                {"node": "n042", "rack": "r03", "state": "degraded", "flagged": True, "p": 0.62, "jobs": ["train-42"]}
            ],
        },
    ),
    Row(
        "GET",
        "/v1/ingestion",
        answer_ingestion,
        "Sources, rates, lag, and bad records by reason",
        "fleet",
        answer=Ingestion,
        problems=(422, 503),
        example={
            "as_of_ms": 1760000000000,
            "sources": [
                {
                    **{"name": "scrape", "kind": "scrape", "rate_per_s": 3100.0, "lag_s": 0.2, "bad": 3, "up": True},
                    "records": {
                        **{"all": 9000, "read": 8000, "refused": 3, "ignored": 900, "unread": 97},
                        **{"ignored_by": {"exporter": 900}, "unread_names": ["my_metric"], "unknown_fields": 0},
                    },
                }
            ],
            "samples_per_s": 3100.0,
            "events_per_s": 1.5,
            "newest_sample_ms": 1759999999000,
            "bad_records": {"not_a_number": 3},
            "targets": {"up": 265, "down": 1},
            "archive": {
                "rows": 1_860_000,
                "events": 412,
                "files": 60,
                "bytes": 3_900_000,
                "repeats": 0,
                "too_old": 0,
                "waiting_bytes": 21_000,
                "full": False,
                "failing": "",
            },
        },
    ),
    Row(
        "GET",
        "/v1/served-models",
        answer_served_models,
        "Served models: requests, KV cache, tokens and time to first token",
        "fleet",
        answer=ServedModels,
        problems=(422, 503),
        example={
            "as_of_ms": 1760000000000,
            "rows": [
                {
                    "pool": "chat",
                    "model": "meta-llama/Llama-3.1-8B-Instruct",
                    "instances": [
                        {
                            "instance": "10.0.0.7:8000",
                            "age_s": 3.2,
                            "requests_running": 12.0,
                            "requests_waiting": 2.0,
                            "kv_cache_used": 0.61,
                        }
                    ],
                    "requests_running": 12.0,
                    "requests_waiting": 2.0,
                    "kv_cache_used": 0.61,
                    "kv_cache_used_max": 0.61,
                    "requests_per_s": 4.1,
                    "prompt_tokens_per_s": 5200.0,
                    "generated_tokens_per_s": 910.0,
                    "ttft_s": {"mean": 0.21, "p50": 0.18, "p90": 0.4, "p99": 0.92},
                }
            ],
        },
    ),
    Row(
        "GET",
        "/v1/models",
        answer_fitted_models,
        "Fitted models that serve: version, age, record compared with the card, and what asks for a new fit",
        "fleet",
        answer=FittedModels,
        problems=(422, 503),
        example={
            "as_of_ms": 1760000000000,
            "rows": [
                {
                    "kind": "demand",
                    "version": "0003",
                    "fitted_until_ms": 1757000000000,
                    "age_days": 34.72,
                    "gate": "WQL 14 % below the best baseline over 24 numbers",
                    "coverage_80": {"card": 0.79, "recent": 0.81},
                    "loss_vs_best_naive": 0.88,
                    "forecasts": 9031,
                    "retrain": {"age": "it was fitted on data up to 35 days ago, 30 are allowed"},
                }
            ],
            "shadows": [
                {
                    "kind": "demand",
                    "version": "0004",
                    "loss_vs_persistence": 0.81,
                    "serving_vs_persistence": 0.84,
                    "forecasts": 12096,
                }
            ],
        },
    ),
    Row(
        "GET",
        "/v1/board",
        answer_board,
        "The board itself, as published (see service/board/board.py for its layout)",
        "fleet",
        params=BOARD_PARAMS,
        answer=bytes,
        media_type="application/octet-stream",
        empty=(204, 304),
        problems=(422, 503),
    ),
)
