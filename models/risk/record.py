"""RiskRecord: the past accuracy (calibration and Brier skill) of issued risk probabilities.

    issued ──► waits for its horizon ──► a fault of the node began within it, or none did ──► sums

RiskRecord stores the probability of `fail` of every node without a fault, four times per horizon. When the
horizon is over, it compares the probability with the faults in FaultLog. A forecast is not scored if we
were down for over a tenth of its time. Brier skill is relative to the observed share of faults, which is
the best single number for all nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.models.risk.fault_log import FaultLog
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS

Array = NDArray[np.float64]

EDGES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
BINS = len(EDGES) + 1
A_HORIZON = 4  # issues
WATCHED_MS = 600_000  # between two ticks: of more nothing is known
UNWATCHED_SHARE = 0.1
SPARE = 64  # nodes that are there no more
FAIL = RISK_KINDS.index("fail")
SUMS = ("count", "predicted", "seen")


@dataclass(slots=True)
class IssuedRisk:
    """The probabilities issued at one moment for one horizon, which wait for their outcomes.

    p: (node,) in the rows of the record, NaN where none was issued.
    """

    horizon: int
    issued_ms: int
    p: NDArray[np.float32]
    missed_ms: int = 0


@dataclass(slots=True)
class RiskRecord:
    """The past accuracy of risk probabilities: sums of matured forecasts by (horizon, bin of probability).

    count: the number of forecasts. predicted: the sum of their probabilities. seen: the number of faults
    that followed. squares: (horizon,) the sum of squared errors of the probabilities.
    """

    count: Array = field(default_factory=lambda: np.zeros((len(RISK_HORIZONS_S), BINS)))
    predicted: Array = field(default_factory=lambda: np.zeros((len(RISK_HORIZONS_S), BINS)))
    seen: Array = field(default_factory=lambda: np.zeros((len(RISK_HORIZONS_S), BINS)))
    squares: Array = field(default_factory=lambda: np.zeros(len(RISK_HORIZONS_S)))
    since_ms: int = 0
    names: list[str] = field(default_factory=list)
    waiting: list[IssuedRisk] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    now_ms: int = 0
    model: str = ""  # whose probabilities these are, where it is not what serves

    def record_tick(self, values: Array, names: Sequence[str], faults: FaultLog, now_ms: int) -> None:
        """Score the forecasts that are due, and store new ones.

        values: (kind, horizon, node), NaN if unknown. `faults` must already have this tick's faults.
        """
        gap_ms = now_ms - self.now_ms if self.now_ms else 0
        if gap_ms > WATCHED_MS:
            for issue in self.waiting:
                end_ms = issue.issued_ms + 1000 * RISK_HORIZONS_S[issue.horizon]
                issue.missed_ms += max(0, min(now_ms, end_ms) - self.now_ms)
        self.now_ms = now_ms
        self.since_ms = self.since_ms or now_ms
        due = [issue for issue in self.waiting if now_ms - issue.issued_ms >= 1000 * RISK_HORIZONS_S[issue.horizon]]
        for issue in due:
            self.waiting.remove(issue)
            self._score_forecast(issue, faults)
        newest = {issue.horizon: issue.issued_ms for issue in self.waiting}
        for horizon, horizon_s in enumerate(RISK_HORIZONS_S):
            if now_ms - newest.get(horizon, 0) >= 1000 * horizon_s // A_HORIZON:
                self._store_forecast(horizon, values[FAIL, horizon], names, faults, now_ms)

    def _store_forecast(self, horizon: int, p: Array, names: Sequence[str], faults: FaultLog, now_ms: int) -> None:
        if len(self.names) > 2 * len(names) + SPARE:
            self._drop_missing_nodes(names)
        for name in names:
            if name not in self.rows:
                self.rows[name] = len(self.names)
                self.names.append(name)
        away = np.array([faults.has_failed(name) for name in names], bool)
        probabilities = np.full(len(self.names), np.nan, np.float32)
        probabilities[[self.rows[name] for name in names]] = np.where(away, np.nan, p)
        if np.isfinite(probabilities).any():
            self.waiting.append(IssuedRisk(horizon, now_ms, probabilities))

    def _drop_missing_nodes(self, names: Sequence[str]) -> None:
        """Drop the nodes that are not in `names`."""
        here = set(names)
        rows_here = [row for row, name in enumerate(self.names) if name in here]
        for issue in self.waiting:
            whole = np.full(len(self.names), np.nan, np.float32)
            whole[: len(issue.p)] = issue.p
            issue.p = whole[rows_here]
        self.names = [self.names[row] for row in rows_here]
        self.rows = {name: row for row, name in enumerate(self.names)}

    def _score_forecast(self, issue: IssuedRisk, faults: FaultLog) -> None:
        span_ms = 1000 * RISK_HORIZONS_S[issue.horizon]
        if issue.missed_ms > UNWATCHED_SHARE * span_ms:
            return
        came = np.zeros(len(issue.p))
        for name in faults.find_new_faults(issue.issued_ms, issue.issued_ms + span_ms):
            row = self.rows.get(name, len(came))
            if row < len(came):
                came[row] = 1.0
        for name in faults.find_faulty_nodes(issue.issued_ms):  # a fault may become known after its node's forecast
            row = self.rows.get(name, len(came))
            if row < len(came):
                issue.p[row] = np.nan
        known = np.isfinite(issue.p)
        p, came = issue.p[known].astype(np.float64), came[known]
        place = np.searchsorted(EDGES, p, side="right")
        for sums, weights in ((self.count, None), (self.predicted, p), (self.seen, came)):
            sums[issue.horizon] += np.bincount(place, weights, BINS)
        self.squares[issue.horizon] += ((p - came) ** 2).sum()

    def list_calibrations(self) -> list["Calibration"]:
        """Return the calibration of each horizon."""
        return [self._make_calibration(at, horizon_s) for at, horizon_s in enumerate(RISK_HORIZONS_S)]

    def _make_calibration(self, at: int, horizon_s: int) -> "Calibration":
        count, predicted, seen = (sums[at].tolist() for sums in (self.count, self.predicted, self.seen))
        return make_calibration(horizon_s, count, predicted, seen, float(self.squares[at]), self.since_ms)

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy for a snapshot: parts that can be written as JSON, and arrays by name."""
        about = {
            "since_ms": self.since_ms,
            "now_ms": self.now_ms,
            "model": self.model,
            "names": list(self.names),
            "waiting": [[issue.horizon, issue.issued_ms, issue.missed_ms] for issue in self.waiting],
        }
        p = np.full((len(self.waiting), len(self.names)), np.nan, np.float32)
        for row, issue in zip(p, self.waiting, strict=True):
            row[: len(issue.p)] = issue.p
        arrays = {name: getattr(self, name).copy() for name in SUMS}
        return about, {**arrays, "squares": self.squares.copy(), "p": p}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the state that `dump` returned. If bins or horizons have changed, the sums start again from 0."""
        self.since_ms, self.now_ms, self.names = about["since_ms"], about["now_ms"], list(about["names"])
        self.model = about["model"]
        self.rows = {name: row for row, name in enumerate(self.names)}
        rows = zip(about["waiting"], arrays["p"], strict=True)
        self.waiting = [IssuedRisk(horizon, issued, p.copy(), missed) for (horizon, issued, missed), p in rows]
        if arrays["count"].shape == self.count.shape:
            for name in (*SUMS, "squares"):
                setattr(self, name, arrays[name].copy())

    def shift_times(self, by_ms: int) -> None:
        """Shift all times by `by_ms`. A time of 0 is unset and stays 0."""
        for issue in self.waiting:
            issue.issued_ms += by_ms
        self.since_ms, self.now_ms = (time_ms + by_ms if time_ms else 0 for time_ms in (self.since_ms, self.now_ms))


class Bin(msgspec.Struct):
    """The calibration of the forecasts with a probability from `low` to `high`.

    n: their number. p: their mean. observed: the share of them that a fault followed.
    """

    low: float
    high: float
    n: int
    p: float
    observed: float


class Calibration(msgspec.Struct):
    """The calibration of one horizon: the mean forecast, and the observed share of faults.

    A mean, share or skill is null before any forecast has matured.
    """

    horizon_s: int
    matured: int
    faults: int
    mean_p: float | None
    observed: float | None
    brier_skill: float | None
    bins: list[Bin]
    since_ms: int


def make_calibration(
    horizon_s: int,
    count: Sequence[float],
    predicted: Sequence[float],
    seen: Sequence[float],
    squares: float,
    since_ms: int,
) -> Calibration:
    """Return the calibration of sums by bin of probability. squares: the sum of squared errors of all bins."""
    total, came = sum(count), sum(seen)
    base = total and came / total * (1 - came / total)
    edges = (0.0, *EDGES, 1.0)
    return Calibration(
        horizon_s=horizon_s,
        matured=int(total),
        faults=int(came),
        mean_p=round(sum(predicted) / total, 6) if total else None,
        observed=round(came / total, 6) if total else None,
        brier_skill=round(1 - squares / total / base, 4) if base else None,
        bins=[
            Bin(low, high, int(n), round(p / n, 6), round(share / n, 6))
            for low, high, n, p, share in zip(edges, edges[1:], count, predicted, seen, strict=False)
            if n
        ],
        since_ms=since_ms,
    )
