"""Demand: forecasts by pool and target, and what became of the earlier ones."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fleet.errors import UnknownEntity
from service.problems import unprocessable
from service.routes import shapes
from service.routes.context import Context
from service.routes.table import Param, Query, Row, answer, encode

TARGETS = ("arriving", "running", "queued", "wanted", "request_rate", "arriving_jobs", "active_nodes")

FILTERS = (
    Param("pool", str, "only this pool; `all` is the whole fleet"),
    Param("class", str, "only this job class; `all` is every class"),
    Param("group", str, "only this group"),
    Param("target", str, "only this target", choices=TARGETS),
    Param("horizon_s", int, "only this horizon", least=1),
)
RECORD_PARAMS = (
    Param("pool", str, "whose record", "all"),
    Param("target", str, "of what", "running", choices=TARGETS),
)


async def demand(request: Request, context: Context, query: Query) -> Response:
    """Forecast quantiles of the series that match."""
    feed, board = context.feed, context.feed.board()
    as_of_ms = feed.as_of_ms(board, "doc.demand")
    key = ("demand", *(query[param.name] for param in FILTERS))

    def make() -> bytes:
        document = feed.document(board, "doc.demand")
        return encode({**document, "as_of_ms": as_of_ms, "series": _select(document["series"], query)})

    return answer(context, board, as_of_ms, feed.kept(board, key, make))


def _select(series: list[dict[str, Any]], query: Query) -> list[dict[str, Any]]:
    pools = sorted({row["pool"] for row in series})
    if query["pool"] is not None and series and query["pool"] not in pools:
        raise UnknownEntity(f"no pool {query['pool'][:200]!r}; pools are {', '.join(pools[:20])}")
    wanted = [(name, query[name]) for name in ("pool", "class", "group", "target") if query[name] is not None]
    rows = [row for row in series if all(row.get(name) == value for name, value in wanted)]
    if query["horizon_s"] is None:
        return rows
    horizons = sorted({horizon for row in rows for horizon in row["horizons_s"]})
    if rows and query["horizon_s"] not in horizons:
        raise unprocessable("horizon_s", query["horizon_s"], "one of " + ", ".join(map(str, horizons)))
    return [_at(row, query["horizon_s"]) for row in rows if query["horizon_s"] in row["horizons_s"]]


def _at(row: Mapping[str, Any], horizon_s: int) -> dict[str, Any]:
    """A series cut to one horizon."""
    at = row["horizons_s"].index(horizon_s)
    return {**row, "horizons_s": [horizon_s], "values": [[values[at]] for values in row["values"]]}


async def record(request: Request, context: Context, query: Query) -> Response:
    """History, the forecast now and the one issued about an hour ago."""
    feed, board = context.feed, context.feed.board()
    as_of_ms = feed.as_of_ms(board, "doc.demand_record")
    records = feed.document(board, "doc.demand_record")
    name = f"{query['pool']}|{query['target']}"
    if name not in records:
        known = ", ".join(sorted(records)[:20]) or "none yet"
        raise UnknownEntity(f"no record of pool|target {name[:200]!r}; there are: {known}")
    body = {"as_of_ms": as_of_ms, "pool": query["pool"], "target": query["target"], **records[name]}
    return answer(context, board, as_of_ms, encode(body))


ROWS = (
    Row(
        "GET",
        "/v1/demand",
        demand,
        "How many GPUs will be wanted, as quantiles by horizon",
        "demand",
        params=FILTERS,
        answer=shapes.Demand,
        problems=(404, 422, 503),
        example={
            "as_of_ms": 1760000000000,
            "series": [
                {
                    "pool": "all",
                    "class": "all",
                    "group": "all",
                    "target": "running",
                    "now": 812.0,
                    "model": "persistence",
                    "issued_ms": 1760000000000,
                    "horizons_s": [600, 3600],
                    "quantiles": [0.1, 0.5, 0.9],
                    "values": [[796.0, 760.0], [812.0, 808.0], [824.0, 872.0]],
                    "record": {"wql_vs_best_naive": 0.97, "coverage_80": 0.81, "origins": 3400},
                }
            ],
        },
    ),
    Row(
        "GET",
        "/v1/demand/record",
        record,
        "What was forecast and what then happened",
        "demand",
        params=RECORD_PARAMS,
        answer=shapes.DemandRecord,
        problems=(404, 422, 503),
        example={
            "as_of_ms": 1760000000000,
            "pool": "all",
            "target": "running",
            "history": [[1759999400000, 808.0], [1760000000000, 812.0]],
            "forecast": [[1760000600000, 780.0, 804.0, 812.0, 816.0, 832.0]],
            "old": [[1760000000000, 760.0, 800.0, 848.0]],
        },
    ),
)
