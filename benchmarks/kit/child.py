"""Child processes of benchmarks. A child that ends too early is an error that shows the last lines of its output.

A child runs from bytecode, as an installed program does.
"""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

STOP_S = 30.0
TAIL_BYTES = 2000


class ChildProcess:
    """A running program.

    Its output goes to the file `log`, which `stop` deletes unless an error has named it.
    """

    def __init__(self, name: str, command: Sequence[str | Path]) -> None:
        self.name = name
        number, path = tempfile.mkstemp(prefix=f"{name.rsplit(maxsplit=1)[-1]}-", suffix=".log")
        self.log = Path(path)
        self._log = os.fdopen(number, "w+b")
        self._failed = False
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=environment)
        self.pid = self._process.pid

    def check_running(self, unless: str = "") -> None:
        """Raise AssertionError if the program has ended, or if `unless` names something that is late."""
        code = self._process.poll()
        self._failed = self._failed or code is not None or bool(unless)
        tail = self.read_tail()
        said = f"; its log is {self.log}, which ends so:\n{tail}" if tail else " and printed nothing"
        assert code is None, f"{self.name} ended with {code}{said}"
        assert not unless, f"{unless}. {self.name} still runs{said}"

    def read_tail(self) -> str:
        """Return the end of the program's output so far."""
        size = self._log.seek(0, 2)
        self._log.seek(max(0, size - TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def stop(self, patience_s: float = STOP_S) -> None:
        """Terminate the program, and kill it after `patience_s`.

        The log of a program that failed by itself stays.
        """
        self._failed |= self._process.poll() not in (None, 0)
        self._process.terminate()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()
        if not self._failed:
            self.log.unlink(missing_ok=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
