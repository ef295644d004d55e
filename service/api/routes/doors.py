"""Routes for the state of the adapters, and for their writes with time and reason.

The answers come from the files of the adapters process.
"""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import UnknownEntity
from fleetcast.service.adapter_records import AdapterRecords
from fleetcast.service.adapter_rows import read_adapter_rows
from fleetcast.service.answers.adapters import AdapterDetails, Adapters
from fleetcast.service.api.routes.context import Context
from fleetcast.service.http.table import JSON, NO_STORE, Param, Query, Row, encode

LIMIT = Param("limit", int, "At most this many writes.", 20, least=0, most=1000)
AS_OF_MS = 1760000000000
WRITE = {
    "time_ms": 1759999990000,
    "decision": "nodes-1759999990000-7",
    "adapter": "nodes",
    "mode": "write",
    "board": 812,
    "key": "n041",
    "field": "label fleetcast.io/risk",
    "seen": "low",
    "value": "high",
    "why": "risk 81% within 1 h: SM clock 990 MHz, usual 1,980",
    "outcome": "done",
}
ADAPTER = {
    "name": "nodes",
    "use": "nodes",
    "mode": "write",
    "kind": "writer",
    "board": 812,
    "seen_ms": 1759999999000,
    "wishes": 14,
    "writes": 14,
    "conflicts": 0,
    "errors": 0,
    "ours": 133,
    "held_back": 0,
    "withdrawn": False,
    "error": "",
    "last": WRITE,
}


def _make_answer(body: Adapters | AdapterDetails) -> Response:
    return Response(encode(body), 200, {"cache-control": NO_STORE}, JSON)


async def answer_adapters(request: Request, context: Context, query: Query) -> Response:
    rows = await asyncio.to_thread(read_adapter_rows, context.config)
    return _make_answer(Adapters(context.clock.now_ms(), rows))


async def answer_one_adapter(request: Request, context: Context, query: Query) -> Response:
    name = request.path_params["name"]
    rows = {row.name: row for row in await asyncio.to_thread(read_adapter_rows, context.config)}
    if name not in rows:
        raise UnknownEntity(f"no adapter {name!r}: there are {', '.join(rows)}")
    writes = await asyncio.to_thread(AdapterRecords(context.config.folder).read_newest_lines, name, query["limit"])
    return _make_answer(AdapterDetails(context.clock.now_ms(), rows[name], writes))


ROWS = (
    Row(
        "GET",
        "/v1/adapters",
        answer_adapters,
        "Doors to other schedulers: who answers, observes, writes; what was written last, what is held back",
        "adapters",
        answer=Adapters,
        example={"as_of_ms": AS_OF_MS, "rows": [ADAPTER]},
    ),
    Row(
        "GET",
        "/v1/adapters/{name}",
        answer_one_adapter,
        "One adapter and its newest writes, each with its reason and what became of it",
        "adapters",
        params=(LIMIT,),
        answer=AdapterDetails,
        problems=(404, 422),
        example={"as_of_ms": AS_OF_MS, "adapter": ADAPTER, "writes": [WRITE]},
    ),
)
