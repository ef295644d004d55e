"""Run times and peaks by job kind, as board sections. The pipeline writes them, and api and placer read them.

    kinds.run    (k,) uint64 keys, sorted    kinds.run.run_s      (k, LEVELS) seconds from the start
                                             kinds.run.runs       (k,) ended runs
    kinds.peak   (k,) uint64 keys, sorted    kinds.peak.likely    (k, 3) GiB a GPU, W a GPU, runs seen

`fleetcast.features.similarity` makes the keys. A lookup uses the most specific known kind. For run
times, a kind with an ended run has priority.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.past_runs import JobShape
from fleetcast.features.run_past import LEVELS
from fleetcast.features.similarity import Kind, make_kind_keys
from fleetcast.service.board.board import Board, Section

P50, P90, P99 = (LEVELS.index(level) for level in (0.5, 0.9, 0.99))
RUN, PEAK = ("kinds.run", "kinds.run.run_s"), ("kinds.peak", "kinds.peak.likely")
RUNS_SEEN = "kinds.run.runs"

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RunTime:
    """The quantiles of a run time at LEVELS, in seconds.

    kind: the kind of jobs that the quantiles come from. runs: the number of ended runs of this kind.
    """

    run_s: tuple[float, ...]
    kind: Kind
    model: str
    runs: int = 0

    @property
    def quantiles(self) -> dict[str, float]:
        return round_run_quantiles(self.run_s)


@dataclass(frozen=True, slots=True)
class GpuNeeds:
    """The peaks of memory and power for each GPU that nine in ten jobs of a kind do not exceed.

    A value is None if telemetry has no reading of it.
    """

    gpu_memory_gib: float | None
    power_w: float | None
    kind: Kind
    runs: int


def round_run_quantiles(run_s: tuple[float, ...] | Array) -> dict[str, float]:
    """Return p50, p90 and p99 of quantiles at LEVELS, rounded to seconds."""
    return {name: float(round(float(run_s[at]))) for name, at in (("p50", P50), ("p90", P90), ("p99", P99))}


def make_table_sections(
    names: tuple[str, str], keys: NDArray[np.uint64], values: Array, as_of_ms: int, model: str = ""
) -> list[Section]:
    """Return the two board sections of a table, under the given names.

    keys: (k,), sorted. values: (k, column).
    """
    rows = np.ascontiguousarray(values, np.float32)
    return [Section(names[0], keys, as_of_ms, model), Section(names[1], rows, as_of_ms, model)]


def find_expected_run_time(board: Board, shape: JobShape) -> RunTime | None:
    """Return the expected run time of a job of this shape. It is at most the job's time limit.

    Returns None if no similar job is known.
    """
    found = list(_find_kind_rows(board, RUN, make_kind_keys(shape)))
    if not found:
        return None
    seen = board.array(RUNS_SEEN) if RUNS_SEEN in board else np.zeros(len(board.array(RUN[0])), np.uint32)
    kind, at = next((row for row in found if seen[row[1]]), found[0])
    values = board.array(RUN[1])[at]
    run_s = np.minimum(values, shape.limit_s) if shape.limit_s is not None else values
    return RunTime(tuple(run_s.tolist()), kind, board.meta(RUN[1])["model"], int(seen[at]))


def find_expected_needs(board: Board, shape: JobShape) -> GpuNeeds | None:
    """Return the GPU memory and power that a job of this shape should need on each GPU.

    Returns None if telemetry saw no similar job.
    """
    found = next(_find_kind_rows(board, PEAK, make_kind_keys(shape)), None)
    if found is None:
        return None
    kind, at = found
    memory_gib, power_w, runs = board.array(PEAK[1])[at]
    return GpuNeeds(_convert_nan_to_none(memory_gib), _convert_nan_to_none(power_w), kind, int(runs))


def _convert_nan_to_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _find_kind_rows(board: Board, names: tuple[str, str], wanted: Mapping[Kind, int]) -> Iterator[tuple[Kind, int]]:
    """Yield (kind, row) for each of these kinds that the table has, in the order of `wanted`.

    Yields nothing if the board lacks the table.
    """
    try:
        keys, values = (board.array(name) for name in names)
    except KeyError:
        return
    for kind, key in wanted.items():
        at = int(np.searchsorted(keys, np.uint64(key)))
        if at < len(keys) and keys[at] == key and at < len(values):
            yield kind, at
