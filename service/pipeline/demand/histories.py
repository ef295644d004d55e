"""The histories from which demand is forecast.

They cover queues, classes, user groups, pools and served models, up to now.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.contribution import OTHER, find_allowed_pools
from fleetcast.features.demand_series import DemandSeries, Target
from fleetcast.features.pool_inventory import EVERYTHING
from fleetcast.features.request_series import RequestSeries
from fleetcast.models.demand.forecaster import BIN_S, MINUTE_S, Histories, SeriesKey

Array = NDArray[np.float64]

SPANS = {MINUTE_S: 24 * 60, BIN_S: 28 * 144}  # seconds of a bin -> bins
READ: tuple[Target, ...] = ("running", "queued", "arriving")
AT_A_TIME = 20  # series that are read before the loop gets its turn
SERVING = "inference"


def list_series_keys(demand: DemandSeries) -> tuple[SeriesKey, ...]:
    """Return the keys of all series: queues, classes, groups, the rest of each queue, and pools.

    The rest of a queue is its demand beyond its listed groups. If there are more queues than the limit,
    the queue OTHER has the demand of the unlisted ones.
    """
    queues = demand.list_queues()
    groups = [SeriesKey(*scope) for scope in demand.list_scopes("group") if scope.queue in queues]
    others = [SeriesKey(queue, group=OTHER) for queue in dict.fromkeys(key.queue for key in groups)]
    classes = [SeriesKey(*scope) for scope in demand.list_scopes("class")]
    unlisted = [SeriesKey(OTHER)] if demand.is_queue_list_full and OTHER not in queues else []
    pools = [SeriesKey(pool=pool) for pool in demand.list_pools()]
    return (*map(SeriesKey, queues), *unlisted, *classes, *groups, *others, *pools)


async def read_histories(demand: DemandSeries, now_ms: int) -> list[Histories]:
    """Read one history for each target, in the order of `forecaster.TARGETS`.

    The series are read in slices, so that events can be applied between two slices.
    """
    keys = list_series_keys(demand)
    listed = {SeriesKey(*scope) for kind in ("queue", "class", "group") for scope in demand.list_scopes(kind)}
    tables: dict[tuple[Target, int], Array] = {
        (target, bin_s): np.full((len(keys), bins), np.nan) for target in READ for bin_s, bins in SPANS.items()
    }
    for row, one in enumerate(keys):
        if row % AT_A_TIME == 0:
            await asyncio.sleep(0)
        for (target, bin_s), table in tables.items() if OTHER not in (one.queue, one.group) or one in listed else ():
            table[row] = demand.read_series(
                one.queue, target, now_ms, bin_s, SPANS[bin_s], one.class_, one.group, one.pool
            )
    for table in tables.values():
        _fill_other_demand(table, keys)
    tables["arriving", MINUTE_S] = sum_last_ten_minutes(tables["arriving", MINUTE_S])
    return await asyncio.to_thread(_make_histories, keys, tables, count_usable_gpus(demand, keys)) + [
        read_request_rates(demand.requests, now_ms)
    ]


def _make_histories(
    keys: tuple[SeriesKey, ...], tables: dict[tuple[Target, int], Array], gpus: Array
) -> list[Histories]:
    unbounded = np.full(len(keys), np.nan)
    covariates: dict[str, Array] = {target: tables[target, BIN_S] for target in READ}
    found = []
    for target in ("arriving", "running", "queued", "wanted"):
        minutes, ten_minute = (
            round_to_thousandths(tables["running", bin_s] + tables["queued", bin_s])
            if target == "wanted"
            else tables[target, bin_s]
            for bin_s in SPANS
        )
        capacity = gpus if target in ("running", "arriving") else unbounded
        found.append(Histories(target, keys, minutes, ten_minute, capacity, covariates))
    return found


def _fill_other_demand(table: Array, keys: Sequence[SeriesKey]) -> None:
    """Fill in the rows of unlisted demand: beyond the listed queues, and beyond the groups of each queue.

    table: (series, bin).
    """
    rows = {one: row for row, one in enumerate(keys)}
    unlisted = rows.get(SeriesKey(OTHER))
    if unlisted is not None and not np.isfinite(table[unlisted]).any():
        named = [one for one in rows if one == SeriesKey(one.queue) and one.queue not in (EVERYTHING, OTHER)]
        queues = [rows[one] for one in named]
        table[unlisted] = _compute_rest(table, rows[SeriesKey(EVERYTHING)], queues)
    for one, row in rows.items():
        if one.group == OTHER:
            groups = [at for other, at in rows.items() if other.queue == one.queue and other.is_part and at != row]
            table[row] = _compute_rest(table, rows[SeriesKey(one.queue)], groups)


def _compute_rest(table: Array, whole: int, parts: Sequence[int]) -> Array:
    """Return the demand of a series beyond its listed parts, at least 0: (bin,).

    table: (series, bin). whole: row of the series. parts: rows of its parts.
    """
    return np.maximum(round_to_thousandths(table[whole] - np.nan_to_num(table[parts]).sum(axis=0)), 0.0)


def round_to_thousandths(gpus: Array) -> Array:
    """Round sums of GPUs to thousandths. This removes the rounding errors of partial GPUs."""
    return np.round(gpus, 3)


def sum_last_ten_minutes(minutes: Array) -> Array:
    """Return the sum over the ten minutes that end with each bin: (series, bin).

    A bin is NaN if its minute is unknown.
    """
    sums = np.nan_to_num(minutes).cumsum(axis=1)
    sums[:, 10:] -= sums[:, :-10].copy()
    return np.where(np.isfinite(minutes), round_to_thousandths(sums), np.nan)


def count_usable_gpus(demand: DemandSeries, keys: Sequence[SeriesKey]) -> Array:
    """Return the number of GPUs that each series may use: (series,), NaN if no inventory states it.

    A pool may use the GPUs of its nodes. A queue may use the GPUs of the pools in which its jobs may run. If
    one of its jobs may run anywhere, it may use all pools.
    """
    gpus, total = demand.inventory.gpus, sum(demand.inventory.gpus.values())
    allowed = find_allowed_pools(demand.list_contributions())
    by_queue = {queue: sum(gpus.get(pool, 0) for pool in pools) for queue, pools in allowed.items()}
    counts = [by_queue.get(one.queue, total) if one.pool == EVERYTHING else gpus.get(one.pool, total) for one in keys]
    found = np.array(counts, np.float64)
    return np.where(found > 0, found, np.nan)


def read_request_rates(requests: RequestSeries, now_ms: int) -> Histories:
    """Return the requests per second of all queues together, of each queue, and of each model in a queue.

    A serving pool counts as a queue.
    """
    models = requests.list_models()
    queues = [EVERYTHING, *dict.fromkeys(queue for queue, _ in models if queue != EVERYTHING)] if models else []
    wholes = (SeriesKey(queue, SERVING) for queue in queues)
    keys = (*wholes, *(SeriesKey(queue, SERVING, model) for queue, model in models))
    minutes, ten_minute = (
        np.array([requests.read_series(one.queue, one.group, now_ms, bin_s, bins) for one in keys]).reshape(-1, bins)
        for bin_s, bins in SPANS.items()
    )
    return Histories("request_rate", keys, minutes, ten_minute, np.full(len(keys), np.nan))
