"""Metrics by which operators judge a site.

They are waits by queue and class, use by pool and GPU model, and failures by category. The number of
series is limited. Smaller queues, pools and models beyond the limit are summed as `other`.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from typing import TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import FailureCategory
from fleetcast.service.exposition import Page
from fleetcast.service.pipeline.fleet_metrics import OTHER, QUEUES_SHOWN, WAIT_QUANTILES
from fleetcast.service.pipeline.gpu_states import compute_gpu_states
from fleetcast.service.pipeline.tick import RECENT_MS, Tick

KINDS_SHOWN = 40  # of (pool, GPU model)
CATEGORIES: tuple[str, ...] = get_args(FailureCategory)
K = TypeVar("K", bound=Hashable)


def make_site_page(tick: Tick) -> bytes:
    page = Page()
    _add_wait_metrics(page, tick)
    _add_pool_metrics(page, tick)
    _add_end_metrics(page, tick)
    return page.encode()


def find_largest(sizes: Mapping[K, float], shown: int) -> set[K]:
    """Return the `shown` keys with the largest sizes. If sizes are equal, the first name comes first."""
    return set(sorted(sizes, key=lambda key: (-sizes[key], str(key)))[:shown])


def _add_wait_metrics(page: Page, tick: Tick) -> None:
    found = tick.recent_waits_s
    sizes = Counter[str]()
    for (queue, _), waits in found.items():
        sizes[queue] += len(waits)
    shown = find_largest(sizes, QUEUES_SHOWN)
    reported: dict[tuple[str, str], list[NDArray[np.float64]]] = defaultdict(list)
    for (queue, class_), waits in found.items():
        reported[queue if queue in shown else OTHER, class_].append(waits)
    page.add_family(
        "summary",
        "class_started_wait_seconds",
        "How long the jobs of a queue and class that started within the last hour had waited.",
        [
            ({"queue": queue, "class": class_, "quantile": f"{q:g}"}, value)
            for (queue, class_), waits in sorted(reported.items())
            for q, value in zip(
                WAIT_QUANTILES, np.quantile(np.concatenate(waits), WAIT_QUANTILES).tolist(), strict=True
            )
        ],
    )


def _add_pool_metrics(page: Page, tick: Tick) -> None:
    kinds = [(node.pool, node.gpu_model or tick.gpu_models.get(node.name, "")) for node in tick.topology.nodes]
    sizes = Counter[tuple[str, str]]()
    for kind, gpus in zip(kinds, tick.topology.gpus.tolist(), strict=True):
        sizes[kind] += gpus
    shown = find_largest(sizes, KINDS_SHOWN)
    rows_of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, kind in enumerate(kinds):
        rows_of[kind if kind in shown else (OTHER, OTHER)].append(row)
    states, busy = compute_gpu_states(tick), tick.read_gpu_feature("gpu_util")
    reported = [({"pool": pool, "gpu_model": model}, rows) for (pool, model), rows in sorted(rows_of.items())]
    page.add_gauge(
        "pool_gpus",
        "GPUs of a pool and model by state.",
        [
            ({**labels, "state": state}, int(mask[rows].sum()))
            for labels, rows in reported
            for state, mask in states.items()
        ],
    )
    page.add_gauge(
        "pool_gpu_utilization_ratio",
        "Mean utilization of the GPUs in use of a pool and model, and of all of them.",
        [
            ({**labels, "gpus": name}, _average_known(busy[rows], mask[rows]))
            for labels, rows in reported
            for name, mask in (("running", states["running"]), ("all", tick.gpu_exists))
        ],
    )


def _average_known(busy: NDArray[np.float64], mask: NDArray[np.bool_]) -> float | None:
    known = busy[mask & ~np.isnan(busy)]
    return float(known.mean()) if len(known) else None


def _add_end_metrics(page: Page, tick: Tick) -> None:
    ended = [row for row in tick.events.ended if (row.over_ms or 0) > tick.now_ms - RECENT_MS]
    failures: Counter[str] = Counter(
        row.failure.category if row.failure else "unknown" for row in ended if row.state == "failed"
    )
    page.add_gauge(
        "failed_jobs",
        "Attempts that failed within the last hour, by category.",
        [({"category": category}, failures[category]) for category in CATEGORIES],
    )
    page.add_gauge(
        "ended_jobs",
        "Attempts that ended within the last hour, by outcome.",
        [({"outcome": name}, sum(row.state == name for row in ended)) for name in ("finished", "failed", "preempted")],
    )
