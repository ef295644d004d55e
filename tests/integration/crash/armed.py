"""A role that is started again and again, each time with another failpoint, at which it ends itself."""

import resource
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetcast.fleet.failpoints import VARIABLE
from tests.integration.crash.roles import RunningRole

REACHED_S = 400.0  # wall; within which a running role must come by its failpoint
SETTLES_S = 3.0


@dataclass(frozen=True, slots=True)
class Arming:
    """`rule` as `FLEETCAST_FAILPOINTS` takes it; `tears`: a file that may hardly grow, so that a write breaks off."""

    rule: str
    tears: bool = False


class ArmedRole(threading.Thread):
    """Works through its armings, then leaves the role running without any. `reached` in their order.

    `trouble` says what was not as it should be: an end that was none of ours, or a failpoint that nobody came by.
    """

    def __init__(self, config: Path, role: str, armings: Sequence[Arming]) -> None:
        super().__init__(name=f"armed {role}", daemon=True)
        self.reached: list[str] = []
        self.trouble = ""
        self._armings = tuple(armings)
        self._config = config
        self._ending = threading.Event()
        self.role = RunningRole(config, role)

    def run(self) -> None:
        for arming in self._armings:
            if self._ending.is_set() or self.trouble:
                break
            self._end()
            self._begin(arming.rule)
            if arming.tears:
                self._tear()
            self._await(arming.rule)
        self._end()
        self._begin("")

    def _begin(self, rule: str) -> None:
        self.role.variables = {VARIABLE: rule}
        self.role.start()

    def _end(self) -> None:
        """By its id; it may have ended itself."""
        self.role.process.kill()
        self.role.process.wait()

    def _await(self, rule: str) -> None:
        try:
            code = self.role.process.wait(REACHED_S)
        except subprocess.TimeoutExpired:
            self.trouble = f"{rule}: nobody came by within {REACHED_S:.0f} s"
            return
        if code != -signal.SIGKILL:
            self.trouble = f"{rule}: {self.role.words()}"
        self.reached.append(rule)

    def _tear(self) -> None:
        """Once the newest segment has grown under this process, let no file of it grow by more than some bytes."""
        folder = self._config.parent / "state" / "inbox"
        before = _newest_bytes(folder)
        while self.role.process.poll() is None and _newest_bytes(folder) in (0, before):
            self._ending.wait(0.05)
        size_bytes = _newest_bytes(folder) + 100
        if self.role.process.poll() is None:
            resource.prlimit(self.role.process.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

    def stop(self) -> int:
        """End the role in order; its exit code."""
        self._ending.set()
        self.join(REACHED_S + SETTLES_S)
        return self.role.stop()


def _newest_bytes(folder: Path) -> int:
    paths = sorted(folder.glob("api-*"))
    return paths[-1].stat().st_size if paths else 0
