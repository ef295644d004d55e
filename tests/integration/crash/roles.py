"""Roles run one by one, without a supervisor: killed and started again at once, so that kills come thick and fast."""

import os
import signal
import subprocess
import sys
from pathlib import Path

STOP_S = 40.0


class RunningRole:
    """One role of a configuration; starts on construction. `kills` counts ours; any other end is a failure.

    `variables` are added to the environment of the next start.
    """

    def __init__(self, config: Path, role: str, *more: str) -> None:
        self.name = "-".join((role, *more[1:]))
        self.log = config.parent / f"{self.name}.log"
        self.kills = 0
        self.variables: dict[str, str] = {}
        self._command = [
            sys.executable,
            "-m",
            "fleetcast.cli.main",
            "run",
            "--config",
            str(config),
            "--role",
            role,
            *more,
        ]
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **self.variables}
            )

    def kill(self) -> None:
        """SIGKILL, and a new one at once."""
        assert self.process.poll() is None, self.words()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.kills += 1
        self.start()

    def stop(self) -> int:
        """End it in order; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def words(self) -> str:
        return f"{self.name} ended with {self.process.poll()}:\n{self.log.read_text(errors='replace')[-3000:]}"

    def most_bytes(self) -> int:
        """VmHWM: the most memory that the process ever had."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
