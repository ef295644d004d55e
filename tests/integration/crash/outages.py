"""Ways to take a running service's processes away for a while, and what to look at meanwhile."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.integration.service_process import Service
from tests.processes import is_running


@contextmanager
def nobody_restarts(service: Service) -> Iterator[None]:
    """Meanwhile the supervisor stands still: what is killed stays away."""
    service.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        service.process.send_signal(signal.SIGCONT)


def gone(service: Service, *roles: str) -> None:
    """Kill the roles and wait until the kernel has closed what they held."""
    pids = service.pids()
    for role in roles:
        service.kill(role)
    for role in roles:
        while is_running(pids[role]):
            time.sleep(0.01)


def life(job: str, now_ms: int, *, gpus: int = 1) -> list[dict[str, Any]]:
    """Submitted and started on n1."""
    event = {"job": job, "time_ms": now_ms}
    ranks = [{"rank": 0, "node": "n1", "gpus": list(range(gpus))}]
    return [
        {**event, "sequence": 0, "type": "submitted", "gpus_per_node": gpus},
        {**event, "sequence": 1, "type": "started", "ranks": ranks},
    ]


def now_ms(service: Service) -> int:
    return int(service.get("/v1/fleet")["as_of_ms"])


def states(service: Service) -> dict[str, str]:
    """Job -> state, as the board tells."""
    return {row["job"]: row["state"] for row in service.get("/v1/jobs")["rows"]}


def bad_records(service: Service) -> dict[str, int]:
    """Reason -> count, since the pipeline began."""
    counts: dict[str, int] = service.get("/v1/ingestion")["bad_records"]
    return counts
