"""Measurement of drift: how far a model's inputs and losses are from its card, and when to refit it.

Three conditions ask for a new fit (`DriftLimits`): bands whose coverage differs from the card's, a loss
near that of the best naive forecast, and age. Changed distributions of features (PSI, KS) alone do not ask for
a new fit. A growing fleet changes them all, and forecasts may be as good as before.

The PSI of two samples of one population is not 0. With n and m independent rows it is about (1/n +
1/m) times a chi-squared of bins - 1 degrees of freedom (Yurdakul and Naranjo, 2020). Neighbouring
rows of a series are nearly the same. So n rows of lag-1 autocorrelation r count as n (1 - r) / (1 + r).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.sums import divide
from fleetcast.models.versions.card import Card

Array = NDArray[np.float64]

NOMINAL = 0.8
DAY_MS = 86_400_000
PSI_BINS = 10
PSI_MOVED = 0.25  # the usual word for "another population"
SMALLEST_SHARE = 1e-3
FEWEST_ROWS = 3 * PSI_BINS  # independent ones, on either side
BY_CHANCE_Z = 3.09  # normal quantile: chance alone passes it once in a thousand
HIGHEST_R = 0.9999

Verdict = Literal["same", "drifted", "too_few"]


class DriftLimits(msgspec.Struct, frozen=True):
    """The limits beyond which a model should be fitted again.

    Errors count once `fewest` forecasts have matured. after_days: 0 if age does not matter.
    """

    coverage_off: float = 0.1
    loss_ratio: float = 1.02
    after_days: float = 30.0
    fewest: int = 200


class RecentAccuracy(msgspec.Struct, frozen=True):
    """The recent accuracy of a model's forecasts. A value is None if unknown.

    loss_ratio: the weighted quantile loss divided by that of the best naive forecast. For run times, it is the
    pinball loss of log seconds divided by that of the quantiles of similar jobs, which serve without a fit. n:
    the number of outcomes.
    """

    coverage_80: float | None = None
    loss_ratio: float | None = None
    n: int = 0


class Drift(msgspec.Struct, frozen=True):
    """The drift of the serving version of one kind of model.

    reasons: condition -> the reason to refit, in words. It is empty as long as no refit is needed.
    """

    kind: str
    version: str
    fitted_until_ms: int
    age_days: float
    card_coverage_80: float
    recent: RecentAccuracy
    reasons: dict[str, str]


class FeatureShift(msgspec.Struct, frozen=True):
    """The change of the distribution of one feature.

    ks: the largest gap between the distribution functions. n: the number of later values. independent:
    the number of independent rows in the smaller sample. by_chance: the PSI that two samples of one
    population exceed once in a thousand times. verdict: too_few if chance may explain the PSI.
    """

    feature: str
    psi: float
    ks: float
    before: float  # medians
    now: float
    n: int
    independent: int
    by_chance: float
    verdict: Verdict


def judge_drift(card: Card, recent: RecentAccuracy, now_ms: int, limits: DriftLimits | None = None) -> Drift:
    """Compare a version's recent outcomes with its own card, and return the reasons to refit."""
    limits = limits or DriftLimits()
    expected, reasons = read_card_coverage(card), {}
    age_days = max(0.0, (now_ms - card.fitted_until_ms) / DAY_MS)
    if recent.n >= limits.fewest:
        if recent.coverage_80 is not None and abs(recent.coverage_80 - expected) > limits.coverage_off:
            reasons["coverage"] = (
                f"{recent.coverage_80:.0%} of {recent.n:,} outcomes lay in the 80 % band, the card says {expected:.0%}"
            )
        if recent.loss_ratio is not None and recent.loss_ratio > limits.loss_ratio:
            reasons["loss"] = (
                f"its loss is {recent.loss_ratio:.3g} of the best naive forecast's over {recent.n:,} outcomes, "
                f"{limits.loss_ratio:g} is allowed"
            )
    if limits.after_days and age_days > limits.after_days:
        reasons["age"] = f"it was fitted on data up to {age_days:.0f} days ago, {limits.after_days:g} are allowed"
    return Drift(card.kind, card.version, card.fitted_until_ms, age_days, expected, recent, reasons)


def read_card_coverage(card: Card) -> float:
    """Return the share of outcomes in the 80 % band that the card states, or 0.8 if it states none."""
    rows = [row for row in card.calibration if abs(row.nominal - NOMINAL) < 1e-9 and row.n]
    total = sum(row.n for row in rows)
    return sum(row.observed * row.n for row in rows) / total if total else NOMINAL


def merge_records(records: Iterable[Mapping[str, Any] | None]) -> RecentAccuracy:
    """Combine the accuracy of many series, weighted by the number of forecasts that matured.

    records: the `record` of each row of `/v1/demand`.

    >>> merge_records([{"coverage_80": 0.7, "wql_vs_best_naive": 0.9, "origins": 30}, None]).n
    30
    """
    known = [row for row in records if row and row.get("origins")]
    n = sum(int(row["origins"]) for row in known)

    def compute_mean(name: str) -> float | None:
        scores = [(float(row[name]), int(row["origins"])) for row in known if row.get(name) is not None]
        weight = sum(origins for _, origins in scores)
        return sum(value * origins for value, origins in scores) / weight if weight else None

    return RecentAccuracy(compute_mean("coverage_80"), compute_mean("wql_vs_best_naive"), n)


def compare_features(names: Sequence[str], before: Array, now: Array) -> list[FeatureShift]:
    """Compare the distributions of features, and return the features known on both sides, the most changed first.

    before, now: (row, feature), or (row, series, feature) for several series. Rows are in order of
    time, NaN if unknown.
    """
    found = []
    for column, name in enumerate(names):
        sides = before[..., column], now[..., column]
        then, later = (values[np.isfinite(values)] for values in sides)
        if len(then) and len(later):
            rows = count_independent_rows(sides[0]), count_independent_rows(sides[1])
            found.append(_compare_feature(name, then, later, rows))
    return sorted(found, key=lambda row: -row.psi)


def _compare_feature(name: str, then: Array, later: Array, rows: tuple[float, float]) -> FeatureShift:
    far, chance = compute_psi(then, later), compute_chance_psi(*rows)
    verdict: Verdict = "same"
    if far > PSI_MOVED:
        verdict = "drifted" if min(rows) >= FEWEST_ROWS and far > chance else "too_few"
    medians = float(np.median(then)), float(np.median(later))
    return FeatureShift(
        name, far, compute_ks(then, later), *medians, len(later), int(min(rows)), round(chance, 3), verdict
    )


def count_independent_rows(values: Array) -> float:
    """Return the number of independent rows that contain as much information as these correlated rows.

    values: (row,), or (row, series) for several series.

    >>> count_independent_rows(np.arange(1000.0)) < 5  # a slow rise
    True
    """
    rows = values.reshape(len(values), -1)
    known = np.isfinite(rows)
    count = known.sum(axis=0)
    off = np.where(known, rows, 0.0)
    off = np.where(known, rows - off.sum(axis=0) / np.maximum(count, 1), 0.0)
    spread = (off**2).sum(axis=0)
    after = (off[1:] * off[:-1]).sum(axis=0)
    r = np.clip(divide(after, spread, 0.0), 0.0, HIGHEST_R)
    return float(np.maximum(count * (1 - r) / (1 + r), np.minimum(count, 1)).sum())


def compute_chance_psi(rows: float, others: float) -> float:
    """Return the PSI that two samples of one population exceed once in a thousand times.

    rows, others: the numbers of independent rows. The chi-squared quantile is that of Wilson and Hilferty.

    >>> round(compute_chance_psi(1000, 1000), 3), round(compute_chance_psi(1e9, 30), 1)
    (0.056, 0.9)
    """
    k = PSI_BINS - 1
    quantile = k * (1 - 2 / (9 * k) + BY_CHANCE_Z * np.sqrt(2 / (9 * k))) ** 3
    return float(quantile * (1 / rows + 1 / others))


def compute_psi(before: Array, now: Array) -> float:
    """Return the population stability index of `now`, over bins that each have an equal share of `before`.

    0: the same distribution. Above 0.25: another population.

    >>> values = np.arange(100.0)
    >>> round(compute_psi(values, values), 6), compute_psi(values, values + 60) > 0.25
    (0.0, True)
    """
    edges = np.unique(np.quantile(before, np.linspace(0, 1, PSI_BINS + 1)[1:-1]))
    then, later = (
        _compute_shares(np.searchsorted(edges, values, side="right"), len(edges) + 1) for values in (before, now)
    )
    return float(((later - then) * np.log(later / then)).sum())


def _compute_shares(at: NDArray[np.intp], bins: int) -> Array:
    shares = np.bincount(at, minlength=bins) / len(at)
    return np.maximum(shares, SMALLEST_SHARE)


def compute_ks(before: Array, now: Array) -> float:
    """Return the Kolmogorov-Smirnov statistic: the largest gap between the two distribution functions.

    >>> compute_ks(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    1.0
    """
    points = np.concatenate((before, now))
    then, later = (np.searchsorted(np.sort(values), points, side="right") / len(values) for values in (before, now))
    return float(np.abs(then - later).max())
