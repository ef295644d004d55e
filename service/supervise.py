"""The supervisor: it starts the roles as processes, restarts roles that end, and stops all of them.

A role reports through a pipe that it is ready (`fleetcast.fleet.process.report_ready`), however long its
start takes. A role that was ready once is restarted without limit. A role that was never ready stops all
roles in two cases: it exits with status 2 (bad configuration), or it ends at its `most_starts`-th start.
The supervisor then reports the role's own reason. The pause before a restart doubles from 0.5 s to 10 s.
It starts at 0.5 s again if the role was ready and lived longer than 10 s. If the supervisor is killed,
the roles end, too. They monitor the supervisor, or the launcher that forked them.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetcast.fleet import files
from fleetcast.fleet.event_wait import wait_for_event
from fleetcast.fleet.process import READY_VARIABLE, make_child_environment
from fleetcast.service.exit_reason import clear_exit_reason, read_exit_reason
from fleetcast.service.launcher import LaunchedProcess, Launcher

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
GRACE_S = 8.0
MOST_STARTS = 8  # the pauses between them add up to half a minute
BAD_CONFIGURATION = 2


@dataclass(frozen=True, slots=True)
class SupervisedRole:
    """One role that the supervisor runs as a process.

    `reason_name`: the name for the record of why the role ended, if it is not `name`. `command`: starts the
    role if no launcher forks it.
    """

    name: str
    command: Sequence[str]
    reason_name: str = ""


def make_role_command(role: str, config: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "fleetcast.cli.main", "run", "--role", role, "--config", str(config), *more]


@dataclass(frozen=True, slots=True)
class RoleEnd:
    """The end of a role's process.

    code: the exit code, or a text that says why the process could not start. was_ready: the role had
    reported that it was ready.
    """

    code: int | str
    was_ready: bool


class Supervisor:
    """A supervisor that runs the roles until `stop` is called, or until a role cannot start.

    If a role cannot start, `exit_code` is 2 if the role refused its configuration, and 1 otherwise.
    """

    def __init__(
        self,
        roles: Sequence[SupervisedRole],
        folder: Path,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        most_starts: int = MOST_STARTS,
        launcher: Launcher | None = None,
    ) -> None:
        self.roles = roles
        self._launcher = launcher
        self.folder = folder
        self.first_pause_s = first_pause_s
        self.most_starts = most_starts
        self.exit_code = 0
        self.restarts: dict[str, int] = {role.name: 0 for role in roles}
        self._stop = asyncio.Event()
        self._pids: dict[str, int] = {}

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, RuntimeError):
                loop.add_signal_handler(number, self.stop)
        if self._launcher is not None:
            self._launcher.start_receiving()
        try:
            async with asyncio.TaskGroup() as group:
                for role in self.roles:
                    group.create_task(self._keep_running(role))
        finally:
            if self._launcher is not None:
                self._launcher.close()
        return self.exit_code

    async def _keep_running(self, role: SupervisedRole) -> None:
        clear_exit_reason(self.folder, _get_reason_name(role))  # what an earlier supervisor's role ended of
        pause_s, starts, was_ever_ready = self.first_pause_s, 0, False
        while not self._stop.is_set():
            began = time.monotonic()
            end = await self._run_process(role)
            if self._stop.is_set():
                return
            starts += 1
            was_ever_ready = was_ever_ready or end.was_ready
            if not was_ever_ready and (end.code == BAD_CONFIGURATION or starts >= self.most_starts):
                self._stop_all_roles(role, end.code, starts)
                return
            if end.was_ready and time.monotonic() - began > LONGEST_PAUSE_S:
                pause_s = self.first_pause_s
            self.restarts[role.name] += 1
            logger.warning("%s ended with %s, restarting in %.1f s", role.name, end.code, pause_s)
            await wait_for_event(self._stop, pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _stop_all_roles(self, role: SupervisedRole, code: int | str, starts: int) -> None:
        reason = (
            read_exit_reason(self.folder, _get_reason_name(role)) or "it recorded no reason; see its log lines above"
        )
        if code == BAD_CONFIGURATION:
            logger.error("%s refused its configuration, stopping all roles: %s", role.name, reason)
        else:
            what = f"{role.name} ended {starts} times before it was ready, the last time with {code}"
            logger.error("%s, stopping all roles: %s", what, reason)
        self.exit_code = BAD_CONFIGURATION if code == BAD_CONFIGURATION else 1
        self.stop()

    async def _run_process(self, role: SupervisedRole) -> RoleEnd:
        """Start one process of the role, and wait for its end."""
        try:
            process, pipe = await _start_process(role, self._launcher)
        except (OSError, ValueError) as error:  # no memory, too many processes: the other roles go on
            return RoleEnd(str(error), was_ready=False)
        with open(pipe, "rb", buffering=0) as ready:
            self._record_pid(role.name, process.pid)
            code = await self._wait_for_exit(process)
            self._record_pid(role.name, None)
            return RoleEnd(code, was_ready=bool(ready.read(1)))

    async def _wait_for_exit(self, process: asyncio.subprocess.Process | LaunchedProcess) -> int | str:
        """Wait until a process ends, and return its exit code.

        When the supervisor stops, it terminates the process. After GRACE_S, it kills the process.
        """
        ended = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(asyncio.shield(ended), GRACE_S)
            except TimeoutError:
                logger.warning("process %d did not end within %.0f s, killing it", process.pid, GRACE_S)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        return await ended

    def _record_pid(self, role: str, pid: int | None) -> None:
        if pid is None:
            self._pids.pop(role, None)
        else:
            self._pids[role] = pid
        launchers = [f"launcher {self._launcher.pid}"] if self._launcher and self._launcher.is_alive else []
        lines = [f"supervisor {os.getpid()}", *launchers, *(f"{name} {number}" for name, number in self._pids.items())]
        try:
            files.replace_file(self.folder / "pids", [("\n".join(lines) + "\n").encode()], "pids", sync=False)
        except OSError as error:
            logger.error("cannot write %s: %s; the roles go on", self.folder / "pids", error)


async def _start_process(
    role: SupervisedRole, launcher: Launcher | None
) -> tuple[asyncio.subprocess.Process | LaunchedProcess, int]:
    """Start a process. Returns the process, and the end of a pipe that is read without blocking.

    The process writes its report into the pipe.
    """
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    variables = {**make_child_environment(), READY_VARIABLE: str(writing)}
    try:
        if launcher is not None and launcher.is_alive:
            return await launcher.start_role(role.name, writing), reading
        process = await asyncio.create_subprocess_exec(
            *role.command, start_new_session=True, pass_fds=(writing,), env=variables
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return process, reading


def _get_reason_name(role: SupervisedRole) -> str:
    return role.reason_name or role.name
