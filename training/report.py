"""An evaluation as one HTML page that needs nothing beside it."""

from html import escape

from training.results import Results


def report_html(results: Results) -> str:
    """The rows as a table."""
    names = ("dataset", "target", "series", "horizon_s", "method", "model", "metric", "value", "low", "high", "n")
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(getattr(row, name)))}</td>" for name in names) + "</tr>"
        for row in results.rows
    )
    title = escape(f"fleetcast evaluate {results.task}")
    return f"<!doctype html><meta charset=utf-8><title>{title}</title><h1>{title}</h1><table>{head}{body}</table>"
