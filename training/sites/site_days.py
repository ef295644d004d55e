"""Daily rows with the state of every node, and the events that followed. Site risk is fitted on both.

    a folded fleet (RiskState, NodeTable) ── recorded once a day ──> columns, shipped probabilities ┐
    faults, drains, warnings, as events say ── begins ──────────────────────────────────────────────┴> SiteDays

The rows come from an archive (archive_days.py) or from a simulated year
(training/sets/simulated_year.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeRecord
from fleetcast.fleet.xids import classify_severity
from fleetcast.models.risk.fault_log import FaultLog
from fleetcast.models.risk.hazard import FEATURES, HORIZONS_DAYS, FaultHistory, HistoryFit
from fleetcast.models.risk.node_risk import (
    ExcessHazard,
    compute_excess_hazard,
    compute_outcome_factor,
    compute_probabilities,
    load_shipped_fit,
)
from fleetcast.models.risk.rules import RULES
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS
from fleetcast.models.risk.site_risk import SITE_FEATURES, SiteFit, compute_site_hazard, make_event_columns
from fleetcast.models.risk.state import RiskState

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

DAY_MS = 86_400_000
JUDGED_AT = [RISK_HORIZONS_S.index(days * 86_400) for days in HORIZONS_DAYS]


@dataclass(frozen=True, slots=True)
class EventStarts:
    """The times at which failures, drains or slowdowns of nodes began.

    node: (f,) row. time_ms: (f,) when each began.
    """

    node: NDArray[np.int64]
    time_ms: NDArray[np.int64]

    def count_until(self, time_ms: int) -> int:
        """Return the number of events that had begun by `time_ms`."""
        return int((self.time_ms <= time_ms).sum())


@dataclass(frozen=True, slots=True)
class SiteDays:
    """A table of n rows in order of time. A row is a node at work at one moment.

    columns: (n, SITE_FEATURES) inputs of the fit. levels: (n, rule) rule levels at the row's moment. history: (n,
    RISK_HORIZONS_S) hazard of the shipped fit. begun: kind of event → when its events began. faults: all faults of
    the span. All events are known until end_ms.
    """

    names: tuple[str, ...]
    time_ms: NDArray[np.int64]
    node: NDArray[np.int64]
    columns: NDArray[np.float32]
    levels: NDArray[np.float32]
    history: NDArray[np.float32]
    begun: Mapping[str, EventStarts]
    faults: FaultHistory
    end_ms: int

    def __len__(self) -> int:
        return len(self.time_ms)

    def select_rows(self, rows: Mask | NDArray[np.intp]) -> "SiteDays":
        """Return the rows that `rows` selects, with all events."""
        return replace(
            self,
            time_ms=self.time_ms[rows],
            node=self.node[rows],
            columns=self.columns[rows],
            levels=self.levels[rows],
            history=self.history[rows],
        )

    def compute_labels(self, kind: str, days: int) -> Mask:
        """Return (n,) whether an event of this kind begins within `days` days after each row's moment."""
        begun_rows = self.begun[kind]
        order = np.lexsort((begun_rows.time_ms, begun_rows.node))
        node, time_ms = begun_rows.node[order], begun_rows.time_ms[order]
        first_ms = min(int(self.time_ms.min(initial=self.end_ms)), int(time_ms.min(initial=self.end_ms)))
        long_ms = self.end_ms - first_ms + 1  # keys of a node never reach the next one's
        at = np.searchsorted(
            node * long_ms + time_ms - first_ms, self.node * long_ms + self.time_ms - first_ms, "right"
        )
        later = np.append(time_ms, np.int64(0))[at]
        same = np.append(node, np.int64(-1))[at] == self.node
        return np.asarray(same & (later - self.time_ms <= days * DAY_MS))

    def compute_probabilities(self, fit: SiteFit | None, refit: HistoryFit | None = None) -> Array:
        """Return (kind, HORIZONS_DAYS, n) probabilities, computed as the service computes them.

        fit: the site's own fit, None for the shipped one. refit: the history hazard that a service fits by
        itself once it has enough faults.
        """
        levels = self.levels.astype(np.float64)
        excess: ExcessHazard = compute_excess_hazard(levels, load_shipped_fit())
        history = self.history.T.astype(np.float64)
        if refit is not None:
            history = refit.compute_hazard(self.columns[:, : len(FEATURES)].astype(np.float64), RISK_HORIZONS_S)
        site = None if fit is None else compute_site_hazard(fit, self.columns.astype(np.float64))
        known = np.ones(len(self), np.bool_)
        return compute_probabilities(excess, history * compute_outcome_factor(levels), known, site)[:, JUDGED_AT]


@dataclass(slots=True)
class SiteRecorder:
    """A recorder of nodes' daily rows, drains and warnings while events are replayed."""

    names: tuple[str, ...]
    _place: dict[str, int] = field(init=False)
    _rows: list[tuple[int, NDArray[np.intp], Array, Array, Array]] = field(default_factory=list)
    _drains: list[tuple[int, int]] = field(default_factory=list)
    _slow: list[tuple[int, int]] = field(default_factory=list)
    _drained: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._place = {name: row for row, name in enumerate(self.names)}

    def record_event(self, event: NodeEvent) -> None:
        """Record a node event: a drain of a node in service, or a warning. Events must come in order of time."""
        row = self._place.get(event.node)
        if row is None:
            return
        if event.type == "drain" and event.node not in self._drained:
            self._drained.add(event.node)
            self._drains.append((row, event.time_ms))
        elif event.type == "undrain":
            self._drained.discard(event.node)
        elif event.type == "health" and classify_severity(event) == "warning" and event.probability is None:
            self._slow.append((row, event.time_ms))

    def record_moment(self, state: RiskState, records: Mapping[str, NodeRecord], levels: Array, now_ms: int) -> None:
        """Record a row for each node that is at work at this moment.

        levels: (node, rule) as last evaluated.
        """
        away = {name for name, record in records.items() if record.drained or record.lost}
        works = [
            row for row, name in enumerate(self.names) if name not in away and not state.faults.has_current_fault(name)
        ]
        rows = np.array(works, np.intp)
        past = make_event_columns(state.faults, records, self.names, now_ms)
        columns = np.concatenate((past, state.days.compute_levels(self.names, now_ms)), axis=1)
        history = state.faults.compute_hazard(self.names, RISK_HORIZONS_S, now_ms).T
        self._rows.append((now_ms, rows, columns[rows], levels[rows], history[rows]))

    def make_site_days(self, faults: FaultLog, end_ms: int) -> SiteDays:
        """Return the recorded rows together with the events of the whole span. faults: the faults of the span."""
        counts = [len(rows) for _, rows, *_ in self._rows]
        times = np.repeat(np.array([time_ms for time_ms, *_ in self._rows], np.int64), counts)
        nodes = [rows for _, rows, *_ in self._rows]
        failed = [(self._place[fault.node], fault.start_ms) for fault in faults.faults if fault.node in self._place]
        begun = dict(zip(RISK_KINDS, map(_make_event_starts, (failed, self._drains, self._slow)), strict=True))
        return SiteDays(
            names=self.names,
            time_ms=times,
            node=np.concatenate([*nodes, np.zeros(0, np.intp)]).astype(np.int64),
            columns=_stack_rows([row[2] for row in self._rows], len(SITE_FEATURES)),
            levels=_stack_rows([row[3] for row in self._rows], len(RULES)),
            history=_stack_rows([row[4] for row in self._rows], len(RISK_HORIZONS_S)),
            begun=begun,
            faults=faults.make_history(self._place),
            end_ms=end_ms,
        )


def _stack_rows(parts: Sequence[Array], width: int) -> NDArray[np.float32]:
    return np.concatenate([*parts, np.zeros((0, width))]).astype(np.float32)


def _make_event_starts(rows: Sequence[tuple[int, int]]) -> EventStarts:
    table = np.array(rows, np.int64).reshape(-1, 2)
    return EventStarts(table[:, 0], table[:, 1])
