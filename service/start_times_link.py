"""The start times of the placer's queue, for adapters that write them to other systems."""

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from fleetcast.fleet.errors import SourceError
from fleetcast.schedulers.weather import StartOutlook
from fleetcast.service.api.placer_link import PlacerLink
from fleetcast.service.config import Config
from fleetcast.service.http.access import VOUCHED
from fleetcast.service.http.link_key import read_link_key

PERIOD_S = 5.0  # wall; between two readings
TIMEOUT_S = 3.0  # wall
OLD_S = 60.0  # wall; after this start times that were not read again are unknown


class _Row(msgspec.Struct):
    """A waiting request, as a row of `GET /v1/queue`."""

    request_id: str
    position: int
    why: str
    start_ms: dict[str, int | None] | None
    job: str = ""


class _Queue(msgspec.Struct):
    as_of_ms: int
    rows: list[_Row]


class StartTimesLink:
    """A task that polls the placer's queue for start times.

    `latest` returns the newest times at once, without waiting for the placer.
    """

    def __init__(self, config: Config) -> None:
        self._link = PlacerLink(f"http://127.0.0.1:{config.placer.port}")
        self._folder = config.folder
        self._task: asyncio.Task[None] | None = None
        self._starts: Mapping[str, StartOutlook] | None = None
        self._read_s = 0.0
        self.on_change: Callable[[], None] = lambda: None  # called in the event loop

    @property
    def latest(self) -> Mapping[str, StartOutlook] | None:
        """Request or job → its start times. None if they are unknown or too old.

        This needs a running event loop.
        """
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._poll_queue())
        if self._starts is not None and loop.time() - self._read_s > OLD_S:
            self._starts = None
        return self._starts

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._link.close()

    async def _poll_queue(self) -> None:
        while True:
            try:
                headers = {"authorization": f"Bearer {read_link_key(self._folder)}", VOUCHED: "read adapters"}
                answer = await self._link.forward_request("GET", "/queue", headers=headers, timeout_s=TIMEOUT_S)
                if answer.status == 200:
                    self._read_s = asyncio.get_running_loop().time()
                    self._store_start_times(decode_start_outlooks(answer.body))
            except (SourceError, OSError, msgspec.DecodeError):
                pass  # the placer is away: what was read becomes unknown after OLD_S
            await asyncio.sleep(PERIOD_S)

    def _store_start_times(self, starts: Mapping[str, StartOutlook]) -> None:
        """Store the start times, and report a change.

        If the times are equal to the stored ones, keep the stored object. So adapters do not repeat a step.
        """
        if starts != self._starts:
            self._starts = starts
            self.on_change()


def decode_start_outlooks(body: bytes) -> dict[str, StartOutlook]:
    """Decode the body of `GET /v1/queue`. Returns request or job → its start times.

    Raises msgspec.DecodeError.
    """
    found: dict[str, StartOutlook] = {}
    for row in msgspec.json.decode(body, type=_Queue).rows:
        start = row.start_ms or {}
        outlook = StartOutlook(start.get("p10"), start.get("p50"), start.get("p90"), row.position, row.why)
        found |= dict.fromkeys(filter(None, (row.request_id, row.job)), outlook)
    return found
