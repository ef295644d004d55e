"""Failures of the placer's own code and of plugins. The placer counts, logs and shows them.

No failure ends the process.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from prometheus_client import Counter

from fleetcast.fleet.errors import StaleError
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ledger.rows import LedgerError
from fleetcast.placement.plan.reclaiming import ReclaimProposal, propose_reclaim

logger = logging.getLogger(__name__)

PASS, START_TIMES = "pass over the queue", "sampling of start times"
ACTIONS = "acting on running jobs"


class Failures:
    """A counter of failures for each part. It logs each new failure with its traceback.

    Each count is 0 at the start, because Prometheus sees no increase in a series that begins with 1.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        for part in (PASS, START_TIMES, ACTIONS):
            counter.labels(part)
        self._logged: dict[str, str] = {}
        self.last: Exception | None = None

    def record(self, part: str, error: Exception) -> str:
        """Count a failure, and return a sentence that describes it.

        The traceback is logged once. It is logged again only after the part has failed in another way.
        """
        self.last = error
        why = f"{part} failed ({type(error).__name__}: {error})"
        self._counter.labels(part).inc()
        if self._logged.get(part) != why:
            self._logged[part] = why
            logger.error("%s; the placer goes on", why, exc_info=error)
        return why

    @contextmanager
    def contain(self, part: str) -> Iterator[None]:
        """Record a failure of a part instead of raising it.

        Raises StaleError and LedgerError all the same: without its board or its ledger the placer decides nothing.
        """
        try:
            yield
        except (StaleError, LedgerError):
            raise
        except Exception as error:
            self.record(part, error)

    def propose_reclaim(self, request: PlacementRequest, *facts: Any) -> ReclaimProposal:
        """Call `propose_reclaim`. If it fails, no job is stopped for the request."""
        try:
            return propose_reclaim(request, *facts)
        except Exception as error:
            return ReclaimProposal("none", request, f"stops no job: {self.record(ACTIONS, error)}")

    def guard_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter so that a failure rejects every node instead of raising."""
        return self._guard_function(f"filter {name}", function, bool, True)

    def guard_scorer(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a scorer so that a failure scores every node 0 instead of raising."""
        return self._guard_function(f"scorer {name}", function, np.float64, 0.0)

    def _guard_function(
        self, part: str, function: Callable[..., Any], kind: type, otherwise: Any
    ) -> Callable[..., Any]:
        self._counter.labels(part)

        def call_guarded(request: Any, view: Any, options: Any) -> Any:
            try:
                found = function(request, view, options)
                if found is None and kind is bool:
                    return None
                values = np.asarray(found)
                if values.shape != (len(view),):
                    raise ValueError(f"it returned the shape {values.shape}, must be ({len(view)},)")
                if kind is bool and values.dtype != np.bool_:
                    raise ValueError(f"it returned {values.dtype}, must be bool")
                if not np.isfinite(values).all():
                    raise ValueError("it returned numbers that are not finite")
            except Exception as error:
                self.record(part, error)
                return np.full(len(view), otherwise, kind)
            return values

        return call_guarded
