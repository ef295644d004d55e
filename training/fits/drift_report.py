"""A report on the drift of a model's features: samples before a moment compared with samples after it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.clock import format_moment
from fleetcast.fleet.errors import FleetcastError
from fleetcast.models.demand.features import FEATURES as DEMAND_FEATURES
from fleetcast.models.demand.features import PanelPast, compute_features
from fleetcast.models.versions.drift import PSI_MOVED, FeatureShift, compare_features
from fleetcast.training.sets.demand_sets import DemandSet
from fleetcast.training.sets.job_sets import HistoryJobs

Array = NDArray[np.float64]

HOUR_S = 3600
MOST_ROWS = 4000
PLOTTED, LISTED, POINTS = 3, 20, 200
WORDS = {"same": "the same", "drifted": "drifted", "too_few": "too few rows"}
# A place in time is no property of a fleet.
CLOCKS = frozenset({"target_hour", "target_weekday", "hour", "weekday", "ahead_h"})


@dataclass(frozen=True, slots=True)
class FeatureDrift:
    """The drift of the features of one demand target or one job history.

    before, now: (row, feature) the samples that are compared. With more than one series they are (row,
    series, feature).
    """

    name: str
    rows: list[FeatureShift]
    features: tuple[str, ...]
    before: Array
    now: Array

    @property
    def drifted_features(self) -> list[FeatureShift]:
        """The features whose values now come from another population."""
        return [row for row in self.rows if row.verdict == "drifted"]

    @property
    def undecided_features(self) -> list[FeatureShift]:
        """The features that differ, but have too few independent rows for a verdict."""
        return [row for row in self.rows if row.verdict == "too_few"]


def measure_demand_drift(sets: Sequence[DemandSet], since_ms: int) -> list[FeatureDrift]:
    """Return, for each set and target, the drift of the features of demand at a moment.

    Features before `since_ms` are compared with later ones. All are features of forecasts an hour ahead.
    """
    found = []
    newest_ms = max((row.panel.end_ms(row.panel.bins - 1) for row in sets if row.panel.bins), default=0)
    for row in sets:
        panel = row.panel
        cut = (since_ms - panel.first_ms) // (panel.bin_s * 1000)
        if not 0 < cut < panel.bins:
            continue
        past, step = PanelPast.from_panel(panel), max(1, HOUR_S // panel.bin_s)
        before, now = (
            compute_features(past, _choose_row_numbers(first, end, len(panel.names)), (step,))[0]
            for first, end in ((0, cut), (cut, panel.bins))
        )
        found.append(_measure_drift(f"{row.dataset} {panel.target}", DEMAND_FEATURES, before, now))
    return _check_comparable(found, since_ms, newest_ms)


def measure_duration_drift(tables: Sequence[tuple[str, HistoryJobs]], since_ms: int) -> list[FeatureDrift]:
    """Return, for each history, the drift of the features of jobs at a moment.

    Jobs submitted before `since_ms` are compared with later ones.
    """
    from fleetcast.features.past_runs import FEATURES
    from fleetcast.training.sets.duration_rows import replay_history

    found = []
    for name, table in tables:
        cut = int(np.searchsorted(table.submit_s, since_ms / 1000))
        if not 0 < cut < len(table):
            continue
        chosen = np.zeros(len(table), np.bool_)
        chosen[_choose_row_numbers(0, cut, 1)] = chosen[_choose_row_numbers(cut, len(table), 1)] = True
        rows = replay_history(table, submissions=chosen)
        later = rows.job >= cut
        found.append(_measure_drift(name, FEATURES, rows.features[~later], rows.features[later]))
    newest_s = max((float(table.submit_s[-1]) for _, table in tables if len(table)), default=0.0)
    return _check_comparable(found, since_ms, round(newest_s * 1000))


def _choose_row_numbers(first: int, end: int, each: int) -> NDArray[np.intp]:
    """Return (k,) evenly spaced row numbers from `first` to `end` - 1.

    each: the number of samples at each row number. There are at most MOST_ROWS samples at all returned numbers.
    """
    wanted = max(1, min(end - first, MOST_ROWS // max(each, 1)))
    return np.unique(np.linspace(first, end - 1, wanted).astype(np.intp))


def _measure_drift(
    name: str, names: Sequence[str], before: NDArray[np.float32], now: NDArray[np.float32]
) -> FeatureDrift:
    columns = [at for at, feature in enumerate(names) if feature not in CLOCKS]
    chosen = tuple(names[at] for at in columns)
    then, later = before[..., columns].astype(np.float64), now[..., columns].astype(np.float64)
    return FeatureDrift(name, compare_features(chosen, then, later), chosen, then, later)


def _check_comparable(found: list[FeatureDrift], since_ms: int, newest_ms: int) -> list[FeatureDrift]:
    if found:
        return found
    since, newest = format_moment(since_ms), format_moment(newest_ms)
    if newest_ms <= since_ms:
        raise FleetcastError(
            f"nothing to compare yet: the history ends at {newest}, and what came after {since} is asked for; "
            "come back later, or name an earlier moment by --since"
        )
    raise FleetcastError(f"nothing to compare: the history begins after {since}, and ends at {newest}; say --since")


def render_drift_page(title: str, found: Sequence[FeatureDrift], reasons: Mapping[str, str]) -> str:
    """Return an HTML page with the reasons for a new fit and the features that drifted most.

    The page has plots of the distributions of these features for each target.
    """
    from fleetcast.training.reports.page import (
        render_list,
        render_page,
        render_panel_grid,
        render_section,
        render_table,
    )

    said = "; ".join(reasons.values()) or "Nothing asks for a new fit."
    body = [render_section("Retraining", render_list([said], ""))]
    for one in found:
        head = ("feature", "PSI", "by chance", "verdict", "KS", "median before", "median now", "values", "independent")
        rows = [
            (
                row.feature,
                row.psi,
                row.by_chance,
                WORDS[row.verdict],
                row.ks,
                row.before,
                row.now,
                row.n,
                row.independent,
            )
            for row in one.rows[:LISTED]
        ]
        body.append(render_section(one.name, render_panel_grid(_plot_drifted_features(one)), render_table(head, rows)))
    return render_page(title, f"PSI above {PSI_MOVED:g} is the usual word for another population", body)


def _plot_drifted_features(one: FeatureDrift) -> Iterator[str]:
    """Yield plots of the three features that moved most."""
    from fleetcast.training.reports.page import render_panel

    for row in one.rows[:PLOTTED]:
        column = one.features.index(row.feature)
        yield render_panel(
            _draw_distributions(one.before[..., column], one.now[..., column], f"{one.name} {row.feature}"), row.feature
        )


def _draw_distributions(before: Array, now: Array, label: str) -> str:
    """Draw the distribution functions of both samples, and return the SVG as text.

    The largest gap between the two functions is the KS statistic.
    """
    from fleetcast.training.reports.plots import OURS_INK, SOFT, open_canvas

    with open_canvas(label) as canvas:
        for values, ink, word in ((before, SOFT, "before"), (now, OURS_INK, "now")):
            known = np.sort(values[np.isfinite(values)])
            shown = known[np.linspace(0, len(known) - 1, min(len(known), POINTS)).astype(np.intp)]
            canvas.axes.plot(shown, np.linspace(0, 1, len(shown)), color=ink, linewidth=1.4, label=word)
        canvas.axes.set_ylabel("share at or below")
        canvas.axes.legend(loc="upper left", fontsize=8)
    return canvas.svg
