"""Start the roles as processes, restart what dies, and end them all together.

The pause before a restart doubles from 0.5 s to 10 s, and is reset after 10 s of health. A role that exits with 2 (bad
configuration) and was never healthy stops everything. The roles end with a supervisor that is killed: they monitor it.
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

from fleet import files
from fleet.process import child_environment

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
HEALTHY_AFTER_S = 10.0
GRACE_S = 8.0
BAD_CONFIGURATION = 2


@dataclass(frozen=True, slots=True)
class SupervisedRole:
    """One supervised process."""

    name: str
    command: Sequence[str]


def role_command(role: str, config: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "cli.main", "run", "--role", role, "--config", str(config), *more]


class Supervisor:
    """Runs roles until `stop`, or until one refuses its configuration at the start (then `exit_code` is 2)."""

    def __init__(self, roles: Sequence[SupervisedRole], folder: Path, healthy_after_s: float = HEALTHY_AFTER_S) -> None:
        self.roles = roles
        self.folder = folder
        self.healthy_after_s = healthy_after_s
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
        async with asyncio.TaskGroup() as group:
            for role in self.roles:
                group.create_task(self._keep(role))
        return self.exit_code

    async def _keep(self, role: SupervisedRole) -> None:
        pause_s, proven = FIRST_PAUSE_S, False
        while not self._stop.is_set():
            began = time.monotonic()
            code = await self._live(role)
            if self._stop.is_set():
                return
            healthy = time.monotonic() - began > self.healthy_after_s
            proven = proven or healthy
            if code == BAD_CONFIGURATION and not proven:
                logger.error("%s refused its configuration, stopping all roles", role.name)
                self.exit_code = BAD_CONFIGURATION
                self.stop()
                return
            pause_s = FIRST_PAUSE_S if healthy else pause_s
            self.restarts[role.name] += 1
            logger.warning("%s ended with %s, restarting in %.1f s", role.name, code, pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _live(self, role: SupervisedRole) -> int | str:
        """Run one process to its end. Returns its exit code, or why it could not start."""
        try:
            process = await asyncio.create_subprocess_exec(
                *role.command, start_new_session=True, env=child_environment()
            )
        except OSError as error:  # no memory, too many processes: the other roles go on
            return str(error)
        self._note(role.name, process.pid)
        code = await self._wait(process)
        self._note(role.name, None)
        return code

    async def _wait(self, process: asyncio.subprocess.Process) -> int:
        """The exit code. When the supervisor stops, it terminates the process, and kills it after GRACE_S."""
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

    def _note(self, role: str, pid: int | None) -> None:
        if pid is None:
            self._pids.pop(role, None)
        else:
            self._pids[role] = pid
        lines = [f"supervisor {os.getpid()}", *(f"{name} {number}" for name, number in self._pids.items())]
        try:
            files.replace_file(self.folder / "pids", [("\n".join(lines) + "\n").encode()], "pids", sync=False)
        except OSError as error:
            logger.error("cannot write %s: %s; the roles go on", self.folder / "pids", error)
