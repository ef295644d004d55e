"""The layout and style of reports and model cards: one self-contained HTML page with a light and a dark style."""

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root {
  color-scheme: light dark;
  --page: light-dark(#f3f4f6, #0c0f13); --panel: light-dark(#ffffff, #14181e); --line: light-dark(#dfe3e8, #2b323b);
  --ink: light-dark(#12161b, #eceff3); --ink-2: light-dark(#47505c, #b0b8c3); --ink-3: light-dark(#5c6673, #949eab);
  --wash: light-dark(#f0f2f4, #1d222a); --ours: light-dark(#1d5fc4, #79aefc); --amber: light-dark(#ffe6b3, #6b4e14);
  --rival-0: light-dark(#6d7683, #a3acb8); --rival-1: light-dark(#98a1ad, #78818d);
  --rival-2: light-dark(#b3a07e, #8d7c5c); --rival-3: light-dark(#8fae9c, #63806f);
  font: 14px/1.5 Inter, ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums;
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; letter-spacing: -0.02em; margin: 0 0 2px; }
h2 { font-size: 17px; letter-spacing: -0.01em; margin: 34px 0 10px; }
h3 { font-size: 13px; margin: 0 0 6px; color: var(--ink-2); font-weight: 600; }
p { margin: 0 0 8px; max-width: 78ch; }
.quiet, figcaption { color: var(--ink-3); font-size: 12.5px; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 12px; align-items: start; }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.panel { min-width: 0; margin: 0; }
.panel.wide { grid-column: 1 / -1; }
.panel svg { display: block; width: 100%; height: auto; overflow: visible; }
.panel.small svg { max-width: 360px; }
.verdicts { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 12px; margin: 16px 0; }
.verdicts ul, .panel ul { margin: 0; padding-left: 18px; }
.verdicts li { margin: 0 0 4px; }
.verdicts strong { font-size: 20px; display: block; letter-spacing: -0.01em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; width: 100%; }
th { text-align: left; font-weight: 600; color: var(--ink-3); white-space: nowrap; }
th, td { padding: 3px 10px 3px 0; border-bottom: 1px solid var(--line); vertical-align: baseline; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; white-space: nowrap; }
th.n:last-child, td.n:last-child { padding-right: 0; }
td:first-child { white-space: nowrap; }
td.off { background: var(--amber); }
code { font: 12px ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0; }
dt { color: var(--ink-3); } dd { margin: 0; overflow-wrap: anywhere; }
details summary { cursor: pointer; color: var(--ink-2); margin: 4px 0; }
@media print { .panel { break-inside: avoid; } details { display: block; } }
"""


class RawHtml(str):
    """Text that is already HTML: inserted without escaping."""


def format_cell_text(value: object) -> str:
    """Return the text of a cell, safe in HTML.

    Numbers have four digits. None becomes a dash.
    """
    if isinstance(value, RawHtml):
        return str(value)
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return escape(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))


def render_page(title: str, lead: str, body: Iterable[str]) -> str:
    """Return the whole HTML document.

    lead: one sentence below the title. body: HTML.
    """
    head = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return f'{head}<main><h1>{escape(title)}</h1><p class="quiet">{escape(lead)}</p>{"".join(body)}</main></html>\n'


def render_panel(inner: str, title: str = "", note: str = "", kind: str = "") -> str:
    """Return HTML for a figure with a title above and a note below.

    inner: the HTML of the figure. kind: "wide" spans the page, "small" makes the figure small.
    """
    head = f"<h3>{escape(title)}</h3>" if title else ""
    foot = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f'<figure class="panel {kind}">{head}{inner}{foot}</figure>'


def render_panel_grid(inner: Iterable[str]) -> str:
    return f'<div class="panels">{"".join(inner)}</div>'


def render_section(title: str, *inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(inner)}</section>"


def render_list(lines: Iterable[str], nothing: str) -> str:
    """Return sentences as an HTML list, or the text `nothing` if there are none."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else f'<p class="quiet">{escape(nothing)}</p>'


def render_terms(pairs: Iterable[tuple[str, object]]) -> str:
    """Return names and their values as an HTML list."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{format_cell_text(value)}</dd>' for name, value in pairs)}</dl>"


def render_table(
    names: Sequence[str], rows: Iterable[Sequence[object]], off: frozenset[tuple[int, int]] = frozenset()
) -> str:
    """Return an HTML table. Columns of numbers are aligned to the right.

    off: (row, column) of the cells to mark.
    """
    rows = [list(row) for row in rows]
    right = [
        all(isinstance(row[at], (int, float)) or row[at] is None for row in rows) and bool(rows)
        for at in range(len(names))
    ]
    head = "".join(f"<th{' class=n' if right[at] else ''}>{escape(name)}</th>" for at, name in enumerate(names))
    body = "".join(
        "<tr>" + "".join(_render_cell(value, right[at], (line, at) in off) for at, value in enumerate(row)) + "</tr>"
        for line, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _render_cell(value: object, right: bool, off: bool) -> str:
    words = " ".join(name for name, said in (("n", right), ("off", off)) if said)
    opening = f'<td class="{words}">' if words else "<td>"
    return f"{opening}{format_cell_text(value)}</td>"
