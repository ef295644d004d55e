"""The current state of each instance of a served model: newest gauges, and mean rates of two minutes."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.ring import Ring
from fleetcast.features.store import WindowStore
from fleetcast.features.sums import compute_mean
from fleetcast.fleet.metrics import TTFT_EDGES_MS
from fleetcast.fleet.samples import EntityKind

SERVED = EntityKind.SERVED_MODEL
WINDOW_S = 120.0
STALE_S = 120.0  # an older gauge says nothing any more
MINUTE_S = 60.0
GONE_S = 600.0  # an instance that has been silent for so long is no instance any more


class ServedInstance(msgspec.Struct, frozen=True):
    """The current state of one instance of a served model. None is unknown.

    Rates are per second. ttft_le: requests/s up to each edge of TTFT_EDGES_MS.
    """

    pool: str
    model: str
    instance: str
    age_s: float
    requests_running: float | None
    requests_waiting: float | None
    kv_cache_used: float | None
    prompt_tokens: float | None
    generated_tokens: float | None
    requests_finished: float | None
    ttft_s: float | None
    ttft_requests: float | None
    ttft_le: tuple[float | None, ...]
    requests_last_minute: float | None = None  # finished per second


GAUGES = ("requests_running", "requests_waiting", "kv_cache_used")
RATES = ("prompt_tokens", "generated_tokens", "requests_finished", "ttft_s", "ttft_requests")
EDGES = tuple(f"ttft_le_{edge}ms" for edge in TTFT_EDGES_MS)


def list_served_instances(store: WindowStore, now_ms: int) -> list[ServedInstance]:
    """Return every instance with a sample in the last ten minutes."""
    if SERVED not in store.rings and not len(store.entities[SERVED]):
        return []
    ring = store.ring(SERVED)
    ring.advance(now_ms)
    age_s = (now_ms - ring.time_ms[:, : ring.size].max(axis=0, initial=-1)) / 1000
    columns = [_read_newest(ring, name, now_ms) for name in GAUGES] + [
        _compute_mean_rate(store, ring, name) for name in RATES + EDGES
    ]
    table, lately = np.array(columns), _compute_mean_rate(store, ring, "requests_finished", MINUTE_S)
    found = []
    for row in np.flatnonzero(age_s <= GONE_S).tolist():
        pool, _, rest = store.entities[SERVED].names[row].partition("/")
        model, _, instance = rest.rpartition("/")
        values = [float(value) if np.isfinite(value) else None for value in table[:, row]]
        named = dict(zip(GAUGES + RATES, values, strict=False))
        edges = tuple(values[len(named) :])
        age = round(float(age_s[row]), 3)
        named["requests_last_minute"] = float(lately[row]) if np.isfinite(lately[row]) else None
        found.append(ServedInstance(pool=pool, model=model, instance=instance, age_s=age, ttft_le=edges, **named))
    return found


def _read_newest(ring: Ring, name: str, now_ms: int) -> NDArray[np.float64]:
    metric = ring.layout.metrics.index(name)
    fresh = ring.time_ms[metric, : ring.size] >= now_ms - STALE_S * 1000
    return np.where(fresh, ring.raw[metric, : ring.size], np.nan)


def _compute_mean_rate(store: WindowStore, ring: Ring, name: str, window_s: float = WINDOW_S) -> NDArray[np.float64]:
    """Return (instance,) a counter's mean rate per second over the known slots of the window."""
    slots = ring.read_slots(name, store.span.count_window_slots(window_s)).astype(np.float64)
    known = np.isfinite(slots)
    return compute_mean(known.sum(axis=0).astype(np.int32), np.where(known, slots, 0.0).sum(axis=0))
