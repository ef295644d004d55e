"""A network of its own for this process and whatever it starts: a loopback, and nothing else."""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

from tests.integration.built import BuildError

CLONE_NEWNET = 0x40000000
OURS = "/proc/thread-self/ns/net"


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """For the thread that enters it, and what it starts. Raises BuildError where this machine allows none."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open(OURS, os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET):
            raise BuildError(f"a network namespace is needed: {os.strerror(ctypes.get_errno())}")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
            yield
        finally:
            assert not libc.setns(before, CLONE_NEWNET), os.strerror(ctypes.get_errno())
    finally:
        os.close(before)
