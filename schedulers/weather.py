"""Weather: the data about the fleet that adapters may use, made once for each board.

`fleetcast.service.weather` makes it, and adapters must not change it. A part that is missing or too old
is None, so no adapter ever receives a stale part. The mappings decode a row only when it is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.rows import DemandRow
from fleetcast.models.risk.scores import RISK_HORIZONS_S


class Domains(NamedTuple):
    """The domains of one level of the topology, and the domain of each node."""

    names: tuple[str, ...]
    of: NDArray[np.int32]  # (n,) row of `names` of each node, -1 unknown


@dataclass(frozen=True, slots=True)
class Outlook:
    """The state and the risk of all nodes of a fleet at one moment. n is the number of nodes."""

    rows: Mapping[str, int]  # by name; the same object while the names stay the same
    risk: NDArray[np.float64]  # (horizon, n) probability that a pod fails or slows down, NaN unknown
    level: NDArray[np.int8]  # (n,) row of bands.LEVELS of the risk at the first horizon, with hysteresis
    state: NDArray[np.int8]  # (n,) NodeState
    gpus: NDArray[np.int64]  # (n,) that answer
    free: NDArray[np.int64]  # (n,) on which something may be placed now
    reasons: Mapping[str, str] = field(default_factory=dict)  # first reason by name
    causes: Mapping[str, str] = field(default_factory=dict)  # what speaks most for the risk of nodes that are high
    urgent: Mapping[str, str] = field(default_factory=dict)  # why not, of nodes that a hard signal struck since
    in_window: Mapping[str, str] = field(default_factory=dict)  # node in a maintenance window → its window, in words
    pool: NDArray[np.integer[Any]] = field(default_factory=lambda: np.zeros(0, np.int16))  # (n,) row of `pools`, or -1
    pools: Sequence[str] = ()
    max_risk: float = 0.5
    domains: Mapping[str, Domains] = field(
        default_factory=dict
    )  # by level above the node (`fleetcast.fleet.topology.Level`)

    @classmethod
    def make_empty(cls) -> "Outlook":
        none = np.zeros(0, np.int64)
        risk = np.zeros((len(RISK_HORIZONS_S), 0))
        return cls({}, risk, none.astype(np.int8), none.astype(np.int8), none, none)


@dataclass(frozen=True, slots=True)
class Load:
    """The load of nodes over the next minutes: (2, n) p50 and p90, as shares from 0 to 1, NaN if unknown."""

    rows: Mapping[str, int]  # by name
    gpu: NDArray[np.float64]
    cpu: NDArray[np.float64]
    memory: NDArray[np.float64]


class DemandKey(NamedTuple):
    """The key of one demand series, as in a row of `/v1/demand`.

    It belongs to a queue, or to a pool of machines.
    """

    queue: str
    class_: str
    group: str
    target: str
    pool: str = "all"


class JobOutlook(NamedTuple):
    """A job that runs or waits. Moments (`_ms`) are in Unix ms, and durations (`_s`) in seconds. None is unknown."""

    state: str  # queued | running
    attempt: int
    queue: str
    user: str
    nodes: tuple[str, ...]
    gpus: int
    started_ms: int | None
    left_p50_s: float | None
    left_p90_s: float | None
    run_p50_s: float | None  # of the whole attempt, as told at its submission
    run_p90_s: float | None
    checkpoint_ms: int | None  # when its last checkpoint was whole
    slow_since_ms: int | None  # None: not slow
    culprit: str  # the node that slows it; empty if there is none, or if it is unknown
    why: str  # the verdict's sentence; empty while it is not slow
    name: str = ""  # that its user gave it
    limit_s: float | None = None


class StartOutlook(NamedTuple):
    """The expected start of a waiting request or job, in Unix ms. Unknown times are None."""

    p10_ms: int | None
    p50_ms: int | None
    p90_ms: int | None
    position: int
    why: str


@dataclass(frozen=True, slots=True)
class Weather:
    """The data of one board for adapters. `now_ms`: when this object was made.

    `as_of_ms`: the time of the board. demand: the newest forecasts. jobs: by name. starts: by request
    id and by job, from the placer's queue.
    """

    sequence: int
    as_of_ms: int
    now_ms: int
    nodes: Outlook | None = None
    demand: Mapping[DemandKey, DemandRow] | None = None
    jobs: Mapping[str, JobOutlook] | None = None
    starts: Mapping[str, StartOutlook] | None = None
    load: Load | None = None
