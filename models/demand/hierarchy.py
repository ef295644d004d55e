"""Reconciliation of forecasts: the medians of the parts must add up to the median of the whole.

Queues and pools add up to "all", and classes and groups to their queue. The forecast of the whole is
better, so the parts are adjusted. The shortfall or the excess is divided in proportion to the width of
each part's 80 % band, so that the least certain part changes most. Each median stays between 0 and its
part's ceiling. Quantiles stay in order. A job that waits in several queues counts in the present
value of each queue, but only once in "all". So the forecasts of these queues share the job.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.pool_inventory import EVERYTHING
from fleetcast.models.forecast import QUANTILES

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Parts = tuple[str, str, str, str]  # of a SeriesScope

MEDIAN = QUANTILES.index(0.5)
LOW_80, HIGH_80 = QUANTILES.index(0.1), QUANTILES.index(0.9)
TIE = 1e-9  # weight of a median relative to a band's width: it decides where no band has any width


class SeriesScope(Protocol):
    """The scope of a series: its queue, class, group and pool.

    A field is EVERYTHING if the series is not divided by it.
    """

    @property
    def queue(self) -> str: ...
    @property
    def class_(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def pool(self) -> str: ...


def reconcile_hierarchy(
    values: Array, keys: Sequence[SeriesScope], is_known: Mask, counts: Mask, ceilings: Array
) -> None:
    """Adjust queues and pools to "all" in place, then classes and groups to their queue.

    values: (quantile, horizon, series). is_known: (series,) whether the series takes part. counts:
    (series,) whether it is forecast in whole numbers. ceilings: (series,), inf for none.
    """
    at = {(key.queue, key.class_, key.group, key.pool): row for row, key in enumerate(keys) if is_known[row]}
    for whole, rows in _group_by_whole(list(at), at):
        parts = reconcile_parts(values[:, :, rows], values[MEDIAN, :, whole], ceilings[rows])
        values[:, :, rows] = round_parts(parts) if counts[[whole, *rows]].all() else parts


def _group_by_whole(keys: list[Parts], at: dict[Parts, int]) -> list[tuple[int, list[int]]]:
    """Return pairs of the row of a whole and the rows of its parts.

    A whole that is itself a part comes after the whole that contains it.
    """
    families: dict[tuple[int, str], list[int]] = {}
    for key in sorted(keys, key=lambda key: key[2] != EVERYTHING):
        queue, class_, group, pool = key
        if pool != EVERYTHING:
            kind, whole = "pool", (queue, class_, group, EVERYTHING)
        elif group != EVERYTHING:
            kind, whole = "group", (queue, class_, EVERYTHING, EVERYTHING)
        elif class_ != EVERYTHING and (queue, EVERYTHING, EVERYTHING, EVERYTHING) in at:
            kind, whole = "class", (queue, EVERYTHING, EVERYTHING, EVERYTHING)
        else:
            kind, whole = "queue", (EVERYTHING, class_, EVERYTHING, EVERYTHING)
        if whole in at and whole != key:
            families.setdefault((at[whole], kind), []).append(at[key])
    order = ("queue", "pool", "class", "group")
    return [(whole, rows) for (whole, kind), rows in sorted(families.items(), key=lambda item: order.index(item[0][1]))]


def reconcile_parts(parts: Array, whole: Array, ceilings: Array | None = None) -> Array:
    """Return parts whose medians sum to the whole, or to 0 where the whole is negative.

    parts: (quantile, horizon, part). whole: (horizon,) the median of the sum. ceilings: (part,), inf
    for none. If all parts are at their ceilings and the whole is larger, the parts exceed their ceilings.

    >>> reconcile_parts(np.full((7, 1, 2), 2.0), np.array([6.0]))[3].tolist()
    [[3.0, 3.0]]
    """
    median = parts[MEDIAN]
    limit = np.full(parts.shape[-1], np.inf) if ceilings is None else ceilings
    bound = np.maximum(whole, 0.0)
    missing = bound - median.sum(axis=1)
    weight = parts[HIGH_80] - parts[LOW_80] + TIE * (1 + median)
    room = np.maximum(limit - median, 0.0)
    room = np.where((room.sum(axis=1) < missing)[:, None], np.inf, room)
    shift = divide_by_weight(np.maximum(missing, 0.0), weight, room) - divide_by_weight(
        np.maximum(-missing, 0.0), weight, median
    )
    moved = median + shift
    top = np.where(moved > limit, moved, limit)
    return np.asarray(np.clip(parts + shift, 0.0, np.maximum(top, moved)))


def divide_by_weight(amount: Array, weight: Array, room: Array) -> Array:
    """Divide an amount in proportion to weights, at most `room` to each part. Returns (horizon, part).

    amount: (horizon,). weight, room: (horizon, part).

    >>> divide_by_weight(np.array([6.0]), np.array([[1.0, 1.0]]), np.array([[1.0, 9.0]])).tolist()
    [[1.0, 5.0]]
    """
    given = np.zeros_like(weight)
    for _ in range(weight.shape[1]):
        open_weight = np.where(given < room, weight, 0.0)
        left = np.maximum(amount - given.sum(axis=1), 0.0)
        total = open_weight.sum(axis=1)
        per_weight = np.divide(left, total, out=np.zeros_like(total), where=total > 0)
        given = np.minimum(given + open_weight * per_weight[:, None], room)
        if not ((given >= room) & (open_weight > 0)).any():
            break
    return given


def round_parts(parts: Array) -> Array:
    """Return (quantile, horizon, part) the parts rounded to whole numbers, with quantiles in order.

    If the medians add up to a whole number, they still do after rounding. The parts with the largest fractions
    are rounded up.

    >>> round_parts(np.full((7, 1, 3), 10 / 3))[3].tolist()
    [[4.0, 3.0, 3.0]]
    """
    median = np.floor(parts[MEDIAN] + TIE)
    missing = np.rint(parts[MEDIAN].sum(axis=1) - median.sum(axis=1))
    rank = np.argsort(np.argsort(median - parts[MEDIAN], axis=1, kind="stable"), axis=1)
    median += rank < missing[:, None]
    rounded = np.rint(parts)
    below, above = np.minimum(rounded[:MEDIAN], median), np.maximum(rounded[MEDIAN + 1 :], median)
    return np.concatenate([below, median[None], above])
