"""Results of an evaluation: rows in long form, predictions, and intervals by block bootstrap."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DRAWS = 400
FEWEST = 8


class WindowRow(msgspec.Struct, frozen=True):
    """One number of one rolling window, over the forecasts that were issued within the window."""

    dataset: str
    target: str
    series: str
    horizon_s: int | None
    method: str
    metric: str
    begin_ms: int
    end_ms: int
    value: float
    n: int


class ResultRow(msgspec.Struct, frozen=True):
    """One number of an evaluation.

    method: "ours" or a baseline. model: the model that the gate served. low, high: 95 % interval. n: outcomes.
    """

    dataset: str
    target: str
    series: str
    horizon_s: int | None
    method: str
    model: str
    metric: str
    value: float | None
    low: float | None
    high: float | None
    n: int


@dataclass(slots=True)
class Results:
    """The rows of an evaluation, and the reasons why it skipped data sets or rows.

    windows: the numbers of each rolling window. predictions: blocks, each with columns of equal length.
    """

    task: str
    rows: list[ResultRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    windows: list[WindowRow] = field(default_factory=list)
    predictions: list[dict[str, Sequence[Any]]] = field(default_factory=list)

    def select(self, **wanted: object) -> list[ResultRow]:
        """Return the rows whose fields have the wanted values."""
        return [row for row in self.rows if all(getattr(row, name) == value for name, value in wanted.items())]


def compute_interval(
    numerator: Iterable[float], denominator: Iterable[float] | None = None, *, block: int = 1, seed: int = 0
) -> tuple[float | None, float | None, float | None]:
    """Return sum(numerator) / sum(denominator) and its 95 % interval by circular moving-block bootstrap.

    A denominator of None gives the mean. block: the number of neighbouring outcomes that are drawn
    together, because they are correlated. A block is at most a quarter of all outcomes. A block that
    reaches the end continues at the beginning (Politis and Romano, 1992). The value is None if the
    quotient is not finite. The interval is None for fewer than FEWEST outcomes.

    >>> compute_interval([1.0] * 8, [2.0] * 8)
    (0.5, 0.5, 0.5)
    """
    top = np.asarray(list(numerator), np.float64)
    below = np.ones(len(top)) if denominator is None else np.asarray(list(denominator), np.float64)
    known = np.isfinite(top) & np.isfinite(below)
    top, below = top[known], below[known]
    value = _divide_or_none(float(top.sum()), float(below.sum()))
    if value is None:
        return None, None, None
    if len(top) < FEWEST:
        return value, None, None
    block = max(1, min(block, len(top) // 4))
    sums = np.stack([_sum_circular_blocks(row, block) for row in (top, below)])
    rng = np.random.default_rng(seed)
    drawn = sums[:, rng.integers(0, len(top), (DRAWS, -(-len(top) // block)))].sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = drawn[0] / drawn[1]
    ratios = ratios[np.isfinite(ratios)]
    if not len(ratios):
        return value, None, None
    low, high = np.quantile(ratios, (0.025, 0.975))
    return value, min(float(low), value), max(float(high), value)


def _divide_or_none(top: float, below: float) -> float | None:
    """Return the quotient.

    Returns None if the divisor is zero or the quotient is beyond the largest float.
    """
    quotient = top / below if below else math.inf
    return quotient if math.isfinite(quotient) else None


def _sum_circular_blocks(values: Array, block: int) -> Array:
    """Return (n,) the sum of each value and its next neighbours, `block` values in all.

    After the last value, the neighbours continue with the first.
    """
    sums = np.concatenate(([0.0], np.cumsum(np.concatenate((values, values[: block - 1])))))
    return np.asarray(sums[block:] - sums[:-block])
