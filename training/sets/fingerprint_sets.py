"""Shared parts of the fingerprint evaluations: reading sets with some bad files, and rows of means."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pandas as pd

from fleetcast.training.reports.results import ResultRow, Results, compute_interval

T = TypeVar("T")
CHANNELS = (
    "sm_active",
    "tensor_active",
    "power_w",
    "nvlink_tx_bytes_s",
    "pcie_tx_bytes_s",
    "ib_tx_bytes_s",
)
MODELS = {
    "period": "autocorrelation",
    "expected": "template",
    "phase": "rules",
    "class": "rules",
    "checkpoint": "renewal",
}
UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, zlib.error, msgspec.MsgspecError)


def make_mean_row(
    dataset: str, target: str, method: str, metric: str, values: Sequence[float], seed: int, series: str = "all"
) -> ResultRow:
    """Return a result row with the mean of `values` and its interval."""
    value, low, high = compute_interval(values, seed=seed)
    model = MODELS[target] if method == "ours" else method
    return ResultRow(dataset, target, series, None, method, model, metric, value, low, high, len(values))


def read_files(results: Results, dataset: str, paths: Sequence[Path], read: Callable[[Path], T | None]) -> Iterator[T]:
    """Yield the result of `read` for each path, except results that are None.

    The number of unreadable files is added to `skipped` of the results, with a reason.
    """
    odd = []
    for path in paths:
        try:
            found = read(path)
        except UNREADABLE as error:
            odd.append(f"{path.parent.name}/{path.name}: {' '.join(str(error).split())[:200] or type(error).__name__}")
            continue
        if found is not None:
            yield found
    if odd:
        results.skipped.append(f"{dataset}: {len(odd)} of {len(paths)} cannot be used, the first is {odd[0]}")


def convert_to_numbers(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return some columns of a table as numbers. A value that is not a number becomes NaN.

    Raises KeyError if a column is missing.
    """
    return table[list(names)].apply(pd.to_numeric, errors="coerce").astype(np.float64)


# -- periods ------------------------------------------------------------------------------------------------------
