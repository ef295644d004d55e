"""Clients of the product: its HTTP API with retries, and an outbox that never loses an event."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.fleet.requests import PlacementRequest

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # wall time
BATCH_EVENTS = 2000
TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class ProductApi:
    """A client of the product's API under `url`.

    It retries forever after connection errors, time-outs and 5xx, with growing pauses.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self.retries = 0

    async def request_until_answered(
        self, method: str, path: str, body: bytes | None = None, kind: str = "json"
    ) -> tuple[int, bytes]:
        """Send a request until an answer needs no retry, and return its (status, body)."""
        pause_s = FIRST_PAUSE_S
        while True:
            answer = await self.request_once(method, path, body, kind)
            if answer is not None and answer[0] not in TRY_AGAIN:
                return answer
            self.retries += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def request_once(
        self, method: str, path: str, body: bytes | None = None, kind: str = "json"
    ) -> tuple[int, bytes] | None:
        """Send a request once. Returns (status, body), or None if there was no answer."""
        headers = {"Content-Type": f"application/{kind}"} if body is not None else None
        try:
            async with self._session.request(method, self._url + path, data=body, headers=headers) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def get(self, path: str) -> dict[str, Any] | None:
        """Get a JSON object, without retries. Returns None if the answer is not a JSON object."""
        answer = await self.request_once("GET", path)
        if answer is None or answer[0] != 200:
            return None
        try:
            return msgspec.json.decode(answer[1], type=dict[str, Any])
        except msgspec.DecodeError:
            return None

    async def wait_until_ready(self, path: str) -> None:
        """Poll `path` until it answers with status 200."""
        while True:
            answer = await self.request_once("GET", path)
            if answer is not None and answer[0] == 200:
                return
            await asyncio.sleep(FIRST_PAUSE_S)

    async def post_events(self, events: Sequence[JobEvent | NodeEvent]) -> int:
        """Post one batch as JSON lines until it is accepted. Returns the number of rejected events."""
        body = b"\n".join(map(msgspec.json.encode, events)) + b"\n"
        status, text = await self.request_until_answered("POST", "/v1/events", body, "x-ndjson")
        if status == 413 and len(events) > 1:
            half = len(events) // 2
            return await self.post_events(events[:half]) + await self.post_events(events[half:])
        rejected = _count_rejected(status, text, len(events))
        if rejected:
            logger.warning("%d of %d events were rejected (%d): %.300s", rejected, len(events), status, text)
        return rejected

    async def enqueue(self, request: PlacementRequest) -> bool:
        """Add a placement request to the product's queue. Returns False if it is refused, and logs why."""
        status, text = await self.request_until_answered("POST", "/v1/queue", msgspec.json.encode(request))
        if status >= 400:
            logger.warning("queue request %s was refused (%d): %.300s", request.request_id, status, text)
        return status < 400


def _count_rejected(status: int, text: bytes, count: int) -> int:
    if status >= 400:
        return count
    try:
        return len(msgspec.json.decode(text, type=dict[str, Any]).get("rejected", ()))
    except msgspec.DecodeError:
        return 0


class Outbox:
    """A queue of events in order, which `run` posts in batches.

    A batch is repeated until it is accepted (events are idempotent). While `limit` events wait, `put`
    waits. So an API that does not answer slows the driver and does not fill the memory.
    """

    def __init__(self, api: ProductApi, *, limit: int = 20_000) -> None:
        self._api = api
        self._limit = limit
        self._waiting: deque[JobEvent | NodeEvent] = deque()
        self._changed = asyncio.Condition()
        self.posted = 0
        self.rejected = 0

    async def put(self, *events: JobEvent | NodeEvent) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._waiting) < self._limit)
            self._waiting.extend(events)
            self._changed.notify_all()

    async def wait_until_empty(self) -> None:
        """Wait until all events have been posted."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._waiting)

    async def run(self) -> None:
        """Post events until the task is cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._waiting))
                batch = [self._waiting[row] for row in range(min(BATCH_EVENTS, len(self._waiting)))]
            self.rejected += await self._api.post_events(batch)
            self.posted += len(batch)
            async with self._changed:
                for _ in batch:
                    self._waiting.popleft()
                self._changed.notify_all()
