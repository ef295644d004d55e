"""Comparisons of our numbers with those of the best baseline, and sentences that describe them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleetcast.training.reports.results import ResultRow

OURS, ALL = "ours", "all"
LEVEL = 0.01  # a difference below this is none
MORE_IS_BETTER = frozenset(
    {
        *("within_2x", "within_10min", "bound_90_correct", "auroc", "ap", "brier_skill"),
        *("precision_top20", "precision_top1pct", "precision_top5pct", "recall_top5pct"),
    }
)
MAIN = {
    "demand": ("wql", "mae"),
    "duration": ("pinball_90", "log_mae", "remaining_log_mae"),
    "start": ("within_10min",),
    "interference": ("mae",),
    "queue": ("wait_mean_s", "wait_p99_s"),
    "risk": ("log_loss", "auroc", "precision_top20", "precision_top1pct", "brier_skill"),
}
TARGETS = {"run_s": "run time", "remaining_s": "remaining time", "start": "start time", "queue": "wait"}
WORDS = {
    "auroc": "AUROC",
    "ap": "average precision",
    "precision_top20": "precision of the 20 riskiest nodes a day",
    "log_loss": "log loss",
    "brier": "Brier score",
    "precision_top1pct": "precision of the riskiest 1 % of node-days",
    "precision_top5pct": "precision of the riskiest 5 % of node-days",
    "told_over_came": "mean probability over the share that came",
    "calibration_error": "calibration error over the share that came",
    "recall_top5pct": "faults among the riskiest 5 % of node-days",
    "brier_skill": "Brier skill",
    "wql": "WQL",
    "mae": "MAE",
    "mase": "MASE",
    "smape": "sMAPE",
    "interval_score_80": "interval score at 80 %",
    "log_mae": "MAE of log seconds",
    "remaining_log_mae": "MAE of log seconds",
    "within_2x": "share within a factor of 2",
    "under_share": "share predicted too short",
    "within_10min": "share of starts within 10 min",
    "bound_90_correct": "share that started by the p90",
    "bound_90_width": "p90 bound over the actual wait",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One of our numbers and the best baseline's number for the same forecasts."""

    ours: ResultRow
    rival: ResultRow

    @property
    def relative_gain(self) -> float:
        """How much better our number is, divided by the baseline's number. It is below 0 if ours is worse.

        If the baseline's number is 0, the gain is the difference of the two numbers.
        """
        ours, rival = self.ours.value or 0.0, self.rival.value or 0.0
        gain = ours - rival if self.ours.metric in MORE_IS_BETTER else rival - ours
        return gain / abs(rival) if rival else gain

    @property
    def has_separate_intervals(self) -> bool:
        """Return whether the two 95 % intervals do not overlap."""
        ours, rival = self.ours, self.rival
        if ours.low is None or ours.high is None or rival.low is None or rival.high is None:
            return False
        return ours.high < rival.low or rival.high < ours.low


def select_pooled_rows(rows: Iterable[ResultRow]) -> list[ResultRow]:
    """Return the rows that cover all series of a set.

    If a set has a single series, return that series' rows.
    """
    rows = list(rows)
    series: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        series.setdefault((row.dataset, row.target), set()).add(row.series)
    return [
        row
        for row in rows
        if row.series == ALL or (ALL not in (names := series[row.dataset, row.target]) and len(names) == 1)
    ]


def make_comparisons(rows: Iterable[ResultRow], metrics: Sequence[str]) -> list[Comparison]:
    """Return a comparison for each set, target, horizon and metric for which both we and a baseline have a number."""
    groups: dict[tuple[str, str, str, int | None], list[ResultRow]] = {}
    for row in select_pooled_rows(rows):
        if row.metric in metrics and row.value is not None:
            groups.setdefault((row.dataset, row.target, row.metric, row.horizon_s), []).append(row)
    found = []
    for group in groups.values():
        ours = [row for row in group if row.method == OURS]
        rivals = [row for row in group if row.method != OURS]
        if ours and rivals:
            best = max if group[0].metric in MORE_IS_BETTER else min
            found.append(Comparison(ours[0], best(rivals, key=lambda row: row.value or 0.0)))
    return found


def select_better(found: Iterable[Comparison]) -> list[Comparison]:
    return [contest for contest in found if contest.relative_gain > LEVEL]


def select_worse(found: Iterable[Comparison]) -> list[Comparison]:
    return [contest for contest in found if contest.relative_gain < -LEVEL]


def select_undecided(found: Iterable[Comparison]) -> list[Comparison]:
    return [contest for contest in found if abs(contest.relative_gain) <= LEVEL]


def describe_comparisons(found: Iterable[Comparison]) -> list[str]:
    """Return one sentence for each set, target and metric.

    >>> ours = ResultRow("venus", "running", "all", 3600, "ours", "trees", "wql", 0.9, 0.8, 1.0, 9)
    >>> rival = ResultRow("venus", "running", "all", 3600, "persistence", "", "wql", 1.2, 1.1, 1.3, 9)
    >>> describe_comparisons([Comparison(ours, rival)])
    ['venus, running, WQL: better by 25 % at 1 h (persistence)']
    """
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for contest in found:
        groups.setdefault((contest.ours.dataset, contest.ours.target, contest.ours.metric), []).append(contest)
    lines = []
    for (dataset, target, metric), group in groups.items():
        group.sort(key=lambda contest: contest.ours.horizon_s or 0)
        named = ", ".join(part for part in (dataset, format_target(target), format_metric(metric)) if part)
        sides = (("better by", select_better(group)), ("worse by", select_worse(group)))
        said = [f"{word} {_describe_contests(some)}" for word, some in sides if some]
        said += [f"as good {_describe_contests(select_undecided(group))}"] if select_undecided(group) else []
        lines.append(f"{named}: {'; '.join(said)}")
    return lines


def _describe_contests(group: list[Comparison]) -> str:
    """Describe the comparisons of one set, target and metric in one text: sizes, horizons and rivals.

    If neighbouring comparisons have the same rival, its name appears once.
    """
    parts = []
    for at, contest in enumerate(group):
        last = at + 1 == len(group) or group[at + 1].rival.method != contest.rival.method
        rival = f" ({contest.rival.method.replace('_', ' ')})" if last else ""
        where = f"at {format_lead(contest.ours.horizon_s)}" if contest.ours.horizon_s is not None else ""
        parts.append(" ".join(part for part in (_describe_change(contest), where) if part) + rival)
    return ", ".join(parts)


def _describe_change(contest: Comparison) -> str:
    """Describe the size of a difference in words. Returns "" if there is hardly a difference.

    For metrics that are shares, the text states both shares. For other metrics, it states the difference in %.
    """
    if abs(contest.relative_gain) <= LEVEL:
        return ""
    if contest.ours.metric in MORE_IS_BETTER:
        ours, rival = contest.ours.value or 0.0, contest.rival.value or 0.0
        said = f"{abs(ours - rival) * 100:.2g} points, {ours:.1%} against {rival:.1%}".replace("%", " %")
        return f"{said}," if contest.ours.horizon_s is not None else said
    size = abs(contest.relative_gain)
    if size > 1:
        return f"a factor of {1 + size:.3g}"
    return (f"{size:.1%}" if size < 0.0995 else f"{size:.0%}").replace("%", " %")


def format_target(target: str) -> str:
    """Return the name of a target in words, such as "run time" for `run_s`."""
    return TARGETS.get(target, target.replace("_", " "))


def format_metric(metric: str) -> str:
    """Return the name of a metric as people write it.

    >>> format_metric("pinball_90"), format_metric("coverage_80"), format_metric("wql")
    ('pinball loss at p90', 'coverage at 80 %', 'WQL')
    """
    head, _, level = metric.rpartition("_")
    if head == "pinball":
        return f"pinball loss at p{int(level)}"
    if head in ("coverage", "width"):
        return f"{head} at {level} %"
    return WORDS.get(metric, metric.replace("_", " "))


def format_lead(seconds: int | None) -> str:
    """Format a horizon, or the time that a job has run, in seconds, minutes or hours.

    >>> format_lead(600), format_lead(5400), format_lead(86400), format_lead(259200), format_lead(30)
    ('10 min', '1.5 h', '24 h', '72 h', '30 s')
    """
    if seconds is None:
        return ""
    if seconds >= 3600:
        return f"{seconds / 3600:g} h"
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds} s"
