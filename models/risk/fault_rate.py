"""FaultRate: the faults observed in this fleet, divided by those that past faults predict.

    each tick       nodes without a warning ──► expected += their hazard × the time since the last tick
    LAG_MS later    faults without a warning ──► seen += 1 for all that begin within the same minute
    times           posterior mean of the ratio, from a mixture of two gamma priors

Faults that a rule warned of belong to the rule's own hazard, so only nodes without a warning count.
One broken switch or breaker stops several nodes at once, so faults within one minute count as one. If a
node has a fault when its telemetry first arrives, or arrives again after a long silence, the beginning of
the fault was not observed. So the first JOINING_MS of a node do not count. Both sums halve every
HALF_LIFE_MS, so a fleet that was repaired returns to the expected rate.
"""

from collections.abc import Mapping, Sequence
from math import exp, lgamma, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.risk.fault_log import FaultLog

Array = NDArray[np.float64]

DAY_MS = 86_400_000
LAG_MS = 900_000  # some hard signals are certain only minutes after they began
WATCHED_MS = 600_000  # a longer time between two ticks was not watched: neither its nodes nor its faults count
TOGETHER_MS = 60_000
JOINING_MS = 300_000  # a rule is as long as this in finding what was broken before
AWAY_MS = LAG_MS + WATCHED_MS  # faults are counted before a silent node counts as new
HALF_LIFE_MS = 14 * DAY_MS
WARNING_HAZARD = 0.05  # of the next hour, beyond what the history expects
WILD, WILD_TIMES = 0.001, 100.0
# weight, shape, mean: an ordinary fleet, and one like no other. The mean of both is 1.
PRIORS = ((1 - WILD, 2.0, (1 - WILD * WILD_TIMES) / (1 - WILD)), (WILD, 0.5, WILD_TIMES))
LEAST, MOST = 0.25, 1000.0


class FaultRate:
    """The observed and the expected faults of one fleet.

    times: observed divided by expected faults, 1 before anything is known.
    """

    def __init__(self) -> None:
        self.seen, self.expected, self.times = 0.0, 0.0, 1.0
        self._now_ms = 0
        self._watched_ms = 0  # start of the present run of ticks without a gap
        self._counted_ms = 0  # start of the last fault that was counted
        self._warned_ms: dict[str, tuple[int, int]] = {}  # node → begin and last tick of its warning
        self._times_ms: dict[str, tuple[int, int]] = {}  # node → first and last tick of its present time with telemetry

    def record_tick(
        self,
        day_hazard: Array,
        warned: NDArray[np.bool_],
        names: Sequence[str],
        faults: FaultLog,
        now_ms: int,
        known: NDArray[np.bool_] | None = None,
    ) -> None:
        """Add one tick to the expected and the observed faults.

        day_hazard: (node,) faults that the history expects within a day. warned: (node,) whether a rule
        warns of the node. known: (node,) whether the node has telemetry now. None means that all have.
        """
        elapsed_ms, before_ms = now_ms - self._now_ms, self._now_ms
        self._now_ms = now_ms
        if not before_ms or elapsed_ms > WATCHED_MS:
            self._watched_ms = now_ms
        self._record_telemetry(
            names if known is None else [names[row] for row in np.flatnonzero(known).tolist()], now_ms
        )
        if not before_ms or elapsed_ms <= 0:
            self._update_warnings(warned, names, now_ms)
            return
        decay = 0.5 ** (elapsed_ms / HALF_LIFE_MS)
        self.seen, self.expected = self.seen * decay, self.expected * decay
        if elapsed_ms <= WATCHED_MS:
            is_well = [not faults.has_current_fault(name) and not self._is_joining(name, now_ms) for name in names]
            is_counted = np.array(is_well, bool) & ~warned
            self.expected += float(day_hazard[is_counted].sum()) * elapsed_ms / DAY_MS
        self._count_faults(faults, before_ms - LAG_MS, now_ms - LAG_MS)
        self._update_warnings(warned, names, now_ms)
        self.times = compute_posterior_ratio(self.seen, self.expected)

    def _count_faults(self, faults: FaultLog, after_ms: int, until_ms: int) -> None:
        after_ms = max(after_ms, self._watched_ms + TOGETHER_MS)  # a fault found at the start may be of any age
        begun = [fault for fault in faults.faults if after_ms < fault.start_ms <= until_ms]
        for fault in sorted(begun, key=lambda fault: fault.start_ms):
            is_apart = fault.start_ms >= self._counted_ms + TOGETHER_MS
            begin_ms, last_ms = self._warned_ms.get(fault.node, (fault.start_ms, 0))
            was_warned = begin_ms < fault.start_ms - TOGETHER_MS <= last_ms
            if is_apart and not was_warned and not self._is_joining(fault.node, fault.start_ms):
                self.seen += 1
                self._counted_ms = fault.start_ms

    def _record_telemetry(self, names: Sequence[str], now_ms: int) -> None:
        """Record which nodes have telemetry now. A node that was away for longer than AWAY_MS counts as new."""
        for name in names:
            since_ms, last_ms = self._times_ms.get(name, (now_ms, now_ms))
            self._times_ms[name] = (since_ms if now_ms - last_ms <= AWAY_MS else now_ms), now_ms
        if len(self._times_ms) > 2 * len(names) + 1000:
            self._times_ms = {name: times for name, times in self._times_ms.items() if now_ms - times[1] <= AWAY_MS}

    def _is_joining(self, name: str, at_ms: int) -> bool:
        """Return whether the node's telemetry had begun less than JOINING_MS before a time.

        Nodes that were there at the first tick do not count as joining, because their telemetry is older than our
        record.
        """
        since_ms, _ = self._times_ms.get(name, (at_ms, at_ms))
        return since_ms > self._watched_ms and at_ms < since_ms + JOINING_MS

    def _update_warnings(self, warned: NDArray[np.bool_], names: Sequence[str], now_ms: int) -> None:
        """Record the nodes with a warning now. Drop warnings that are too old to matter for later faults.

        warned: (node,) whether a rule warns of the node.
        """
        for row in np.flatnonzero(warned).tolist():
            begin_ms, _ = self._warned_ms.get(names[row], (now_ms, now_ms))
            self._warned_ms[names[row]] = begin_ms, now_ms
        oldest_ms = now_ms - LAG_MS - WATCHED_MS - TOGETHER_MS
        self._warned_ms = {name: times for name, times in self._warned_ms.items() if times[1] >= oldest_ms}

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy of the state for a snapshot."""
        sums = {"seen": self.seen, "expected": self.expected}
        times = {"now_ms": self._now_ms, "watched_ms": self._watched_ms, "counted_ms": self._counted_ms}
        return {**sums, **times, "warned_ms": dict(self._warned_ms), "telemetry_ms": dict(self._times_ms)}, {}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Fill a new object with the state that `dump` returned."""
        self.seen, self.expected = float(about["seen"]), float(about["expected"])
        self._now_ms, self._counted_ms = about["now_ms"], about["counted_ms"]
        self._watched_ms = about.get("watched_ms", self._now_ms)
        self._warned_ms = {name: (int(begin), int(last)) for name, (begin, last) in about["warned_ms"].items()}
        self._times_ms = {
            name: (int(since), int(last)) for name, (since, last) in about.get("telemetry_ms", {}).items()
        }
        self.times = compute_posterior_ratio(self.seen, self.expected)

    def shift_times(self, by_ms: int) -> None:
        """Shift all times by `by_ms`. A time of 0 is unset and stays 0."""
        self._now_ms, self._watched_ms, self._counted_ms = (
            at_ms + by_ms if at_ms else 0 for at_ms in (self._now_ms, self._watched_ms, self._counted_ms)
        )
        self._warned_ms, self._times_ms = (
            {name: (begin + by_ms, last + by_ms) for name, (begin, last) in times.items()}
            for times in (self._warned_ms, self._times_ms)
        )


def compute_posterior_ratio(seen: float, expected: float) -> float:
    """Return the posterior mean of the ratio of observed to expected faults.

    The result is rounded to two significant digits, so that it does not change all the time.

    >>> compute_posterior_ratio(0, 0.0), compute_posterior_ratio(1, 0.02), compute_posterior_ratio(9, 0.025)
    (1.0, 1.9, 320.0)
    """
    rows = []
    for weight, shape, mean in PRIORS:
        rate = shape / mean
        likelihood = lgamma(shape + seen) - lgamma(shape) + shape * log(rate / (rate + expected))
        likelihood -= seen * log(rate + expected)
        rows.append((log(weight) + likelihood, (shape + seen) / (rate + expected)))
    best = max(likelihood for likelihood, _ in rows)
    weights = [exp(likelihood - best) for likelihood, _ in rows]
    mean = sum(weight * times for weight, (_, times) in zip(weights, rows, strict=True)) / sum(weights)
    return min(max(float(f"{mean:.2g}"), LEAST), MOST)


def has_warning(p_hour: Array, hour_hazard: Array) -> NDArray[np.bool_]:
    """Return (node,) whether signals raise the hazard of the next hour clearly above the base hazard.

    p_hour: (node,) probability of a fault, NaN if unknown. hour_hazard: (node,) faults that the history of
    the node predicts.
    """
    hazard = -np.log1p(-np.minimum(np.nan_to_num(p_hour), 1 - 1e-9))
    return np.asarray(hazard - hour_hazard >= WARNING_HAZARD)
