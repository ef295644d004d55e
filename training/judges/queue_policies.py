"""Orders of a queue, as policies to play: ours, its peers, and oracles that know every run time.

| policy | the job with the smallest value of this comes first |
|---|---|
| fifo, easy_limits, conservative_limits | arrival |
| gpus_only | GPUs |
| limit_x_cores | limit x GPUs |
| qssf | mean of the user's newest runs x GPUs, from a stream (QSSF's idea: Hu et al., SC 2021) |
| ours | the area in the serving plan: limit x GPUs, GPUs alone without a limit (`order.py`) |
| forecast_x_cores | mean run of similar jobs x GPUs, from a stream: shortest expected processing time first |
| sjf_oracle, area_oracle | true run time; the same x GPUs |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fleetcast.placement.play.replay import Trace
from fleetcast.placement.play.rows import NEVER
from fleetcast.placement.play.seen_runs import SeenRuns
from fleetcast.placement.queues.order import compute_area
from fleetcast.training.fits.run_pools import Key, RunPools


def list_job_kinds(trace: Trace) -> list[tuple[Key, ...]]:
    """Return, for each job, the kinds that it belongs to. The most specific comes first.

    The first kind is its user, GPUs and limit. The others leave out some of these.
    """
    users = {name: number for number, name in enumerate(dict.fromkeys(trace.user))}
    rows: list[tuple[Key, ...]] = []
    for user, gpus, limit in zip(trace.user, trace.gpus, trace.limit_s, strict=True):
        who, size, asked = users[user], int(gpus), int(limit or 0)
        rows.append(((0, who, size, asked), (1, who, size), (2, who, asked), (3, size, asked), (4, size), (5,)))
    return rows


@dataclass(slots=True)
class LearningPolicy:
    """A policy that learns run times only from jobs that end."""

    trace: Trace
    seen: SeenRuns
    pools: RunPools = field(default_factory=RunPools)
    kinds: list[tuple[Key, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kinds = list_job_kinds(self.trace)

    def record_start(self, job: int, now_s: float) -> None:
        """Do nothing, because run times are learned only from ends."""

    def record_end(self, job: int, now_s: float) -> None:
        self.pools.record_end(self.kinds[job], self.trace.run_s[job])
        self.seen.record_end(self.trace.gpus[job], self.trace.run_s[job])


class Qssf(LearningPolicy):
    """A policy that orders jobs by their GPUs times the mean of the user's newest runs of that GPU count.

    The mean is 0 for a new user.
    """

    def compute_key(self, job: int, now_s: float) -> float:
        known = self.pools.find_known_runs(self.kinds[job][1:2])
        return self.trace.gpus[job] * (float(np.exp(known).mean()) if len(known) else 0.0)


class ForecastPolicy(LearningPolicy):
    """A policy that orders jobs by their GPUs times the mean of the newest runs of similar jobs.

    The job's limit caps each of these runs. If no run is known, the limit itself is used.
    """

    def compute_key(self, job: int, now_s: float) -> float:
        limit_s = self.trace.limit_s[job]
        known = np.exp(self.pools.find_known_runs(self.kinds[job]))
        mean_s = float(np.minimum(known, limit_s or NEVER).mean()) if len(known) else limit_s
        return compute_area(self.trace.gpus[job], mean_s)


@dataclass(slots=True)
class FixedKeyPolicy:
    """A policy that orders jobs by keys that are known in advance.

    The plan still learns its estimates of run times from jobs that end.
    """

    trace: Trace
    seen: SeenRuns
    keys: Sequence[float]

    def compute_key(self, job: int, now_s: float) -> float:
        return self.keys[job]

    def record_start(self, job: int, now_s: float) -> None:
        """Do nothing, because run times are learned only from ends."""

    def record_end(self, job: int, now_s: float) -> None:
        self.seen.record_end(self.trace.gpus[job], self.trace.run_s[job])
