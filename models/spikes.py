"""Load that jobs together put on a rack, a power domain, a rail group or a store within the next quarter of an hour.

Each job's readings of the last minutes are drawn from again for every minute ahead, independently of other jobs, and
its next checkpoint from when it is expected; draws are added up over the jobs of a domain. A row tells the minute
whose 90 % quantile is highest. Jobs that move together (one gang restarted, one power event) are not foreseen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.renewal import Next

Array = NDArray[np.float64]

DRAWS = 200
MINUTE_MS = 60_000
MINUTES = 15
Domain = tuple[str, str]  # kind (rack, rail, power, storage), name
UNITS = {"power_w": "W", "sent_bytes_per_s": "B/s", "checkpoint_bytes_per_s": "B/s"}
QUANTITY = {"rack": ("power_w",), "power": ("power_w",), "rail": ("sent_bytes_per_s",)}


@dataclass(frozen=True, slots=True)
class Burst:
    """The next checkpoint of a job: when it begins, how long it takes and how fast it writes, to what."""

    begins: Next
    lasts_s: float
    bytes_per_s: float
    target: str


@dataclass(frozen=True, slots=True)
class Load:
    """shares: which part of the job lies in a domain; readings: quantity -> (k,) of the whole job, without NaN."""

    job: str
    shares: Mapping[Domain, float]
    readings: Mapping[str, Array]
    burst: Burst | None = None


def spikes(
    loads: Sequence[Load], now_ms: int, capacity: Mapping[Domain, float], rng: np.random.Generator
) -> list[dict[str, Any]]:
    """A row a domain and quantity, in order of domains; capacity: of those where it is known."""
    sums: dict[tuple[Domain, str], Array] = {}
    jobs: dict[tuple[Domain, str], int] = {}
    for load in loads:
        for key, drawn in _drawn(load, now_ms, rng):
            sums[key] = sums.get(key, 0.0) + drawn
            jobs[key] = jobs.get(key, 0) + 1
    return [_row(*key, sums[key], now_ms, capacity.get(key[0]), jobs[key]) for key in sorted(sums)]


def _drawn(load: Load, now_ms: int, rng: np.random.Generator) -> list[tuple[tuple[Domain, str], Array]]:
    """(draw, minute) of each domain and quantity that the job adds to."""
    made = []
    drawn = {name: rng.choice(values, (DRAWS, MINUTES)) for name, values in load.readings.items() if len(values)}
    for domain, share in load.shares.items():
        made += [((domain, name), share * drawn[name]) for name in QUANTITY[domain[0]] if name in drawn]
    if load.burst is not None:
        key = (("storage", load.burst.target), "checkpoint_bytes_per_s")
        made.append((key, _burst(load.burst, now_ms, rng)))
    return made


def _burst(burst: Burst, now_ms: int, rng: np.random.Generator) -> Array:
    """(draw, minute) bytes/s, where the checkpoint is under way at some moment of the minute."""
    told = burst.begins
    begins = np.interp(rng.random(DRAWS), (0.1, 0.5, 0.9), (told.p10_ms, told.p50_ms, told.p90_ms))[:, None]
    from_ms = now_ms + MINUTE_MS * np.arange(MINUTES)[None, :]
    under_way = (begins < from_ms + MINUTE_MS) & (begins + burst.lasts_s * 1000 > from_ms)
    return np.asarray(under_way * burst.bytes_per_s)


def _row(
    domain: Domain, quantity: str, drawn: Array, now_ms: int, capacity: float | None, jobs: int
) -> dict[str, Any]:  # fmt: skip
    middle, high = np.quantile(drawn, (0.5, 0.9), axis=0)
    at = int(np.argmax(high))
    return {
        "domain_kind": domain[0],
        "domain": domain[1],
        "quantity": quantity,
        "unit": UNITS[quantity],
        "peak_ms": now_ms + MINUTE_MS * at + MINUTE_MS // 2,
        "p50": round(float(middle[at]), 1),
        "p90": round(float(high[at]), 1),
        "capacity": capacity,
        "jobs": jobs,
    }
