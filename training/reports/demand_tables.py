"""The tables of `evaluate demand`: our WQL compared with persistence and methods of statsmodels.

One table has a row for each set and target, with the mean and the worst window. Another has a row
for each method.
"""

from collections.abc import Sequence
from math import exp, log

from fleetcast.training.reports.contests import OURS, format_lead, format_target
from fleetcast.training.reports.results import Results, WindowRow
from fleetcast.training.reports.window_rows import compute_gains

PERSISTENCE = "persistence"
CLASSICAL = ("ets", "mstl", "autoreg")
Key = tuple[str, str, int | None]  # data set, target, lead


def make_demand_tables(results: Results) -> dict[str, list[list[str]]]:
    """Return name → table. A table is a list of rows of cells, with the header first."""
    numbers = _group_wql_rows(results.windows)
    return {
        "evaluate demand": _make_set_table(numbers),
        "evaluate demand, methods": _make_method_table(numbers, results),
    }


def _group_wql_rows(rows: Sequence[WindowRow]) -> dict[Key, list[WindowRow]]:
    found: dict[Key, list[WindowRow]] = {}
    for row in rows:
        if row.metric == "wql":
            found.setdefault((row.dataset, row.target, row.horizon_s), []).append(row)
    return found


def _list_leads(numbers: dict[Key, list[WindowRow]]) -> list[int | None]:
    return sorted({key[2] for key in numbers}, key=lambda lead_s: lead_s or 0)


def _make_set_table(numbers: dict[Key, list[WindowRow]]) -> list[list[str]]:
    """Return a row for each set and target, with the header first.

    For each lead, a cell compares our WQL with that of persistence, in the mean and in the worst window. The cell
    also compares our mean with that of the best method of statsmodels.
    """
    leads = _list_leads(numbers)
    lines = [
        ["WQL over persistence's, mean and worst window, % (over the best of statsmodels)", *map(format_lead, leads)]
    ]
    for dataset, target in dict.fromkeys(key[:2] for key in numbers):
        some = [numbers.get((dataset, target, lead_s), []) for lead_s in leads]
        windows = sorted({(row.begin_ms, row.end_ms) for rows in some for row in rows})
        days = (windows[0][1] - windows[0][0]) / 86_400_000
        name = f"{dataset}, {format_target(target)}, {len(windows)} × {days:.3g} days"
        lines.append([name, *(_format_cell(rows) for rows in some)])
    return lines


def _format_cell(rows: Sequence[WindowRow]) -> str:
    found = compute_gains(rows, [PERSISTENCE])
    if not found:
        return "–"
    said = f"{_format_percent(sum(found) / len(found))}, {_format_percent(max(found))}"
    means = {method: _average_values(rows, method) for method in (OURS, *CLASSICAL)}
    rivals = [(mean, method) for method in CLASSICAL if (mean := means[method]) is not None and mean > 0]
    own = means[OURS]
    if not rivals or own is None:
        return said
    best, name = min(rivals)
    return f"{said} ({_format_percent(own / best - 1)} {name})"


def _format_percent(share: float) -> str:
    """Format a share in percent. A share above 0 is bold, because it means that ours is worse.

    >>> _format_percent(-0.104), _format_percent(0.02), _format_percent(0.001)
    ('−10', '**+2**', '0')
    """
    percent = round(100 * share)
    if percent > 0:
        return f"**+{percent}**"
    return f"−{-percent}" if percent else "0"


def _average_values(rows: Sequence[WindowRow], method: str) -> float | None:
    values = [row.value for row in rows if row.method == method]
    return sum(values) / len(values) if values else None


def _make_method_table(numbers: dict[Key, list[WindowRow]], results: Results) -> list[list[str]]:
    """Return a row for each method, with the header first.

    For each lead, a row has the geometric mean of the method's WQL divided by that of persistence. It also states
    how often the method was the best, and how many of its fits failed.
    """
    leads = _list_leads(numbers)
    methods = list(dict.fromkeys(row.method for rows in numbers.values() for row in rows))
    best = [_find_best_method(rows) for rows in numbers.values()]
    lines = [["WQL over persistence's, geometric mean", *map(format_lead, leads), "best of all", "failed fits"]]
    for method in methods:
        cells = [
            _format_mean_ratio([rows for key, rows in numbers.items() if key[2] == lead_s], method) for lead_s in leads
        ]
        failed = [row for row in results.rows if row.method == method and row.metric == "failed_fits"]
        failures = f"{sum(row.value or 0 for row in failed):.0f} of {sum(row.n for row in failed)}" if failed else "–"
        judged = sum(any(row.method == method for row in rows) for rows in numbers.values())
        lines.append([method.replace("_", " "), *cells, f"{best.count(method)} of {judged}", failures])
    return lines


def _find_best_method(rows: Sequence[WindowRow]) -> str:
    means = {row.method: _average_values(rows, row.method) or 0.0 for row in rows}
    return min(means, key=lambda method: means[method])


def _format_mean_ratio(some: Sequence[Sequence[WindowRow]], method: str) -> str:
    pairs = [(_average_values(rows, method), _average_values(rows, PERSISTENCE)) for rows in some]
    logs = [log(own / usual) for own, usual in pairs if own and usual]
    return f"{exp(sum(logs) / len(logs)):.2f}" if logs else "–"
