"""Evaluations of our own making, small enough for a test: the shape of the real ones, and made-up numbers."""

import numpy as np

from fleetcast.training.reports.results import ResultRow, Results

HOUR_MS = 3_600_000
LEADS_H = (1, 3, 6, 12, 24)
RIVALS = {"persistence": 1.0, "daily_seasonal": 1.3, "theta": 0.96}


def demand_results(seed: int = 0, origins: int = 240) -> Results:
    """Two sets; on venus ours wins up to 12 h and loses at 24 h, on earth it serves persistence."""
    results = Results("demand", skipped=["serving: no folder"])
    for dataset, series in (("venus", ("running",)), ("earth", ("vc1", "vc2"))):
        for step, hours in enumerate(LEADS_H):
            _add_lead(results, dataset, series, hours, 0.01 * (1 + step))
    results.predictions.append(_predictions(np.random.default_rng(seed), origins))
    return results


def _add_lead(results: Results, dataset: str, series: tuple[str, ...], hours: int, base: float) -> None:
    gain = {"venus": 0.8 if hours < 24 else 1.04, "earth": 1.0}[dataset]
    factors = RIVALS | {"ours": gain * (1.0 if dataset == "earth" else 0.96)}
    model = "trees" if dataset == "venus" else "persistence"
    for method, factor in factors.items():
        for metric, scale in (("wql", 1.0), ("interval_score_80", 4000.0), ("mae", 900.0)):
            value = base * factor * scale
            served = model if method == "ours" else ""
            results.rows.append(
                ResultRow(
                    dataset,
                    "running",
                    "all",
                    hours * 3600,
                    method,
                    served,
                    metric,
                    value,
                    value * 0.94,
                    value * 1.05,
                    480,
                )
            )
    for level, nominal in ((50, 0.5), (80, 0.8), (90, 0.9)):
        seen = nominal - 0.002 * hours
        results.rows.append(
            ResultRow(
                dataset, "running", "all", hours * 3600, "ours", model, f"coverage_{level}", seen, seen, seen, 480
            )
        )
    for name in series:
        results.rows.append(
            ResultRow(dataset, "running", name, hours * 3600, "ours", model, "wql", base, None, None, 240)
        )


def _predictions(rng: np.random.Generator, origins: int) -> dict[str, list[object]]:
    """A daily course with noise, and quantiles that widen with the lead."""
    hours = np.arange(origins + 25)
    course = 600 + 150 * np.sin(hours / 24 * 2 * np.pi) + rng.normal(0, 12, len(hours)).cumsum() * 0.5
    columns: dict[str, list[object]] = {name: [] for name in ("issued_ms", "horizon_s", "quantile", "value", "actual")}
    for origin in range(0, origins, 6):
        for lead in LEADS_H:
            for level, z in (
                (0.05, -1.64),
                (0.1, -1.28),
                (0.25, -0.67),
                (0.5, 0.0),
                (0.75, 0.67),
                (0.9, 1.28),
                (0.95, 1.64),
            ):
                row = (1_598_000_400_000 + origin * HOUR_MS, lead * 3600, level)
                middle = 0.8 * course[origin + lead] + 0.2 * course[origin]
                row += (middle + z * 9 * lead**0.6, course[origin + lead])
                for name, value in zip(columns, row, strict=True):
                    columns[name].append(value)
    n = len(columns["value"])
    return {
        "dataset": ["venus"] * n,
        "target": ["running"] * n,
        "series": ["all"] * n,
        **columns,
        "model": ["trees"] * n,
    }


def duration_results() -> Results:
    results = Results("duration")
    for method, factor in (("ours", 0.78), ("last_two", 1.2), ("group_quantiles", 1.0), ("time_limit", 1.9)):
        for level in (5, 10, 25, 50, 75, 90, 95, 99):
            value = factor * 0.6 * (1 - abs(level - 50) / 60)
            results.rows.append(_whole("ricc", method, f"pinball_{level:02d}", value))
        for metric, value in (
            ("log_mae", factor),
            ("within_2x", 0.5 / factor),
            ("under_share", 0.45),
            ("coverage_80", 0.78),
        ):
            results.rows.append(_whole("ricc", method, metric, value))
        for step, elapsed_s in enumerate((600, 3600, 21_600, 86_400)):
            value = factor * (1.5 - 0.1 * step)
            results.rows.append(
                ResultRow(
                    "ricc",
                    "remaining_s",
                    "all",
                    elapsed_s,
                    method,
                    "",
                    "remaining_log_mae",
                    value,
                    value * 0.9,
                    value * 1.1,
                    900,
                )
            )
    return results


def _whole(dataset: str, method: str, metric: str, value: float) -> ResultRow:
    return ResultRow(
        dataset,
        "run_s",
        "all",
        None,
        method,
        "trees" if method == "ours" else "",
        metric,
        value,
        value * 0.95,
        value * 1.05,
        900,
    )


def start_results() -> Results:
    results = Results("start")
    for method, share in (("ours", 0.44), ("limits", 0.11), ("group_median", 0.2)):
        for metric, value in (("within_10min", share), ("bound_90_correct", 0.93 if method == "ours" else 0.99)):
            results.rows.append(_whole("ricc", method, metric, value))
        results.rows.append(_whole("ricc", method, "bound_90_width", 9000.0 if method == "ours" else 40_000.0))
    return results
