"""The fit of node risk: a calibrated logistic regression on rule levels for each kind of risk.

The calibration is isotonic. The simulation has more faults than real fleets have. So rows are weighted
back to the prevalence of real fleets: 2.3 % of node time is spent in faults (InfiniteHBD), and 4.2
faults begin in 1,000 node-days.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.risk.hazard import FAULTS_PER_NODE_DAY
from fleetcast.models.risk.node_risk import (
    BASE_SHARE,
    KindFit,
    RiskFit,
    compute_excess_hazard,
    compute_probabilities,
    compute_published_hazard,
)
from fleetcast.models.risk.rules import RULES
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS
from fleetcast.training.replay.dataset import RiskRows

HORIZON_S = RISK_HORIZONS_S[0]
UNAVAILABLE = 0.023
FEWEST_EVENTS = 30
FEWEST_ROWS_OF_RULE = 10
INVERSE_PENALTY = 10.0
MAX_POINTS = 24
LARGEST_P = 0.98

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Split:
    """The training rows in three parts: to fit on, to calibrate on, and to test on."""

    fit: RiskRows
    calibrate: RiskRows
    test: RiskRows


def split_by_run(runs: Sequence[RiskRows]) -> Split:
    """Split rows into whole runs, because the moments of one run are alike.

    The last fifth of the runs is for the test, and the fifth before it for the calibration. Raises
    ValueError for fewer than 3 runs.
    """
    if len(runs) < 3:
        raise ValueError(f"{len(runs)} runs: at least 3 are needed to fit, to calibrate and to judge")
    part = max(1, len(runs) // 5)
    return Split(
        RiskRows.concat(runs[: -2 * part]), RiskRows.concat(runs[-2 * part : -part]), RiskRows.concat(runs[-part:])
    )


def fit_risk(split: Split, notes: dict[str, Any]) -> RiskFit:
    """Fit the coefficients and the calibration of every kind of risk with enough events.

    Adds the scores on the test runs to `notes`.
    """
    kinds = {}
    for k, kind in enumerate(RISK_KINDS):
        if split.fit.labels[k].sum() >= FEWEST_EVENTS and split.calibrate.labels[k].any():
            kinds[kind] = fit_fault_kind(split.fit, split.calibrate, k)
    fit = RiskFit(version=1, kinds=kinds, notes={})
    scores = {"test": score_kinds(split.test, fit), "test_rule_priors": score_kinds(split.test, None)}
    return RiskFit(version=1, kinds=kinds, notes={**notes, **scores})


def estimate_prevalence(kind: int) -> float:
    """Return the share of node-hours of a real fleet in which a fault of this kind is active or begins."""
    begins = FAULTS_PER_NODE_DAY * HORIZON_S / 86_400
    return float((UNAVAILABLE + begins) * BASE_SHARE[kind])


def compute_prevalence_weights(labels: NDArray[np.bool_], kind: int) -> Array:
    """Return (n,) weights that give the positive rows the share that they have in real fleets."""
    share = max(float(labels.mean()), 1e-9)
    real = estimate_prevalence(kind)
    return np.where(labels, real / share, (1 - real) / max(1 - share, 1e-9))


def fit_fault_kind(rows: RiskRows, held_out: RiskRows, kind: int) -> KindFit:
    """Fit the logistic regression of one kind of risk and its calibration.

    A coefficient may be negative. Its rule is then evidence against a fault.
    """
    from sklearn.linear_model import LogisticRegression  # a fit needs it, the command line does not

    labels = rows.labels[kind]
    used = np.flatnonzero((rows.levels > 0).sum(axis=0) >= FEWEST_ROWS_OF_RULE)
    coefficients, intercept = np.zeros(len(RULES)), float(np.log(estimate_prevalence(kind)))
    if len(used):
        model = LogisticRegression(C=INVERSE_PENALTY, max_iter=1000)
        model.fit(rows.levels[:, used], labels, sample_weight=compute_prevalence_weights(labels, kind))
        coefficients[used], intercept = model.coef_[0], float(model.intercept_[0])
    x, y = fit_calibration(held_out, kind, intercept, coefficients)
    named = {RULES[row].name: round(float(coefficients[row]), 4) for row in used.tolist()}
    return KindFit(round(intercept, 4), named, x, y)


def fit_calibration(
    rows: RiskRows, kind: int, intercept: float, coefficients: Array
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Fit an isotonic map from the regression's output to probabilities, on runs held out from its fit.

    Returns the points of the map, reduced to a few: their inputs and their probabilities.
    """
    from sklearn.isotonic import IsotonicRegression

    raw = 1 / (1 + np.exp(-(intercept + rows.levels.astype(np.float64) @ coefficients)))
    labels = rows.labels[kind]
    isotonic = IsotonicRegression(y_min=0.0, y_max=LARGEST_P, out_of_bounds="clip")
    isotonic.fit(raw, labels, sample_weight=compute_prevalence_weights(labels, kind))
    x, y = isotonic.X_thresholds_, isotonic.y_thresholds_
    if len(x) > MAX_POINTS:
        at = np.unique(np.linspace(0, len(x) - 1, MAX_POINTS).round().astype(int))
        x, y = x[at], y[at]
    return tuple(round(float(value), 6) for value in x), tuple(round(float(value), 6) for value in y)


def score_kinds(rows: RiskRows, fit: RiskFit | None) -> dict[str, dict[str, float | None]]:
    """Return kind of risk → events, AUROC, average precision and Brier skill over the base rate.

    The rows keep their simulated prevalence: they are not weighted.
    """
    p = predict_risk(rows, fit)
    return {kind: _compute_scores(p[k], rows.labels[k]) for k, kind in enumerate(RISK_KINDS)}


def predict_risk(rows: RiskRows, fit: RiskFit | None) -> Array:
    """Return (kind, n) the probability of each kind within the hour, as the service computes it.

    The prediction assumes that the nodes never had a fault before.
    """
    levels = rows.levels.astype(np.float64)
    known = np.ones(len(rows), bool)
    return compute_probabilities(compute_excess_hazard(levels, fit), compute_published_hazard(len(rows)), known)[
        :, 0, :
    ]


def _compute_scores(p: Array, labels: NDArray[np.bool_]) -> dict[str, float | None]:
    from sklearn.metrics import average_precision_score, roc_auc_score

    events = int(labels.sum())
    if events == 0 or events == len(labels):
        return {"events": float(events), "auroc": None, "ap": None, "brier_skill": None}
    base = float(labels.mean())
    skill = 1 - float(((p - labels) ** 2).mean()) / (base * (1 - base))
    return {
        "events": float(events),
        "auroc": round(float(roc_auc_score(labels, p)), 4),
        "ap": round(float(average_precision_score(labels, p)), 4),
        "brier_skill": round(skill, 4),
    }
