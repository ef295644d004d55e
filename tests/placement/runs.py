"""Running jobs of a test, by name."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fleetcast.placement.machines.running_jobs import RUN_LEVELS, RunningJobs, make_running_jobs


class Run(NamedTuple):
    """A job that runs. `left_s`: quantiles of its remaining time, if known."""

    started_ms: int
    gpus: int
    limit_s: float | None = None
    left_s: tuple[float, ...] | None = None


def table_of(runs: Mapping[str, Run]) -> RunningJobs:
    unknown = (np.nan,) * len(RUN_LEVELS)
    return make_running_jobs(
        runs,
        started_ms=[run.started_ms for run in runs.values()],
        gpus=[run.gpus for run in runs.values()],
        limit_s=[np.nan if run.limit_s is None else run.limit_s for run in runs.values()],
        remaining_s=[unknown if run.left_s is None else run.left_s for run in runs.values()] or np.nan,
    )


def runs_of(table: RunningJobs) -> dict[str, Run]:
    """The runs of a table by name, to compare two tables."""
    return {name: Run(*table.find_run(name, -1)) for name in table.names}
