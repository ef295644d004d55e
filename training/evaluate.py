"""How good scores are on runs that nothing was fitted on."""

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score

from models.node_risk import RiskFit, excess_hazard, no_history, probabilities
from models.scores import RISK_KINDS
from training.dataset import Rows

Array = NDArray[np.float64]


def judge(rows: Rows, fit: RiskFit | None) -> dict[str, dict[str, float | None]]:
    """Per kind: events, AUROC, average precision and Brier skill against the base rate, of the hour's probability.

    Brier skill is on the rows as they are: simulated faults are more frequent than the fit believes.
    """
    p = predict(rows, fit)
    return {kind: _scores(p[k], rows.labels[k]) for k, kind in enumerate(RISK_KINDS)}


def predict(rows: Rows, fit: RiskFit | None) -> Array:
    """(kind, n) probability within the hour, as the service would give it of nodes that never had a fault."""
    levels = rows.levels.astype(np.float64)
    known = np.ones(len(rows), bool)
    return probabilities(excess_hazard(levels, fit), no_history(len(rows)), known)[:, 0, :]


def _scores(p: Array, labels: NDArray[np.bool_]) -> dict[str, float | None]:
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
