"""The API process: a FastAPI application over the board, the inbox and the placer.

The hot routes come first in the table, so that they are matched first; OpenAPI is made from the same table. A route
that somebody adds with FastAPI's own decorators is merged into it.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from functools import partial
from importlib import metadata
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fleet.clock import Clock
from fleet.errors import ConfigError, FleetcastError
from ingest.inbox import WRITES, Backlog, InboxWriter, read_events
from ingest.job_events import identity
from service.access import Access, Scope, default_scope, load_access
from service.addresses import Networks
from service.archived_jobs import ArchivedJobs
from service.board_mirror import TOKEN, BoardMirror
from service.body_budget import BodyBudget
from service.config import ApiConfig, Config
from service.connections import LimitedServer, Limits, allow_files, protocol_of
from service.feed import BoardFeed
from service.hot_path import hot_protocol
from service.last_words import why_ended
from service.link_key import link_key
from service.new_names import NewNames
from service.openapi import document
from service.placer_link import PlacerLink
from service.problems import Problem, as_problem
from service.process_memory import keep_one_heap
from service.recent import RecentIdentities
from service.routes import (
    adapters,
    checkpoint,
    console,
    demand,
    drain,
    estimate,
    events,
    fingerprints,
    fleet,
    gang_risk,
    health,
    interference,
    jobs,
    kernel_log,
    later,
    placements,
    remote_write,
    risk,
    stream,
    timeline,
    webhooks_nvsentinel,
    webhooks_slurm,
    webhooks_torchelastic,
)
from service.routes.context import Context
from service.routes.table import Row, encode, routes_of
from service.stream_hub import StreamHub
from service.telemetry import ApiMetrics
from service.tls import Tls
from service.tls_door import TlsDoor

logger = logging.getLogger(__name__)

EVENTS_REMEMBERED = 100_000
GRACE_S = 5

ROWS: tuple[Row, ...] = (
    *risk.ROWS,
    *timeline.ROWS,
    *drain.ROWS,
    *gang_risk.ROWS,
    *placements.ROWS,
    *adapters.ROWS,
    *events.ROWS,
    *remote_write.ROWS,
    *kernel_log.ROWS,
    *webhooks_nvsentinel.ROWS,
    *webhooks_slurm.ROWS,
    *webhooks_torchelastic.ROWS,
    *fleet.ROWS,
    *stream.ROWS,
    *demand.ROWS,
    *jobs.ROWS,
    *fingerprints.ROWS,
    *checkpoint.ROWS,
    *estimate.ROWS,
    *interference.ROWS,
    *later.ROWS,
    *jobs.JOB_ROWS,
    *health.ROWS,
)


def create_app(config: Config, clock: Clock, *, writer: str = "api", access: Access | None = None) -> FastAPI:
    """The application. `writer` names its segments in the inbox; it opens them when it starts.

    `access`: who may ask, by default as the environment says; ConfigError where that is not enough for `api.host`.
    """
    context = _context(config, clock, access_of(config) if access is None else access)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with _mirroring(context.mirror) if context.mirror else _inbox(context, writer):
            try:
                yield
            finally:
                await context.stream.close()
                await context.placer.close()

    rows = (
        *(_sent_on(row) if context.mirror else row for row in ROWS),
        Row("GET", "/openapi.json", _openapi, "This document", "docs", answer=dict),
        Row("GET", "/docs", console.docs(ROWS), "The routes as a page", "docs", answer=str, media_type="text/html"),
        *console.ROWS,
    )

    async def admit(request: Request) -> None:
        """For routes that somebody adds with FastAPI's decorators; those of the table ask by themselves."""
        await context.access.admit(request, default_scope(request.method))

    app = FastAPI(
        title="Fleetcast",
        version=metadata.version("fleetcast"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        lifespan=life,
        routes=list(routes_of(rows, context)),
        dependencies=[Depends(admit)],
        exception_handlers={HTTPException: _http_problem, FleetcastError: _tree_problem},
    )
    app.state.context = context

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            own = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = document(rows, app.version, own, needs_token=not context.access.is_open)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def _context(config: Config, clock: Clock, access: Access) -> Context:
    feed = BoardFeed(config.board)
    url = config.api.board
    if url:
        link = PlacerLink(url.removesuffix("/board"), f"the api at {url.removesuffix('/v1/board')}")
        mirror = BoardMirror(url, config.board, os.environ.get(TOKEN, ""))
    else:
        why = partial(why_ended, config.folder, "placer")
        link, mirror = PlacerLink(f"http://127.0.0.1:{config.placer.port}", why_ended=why), None
    metrics = ApiMetrics()
    bodies = BodyBudget(config.api.body_budget_bytes, metrics.refused_bodies.inc)
    metrics.body_bytes.set_function(lambda: bodies.used_bytes)
    metrics.body_budget_bytes.set(config.api.body_budget_bytes)
    recent = RecentIdentities()
    names = NewNames(config.limits, feed, recent, clock)
    kept = config, clock, feed, link, StreamHub(feed), metrics, recent, names
    access.failed = lambda reason: metrics.auth_failures.labels(reason).inc()
    backlog = Backlog(config.inbox, config.api.max_backlog_bytes)
    archived = ArchivedJobs(config)
    return Context(*kept, access=access, backlog=backlog, bodies=bodies, archived=archived, mirror=mirror)


def access_of(config: Config) -> Access:
    """Who may ask, and how the placer is told of who came with a certificate. ConfigError."""
    subjects = config.access.subjects
    try:
        link = link_key(config.folder) if subjects and not config.api.board else ""
    except OSError as error:
        raise ConfigError(f"state = {config.state!r}: cannot keep a key in it: {error.strerror}") from None
    return load_access(config.api.host, subjects=subjects, link=link)


def _sent_on(row: Row) -> Row:
    """A row of a replica: what takes something in is for the api that has a pipeline and a placer."""
    return dataclasses.replace(row, handler=placements.forward) if row.needs is Scope.EVENTS else row


@contextlib.asynccontextmanager
async def _mirroring(mirror: BoardMirror) -> AsyncIterator[None]:
    work = asyncio.ensure_future(mirror.run())
    try:
        yield
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


@contextlib.asynccontextmanager
async def _inbox(context: Context, writer: str) -> AsyncIterator[None]:
    await asyncio.to_thread(_remember, context)
    context.inbox = InboxWriter(context.config.inbox, writer)
    context.writes = InboxWriter(context.config.inbox, f"{WRITES}.{writer}")
    try:
        yield
    finally:
        await asyncio.gather(context.inbox.close(), context.writes.close())
        context.inbox = context.writes = None


def _remember(context: Context) -> None:
    """The identities of the events still in the inbox, so that a retry across a restart is known for one."""
    for event in read_events(context.config.inbox, EVENTS_REMEMBERED):
        context.recent.add(identity(event))


async def _openapi(request: Request, context: Context, query: Any) -> Response:
    return Response(encode(request.app.openapi()), media_type="application/json")


async def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http")
    return Problem(error.status_code, code, error.detail, headers=error.headers).response(request.scope["path"])


async def _tree_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, FleetcastError)
    return as_problem(error).response(request.scope["path"])


class ApiServer(LimitedServer):
    """Ends its event streams before it waits for open connections."""

    def __init__(self, config: uvicorn.Config, context: Context) -> None:
        super().__init__(config)
        self.context = context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.context.stream.close()
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """The listening socket; ConfigError when the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"api.host, api.port = {host}:{port}: {error.strerror or error}") from None
    return sock


def limits_of(api: ApiConfig) -> Limits:
    return Limits(
        api.max_connections,
        api.header_timeout_s,
        api.body_timeout_s,
        api.max_connections_per_address,
        Networks(api.trusted_proxies, "api.trusted_proxies"),
    )


async def serve(config: Config) -> None:
    """Answer until SIGTERM or SIGINT, then finish what is under way. Run it on uvloop: `uvloop.run(serve(config))`."""
    keep_one_heap()
    app = create_app(config, config.make_clock())
    context: Context = app.state.context
    limits = limits_of(config.api)
    tls = Tls(config.api) if config.api.tls_cert else None
    allow_files(limits.max_connections * (2 if tls else 1))  # and those that have not greeted yet

    def refused(status: int) -> None:
        context.metrics.refused_connections.labels(str(status)).inc()

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
    server = ApiServer(settings, context)
    context.metrics.max_connections.set(limits.max_connections)
    context.metrics.connections.set_function(lambda: len(server.server_state.connections))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    with listen(config.api.host, config.api.port) as sock:
        logger.info("listening on %s", config.url)
        if tls is None:
            await server.serve([sock])
        else:
            context.metrics.watch_certificate(lambda: tls.until_s)
            dropped = context.metrics.refused_connections.labels("no_tls").inc
            async with tls.watched(), TlsDoor(server, tls, limits, dropped).open(sock):
                await server.serve([])
    logger.info("stopped")
