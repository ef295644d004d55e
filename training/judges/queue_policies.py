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

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.contest import Issued, TermContest
from placement.order import area
from placement.replay import Trace
from placement.seen_runs import SeenRuns
from training.fits.run_pools import Key, RunPools


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
