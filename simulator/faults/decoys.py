"""Benign look-alikes of faults, which must not raise an alarm."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetcast.simulator.faults.effects import (
    REASON_SW_POWER_CAP,
    ActivityLevels,
    Effects,
    HardwareLoad,
    TransientShape,
)
from fleetcast.simulator.faults.magnitudes import (
    ExporterRestartKind,
    PhaseChangeKind,
    PowerCapKind,
    SequenceImbalanceKind,
)
from fleetcast.simulator.hardware.workload import CONTEXT_POWER_W, POWER_BY_CLOCK, JobPhase


@dataclass(slots=True)
class PhaseDecoy(TransientShape):
    """A decoy in which all ranks of the job on this node checkpoint or evaluate at the same time."""

    phase: JobPhase

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        slot = _find_job_slot(load, node)
        if age_s < 0 or not slot:
            return False
        effects.forced_phase[slot] = self.phase
        return True


@dataclass(slots=True)
class PowerCap(TransientShape):
    """A decoy in which an operator sets a power limit on purpose.

    The board cannot draw more power, so its clocks are lower, and the clock event reasons say why. The limit is
    the power that the job draws at `ratio` of its clock, within `least_w` and `most_w`. at: selects the one GPU of
    the node that has the limit, as a fraction of the node's GPUs. None means all GPUs.
    """

    ratio: float
    least_w: float
    most_w: float
    at: float | None = None

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: PowerCapKind) -> "PowerCap":
        ratio, at = rng.uniform(*kind.clock), rng.spawn(1)[0].uniform()
        return cls(ratio, *kind.limit_w, at=at / kind.one_gpu_share if at < kind.one_gpu_share else None)

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            return False
        gpus = load.busy.shape[1]
        own = node, slice(None) if self.at is None else int(self.at * gpus)
        busy = load.busy[own]
        asked_w = np.maximum(float(np.median(load.asks_w[own])) - CONTEXT_POWER_W, 0.0)
        effects.power_limit_w[own] = np.clip(
            CONTEXT_POWER_W + asked_w * self.ratio**POWER_BY_CLOCK, self.least_w, self.most_w
        )
        effects.clock_ratio[own] = np.where(busy, self.ratio, 1.0)
        effects.reasons[own] |= np.where(busy, REASON_SW_POWER_CAP, 0)
        effects.power_share[own] = np.where(busy, 0.5, 0.0)
        return bool(np.any(busy))


@dataclass(slots=True)
class ExporterRestart(TransientShape):
    """A decoy in which an exporter does not answer for `down_s` and then restarts its counters.

    It shows no XID.

    `renames`: whether it also returns with other metric names.
    """

    down_s: float
    renames: bool = False
    restarted: bool = field(default=False)

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: ExporterRestartKind) -> "ExporterRestart":
        return cls(down_s=rng.uniform(*kind.down_s))

    @classmethod
    def draw_rename(cls, rng: np.random.Generator, kind: ExporterRestartKind) -> "ExporterRestart":
        return cls(down_s=rng.uniform(*kind.down_s), renames=True)

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if 0 <= age_s < self.down_s:
            effects.page_down[node, 0] = True
        elif age_s >= self.down_s and not self.restarted:
            self.restarted = True
            effects.resets.append((node, -1))
            effects.renamed[node] |= self.renames
        return age_s >= 0


@dataclass(slots=True)
class SequenceImbalance(TransientShape):
    """A decoy in which ranks get sequences of different lengths, drawn again every `hold_s`.

    All ranks wait for the rank with the longest sequences.
    """

    spread: float
    hold_s: float
    rng: np.random.Generator
    loads: NDArray[np.float64] | None = None
    dealt_s: float = -np.inf

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: SequenceImbalanceKind) -> "SequenceImbalance":
        return cls(rng.uniform(*kind.spread), rng.uniform(*kind.hold_s), rng.spawn(1)[0])

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        slot = _find_job_slot(load, node)
        if age_s < 0 or not slot:
            return False
        if self.loads is None or age_s - self.dealt_s >= self.hold_s:
            per_node = self.rng.normal(0.0, self.spread, (len(load.slot), 1))
            self.loads = np.clip(1.0 + per_node, 0.5, 1.8) * np.ones(load.slot.shape)
            self.dealt_s = age_s
        mine = load.slot == slot
        effects.load[mine] = self.loads[mine]
        return True


@dataclass(slots=True)
class PhaseChange(TransientShape):
    """A decoy in which all ranks of the job change their work for a while.

    Examples are longer sequences, another data set, or more layers.
    """

    levels: ActivityLevels

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: PhaseChangeKind) -> "PhaseChange":
        return cls(ActivityLevels(rng.uniform(*kind.activity), rng.uniform(*kind.traffic), rng.uniform(*kind.step)))

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        slot = _find_job_slot(load, node)
        if age_s < 0 or not slot:
            return False
        effects.levels[slot] = self.levels
        return True


def _find_job_slot(load: HardwareLoad, node: int) -> int:
    """Return the slot of the first job on a node, or 0 if there is no job."""
    return next((slot for slot in np.unique(load.slot[node]).tolist() if slot), 0)
