"""The tables of `fleetcast models`: the list of versions, and a card with its metrics and calibration."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fleetcast.cli.kit.screen import echo
from fleetcast.fleet.printable import escape_unprintable

if TYPE_CHECKING:
    from rich.console import Console

    from fleetcast.models.versions.card import Card

WIDTH = 200  # of a table that goes into a file or a pipe


def _make_console() -> "Console":
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDTH, markup=False, highlight=False, emoji=False)


def _print_table(names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", show_header=any(names))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape_unprintable, row))
    _make_console().print(table)


def print_versions(rows: Sequence[Mapping[str, Any]]) -> None:
    lines = []
    for row in rows:
        said = f"damaged: {row['damage']}" if row["damage"] else row["sentence"] or ""
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1024:,.0f}"
        mark = "serves" if row["serves"] else "shadow" if row["shadow"] else ""
        times = [_format_moment(row["created_ms"]), _format_moment(row["fitted_until_ms"])]
        gate = f"{row['gate'] or ''}{', forced' if row['forced'] else ''}"
        lines.append((row["kind"], row["version"], mark, *times, gate, size, said))
    _print_table(("kind", "version", "", "made", "fitted until", "gate", "KiB", "verdict"), lines, right=("KiB",))


def _format_moment(time_ms: int | None) -> str:
    from fleetcast.training.reports.card_page import format_moment

    return "" if time_ms is None else format_moment(time_ms).removesuffix(" UTC")


def print_card(card: "Card", document: Mapping[str, Any]) -> None:
    """Print a model's card: its facts, training data, metrics and calibration.

    document: the card as JSON, with the additional keys `serves`, `damage` and `promotions`.
    """
    gate = card.gate.sentence if card.gate else "it has not been compared with a baseline"
    facts = {
        "version": f"{card.kind} {card.version}{', serves' if document['serves'] else ''}",
        "gate": f"{card.state}: {gate}",
        "files": f"damaged: {document['damage']}" if document["damage"] else f"{len(card.files)}, whole",
        "made": f"{_format_moment(card.created_ms)} UTC by: {card.made_by}",
        "served": "; ".join(_describe_promotion(row) for row in document["promotions"]),
        "fitted until": f"{_format_moment(card.fitted_until_ms)} UTC",
        "seed": str(card.seed),
        "settings": ", ".join(f"{name} {value}" for name, value in card.settings.items()),
        "features": ", ".join(card.features),
        "made with": ", ".join(f"{name} {version}" for name, version in card.dependencies.items()),
    }
    _print_table(("", ""), [(name, value) for name, value in facts.items() if value])
    echo()
    if card.data:
        spans = [(s.dataset, _format_moment(s.first_ms), _format_moment(s.last_ms), f"{s.rows:,}") for s in card.data]
        _print_table(("data set", "from", "to", "rows"), spans, right=("rows",))
        echo()
    _print_metrics(card)
    _print_calibration(card)


def _describe_promotion(row: Mapping[str, Any]) -> str:
    """Describe in words one change of the version that serves."""
    words = "promoted" if row["action"] == "promote" else "rolled back to"
    forced = " by force" if row["forced"] else ""
    return f"{_format_moment(row['time_ms'])} UTC {words} {row['version']}{forced}"


def _print_metrics(card: "Card") -> None:
    """Print one line for each number and one column for each method, with intervals in brackets.

    Series are pooled. Coverage is left out, because the table of calibration shows it.
    """
    from fleetcast.training.reports.contests import OURS, format_lead, format_metric, select_pooled_rows
    from fleetcast.training.reports.results import ResultRow

    rows = select_pooled_rows(
        ResultRow(**{name: getattr(row, name) for name in ResultRow.__struct_fields__}) for row in card.metrics
    )
    rows = [row for row in rows if row.value is not None and not row.metric.startswith("coverage")]
    rows.sort(key=lambda row: (row.dataset, row.target, row.metric, row.horizon_s or 0))
    methods = sorted({row.method for row in rows}, key=lambda method: (method != OURS, method))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        among = "" if row.low is None or row.high is None else f" [{row.low:.3g}, {row.high:.3g}]"
        key = (row.dataset, row.target, format_metric(row.metric), format_lead(row.horizon_s))
        cells.setdefault(key, {})[row.method] = f"{row.value:.4g}{among}"
    if cells:
        lines = [(*key, *(values.get(method, "") for method in methods)) for key, values in cells.items()]
        heads = ("data set", "target", "metric", "horizon", *(method.replace("_", " ") for method in methods))
        _print_table(heads, lines, right=("horizon",))
        echo()


def _print_calibration(card: "Card") -> None:
    from fleetcast.training.reports.contests import format_lead

    rows = [
        (row.target, format_lead(row.horizon_s), f"{row.nominal:.0%}", f"{row.observed:.1%}", f"{row.n:,}")
        for row in card.calibration
    ]
    if rows:
        heads = ("calibration of", "horizon", "promised", "observed", "outcomes")
        _print_table(heads, rows, right=heads[1:])
