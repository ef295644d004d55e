"""Conversion of dumps of the demand series by older versions, which counted whole GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.delta_bins import ARRIVING, QUEUED, ROWS, RUNNING, copy_to_smallest_type
from fleetcast.fleet.requests import WHOLE_GPU
from fleetcast.fleet.stateful import Dump

UNIT = "per_gpu"  # how many units of a dump are one GPU; a dump without it counts whole GPUs
GPU_ROWS = (ARRIVING, RUNNING, QUEUED)
GPUS_AT = 3  # of an attempt's row


def convert_to_milli_gpus(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Dump:
    """Return a dump of any version, with GPUs in thousandths.

    A dump of whole GPUs loses its inventory. When the series get the next inventory, they count all attempts again,
    in parts of GPUs.
    """
    if UNIT in about:
        return dict(about), dict(arrays)
    factors = np.ones(ROWS, np.int64)
    factors[list(GPU_ROWS)] = WHOLE_GPU
    scaled = dict(arrays)
    for number in range(len(about["bins"])):
        scaled[f"bins {number}"] = copy_to_smallest_type(arrays[f"bins {number}"] * factors[:, None])
    return {
        **about,
        "inventory": [],
        "known": [[*row[:GPUS_AT], row[GPUS_AT] * WHOLE_GPU, *row[GPUS_AT + 1 :]] for row in about["known"]],
        "sizes": [[*key, gpus * WHOLE_GPU] for *key, gpus in about.get("sizes", ())],
        "bins": [
            {
                **row,
                "before": (np.array(row["before"]) * factors).tolist(),
                "waiting": [_scale_change(change, factors) for change in row["waiting"]],
            }
            for row in about["bins"]
        ],
    }, scaled


def _scale_change(change: Sequence[int], factors: NDArray[np.int64]) -> list[int]:
    """Multiply the amounts of a waiting change by `factors`. change: its bin, then its amounts."""
    return [change[0], *(np.array(change[1:], np.int64) * factors).tolist()]
