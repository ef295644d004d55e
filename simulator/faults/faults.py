"""A seeded plan of faults over the fleet: their times and places, and the truth about each.

Faults are injected or drawn. Drawn faults are evenly spaced, so that minutes of a demonstration show most
kinds, or occur at real rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from fleetcast.simulator.faults.effects import Effects, FaultShape, HardwareLoad
from fleetcast.simulator.faults.fault_shapes import draw_shape
from fleetcast.simulator.faults.magnitudes import DECOY_KINDS, FAULT_KINDS, MEDIAN_S, USUAL, Decoy, Magnitudes
from fleetcast.simulator.faults.truth import FaultRecord

PORT_KINDS = frozenset({"ib_flap", "slow_nic"})
NODE_KINDS = frozenset({"power_brake", "node_lost", "cpu_contention", *DECOY_KINDS})
SLOW_KINDS = frozenset({"thermal_throttle", "slow_nic", "power_brake", "pcie_downgrade", "ib_flap", "cpu_contention"})
VISIBLE_AFTER_S = 30.0
PRECURSOR_KINDS = frozenset({"thermal_throttle", "ecc_storm", "ib_flap", "pcie_downgrade"})
LEADING_KINDS = PRECURSOR_KINDS | {"gpu_off_bus", "node_lost"}  # whose shape shows something before its start


class FaultSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings for drawing faults. Times are fleet seconds.

    `every_s` > 0 spaces them evenly (with jitter), and each kind gets its turn. Otherwise `rates` (per 1000
    node-days, by kind) draw a Poisson process. A fault lasts a lognormal time around `median_s`, from
    `shortest_s` to `limit_s`. `precursor_shares` by kind replace `precursor_share`. A kind that shows nothing
    before its start never has a precursor. After `repeat_share` of the repairs the node has the same fault again
    within `repeat_within_s`.
    """

    kinds: tuple[str, ...] = (*FAULT_KINDS, *DECOY_KINDS)
    every_s: float = 0.0
    first_s: float = 0.0
    rates: dict[str, float] = {}
    median_s: dict[str, float] = msgspec.field(default_factory=lambda: dict(MEDIAN_S))
    shortest_s: float = 300.0
    limit_s: float = 1e9
    decoys: tuple[str, ...] = DECOY_KINDS
    decoy_every_s: float = 0.0
    precursor_share: float = 0.4
    precursor_shares: dict[str, float] = {}
    precursor_s: tuple[float, float] = (60.0, 300.0)
    only_busy: bool = True
    watchdog_s: float = 900.0
    repeat_share: float = 0.0
    repeat_within_s: float = 86_400.0
    magnitudes: Magnitudes = USUAL


QUIET = FaultSettings()
DEMO = FaultSettings(
    kinds=("ecc_storm", "gpu_off_bus", "ib_flap", "thermal_throttle", "pcie_downgrade", "slow_nic", "power_brake"),
    every_s=125.0,
    first_s=75.0,
    limit_s=2400.0,
    decoys=("checkpoint_stall", "power_cap", "exporter_restart", "evaluation"),
    decoy_every_s=90.0,
    precursor_s=(30.0, 60.0),
    watchdog_s=600.0,
)


@dataclass(slots=True)
class Incident:
    """One fault or decoy, planned or active, with its place, times and strength."""

    fault_id: str
    kind: str
    node: int
    unit: int  # GPU or port; -1 for the whole node
    start_ms: int
    end_ms: int
    lead_ms: int
    benign: bool
    shape: FaultShape
    started: bool = False
    shown_s: float = 0.0
    shown_from_ms: int | None = None
    visible_ms: int | None = None


class FaultPlan:
    """All faults of a fleet of the nodes `names` with `gpus` GPUs each.

    The fleet calls `advance` at every step.
    """

    def __init__(self, names: Sequence[str], gpus: int, settings: FaultSettings = QUIET, seed: int = 0) -> None:
        self.settings = settings
        self._names = list(names)
        self._row = {name: row for row, name in enumerate(names)}
        self._gpus = gpus
        self._rng = np.random.default_rng([seed, 3])
        self._incidents: list[Incident] = []
        self._records: dict[str, FaultRecord] = {}
        self._changed: dict[str, FaultRecord] = {}
        self._due_ms: dict[str, float] = {}
        self._turn: list[str] = []
        self._planned = 0
        self._exempt: list[int] = []

    def inject(
        self,
        kind: str,
        node: str,
        gpu: int | None,
        start_ms: int,
        *,
        end_ms: int | None = None,
        **magnitudes: Any,
    ) -> str:
        """Plan a fault and return its id.

        `gpu` is the port for ib_flap and slow_nic. `magnitudes` replace drawn numbers by the shape's field name.
        """
        shape = draw_shape(kind, self._rng, self.settings.magnitudes)
        if magnitudes:
            shape = replace(shape, **magnitudes)  # type: ignore[type-var]
        unit = -1 if kind in NODE_KINDS else int(self._rng.integers(self._gpus)) if gpu is None else gpu
        end_ms = end_ms if end_ms is not None else start_ms + int(self._draw_duration_s(kind) * 1000)
        return self._add_incident(kind, self._row[node], unit, start_ms, end_ms, 0, shape)

    def start_drawing(self, settings: FaultSettings) -> None:
        """Draw faults with these settings from the next step on."""
        self.settings = settings
        self._due_ms = {}

    def exempt_nodes(self, names: Sequence[str]) -> None:
        """Draw no fault on these nodes."""
        self._exempt = [self._row[name] for name in names]

    def advance(self, effects: Effects, load: HardwareLoad, now_ms: int, dt_s: float) -> None:
        """Start due faults, apply active ones to `effects`, end those that are over, and record the truth."""
        self._draw_due_faults(load, now_ms)
        for incident in list(self._incidents):
            if now_ms < incident.start_ms - incident.lead_ms:
                continue
            if now_ms >= incident.end_ms:
                self._end_incident(incident, effects, incident.end_ms)
                continue
            age_s = (now_ms - incident.start_ms) / 1000
            shows = incident.shape.apply(effects, load, incident.node, incident.unit, age_s, dt_s)
            self._update_visibility(incident, shows, now_ms, dt_s)

    def end_node_faults(self, node: str, now_ms: int) -> None:
        """End all faults of a node at the next step, because the node is repaired. Decoys stay."""
        row = self._row[node]
        for incident in self._incidents:
            if incident.node == row and not incident.benign:
                incident.end_ms = min(incident.end_ms, now_ms)

    def list_records(self) -> list[FaultRecord]:
        """Return the latest record of every fault that has started, in order of start."""
        return list(self._records.values())

    def pop_changed_records(self) -> list[FaultRecord]:
        """Return the records that are new or changed since the last call: the next lines of truth.jsonl."""
        changed, self._changed = list(self._changed.values()), {}
        return changed

    def list_incidents(self) -> Sequence[Incident]:
        """Return every incident that is planned or in progress."""
        return self._incidents

    def list_faulty_nodes(self) -> set[str]:
        """Return the nodes with a planned or active fault that is not benign."""
        return {self._names[incident.node] for incident in self._incidents if not incident.benign}

    def _add_incident(
        self, kind: str, node: int, unit: int, start_ms: int, end_ms: int, lead_ms: int, shape: FaultShape
    ) -> str:
        self._planned += 1
        fault_id = f"f{self._planned:04d}"
        benign = kind in DECOY_KINDS
        self._incidents.append(Incident(fault_id, kind, node, unit, start_ms, end_ms, lead_ms, benign, shape))
        return fault_id

    def _update_visibility(self, incident: Incident, shows: bool, now_ms: int, dt_s: float) -> None:
        if not incident.started:  # a precursor counts: who sees it is not wrong about the node
            incident.started = True
            self._write_record(incident, None)
        if not shows or incident.visible_ms is not None:
            return
        if incident.shown_from_ms is None:
            incident.shown_from_ms = now_ms
        else:
            incident.shown_s += dt_s
        if incident.shown_s >= VISIBLE_AFTER_S:
            incident.visible_ms = incident.shown_from_ms
            self._write_record(incident, None)

    def _end_incident(self, incident: Incident, effects: Effects, end_ms: int) -> None:
        incident.shape.end(effects, incident.node, incident.unit)
        self._incidents.remove(incident)
        self._write_record(incident, max(end_ms, incident.start_ms))
        if self.settings.repeat_share and not incident.benign and self._rng.random() < self.settings.repeat_share:
            again_ms = end_ms + int(self._rng.uniform(0, self.settings.repeat_within_s) * 1000)
            self._plan_incident(incident.kind, incident.node, incident.unit, again_ms)

    def _write_record(self, incident: Incident, end_ms: int | None) -> None:
        unit = incident.unit if incident.unit >= 0 else None
        record = FaultRecord(
            fault_id=incident.fault_id,
            kind=incident.kind,
            node=self._names[incident.node],
            gpu=None if incident.kind in PORT_KINDS else unit,
            port=unit if incident.kind in PORT_KINDS else None,
            start_ms=incident.start_ms,
            end_ms=end_ms,
            visible=incident.visible_ms is not None,
            benign=incident.benign,
            visible_ms=incident.visible_ms,
        )
        self._records[record.fault_id] = self._changed[record.fault_id] = record

    # Drawing

    def _draw_due_faults(self, load: HardwareLoad, now_ms: int) -> None:
        if not self._due_ms:
            self._due_ms = self._draw_first_due_times(now_ms)
        for stream, due_ms in self._due_ms.items():
            while now_ms >= due_ms:
                self._draw_fault(stream, load, now_ms)
                due_ms += self._draw_gap_s(stream) * 1000
            self._due_ms[stream] = due_ms

    def _draw_first_due_times(self, now_ms: int) -> dict[str, float]:
        settings = self.settings
        drawn = [kind for kind in settings.kinds if settings.rates.get(kind)]
        streams = ["turn"] if settings.every_s > 0 else drawn
        if settings.decoy_every_s > 0:
            streams.append("decoy")
        dues = {stream: now_ms + self._draw_gap_s(stream) * 1000 for stream in streams}
        if "turn" in dues:
            dues["turn"] = now_ms + settings.first_s * 1000
        return dues or {"never": np.inf}

    def _draw_gap_s(self, stream: str) -> float:
        if stream == "turn":
            return float(self.settings.every_s * self._rng.uniform(0.65, 1.35))
        if stream == "decoy":
            return float(self.settings.decoy_every_s * self._rng.uniform(0.5, 1.5))
        per_s = self.settings.rates[stream] * len(self._names) / (1000 * 86_400)
        return float(self._rng.exponential(1 / per_s))

    def _draw_fault(self, stream: str, load: HardwareLoad, now_ms: int) -> None:
        kind = self._choose_kind(stream)
        place = self._choose_place(kind, load)
        if place is None:
            return
        self._plan_incident(kind, *place, now_ms)

    def _plan_incident(self, kind: str, node: int, unit: int, from_ms: int) -> None:
        """Plan an incident at `from_ms`, or after a precursor that begins then.

        Draws whether it has a precursor, its duration and its strength.
        """
        lead_s = 0.0
        share = self.settings.precursor_shares.get(kind)
        if share is None and kind in PRECURSOR_KINDS:
            share = self.settings.precursor_share
        if share is not None and self._rng.random() < share and kind in LEADING_KINDS:
            lead_s = self._rng.uniform(*self.settings.precursor_s)
        start_ms = from_ms + int(lead_s * 1000)
        end_ms = start_ms + int(self._draw_duration_s(kind) * 1000)
        shape = draw_shape(kind, self._rng, self.settings.magnitudes)
        self._add_incident(kind, node, unit, start_ms, end_ms, int(lead_s * 1000), shape)

    def _choose_kind(self, stream: str) -> str:
        if stream == "decoy":
            return str(self._rng.choice(self.settings.decoys))
        if stream != "turn":
            return stream
        if not self._turn:
            faults = [kind for kind in self.settings.kinds if kind not in DECOY_KINDS]
            self._turn = [str(kind) for kind in self._rng.permutation(faults)]
        return self._turn.pop()

    def _draw_duration_s(self, kind: str) -> float:
        ranges = self.settings.magnitudes.get_kind(kind)
        if isinstance(ranges, Decoy):
            return float(self._rng.uniform(*ranges.lasts_s))
        median_s = self.settings.median_s.get(kind, MEDIAN_S[kind])
        lasts_s = max(median_s * self._rng.lognormal(0.0, 0.8), self.settings.shortest_s)
        return float(min(lasts_s, self.settings.limit_s))

    def _choose_place(self, kind: str, load: HardwareLoad) -> tuple[int, int] | None:
        """Choose a random (node, unit) on a node without a fault, or return None if there is none.

        A decoy always gets a unit in use. Other faults prefer a unit in use if the settings say so. If one slow
        fault already slows a job, no node of this job gets another.
        """
        free = np.ones(load.slot.shape, bool)
        free[self._exempt] = False
        for incident in self._incidents:
            free[incident.node] = False
            if kind in SLOW_KINDS and incident.kind in SLOW_KINDS:
                slots = load.slot[incident.node]
                free[np.isin(load.slot, slots[slots > 0])] = False
        wanted = load.networked if kind in PORT_KINDS else load.busy
        cells = np.argwhere(free & wanted) if self.settings.only_busy or kind in DECOY_KINDS else np.argwhere(free)
        if not len(cells):
            cells = np.argwhere(free)
        if not len(cells) or (kind in DECOY_KINDS and not (free & wanted).any()):
            return None
        node, unit = cells[self._rng.integers(len(cells))].tolist()
        return node, -1 if kind in NODE_KINDS else unit
