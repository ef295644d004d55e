"""Loopback ports for the servers of tests: no two servers of a run take the same, whichever worker starts them."""

import itertools
import os
import random
import socket

FIRST, LAST = 20_000, 32_000  # below the ephemeral ports: no connection takes one while its server is down
WORKERS = 8


def worker_range() -> range:
    """The ports of this worker of pytest-xdist, those of the first one where there is none; two never share one."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    size = (LAST - FIRST) // WORKERS
    return range(FIRST + worker * size, FIRST + (worker + 1) * size)


_PAIRS = itertools.cycle(random.sample(worker_range()[::2], len(worker_range()) // 2))


def free_port() -> int:
    """A port whose successor is free, too: the api takes the one and the placer the other. Each is new for long."""
    for port in itertools.islice(_PAIRS, 100):
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise RuntimeError("no two adjacent free ports")


def free_ports(count: int) -> list[int]:
    """Different ones."""
    return [free_port() for _ in range(count)]
