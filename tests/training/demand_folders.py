"""Small folders of demand, made up, in the layouts of the public sets."""

from pathlib import Path

import numpy as np
import pandas as pd

START = pd.Timestamp("2020-01-01")


def times(bins, minutes=10):
    return START + pd.to_timedelta(np.arange(bins) * minutes, "min")


def write(table, folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    table.to_parquet(folder / name / "table.parquet", index=False)


def write_split(table, folder: Path, name: str, train_rows: int) -> tuple[Path, Path]:
    """The folders of train and test."""
    write(table[:train_rows], folder / "train", name)
    write(table[train_rows:], folder / "test", name)
    return folder / "train", folder / "test"


def nodes(values):
    return pd.DataFrame({"time": times(len(values)), "active": np.round(values), "total": 10_000})


def flows(bins, seed=0):
    rng = np.random.default_rng(seed)
    submitted = rng.poisson(3, bins)
    started = np.concatenate([[0], submitted[:-1]])
    ended = np.concatenate([[0], started[:-1]])
    return pd.DataFrame(
        {
            "time": times(bins),
            "submit_gpu_job": submitted,
            "submit_gpu_num": 2 * submitted,
            "start_gpu_num": 2 * started,
            "end_gpu_num": 2 * ended,
            "running_gpu_num": 100 + 2 * np.cumsum(started - ended),
        }
    )
