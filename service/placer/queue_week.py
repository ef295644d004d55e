"""Shares of GPU time and waits of each queue in the last seven days, from the ledger.

The shares are given for each day and for the whole week.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleetcast.placement.queues.charges import Charge, list_leaf_ancestors

DAY_MS = 86_400_000
DAYS = 7
WEEK_MS = DAYS * DAY_MS
RETENTION_MS = 60_000


@dataclass(frozen=True, slots=True)
class QueueWeek:
    """The shares and waits of queues in seven days.

    shares: each queue's share of the GPU time that the queues of its parent held. by_day: the same for
    each day, oldest first, or None for a day on which no queue held a GPU. waits: quantiles of the waits of
    placed requests, in seconds.
    """

    shares: dict[str, float]
    by_day: dict[str, list[float | None]]
    waits: dict[str, dict[str, float]]


def summarise_queue_week(charges: Sequence[Charge], now_ms: int) -> QueueWeek:
    """Summarise each queue's shares and waits in the seven days before `now_ms`, from its charges."""
    edges = [now_ms - (DAYS - day) * DAY_MS for day in range(DAYS + 1)]
    days = [Counter[str]() for _ in range(DAYS)]
    waits: dict[str, list[float]] = {}
    for charge in charges:
        names = list_leaf_ancestors(charge.leaf)
        for day, held in enumerate(days):
            gpu_s = charge.compute_held_gpu_s(edges[day], edges[day + 1])
            for name in names if gpu_s > 0 else ():
                held[name] += gpu_s  # type: ignore[assignment]
        if charge.queued_ms is not None:
            for name in names:
                waits.setdefault(name, []).append((charge.held_ms - charge.queued_ms) / 1000)
    whole = _compute_shares(sum(days, Counter[str]()))
    by_day = [_compute_shares(held) for held in days]
    by_name = {name: [day.get(name, 0.0) if day else None for day in by_day] for name in whole}
    return QueueWeek(whole, by_name, {name: _compute_quantiles(rows) for name, rows in waits.items()})


def _compute_shares(held: Counter[str]) -> dict[str, float]:
    """Return queue → its share of the GPU time that queues with the same parent held."""
    whole = Counter[str]()
    for name, gpu_s in held.items():
        whole[name.rpartition("/")[0]] += gpu_s
    return {name: round(gpu_s / whole[name.rpartition("/")[0]], 4) for name, gpu_s in held.items()}


def _compute_quantiles(values: list[float]) -> dict[str, float]:
    return {"p50": round(float(np.quantile(values, 0.5)), 1), "p90": round(float(np.quantile(values, 0.9)), 1)}
