"""POST /api/v1/write: Prometheus remote write 1.0 and 2.0.

A request is written to disk unchanged, and only then acknowledged. The api checks only that the samples
are readable. The pipeline finds their series. A sender retries after 5xx and 429, and drops samples
after other 4xx. So the answer is 503 for a full disk or a long backlog, and 400 for an unreadable body.
"""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.inbox.segments import RecordKind
from fleetcast.ingest.remote_write.decoder import MAX_UNPACKED_BYTES
from fleetcast.ingest.remote_write.request import Version, WriteRequest, parse_write_request
from fleetcast.ingest.remote_write.snappy import read_unpacked_size, unpack
from fleetcast.service.api.routes.context import Context
from fleetcast.service.http.access import Scope
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.request_body import get_body_lease, read_raw_body
from fleetcast.service.http.table import NO_STORE, Query, Row

PROTOBUF = "application/x-protobuf"
MESSAGES = {
    "": Version.V1,
    "prometheus.writerequest": Version.V1,
    "io.prometheus.write.v2.request": Version.V2,
}
KINDS = {Version.V1: RecordKind.WRITE, Version.V2: RecordKind.WRITE_V2}
WRITTEN = "x-prometheus-remote-write-{}-written"
IN_A_THREAD_BYTES = 131_072  # unpacked
EXPECTED = f"{PROTOBUF}, and no other proto= than prometheus.WriteRequest or io.prometheus.write.v2.Request"


async def answer_remote_write(request: Request, context: Context, query: Query) -> Response:
    """Accept all samples of a request, or refuse the whole request."""
    writer = context.get_sample_writer()
    version = _parse_version(request.headers.get("content-type", ""))
    _check_coding(request.headers.get("content-encoding", ""))
    body = await read_raw_body(request, context.config.api.max_body_bytes)
    try:
        size_bytes = read_unpacked_size(body)
        if size_bytes <= MAX_UNPACKED_BYTES:
            get_body_lease(request).grow(size_bytes)
        if size_bytes < IN_A_THREAD_BYTES:
            taken = decode_write_request(body, version)
        else:
            taken = await asyncio.to_thread(decode_write_request, body, version)
    except RecordError as error:
        context.metrics.refused.labels(error.reason).inc()
        raise Problem(413 if error.reason == "too_large" else 400, error.reason, str(error)) from None
    if len(taken.of):
        await writer.append([body], context.clock.now_ms(), KINDS[version])
    context.metrics.written.labels(f"{version}.0").inc(len(taken.of))
    return Response(
        None, 204, {"cache-control": NO_STORE} | (_make_written_headers(taken) if version is Version.V2 else {})
    )


def decode_write_request(body: bytes, version: Version) -> WriteRequest:
    """Unpack and decode a request body. Raises RecordError if it is unreadable."""
    return parse_write_request(unpack(body, MAX_UNPACKED_BYTES), version)


def _parse_version(content_type: str) -> Version:
    """Return the protocol version that a content type names. Raises problem 415 if it names no known version."""
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    named = {key.strip(): value.strip().strip('"') for key, _, value in (part.partition("=") for part in parameters)}
    version = MESSAGES.get(named.get("proto", ""))
    if kind != PROTOBUF or version is None:
        raise Problem(415, "unknown_media_type", f"content-type {content_type[:120]!r}: expected {EXPECTED}")
    return version


def _check_coding(coding: str) -> None:
    """Check that the body is compressed with snappy's block format. Raises problem 415.

    The protocol knows no other encoding. A sender of version 1.0 need not name it.
    """
    if coding.strip().lower() not in ("snappy", ""):
        detail = f"content-encoding {coding[:40]!r}: remote write is packed with snappy, and nothing else"
        raise Problem(415, "unknown_coding", detail, headers={"accept-encoding": "snappy"})


def _make_written_headers(taken: WriteRequest) -> dict[str, str]:
    """Return headers with the numbers of stored records, for a sender of version 2.0.

    Samples are stored. Histograms and exemplars are not.
    """
    counts = {"samples": len(taken.of), "histograms": 0, "exemplars": 0}
    return {WRITTEN.format(what): str(count) for what, count in counts.items()}


ROWS = (
    Row(
        "POST",
        "/api/v1/write",
        answer_remote_write,
        "Prometheus remote write 1.0 and 2.0: snappy, protobuf",
        "samples",
        scope=Scope.EVENTS,
        empty=(204,),
        body=(bytes,),
        body_example="snappy(prometheus.WriteRequest)",
        takes=(PROTOBUF, f"{PROTOBUF};proto=io.prometheus.write.v2.Request"),
        problems=(400, 413, 415, 503),
    ),
)
