"""Results for people and programs: a table in words, predictions as Parquet."""

from pathlib import Path

from training.results import Results, Row

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
)
POOLED = ("all", "shuffled truth", "decoys alone", "healthy")


def write_predictions(results: Results, path: Path) -> None:
    """Every forecast with its outcome: complete or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = path.with_suffix(".part")
    tables = [pa.table({name: pa.array(column) for name, column in block.items()}) for block in results.predictions]
    pq.write_table(pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({}), part)
    part.replace(path)


def summary(results: Results) -> str:
    """The main metrics by dataset, target and horizon: ours beside each baseline; of series, the pools."""
    lines: dict[tuple[str, str, str, str], list[str]] = {}
    for row in results.rows:
        if row.metric in SHOWN and row.series in POOLED and row.value is not None:
            among = "" if row.series == "all" else f"({row.series})"
            key = (row.dataset, row.target, row.metric, _lead(row) or among)
            lines.setdefault(key, []).append(f"{row.method} {row.value:.4g}")
    return "\n".join(f"{' '.join(part for part in key if part):<44} {', '.join(cells)}" for key, cells in lines.items())


def _lead(row: Row) -> str:
    if row.horizon_s is None:
        return ""
    return f"{row.horizon_s / 3600:g} h" if row.horizon_s >= 3600 else f"{row.horizon_s // 60} min"
