"""The Kubernetes API of external metrics. It has a port of its own for the cluster's API server only.

Every client must present a certificate of the cluster's request-header authority. So the header
X-Remote-User is trustworthy: the API server has admitted that user. Discovery never reads a board. While
discovery fails, Kubernetes can delete no namespace of the cluster.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fleetcast.fleet.errors import FleetcastError, RequestError, StaleError, UnknownEntity
from fleetcast.schedulers.external_metrics import (
    GROUP,
    VERSION,
    MetricQuestion,
    make_api_group,
    make_api_resource_list,
    make_failure_status,
)
from fleetcast.service.api.answerers import Answerers
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.telemetry import ApiMetrics
from fleetcast.service.http.certificates import NAMES
from fleetcast.service.http.connection_pool import ConnectionPool
from fleetcast.service.http.connections import LimitedServer, make_limited_protocol
from fleetcast.service.http.listening import bind_socket
from fleetcast.service.http.problems import is_out_of_files
from fleetcast.service.http.tls import Tls

logger = logging.getLogger(__name__)

SECTION = "external_metrics"
GRACE_S = 5
RETRY_AFTER_S = "5"
KEEP_S = 120  # longer than an API server keeps a connection that it does not use
REASONS: Mapping[int, str] = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    503: "ServiceUnavailable",
}
Handler = Callable[[Request], bytes]


def create_external_metrics_app(answerers: Answerers, names: tuple[str, ...], metrics: ApiMetrics) -> Starlette:
    """Make the application that serves external metrics.

    `names`: the common names that a caller's certificate may have. If it is empty, every name is allowed.
    """

    def make_endpoint(handler: Handler) -> Callable[[Request], Any]:
        async def answer_request(request: Request) -> Response:
            began_s = time.perf_counter()
            _admit_api_server(request, names)
            answer = Response(handler(request), media_type="application/json")
            metrics.observe(f"/apis/{GROUP}", request.method, 200, time.perf_counter() - began_s)
            return answer

        return answer_request

    def answer_metric(request: Request) -> bytes:
        asked = MetricQuestion(request.path_params["metric"], request.query_params.get("labelSelector", ""))
        return answerers.answer_verb(SECTION, "value", msgspec.json.encode(asked))[0]

    async def answer_error(request: Request, error: Exception) -> Response:
        code, message = _describe_error(error)
        metrics.observe(f"/apis/{GROUP}", request.method, code, 0.0)
        body = msgspec.json.encode(make_failure_status(code, REASONS.get(code, "Unknown"), message))
        headers = {"retry-after": RETRY_AFTER_S} if code == 503 else {}
        return Response(body, code, headers, "application/json")

    groups = {"kind": "APIGroupList", "apiVersion": "v1", "groups": [make_api_group()]}
    documents = {"/apis": groups, f"/apis/{GROUP}": make_api_group(), f"/apis/{VERSION}": make_api_resource_list()}
    routes = [
        Route(path, make_endpoint(_make_constant_handler(msgspec.json.encode(document))))
        for path, document in documents.items()
    ]
    routes.append(Route(f"/apis/{VERSION}/namespaces/{{namespace}}/{{metric}}", make_endpoint(answer_metric)))
    return Starlette(
        routes=routes, exception_handlers=dict.fromkeys((HTTPException, FleetcastError, OSError), answer_error)
    )


def _make_constant_handler(body: bytes) -> Handler:
    return lambda request: body


def _admit_api_server(request: Request, names: tuple[str, ...]) -> None:
    """Raise HTTPException unless the caller is the API server.

    The certificate must be valid and have one of the `names`. The request must state the user.
    """
    shown: tuple[str, ...] = request.scope.get(NAMES, ())
    if not shown or not request.headers.get("x-remote-user"):
        raise HTTPException(401, "expected the API server's aggregator, with the user that asks in X-Remote-User")
    if names and shown[0] not in names:
        raise HTTPException(403, f"certificate of {shown[0][:200]!r}: external_metrics.names has {', '.join(names)}")
    logger.debug("asked by %s", request.headers["x-remote-user"])


def _describe_error(error: Exception) -> tuple[int, str]:
    match error:
        case HTTPException():
            return error.status_code, error.detail
        case UnknownEntity():
            return 404, str(error)
        case RequestError():
            return 400, str(error)
        case StaleError():
            return 503, str(error)
        case OSError() if is_out_of_files(error):
            return 503, "no file descriptor is left: ask again"
    raise error


@contextlib.asynccontextmanager
async def serve_external_metrics(
    context: Context, pool: ConnectionPool, ended: Callable[[], None]
) -> AsyncIterator[None]:
    """Serve external metrics while the context is open, if a port is configured. Raises ConfigError.

    `ended` is called when the server ends.
    """
    config = context.config.external_metrics
    if not config.port:
        yield
        return
    tls = Tls(config, SECTION, must_show=True)
    context.metrics.publish_certificate_expiry(lambda: tls.until_s)
    settings = uvicorn.Config(
        create_external_metrics_app(context.answerers, config.names, context.metrics),
        http=make_limited_protocol(pool, context.metrics.count_refused_connection),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_S,
    )
    dropped = context.metrics.refused_connections.labels("no_tls").inc
    with bind_socket(context.config.api.host, config.port, "api.host, external_metrics.port") as sock:
        server = LimitedServer(settings, sock, pool, tls, dropped)
        async with tls.reload_while_open():
            work = asyncio.ensure_future(server.serve())
            work.add_done_callback(lambda _: ended())
            while not (server.started or work.done()):
                await asyncio.sleep(0.01)
            logger.info("external metrics on port %d", config.port)
            try:
                yield
            finally:
                server.should_exit = True
                await work
