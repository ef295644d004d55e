"""Prediction of peaks that jobs cause together on racks, power domains, rails and stores.

The peaks are those of the next 15 minutes. For every minute ahead, values of each job are drawn at
random from its readings at its present level (models/jobs/level.py). The time of its next checkpoint is
drawn from the predicted distribution. Jobs are drawn independently, and draws are summed over a domain's
jobs. A row describes the minute with the highest 90 % quantile. Jobs that change together (one gang
restarted, one power event) are not foreseen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.models.jobs.renewal import NextBeginning

Array = NDArray[np.float64]

DRAWS = 200
TOGETHER = 256  # jobs are drawn for at once: about 10 MB
MINUTE_MS = 60_000
MINUTES = 15
DomainKind = Literal["rack", "rail", "power", "storage"]
Domain = tuple[str, str]  # kind (rack, rail, power, storage), name
NO_CAPACITY = {
    "rack": "no topology states what a rack may draw",
    "power": "no topology states what a power domain may draw",
    "rail": "not all adapters of the group report their speed",
    "storage": "no setting states how fast the store writes",
}
UNITS = {"power_w": "W", "sent_bytes_per_s": "B/s", "checkpoint_bytes_per_s": "B/s"}
QUANTITY = {"rack": ("power_w",), "power": ("power_w",), "rail": ("sent_bytes_per_s",)}


@dataclass(frozen=True, slots=True)
class Burst:
    """The next checkpoint of a job: when it begins, how long it lasts, how fast and where it writes."""

    begins: NextBeginning
    lasts_s: float
    bytes_per_s: float
    target: str


@dataclass(frozen=True, slots=True)
class JobLoad:
    """The load of one job on its domains.

    shares: domain -> the part of the job in it. readings: quantity -> (k,) readings of the whole job,
    without NaN.
    """

    job: str
    shares: Mapping[Domain, float]
    readings: Mapping[str, Array]
    burst: Burst | None = None


class Spike(msgspec.Struct):
    """The predicted peak of a domain: the minute of the next 15 with the highest p90.

    p50, p90: quantiles of the load in that minute. capacity: null if unknown.
    """

    domain_kind: DomainKind
    domain: str
    quantity: str
    unit: str
    peak_ms: int
    p50: float
    p90: float
    capacity: float | None
    capacity_reason: str
    jobs: int


def predict_spikes(
    loads: Sequence[JobLoad], now_ms: int, capacity: Mapping[Domain, float], rng: np.random.Generator
) -> list[Spike]:
    """Predict the peak of each domain and quantity, sorted by domain.

    capacity: the capacities of the domains where they are known.
    """
    sums: dict[tuple[Domain, str], Array] = {}
    jobs: dict[tuple[Domain, str], int] = {}
    for name in ("power_w", "sent_bytes_per_s"):
        readable = [load for load in loads if len(load.readings.get(name, ()))]
        for at in range(0, len(readable), TOGETHER):
            _add_readings(readable[at : at + TOGETHER], name, sums, jobs, rng)
    for load in loads:
        if load.burst is not None:
            key = (("storage", load.burst.target), "checkpoint_bytes_per_s")
            sums[key] = sums.get(key, 0.0) + _draw_burst(load.burst, now_ms, rng)
            jobs[key] = jobs.get(key, 0) + 1
    return [_make_spike(*key, sums[key], now_ms, capacity.get(key[0]), jobs[key]) for key in sorted(sums)]


def _add_readings(
    loads: Sequence[JobLoad],
    name: str,
    sums: dict[tuple[Domain, str], Array],
    jobs: dict[tuple[Domain, str], int],
    rng: np.random.Generator,
) -> None:
    """Add random draws of the jobs' readings to the sums of their domains, and count the jobs there."""
    drawn = _draw_readings([load.readings[name] for load in loads], rng)
    domains: dict[Domain, list[tuple[int, float]]] = {}
    for at, load in enumerate(loads):
        for domain, share in load.shares.items():
            if name in QUANTITY[domain[0]]:
                domains.setdefault(domain, []).append((at, share))
    shares = np.zeros((len(domains), len(loads)), np.float32)
    for row, parts in enumerate(domains.values()):
        for at, share in parts:
            shares[row, at] += share
    added = (shares @ drawn.reshape(len(loads), -1)).reshape(len(domains), DRAWS, MINUTES)
    for row, (domain, parts) in enumerate(domains.items()):
        key = (domain, name)
        sums[key] = sums.get(key, 0.0) + added[row].astype(np.float64)
        jobs[key] = jobs.get(key, 0) + len(parts)


def _draw_readings(readings: Sequence[Array], rng: np.random.Generator) -> NDArray[np.float32]:
    """Draw (job, draw, minute) values at random from each job's own readings, with replacement."""
    many = np.array([len(values) for values in readings])
    padded = np.zeros((len(readings), int(many.max())), np.float32)
    for at, values in enumerate(readings):
        padded[at, : len(values)] = values
    picks = (rng.random((len(readings), DRAWS * MINUTES), np.float32) * many[:, None]).astype(np.intp)
    drawn = np.take_along_axis(padded, np.minimum(picks, many[:, None] - 1), axis=1)
    return drawn.reshape(len(readings), DRAWS, MINUTES)


def _draw_burst(burst: Burst, now_ms: int, rng: np.random.Generator) -> Array:
    """Return (draw, minute) the bytes/s that a checkpoint writes.

    A checkpoint counts in each minute in which it writes.
    """
    begins_at = burst.begins
    begins = np.interp(rng.random(DRAWS), (0.1, 0.5, 0.9), (begins_at.p10_ms, begins_at.p50_ms, begins_at.p90_ms))[
        :, None
    ]
    from_ms = now_ms + MINUTE_MS * np.arange(MINUTES)[None, :]
    under_way = (begins < from_ms + MINUTE_MS) & (begins + burst.lasts_s * 1000 > from_ms)
    return np.asarray(under_way * burst.bytes_per_s)


def _make_spike(
    domain: Domain, quantity: str, drawn: Array, now_ms: int, capacity: float | None, jobs: int
) -> Spike:  # fmt: skip
    middle, high = np.quantile(drawn, (0.5, 0.9), axis=0)
    at = int(np.argmax(high))
    return Spike(
        domain_kind=cast(DomainKind, domain[0]),
        domain=domain[1],
        quantity=quantity,
        unit=UNITS[quantity],
        peak_ms=now_ms + MINUTE_MS * at + MINUTE_MS // 2,
        p50=round(float(middle[at]), 1),
        p90=round(float(high[at]), 1),
        capacity=capacity,
        capacity_reason="" if capacity is not None else NO_CAPACITY[domain[0]],
        jobs=jobs,
    )
