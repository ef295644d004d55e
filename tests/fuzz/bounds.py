"""How hard property tests try, and how long and how large a decoder may get.

    make test       the same examples each time: nothing depends on a seed, on earlier runs or on what is imported
    make explore    a fresh seed, more examples

FLEETCAST_FUZZ is the strength: 0.12 by default, 1.2 for ten times as many examples.
"""

import os
import signal
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

EFFORT = float(os.environ.get("FLEETCAST_FUZZ", "0.12"))
CPU_S = (
    5.0  # a hundred times what any input here takes on a slow machine; processor time, so others' load costs nothing
)
MIB = 2**20


EXAMPLES = 250  # of a property test that states no number, at strength 1
UNTIMED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def load_profile(*, explores: bool) -> None:
    """Load the profile of all property tests, over the one that Hypothesis loads where CI is set.

    Hypothesis also draws constants of the modules that happen to be imported. Without them a test has the same examples
    alone, beside others and in any order, so that its name and the seed replay it.
    """
    providers._get_local_constants = lambda: providers._local_constants
    settings.register_profile(
        "explore" if explores else "fixed",
        derandomize=not explores,
        database=None,
        deadline=None,
        max_examples=max(1, round(EXAMPLES * EFFORT)),
        print_blob=True,
        suppress_health_check=UNTIMED,
    )
    settings.load_profile("explore" if explores else "fixed")


def examples(count: int) -> settings:
    """Return the settings of a property test that tries `count` examples at strength 1."""
    return settings(max_examples=max(1, round(count * EFFORT)))


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
