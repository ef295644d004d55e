"""GET /v1/stream: server-sent events that announce new data."""

import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from fleetcast.service.api.broadcaster import MAX_CLIENTS, EventBroadcaster
from fleetcast.service.api.routes.context import Context
from fleetcast.service.http.access import get_admitted_caller
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.table import Query, Row


async def answer_stream(request: Request, context: Context, query: Query) -> Response:
    """Stream events to one client until it disconnects or the server stops."""
    if context.streams.clients >= MAX_CLIENTS:
        raise Problem(503, "too_many_streams", f"{MAX_CLIENTS} streams are open", headers={"retry-after": "10"})
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    broadcaster = context.streams.find_broadcaster(get_admitted_caller(request).queues)
    events = _stream_and_count(context, broadcaster, context.access.make_caller_headers(request))
    return StreamingResponse(events, headers=headers, media_type="text/event-stream")


async def _stream_and_count(
    context: Context, broadcaster: EventBroadcaster, placer_headers: dict[str, str]
) -> AsyncIterator[bytes]:
    context.metrics.streams.inc()
    try:
        async with contextlib.aclosing(broadcaster.stream_events(placer_headers)) as events:
            async for part in events:
                yield part
    finally:
        context.metrics.streams.dec()


ROWS = (
    Row(
        "GET",
        "/v1/stream",
        answer_stream,
        "Server-sent events: `board` for a new board, `hard` for hard signals, `action` for changed actions",
        "fleet",
        answer=str,
        media_type="text/event-stream",
        example='id: 7\nevent: board\ndata: {"as_of_ms":1760000000000,"sequence":7}\n\n',
        problems=(503,),
        by_queue=True,
    ),
)
