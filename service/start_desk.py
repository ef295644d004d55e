"""Start times beside the placer: paths are sampled anew in the background, and estimates read the latest ones.

every REFRESH_S, or when the queue's head changes, but at most a fifth of the time:
    view, queue → sample paths, in a thread → `paths`
estimate    in a thread, on the paths that are there
"""

import asyncio
import contextlib
import logging
import time
from typing import Any

import numpy as np

from fleet.errors import StaleError
from fleet.requests import PlacementRequest
from placement.ledger import LedgerError
from placement.paths import Timelines, timelines
from placement.queue import Waiting, order_key
from placement.reservation import Release, held, releases, windows
from placement.start_time import StartEstimate, estimate_start, start_times
from service.board import Board
from service.estimates import shape_of_request
from service.kind_tables import run_time
from service.placer_desk import Desk, StartTimes

logger = logging.getLogger(__name__)

REFRESH_S = 30.0
LOOK_S = 0.5
SHARE = 0.2  # of the time, at most, that sampling may take
HEAD_WAITS_S = 2.0  # a new head waits so long for its start time at least


class StartDesk:
    """Keeps `paths` fresh until `stop`; one refresh at a time."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.paths: Timelines | None = None
        self._lock = asyncio.Lock()
        self._stopped = asyncio.Event()
        self._took_s = 0.0
        self._at_s = -1e9
        self._head: str | None = None
        self._releases: tuple[Release, ...] = ()

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        while not self._stopped.is_set():
            if self._is_due():
                with contextlib.suppress(StaleError, LedgerError):
                    await self.refresh()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), LOOK_S)

    async def refresh(self) -> Timelines:
        """Sample the paths of now. StaleError when there is no board, or only an old one."""
        async with self._lock:
            began = time.monotonic()
            observed, options = self.desk.observed(), self.desk.options()
            queue = [Waiting(entry.request, entry.queued_ms) for entry in self.desk.ledger.queued()]
            self._head = _head_of(queue)
            told = RunTimesTold(self.desk.board)

            def sample() -> tuple[Timelines, StartTimes, tuple[Release, ...]]:
                paths = timelines(queue, observed.view, observed.running, observed.run_times, options, told)
                return paths, start_times(paths), releases(paths)

            paths, self.desk.starts, self._releases = await asyncio.to_thread(sample)
            self.paths = paths
            self._at_s = time.monotonic()
            self._took_s = self._at_s - began
            return paths

    async def estimate(self, request: PlacementRequest) -> StartEstimate:
        """When it would start; paths are sampled first where there are none of this fleet yet. StaleError likewise."""
        observed = self.desk.observed()
        paths = self.paths
        if paths is None or paths.view.generation != observed.view.generation or self._age_s() > 4 * self._period_s():
            paths = await self.refresh()
        now_ms = self.desk.clock.now_ms()
        return await asyncio.to_thread(estimate_start, request, paths, now_ms)

    def outlook(self) -> dict[str, Any]:
        """What `GET /queue` says beside its rows: the head's reservation, room for others, what comes free."""
        planned, paths = self.desk.planned, self.paths
        view = planned.view if planned else paths.view if paths else None
        claim = planned.reservation if planned else None
        return {
            "reservation": held(claim, planned.view, paths) if claim and planned else None,
            "backfill": windows(view, claim) if view else (),
            "releases": self._releases,
        }

    def _age_s(self) -> float:
        return time.monotonic() - self._at_s

    def _period_s(self) -> float:
        return max(REFRESH_S, self._took_s / SHARE)

    def _is_due(self) -> bool:
        if self._age_s() >= self._period_s():
            return True
        queue = [Waiting(entry.request, entry.queued_ms) for entry in self.desk.ledger.queued()]
        return _head_of(queue) != self._head and self._age_s() >= max(HEAD_WAITS_S, self._took_s / SHARE)


class RunTimesTold:
    """Quantiles of a request's run time from a board's table of kinds; None where it has none."""

    def __init__(self, board: Board | None) -> None:
        self._board = board

    def __call__(self, request: PlacementRequest) -> tuple[float, ...] | None:
        found = run_time(self._board, shape_of_request(request)) if self._board is not None else None
        return found.run_s if found is not None and np.isfinite(found.run_s).all() else None


def _head_of(queue: list[Waiting]) -> str | None:
    return min(queue, key=order_key).request.request_id if queue else None
