"""Construction of the objects that the routes of one API process share.

They are made from the configuration, and stay open while the process answers requests.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from functools import partial

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.inbox.inbox import WRITES, Backlog, InboxWriter, read_newest_events
from fleetcast.ingest.inbox.job_events import identify_event
from fleetcast.placement.ledger.promised import PromiseReader
from fleetcast.service.api.answerers import Answerers
from fleetcast.service.api.archived_jobs import ArchivedJobs
from fleetcast.service.api.new_names import NewNames
from fleetcast.service.api.placer_link import PlacerLink
from fleetcast.service.api.recent import RecentIdentities
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.streams import EventStreams
from fleetcast.service.api.telemetry import ApiMetrics
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.board.mirror import TOKEN, BoardMirror
from fleetcast.service.config import Config
from fleetcast.service.exit_reason import read_exit_reason
from fleetcast.service.http.access import Access, load_access
from fleetcast.service.http.body_budget import BodyBudget
from fleetcast.service.http.link_key import read_link_key
from fleetcast.service.listening import ApiListening

EVENTS_REMEMBERED = 100_000


def make_api_context(config: Config, clock: Clock, access: Access) -> Context:
    cache = BoardCache(config.board)
    url = config.api.board
    if url:
        link = PlacerLink(url.removesuffix("/board"), f"the api at {url.removesuffix('/v1/board')}")
        mirror = BoardMirror(url, config.board, os.environ.get(TOKEN, ""))
    else:
        why = partial(read_exit_reason, config.folder, "placer")
        link, mirror = PlacerLink(f"http://127.0.0.1:{config.placer.port}", exit_reason=why), None
    metrics = ApiMetrics()
    bodies = BodyBudget(config.api.body_budget_bytes, metrics.refused_bodies.inc)
    metrics.body_bytes.set_function(lambda: bodies.used_bytes)
    metrics.body_budget_bytes.set(config.api.body_budget_bytes)
    recent = RecentIdentities()
    promises = PromiseReader(config.ledger)
    names = NewNames(config.limits, cache, recent, clock, promises)
    parts = config, clock, cache, link, EventStreams(cache, link), metrics, recent, names
    access.failed = lambda reason: metrics.auth_failures.labels(reason).inc()
    backlog = Backlog(config.inbox, config.api.max_backlog_bytes)
    archived = ArchivedJobs(config)
    answerers = Answerers(config, clock, cache)
    doors = access, backlog, archived, answerers, bodies, promises, ApiListening(config.folder, clock)
    return Context(*parts, *doors, mirror=mirror)


def make_api_access(config: Config) -> Access:
    """Make the access control of the api, with the key that it shares with the placer. Raises ConfigError."""
    subjects = config.access.subjects
    try:
        link = read_link_key(config.folder) if subjects and not config.api.board else ""
    except OSError as error:
        raise ConfigError(f"state = {config.state!r}: cannot keep a key in it: {error.strerror}") from None
    return load_access(config.api.host, subjects=subjects, link=link)


@contextlib.asynccontextmanager
async def open_context(context: Context, writer: str) -> AsyncIterator[None]:
    """Open the inbox for segments of `writer` while the context is open.

    A replica has no inbox. It follows the other api's board instead.
    """
    async with _run_mirror(context.mirror) if context.mirror else _open_inbox(context, writer):
        try:
            yield
        finally:
            await context.streams.close()
            await context.placer.close()


@contextlib.asynccontextmanager
async def _run_mirror(mirror: BoardMirror) -> AsyncIterator[None]:
    work = asyncio.ensure_future(mirror.run())
    try:
        yield
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


@contextlib.asynccontextmanager
async def _open_inbox(context: Context, writer: str) -> AsyncIterator[None]:
    await asyncio.to_thread(record_recent_events, context)
    context.inbox = InboxWriter(context.config.inbox, writer)
    context.writes = InboxWriter(context.config.inbox, f"{WRITES}.{writer}")
    beats = asyncio.ensure_future(context.listening.run_statement_loop())
    try:
        yield
    finally:
        beats.cancel()
        context.promises.close()
        await asyncio.gather(context.inbox.close(), context.writes.close())
        context.inbox = context.writes = None


def record_recent_events(context: Context) -> None:
    """Record the identities of the events in the inbox, so that a retry after a restart counts once."""
    for event in read_newest_events(context.config.inbox, EVENTS_REMEMBERED):
        context.recent.add_identity(identify_event(event))
