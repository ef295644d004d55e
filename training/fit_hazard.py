"""Fit the history hazard: a logistic with weights that are not negative."""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from models.hazard import FEATURES, HorizonFit

Array = NDArray[np.float64]

PENALTY = 200.0  # on squared weights of features scaled to one standard deviation


def fit_horizon(columns: Array, labels: NDArray[np.bool_]) -> HorizonFit:
    """One horizon's coefficients. columns: (n, feature); labels: (n,)."""
    intercept, weights = logistic(columns, labels)
    named = {name: round(float(weight), 5) for name, weight in zip(FEATURES, weights, strict=True)}
    return HorizonFit(round(intercept, 5), named)


def logistic(columns: Array, labels: NDArray[np.bool_]) -> tuple[float, Array]:
    """Intercept and (feature,) weights of at least 0, by maximum likelihood with a ridge of PENALTY."""
    spread = columns.std(axis=0)
    scaled = columns / np.where(spread > 0, spread, 1.0)
    share = float(np.clip(labels.mean(), 1e-6, 1 - 1e-6))

    def loss(theta: Array) -> tuple[float, Array]:
        logit = theta[0] + scaled @ theta[1:]
        missed = 1 / (1 + np.exp(-logit)) - labels
        value = np.logaddexp(0, logit).sum() - logit[labels].sum() + PENALTY * (theta[1:] ** 2).sum()
        return float(value), np.concatenate(([missed.sum()], scaled.T @ missed + 2 * PENALTY * theta[1:]))

    start = np.concatenate(([np.log(share / (1 - share))], np.zeros(columns.shape[1])))
    bounds = [(None, None), *[(0.0, None)] * columns.shape[1]]
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    return float(found[0]), np.asarray(found[1:] / np.where(spread > 0, spread, 1.0))
