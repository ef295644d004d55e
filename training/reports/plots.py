"""Plots from matplotlib as SVG, for light and dark pages.

Placeholder colours become the page's CSS variables. Text is not converted into paths.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.training.reports.contests import OURS, format_lead
from fleetcast.training.reports.results import ResultRow

Array = NDArray[np.float64]

INK, SOFT, LINE, OURS_INK, PANEL = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05"
STANDS_FOR = {INK: "--ink", SOFT: "--ink-3", LINE: "--line", OURS_INK: "--ours", PANEL: "--panel"}
RIVAL_INKS = ("#0a0b06", "#0a0b07", "#0a0b08", "#0a0b09")
STANDS_FOR |= {ink: f"--rival-{at}" for at, ink in enumerate(RIVAL_INKS)}
RIVAL_MARKS = ("s", "^", "D", "v")
RIVAL_DASHES = ((0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 3)))
WIDTH_IN, HEIGHT_IN = 4.0, 2.5
BAND_ALPHA = 0.18
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fleetcast",
    "font.size": 8.5,
    "axes.edgecolor": LINE,
    "axes.labelcolor": SOFT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # a name with dollar signs is no formula
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
}


@dataclass(slots=True)
class Canvas:
    """A plot that is being drawn.

    `svg` is set once the `with` block of `open_canvas` has ended.
    """

    figure: Any
    axes: Any
    svg: str = ""


@dataclass(frozen=True, slots=True)
class Fan:
    """The quantiles of one forecast over its horizons, plotted as a fan.

    A fan has the time of issue, the ends of the horizons, and the (quantile, horizon) values.
    """

    issued_ms: int
    at_ms: NDArray[np.int64]
    levels: tuple[float, ...]
    values: Array


@dataclass(frozen=True, slots=True)
class Course:
    """An observed series together with forecasts of it, for one plot.

    at_ms, actual: (moment,).
    """

    name: str
    at_ms: NDArray[np.int64]
    actual: Array
    fans: list[Fan] = field(default_factory=list)


@contextmanager
def open_canvas(label: str, width: float = WIDTH_IN, height: float = HEIGHT_IN) -> Iterator[Canvas]:
    """Yield a canvas with the style of all plots, and render it as SVG when the context ends.

    label: describes the plot for people who cannot see it. It must be unique on a page.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        canvas = Canvas(figure, figure.subplots())
        yield canvas
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    canvas.svg = _make_inline_svg(file.getvalue(), label)


def _make_inline_svg(svg: str, label: str) -> str:
    """Return the SVG element for use inside a page, with unique ids and the page's font and colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    prefix = re.sub(r"\W+", "-", label.lower())
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"font-family: [^;\"]*;?", "", svg)
    svg = re.sub(r"(font: [\d.]+px)[^;\"]*", r"\1 sans-serif", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    for ink, name in STANDS_FOR.items():
        svg = svg.replace(ink, f"var({name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label, quote=True)}"', 1)


def choose_styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return method → its plot style: one strong colour for ours, quiet ones for the baselines.

    Each method has its own marks, up to the number of baseline styles.
    """
    found: dict[str, dict[str, Any]] = {}
    rivals = [method for method in methods if method != OURS]
    for at, method in enumerate(rivals):
        turn = at % len(RIVAL_INKS)
        found[method] = {
            **{"color": RIVAL_INKS[turn], "marker": RIVAL_MARKS[turn], "linestyle": RIVAL_DASHES[turn]},
            **{"linewidth": 1.2, "markersize": 3.6, "zorder": 2},
        }
    if OURS in methods:
        found[OURS] = {"color": OURS_INK, "marker": "o", "linewidth": 2.0, "markersize": 4.5, "zorder": 3}
    return found


def _format_method(method: str) -> str:
    return method.replace("_", " ")


def _draw_legend(canvas: Canvas) -> None:
    """Draw the legend above the plot, in as many columns as the names allow."""
    handles, names = canvas.axes.get_legend_handles_labels()
    columns = 4 if sum(map(len, names)) < 42 and len(names) <= 4 else 3
    canvas.figure.legend(
        handles, names, loc="outside upper left", ncols=columns, fontsize=8,
        handlelength=2.2, columnspacing=1.0, borderpad=0.1,
    )  # fmt: skip


def draw_lines(rows: Sequence[ResultRow], label: str, ticks: Mapping[int, str] | None = None) -> str:
    """Draw one line for each method over the horizons of the rows, with 95 % intervals.

    Returns SVG as text.

    ticks: horizon_s → its name.
    """
    horizons = sorted({row.horizon_s for row in rows if row.horizon_s is not None})
    place = {horizon: at for at, horizon in enumerate(horizons)}
    methods = list(dict.fromkeys(row.method for row in rows))
    with open_canvas(label) as canvas:
        for shift, (method, style) in enumerate(choose_styles(methods).items()):
            own = sorted(
                (row for row in rows if row.method == method and row.value is not None and row.horizon_s in place),
                key=lambda row: row.horizon_s or 0,
            )
            x = np.array([place[row.horizon_s or 0] for row in own]) + 0.05 * (shift - (len(methods) - 1) / 2)
            y = np.array([row.value for row in own], float)
            canvas.axes.plot(x, y, label=_format_method(method), **style)
            low = np.array([np.nan if row.low is None else row.low for row in own])
            high = np.array([np.nan if row.high is None else row.high for row in own])
            canvas.axes.vlines(x, low, high, colors=style["color"], linewidth=1.0, alpha=0.55, zorder=style["zorder"])
        canvas.axes.set_xticks(range(len(horizons)), [(ticks or {}).get(at, format_lead(at)) for at in horizons])
        canvas.axes.set_ylim(bottom=0)
        canvas.axes.margins(x=0.04)
        _draw_legend(canvas)
    return canvas.svg


def draw_bars(rows: Sequence[ResultRow], label: str, groups: Mapping[str, str]) -> str:
    """Draw one horizontal bar for each method, grouped by metric. Returns SVG as text.

    groups: metric → its name, from top to bottom.
    """
    methods = list(dict.fromkeys(row.method for row in rows))
    style_of = choose_styles(methods)
    thick = 0.8 / max(1, len(methods))
    with open_canvas(label, height=0.7 + 0.24 * len(groups) * len(methods)) as canvas:
        for at, method in enumerate(style_of):
            values = {row.metric: row for row in rows if row.method == method and row.value is not None}
            places = [place for place, metric in enumerate(groups) if metric in values]
            own = [values[metric] for metric in groups if metric in values]
            y = np.array(places, float) + (at - (len(methods) - 1) / 2) * thick
            width = np.array([row.value for row in own], float)
            canvas.axes.barh(
                y, width, height=thick * 0.86, color=style_of[method]["color"], label=_format_method(method)
            )
            low = [width[place] if row.low is None else row.low for place, row in enumerate(own)]
            high = [width[place] if row.high is None else row.high for place, row in enumerate(own)]
            canvas.axes.hlines(y, low, high, colors=INK, linewidth=0.9)
        canvas.axes.set_yticks(range(len(groups)), list(groups.values()))
        canvas.axes.invert_yaxis()
        canvas.axes.grid(visible=False, axis="y")
        canvas.axes.grid(visible=True, axis="x")
        canvas.axes.set_xlim(left=0)
        canvas.axes.locator_params(axis="x", nbins=5)
        _draw_legend(canvas)
    return canvas.svg


def draw_calibration(points: Mapping[str, Sequence[tuple[float, float]]], label: str) -> str:
    """Draw observed coverage against nominal coverage, with one line for each name. Returns SVG as text.

    On the dotted line, observed and nominal coverage are equal.
    """
    with open_canvas(label, width=3.4, height=3.1) as canvas:
        axes = canvas.axes
        axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1.0, linestyle=(0, (1, 2)), label="as promised")
        axes.fill_between([0, 1], [-0.03, 0.97], [0.03, 1.03], color=SOFT, alpha=0.12, linewidth=0)
        for at, (name, pairs) in enumerate(points.items()):
            x, y = zip(*sorted(pairs), strict=True)
            shade = 1.0 - 0.62 * at / max(1, len(points) - 1) if len(points) > 1 else 1.0
            axes.plot(x, y, "o-", color=OURS_INK, alpha=shade, linewidth=1.3, markersize=4, label=name)
        least = min((value for pairs in points.values() for pair in pairs for value in pair), default=0.4)
        axes.set_xlim(max(0.0, least - 0.1), 1.0)
        axes.set_ylim(max(0.0, least - 0.1), 1.0)
        axes.set_xlabel("share promised")
        axes.set_ylabel("share observed")
        axes.grid(visible=True, axis="both")
        axes.legend(loc="upper left", fontsize=8, handlelength=1.6, borderpad=0.1)
    return canvas.svg


def draw_reliability(points: Sequence[tuple[float, float, float, float]], label: str) -> str:
    """Draw observed frequency against predicted probability, on axes for small numbers.

    Returns SVG as text.

    points: (predicted, observed, low, high) of each dot.
    """
    predicted, observed, low, high = np.array(points, np.float64).T
    most = 1.08 * max(float(predicted.max()), float(high.max()), 1e-6)
    with open_canvas(label, width=3.4, height=3.1) as canvas:
        axes = canvas.axes
        axes.plot([0, most], [0, most], color=SOFT, linewidth=1.0, linestyle=(0, (1, 2)), label="as predicted")
        bars = (observed - low, high - observed)
        axes.errorbar(predicted, observed, bars, fmt="o", color=OURS_INK, markersize=4, linewidth=1.0, label="ours")
        axes.set_xlim(0, most)
        axes.set_ylim(0, most)
        axes.set_xlabel("predicted probability")
        axes.set_ylabel("share that failed")
        axes.grid(visible=True, axis="both")
        axes.legend(loc="upper left", fontsize=8, handlelength=1.6, borderpad=0.1)
    return canvas.svg


def draw_course(course: Course, label: str, y_label: str) -> str:
    """Draw a series, with each of its forecasts as a fan of nested intervals around the median.

    Wider intervals are paler. Returns SVG as text.
    """
    from matplotlib import dates

    with open_canvas(label, width=11.5, height=2.9) as canvas:
        axes = canvas.axes
        for fan in course.fans:
            _draw_fan(axes, fan)
        axes.plot(
            _convert_to_days(course.at_ms), course.actual, color=INK, linewidth=1.1, zorder=3, label="what happened"
        )
        locator = dates.AutoDateLocator(minticks=4, maxticks=10, tz="UTC")
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz="UTC", show_offset=False))
        axes.set_ylabel(y_label)
        axes.margins(x=0.005)
        handles, names = axes.get_legend_handles_labels()
        once = dict(zip(names, handles, strict=True))
        bands = _list_bands(course.fans[0].levels) if course.fans else []
        shown = [*once.values(), *(_make_legend_patch(depth) for depth, _ in enumerate(bands, start=1))]
        said = [*once, *(f"{high - low:.0%} interval".replace("%", " %") for low, high in bands)]
        canvas.figure.legend(shown, said, loc="outside upper left", ncols=6, fontsize=8, borderpad=0.1)
    return canvas.svg


def _list_bands(levels: Sequence[float]) -> list[tuple[float, float]]:
    """Return the pairs of quantile levels that are equally far from 0.5, the widest pair first."""
    pairs = [(low, high) for low in levels for high in levels if low < 0.5 and abs(low + high - 1) < 1e-9]
    return sorted(pairs)


def _make_legend_patch(depth: int) -> Any:
    """Return the colour patch of the legend for `depth` overlapping bands."""
    from matplotlib.patches import Patch

    return Patch(color=OURS_INK, alpha=1 - (1 - BAND_ALPHA) ** depth, linewidth=0)


def _draw_fan(axes: Any, fan: Fan) -> None:
    x, at = _convert_to_days(fan.at_ms), fan.levels.index
    for low, high in _list_bands(fan.levels):
        band = fan.values[at(low)], fan.values[at(high)]
        axes.fill_between(x, *band, color=OURS_INK, alpha=BAND_ALPHA, linewidth=0, zorder=1)
    if 0.5 in fan.levels:
        axes.plot(x, fan.values[at(0.5)], color=OURS_INK, linewidth=1.3, zorder=2, label="median")
    axes.axvline(
        _convert_to_days(np.array([fan.issued_ms]))[0], color=SOFT, linewidth=0.7, linestyle=(0, (1, 2)), zorder=0
    )


def _convert_to_days(at_ms: NDArray[np.int64]) -> Array:
    """Return the times in days since 1970, the unit of matplotlib's dates."""
    return np.asarray(at_ms, np.float64) / 86_400_000
