"""Splits by whole runs: moments of one run are alike, so they are never on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass

from training.dataset import Rows


@dataclass(frozen=True, slots=True)
class Split:
    """Rows to fit on, to calibrate on, and to judge by."""

    fit: Rows
    calibrate: Rows
    test: Rows


def by_run(runs: Sequence[Rows]) -> Split:
    """The last fifth of the runs judges, the fifth before it calibrates, the rest is fitted on (each at least one).

    Raises ValueError with fewer than three runs.
    """
    if len(runs) < 3:
        raise ValueError(f"{len(runs)} runs: at least 3 are needed to fit, to calibrate and to judge")
    part = max(1, len(runs) // 5)
    return Split(Rows.concat(runs[: -2 * part]), Rows.concat(runs[-2 * part : -part]), Rows.concat(runs[-part:]))
