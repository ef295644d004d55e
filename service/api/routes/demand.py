"""Routes for demand: forecasts by queue or pool, their accuracy, and the demand model."""

from collections.abc import Collection, Mapping
from typing import Any, get_args

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import UnknownEntity
from fleetcast.fleet.events import JobClass
from fleetcast.models.demand.forecaster import TARGETS, SeriesKey, format_series_name
from fleetcast.models.demand.rows import DemandRow
from fleetcast.service.answers.demand import Demand, DemandModel, DemandRecord
from fleetcast.service.api.routes import demand_examples
from fleetcast.service.api.routes.aged_answer import make_aged_answer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.http.problems import make_unprocessable_problem
from fleetcast.service.http.table import Param, Query, Row, encode
from fleetcast.service.pipeline.demand.sections import (
    KEYS,
    DemandKeys,
    read_demand_keys,
    read_demand_record,
    read_demand_rows,
)

CLASSES = ("all", *get_args(JobClass))
NAMED = 20  # in an error
QUEUE_HINT = "{0} is a queue: set queue={0} instead of pool. A pool is one of machines, as in the inventory."

decode_row = msgspec.json.Decoder(DemandRow).decode

QUEUE = Param("queue", str, "only this queue; `all` is the whole fleet")
POOL = Param("pool", str, "only this pool of machines, as in the inventory; `all` is the whole fleet")
FILTERS = (
    POOL,
    Param("class", str, "only this job class; `all` is every class", choices=CLASSES),
    Param("group", str, "only this user group, or served model; `all` is everybody, `other` who is not listed"),
    Param("target", str, "only this target", choices=TARGETS),
    Param("horizon_s", int, "only this horizon", least=1),
    QUEUE,
)
RECORD_PARAMS = (
    Param("pool", str, "the record of which pool of machines"),
    Param("target", str, "of what", "running", choices=TARGETS),
    Param("class", str, "of which job class", "all", choices=CLASSES),
    Param("queue", str, "the record of which queue"),
)
MODEL_PARAMS = (
    Param("pool", str, "`all` is the whole fleet"),
    Param("class", str, "only this job class; `all` is every class", choices=CLASSES),
    QUEUE,
)


async def answer_demand(request: Request, context: Context, query: Query) -> Response:
    """Answer with the demand forecasts of the series that match the query."""
    cache, board = context.cache, context.cache.get_board()
    cache.get_section(board, "demand.keys")  # a 503 where there is none
    as_of_ms = cache.get_as_of_ms(board, "doc.demand")
    key = ("demand", *(query[param.name] for param in FILTERS))
    return make_aged_answer(
        context, board, as_of_ms, cache.get_or_derive(board, key, lambda: encode_demand(cache, board, query, as_of_ms))
    )


def encode_demand(cache: BoardCache, board: Board, query: Query, as_of_ms: int) -> bytes:
    """Encode the answer for the series that match the query.

    The rows are decoded only if the query names one horizon, or if a note is added.
    """
    keys = read_demand_keys(board)
    asked = {name: query[name] for name in KEYS if query.get(name) is not None}
    _check_known_name("group", asked.get("group"), keys.groups)
    found, note = _find_demand_rows(keys, asked)
    rows: list[Any] = read_demand_rows(board, found)
    if query["horizon_s"] is not None or note:
        rows = [decode_row(row) for row in rows]
    if query["horizon_s"] is not None:
        rows = _select_horizon(rows, query["horizon_s"])
    if note:
        rows = [structs.replace(row, pool=asked["pool"]) for row in rows]
    return encode({"as_of_ms": as_of_ms, "series": rows} | ({"note": note} if note else {}))


def _find_demand_rows(keys: DemandKeys, asked: dict[str, str]) -> tuple[list[int], str]:
    """Return the rows of the matching series, and a note if `pool` names a queue.

    A queue without a pool matches that queue in all pools. A pool without a queue matches all queues in the
    pool. Raises UnknownEntity for a name that no series has.
    """
    scope = choose_demand_scope(asked.get("queue"), asked.get("pool"))
    _check_known_name("queue", asked.get("queue"), keys.by_queue)
    pool = scope.get("pool", "all")
    found = keys.find_matching_rows(asked | scope) if pool in keys.pools else []
    if not found and pool in keys.by_queue and pool != "all":
        return keys.find_matching_rows(asked | {"queue": pool, "pool": "all"}), QUEUE_HINT.format(pool)
    if pool not in keys.pools and keys.rows:
        pools, queues = (", ".join(sorted(names)[:NAMED]) for names in (keys.pools, keys.by_queue))
        raise UnknownEntity(f"no pool {pool[:200]!r}; pools are {pools}; for a queue set `queue`: queues are {queues}")
    return found, ""


def choose_demand_scope(queue: str | None, pool: str | None) -> dict[str, str]:
    """Return the queue or pool that a query names, or {} if it names neither.

    Raises a 422 problem if it names both, because a series belongs to a queue or to a pool.
    """
    if queue is None and pool is None:
        return {}
    if queue not in (None, "all") and pool not in (None, "all"):
        raise make_unprocessable_problem("pool", pool, "a queue excludes a pool: set `queue` or `pool`")
    return {"queue": queue or "all", "pool": pool or "all"}


def _check_known_name(name: str, value: str | None, names: Collection[str]) -> None:
    """Raise UnknownEntity for a queue or group that no series has."""
    if value is not None and names and value not in names:
        raise UnknownEntity(f"no {name} {value[:200]!r}; {name}s are {', '.join(sorted(names)[:NAMED])}")


def _select_horizon(rows: list[DemandRow], horizon_s: int) -> list[DemandRow]:
    """Return the rows reduced to one horizon. Raises a 422 problem if no row has it."""
    horizons = sorted({horizon for row in rows for horizon in row.horizons_s})
    if rows and horizon_s not in horizons:
        raise make_unprocessable_problem("horizon_s", horizon_s, "one of " + ", ".join(map(str, horizons)))
    return [_reduce_row(row, horizon_s) for row in rows if horizon_s in row.horizons_s]


def _reduce_row(row: DemandRow, horizon_s: int) -> DemandRow:
    """Return a row reduced to one horizon."""
    at = row.horizons_s.index(horizon_s)
    cut = structs.replace(row, horizons_s=[horizon_s], values=[[values[at]] for values in row.values])
    return structs.replace(cut, models=[row.models[at]], model=row.models[at]) if row.models else cut


async def answer_demand_record(request: Request, context: Context, query: Query) -> Response:
    """Answer with the history, the present forecast, and the forecast from about an hour ago."""
    cache, board = context.cache, context.cache.get_board()
    cache.get_section(board, "demand_record.keys")
    as_of_ms = cache.get_as_of_ms(board, "doc.demand_record")
    scope = {"queue": "all", "pool": "all"} | choose_demand_scope(query["queue"], query["pool"])
    note, fan = "", read_demand_record(board, _make_record_name(scope, query))
    if fan is None and scope["pool"] != "all":
        fan = read_demand_record(board, _make_record_name({"queue": scope["pool"], "pool": "all"}, query))
        note = QUEUE_HINT.format(scope["pool"])
    if fan is None:
        known = (
            ", ".join(sorted(msgspec.json.decode(cache.get_section(board, "demand_record.keys")))[:NAMED]) or "none yet"
        )
        name = _make_record_name(scope, query)[:200]
        raise UnknownEntity(f"no record of queue|target[|class[|pool]] {name!r}; there are: {known}")
    if note:
        scope["queue"] = scope["pool"]
    body = {"as_of_ms": as_of_ms, **scope, "target": query["target"], "class": query["class"], **fan}
    return make_aged_answer(context, board, as_of_ms, encode(body | ({"note": note} if note else {})))


def _make_record_name(scope: Mapping[str, str], query: Query) -> str:
    """Return the name of a record on the board. `DemandForecaster.answer_demand_record` publishes it."""
    return format_series_name(SeriesKey(scope["queue"], query["class"], pool=scope["pool"]), query["target"])


async def answer_demand_model(request: Request, context: Context, query: Query) -> Response:
    """Answer with the demand model: the constant demand, the bursts, and how long users wait."""
    cache, board = context.cache, context.cache.get_board()
    as_of_ms = cache.get_as_of_ms(board, "doc.demand_model")
    rows = cache.get_document(board, "doc.demand_model")["rows"]
    rows = [{"queue": row["pool"]} | row for row in rows]  # of a pipeline of an earlier version
    queues = {row["queue"] for row in rows}
    scope, note = choose_demand_scope(query["queue"], query["pool"]), ""
    _check_known_name("queue", query["queue"], queues)
    if scope.get("pool", "all") != "all":
        note = QUEUE_HINT.format(scope["pool"])
        if scope["pool"] not in queues and rows:
            raise UnknownEntity(
                f"no queue {scope['pool'][:200]!r}; the model is made by queue: {', '.join(sorted(queues)[:NAMED])}"
            )
    queue = scope.get("pool") if note else scope.get("queue")
    wanted = [(name, value) for name, value in (("queue", queue), ("class", query["class"])) if value is not None]
    rows = [row for row in rows if all(row[name] == value for name, value in wanted)]
    if note:
        rows = [row | {"pool": scope["pool"]} for row in rows]
    body = {"as_of_ms": as_of_ms, "rows": rows} | ({"note": note} if note else {})
    return make_aged_answer(context, board, as_of_ms, encode(body))


ROWS = (
    Row(
        "GET",
        "/v1/demand",
        answer_demand,
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
        answer_demand_record,
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
        answer_demand_model,
        "What a queue's demand is made of: floor, bands, bursts, mix, durations, waits, cold starts",
        "demand",
        params=MODEL_PARAMS,
        answer=DemandModel,
        problems=(404, 422, 503),
        example=demand_examples.MODEL,
    ),
)
