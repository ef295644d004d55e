"""The metrics of demand: the largest queues, pools and groups, the busiest served models, and the trees.

`fleetcast_demand_pools_left_out` counts the pools without their own series, and
`fleetcast_demand_groups_left_out` counts such groups.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from fleetcast.models.demand.rows import DemandRow, WaitsFor
from fleetcast.service.exposition import Page, format_horizon
from fleetcast.service.pipeline.demand.served_trees import ServedTrees

POOLS_SHOWN = 20
GROUPS_SHOWN = 20
MODELS_SHOWN = 20
HORIZONS_S = (3600, 86_400)
RATE_HORIZONS_S = (300, 1800, 3600)
QUANTILES = (0.5, 0.9)
QUEUE_QUANTILES = (0.1, 0.5, 0.9)

Rows = Sequence[DemandRow]
NamedRow = tuple[dict[str, str], DemandRow]  # labels, row


def make_demand_page(demand: Sequence[DemandRow]) -> bytes:
    """Make the metrics page of whole queues and pools. demand: rows of `/v1/demand`."""
    page = Page()
    demand = [row for row in demand if row.class_ == row.group == "all"]
    size: dict[tuple[str, str], float] = defaultdict(float)
    for row in demand:
        size[row.queue, row.pool] += math.inf if row.queue == row.pool == "all" else row.now
    queues = _find_largest_pools({one: gpus for one, gpus in size.items() if one[1] == "all"})
    pools = _find_largest_pools({one: gpus for one, gpus in size.items() if one[1] != "all"})
    shown = {*queues, *pools}
    rows = [
        ({"queue": row.queue, "pool": row.pool, "target": row.target}, row)
        for row in demand
        if (row.queue, row.pool) in shown
    ]
    _add_forecasts(page, rows)
    _add_waits(page, rows)
    left_out = len(size) - len(shown)
    page.add_number(
        "demand_pools_left_out", "Queues and pools without series, beyond the bound of this page.", left_out
    )
    return page.encode()


def _add_forecasts(page: Page, rows: Sequence[NamedRow]) -> None:
    """Add the present demand, its forecasts, and the accuracy of the forecasts."""
    page.add_gauge(
        "demand_now_gpus",
        "GPUs by queue, and by pool of machines: running, queued, wanted (both), and arriving within ten minutes.",
        [(labels, row.now) for labels, row in rows],
    )
    page.add_family(
        "summary",
        "demand_forecast_gpus",
        "Forecast of the same, by how far ahead.",
        [
            (
                {**labels, "horizon": format_horizon(horizon_s), "quantile": f"{q:g}"},
                row.values[row.quantiles.index(q)][h],
            )
            for labels, row in rows
            for q in QUEUE_QUANTILES
            if q in row.quantiles
            for h, horizon_s in enumerate(row.horizons_s)
        ],
    )
    ahead = sorted({horizon_s for _, row in rows for horizon_s in row.horizons_s})
    page.add_gauge(
        "demand_horizon_seconds",
        "How far ahead a horizon is, to sort by.",
        [({"horizon": format_horizon(horizon_s)}, horizon_s) for horizon_s in ahead],
    )
    page.add_gauge(
        "demand_coverage_ratio",
        "Share of outcomes inside the 10 to 90 % band, in the model's own record; 0.8 is right.",
        [(labels, (row.record or {}).get("coverage_80")) for labels, row in rows],
    )
    page.add_gauge(
        "demand_loss_ratio",
        "Weighted quantile loss over that of the best naive forecast, in the model's own record; below 1 is better.",
        [(labels, (row.record or {}).get("wql_vs_best_naive")) for labels, row in rows],
    )
    page.add_gauge(
        "demand_model_info", "Who serves a series.", [({**labels, "model": row.model}, 1) for labels, row in rows]
    )


def _add_waits(page: Page, rows: Sequence[NamedRow]) -> None:
    """Add the number of GPUs that jobs wait for, and the number that they may use."""
    waits = [(labels, row.waits_for) for labels, row in rows if isinstance(row.waits_for, WaitsFor)]
    page.add_gauge(
        "demand_waiting_gpus",
        "GPUs of jobs that wait, by what they wait for: machines, or a quota of their queue.",
        [
            ({"queue": labels["queue"], "pool": labels["pool"], "waits_for": name}, gpus)
            for labels, row in waits
            for name, gpus in (("machines", row.machines), ("quota", row.quota))
        ],
    )
    page.add_gauge(
        "demand_usable_gpus",
        "GPUs that the jobs of a queue may use, and those of a pool of machines.",
        [
            ({"queue": row.queue, "pool": row.pool}, row.capacity)
            for _, row in rows
            if row.target == "wanted" and isinstance(row.capacity, float)
        ],
    )


def _find_largest_pools(size: Mapping[tuple[str, str], float]) -> list[tuple[str, str]]:
    """Return the POOLS_SHOWN largest (queue, pool) keys, the largest first."""
    return sorted(size, key=lambda one: (-size[one], one))[:POOLS_SHOWN]


def make_parts_page(rows: Rows) -> bytes:
    """Make the metrics page of user groups and served models. rows: the rows of `/v1/demand`.

    The label `pool` of a served model is the pool of its exporter, as in the metrics of served models.
    """
    page = Page()
    groups = [row for row in rows if row.target == "wanted" and row.group != "all" and row.queue != "all"]
    shown = sorted(groups, key=lambda row: (-row.now, row.queue, row.group))[:GROUPS_SHOWN]
    named = [({"queue": row.queue, "group": row.group}, row) for row in shown]
    page.add_gauge(
        "demand_group_now_gpus", "GPUs that a user group wants.", [(labels, row.now) for labels, row in named]
    )
    page.add_family(
        "summary", "demand_group_forecast_gpus", "Forecast of the same.", _make_forecast_rows(named, HORIZONS_S)
    )
    page.add_number("demand_groups_left_out", "User groups without series.", len(groups) - len(shown))
    models = [row for row in rows if row.target == "request_rate" and row.group != "all"]
    shown = sorted(models, key=lambda row: (-row.now, row.queue, row.group))[:MODELS_SHOWN]
    named = [({"pool": row.queue, "model": row.group}, row) for row in shown]
    page.add_gauge("demand_requests_per_s", "Requests per second.", [(labels, row.now) for labels, row in named])
    page.add_family(
        "summary",
        "demand_requests_forecast_per_s",
        "Forecast of the same.",
        _make_forecast_rows(named, RATE_HORIZONS_S),
    )
    page.add_gauge(
        "demand_prescale_timestamp_seconds",
        "When to scale a served model up, so that it is ready before its p90 passes what now serves.",
        [(labels, scale / 1000) for labels, row in named if row.prescale and (scale := row.prescale.scale_ms)],
    )
    return page.encode()


def _make_forecast_rows(
    named: Sequence[NamedRow], horizons_s: Sequence[int]
) -> list[tuple[dict[str, str], float | None]]:
    return [
        (
            {**labels, "horizon": format_horizon(horizon_s), "quantile": f"{q:g}"},
            row.values[row.quantiles.index(q)][row.horizons_s.index(horizon_s)],
        )
        for labels, row in named
        for q in QUANTILES
        for horizon_s in horizons_s
    ]


def make_trees_page(trees: ServedTrees | None) -> bytes:
    """Make the metrics page of the demand trees: the version in use, and whether the promoted version fails."""
    page = Page()
    if trees is not None:
        rows = [({"model": trees.version}, 1)] if trees.version else []
        page.add_gauge("demand_trees_info", "The version of the demand trees that forecast.", rows)
        text = "1 while the promoted demand trees cannot forecast; the other forecasters serve."
        page.add_number("demand_trees_trouble", text, int(bool(trees.trouble)))
    return page.encode()
