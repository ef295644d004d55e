"""What is known of jobs by their kind, as board sections: written by the pipeline, read by api and placer.

    kinds.run          (k,) uint64 keys, sorted             kinds.run.run_s      (k, LEVELS) seconds from the start
    kinds.peak         (k,) uint64 keys, sorted             kinds.peak.likely    (k, 3) GiB a GPU, W a GPU, runs seen

A look-up is some hashes and bisections in the mapped file: nothing is decoded, no model is loaded, and it works while
the pipeline is away. `features.similarity` makes the keys; the most telling kind that is known speaks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.run_history import JobShape
from features.run_past import LEVELS
from features.similarity import Kind, kinds
from service.board import Board, Section

P50, P90, P99 = (LEVELS.index(level) for level in (0.5, 0.9, 0.99))
RUN, PEAK = ("kinds.run", "kinds.run.run_s"), ("kinds.peak", "kinds.peak.likely")

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RunTime:
    """Quantiles of a run time at LEVELS, in seconds, who speaks (`kind`) and by which model."""

    run_s: tuple[float, ...]
    kind: Kind
    model: str

    @property
    def quantiles(self) -> dict[str, float]:
        return quantiles_of(self.run_s)


@dataclass(frozen=True, slots=True)
class Needs:
    """What jobs of a kind came to at most, nine times in ten; None where telemetry did not tell."""

    gpu_memory_gib: float | None
    power_w: float | None
    kind: Kind
    runs: int


def quantiles_of(run_s: tuple[float, ...] | Array) -> dict[str, float]:
    """p50, p90 and p99 of quantiles at LEVELS, to the second."""
    return {name: float(round(float(run_s[at]))) for name, at in (("p50", P50), ("p90", P90), ("p99", P99))}


def table_sections(
    names: tuple[str, str], keys: NDArray[np.uint64], values: Array, as_of_ms: int, model: str = ""
) -> list[Section]:
    """keys: (k,), sorted; values: (k, column)."""
    rows = np.ascontiguousarray(values, np.float32)
    return [Section(names[0], keys, as_of_ms, model), Section(names[1], rows, as_of_ms, model)]


def run_time(board: Board, shape: JobShape) -> RunTime | None:
    """How long such a job should run, never longer than its limit; None while no job of any size is known."""
    found = _row_of(board, RUN, kinds(shape))
    if found is None:
        return None
    kind, values = found
    run_s = np.minimum(values, shape.limit_s) if shape.limit_s is not None else values
    return RunTime(tuple(run_s.tolist()), kind, board.meta(RUN[1])["model"])


def needs(board: Board, shape: JobShape) -> Needs | None:
    """What such a job should need of each GPU; None where telemetry saw no job like it."""
    found = _row_of(board, PEAK, kinds(shape))
    if found is None:
        return None
    kind, (memory_gib, power_w, runs) = found
    return Needs(_known(memory_gib), _known(power_w), kind, int(runs))


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _row_of(board: Board, names: tuple[str, str], wanted: Mapping[Kind, int]) -> tuple[Kind, Array] | None:
    """The row of the first kind that the table has; None without one, and without a table."""
    try:
        keys, values = (board.array(name) for name in names)
    except KeyError:
        return None
    for kind, key in wanted.items():
        at = int(np.searchsorted(keys, np.uint64(key)))
        if at < len(keys) and keys[at] == key and at < len(values):
            return kind, values[at]
    return None
