"""Files and texts of results: summaries and tables as text, and predictions as Parquet."""

from pathlib import Path

from fleetcast.training.reports.demand_tables import make_demand_tables
from fleetcast.training.reports.results import ResultRow, Results
from fleetcast.training.reports.window_rows import summarise_windows

SHOWN = (
    "wql",
    "mae",
    "pinball_90",
    "remaining_log_mae",
    "within_10min",
    "harmful_at_73",
    "period_within_2pct",
    "phase_f1",
    "checkpoint_hit",
    "auroc",
    "precision_top20",
    "precision_top1pct",
    "precision_top5pct",
    "log_loss",
    "brier",
    "told_over_came",
    "calibration_error",
    "brier_skill",
    "precision",
    "recall",
    "f1",
    "top1",
    "node_top1",
    "delay_s",
    "delay_s_p90",
    "false_alarms_per_node_day",
    "flagged_after_repair_share",
    "false_alarms_per_10000_steps",
    "allocated_at_130",
    "seconds",
    "wait_mean_s",
    "wait_p99_s",
    "wait_max_s",
    "jain",
)
POOLED = ("all", "shuffled truth", "decoys alone", "healthy")


def write_predictions(results: Results, path: Path) -> None:
    """Write every forecast with its outcome. The file is complete or absent."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = path.with_suffix(".part")
    tables = [pa.table({name: pa.array(column) for name, column in block.items()}) for block in results.predictions]
    pq.write_table(pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({}), part)
    part.replace(path)


def format_summary(results: Results) -> str:
    """Format the main metrics by dataset, target and horizon: our number and each baseline's number.

    Only numbers over all series of a set are included.
    """
    return "\n".join(
        f"{' '.join(part for part in key if part):<44} {', '.join(f'{row.method} {row.value:.4g}' for row in rows)}"
        for key, rows in _group_pooled_rows(results).items()
    )


def make_task_tables(results: Results) -> dict[str, list[list[str]]]:
    """Return name → table for the tables of the results' task. The header is the first row."""
    if results.task == "demand" and results.windows:
        return make_demand_tables(results)
    return {f"evaluate {results.task}": make_result_table(results)}


def make_result_table(results: Results) -> list[list[str]]:
    """Return a table as rows of cells. Our numbers have their intervals.

    With rolling windows, our numbers also have the mean over the windows, and the value of the worst window.
    """
    head = ["data", "target", "metric", "horizon", "ours", "baselines"]
    cells = [[*head, "ours by window: mean, worst"] if results.windows else head]
    rolled = {
        (row.dataset, row.target, row.metric, row.horizon_s): f"{row.mean:.4g}, {row.worst:.4g} of {row.windows}"
        for row in summarise_windows(results.windows)
        if row.method == "ours" and row.series == "all"
    }
    for key, rows in _group_pooled_rows(results).items():
        ours = [f"{row.value:.4g}{_format_interval(row)}" for row in rows if row.method == "ours"]
        others = [f"{row.method} {row.value:.4g}" for row in rows if row.method != "ours"]
        line = [*key, ", ".join(ours) or "–", ", ".join(others) or "–"]
        first = rows[0]
        shown = rolled.get((first.dataset, first.target, first.metric, first.horizon_s), "–")
        cells.append([*line, shown] if results.windows else line)
    return cells


def _group_pooled_rows(results: Results) -> dict[tuple[str, str, str, str], list[ResultRow]]:
    """Return (dataset, target, metric, horizon or pool) → the pooled rows of all methods."""
    pooled: dict[tuple[str, str, str, str], list[ResultRow]] = {}
    for row in results.rows:
        if row.metric in SHOWN and row.series in POOLED and row.value is not None:
            among = "" if row.series == "all" else f"({row.series})"
            pooled.setdefault((row.dataset, row.target, row.metric, _format_horizon(row) or among), []).append(row)
    return pooled


def _format_interval(row: ResultRow) -> str:
    return "" if row.low is None else f" ({row.low:.4g} to {row.high:.4g})"


def _format_horizon(row: ResultRow) -> str:
    if row.horizon_s is None:
        return ""
    return f"{row.horizon_s / 3600:g} h" if row.horizon_s >= 3600 else f"{row.horizon_s // 60} min"
