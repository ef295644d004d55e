"""How long and how large a decoder may get, and how hard the suites look: FLEETCAST_FUZZ=1, not 0.4, in a long run."""

import os
import signal
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hypothesis import HealthCheck, settings

EFFORT = float(os.environ.get("FLEETCAST_FUZZ", "0.4"))
CPU_S = (
    5.0  # a hundred times what any input here takes on a slow machine; processor time, so others' load costs nothing
)
MIB = 2**20


def examples(count: int) -> settings:
    """Settings of a property test: no time of the wall counts, and a pytest fixture may serve all examples."""
    return settings(
        deadline=None,
        max_examples=max(1, round(count * EFFORT)),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


class Hangs(BaseException):
    """Longer than `CPU_S`. No Exception, so that no handler of what was tried swallows it."""


def _hangs(number: int, frame: FrameType | None) -> None:
    raise Hangs(f"more than {CPU_S} s of processor time")


@contextmanager
def prompt() -> Iterator[None]:
    """Raises Hangs within what takes more than `CPU_S` of this process's time. For the main thread."""
    before = signal.signal(signal.SIGPROF, _hangs)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    began = time.process_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
    if time.process_time() - began > CPU_S:  # C code that looked at no signal
        raise Hangs(f"{time.process_time() - began:.1f} s of processor time")


@contextmanager
def frugal(most_bytes: float) -> Iterator[None]:
    """AssertionError when more than `most_bytes` are allocated at once; slows what it watches about fourfold."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= most_bytes, f"{peak / MIB:.1f} MiB at once, expected at most {most_bytes / MIB:.1f}"
