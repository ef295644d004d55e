"""RequestSeries: requests per second of each served model, as regular series of 1 and 10 minutes."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.serving import ServedInstance

EVERYTHING = "all"
MINUTE_MS = 60_000
BINS = {60: 24 * 60 + 1, 600: 35 * 24 * 6 + 1}  # seconds of a bin -> bins kept
MOST_MODELS = 200

Key = tuple[str, str]  # pool, model


class ServingCapacity(NamedTuple):
    """The capacity of a served model: its instances, and the highest observed requests/s of one instance."""

    instances: int
    peak_per_instance: float | None


class _ModelRings:
    """The request rates of one served model by bin, and its number of instances by minute. NaN is unknown."""

    def __init__(self) -> None:
        self.rates = {bin_s: np.full(size, np.nan, np.float32) for bin_s, size in BINS.items()}
        self.instances = np.full(BINS[60], np.nan, np.float32)

    def clear_bins(self, bin_s: int, bins: NDArray[np.int64]) -> None:
        """Set the bins that have just begun to unknown. bin_s: the length of the bins."""
        self.rates[bin_s][bins % BINS[bin_s]] = np.nan
        if bin_s == 60:
            self.instances[bins % BINS[60]] = np.nan

    def record(self, minute: int, rate: float, instances: int) -> None:
        at = minute % BINS[60]
        self.rates[60][at], self.instances[at] = rate, instances
        minutes = np.arange(minute // 10 * 10, minute + 1) % BINS[60]
        self.rates[600][minute // 10 % BINS[600]] = np.nanmean(self.rates[60][minutes])


class RequestSeries:
    """The requests/s of the first MOST_MODELS served models. Each model needs 30 kB.

    If a minute is recorded twice, the last record counts. Only one task may change it.
    """

    def __init__(self) -> None:
        self._rings: dict[Key, _ModelRings] = {}
        self._head: int | None = None  # the newest minute

    def record(self, now_ms: int, rates: Mapping[Key, tuple[float, int]]) -> None:
        """Record the requests/s and the instances of each served model in the minute before `now_ms`."""
        minute = now_ms // MINUTE_MS
        self._advance(minute)
        if self._head is None or minute < self._head:
            return
        for key, (rate, instances) in rates.items():
            if key not in self._rings and len(self._rings) < MOST_MODELS:
                self._rings[key] = _ModelRings()
            if key in self._rings:
                self._rings[key].record(minute, rate, instances)

    def _advance(self, minute: int) -> None:
        if self._head is None:
            self._head = minute
        for bin_s, size in BINS.items():
            per = bin_s // 60
            first, last = max(self._head // per, minute // per - size) + 1, minute // per
            for rings in self._rings.values() if first <= last else ():
                rings.clear_bins(bin_s, np.arange(first, last + 1))
        self._head = max(self._head, minute)

    def list_models(self) -> list[Key]:
        """Return the (pool, model) keys of the known served models, sorted."""
        return sorted(self._rings)

    def read_series(self, pool: str, model: str, now_ms: int, bin_s: int, bins: int) -> NDArray[np.float64]:
        """Return (bin,) requests/s up to the bin of `now_ms`, oldest first, NaN if unknown.

        bin_s: 60 or 600. "all" is the sum over pools or models.
        """
        self._advance(now_ms // MINUTE_MS)
        chosen = [
            ring
            for (its, name), ring in self._rings.items()
            if pool in (its, EVERYTHING) and model in (name, EVERYTHING)
        ]
        if not chosen or self._head is None:
            return np.full(bins, np.nan)
        last, size = now_ms // (bin_s * 1000), BINS[bin_s]
        head = self._head // (bin_s // 60)
        wanted = np.arange(last - bins + 1, last + 1)
        table = np.stack([ring.rates[bin_s][wanted % size] for ring in chosen]).astype(np.float64)
        table[:, (wanted <= head - size) | (wanted > head)] = np.nan
        known = np.isfinite(table)
        return np.where(known.any(axis=0), np.where(known, table, 0.0).sum(axis=0), np.nan)

    def find_capacity(self, pool: str, model: str) -> ServingCapacity:
        """Return a model's newest number of instances, and the highest requests/s of one instance in a day.

        The number of instances is that of the last two minutes.
        """
        rings = self._rings.get((pool, model))
        if rings is None or self._head is None:
            return ServingCapacity(0, None)
        newest = rings.instances[np.arange(self._head - 1, self._head + 1) % BINS[60]]
        known = newest[np.isfinite(newest)]
        each = rings.rates[60] / np.maximum(rings.instances, 1.0)
        each = each[np.isfinite(each)]
        return ServingCapacity(int(known[-1]) if len(known) else 0, float(each.max()) if len(each) else None)

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy for a snapshot: JSON-able parts, and arrays by name."""
        arrays: dict[str, NDArray[Any]] = {}
        for number, rings in enumerate(self._rings.values()):
            arrays[f"requests {number}"] = np.concatenate([*rings.rates.values(), rings.instances])
        return {"head": self._head, "keys": [[*key] for key in self._rings]}, arrays

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump`. Raises ValueError if the rings are of another size."""
        self._head = about["head"]
        for number, (pool, model) in enumerate(about["keys"]):
            rings = self._rings[pool, model] = _ModelRings()
            cut = [*np.cumsum([*BINS.values()])]
            *rates, instances = np.split(arrays[f"requests {number}"], cut)
            if [len(part) for part in (*rates, instances)] != [*BINS.values(), BINS[60]]:
                raise ValueError(f"rates of {pool}/{model} have another size")
            rings.rates = {bin_s: part.copy() for bin_s, part in zip(BINS, rates, strict=True)}
            rings.instances = instances.copy()


def sum_request_rates(instances: Iterable[ServedInstance]) -> dict[Key, tuple[float, int]]:
    """Return (pool, model) -> the sum of requests/s, and the number of instances that report them."""
    rates: dict[Key, tuple[float, int]] = {}
    for one in instances:
        if one.requests_last_minute is not None:
            rate, count = rates.get((one.pool, one.model), (0.0, 0))
            rates[one.pool, one.model] = (rate + one.requests_last_minute, count + 1)
    return rates
