"""FaultLog: the faults of each node, found by firm hard signals, and the hazard computed from them.

A fault lasts from the first firm hard signal until the last one is gone. If a signal returns within
SAME_MS, it belongs to the same fault. If over a tenth of the fleet fails within TOGETHER_MS, the cause is
the network or the scraper. Then none of these nodes gets a fault until it has recovered.

The hazard is the published one (models/risk/hazard.py, or the file that `fleetcast train history` wrote)
until the site has OWN_FAULTS faults and OWN_DAYS days of its own. Then the hazard is fitted on the site's own
faults, with the code that `fleetcast evaluate risk` evaluates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.models.risk.hazard import PUBLISHED, FaultHistory, HistoryFit, make_feature_columns

Array = NDArray[np.float64]

DAY_MS = 86_400_000
SAME_MS = 3_600_000
RETENTION_MS = 400 * DAY_MS
MOST = 10_000  # faults
COMMON, COMMON_LEAST = 0.1, 10  # of the nodes, falling together
TOGETHER_MS = 120_000
OWN_FAULTS, OWN_DAYS = 150, 60
REFIT_MS = 7 * DAY_MS


class LoggedFault(msgspec.Struct, array_like=True):
    """A fault of a node. seen_ms: when one of its hard signals was last present, in Unix ms."""

    node: str
    start_ms: int
    seen_ms: int
    hardware: bool


class FaultLog:
    """The faults of all nodes, in the order in which they were found.

    `fit`: the site's own fit, None until it has enough history.
    """

    def __init__(self) -> None:
        self.faults: list[LoggedFault] = []
        self.prior: HistoryFit = PUBLISHED
        self.fit: HistoryFit | None = None
        self.fitted_ms = 0
        self.since_ms = 0  # when watching began
        self._now_ms = 0
        self._last: dict[str, LoggedFault] = {}
        self._common: set[str] = set()  # nodes that fell with many others and are not back yet

    def record_signals(self, hard: Mapping[str, tuple[int, bool]], nodes: int, now_ms: int) -> None:
        """Record the nodes that have firm hard signals now.

        hard: node name → (when the signals began, in Unix ms, 0 if unknown, and whether the cause is
        hardware). nodes: the number of nodes of the fleet.
        """
        self.since_ms = self.since_ms or now_ms
        self._now_ms = now_ms
        self._common &= hard.keys()
        begun = []
        for name, (since_ms, hardware) in hard.items():
            known = self._last.get(name)
            start_ms = since_ms if 0 < since_ms <= now_ms else now_ms
            if known is not None and start_ms <= known.seen_ms + SAME_MS:
                known.seen_ms, known.hardware = now_ms, known.hardware or hardware
            elif name not in self._common:
                begun.append(LoggedFault(name, start_ms, now_ms, hardware))
        if begun and self._have_failed_together(begun, nodes, now_ms):
            return
        self.faults += begun
        self._last |= {fault.node: fault for fault in begun}
        if self.faults and (len(self.faults) > MOST or self.faults[0].seen_ms < now_ms - RETENTION_MS):
            self.faults = [fault for fault in self.faults[-MOST:] if fault.seen_ms >= now_ms - RETENTION_MS]
            self._last = {fault.node: fault for fault in self.faults}

    def _have_failed_together(self, begun: Sequence[LoggedFault], nodes: int, now_ms: int) -> bool:
        """Return whether too many nodes failed together. If so, drop the faults recorded within TOGETHER_MS."""
        recent = {fault.node for fault in self.faults if fault.start_ms > now_ms - TOGETHER_MS}
        if len(begun) + len(self._common | recent) <= max(COMMON_LEAST, COMMON * nodes):
            return False
        self.faults = [fault for fault in self.faults if fault.start_ms <= now_ms - TOGETHER_MS]
        self._last = {fault.node: fault for fault in self.faults}
        self._common |= recent | {fault.node for fault in begun}
        return True

    def find_last_fault_times(self) -> dict[str, int]:
        """Return node → when a hard signal was last present, in Unix ms."""
        return {name: fault.seen_ms for name, fault in self._last.items()}

    def has_current_fault(self, name: str) -> bool:
        """Return whether the node has a fault, or had one less than SAME_MS ago."""
        known = self._last.get(name)
        return known is not None and known.seen_ms + SAME_MS >= self._now_ms

    def has_failed(self, name: str) -> bool:
        """Return whether the node has a fault now, or failed together with many others and has not recovered."""
        return name in self._common or self.has_current_fault(name)

    def find_faulty_nodes(self, at_ms: int) -> set[str]:
        """Return the nodes that had a fault at a time, or had one less than SAME_MS before it."""
        return {fault.node for fault in self.faults if fault.start_ms <= at_ms <= fault.seen_ms + SAME_MS}

    def find_new_faults(self, after_ms: int, until_ms: int) -> set[str]:
        """Return the nodes on which a fault began after `after_ms`, up to and including `until_ms`."""
        return {fault.node for fault in self.faults if after_ms < fault.start_ms <= until_ms}

    def make_history(self, rows: Mapping[str, int]) -> FaultHistory:
        """Return the faults of the nodes in `rows`, in days since 1970. rows: node name → row."""
        own = [fault for fault in self.faults if fault.node in rows]
        seen = np.array([fault.seen_ms for fault in own], np.float64)
        return FaultHistory(
            node=np.array([rows[fault.node] for fault in own], np.int64),
            start_day=np.array([fault.start_ms for fault in own], np.float64) / DAY_MS,
            end_day=np.where(seen < self._now_ms, seen, np.nan) / DAY_MS,
            hardware=np.array([fault.hardware for fault in own], bool),
        )

    def compute_hazard(self, names: Sequence[str], horizons_s: Sequence[float], now_ms: int) -> Array:
        """Return (horizon, node) the expected number of faults, computed from each node's own faults."""
        now_day = now_ms / DAY_MS
        rows = {name: row for row, name in enumerate(names)}
        columns = make_feature_columns(self.make_history(rows).truncate(now_day), now_day, len(names))
        return (self.fit or self.prior).compute_hazard(columns, horizons_s)

    def is_fit_due(self, now_ms: int) -> bool:
        """Return whether the fit is due: the site has enough history, and its last fit is older than a week."""
        watched = now_ms - self.since_ms >= OWN_DAYS * DAY_MS and len(self.faults) >= OWN_FAULTS
        return bool(self.since_ms) and watched and now_ms - self.fitted_ms >= REFIT_MS

    def make_fit_inputs(self, names: Sequence[str], now_ms: int) -> tuple[FaultHistory, int, int, int]:
        """Return copies of the arguments of `hazard.fit_history`, so that the fit may run in a thread.

        The history begins at the time from which all faults are still stored.
        """
        rows = {name: row for row, name in enumerate(names)}
        since_ms = max(self.since_ms, now_ms - RETENTION_MS)
        if len(self.faults) >= MOST:
            since_ms = max(since_ms, self.faults[0].start_ms)
        return self.make_history(rows), since_ms // DAY_MS + 1, now_ms // DAY_MS, len(names)

    def set_fit(self, fit: HistoryFit, now_ms: int) -> None:
        """Set the site's own fit, which serves from now on."""
        self.fit, self.fitted_ms = fit, now_ms

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy of the state for a snapshot."""
        fit = None if self.fit is None else msgspec.to_builtins(self.fit, str_keys=True)
        times = {"since_ms": self.since_ms, "now_ms": self._now_ms, "fitted_ms": self.fitted_ms}
        return {"faults": msgspec.to_builtins(self.faults), "fit": fit, "common": sorted(self._common), **times}, {}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Fill an empty object with the state that `dump` returned."""
        self.faults = msgspec.convert(about["faults"], list[LoggedFault])
        self._last = {fault.node: fault for fault in self.faults}
        self._common = set(about["common"])
        self.fit = None if about["fit"] is None else msgspec.convert(about["fit"], HistoryFit, str_keys=True)
        self.since_ms, self._now_ms, self.fitted_ms = (about[name] for name in ("since_ms", "now_ms", "fitted_ms"))

    def shift_times(self, by_ms: int) -> None:
        """Shift all times by `by_ms`. A time of 0 is unset and stays 0."""
        for fault in self.faults:
            fault.start_ms += by_ms
            fault.seen_ms += by_ms
        self.since_ms, self._now_ms, self.fitted_ms = (
            time_ms + by_ms if time_ms else 0 for time_ms in (self.since_ms, self._now_ms, self.fitted_ms)
        )
