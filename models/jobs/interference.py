"""Prediction of how fast a job runs next to another one, relative to running alone.

    prior       on one GPU 1 - u_a u_b / 2, with u the compute load of each job. Elsewhere the caller's value,
                usually 1
    residuals   the correction by observed co-runs: the mean of a Gaussian process over pairs (job, partner)
    bound       conformal: nine in ten errors of those co-runs lie above it. For a job seen often (SEEN_OFTEN)
                these are leave-one-out errors. For others, each kind is left out with all its co-runs

If two jobs use the GPU at independent times, both want it for u_a u_b of the time, and each then gets
half of it. This prior never rises with either load, and has no fitted constant.

The published `rule`, min(1, 1 / (u_a + u_b)) (Horus, Lucid), assumes that the jobs alternate perfectly.
It is evaluated for comparison with the prior.

The process has a variance for each way in which two co-runs are alike: same job, same partner, same kind
of either, both kinds, similar loads. So one co-run counts a little, three count much, and a job's own
co-runs count more than those of its kind (shrinkage, as with random effects. See Rasmussen and
Williams, 2006, ch. 2 and 5.4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.co_runs import FASTEST, SLOWEST

Array = NDArray[np.float64]
Basis = Literal["rule", "residuals", "observed"]

LOADS = ("compute", "bandwidth", "memory")
VICTIM, VICTIM_KIND, PARTNER, PARTNER_KIND, BOTH_KINDS = 0.05, 0.05, 0.03, 0.03, 0.03  # standard deviations of speed
ALIKE_LOAD = 0.05
LOAD_SPAN = (0.5, 0.5, 1.0)  # over which distance of loads co-runs are alike
NOISE = 0.05
SEEN_OFTEN = 9  # co-runs of a job, from which on leave-one-out errors are its own
BOUND = 0.9
MOST_LOAD = 1.0  # what is assumed of a job that nothing is known of, where the other one is known


@dataclass(frozen=True, slots=True)
class Pairs:
    """A list of n jobs, each with one partner that shares hardware with it.

    load, partner_load: (n, LOADS) loads of each job when it ran alone, as ratios, NaN if unknown. keys,
    partner_keys: (n, 2) the keys of the job and of its kind, 0 if unknown.
    """

    load: Array
    partner_load: Array
    keys: NDArray[np.uint64]
    partner_keys: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.load)

    def select_rows(self, rows: NDArray[np.intp] | NDArray[np.bool_] | slice) -> "Pairs":
        return Pairs(self.load[rows], self.partner_load[rows], self.keys[rows], self.partner_keys[rows])

    @classmethod
    def from_rows(
        cls, rows: Sequence[tuple[Sequence[float], Sequence[float], Sequence[int], Sequence[int]]]
    ) -> "Pairs":
        """Build pairs from rows of (load, partner's load, keys, partner's keys)."""
        load, partner, keys, partner_keys = zip(*rows, strict=True) if rows else ((), (), (), ())
        n = len(rows)
        return cls(
            np.array(load, np.float64).reshape(n, len(LOADS)),
            np.array(partner, np.float64).reshape(n, len(LOADS)),
            np.array(keys, np.uint64).reshape(n, 2),
            np.array(partner_keys, np.uint64).reshape(n, 2),
        )


@dataclass(frozen=True, slots=True)
class Residuals:
    """The residuals of n observed co-runs: actual speed less predicted speed.

    weight: (n,) the weight of each co-run in the correction. errors: (n,) the residual of each co-run, less the
    correction fitted without it. strange: (k,) the residual of a co-run, less the correction fitted without any
    co-run of one of its two kinds.
    """

    pairs: Pairs
    weight: Array
    errors: Array
    strange: Array

    def compute_correction(self, pairs: Pairs) -> Array:
        """Return (m,) the correction to add to the prior of these pairs."""
        if not len(self.pairs) or not len(pairs):
            return np.zeros(len(pairs))
        return np.asarray(compute_covariance(pairs, self.pairs) @ self.weight)

    def count_observed(self, pairs: Pairs) -> NDArray[np.int64]:
        """Return (m,) the number of observed co-runs of the job itself, or of its kind if there are none."""
        seen = [(_are_keys_equal(pairs.keys[:, n], self.pairs.keys[:, n])).sum(axis=1) for n in (0, 1)]
        return np.asarray(np.where(seen[0] > 0, seen[0], seen[1]), np.int64)

    def compute_slack(self, pairs: Pairs) -> Array:
        """Return (m,) the amount to add to a prediction to get its lower bound.

        If the job and its partner's kind are well known, the amount follows from errors with one co-run left out.
        Otherwise it follows from errors with a whole kind left out.
        """
        own = _are_keys_equal(pairs.keys[:, 0], self.pairs.keys[:, 0]).sum(axis=1) >= SEEN_OFTEN
        partner = _are_keys_equal(pairs.partner_keys[:, 1], self.pairs.partner_keys[:, 1]).any(axis=1)
        return np.where(own & partner, compute_margin(self.errors), compute_margin(self.strange))

    def has_met_partner(self, pairs: Pairs) -> NDArray[np.bool_]:
        """Return (m,) whether the job was observed next to the same partner before."""
        own = _are_keys_equal(pairs.keys[:, 0], self.pairs.keys[:, 0])
        return np.asarray((own & _are_keys_equal(pairs.partner_keys[:, 0], self.pairs.partner_keys[:, 0])).any(axis=1))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted speeds of n pairs relative to running alone, (n,).

    lower_90: NaN if there are too few co-runs for a bound. known: whether a prior or a co-run supports the
    prediction.
    """

    p50: Array
    lower_90: Array
    known: NDArray[np.bool_]
    basis: tuple[Basis, ...]
    observed: NDArray[np.int64]


def compute_published_rule(load: Array, partner_load: Array) -> Array:
    """Return (n,) the speed by the published rule min(1, 1 / (u_a + u_b)).

    The rule assumes that jobs share one GPU's compute time and waste none.

    >>> compute_published_rule(np.array([0.5, 0.3]), np.array([1.5, 0.3])).tolist()
    [0.5, 1.0]
    """
    both = np.asarray(load, np.float64) + np.asarray(partner_load, np.float64)
    return np.minimum(1.0, 1.0 / np.maximum(both, 1e-9))


def compute_gpu_prior(pairs: Pairs) -> Array:
    """Return (n,) the prior speed 1 - u_a u_b / 2 on a shared GPU, NaN if neither load is known.

    If one load is unknown, that job is assumed to take the whole GPU.

    >>> compute_gpu_prior(Pairs.from_rows([((0.5, 0.0, 0.0), (1.0, 0.0, 0.0), (1, 1), (2, 2))])).tolist()
    [0.75]
    """
    own, other = (np.minimum(load[:, 0], MOST_LOAD) for load in (pairs.load, pairs.partner_load))
    both = np.where(np.isnan(own), MOST_LOAD, own) * np.where(np.isnan(other), MOST_LOAD, other)
    return np.where(np.isnan(own) & np.isnan(other), np.nan, 1.0 - both / 2)


def compute_covariance(left: Pairs, right: Pairs) -> Array:
    """Return (n, m) the covariance of the residuals of two sets of co-runs."""
    kinds = _are_keys_equal(left.keys[:, 1], right.keys[:, 1])
    partner_kinds = _are_keys_equal(left.partner_keys[:, 1], right.partner_keys[:, 1])
    return np.asarray(
        VICTIM**2 * _are_keys_equal(left.keys[:, 0], right.keys[:, 0])
        + VICTIM_KIND**2 * kinds
        + PARTNER**2 * _are_keys_equal(left.partner_keys[:, 0], right.partner_keys[:, 0])
        + PARTNER_KIND**2 * partner_kinds
        + BOTH_KINDS**2 * (kinds & partner_kinds)
        + ALIKE_LOAD**2 * _compute_load_similarity(left, right)
    )


def _compute_load_similarity(left: Pairs, right: Pairs) -> Array:
    """Return (n, m) the similarity of the loads: 1 if all are the same, 0 if one is unknown."""
    x, y = (np.concatenate((rows.load, rows.partner_load), axis=1) / np.array(LOAD_SPAN * 2) for rows in (left, right))
    far = (x**2).sum(axis=1)[:, None] + (y**2).sum(axis=1)[None, :] - 2 * (x @ y.T)
    return np.asarray(np.nan_to_num(np.exp(-0.5 * np.maximum(far, 0.0))))


def _are_keys_equal(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return (n, m) whether two keys are equal and known. left: (n,). right: (m,)."""
    return np.asarray((left[:, None] == right[None, :]) & (left[:, None] != 0))


def fit_residuals(pairs: Pairs, residual: Array) -> Residuals:
    """Fit the residuals of observed co-runs. The cost is n^3, and some hundred co-runs are enough.

    residual: (n,) speed less prior.
    """
    if not len(pairs):
        return Residuals(pairs, np.zeros(0), np.zeros(0), np.zeros(0))
    inverse: Array = np.linalg.inv(compute_covariance(pairs, pairs) + NOISE**2 * np.eye(len(pairs))).astype(np.float64)
    weight = inverse @ residual
    return Residuals(pairs, weight, weight / np.diag(inverse), _compute_held_out_errors(pairs, inverse, weight))


def _compute_held_out_errors(pairs: Pairs, inverse: Array, weight: Array) -> Array:
    """Return (k,) the prediction errors of the co-runs of each kind, with the whole kind left out of the fit.

    See Rasmussen and Williams, 2006, 5.4.2, in blocks.
    """
    kinds = np.column_stack([pairs.keys[:, 1], pairs.partner_keys[:, 1]])
    found = []
    for kind in np.unique(kinds[kinds != 0]):
        out = (kinds == kind).any(axis=1)
        found.append(np.linalg.solve(inverse[np.ix_(out, out)], weight[out]))
    return np.concatenate(found) if found else np.zeros(0)


def compute_margin(errors: Array) -> float:
    """Return the margin of a lower bound: the share BOUND of outcomes lies above the prediction plus this margin.

    The margin is the k-th smallest of n errors, k = floor((n + 1) (1 - BOUND)) (Vovk et al., 2005). It is NaN
    with too few errors.

    >>> compute_margin(np.arange(-9.0, 0.0)), compute_margin(np.arange(-8.0, 0.0))
    (-9.0, nan)
    """
    k = int((len(errors) + 1) * (1 - BOUND) + 1e-9)
    return float(np.sort(errors)[k - 1]) if k else float("nan")


def compute_held_out_margins(errors: Array) -> Array:
    """Return (n,) for each error the `compute_margin` of all other errors.

    So each error can be compared with a margin that was computed without it.

    >>> compute_held_out_margins(np.arange(-10.0, 0.0))[[0, 1, 9]].tolist()
    [-9.0, -10.0, -10.0]
    """
    k = int(len(errors) * (1 - BOUND) + 1e-9)
    if not k:
        return np.full(len(errors), np.nan)
    ordered = np.sort(errors)
    return np.asarray(np.where(errors <= ordered[k - 1], ordered[k], ordered[k - 1]))


def predict_speeds(pairs: Pairs, prior: Array, residuals: Residuals) -> Prediction:
    """Predict the speeds of these pairs relative to running alone.

    prior: (n,), NaN for a pair without a prior. The speed of such a pair is known only if its job or its kind
    was observed in a co-run.
    """
    observed, met = residuals.count_observed(pairs), residuals.has_met_partner(pairs)
    known = np.isfinite(prior) | (observed > 0)
    p50 = np.clip(np.nan_to_num(prior, nan=1.0) + residuals.compute_correction(pairs), SLOWEST, FASTEST)
    lower = np.clip(p50 + residuals.compute_slack(pairs), 0.0, p50)
    basis: list[Basis] = []
    for seen, beside in zip(observed.tolist(), met.tolist(), strict=True):
        basis.append("observed" if beside else "residuals" if seen else "rule")
    unknown = np.where(known, 0.0, np.nan)
    return Prediction(p50 + unknown, lower + unknown, known, tuple(basis), observed)
