"""The metrics of demand that `fleet_metrics` lacks.

They cover the largest groups, the busiest served models, and the trees.
"""

from collections.abc import Sequence

from fleetcast.models.demand.rows import DemandRow
from fleetcast.service.exposition import Page, span
from fleetcast.service.pipeline.demand.served_trees import ServedTrees

GROUPS_SHOWN = 20
MODELS_SHOWN = 20
HORIZONS_S = (3600, 86_400)
RATE_HORIZONS_S = (300, 1800, 3600)
QUANTILES = (0.5, 0.9)

Rows = Sequence[DemandRow]


def make_parts_page(rows: Rows) -> bytes:
    """Make the page of user groups and served models. rows: of `/v1/demand`.

    The label `pool` of a served model is that of its exporter, as in the metrics of served models.
    """
    page = Page()
    groups = [row for row in rows if row.target == "wanted" and row.group != "all" and row.queue != "all"]
    shown = sorted(groups, key=lambda row: (-row.now, row.queue, row.group))[:GROUPS_SHOWN]
    named = [({"queue": row.queue, "group": row.group}, row) for row in shown]
    page.gauge("demand_group_now_gpus", "GPUs that a user group wants.", [(labels, row.now) for labels, row in named])
    page.add("summary", "demand_group_forecast_gpus", "Forecast of the same.", _ahead(named, HORIZONS_S))
    page.number("demand_groups_left_out", "User groups without series.", len(groups) - len(shown))
    models = [row for row in rows if row.target == "request_rate" and row.group != "all"]
    shown = sorted(models, key=lambda row: (-row.now, row.queue, row.group))[:MODELS_SHOWN]
    named = [({"pool": row.queue, "model": row.group}, row) for row in shown]
    page.gauge("demand_requests_per_s", "Requests per second.", [(labels, row.now) for labels, row in named])
    page.add("summary", "demand_requests_forecast_per_s", "Forecast of the same.", _ahead(named, RATE_HORIZONS_S))
    page.gauge(
        "demand_prescale_timestamp_seconds",
        "When to scale a served model up, so that it is ready before its p90 passes what now serves.",
        [(labels, scale / 1000) for labels, row in named if row.prescale and (scale := row.prescale.scale_ms)],
    )
    return page.encode()


def _ahead(
    named: Sequence[tuple[dict[str, str], DemandRow]], horizons_s: Sequence[int]
) -> list[tuple[dict[str, str], float | None]]:
    return [
        (
            {**labels, "horizon": span(horizon_s), "quantile": f"{q:g}"},
            row.values[row.quantiles.index(q)][row.horizons_s.index(horizon_s)],
        )
        for labels, row in named
        for q in QUANTILES
        for horizon_s in horizons_s
    ]


def make_trees_page(trees: ServedTrees | None) -> bytes:
    """Make the metrics of the trees: which version forecasts, and whether the promoted version fails to."""
    page = Page()
    if trees is not None:
        rows = [({"model": trees.version}, 1)] if trees.version else []
        page.gauge("demand_trees_info", "The version of the demand trees that forecast.", rows)
        text = "1 while the promoted demand trees cannot forecast; the other forecasters serve."
        page.number("demand_trees_trouble", text, int(bool(trees.trouble)))
    return page.encode()
