"""Tables and plots of an evaluation's metrics over magnitude, scrape interval or missing telemetry."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fleetcast.training.reports.plots import OURS_INK, RIVAL_INKS, open_canvas
from fleetcast.training.reports.results import ResultRow, Results

METRICS = {
    "straggler": (
        ("f1", "all", "F1"),
        ("recall", "all", "recall"),
        ("precision", "all", "precision"),
        ("false_alarms_per_node_day", "all", "false alarms a healthy node-day"),
    ),
    "risk": (
        ("auroc", "all", "AUROC, all faults"),
        ("auroc", "with precursor", "AUROC, with a precursor"),
        ("warned_share", "with precursor", "warned, with a precursor"),
        ("quiet_share_above_alarm", "all", "quiet moments above the alarm"),
    ),
}
INKS = """<style>svg { --ink: #12161b; --ink-3: #5c6673; --line: #d5dae0; --ours: #1d5fc4; --rival-0: #6d7683; }
@media (prefers-color-scheme: dark) { svg { --ink: #eceff3; --ink-3: #949eab; --line: #3a424d; --ours: #79aefc; } }
</style>"""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of a curve: the metrics at one magnitude, interval or set of missing telemetry.

    at: the point's place on the axis, a number or the name of the telemetry that was left out. faults: the
    number of faults judged. values: name of a column → (value, low, high), None if unknown.
    """

    at: float | str
    faults: int
    values: dict[str, tuple[float, float | None, float | None]] = field(default_factory=dict)

    def format_values(self) -> str:
        """Return the point's numbers as one line of text."""
        return ", ".join(f"{name} {value:.3f}" for name, (value, _, _) in self.values.items())


def make_curve_point(task: str, at: float | str, results: Results) -> CurvePoint:
    """Return a point from the results of one evaluation.

    If runs were judged separately, their numbers are averaged, weighted by the number of outcomes.
    """
    values = {}
    for metric, series, name in METRICS[task]:
        rows = results.select(method="ours", metric=metric, series=series)
        known = [row for row in rows if row.value is not None]
        if known:
            values[name] = _average_rows(known)
    return CurvePoint(at, _count_faults(task, results), values)


def _average_rows(rows: Sequence[ResultRow]) -> tuple[float, float | None, float | None]:
    if len(rows) == 1:
        return float(rows[0].value or 0.0), rows[0].low, rows[0].high
    own = np.array([row.value for row in rows], np.float64)
    return float(np.average(own, weights=np.maximum([row.n for row in rows], 1))), float(own.min()), float(own.max())


def _count_faults(task: str, results: Results) -> int:
    """Return the number of judged faults: those that were visible (straggler), or all of them (risk)."""
    metric, method = ("recall", "ours") if task == "straggler" else ("precursor_share", "truth")
    return sum(row.n for row in results.select(method=method, metric=metric, series="all"))


def format_point_label(at: float | str) -> str:
    """Return the name of a point in tables and plots."""
    return at if isinstance(at, str) else f"{at:g}"


def make_curve_table(task: str, axis: str, points: Sequence[CurvePoint]) -> list[list[str]]:
    """Return a table with the header first and then one row for each point.

    Brackets hold the 95 % interval (straggler) or the range over the runs (risk).
    """
    names = [name for _, _, name in METRICS[task]]
    return [
        [axis, "faults", *names],
        *(
            [format_point_label(one.at), str(one.faults), *(_format_cell(one.values.get(name)) for name in names)]
            for one in points
        ),
    ]


def _format_cell(value: tuple[float, float | None, float | None] | None) -> str:
    if value is None:
        return "–"
    middle, low, high = (None if number is None else f"{number:.3f}".lstrip("0") or "0" for number in value)
    return f"{middle}" if low is None or high is None else f"{middle} ({low} to {high})"


def draw_curve(task: str, axis: str, points: Sequence[CurvePoint]) -> str:
    """Draw the first metric and the false alarms over the points. Returns an SVG file as text.

    The file suits light and dark pages. Its text remains text and is not drawn as paths.
    """
    good, bad = METRICS[task][0][2], METRICS[task][-1][2]
    at = np.arange(len(points))
    with open_canvas(f"{good} and {bad} over {axis}", width=4.6, height=2.6) as canvas:
        axes = canvas.axes
        for name, ink, mark, dash in ((good, OURS_INK, "o", "-"), (bad, RIVAL_INKS[0], "s", (0, (5, 2)))):
            y = np.array([one.values.get(name, (np.nan, None, None))[0] for one in points])
            axes.plot(at, y, color=ink, marker=mark, linestyle=dash, label=name)
        axes.set_xticks(at, [format_point_label(one.at).replace("+", "\n") for one in points])
        axes.set_xlabel(axis)
        axes.set_ylim(bottom=0)
        handles, names = axes.get_legend_handles_labels()
        canvas.figure.legend(handles, names, loc="outside upper left", ncols=2, fontsize=8)
    head, _, rest = canvas.svg.partition(">")
    return f"{head}>{INKS}{rest}"
