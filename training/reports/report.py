"""A self-contained HTML page about an evaluation: where our methods win, where they lose, and every number."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from fleetcast.training.judges.risk_metrics import measure_reliability
from fleetcast.training.reports.contests import (
    ALL,
    MAIN,
    OURS,
    Comparison,
    describe_comparisons,
    format_lead,
    format_metric,
    format_target,
    make_comparisons,
    select_better,
    select_pooled_rows,
    select_undecided,
    select_worse,
)
from fleetcast.training.reports.fans import Shares, count_served_models, make_courses
from fleetcast.training.reports.page import (
    format_cell_text,
    render_list,
    render_page,
    render_panel,
    render_panel_grid,
    render_section,
    render_table,
)
from fleetcast.training.reports.plots import draw_bars, draw_calibration, draw_course, draw_lines, draw_reliability
from fleetcast.training.reports.results import ResultRow, Results

TITLES = {
    "demand": "Demand forecasts compared with their baselines",
    "duration": "Run times and remaining times compared with their baselines",
    "start": "Start times compared with their baselines",
    "risk": "Node risk compared with its baselines",
}
NOMINAL = {"coverage_50": 0.5, "coverage_80": 0.8, "coverage_90": 0.9}
FAR_OFF = 0.03
MOST_ROWS = 4000
MAX_MODELS_SHOWN = 4  # of a horizon
DEMAND_LINES = ("wql", "mae", "interval_score_80")
UNITS = {"active_nodes": "nodes", "arriving_jobs": "jobs", "request_rate": "requests a second"}


def render_report(results: Results) -> str:
    """Return the HTML page of one evaluation. Sections without rows are left out."""
    body = [render_verdicts(results), *render_sections(results)]
    if results.skipped:
        body.append(render_section("Skipped", render_list(results.skipped, "")))
    sets = len({row.dataset for row in results.rows})
    said = (
        f"{len(results.rows):,} numbers on {sets} data {'set' if sets == 1 else 'sets'}; "
        "95 % intervals by moving-block bootstrap; all methods on the same origins."
    )
    return render_page(TITLES.get(results.task, results.task), said, [*body, render_all_rows(results.rows)])


def render_sections(results: Results) -> Iterator[str]:
    """Yield the HTML sections of each set. The task of the evaluation decides their content."""
    tasks: dict[str, Callable[[Results], Iterator[str]]] = {
        "demand": _render_demand,
        "duration": _render_duration,
        "risk": _render_risk,
    }
    return tasks.get(results.task, _render_start)(results)


def render_verdicts(results: Results) -> str:
    """Return HTML boxes that list where we are better than the best baseline, equally good, and worse."""
    found = make_comparisons(results.rows, MAIN.get(results.task, ()))
    boxes = [
        _render_comparisons(
            f"{len(select_better(found))} of {len(found)} better", select_better(found), "than the best baseline"
        ),
        _render_comparisons(
            f"{len(select_worse(found))} of {len(found)} worse", select_worse(found), "than the best baseline"
        ),
    ]
    if select_undecided(found):
        boxes.append(
            _render_comparisons(
                f"{len(select_undecided(found))} of {len(found)} as good",
                select_undecided(found),
                "as the best baseline, within 1 %",
            )
        )
    return f'<div class="verdicts">{"".join(boxes)}</div>'


def _render_comparisons(head: str, some: Sequence[Comparison], note: str) -> str:
    apart = sum(contest.has_separate_intervals for contest in some)
    note += f"; the intervals of {apart} are apart" if apart else ""
    inner = f'<strong>{head}</strong><p class="quiet">{note}</p>{render_list(describe_comparisons(some), "Nowhere.")}'
    return f'<div class="panel">{inner}</div>'


def group_rows_by_set(rows: Iterable[ResultRow]) -> dict[tuple[str, str], list[ResultRow]]:
    """Return (dataset, target) → its pooled rows, in the order of the evaluation."""
    found: dict[tuple[str, str], list[ResultRow]] = {}
    for row in select_pooled_rows(rows):
        if row.value is not None:
            found.setdefault((row.dataset, row.target), []).append(row)
    return found


# -- demand ---------------------------------------------------------------------------------------------------------


def _render_demand(results: Results) -> Iterator[str]:
    drawn, shares = make_courses(results.predictions), count_served_models(results.predictions)
    for (dataset, target), rows in group_rows_by_set(results.rows).items():
        name = f"{dataset}, {format_target(target)}"
        inner = [_render_lines(rows, metric, name) for metric in DEMAND_LINES]
        inner += [render_calibration(rows, name), _render_coverage_table(rows)]
        inner.append(_render_served_models(rows, shares.get((dataset, target), {})))
        if (dataset, target) in drawn:
            course = drawn[dataset, target]
            of = "" if course.name in (ALL, target, dataset) else f" of {course.name}"
            svg = draw_course(course, f"{name}: forecasts", UNITS.get(target, "GPUs"))
            note = "Each fan was issued at its dotted line, and is drawn through the horizons that were judged."
            inner.append(render_panel(svg, f"What was forecast{of}", note, "wide"))
        yield render_section(name, render_panel_grid(inner))


def _render_lines(rows: list[ResultRow], metric: str, name: str) -> str:
    own = [row for row in rows if row.metric == metric and row.horizon_s is not None]
    if not own:
        return ""
    title = format_metric(metric)
    return render_panel(draw_lines(own, f"{name}: {title} by horizon"), f"{title} by horizon, less is better")


def render_calibration(rows: Iterable[ResultRow], name: str) -> str:
    """Return an HTML plot of our observed coverage against the promised coverage, for at most four horizons."""
    own = [row for row in rows if row.metric in NOMINAL and row.method == OURS and row.value is not None]
    if not own:
        return ""
    horizons = sorted({row.horizon_s for row in own}, key=_make_sort_key)
    shown = horizons if len(horizons) <= 4 else [horizons[at * (len(horizons) - 1) // 3] for at in range(4)]
    points = {
        format_lead(horizon) or OURS: [
            (NOMINAL[row.metric], row.value or 0.0) for row in own if row.horizon_s == horizon
        ]
        for horizon in shown
    }
    return render_panel(
        draw_calibration(points, f"{name}: calibration"), "Are the intervals honest?", "Grey: within 3 points.", "small"
    )


def _render_coverage_table(rows: Iterable[ResultRow]) -> str:
    """Return a table of our coverage by horizon, with our interval score and that of the best baseline.

    Coverage that differs from the promised one by more than 3 points is marked.
    """
    rows = list(rows)
    own = {(row.horizon_s, row.metric): row for row in rows if row.method == OURS}
    best: dict[int | None, ResultRow] = {}
    for rival in rows:
        if rival.metric == "interval_score_80" and rival.method != OURS:
            best[rival.horizon_s] = min(best.get(rival.horizon_s, rival), rival, key=lambda row: row.value or 0.0)
    horizons = sorted({horizon for horizon, metric in own if metric in NOMINAL}, key=_make_sort_key)
    lines, off = [], set()
    for line, horizon in enumerate(horizons):
        cells: list[object] = [format_lead(horizon) or "all"]
        for column, (metric, nominal) in enumerate(NOMINAL.items(), start=1):
            row = own.get((horizon, metric))
            cells.append(None if row is None or row.value is None else round(100 * row.value, 1))
            if row is not None and row.value is not None and abs(row.value - nominal) > FAR_OFF:
                off.add((line, column))
        score, beside = own.get((horizon, "interval_score_80")), best.get(horizon)
        cells += [score.value if score else None, beside.value if beside else None]
        lines.append(cells)
    if not lines:
        return ""
    names = ("", "50 %", "80 %", "90 %", "score", "baseline's")
    note = (
        "Outcomes inside, in %; marked: more than 3 points off. Interval scores at 80 %, ours and the best baseline's."
    )
    return render_panel(render_table(names, lines, frozenset(off)), "Coverage", note)


def _render_served_models(rows: Iterable[ResultRow], shares: Shares) -> str:
    """Return a table of the models that the gate served, by horizon.

    The table shows each model's share of all forecasts if these shares are known. Otherwise it shows the model
    that the row names.
    """
    lines = []
    for horizon, count in sorted(shares.items()):
        total = sum(count.values())
        said = [
            f"{name.replace('_', ' ')} {n / total:.0%}".replace("%", " %")
            for name, n in count.most_common(MAX_MODELS_SHOWN)
        ]
        lines.append((format_lead(horizon), ", ".join(said)))
    if not lines:
        own = {row.horizon_s: row.model for row in rows if row.method == OURS and row.model}
        lines = [
            (format_lead(at) or "all", own[at].replace("_", " ").replace("+", ", "))
            for at in sorted(own, key=_make_sort_key)
        ]
    return render_panel(render_table(("", "model"), lines), "What the gate served, most often first") if lines else ""


def _make_sort_key(horizon_s: int | None) -> int:
    """Return a sort key for horizons. A missing horizon comes first."""
    return horizon_s or 0


# -- durations ------------------------------------------------------------------------------------------------------


def _render_duration(results: Results) -> Iterator[str]:
    by_set = group_rows_by_set(results.rows)
    for dataset in dict.fromkeys(dataset for dataset, _ in by_set):
        rows = [row for (own, _), some in by_set.items() if own == dataset for row in some]
        yield render_section(dataset, render_panel_grid(_render_duration_panels(dataset, rows)))


def _render_duration_panels(dataset: str, rows: list[ResultRow]) -> Iterator[str]:
    pinball = [
        msgspec.structs.replace(row, horizon_s=int(row.metric.rpartition("_")[2]))
        for row in rows
        if row.metric.startswith("pinball_") and row.horizon_s is None
    ]
    levels = Counter(row.method for row in pinball)
    pinball = [row for row in pinball if levels[row.method] > 1]  # point forecasts are in the table
    if pinball:
        ticks = {row.horizon_s or 0: f"p{row.horizon_s or 0:02d}" for row in pinball}
        svg = draw_lines(pinball, f"{dataset}: pinball loss by level", ticks)
        yield render_panel(svg, "Run time: pinball loss of log seconds, less is better")
    remaining = [row for row in rows if row.metric == "remaining_log_mae" and row.horizon_s is not None]
    if remaining:
        svg = draw_lines(remaining, f"{dataset}: error of the remaining time")
        yield render_panel(svg, "Remaining time: log error by time already run")
    whole = [row for row in rows if row.horizon_s is None]
    groups = {
        metric: format_metric(metric)
        for metric in ("within_2x", "under_share")
        if any(r.metric == metric for r in whole)
    }
    if groups:
        shares = [row for row in whole if row.metric in groups]
        yield render_panel(draw_bars(shares, f"{dataset}: shares of jobs", groups), "Run time: shares of jobs")
    yield render_calibration([row for row in whole if row.metric in NOMINAL], dataset)
    yield _render_methods_table(whole)


def _render_methods_table(rows: Iterable[ResultRow]) -> str:
    """Return a table with a row for each metric and a column for each method.

    Intervals are in brackets.
    """
    rows = sorted((row for row in rows if row.value is not None), key=lambda row: row.metric)
    methods = sorted({row.method for row in rows}, key=lambda method: (method != OURS, method))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        among = (
            ""
            if row.low is None or row.high is None
            else f" [{format_cell_text(row.low)}, {format_cell_text(row.high)}]"
        )
        cells.setdefault(format_metric(row.metric), {})[row.method] = f"{format_cell_text(row.value)}{among}"
    if not cells:
        return ""
    lines = [(name, *(values.get(method) for method in methods)) for name, values in cells.items()]
    return render_panel(
        render_table(("", *(method.replace("_", " ") for method in methods)), lines), "All of it", kind="wide"
    )


# -- start times ----------------------------------------------------------------------------------------------------


def _render_start(results: Results) -> Iterator[str]:
    for (dataset, target), rows in group_rows_by_set(results.rows).items():
        inner = []
        groups = {
            m: format_metric(m) for m in ("within_10min", "bound_90_correct") if any(row.metric == m for row in rows)
        }
        if groups:
            shares = [row for row in rows if row.metric in groups]
            title = "Shares of starts; of the p90, 90 % is right"
            inner.append(render_panel(draw_bars(shares, f"{dataset}: shares of starts", groups), title))
        widths = [row for row in rows if row.metric == "bound_90_width"]
        if widths:
            svg = draw_bars(widths, f"{dataset}: width of the bound", {"bound_90_width": "p90 / actual"})
            inner.append(render_panel(svg, "The p90 bound over the actual wait, less is better"))
        inner.append(_render_methods_table(rows))
        yield render_section(f"{dataset}, {format_target(target)}" if target else dataset, render_panel_grid(inner))


# -- node risk ------------------------------------------------------------------------------------------------------


def _render_risk(results: Results) -> Iterator[str]:
    """Yield a section for each set, with a table and a reliability plot for each horizon.

    Rows without a horizon describe the trace of faults, not a method.
    """
    for (dataset, _), rows in group_rows_by_set(results.rows).items():
        inner = []
        for horizon in sorted({row.horizon_s for row in rows if row.horizon_s is not None}):
            points = measure_reliability(results.predictions, dataset, horizon)
            if points:
                svg = draw_reliability(points, f"{dataset}: reliability within {format_lead(horizon)}")
                note = "Tenths of the node-days by probability; on the dotted line faults come as often as predicted."
                inner.append(
                    render_panel(svg, f"Is the probability within {format_lead(horizon)} true?", note, "small")
                )
            inner.append(_render_methods_table([row for row in rows if row.horizon_s == horizon]))
        for row in rows:
            if row.metric == "first_fault_share":
                share = f"{row.value or 0.0:.0%}".replace("%", " %")
                said = f"{share} of the {row.n} faults judged hit a node that never had one: no history predicts those."
                inner.append(render_panel("", said))
        yield render_section(dataset, render_panel_grid(inner))


# -- everything -----------------------------------------------------------------------------------------------------


def render_all_rows(rows: Sequence[ResultRow]) -> str:
    """Return all numbers as a table. If there are more than MOST_ROWS, the pooled numbers come first."""
    ordered = sorted(rows, key=lambda row: row.series != ALL)[:MOST_ROWS]
    names = ("data set", "target", "series", "horizon", "method", "model", "metric", "value", "low", "high", "outcomes")
    lines = [
        (
            *(row.dataset, row.target, row.series, format_lead(row.horizon_s), row.method, row.model, row.metric),
            *(row.value, row.low, row.high, row.n),
        )
        for row in ordered
    ]
    left = len(rows) - len(ordered)
    more = f'<p class="quiet">{left:,} more rows, of single series, are in the JSON.</p>' if left else ""
    inner = f"<details><summary>{len(ordered):,} rows</summary>{render_table(names, lines)}{more}</details>"
    return render_section("Every number", f'<div class="panel">{inner}</div>')
