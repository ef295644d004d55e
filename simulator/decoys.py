"""Benign look-alikes of faults: what an operator must not be alarmed about."""

from dataclasses import dataclass, field

import numpy as np

from simulator.effects import REASON_SW_POWER_CAP, Effects, Load
from simulator.shape import Passing
from simulator.workload import JobPhase


@dataclass(slots=True)
class PhaseDecoy(Passing):
    """All ranks of the job on this node checkpoint or evaluate together."""

    phase: JobPhase

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        slots = [slot for slot in np.unique(load.slot[node]).tolist() if slot]
        if age_s < 0 or not slots:
            return False
        effects.forced_phase[slots[0]] = self.phase
        return True


@dataclass(slots=True)
class PowerCap(Passing):
    """An operator's power limit: software power cap and somewhat lower clocks, on purpose."""

    limit_w: float
    ratio: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "PowerCap":
        return cls(limit_w=rng.uniform(560, 630), ratio=rng.uniform(0.92, 0.96))

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            return False
        busy = load.busy[node]
        effects.power_limit_w[node] = self.limit_w
        effects.clock_ratio[node] = np.where(busy, self.ratio, 1.0)
        effects.reasons[node] |= np.where(busy, REASON_SW_POWER_CAP, 0)
        effects.power_share[node] = np.where(busy, 0.5, 0.0)
        return bool(busy.any())


@dataclass(slots=True)
class ExporterRestart(Passing):
    """The DCGM exporter does not answer for one scrape, then starts with fresh counters and no XID."""

    down_s: float
    restarted: bool = field(default=False)

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "ExporterRestart":
        return cls(down_s=rng.uniform(14, 17))

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if 0 <= age_s < self.down_s:
            effects.page_down[node, 0] = True
        elif age_s >= self.down_s and not self.restarted:
            self.restarted = True
            effects.resets.append((node, -1))
        return age_s >= 0
