"""Who is next, as policies to be played: ours, its peers, and oracles that know every run time.

| policy | least first |
|---|---|
| fifo, easy_limits, conservative_limits | arrival |
| gpus_only | GPUs |
| limit_x_cores | limit x GPUs |
| qssf | mean of the user's newest runs x GPUs, from a stream (QSSF's idea: Hu et al., SC 2021) |
| ours | the term that won the last contest x GPUs (`placement.contest`) |
| sjf_oracle, area_oracle | true run time; the same x GPUs |
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.capacity import CountAsk
from placement.contest import Issued, TermContest
from placement.order import area
from placement.replay import Trace
from placement.timeline import RUN_LEVELS, RunTimeQuantiles
from training.fits.run_pools import Key, RunPools

RUNS_KEPT = 200  # of a GPU count
RELEARN = 0.05  # of its runs are new: learn its quantiles again


class SeenRuns:
    """Run times by GPU count of what ended in a play: how long the plan expects jobs without limits to run."""

    def __init__(self) -> None:
        self._runs: dict[int, deque[float]] = {}
        self._new: dict[int, int] = {}
        self._times = RunTimeQuantiles({})

    def ended(self, gpus: int, run_s: float) -> None:
        for count in (gpus, 0):
            self._runs.setdefault(count, deque(maxlen=RUNS_KEPT)).append(run_s)
            self._new[count] = self._new.get(count, 0) + 1
        if any(self._new[count] > RELEARN * len(self._runs[count]) for count in (gpus, 0)):
            self._learn()

    def _learn(self) -> None:
        rows = {count: self._row(runs) for count, runs in self._runs.items()}
        self._times = RunTimeQuantiles.of({"by_gpus": rows, "all": rows[0]})
        self._new.clear()
        self._new.update(dict.fromkeys(self._runs, 0))

    def _row(self, runs: Sequence[float]) -> dict[str, object]:
        levels = np.quantile(runs, RUN_LEVELS)
        return {"n": len(runs), "p50": levels[RUN_LEVELS.index(0.5)], "p90": levels[RUN_LEVELS.index(0.9)]}

    def planned(self, ask: CountAsk, age_s: float) -> float:
        """The limit, which ends a job; without one the p90 of its like."""
        if ask.limit_s is not None:
            return ask.limit_s
        return self._times.run_s(ask.gpus, 0.9, age_s=age_s)


def kinds_of(trace: Trace) -> list[tuple[Key, ...]]:
    """What a job is like, the most telling first: user, GPUs and limit, then fewer of these."""
    users = {name: number for number, name in enumerate(dict.fromkeys(trace.user))}
    rows: list[tuple[Key, ...]] = []
    for user, gpus, limit in zip(trace.user, trace.gpus, trace.limit_s, strict=True):
        who, size, asked = users[user], int(gpus), int(limit or 0)
        rows.append(((0, who, size, asked), (1, who, size), (2, who, asked), (3, size, asked), (4, size), (5,)))
    return rows


@dataclass(slots=True)
class Streaming:
    """Learns run times from ends alone."""

    trace: Trace
    seen: SeenRuns
    pools: RunPools = field(default_factory=RunPools)
    kinds: list[tuple[Key, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kinds = kinds_of(self.trace)

    def started(self, job: int, now_s: float) -> None:
        """Learns nothing."""

    def ended(self, job: int, now_s: float) -> None:
        self.pools.ended(self.kinds[job], self.trace.run_s[job])
        self.seen.ended(self.trace.gpus[job], self.trace.run_s[job])


class Qssf(Streaming):
    """The mean of the user's newest runs, by GPUs; 0 for a user who is new."""

    def key(self, job: int, now_s: float) -> float:
        known = self.pools.known(self.kinds[job][1:2])
        return self.trace.gpus[job] * (float(np.exp(known).mean()) if len(known) else 0.0)


@dataclass(slots=True)
class Ours(Streaming):
    """Shortest area first. The forecast is the median run of what is alike; the limit is part of the likeness."""

    contest: TermContest = field(kw_only=True)

    def key(self, job: int, now_s: float) -> float:
        self.contest.settle(now_s)
        known = self.pools.known(self.kinds[job])
        forecast_s = float(np.exp(np.median(known))) if len(known) else None
        gpus, limit_s = self.trace.gpus[job], self.trace.limit_s[job]
        self.contest.issued(job, Issued(self.trace.submit_s[job], gpus, limit_s, forecast_s))
        return area(self.contest.term, gpus, forecast_s, limit_s)

    def started(self, job: int, now_s: float) -> None:
        self.contest.started(job, now_s)

    def ended(self, job: int, now_s: float) -> None:
        Streaming.ended(self, job, now_s)
        self.contest.ended(job, now_s)


@dataclass(slots=True)
class KeyedPeer:
    """Keys that need no learning; the plan's estimates of run times are learnt."""

    trace: Trace
    seen: SeenRuns
    keys: Sequence[float]

    def key(self, job: int, now_s: float) -> float:
        return self.keys[job]

    def started(self, job: int, now_s: float) -> None:
        """Learns nothing."""

    def ended(self, job: int, now_s: float) -> None:
        self.seen.ended(self.trace.gpus[job], self.trace.run_s[job])
