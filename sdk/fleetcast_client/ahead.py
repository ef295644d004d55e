"""One forecast value of demand, polled in a thread.

So an autoscaler can read the value at any time without waiting for the service.
"""

from __future__ import annotations

import bisect
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fleetcast_client.client import Client
from fleetcast_client.transport import check_url

logger = logging.getLogger("fleetcast_client")


class Series(NamedTuple):
    """A series of `/v1/demand`, with the quantile and the horizon of the wanted forecast.

    job_class: if it is empty, it means `inference` for series of requests, and all classes for other targets.
    """

    pool: str = "all"
    job_class: str = ""
    group: str = "all"
    target: str = "wanted"
    quantile: float = 0.9
    horizon_s: float = 300.0
    queue: str = "all"

    def check(self) -> Series:
        """Return the series with its class filled in. Raises ValueError that names the argument."""
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile is {self.quantile!r}: expected one of those in /v1/demand, like 0.9")
        if "all" not in (self.pool, self.queue):
            raise ValueError(f"pool is {self.pool!r}: leave it out if there is queue {self.queue!r}")
        if not 0 <= self.horizon_s < math.inf:
            raise ValueError(f"horizon_s is {self.horizon_s!r}: expected seconds, 0 or more")
        own_class = "inference" if self.target == "request_rate" else "all"
        return self._replace(job_class=self.job_class or own_class)


class Asked(NamedTuple):
    """The address and credentials of a Fleetcast service, and how often to poll it.

    token_file: a file with the token, read at each request. Without it, FLEETCAST_TOKEN is the token.
    """

    url: str
    token_file: str = ""
    ca: str | None = None
    every_s: float = 15.0
    stale_s: float = 180.0
    timeout_s: float = 5.0

    def check(self) -> Asked:
        """Return the settings unchanged. Raises ValueError that names the argument."""
        check_url(self.url)
        for name in ("every_s", "stale_s", "timeout_s"):
            if not 0 < getattr(self, name) < threading.TIMEOUT_MAX:
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected seconds above 0")
        return self

    def make_client(self) -> Client:
        """Make a client of the service. Raises ValueError, OSError."""
        token = Path(self.token_file).read_text(encoding="utf-8").strip() if self.token_file else None
        return Client(self.url, token=token, ca=self.ca, timeout_s=self.timeout_s, tries=1)


class DemandAhead:
    """The forecast demand of one series, or None without a fresh forecast.

    A forecast expires `stale_s` seconds after it first arrived, even if the service repeats it. Clocks
    of other machines do not matter.
    """

    def __init__(self, series: Series, asked: Asked, now_s: Callable[[], float] = time.monotonic) -> None:
        """Create the object without a request. `start` begins the polling. Raises ValueError."""
        self._series, self._asked, self._now_s = series.check(), asked.check(), now_s
        self._stopped = threading.Event()
        self._issued_ms: int | None = None
        self._known: tuple[float, float] | None = None  # the value, and when it came first
        self._said = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start polling in a daemon thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._refresh_forever, name="fleetcast-demand", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop polling, without waiting for the thread."""
        self._stopped.set()

    def value(self) -> float | None:
        """Return the value in GPUs or requests/s, or None without a fresh forecast."""
        known = self._known
        return known[0] if known is not None and self._now_s() - known[1] < self._asked.stale_s else None

    def poll_once(self) -> None:
        """Request the forecast once, and store its value. Raises any error that occurs."""
        series = self._series
        name, whose = ("queue", series.queue) if series.queue != "all" else ("pool", series.pool)
        keys = {name: whose, "class": series.job_class, "group": series.group, "target": series.target}
        answer = self._asked.make_client().demand(
            pool=series.pool if name == "pool" else None,
            queue=series.queue if name == "queue" else None,
            job_class=series.job_class,
            group=series.group,
            target=series.target,
        )
        rows: Sequence[Mapping[str, Any]] = answer["series"]
        row = next((row for row in rows if all(row[name] == value for name, value in keys.items())), None)
        if row is None:
            raise ValueError(f"there is no series of {keys}")
        issued_ms = int(row["issued_ms"])
        if self._issued_ms is None or issued_ms > self._issued_ms:  # two services may tell an old one in turn
            age_s = max(0.0, (int(answer["as_of_ms"]) - issued_ms) / 1000)
            self._known = interpolate_forecast(row, series.quantile, series.horizon_s, age_s), self._now_s()
            self._issued_ms = issued_ms

    def _refresh_forever(self) -> None:
        while not self._stopped.is_set():
            why = ""
            try:
                self.poll_once()
            except Exception as error:  # the loop of a thread: whatever was answered, it asks again
                why = f"{type(error).__name__}: {error}"
            if not self._stopped.is_set():  # an answer that comes after `stop` is no news
                self._log_failure(why)
            self._stopped.wait(self._asked.every_s)

    def _log_failure(self, why: str) -> None:
        """Log why polling fails, if the reason is new. Log once when polling works again."""
        if why != self._said and why:
            logger.warning("no forecast of demand from %s: %s", self._asked.url, why[:500])
        elif why != self._said:
            logger.warning("forecasts of demand come from %s again", self._asked.url)
        self._said = why


def interpolate_forecast(row: Mapping[str, Any], quantile: float, horizon_s: float, age_s: float = 0.0) -> float:
    """Return a quantile of a row of `/v1/demand` at `horizon_s` seconds from now.

    age_s: the forecast's age, which is added to the horizon. The value is interpolated linearly between two
    horizons or quantiles, and between now and the first horizon, as in the service's own adapters. Raises
    ValueError if the row has no such forecast, and any error for a row of another shape.
    """
    times, quantiles = [0.0, *row["horizons_s"]], row["quantiles"]
    if not quantiles[0] <= quantile <= quantiles[-1]:
        raise ValueError(f"quantile is {quantile!r}: forecasts are of {quantiles[0]:g} to {quantiles[-1]:g}")
    if not 0 <= horizon_s <= times[-1]:
        raise ValueError(f"horizon_s is {horizon_s!r}: forecasts reach 0 to {times[-1]:g} s")
    by_horizon = [[row["now"]] * len(quantiles), *zip(*row["values"], strict=True)]
    at_quantile = [_interpolate(quantiles, values, quantile) for values in by_horizon]
    found = _interpolate(times, at_quantile, min(horizon_s + age_s, times[-1]))
    if found is None or not math.isfinite(found):
        raise ValueError(f"there is no forecast {horizon_s:g} s ahead yet")
    return max(0.0, float(found))


def _interpolate(places: Sequence[float], values: Sequence[float | None], at: float) -> float | None:
    """Return the value at `at`, interpolated linearly between the two nearest places.

    If `at` is one of the places, returns exactly its value. Returns None if a value is None.
    """
    after = bisect.bisect_left(places, at)
    if places[after] == at:
        return values[after]
    low, high = values[after - 1], values[after]
    share = (at - places[after - 1]) / (places[after] - places[after - 1])
    return None if low is None or high is None else low + share * (high - low)
