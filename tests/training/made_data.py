"""Small data sets in the layout of the public ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd


def make_data(
    folder: Path, demand: Sequence[str] = ("made",), jobs: Sequence[str] = ("made",), start: str = "2020-04-01"
) -> None:
    """Write demand sets with a daily square wave of active nodes, and job histories of 300 jobs."""
    rng = np.random.default_rng(0)
    bins = np.arange(9 * 144)
    for name in demand:
        (folder / "demand" / name).mkdir(parents=True)
        times = pd.to_datetime(start) + pd.to_timedelta(bins * 10, unit="min")
        running = np.round(60 + 50 * ((bins // 72) % 2) + rng.normal(0, 1, len(bins)))
        table = pd.DataFrame({"time": times, "active": running})
        table.to_parquet(folder / "demand" / name / f"{name}.parquet")
    for name in jobs:
        (folder / "jobs" / name).mkdir(parents=True)
        submit = np.sort(rng.uniform(0, 8e5, 300)).round()
        rows = {"job_id": np.arange(300), "submit_s": submit, "wait_s": 5.0, "user": rng.integers(0, 5, 300)}
        rows |= {"run_s": rng.lognormal(6, 1, 300).round(), "procs_alloc": 8, "procs_req": 8, "status": 1, "group": 1}
        pd.DataFrame(rows).to_parquet(folder / "jobs" / name / f"{name}.parquet")
