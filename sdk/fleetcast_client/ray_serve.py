"""An autoscaling policy for Ray Serve. It adds replicas if the forecast load needs more than the current load does.

autoscaling_config:
  policy:
    policy_function: fleetcast_client.ray_serve:ForecastPolicy
    policy_kwargs: {url: "http://fleetcast:8080", queue: serve, group: llama-70b, per_replica: 12}
"""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any

from fleetcast_client.ahead import Asked, DemandAhead, Series

logger = logging.getLogger("fleetcast_client")

MOST = 1e9  # replicas: above any bound, and still a whole number


class ForecastPolicy:
    """An autoscaling policy: replicas for the larger of the current load and the forecast load.

    Serve's own rule judges the current load. Serve calls the policy in its controller's only loop, so
    the policy never waits and never raises. Without a fresh forecast, or with invalid arguments, the policy
    follows Serve's own rule, and the controller's log says why.

    per_replica: the requests/s or GPUs of the series that one replica serves. The other arguments
    are those of `Series` and `Asked`.
    """

    def __init__(self, url: str = "", per_replica: float = 0.0, **more: Any) -> None:
        self._ahead: DemandAhead | None = None
        self._per_replica = per_replica
        self._is_started = False
        try:
            if not 0 < per_replica < math.inf:
                raise ValueError(f"per_replica is {per_replica!r}: expected requests/s or GPUs of one replica")
            of_series = {"target": "request_rate"} | {name: more.pop(name) for name in Series._fields if name in more}
            self._ahead = DemandAhead(Series(**of_series), Asked(url, **more))
        except (TypeError, ValueError) as error:  # raised, it would keep the application from ever being ready
            logger.error("ForecastPolicy is Serve's own rule: %s", error)

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the wanted replicas and the policy's state, as Serve requires."""
        from ray.serve import autoscaling_policy  # type: ignore[import-not-found,unused-ignore]

        wanted, state = autoscaling_policy.default_autoscaling_policy(context)
        ahead = self._forecast_replica_count()
        return (wanted if ahead is None else max(wanted, ahead)), state  # Serve bounds it by min and max

    def _forecast_replica_count(self) -> int | None:
        """Return the replicas for the forecast load, or None without a fresh forecast."""
        if self._ahead is None:
            return None
        if not self._is_started:  # not in `__init__`: only what is called is in a controller
            self._is_started = True
            self._ahead.start()
            weakref.finalize(self, self._ahead.stop)  # the policy was replaced
        value = self._ahead.value()
        return None if value is None else math.ceil(min(max(value, 0.0) / self._per_replica, MOST))
