"""POST /v1/webhooks/nvsentinel: accept messages of NVSentinel's event exporter.

The api translates them into events on arrival.
"""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from fleetcast.ingest.health.nvsentinel import HealthEnvelope, decode
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
from fleetcast.service.http.table import Query, Row


async def answer_nvsentinel(request: Request, context: Context, query: Query) -> Response:
    """Accept every good event of the body."""
    context.get_event_writer()
    try:
        body = await read_event_body(request, context)
    except Problem as problem:
        await record_unreadable_body(context, problem)
        raise
    now_ms = context.clock.now_ms()
    limit_ms = round(context.config.pipeline.future_limit_s * 1000)
    headers = dict(request.headers)
    if len(body) < IN_A_THREAD_BYTES:
        decoded = decode(body, headers, now_ms, limit_ms)
    else:
        decoded = await asyncio.to_thread(decode, body, headers, now_ms, limit_ms)
    return await accept_records(request, context, decoded, now_ms)


ROWS = (
    Row(
        "POST",
        "/v1/webhooks/nvsentinel",
        answer_nvsentinel,
        "Health events of NVSentinel's event exporter: CloudEvents 1.0, one, a batch, or in headers",
        "events",
        scope=Scope.EVENTS,
        status=202,
        body=(HealthEnvelope,),
        takes=("application/cloudevents+json",),
        body_example={
            "specversion": "1.0",
            "id": "fe5302cf-1887-48a9-8e6e-117d366a7344",
            "type": "com.nvidia.nvsentinel.health.v1",
            "source": "nvsentinel://east/healthevents",
            "time": "2025-11-21T04:12:09Z",
            "data": {
                "healthEvent": {
                    "nodeName": "n042",
                    "agent": "gpu-health-monitor",
                    "componentClass": "GPU",
                    "checkName": "GpuNvlinkWatch",
                    "isFatal": True,
                    "isHealthy": False,
                    "message": "NVLink recovery errors on GPU 7",
                    "recommendedAction": "CONTACT_SUPPORT",
                    "errorCode": ["DCGM_FR_NVLINK_ERROR_THRESHOLD"],
                    "entitiesImpacted": [{"entityType": "GPU", "entityValue": "7"}],
                    "generatedTimestamp": "2025-11-21T04:12:09.123Z",
                }
            },
        },
        answer=EventsAnswer,
        example={"accepted": 1, "duplicates": 0, "rejected": []},
        problems=(400, 413, 415, 422, 429, 503),
    ),
)
