"""Recognition of a job's kind of work: the mean levels of its metrics, and the probability of each class."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.period import Period

Array = NDArray[np.float64]

CLASSES = ("training", "inference", "idle")
IDLE_ACTIVITY = 0.02
ACTIVE_SHARE = 0.05  # of the samples; a job that computes less is idle


@dataclass(frozen=True, slots=True)
class Shape:
    """The mean levels of a job's metrics while it computes, from 0 to 1, NaN if unknown.

    `exchange_ratio`: bytes between GPUs, divided by host bytes.
    """

    active_share: float
    activity: float
    tensor_share: float  # of SM activity that is tensor work
    steadiness: float  # 1 minus spread over mean of activity
    exchange_ratio: float
    periodic: float  # strength of its period


def compute_shape(activity: Array, tensor: Array, exchange: Array, host: Array, period: Period) -> Shape:
    """Return the levels of the channels while the job computes, NaN where a channel reports nothing.

    activity, tensor, exchange, host: (sample,) means over the job's GPUs.
    """
    on = activity > IDLE_ACTIVITY
    known = np.isfinite(activity)
    if not on.any():
        return Shape(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    level = float(np.mean(activity[on]))
    return Shape(
        active_share=float(on.sum() / known.sum()),
        activity=level,
        tensor_share=_compute_known_mean(tensor[on]) / level,
        steadiness=max(0.0, 1 - float(np.std(activity[on])) / level),
        exchange_ratio=_compute_known_mean(exchange[on]) / np.fmax(_compute_known_mean(host[on]), 1.0),
        periodic=period.strength if period.period_s is not None else 0.0,
    )


def estimate_class_odds(shape: Shape) -> dict[str, float]:
    """Return class → its probability, for each of CLASSES. The probabilities add up to 1.

    Training keeps the SMs busy, mostly with tensor work, exchanges gradients and is periodic. Inference is
    bound by memory, with little tensor work and no period. We set the weights on eight recorded runs, which
    are too few to calibrate them.

    >>> odds = estimate_class_odds(Shape(1.0, 0.65, 0.3, 0.95, 100.0, 0.9))
    >>> max(odds, key=odds.get)
    'training'
    """
    if shape.active_share < ACTIVE_SHARE:
        idle = 0.98 - 2 * shape.active_share
        return {"training": (1 - idle) / 2, "inference": (1 - idle) / 2, "idle": idle}
    parts = [
        6 * (shape.activity - 0.35),
        8 * (shape.tensor_share - 0.2),
        float(np.clip(np.log10(np.maximum(shape.exchange_ratio, 0.01)), -1, 1)),
        2 * shape.periodic,
    ]
    score = float(np.nansum(parts))
    training = float(1 / (1 + np.exp(-score)))
    busy = 1 - 0.02 / max(shape.active_share, ACTIVE_SHARE)
    return {"training": busy * training, "inference": busy * (1 - training), "idle": 1 - busy}


def _compute_known_mean(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan
