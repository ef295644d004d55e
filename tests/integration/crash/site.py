"""A supervised service as a site runs it: started again whenever its supervisor is gone; and the killing of it."""

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.integration.service_process import Service
from tests.processes import is_running

ROLES = ("pipeline", "api", "placer", "adapters", "supervisor")


class Site:
    """The service and the one who starts it again, as an init system would. `kills` counts by role."""

    def __init__(self, folder: Path, speed: float, **sections: dict[str, Any]) -> None:
        self.service = Service(folder, speed=speed, **sections)
        self.kills: Counter[str] = Counter()
        self.restarts = 0
        self._ending = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        while not self._ending.wait(0.1):
            if self.service.process.poll() is not None:
                self.service.start()
                self.restarts += 1

    def kill(self, role: str) -> bool:
        """SIGKILL to the process of a role; False when none of ours runs."""
        pid = self.service.process.pid if role == "supervisor" else self.service.pids().get(role)
        if pid is None or not self._is_ours(pid):
            return False
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills[role] += 1
        return True

    def _is_ours(self, pid: int) -> bool:
        """Whether it lives and is a process of this service: a number in `read_pids` may be somebody else's by now."""
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            return False
        return is_running(pid) and str(self.service.folder) in command

    def until_ready(self, limit_s: float = 90.0) -> float:
        """Wait for /readyz; returns how long that took."""
        began = time.monotonic()
        self.service.until("ready", lambda: self.service.get("/readyz"), limit_s)
        return time.monotonic() - began

    def stop(self) -> int:
        """End everything in order; returns the supervisor's exit code."""
        self._ending.set()
        self._keeper.join()
        self.service.stop()
        return int(self.service.process.returncode)
