"""The gRPC door of an api process: one asyncio server, a servicer for each foreign protocol.

It has the api's address, certificate and callers. A servicer translates messages to the verbs of an answerer and back,
and is answered at once, from the board in memory. Import this only where the extra is installed (`require_grpc`).
"""

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from fleet.errors import ConfigError, FleetcastError
from service.api.grpc_expander import EXPANDER
from service.api.grpc_keda import KEDA
from service.api.grpc_service import Call, GrpcService, Watch
from service.api.routes.context import Context
from service.config import ApiConfig
from service.http.access import Scope
from service.http.problems import Problem, as_problem
from service.http.tls import Tls, stamp_of

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
CERTIFICATE_NAMES = ("x509_common_name", "x509_subject_alternative_name")


@contextlib.asynccontextmanager
async def grpc_door(context: Context, tls: Tls | None) -> AsyncIterator[None]:
    """Answer meanwhile. ConfigError where the address is taken or not ours."""
    api = context.config.api
    server = grpc.aio.server(options=_options(api), maximum_concurrent_rpcs=2 * api.max_connections)
    server.add_generic_rpc_handlers(tuple(_handlers(service, context) for service in SERVICES))
    _listen(server, api, tls)
    await server.start()
    logger.info("gRPC on %s:%d", api.host, api.grpc_port)
    try:
        yield
    finally:
        await server.stop(GRACE_S)


def _options(api: ApiConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # a second process is told that the port is taken
        ("grpc.max_receive_message_length", api.max_body_bytes),
        ("grpc.server_handshake_timeout_ms", round(1000 * api.header_timeout_s)),
        ("grpc.keepalive_time_ms", 60_000),  # a caller that is gone holds no stream
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _listen(server: Any, api: ApiConfig, tls: Tls | None) -> None:
    host = f"[{api.host}]" if ":" in api.host else api.host
    address = f"{host}:{api.grpc_port}"
    try:
        if tls is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(api, tls))
    except RuntimeError:
        raise ConfigError(
            f"api.host, api.grpc_port = {address}: the address is taken or not ours: set another api.grpc_port"
        ) from None


def _credentials(api: ApiConfig, tls: Tls) -> Any:
    """Of the newest files that fit together, for each new connection. With `api.client_ca` every caller needs a
    certificate of its: gRPC cannot leave that to him."""
    shown = tls.stamp

    def changed() -> Any:
        nonlocal shown
        if tls.stamp == shown:
            return None
        made = _read_files(api)
        if stamp_of(api) != tls.stamp:  # they changed again meanwhile: what was read may not fit together
            return None
        shown = tls.stamp
        return made

    return grpc.dynamic_ssl_server_credentials(
        _read_files(api), changed, require_client_authentication=bool(api.client_ca)
    )


def _read_files(api: ApiConfig) -> Any:
    pair = Path(api.tls_key).read_bytes(), Path(api.tls_cert).read_bytes()
    authority = Path(api.client_ca).read_bytes() if api.client_ca else None
    return grpc.ssl_server_certificate_configuration([pair], authority)


def _handlers(service: GrpcService, context: Context) -> Any:
    methods = {name: grpc.unary_unary_rpc_method_handler(_unary(service, name, context)) for name in service.calls}
    methods |= {name: grpc.unary_stream_rpc_method_handler(_stream(service, name, context)) for name in service.streams}
    return grpc.method_handlers_generic_handler(service.service, methods)


def _unary(service: GrpcService, name: str, context: Context) -> Any:
    call: Call = service.calls[name]
    guest = _Guest(service, name, context)

    async def handle(body: bytes, rpc: Any) -> bytes:
        began = time.perf_counter()
        try:
            await guest.admit(rpc)
            answer = call(guest.ask, body)
        except Exception as error:
            await guest.refuse(rpc, error, began)
        guest.observe(200, began)
        return answer

    return handle


def _stream(service: GrpcService, name: str, context: Context) -> Any:
    watch: Watch = service.streams[name]
    guest, most = _Guest(service, name, context), context.config.api.max_connections
    opened: set[Any] = set()

    async def handle(body: bytes, rpc: Any) -> AsyncIterator[bytes]:
        began = time.perf_counter()
        try:
            await guest.admit(rpc)
            if len(opened) >= most:  # they stay: half of all calls, so that who polls still finds room
                raise Problem(429, "too_many_streams", f"{most:,} streams are open (api.max_connections): poll instead")
            opened.add(rpc)
            async for answer in watch(guest.ask, body):
                yield answer
        except Exception as error:
            await guest.refuse(rpc, error, began)
        finally:
            opened.discard(rpc)

    return handle


class _Guest:
    """Whoever calls one method."""

    def __init__(self, service: GrpcService, name: str, context: Context) -> None:
        self._service, self._context = service, context
        self._route = f"/{service.service}/{name}"

    async def admit(self, rpc: Any) -> None:
        """Problems 401, 403, 429. A caller reads, as by HTTP."""
        if self._service.answerer in self._context.config.api.grpc_open:
            return
        told = [(key.encode(), _bytes(value)) for key, value in rpc.invocation_metadata() or ()]
        known = rpc.auth_context()
        names = [name.decode("utf-8", "replace") for kind in CERTIFICATE_NAMES for name in known.get(kind, ())]
        headers = [(key, value) for key, value in told if key == b"authorization"]
        await self._context.access.admit_from(_host(rpc.peer()), "GET", headers, Scope.READ, names)

    def ask(self, verb: str, question: bytes) -> bytes:
        answer, _ = self._context.answerers.answer(self._service.answerer, verb, question)
        return answer

    def observe(self, status: int, began: float) -> None:
        self._context.metrics.observe(self._route, "GRPC", status, time.perf_counter() - began)

    async def refuse(self, rpc: Any, error: Exception, began: float) -> NoReturn:
        """Tell the caller why."""
        status, why = BUG, "an error of ours; the log of the api has it"
        if isinstance(error, DecodeError):
            status, why = 422, f"no message of {self._route}: {error}"
        elif isinstance(error, FleetcastError):
            problem = as_problem(error)
            status, why = problem.status, problem.detail
        else:
            logger.error("%s: a bug", self._route, exc_info=error)
        self.observe(status, began)
        await rpc.abort(CODES.get(status, grpc.StatusCode.INTERNAL), why[:1000])
        raise AssertionError("abort raises")


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _host(peer: str) -> str:
    """The address of `ipv4:10.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
