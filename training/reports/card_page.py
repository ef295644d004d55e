"""An HTML page for a model version's card: verdict of the gate, metrics, calibration, data and files."""

from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape

import msgspec

from fleetcast.models.versions.card import Card, Coverage
from fleetcast.training.reports.contests import format_lead
from fleetcast.training.reports.page import (
    render_page,
    render_panel,
    render_panel_grid,
    render_section,
    render_table,
    render_terms,
)
from fleetcast.training.reports.plots import draw_calibration
from fleetcast.training.reports.report import FAR_OFF, render_all_rows, render_sections, render_verdicts
from fleetcast.training.reports.results import ResultRow, Results

MOST_HORIZONS = 4


def render_card(card: Card) -> str:
    """Return the HTML page of a card. Sections without data are left out."""
    body = [_render_verdict(card), *_render_metrics(card), *_render_calibration(card), _render_origin(card)]
    return render_page(
        f"Model card: {card.kind} {card.version}",
        f"fitted on what was known until {format_moment(card.fitted_until_ms)}",
        body,
    )


def format_moment(time_ms: int) -> str:
    """Return a date and time in UTC as text.

    >>> format_moment(1_600_000_000_000)
    '2020-09-13 12:26 UTC'
    """
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC"


def _render_verdict(card: Card) -> str:
    if card.gate is None:
        said = "It has not been compared with a baseline."
    else:
        gate = card.gate
        said = (
            f"{gate.metric} {gate.ours:.4g} against {gate.baseline_value:.4g} of {gate.baseline.replace('_', ' ')}, "
            f"{gate.origins:,} origins. {gate.sentence}"
        )
    head = {"won": "The gate lets it serve", "lost": "The gate does not let it serve"}.get(card.state, "Not judged")
    return f'<div class="verdicts"><div class="panel"><strong>{head}</strong><p>{escape(said)}</p></div></div>'


def _render_metrics(card: Card) -> Iterator[str]:
    if not card.metrics:
        return
    results = Results(card.kind, [msgspec.convert(row, ResultRow, from_attributes=True) for row in card.metrics])
    yield render_verdicts(results)
    yield from render_sections(results)
    yield render_all_rows(results.rows)


def _render_calibration(card: Card) -> Iterator[str]:
    for target in dict.fromkeys(row.target for row in card.calibration):
        rows = [row for row in card.calibration if row.target == target]
        name = target.replace("_", " ") or card.kind
        svg = draw_calibration(_list_calibration_points(rows), f"{name}: calibration of the card")
        lines = [(format_lead(row.horizon_s) or "all", row.nominal, round(row.observed, 4), row.n) for row in rows]
        off = {(at, 2) for at, row in enumerate(rows) if abs(row.observed - row.nominal) > FAR_OFF}
        shares = render_table(("horizon", "promised", "observed", "outcomes"), lines, frozenset(off))
        note = "Marked where it is more than 3 points off."
        yield render_section(
            f"Calibration, {name}",
            render_panel_grid((render_panel(svg, kind="small"), render_panel(shares, note=note))),
        )


def _list_calibration_points(rows: list[Coverage]) -> dict[str, list[tuple[float, float]]]:
    """Return horizon → pairs of promised and observed coverage, for at most four horizons."""
    horizons = sorted({row.horizon_s for row in rows}, key=lambda horizon: horizon or 0)
    last = len(horizons) - 1
    shown = sorted({last * at // (MOST_HORIZONS - 1) for at in range(MOST_HORIZONS)})
    return {
        format_lead(horizons[at]) or "all": [
            (row.nominal, row.observed) for row in rows if row.horizon_s == horizons[at]
        ]
        for at in shown
    }


def _render_origin(card: Card) -> str:
    facts: list[tuple[str, object]] = [
        ("made", format_moment(card.created_ms)),
        ("by", card.made_by),
        ("seed", card.seed),
        ("fitted until", format_moment(card.fitted_until_ms)),
        *((f"{name}", version) for name, version in card.dependencies.items()),
        *((name.replace("_", " "), str(value)) for name, value in card.settings.items()),
    ]
    inner = [render_panel(render_terms(facts), "How it was made")]
    if card.data:
        spans = [
            (span.dataset, format_moment(span.first_ms), format_moment(span.last_ms), span.rows) for span in card.data
        ]
        inner.append(render_panel(render_table(("data set", "from", "to", "rows"), spans), "What it was fitted on"))
    if card.features:
        inner.append(render_panel(f"<p>{escape(', '.join(card.features))}</p>", f"{len(card.features)} features"))
    if card.files:
        files = [(file.path, file.size_bytes, file.sha256[:16]) for file in card.files]
        inner.append(render_panel(render_table(("file", "bytes", "sha256"), files), "Files"))
    return render_section("Where it comes from", render_panel_grid(inner))
