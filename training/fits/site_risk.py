"""The fit of site risk: a logistic regression for each kind and horizon, on rows of a site's own days.

See models/risk/site_risk.py.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.risk.hazard import HORIZONS_DAYS, HorizonFit, fit_logistic
from fleetcast.models.risk.scores import RISK_KINDS
from fleetcast.models.risk.site_risk import PAST_FEATURES, SITE_FEATURES, USABLE, SiteFit
from fleetcast.training.sites.site_days import DAY_MS, SiteDays

FEWEST_EVENTS = 50  # of a kind, before it is fitted
FEWEST_ROWS_OF_RULE = 100  # where a rule spoke, before it is a feature
ROWS_AT_MOST = 400_000  # of a fit: of longer or wider histories every k-th
PENALTY = 20.0  # on squared weights of features scaled to one standard deviation

Mask = NDArray[np.bool_]


def count_events(days: SiteDays, until_ms: int) -> dict[str, int]:
    """Return how many faults of each kind had begun by `until_ms`."""
    return {kind: days.begun[kind].count_until(until_ms) for kind in RISK_KINDS}


def fit_site(days: SiteDays, until_ms: int, notes: dict[str, Any] | None = None) -> SiteFit:
    """Fit the site risk of each kind with at least FEWEST_EVENTS events before `until_ms`.

    The fit uses only rows whose outcome was known at `until_ms`. notes: facts to store with the fit.
    """
    counts = count_events(days, until_ms)
    kinds = {}
    for kind, count in counts.items():
        if count >= FEWEST_EVENTS and len(days):
            kinds[kind] = {span: _fit_horizon(days, until_ms, kind, span) for span in HORIZONS_DAYS}
    return SiteFit(kinds, {**(notes or {}), "events": counts, "nodes": len(days.names), "rows": len(days)})


def _fit_horizon(days: SiteDays, until_ms: int, kind: str, span: int) -> HorizonFit:
    """Fit one kind and one horizon, on the features that `choose_features` selects."""
    matured = np.flatnonzero(days.time_ms + span * DAY_MS <= until_ms)
    rows = days.select_rows(matured[:: 1 + len(matured) // ROWS_AT_MOST])
    used = choose_features(rows)
    intercept, weights = fit_logistic(
        rows.columns[:, used].astype(np.float64), rows.compute_labels(kind, span), PENALTY
    )
    names = [SITE_FEATURES[at] for at in used.tolist()]
    named = {name: round(float(weight), 5) for name, weight in zip(names, weights, strict=True)}
    return HorizonFit(round(intercept, 5), named)


def choose_features(rows: SiteDays) -> NDArray[np.intp]:
    """Return the indices of the columns to fit on: the past of the node, and the rules that are frequent.

    Rules for hard signals, and rules that repeat the past, are left out. A rule is frequent if its
    level is above zero in at least FEWEST_ROWS_OF_RULE rows.
    """
    spoke = (rows.columns[:, len(PAST_FEATURES) :] > 0).sum(axis=0) >= FEWEST_ROWS_OF_RULE
    return np.flatnonzero(np.concatenate((np.ones(len(PAST_FEATURES), np.bool_), spoke & USABLE)))
