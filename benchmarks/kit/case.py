"""One benchmark case: runs a piece of work and its peer several times, and returns one record.

The record is the line that `fleetcast bench --json` writes. A run returns the number of items that it
processed. `unit` decides how `value` is computed from that number and the seconds that the run takes:

    "samples/s", "nodes/s"       items per second                      (more is better)
    "ns/sample", "us/decision"   time per item, in ns, us, ms or s     (less is better)
    "ms", "s"                    time of a whole run                   (less is better)

`value` is that of the fastest run. `min`, `median` and `max` are over the runs. `cpu_s` is the CPU
time of the fastest run.
"""

import gc
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

_PER_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Peer:
    """The usual alternative for the same work. `run` does the work and returns the same number of items."""

    name: str
    run: Callable[[], int]
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class _Run:
    items: int
    wall_s: float
    cpu_s: float


def measure(
    bench: str,
    case: str,
    size: Mapping[str, int],
    run: Callable[[], int],
    unit: str,
    *,
    peer: Peer | None = None,
    repeats: int = 5,
) -> dict[str, Any]:
    """Time `run` after one warm-up, `repeats` times, and return the record of the case.

    Raises AssertionError if a run counts no item, because a failure must not be measured.
    """
    runs = _run_repeatedly(case, run, repeats)
    fastest = min(runs, key=lambda one: one.wall_s / one.items)
    values = [_convert_run(one, unit) for one in runs]
    others = None if peer is None else measure_peer(peer, unit)
    return make_record(bench, case, size, values, unit, cpu_s=fastest.cpu_s, peer=others)


def make_record(
    bench: str,
    case: str,
    size: Mapping[str, int],
    values: Sequence[float],
    unit: str,
    *,
    cpu_s: float,
    peer: tuple[str, float] | None = None,
) -> dict[str, Any]:
    """Return the record of a case that measured itself. values: one for each run.

    cpu_s: the CPU time of the measured work in the best run. peer: the peer's name and value.
    """
    value = max(values) if _is_rate(unit) else min(values)
    return {
        "bench": bench,
        "case": case,
        "size": dict(size),
        "value": value,
        "unit": unit,
        "cpu_s": cpu_s,
        "repeats": len(values),
        "min": min(values),
        "median": statistics.median(values),
        "max": max(values),
        "peer": None if peer is None else {"name": peer[0], "value": peer[1]},
        "ratio": value / peer[1] if peer and peer[1] else None,
        "machine": describe_machine(),
    }


def _run_repeatedly(case: str, run: Callable[[], int], repeats: int) -> list[_Run]:
    _run_once(case, run)
    gc.collect()
    return [_run_once(case, run) for _ in range(repeats)]


def _run_once(case: str, run: Callable[[], int]) -> _Run:
    cpu, wall = time.process_time(), time.perf_counter()
    items = run()
    taken = _Run(items, time.perf_counter() - wall, time.process_time() - cpu)
    assert items > 0, f"{case}: the run worked on nothing"
    return taken


def measure_peer(peer: Peer, unit: str) -> tuple[str, float]:
    """Run a peer. Returns its name and its best value."""
    values = [_convert_run(one, unit) for one in _run_repeatedly(peer.name, peer.run, peer.repeats)]
    return peer.name, max(values) if _is_rate(unit) else min(values)


def _is_rate(unit: str) -> bool:
    return unit.endswith("/s")


def _convert_run(run: _Run, unit: str) -> float:
    """Convert a run to a value in a unit.

    >>> _convert_run(_Run(items=1000, wall_s=0.5, cpu_s=0.5), "samples/s")
    2000.0
    >>> _convert_run(_Run(items=1000, wall_s=0.5, cpu_s=0.5), "us/sample")
    500.0
    """
    if _is_rate(unit):
        return run.items / run.wall_s
    time_unit, _, per_item = unit.partition("/")
    total = run.wall_s * _PER_SECOND[time_unit]
    return total / run.items if per_item else total


def fits_memory(gpus: int, bytes_per_gpu: int) -> bool:
    """Return whether a fleet fits the available memory. If not, print that its size is left out."""
    available = read_available_bytes()
    if gpus * bytes_per_gpu <= available:
        return True
    needed = f"{gpus * bytes_per_gpu / 2**30:.1f} GiB"
    print(f"{gpus:,} GPUs are left out: they need {needed}, {available / 2**30:.1f} are available", file=sys.stderr)
    return False


def read_available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that programs can allocate without swapping, including file caches.

    The memory limit of a container's cgroup caps the result.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    machine_bytes = int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        most, current, stat = (
            (cgroup / name).read_text(encoding="utf-8") for name in ("memory.max", "memory.current", "memory.stat")
        )
        cached = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
        return min(machine_bytes, int(most) - int(current) + (int(cached[1]) if cached else 0))
    except (OSError, ValueError):  # no cgroup, or the limit is "max"
        return machine_bytes


@lru_cache(1)
def describe_machine() -> dict[str, Any]:
    """Return the facts on which the numbers depend: processor, cores of this process, memory, versions."""
    return {
        "cpu": _read_cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _read_memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _read_cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _read_memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
