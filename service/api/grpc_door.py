"""The gRPC port of an api process: one asyncio server, with a servicer for each foreign protocol.

It has the same address, certificate and callers as the HTTP port. A servicer translates messages to the
verbs of an adapter and back. It answers at once, from the board in memory. Import this module only if
the gRPC extra is installed (`require_grpc`). `service/api/grpc_relay.py` accepts the connections within
the limits of the process.
"""

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from fleetcast.fleet.errors import FleetcastError
from fleetcast.service.api.grpc_expander import EXPANDER
from fleetcast.service.api.grpc_keda import KEDA
from fleetcast.service.api.grpc_relay import FILES, GrpcConnections
from fleetcast.service.api.grpc_service import Call, GrpcService, Watch
from fleetcast.service.api.routes.context import Context
from fleetcast.service.config import ApiConfig
from fleetcast.service.http.access import Scope
from fleetcast.service.http.connection_pool import ConnectionPool
from fleetcast.service.http.door import Listener
from fleetcast.service.http.listening import bind_socket
from fleetcast.service.http.problems import Problem, convert_to_problem
from fleetcast.service.http.tls import Tls

logger = logging.getLogger(__name__)

SERVICES = (KEDA, EXPANDER)
GRACE_S = 1.0
BUG = 500
CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
IDLE_S = 300.0  # wall; then a connection without calls is closed, and its client opens one for its next call


def make_grpc_tls(api: ApiConfig) -> Tls | None:
    """Return the TLS context of the gRPC port, or None without a certificate.

    With `api.client_ca`, every caller needs a certificate.
    """
    return Tls(api, must_show=bool(api.client_ca), protocol="h2") if api.tls_cert else None


@contextlib.asynccontextmanager
async def serve_grpc(context: Context, pool: ConnectionPool, tls: Tls | None) -> AsyncIterator[None]:
    """Serve gRPC while the context is open. Raises ConfigError if the address is unavailable."""
    api = context.config.api
    server = grpc.aio.server(options=_make_server_options(api), maximum_concurrent_rpcs=2 * api.max_connections)
    dropped = context.metrics.refused_connections.labels("no_tls").inc
    with (
        bind_socket(api.host, api.grpc_port, "api.host, api.grpc_port") as sock,
        GrpcConnections(
            context.config.folder, api.grpc_port, pool, context.metrics.count_refused_connection
        ) as connections,
    ):
        server.add_generic_rpc_handlers(tuple(_make_handlers(service, context, connections) for service in SERVICES))
        server.add_insecure_port(connections.target)
        await server.start()
        async with contextlib.AsyncExitStack() as stack:
            if tls is not None:
                await stack.enter_async_context(tls.reload_while_open())
            door = Listener(sock, pool, connections.make_connection, tls, dropped, FILES)
            door.open()
            logger.info("gRPC on %s:%d", api.host, api.grpc_port)
            try:
                yield
            finally:
                await door.close()
                await server.stop(GRACE_S)


def _make_server_options(api: ApiConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", api.max_body_bytes),
        ("grpc.server_handshake_timeout_ms", round(1000 * api.header_timeout_s)),
        ("grpc.max_connection_idle_ms", round(1000 * IDLE_S)),
        ("grpc.keepalive_time_ms", 60_000),  # a caller that is gone holds no stream
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.enable_channelz", 0),  # the library would gather statistics of each connection that no service shows
    ]


def _make_handlers(service: GrpcService, context: Context, connections: GrpcConnections) -> Any:
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            _make_unary_handler(_GrpcMethod(service, name, context, connections), call)
        )
        for name, call in service.calls.items()
    }
    methods |= {
        name: grpc.unary_stream_rpc_method_handler(
            _make_stream_handler(_GrpcMethod(service, name, context, connections), watch)
        )
        for name, watch in service.streams.items()
    }
    return grpc.method_handlers_generic_handler(service.service, methods)


def _make_unary_handler(guest: "_GrpcMethod", call: Call) -> Callable[[bytes, Any], Any]:
    async def answer_call(body: bytes, rpc: Any) -> bytes:
        began = time.perf_counter()
        try:
            with await guest.admit_caller(rpc):
                answer = call(guest.ask_answerer, body)
        except Exception as error:
            await guest.abort_call(rpc, error, began)
        guest.count_call(200, began)
        return answer

    return answer_call


def _make_stream_handler(guest: "_GrpcMethod", watch: Watch) -> Callable[[bytes, Any], Any]:
    most = guest.context.config.api.max_connections
    opened: set[Any] = set()

    async def stream_answers(body: bytes, rpc: Any) -> AsyncIterator[bytes]:
        began = time.perf_counter()
        try:
            with await guest.admit_caller(rpc):
                if len(opened) >= most:  # they stay: half of all calls, so that callers that poll still find room
                    raise Problem(
                        429, "too_many_streams", f"{most:,} streams are open (api.max_connections): poll instead"
                    )
                opened.add(rpc)
                async for answer in watch(guest.ask_answerer, body):
                    yield answer
        except Exception as error:
            await guest.abort_call(rpc, error, began)
        finally:
            opened.discard(rpc)

    return stream_answers


class _GrpcMethod:
    """One method of a gRPC service. It admits callers, counts calls and reports errors."""

    def __init__(self, service: GrpcService, name: str, context: Context, connections: GrpcConnections) -> None:
        self.context = context
        self._service, self._connections = service, connections
        self._route = f"/{service.service}/{name}"

    async def admit_caller(self, rpc: Any) -> contextlib.AbstractContextManager[None]:
        """Admit the caller of an RPC if it may read. Raises problems 401, 403 and 429, as over HTTP.

        While the returned context is open, the caller's connection keeps its places.
        """
        connection = self._connections.find_connection(rpc.peer())
        if self._service.answerer not in self.context.config.api.grpc_open:
            sent = [(key.encode(), _encode_metadata(value)) for key, value in rpc.invocation_metadata() or ()]
            headers = [(key, value) for key, value in sent if key == b"authorization"]
            await self.context.access.admit_by_headers(
                connection.host, "GET", headers, Scope.READ, connection.list_certificate_names()
            )
        return connection

    def ask_answerer(self, verb: str, question: bytes) -> bytes:
        answer, _ = self.context.answerers.answer_verb(self._service.answerer, verb, question)
        return answer

    def count_call(self, status: int, began: float) -> None:
        self.context.metrics.observe(self._route, "GRPC", status, time.perf_counter() - began)

    async def abort_call(self, rpc: Any, error: Exception, began: float) -> NoReturn:
        """End the call with a gRPC status and the error's reason."""
        status, why = BUG, "an error of ours; the log of the api has it"
        if isinstance(error, DecodeError):
            status, why = 422, f"no message of {self._route}: {error}"
        elif isinstance(error, FleetcastError):
            problem = convert_to_problem(error)
            status, why = problem.status, problem.detail
        else:
            logger.error("%s: a bug", self._route, exc_info=error)
        self.count_call(status, began)
        await rpc.abort(CODES.get(status, grpc.StatusCode.INTERNAL), why[:1000])
        raise AssertionError("abort raises")


def _encode_metadata(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
