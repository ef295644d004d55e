"""The histories that demand is forecast from: series of every pool, class, user group and served model, as of now."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from features.contribution import EVERYTHING, OTHER
from features.demand_series import DemandSeries, Target
from features.request_series import RequestSeries
from fleet.topology import Topology
from models.demand.forecaster import BIN_S, MINUTE_S, Histories, SeriesKey

Array = NDArray[np.float64]

SPANS = {MINUTE_S: 24 * 60, BIN_S: 28 * 144}  # seconds of a bin -> bins
READ: tuple[Target, ...] = ("running", "queued", "arriving")
AT_A_TIME = 20  # series that are read before the loop gets its turn
SERVING = "inference"


def everybody(demand: DemandSeries) -> tuple[SeriesKey, ...]:
    """Return pools, then classes, then groups and what each pool has beyond them.

    The pool OTHER has the demand of pools beyond the bound.
    """
    pools = demand.pools()
    groups = [SeriesKey(*scope) for scope in demand.scopes("group") if scope.pool in pools]
    others = [SeriesKey(pool, group=OTHER) for pool in dict.fromkeys(key.pool for key in groups)]
    classes = [SeriesKey(*scope) for scope in demand.scopes("class")]
    unlisted = [SeriesKey(OTHER)] if demand.lists_no_more_pools and OTHER not in pools else []
    return (*map(SeriesKey, pools), *unlisted, *classes, *groups, *others)


async def read_histories(demand: DemandSeries, topology: Topology, now_ms: int) -> list[Histories]:
    """One a target, in the order of `forecaster.TARGETS`. Reading is sliced: events are taken in meanwhile."""
    keys = everybody(demand)
    listed = {SeriesKey(*scope) for kind in ("pool", "class", "group") for scope in demand.scopes(kind)}
    tables: dict[tuple[Target, int], Array] = {
        (target, bin_s): np.full((len(keys), bins), np.nan) for target in READ for bin_s, bins in SPANS.items()
    }
    for row, one in enumerate(keys):
        if row % AT_A_TIME == 0:
            await asyncio.sleep(0)
        for (target, bin_s), table in tables.items() if OTHER not in (one.pool, one.group) or one in listed else ():
            table[row] = demand.series(one.pool, target, now_ms, bin_s, SPANS[bin_s], one.class_, one.group)
    for table in tables.values():
        _fill_others(table, keys)
    tables["arriving", MINUTE_S] = last_ten(tables["arriving", MINUTE_S])
    return await asyncio.to_thread(_histories, keys, tables, gpus_by_pool(topology, keys)) + [
        read_requests(demand.requests, now_ms)
    ]


def _histories(keys: tuple[SeriesKey, ...], tables: dict[tuple[Target, int], Array], gpus: Array) -> list[Histories]:
    unbounded = np.full(len(keys), np.nan)
    covariates: dict[str, Array] = {target: tables[target, BIN_S] for target in READ}
    found = []
    for target in ("arriving", "running", "queued", "wanted"):
        minutes, ten_minute = (
            tables["running", bin_s] + tables["queued", bin_s] if target == "wanted" else tables[target, bin_s]
            for bin_s in SPANS
        )
        capacity = gpus if target in ("running", "arriving") else unbounded
        found.append(Histories(target, keys, minutes, ten_minute, capacity, covariates))
    return found


def _fill_others(table: Array, keys: Sequence[SeriesKey]) -> None:
    """Fill in what "all" has beyond the listed pools, and a pool beyond its groups. table: (series, bin)."""
    rows = {one: row for row, one in enumerate(keys)}
    unlisted = rows.get(SeriesKey(OTHER))
    if unlisted is not None and not np.isfinite(table[unlisted]).any():
        pools = [row for one, row in rows.items() if one == SeriesKey(one.pool) and one.pool not in (EVERYTHING, OTHER)]
        table[unlisted] = np.maximum(table[rows[SeriesKey(EVERYTHING)]] - np.nan_to_num(table[pools]).sum(axis=0), 0.0)
    for one, row in rows.items():
        if one.group == OTHER:
            groups = [at for other, at in rows.items() if other.pool == one.pool and other.is_part and at != row]
            table[row] = np.maximum(table[rows[SeriesKey(one.pool)]] - np.nan_to_num(table[groups]).sum(axis=0), 0.0)


def last_ten(minutes: Array) -> Array:
    """(series, bin) sums over the ten minutes that end with each; NaN where the minute is unknown."""
    sums = np.nan_to_num(minutes).cumsum(axis=1)
    sums[:, 10:] -= sums[:, :-10].copy()
    return np.where(np.isfinite(minutes), sums, np.nan)


def gpus_by_pool(topology: Topology, keys: Sequence[SeriesKey]) -> Array:
    """(series,) GPUs that a pool can run on: of its nodes, or of all where no node names the pool; NaN for none."""
    pools: Counter[str] = Counter()
    for node in topology.nodes:
        pools[node.pool] += node.gpus
    total = sum(pools.values())
    counts = np.array([pools.get(one.pool, total) for one in keys], np.float64)
    return np.where(counts > 0, counts, np.nan)


def read_requests(requests: RequestSeries, now_ms: int) -> Histories:
    """Requests per second: of all pools, of each, and of each of its models."""
    models = requests.models()
    pools = [EVERYTHING, *dict.fromkeys(pool for pool, _ in models if pool != EVERYTHING)] if models else []
    keys = (*(SeriesKey(pool, SERVING) for pool in pools), *(SeriesKey(pool, SERVING, model) for pool, model in models))
    minutes, ten_minute = (
        np.array([requests.series(one.pool, one.group, now_ms, bin_s, bins) for one in keys]).reshape(-1, bins)
        for bin_s, bins in SPANS.items()
    )
    return Histories("request_rate", keys, minutes, ten_minute, np.full(len(keys), np.nan))
