"""The API as a process: it listens, limits what clients may take, and ends on SIGTERM."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from functools import partial

import uvicorn

from service.api.app import create_app
from service.api.external_metrics import external_metrics_door
from service.api.grpc_extra import require_grpc
from service.api.hot_path import hot_protocol
from service.api.routes.context import Context
from service.config import ApiConfig, Config
from service.exit_reason import announce_ready, api_name
from service.http.addresses import Networks
from service.http.connections import ConnectionLimits, LimitedServer, allow_files, protocol_of
from service.http.listening import listen
from service.http.tls import Tls
from service.http.tls_door import TlsDoor
from service.process_memory import use_one_heap

logger = logging.getLogger(__name__)

GRACE_S = 5


class ApiServer(LimitedServer):
    """Ends its event streams before it waits for open connections."""

    def __init__(self, config: uvicorn.Config, context: Context, on_started: Callable[[], None]) -> None:
        super().__init__(config, on_started)
        self.context = context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.context.stream.close()
        await super().shutdown(sockets)


def limits_of(api: ApiConfig) -> ConnectionLimits:
    return ConnectionLimits(
        api.max_connections,
        api.header_timeout_s,
        api.body_timeout_s,
        api.max_connections_per_address,
        Networks(api.trusted_proxies, "api.trusted_proxies"),
    )


def also_by_grpc(context: Context, tls: Tls | None) -> contextlib.AbstractAsyncContextManager[None]:
    """The gRPC door where a port is configured. Raises ConfigError without its packages."""
    port = context.config.api.grpc_port
    if not port:
        return contextlib.nullcontext()
    require_grpc(port)
    from service.api.grpc_door import grpc_door

    return grpc_door(context, tls)


async def serve(config: Config) -> None:
    """Answer until SIGTERM or SIGINT, then finish what is under way. Run it on uvloop: `uvloop.run(serve(config))`."""
    use_one_heap()
    app = create_app(config, config.make_clock())
    context: Context = app.state.context
    limits = limits_of(config.api)
    tls = Tls(config.api) if config.api.tls_cert else None
    doors = (2 if tls else 1) + (2 if config.external_metrics.port else 0)
    allow_files(limits.max_connections * doors)  # over TLS, and those that have not greeted yet

    def refused(status: int) -> None:
        context.metrics.refused_connections.labels(str(status)).inc()
        if status == 503:  # nobody has room: what was to come by this connection may be a start
            context.listening.interrupt()

    settings = uvicorn.Config(
        app,
        http=hot_protocol(context, protocol_of(limits, refused)),
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=30,
        backlog=1024,
        forwarded_allow_ips=list(config.api.trusted_proxies),
    )
    server = ApiServer(settings, context, partial(announce_ready, config.folder, api_name(config)))
    context.metrics.max_connections.set(limits.max_connections)
    context.metrics.connections.set_function(lambda: len(server.server_state.connections))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    beside = external_metrics_door(context, limits, lambda: setattr(server, "should_exit", True))
    with listen(config.api.host, config.api.port, "api.host, api.port") as sock:
        logger.info("listening on %s", config.url)
        async with beside, also_by_grpc(context, tls):
            if tls is None:
                await server.serve([sock])
            else:
                context.metrics.watch_certificate(lambda: tls.until_s)
                dropped = context.metrics.refused_connections.labels("no_tls").inc
                async with tls.watched(), TlsDoor(server, tls, limits, dropped).open(sock):
                    await server.serve([])
    logger.info("stopped")
