"""The api process: it listens, limits what clients may use, and ends on SIGTERM."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Callable

import uvicorn

from fleetcast.service.api.app import create_app
from fleetcast.service.api.external_metrics import serve_external_metrics
from fleetcast.service.api.grpc_extra import require_grpc
from fleetcast.service.api.hot_path import make_hot_protocol
from fleetcast.service.api.refused_events import record_refused_event_request
from fleetcast.service.api.routes.context import Context
from fleetcast.service.config import ApiConfig, Config
from fleetcast.service.exit_reason import announce_ready, make_api_name
from fleetcast.service.http.addresses import Networks
from fleetcast.service.http.connection_pool import ConnectionLimits, ConnectionPool, fit_limits_to_files
from fleetcast.service.http.connections import LimitedProtocol, LimitedServer, make_limited_protocol
from fleetcast.service.http.listening import bind_socket
from fleetcast.service.http.tls import Tls

logger = logging.getLogger(__name__)

GRACE_S = 5


class ApiServer(LimitedServer):
    """The HTTP server of the api. At shutdown it first ends its event streams, then waits for open requests."""

    def __init__(
        self,
        config: uvicorn.Config,
        sock: socket.socket,
        pool: ConnectionPool,
        tls: Tls | None,
        context: Context,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config, sock, pool, tls, context.metrics.refused_connections.labels("no_tls").inc, on_started)
        self.context = context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.context.streams.close()
        await super().shutdown(sockets)


def make_connection_limits(api: ApiConfig) -> ConnectionLimits:
    return ConnectionLimits(
        api.max_connections,
        api.header_timeout_s,
        api.body_timeout_s,
        api.max_connections_per_address,
        Networks(api.trusted_proxies, "api.trusted_proxies"),
    )


def serve_grpc_if_configured(context: Context, pool: ConnectionPool) -> contextlib.AbstractAsyncContextManager[None]:
    """Serve gRPC while the context is open, if a port is configured.

    Raises ConfigError if the packages of the gRPC extra are missing.
    """
    port = context.config.api.grpc_port
    if not port:
        return contextlib.nullcontext()
    require_grpc(port)
    from fleetcast.service.api.grpc_door import make_grpc_tls, serve_grpc

    return serve_grpc(context, pool, make_grpc_tls(context.config.api))


def _announce_port(config: Config) -> None:
    """Report that the port accepts connections. Scripts and tests wait for this line in the log."""
    announce_ready(config.folder, make_api_name(config))
    logger.info("listening on %s", config.url)


def make_api_protocol(context: Context, pool: ConnectionPool) -> type[LimitedProtocol]:
    """Make the protocol class of the api's HTTP connections."""
    turned_away = functools.partial(record_refused_event_request, context)
    return make_hot_protocol(
        context, make_limited_protocol(pool, context.metrics.count_refused_connection, turned_away)
    )


async def serve(config: Config) -> None:
    """Run the api until SIGTERM or SIGINT, then finish the open requests.

    Run it on uvloop: `uvloop.run(serve(config))`.
    """
    app = create_app(config, config.make_clock())
    context: Context = app.state.context
    tls = Tls(config.api) if config.api.tls_cert else None
    pool = ConnectionPool(
        fit_limits_to_files(make_connection_limits(config.api)), context.metrics.count_refused_connection
    )
    settings = uvicorn.Config(
        app,
        http=make_api_protocol(context, pool),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=30,
        forwarded_allow_ips=list(config.api.trusted_proxies),
    )
    context.metrics.max_connections.set(pool.limits.max_connections)
    context.metrics.connections.set_function(lambda: pool.used)
    with bind_socket(config.api.host, config.api.port, "api.host, api.port") as sock:
        started = functools.partial(_announce_port, config)
        server = ApiServer(settings, sock, pool, tls, context, started)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
        async with contextlib.AsyncExitStack() as stack:
            ended = functools.partial(setattr, server, "should_exit", True)
            await stack.enter_async_context(serve_external_metrics(context, pool, ended))
            await stack.enter_async_context(serve_grpc_if_configured(context, pool))
            if tls is not None:
                context.metrics.publish_certificate_expiry(lambda: tls.until_s)
                await stack.enter_async_context(tls.reload_while_open())
            await server.serve()
    logger.info("stopped")
