"""Child processes of benchmarks. A child that ends too early is an error that shows the last lines of its output."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

STOP_S = 30.0
TAIL_BYTES = 2000


class ChildProcess:
    """A running program whose output is stored, so that an error can show why the program ended."""

    def __init__(self, name: str, command: Sequence[str | Path]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `stop`
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self.pid = self._process.pid

    def check(self, unless: str = "") -> None:
        """Raise AssertionError if the program has ended, or in any case where `unless` says what is late."""
        code = self._process.poll()
        said = f"; its last output:\n{tail}" if (tail := self.tail()) else " and printed nothing"
        assert code is None, f"{self.name} ended with {code}{said}"
        assert not unless, f"{unless}. {self.name} still runs{said}"

    def tail(self) -> str:
        """Return the end of what the program printed so far."""
        size = self._log.seek(0, 2)
        self._log.seek(max(0, size - TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def stop(self, patience_s: float = STOP_S) -> None:
        """End the program: ask first, kill it after `patience_s`."""
        self._process.terminate()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
