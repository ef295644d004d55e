"""Demand: forecasts by pool, class, group and target, what became of the earlier ones, and what demand is made of."""

from collections.abc import Collection
from typing import Any, get_args

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from fleet.errors import UnknownEntity
from fleet.events import JobClass
from models.demand.forecaster import TARGETS
from models.demand.rows import DemandRow
from service.answers.demand import Demand, DemandModel, DemandRecord
from service.api.routes import demand_examples
from service.api.routes.context import Context
from service.api.routes.table import Param, Query, Row, answer, encode
from service.board.board import Board
from service.board.cache import BoardCache
from service.http.problems import unprocessable
from service.pipeline.demand.sections import KEYS, demand_fan, demand_keys, demand_rows

CLASSES = ("all", *get_args(JobClass))
NAMED = 20  # in an error

decode_row = msgspec.json.Decoder(DemandRow).decode

FILTERS = (
    Param("pool", str, "only this pool; `all` is the whole fleet"),
    Param("class", str, "only this job class; `all` is every class", choices=CLASSES),
    Param("group", str, "only this user group, or served model; `all` is everybody, `other` who is not listed"),
    Param("target", str, "only this target", choices=TARGETS),
    Param("horizon_s", int, "only this horizon", least=1),
)
RECORD_PARAMS = (
    Param("pool", str, "whose record", "all"),
    Param("target", str, "of what", "running", choices=TARGETS),
    Param("class", str, "of which job class", "all", choices=CLASSES),
)
MODEL_PARAMS = (
    Param("pool", str, "only this pool; `all` is the whole fleet"),
    Param("class", str, "only this job class; `all` is every class", choices=CLASSES),
)


async def demand(request: Request, context: Context, query: Query) -> Response:
    """Forecast quantiles of the series that match."""
    cache, board = context.cache, context.cache.board()
    cache.section(board, "demand.keys")  # a 503 where there is none
    as_of_ms = cache.as_of_ms(board, "doc.demand")
    key = ("demand", *(query[param.name] for param in FILTERS))
    return answer(
        context, board, as_of_ms, cache.derived(board, key, lambda: demand_body(cache, board, query, as_of_ms))
    )


def demand_body(cache: BoardCache, board: Board, query: Query, as_of_ms: int) -> bytes:
    """The series that match, found by their keys; only what is cut to a horizon is decoded."""
    keys = demand_keys(board)
    _known("pool", query["pool"], keys.by_pool)
    _known("group", query["group"], keys.groups)
    rows: list[Any] = demand_rows(board, keys.matching({name: query[name] for name in KEYS if query[name] is not None}))
    if query["horizon_s"] is not None:
        rows = _cut([decode_row(row) for row in rows], query["horizon_s"])
    return encode({"as_of_ms": as_of_ms, "series": rows})


def _known(name: str, value: str | None, names: Collection[str]) -> None:
    """A 404 problem for a pool or group that no series is of."""
    if value is not None and names and value not in names:
        raise UnknownEntity(f"no {name} {value[:200]!r}; {name}s are {', '.join(sorted(names)[:NAMED])}")


def _cut(rows: list[DemandRow], horizon_s: int) -> list[DemandRow]:
    """The rows cut to one horizon; a 422 problem where none of them has it."""
    horizons = sorted({horizon for row in rows for horizon in row.horizons_s})
    if rows and horizon_s not in horizons:
        raise unprocessable("horizon_s", horizon_s, "one of " + ", ".join(map(str, horizons)))
    return [_at(row, horizon_s) for row in rows if horizon_s in row.horizons_s]


def _at(row: DemandRow, horizon_s: int) -> DemandRow:
    """A series cut to one horizon."""
    at = row.horizons_s.index(horizon_s)
    cut = structs.replace(row, horizons_s=[horizon_s], values=[[values[at]] for values in row.values])
    return structs.replace(cut, models=[row.models[at]], model=row.models[at]) if row.models else cut


async def record(request: Request, context: Context, query: Query) -> Response:
    """History, the forecast now and the one issued about an hour ago."""
    cache, board = context.cache, context.cache.board()
    cache.section(board, "demand_record.keys")
    as_of_ms = cache.as_of_ms(board, "doc.demand_record")
    names = ("pool", "target") if query["class"] == "all" else ("pool", "target", "class")
    name = "|".join(query[part] for part in names)
    fan = demand_fan(board, name)
    if fan is None:
        known = ", ".join(sorted(msgspec.json.decode(cache.section(board, "demand_record.keys")))[:NAMED]) or "none yet"
        raise UnknownEntity(f"no record of {'|'.join(names)} {name[:200]!r}; there are: {known}")
    body = {"as_of_ms": as_of_ms, "pool": query["pool"], "target": query["target"], "class": query["class"], **fan}
    return answer(context, board, as_of_ms, encode(body))


async def model(request: Request, context: Context, query: Query) -> Response:
    """The demand model: what is always wanted, what comes in bursts, how long anybody waits."""
    cache, board = context.cache, context.cache.board()
    as_of_ms = cache.as_of_ms(board, "doc.demand_model")
    rows = cache.document(board, "doc.demand_model")["rows"]
    _known("pool", query["pool"], {row["pool"] for row in rows})
    wanted = [(param.name, query[param.name]) for param in MODEL_PARAMS if query[param.name] is not None]
    rows = [row for row in rows if all(row[name] == value for name, value in wanted)]
    return answer(context, board, as_of_ms, encode({"as_of_ms": as_of_ms, "rows": rows}))


ROWS = (
    Row(
        "GET",
        "/v1/demand",
        demand,
        "How many GPUs, and requests to served models, will be wanted, as quantiles by horizon",
        "demand",
        params=FILTERS,
        answer=Demand,
        problems=(404, 422, 503),
        example=demand_examples.DEMAND,
    ),
    Row(
        "GET",
        "/v1/demand/record",
        record,
        "What was forecast and what then happened",
        "demand",
        params=RECORD_PARAMS,
        answer=DemandRecord,
        problems=(404, 422, 503),
        example=demand_examples.RECORD,
    ),
    Row(
        "GET",
        "/v1/demand/model",
        model,
        "What a pool's demand is made of: floor, bands, bursts, mix, durations, waits, cold starts",
        "demand",
        params=MODEL_PARAMS,
        answer=DemandModel,
        problems=(404, 422, 503),
        example=demand_examples.MODEL,
    ),
)
