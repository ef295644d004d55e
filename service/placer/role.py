"""The placer: the one process that decides about placements.

It owns the ledger, runs passes over the queue, and serves on the loopback address.

request → view (board + intents) → decide → commit → reply          in one step of the event loop
queue   a pass every `queue_period_s`, at every new board or queue file, and when a new request waits:
        view → compute the plan, in a thread → commit what is still valid
starts  sampled paths of the queue, in a thread, every half a minute. Estimates read the latest paths.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from functools import partial

import uvicorn

from fleetcast.fleet.errors import StaleError
from fleetcast.fleet.file_changes import CONTENT, REPLACED, FileChanges
from fleetcast.placement.ledger.ledger import Ledger, LedgerError
from fleetcast.service.config import PLACER_HOST, Config
from fleetcast.service.exit_reason import announce_ready
from fleetcast.service.http.access import Access, load_access
from fleetcast.service.http.connection_pool import ConnectionLimits, ConnectionPool, fit_limits_to_files
from fleetcast.service.http.connections import LimitedServer, make_limited_protocol
from fleetcast.service.http.link_key import read_link_key
from fleetcast.service.http.listening import bind_socket
from fleetcast.service.placer.action_webhook import TOKEN, ActionWebhook
from fleetcast.service.placer.http import make_app
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.placer.start_times import StartTimeSampler

logger = logging.getLogger(__name__)

POLL_S = 0.1  # wall, the least time between two boards
DAY_S = 86_400.0  # fleet
SWITCH_S = 0.0002  # deciding gives the interpreter away at each call of numpy; a thinking thread gives it back in this


class QueueWorker:
    """The loop that makes passes over the queue until `stop`."""

    def __init__(self, service: PlacementService) -> None:
        self.service = service
        queues = service.queues.file.path
        watched = {service.config.board: REPLACED} | ({queues: CONTENT} if queues is not None else {})
        self._changes = FileChanges(watched, POLL_S)
        self._stopped = False
        self._next_ms = 0

    def wake(self) -> None:
        self._next_ms = 0
        self._changes.wake()

    def stop(self) -> None:
        self._stopped = True
        self._changes.wake()

    async def run(self) -> None:
        self.service.queues.reads_in_thread = True
        clock = self.service.clock
        with contextlib.closing(self._changes):
            while not self._stopped:
                await self.run_due_pass()
                is_unread = self.service.queues.file.has_changed()  # the worker reads it once it has settled
                left_s = 0.0 if is_unread else clock.convert_to_wall_s((self._next_ms - clock.now_ms()) / 1000)
                await self._changes.wait(max(POLL_S, left_s))

    async def run_due_pass(self) -> None:
        """Run a pass if one is due, and record a failed pass. Raises LedgerError if the ledger was replaced."""
        try:
            await self._run_if_due()
        except LedgerError:
            raise
        except Exception as error:  # a plugin's or our own: the process still answers, and the next pass may succeed
            self.service.backlog.record_failed_pass(error)

    async def _run_if_due(self) -> None:
        """Run a pass if the board or the queue file is new, or if the period is over.

        With a stale board, the queue does not change.
        """
        fresh = await self.service.view.refresh_in_thread()
        now_ms = self.service.clock.now_ms()
        if not fresh and now_ms < self._next_ms:
            return
        self._next_ms = now_ms + round(self.service.config.placer.queue_period_s * 1000)
        try:
            self.service.actions.expire(now_ms)
            placed, lost = await self._run_pass()
        except StaleError as error:
            logger.debug("the queue waits: %s", error)
        except LedgerError as error:
            logger.error("%s; the queue waits", error)
        else:
            if lost:
                self._next_ms = 0
            if placed:
                logger.info("placed %d from the queue, %d wait", placed, len(self.service.ledger.list_queue_entries()))

    async def _run_pass(self) -> tuple[int, int]:
        """Run one pass. Returns the number of placed requests, and the number of requests to plan again.

        A thread computes the pass. Requests that arrive meanwhile are decided at once.
        """
        begun = self.service.backlog.begin_pass()
        if begun is None:
            return 0, 0
        with self.service.metrics.cycle_s.time():
            thought = await asyncio.to_thread(begun.compute_plan)
        return self.service.backlog.end_pass(begun, thought)


async def log_audit_head_daily(service: PlacementService) -> None:
    """Log the head of the audit trail now and once a day, so that it exists outside the ledger."""
    while True:
        log_audit_head(service)
        await service.clock.sleep(DAY_S)


def log_audit_head(service: PlacementService) -> None:
    with contextlib.suppress(LedgerError):  # who asks it for anything is told
        head = service.ledger.head
        logger.info("the audit trail's head: %s", head)


def open_service(config: Config) -> PlacementService:
    """Open the service with its ledger. Raises LedgerError.

    The error ends the process, and the supervisor starts it again. A placer without a ledger would give the
    same GPUs to two jobs.
    """
    return PlacementService(config, config.make_clock(), Ledger(config.ledger), PlacerMetrics())


def make_access(config: Config) -> Access:
    """Load the access rules with the api's tokens. The api vouches for callers with a certificate."""
    subjects = config.access.subjects
    return load_access(PLACER_HOST, subjects=subjects, link=read_link_key(config.folder), heeds_link=True)


async def serve(config: Config) -> None:
    """Run the placer until SIGTERM or SIGINT."""
    sys.setswitchinterval(SWITCH_S)
    access = make_access(config)
    service = open_service(config)
    worker = QueueWorker(service)
    starts = StartTimeSampler(service)
    app = make_app(service, worker.wake, access, starts)
    pool = ConnectionPool(
        fit_limits_to_files(ConnectionLimits(), "connections of the placer"), service.metrics.count_refused_connection
    )
    settings = uvicorn.Config(
        app,
        http=make_limited_protocol(pool, service.metrics.count_refused_connection),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=30,  # longer than the api keeps a connection that it does not use
    )
    try:
        with bind_socket(PLACER_HOST, config.placer.port, "placer.port") as sock:
            started = partial(announce_ready, config.folder, "placer")
            await _run_until_stopped(LimitedServer(settings, sock, pool, on_started=started), worker, starts, service)
    finally:
        log_audit_head(service)
        service.ledger.close()
    logger.info("placer: stopped, %d requests wait", len(service.ledger.list_queue_entries()))


async def _run_until_stopped(
    server: LimitedServer, worker: QueueWorker, starts: StartTimeSampler, service: PlacementService
) -> None:
    """Answer requests and run passes over the queue until SIGTERM or SIGINT."""

    def stop() -> None:
        server.should_exit = True
        worker.stop()
        starts.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        group.create_task(starts.run())
        others = [group.create_task(log_audit_head_daily(service))]
        if url := service.config.placer.webhook:
            webhook = ActionWebhook(service.ledger, service.actions, service.metrics.actions)
            others.append(group.create_task(webhook.run(url, os.environ.get(TOKEN, ""))))
        await server.serve()
        worker.stop()
        starts.stop()
        for task in others:
            task.cancel()
