"""The placer's HTTP routes about queues: their state, a new queue file, reasons for waiting, and charges."""

from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import RequestError
from fleetcast.service.answers.queues import Charges
from fleetcast.service.http.request_body import read_raw_body
from fleetcast.service.http.table import JSON, Param, Query, encode
from fleetcast.service.placer.context import PlacerContext
from fleetcast.service.placer.own_queues import OwnQueues
from fleetcast.service.placer.queue_answers import format_charges_csv

NOW = {"age": "0"}
CSV = "text/csv; charset=utf-8"
LATEST_MS = 2**53
DRY_RUN = Param("dry_run", str, "only say what would change", "false", choices=("true", "false"))
BY = Param("by", str, "whose charges", "queue", choices=("queue", "user", "class", "pool"))
FROM = Param("from", int, "from this time on, Unix ms; a week ago", None, least=0, most=LATEST_MS)
TO = Param("to", int, "until this time, Unix ms; now", None, least=0, most=LATEST_MS)
FORMAT = Param("format", str, "of the answer", "json", choices=("json", "csv"))
CHARGE_PARAMS = (BY, FROM, TO, FORMAT)


async def answer_queues(request: Request, context: PlacerContext, query: Query) -> Response:
    own = OwnQueues(request, context.service)
    answer = own.redact_queues(context.admin.answer_queues(own.caller.queues))
    return Response(encode(answer), 200, {**NOW, "etag": f'"{answer.generation}"'}, media_type=JSON)


async def put_queues(request: Request, context: PlacerContext, query: Query) -> Response:
    try:
        text = (await read_raw_body(request, context.service.config.api.max_body_bytes)).decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the file is no text in UTF-8: {error}") from None
    generation = request.headers.get("if-match", "").strip().removeprefix("W/").strip('"')
    if not generation:
        raise RequestError("If-Match is missing: send the generation that GET /v1/queues returned, or *", "If-Match")
    dry_run = query["dry_run"] == "true"
    change = await context.admin.put_file(text, generation, context.get_caller(request), dry_run)
    if not dry_run:
        context.queue_changed()
    return Response(encode(change), media_type=JSON)


async def answer_why(request: Request, context: PlacerContext, query: Query) -> Response:
    own, request_id = OwnQueues(request, context.service), request.path_params["request_id"]
    own.check_readable(request_id)
    answer = own.redact_why(context.admin.answer_why(request_id, context.starts.find_blockers))
    return Response(encode(answer), 200, NOW, media_type=JSON)


async def answer_charges(request: Request, context: PlacerContext, query: Query) -> Response:
    own = OwnQueues(request, context.service).filter_charges
    answer: Charges = context.admin.answer_charges(query["by"], query["from"], query["to"], own)
    if query["format"] == "csv":
        return Response(format_charges_csv(answer), 200, NOW, media_type=CSV)
    return Response(encode(answer), 200, NOW, media_type=JSON)
