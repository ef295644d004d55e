"""POST /v1/webhooks/torchelastic: accept messages of the launchers torchelastic and NVRx.

The api translates them into events on arrival.
"""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from fleetcast.ingest.health.torchelastic import ElasticRecord, Sender, decode
from fleetcast.service.answers.events import EventsAnswer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.routes.events import (
    IN_A_THREAD_BYTES,
    accept_records,
    read_event_body,
    record_unreadable_body,
)
from fleetcast.service.http.access import Scope
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.table import Param, Query, Row

PARAMS = (
    Param("job", str, "the job's name, where run_id is not", ""),
    Param("attempt", int, "the scheduler's attempt; 0: torchelastic's restarts + 1", 0, least=0, most=2**31),
)


async def answer_torchelastic(request: Request, context: Context, query: Query) -> Response:
    """Accept every good record of the body. Records that change nothing are ignored."""
    context.get_event_writer()
    try:
        body = await read_event_body(request, context)
    except Problem as problem:
        await record_unreadable_body(context, problem)
        raise
    now_ms = context.clock.now_ms()
    limit_ms = round(context.config.pipeline.future_limit_s * 1000)
    sender, headers = Sender(query["job"], query["attempt"]), dict(request.headers)
    if len(body) < IN_A_THREAD_BYTES:
        decoded = decode(body, headers, sender, now_ms, limit_ms)
    else:
        decoded = await asyncio.to_thread(decode, body, headers, sender, now_ms, limit_ms)
    return await accept_records(request, context, decoded, now_ms)


ROWS = (
    Row(
        "POST",
        "/v1/webhooks/torchelastic",
        answer_torchelastic,
        "Events of torchelastic's agents, workers and rendezvous, and NVRx's cycles: one, a list, or JSON lines",
        "events",
        params=PARAMS,
        scope=Scope.EVENTS,
        status=202,
        body=(ElasticRecord,),
        body_example={
            "name": "torchelastic.worker.status.FAILED",
            "source": "WORKER",
            "timestamp": 1760000000000,
            "metadata": {
                "run_id": "train-42",
                "global_rank": 9,
                "group_rank": 1,
                "hostname": "n042",
                "state": "FAILED",
                "raw_error": '{"message": {"message": "RuntimeError: NCCL error: remote process exited"}}',
                "agent_restarts": 0,
            },
        },
        answer=EventsAnswer,
        example={"accepted": 1, "duplicates": 0, "rejected": []},
        problems=(400, 413, 415, 422, 429, 503),
    ),
)
