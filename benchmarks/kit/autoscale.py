"""A simulated served model under Kubernetes' autoscaler, with rates by the minute and cold starts.

The rule is that of HorizontalPodAutoscaler v2 with its defaults. Each metric wants ceil(value / target)
replicas. It wants no change if its value per replica is within a tenth of the target. The largest number
counts. In 15 s the autoscaler at most doubles the replicas, or adds 4 if that is more. It removes replicas only
down to the largest number that it wanted within the last 300 s.
"""

import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SYNC_S, MINUTE_S, BIN_S = 15, 60, 600
TOLERANCE = 0.1
STABLE_S = 300
COLD_S = 300.0  # until a new replica serves
TARGET = 0.8  # of what a replica can serve
DAY = 1440
HALVINGS = 8
SERVEGEN = Path("serving/servegen/client_rates_10min.parquet")
SERVEGEN_MODEL = "m-large"

Rates = NDArray[np.float64]


class AutoscaleResult(NamedTuple):
    """The result of a simulation.

    cold_s: for how many seconds the load was above the capacity of warm replicas. short: the share of
    requests above that capacity.
    """

    cold_s: float
    replica_hours: float
    short: float


@dataclass(slots=True)
class ReplicaSet:
    """The replicas of a model. Each is stored as the time in seconds at which it is warm.

    The replica that started last is removed first.
    """

    warm_at: list[float] = field(default_factory=list)
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)

    def count_warm_replicas(self, now_s: float) -> int:
        return sum(at <= now_s for at in self.warm_at)

    def evaluate(self, now_s: float, values: Sequence[float], target: float) -> None:
        """Run one evaluation of the autoscaler. values: one for each metric, NaN if the metric has no value."""
        now = max(1, len(self.warm_at))
        wishes = [compute_wish(value, target, now) for value in values if math.isfinite(value)]
        wanted = max([*wishes, 1])
        self._wishes.append((now_s, wanted))
        while self._wishes[0][0] <= now_s - STABLE_S:
            self._wishes.popleft()
        if wanted < now:
            wanted = min(now, max(number for _, number in self._wishes))
        self._scale_replicas(now_s, min(wanted, max(2 * now, now + 4)))

    def _scale_replicas(self, now_s: float, wanted: int) -> None:
        del self.warm_at[wanted:]
        self.warm_at += [now_s + COLD_S] * (wanted - len(self.warm_at))


def compute_wish(value: float, target: float, replicas: int) -> int:
    """Return the number of replicas that one metric wants.

    >>> compute_wish(95.0, 10.0, 10), compute_wish(115.0, 10.0, 10), compute_wish(5.0, 10.0, 1)
    (10, 12, 1)
    """
    return replicas if abs(value / (target * replicas) - 1) <= TOLERANCE else math.ceil(value / target)


def simulate_autoscaler(
    rates: Rates, forecasts: Rates | None, per_replica: float, headroom: float = 1.0
) -> AutoscaleResult:
    """Simulate the autoscaler on request rates, and return what it costs.

    rates: (minute,) requests/s. forecasts: (minute,) requests/s, each issued at the end of that minute. Without
    forecasts, the autoscaler follows the observed rates alone. headroom: a factor on the observed rates.
    """
    target, start = TARGET * per_replica, max(1, math.ceil(rates[0] / (TARGET * per_replica)))
    replicas = ReplicaSet([0.0] * start)
    cold_s = short = held_s = 0.0
    for minute in range(1, len(rates)):
        seen = [headroom * rates[minute - 1], *([] if forecasts is None else [forecasts[minute - 1]])]
        for part in range(MINUTE_S // SYNC_S):
            now_s = float(minute * MINUTE_S + part * SYNC_S)
            replicas.evaluate(now_s, seen, target)
            lacking = rates[minute] - per_replica * replicas.count_warm_replicas(now_s)
            cold_s += SYNC_S * (lacking > 0)
            short += SYNC_S * max(0.0, lacking)
            held_s += SYNC_S * len(replicas.warm_at)
    return AutoscaleResult(cold_s, held_s / 3600, short / (MINUTE_S * float(rates[1:].sum())))


def match_replica_hours(rates: Rates, per_replica: float, replica_hours: float) -> AutoscaleResult:
    """Simulate the reactive rule with the headroom at which it uses `replica_hours`.

    The result shows what the same cost achieves without a forecast.
    """
    low, high = 1.0, 2.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        less = simulate_autoscaler(rates, None, per_replica, middle).replica_hours < replica_hours
        low, high = (middle, high) if less else (low, middle)
    return simulate_autoscaler(rates, None, per_replica, high)


def draw_office_ramp(days: int, seed: int) -> Rates:
    """Draw (minute,) requests/s of office hours: a steep morning, a noon dip, and quiet weekends.

    Noise and unforeseeable bursts are added.
    """
    rng = np.random.default_rng(seed)
    minutes = np.arange(days * DAY)
    hour, day = minutes % DAY / 60, minutes // DAY
    begins = 8.75 + rng.normal(0, 0.1, days)[day]
    busy = 1 / (1 + np.exp(-(hour - begins) * 8)) - 1 / (1 + np.exp(-(hour - 18.5) * 3))
    shape = (
        40
        + 360 * busy * np.where(day % 7 < 5, rng.normal(1, 0.06, days)[day], 0.25)
        - 60 * np.exp(-((hour - 12.5) ** 2) / 0.3) * (day % 7 < 5)
    )
    noise = np.zeros(len(minutes))
    for at, shock in enumerate(rng.normal(0, 0.02, len(minutes)).tolist()):
        noise[at] = 0.9 * noise[at - 1] + shock
    bursts = np.ones(len(minutes))
    for at in np.flatnonzero(rng.random(len(minutes)) < 1.5 / DAY).tolist():
        bursts[at : at + 25] = 1.5
    return draw_request_counts(np.maximum(shape * (1 + noise), 5.0) * bursts, rng)


def draw_request_counts(means: Rates, rng: np.random.Generator) -> Rates:
    """Draw a Poisson number of requests for each minute, and return it as (minute,) requests/s."""
    return np.asarray(rng.poisson(means * MINUTE_S) / MINUTE_S, np.float64)


def read_served_week(seed: int) -> Rates | None:
    """Return (minute,) requests/s of all clients of one model over a week, or None if the data are missing.

    The data are means of ten minutes. Between the middles of two bins the rate is interpolated
    linearly.
    """
    path = Path(os.environ.get("FLEETCAST_DATA", "../shared/data")) / SERVEGEN
    if not path.is_file():
        return None
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["model", "t_s", "rate_rps"]).to_pandas()
    means = table[table["model"] == SERVEGEN_MODEL].groupby("t_s")["rate_rps"].sum().sort_index()
    middles, minutes = (
        means.index.to_numpy() + BIN_S / 2,
        np.arange(0, means.index[-1] + BIN_S, MINUTE_S) + MINUTE_S / 2,
    )
    return draw_request_counts(np.interp(minutes, middles, means.to_numpy()), np.random.default_rng(seed))
