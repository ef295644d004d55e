"""A network namespace with a loopback only, for components that insist on listening on every interface."""

import subprocess
from pathlib import Path

from tests.integration.built import BuildError


class Namespace:
    """Made on construction, by a process that holds it. Raises BuildError where this machine allows none."""

    def __init__(self) -> None:
        held = "ip link set lo up && echo up && exec sleep infinity"
        try:
            self._holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", held], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise BuildError(f"a network namespace is needed: {error}") from None
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if self._holder.stdout.readline() != "up\n":
            raise BuildError(f"a network namespace is needed: {self._holder.stderr.read().strip()}")

    def inside(self, *command: str | Path) -> list[str]:
        """The command that runs another one in it."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--", *map(str, command)]

    def close(self) -> None:
        """Whoever runs in it goes on; it ends with the last of them."""
        self._holder.kill()
        self._holder.wait()
