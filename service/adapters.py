"""The adapters process: it writes to other schedulers and autoscalers after each new board.

Each adapter has one writer.

    latest board → Weather (bands, share of a pool) → wishes → limit → port → audit, counts

Without a fresh board, adapters write nothing. After `adapters.withdraw_after_s` they withdraw
restrictions until there is a fresh board. If the other system waits for our writes, they withdraw at
once. `fleetcast adapters withdraw` withdraws everything. An adapter that hangs delays no other adapter.

The same process runs the executors of actions (`fleetcast.service.executors`).
"""

import asyncio
import logging
import math
import signal
from collections.abc import Callable

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.file_changes import LISTED, REPLACED, REST_S, FileChanges
from fleetcast.schedulers.bands import Bands
from fleetcast.schedulers.weather import Weather
from fleetcast.service.adapter_records import AdapterRecords, AdaptersStatus, AdapterStatus
from fleetcast.service.adapter_writer import AdapterWriter
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.config import Config
from fleetcast.service.disk_errors import log_disk_errors
from fleetcast.service.doors import open_doors
from fleetcast.service.executors import ExecutorHost
from fleetcast.service.exit_reason import announce_ready
from fleetcast.service.start_times_link import StartTimesLink
from fleetcast.service.weather import WeatherStation, make_band_rule

logger = logging.getLogger(__name__)

POLL_S, AWAITED_POLL_S = 0.25, 0.05  # wall, the least time between two steps; the second where others wait for us
RETRY_S = 5.0  # wall; until what was not done is tried again
ENDS_S = 5.0  # wall; for the steps that run at the end


class AdapterHost:
    """The writers of all configured adapters, and the executors.

    The caller must hold the lock of the adapters process, because two hosts would undo each other's writes.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self.records = AdapterRecords(config.folder)
        limits = config.adapters
        doors = open_doors(limits)
        self.writers = [AdapterWriter(opened, limits.writes_per_minute, self.records, clock) for opened in doors]
        self._starts = StartTimesLink(config) if any(opened.door.needs_starts for opened in doors) else None
        bands = Bands(make_band_rule(limits, shared=True), self.records.read_status().bands)
        self._station = WeatherStation(config, clock, bands)
        self._clock, self._began_ms = clock, clock.now_ms()
        awaited = [opened.door for opened in doors if opened.door.news]
        poll_s = AWAITED_POLL_S if awaited else POLL_S
        watched = {config.board: REPLACED, self.records.folder: LISTED}
        self.changes = FileChanges(watched, poll_s)
        self._most_s = REST_S if all(door.follow_news for door in awaited) else AWAITED_POLL_S
        for door in awaited:
            if door.follow_news is not None:
                door.follow_news(self.changes.wake)
        if self._starts is not None:
            self._starts.on_change = self.changes.wake
        self._withdraw_after_s = max(limits.withdraw_after_s, config.compute_stale_after_s(clock))
        self._steps = {writer.status.name: _StepRunner(self.changes.wake, poll_s) for writer in self.writers}
        self.executors = ExecutorHost(config, clock, self.records, self.changes.wake)

    async def wait_for_change(self) -> None:
        """Wait for a board, a withdrawal, the end of a step, or the time of the next poll."""
        await self.changes.wait(self._most_s)

    def begin_due_steps(self, board: Board | None) -> None:
        """Begin the steps that are due. Each runs as its own task."""
        fresh = self._station.make_weather(board, self._starts.latest if self._starts else None)
        self.executors.run(may_send=fresh is not None)
        for writer in self.writers:
            self._steps[writer.status.name].begin_step(writer, *self._find_due_step(writer, fresh, board))

    def _find_due_step(
        self, writer: AdapterWriter, fresh: Weather | None, board: Board | None
    ) -> tuple[object, Weather | None]:
        """Return why a step of this writer is due, and the weather for the step.

        Returns (None, None) if no step is due.
        """
        if self.records.is_withdrawn(writer.status.name):
            return "withdrawn", None
        if fresh is not None:
            return fresh, fresh
        if writer.news is not None or self._is_board_lost(board):
            return "lost", Weather(board.sequence if board else 0, 0, self._clock.now_ms())
        return None, None

    def _is_board_lost(self, board: Board | None) -> bool:
        """Return whether no fresh board has arrived for `withdraw_after_s`.

        If so, the adapters must withdraw restrictions.
        """
        age_s = (self._clock.now_ms() - self._began_ms) / 1000 if board is None else self._station.compute_age_s(board)
        return abs(age_s) > self._withdraw_after_s

    @property
    def has_ended_step(self) -> bool:
        """Return whether a step has ended since the last call."""
        ended = [steps.finish_ended_step() for steps in self._steps.values()]
        return self.executors.pop_change() or any(ended)

    def make_status(self) -> AdaptersStatus:
        bands = self._station.bands
        rows = [*(writer.status for writer in self.writers), *self.executors.list_statuses()]
        return AdaptersStatus(self._clock.now_ms(), bands.bands_above_low, bands.capped, rows)

    async def withdraw(self, name: str) -> AdapterStatus:
        """Withdraw everything that one adapter has written, and wait for the result."""
        writer = next(writer for writer in self.writers if writer.status.name == name)
        await writer.step(None)
        await self.close()
        written = self.records.read_status()
        others = [row for row in written.adapters if row.name != name]
        written.adapters = [*others, writer.status]
        self.records.write_status(written)
        return writer.status

    async def close(self) -> None:
        """Let running steps end within ENDS_S, then close all writers."""
        for steps in self._steps.values():
            steps.end_running_step()
        running = [steps.task for steps in self._steps.values() if steps.task]
        if running:
            await asyncio.wait(running, timeout=ENDS_S)
        await self.executors.close()
        self.changes.close()
        for writer in self.writers:
            await writer.close()
        if self._starts is not None:
            await self._starts.close()
        self.records.close()


class _StepRunner:
    """The runner of one writer's steps, one at a time.

    It starts a step for a new board, or when the other system asks for writes. If a step has left work, the
    runner retries it.
    """

    def __init__(self, wake: Callable[[], None], poll_s: float) -> None:
        """Create a runner whose first step may begin at once.

        wake: called when a step has ended and `poll_s` have passed since the step began. poll_s: the shortest
        time from the beginning of one step to the beginning of the next, in seconds.
        """
        self._wake, self._poll_s = wake, poll_s
        self.began_s = -math.inf
        self.task: asyncio.Task[bool] | None = None
        self._reason: object = None  # of the step that is due now
        self._done_for: object = None
        self._news = 0
        self._retry_s = 0.0

    def begin_step(self, writer: AdapterWriter, reason: object, weather: Weather | None) -> None:
        """Begin a step for this reason, unless such a step is done or another step runs.

        A step that still runs for an older reason ends soon.
        """
        now_s, news = asyncio.get_running_loop().time(), writer.news() if writer.news else 0
        if reason is not self._reason:
            self._reason, self._done_for = reason, None
        is_done = reason is self._done_for and news == self._news and now_s < self._retry_s
        if reason is None or self.task is not None or is_done or now_s < self.began_s + self._poll_s:
            return
        self._done_for, self._news, self.began_s = reason, news, now_s
        self.task = asyncio.ensure_future(writer.step(weather, lambda begun: self._must_end_step(reason, begun)))
        self.task.add_done_callback(lambda task: task.get_loop().call_at(now_s + self._poll_s, self._wake))

    def _must_end_step(self, reason: object, begun: bool) -> bool:
        """Return whether the running step must end, because of a newer board or another kind of reason.

        A newer board ends the step only after a batch. So slow systems make progress.
        """
        return reason is not self._reason and (begun or type(reason) is not type(self._reason))

    def end_running_step(self) -> None:
        """Let the running step end after its batch."""
        self._reason = None

    def finish_ended_step(self) -> bool:
        """Collect the result of the running step if it has ended. Returns whether it has.

        If the step raised an exception, it is raised again. It is a bug and ends the process.
        """
        if self.task is None or not self.task.done():
            return False
        is_done, self.task = self.task.result(), None
        self._retry_s = float("inf") if is_done else asyncio.get_running_loop().time() + RETRY_S
        return True


async def serve(config: Config) -> None:
    """Run all adapters until SIGTERM."""
    host = AdapterHost(config, config.make_clock())
    reader = BoardReader(config.board)
    is_stopped = False

    def stop() -> None:
        nonlocal is_stopped
        is_stopped = True
        host.changes.wake()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    announce_ready(config.folder, "adapters")
    while not is_stopped:
        host.begin_due_steps(reader.latest())
        await host.wait_for_change()
        if host.has_ended_step:
            with log_disk_errors("keep how adapters stand", "the next step does"):
                host.records.write_status(host.make_status())
    await host.close()
