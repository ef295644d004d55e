"""POST /v1/kernel-log: accept lines of a node's kernel log, and translate them into node events."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.ingest.inbox.event_body import MAX_RECORDS, MAX_REJECTED, DecodedBody, DecodedRecord
from fleetcast.ingest.kernel_log.events import KernelReader
from fleetcast.ingest.node_names import check_name
from fleetcast.service.answers.events import EventsAnswer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.routes.events import (
    IN_A_THREAD_BYTES,
    accept_records,
    read_event_body,
    record_unreadable_body,
)
from fleetcast.service.http.access import Scope
from fleetcast.service.http.problems import Problem, make_unprocessable_problem
from fleetcast.service.http.table import Param, Query, Row, encode

MOST_OFFSET_S = 86_399.0

PARAMS = (
    Param("node", str, "whose log it is; without it each line must name its host"),
    Param("boot_ms", int, "when the node booted: for stamps since then", 0, least=0, most=2**53),
    Param("utc_offset_s", float, "zone of stamps without one", 0.0, least=-MOST_OFFSET_S, most=MOST_OFFSET_S),
)


async def answer_kernel_log(request: Request, context: Context, query: Query) -> Response:
    """Accept the lines about hardware, and ignore all others."""
    context.get_event_writer()
    node = query["node"] or ""
    try:
        if node:
            check_name(node)
        body = await read_event_body(request, context, "lines of a kernel log")
    except ConfigError:
        raise make_unprocessable_problem("node", node, "a node's name") from None
    except Problem as problem:
        await record_unreadable_body(context, problem)
        raise
    now_ms = context.clock.now_ms()
    reader = KernelReader(node, query["utc_offset_s"], boot_ms=float(query["boot_ms"]))
    if len(body) < IN_A_THREAD_BYTES:
        decoded = decode_kernel_log(body, reader, now_ms)
    else:
        decoded = await asyncio.to_thread(decode_kernel_log, body, reader, now_ms)
    return await accept_records(request, context, decoded, now_ms)


def decode_kernel_log(body: bytes, reader: KernelReader, now_ms: int) -> DecodedBody:
    """Decode the events and the bad lines of a kernel log.

    The numbers of bad lines follow those of the events.
    """
    events, bad = reader.read(body.splitlines(), now_ms)
    if len(events) > MAX_RECORDS or len(bad) > MAX_REJECTED:
        bad = [
            *bad[:MAX_REJECTED],
            RecordError("too_many", f"at most {MAX_RECORDS} events and {MAX_REJECTED} bad lines"),
        ]
    records = [DecodedRecord(index, encode(event), event) for index, event in enumerate(events[:MAX_RECORDS])]
    return DecodedBody(records, [(len(records) + index, error) for index, error in enumerate(bad)])


ROWS = (
    Row(
        "POST",
        "/v1/kernel-log",
        answer_kernel_log,
        "Lines of a node's kernel log (journald, dmesg, kmsg): XIDs, lost GPUs, NVLink, PCIe and InfiniBand errors",
        "events",
        params=PARAMS,
        scope=Scope.EVENTS,
        status=202,
        body=(str,),
        takes=("text/plain",),
        body_example="2025-11-21T04:12:09+0000 n042 kernel: NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus",
        answer=EventsAnswer,
        example={"accepted": 1, "duplicates": 0, "rejected": []},
        problems=(400, 413, 415, 422, 429, 503),
    ),
)
