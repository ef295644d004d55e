"""Classification of a job's phase from its telemetry, relative to the job's own levels.

Absolute levels do not transfer between jobs.

    init         nothing in memory yet
    loading      memory fills, nothing computes
    warmup       the first half minute of computing (if a job does not compute, of full memory)
    steady       after the warm-up
    evaluation   less activity than usual, and next to no exchange between GPUs
    checkpoint   no activity, memory stays, more host traffic than usual
    cooldown     after computing, memory given back, or no activity for long

Each sample is classified from itself and the samples before it. So the last sample has the present phase.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PHASES = ("init", "loading", "warmup", "steady", "evaluation", "checkpoint", "cooldown")
INIT, LOADING, WARMUP, STEADY, EVALUATION, CHECKPOINT, COOLDOWN = range(len(PHASES))

CONTEXT_GIB = 0.25  # less is no more than a driver's context
ACTIVE = 0.02  # of SM activity; below it nothing computes
GONE = 0.25  # of the usual activity: it has stopped
REDUCED = 0.8  # of the usual activity, with next to no exchange: evaluation
NO_EXCHANGE = 0.1  # of the usual traffic between GPUs
HOST = 2.0  # times the usual host traffic: something is written or read
PEAK_DECAY = 0.97  # of the most memory so far
FULL_S = 20.0  # without more memory: loading is over, where nothing computes
LONG_S = 120.0  # without activity
USUAL_S = 120.0  # the usual is the median of so much active time


@dataclass(frozen=True, slots=True)
class JobLevels:
    """The means of a job's readings over its GPUs, each (sample,), regular in time, NaN if not reported.

    activity: SM activity 0 to 1. exchange: bytes/s between GPUs (NVLink, InfiniBand). host: PCIe
    bytes/s. age_s: the job's age at the first sample, 0 if unknown.
    """

    interval_s: float
    activity: Array
    memory_gib: Array
    exchange: Array
    host: Array
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PhaseRule:
    """The rule that classifies the phases of a job.

    warmup_s: the length of the warm-up in seconds, learned from a site. It was half a minute in every
    recorded run.
    """

    warmup_s: float = 30.0

    def classify_phases(self, levels: JobLevels) -> NDArray[np.int8]:
        """Return (sample,) the index of each sample's phase in PHASES."""
        track = _PhaseTracker(levels, self.warmup_s)
        activity, exchange, host = (np.nan_to_num(row) for row in (levels.activity, levels.exchange, levels.host))
        columns = (activity, levels.memory_gib, exchange, host)
        samples = zip(*(column.tolist() for column in columns), strict=True)
        return np.array([track.classify_sample(at, *sample) for at, sample in enumerate(samples)], np.int8)


class _RunningMedian:
    """A running median of the last `many` values, 0 before the first."""

    def __init__(self, many: int) -> None:
        self.values: deque[float] = deque(maxlen=many)
        self._median: float | None = 0.0

    def add(self, value: float) -> None:
        self.values.append(value)
        self._median = None

    @property
    def median(self) -> float:
        if self._median is None:
            ordered, middle = sorted(self.values), len(self.values) // 2
            self._median = (ordered[middle] + ordered[~middle]) / 2
        return self._median


class _PhaseTracker:
    """The state of the classification of one job's samples, updated with each sample."""

    def __init__(self, levels: JobLevels, warmup_s: float) -> None:
        self.interval_s, self.age_s = levels.interval_s, levels.age_s
        self.warmup_s = warmup_s
        many = max(3, round(USUAL_S / levels.interval_s))
        self.activity, self.exchange, self.host = _RunningMedian(many), _RunningMedian(many), _RunningMedian(many)
        self.most_gib = 0.0
        self.grew = 0  # the sample that last had more memory
        self.began: int | None = None  # the first sample that computed
        self.stopped: int | None = None  # since when it does not

    def classify_sample(self, at: int, activity: float, memory: float, exchange: float, host: float) -> int:
        """Classify the next sample, and return the index of its phase in PHASES. at: the sample's number."""
        memory = memory if math.isfinite(memory) else self.most_gib
        if memory > self.most_gib * 1.02:
            self.most_gib, self.grew = memory, at
        if activity > max(ACTIVE, GONE * self.activity.median):
            self.stopped = None
            if self.began is None:
                self.began = at
            return self._find_computing_phase(at, activity, exchange, host)
        if self.began is None:
            return self._find_startup_phase(at, memory)
        return self._find_pause_phase(at, memory, host)

    def _find_computing_phase(self, at: int, activity: float, exchange: float, host: float) -> int:
        usual = self.exchange.median
        alone = usual > 0 and exchange < NO_EXCHANGE * usual
        is_warm = self._is_warming_up(at)
        if alone and activity < REDUCED * self.activity.median and not is_warm:
            return EVALUATION
        self.activity.add(activity)
        self.exchange.add(exchange)
        self.host.add(host)
        return WARMUP if is_warm else STEADY

    def _is_warming_up(self, at: int) -> bool:
        """Return whether the job is still in its warm-up at sample `at`.

        A job whose age at the first sample exceeds the warm-up has already left it.
        """
        assert self.began is not None
        if self.began == 0 and self.age_s > self.warmup_s:
            return False
        return (at - self.began) * self.interval_s < self.warmup_s

    def _find_startup_phase(self, at: int, memory: float) -> int:
        if memory < CONTEXT_GIB:
            return INIT if self.most_gib < CONTEXT_GIB else COOLDOWN
        full_s = (at - self.grew) * self.interval_s + (self.age_s if self.grew == 0 else 0.0)
        if full_s < FULL_S:
            return LOADING
        return WARMUP if full_s < FULL_S + self.warmup_s else STEADY

    def _find_pause_phase(self, at: int, memory: float, host: float) -> int:
        if self.stopped is None:
            self.stopped = at
        long = (at - self.stopped) * self.interval_s >= LONG_S
        if memory < PEAK_DECAY * self.most_gib or long:
            return COOLDOWN
        if host > HOST * self.host.median:
            return CHECKPOINT
        return WARMUP if self._is_warming_up(at) else STEADY
