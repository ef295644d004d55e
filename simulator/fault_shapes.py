"""What each kind of fault does, as a function of its age. A shape is drawn once, with its magnitudes, and then
applied at every step; `apply` answers whether the fault shows now, given what runs there.

    thermal_throttle  the GPU heats to 83-90 °C; SM clock 1980 -> 1200-1700 (soft), then <= 990 MHz (hard)
    power_brake       all GPUs of the node at half the clock
    pcie_downgrade    x16 -> x8/x4/x1 or Gen5 -> 3/1 until reseated; replays climb before
    ib_flap           the port goes 4 -> 1 -> 2 -> 4 for 1-20 s, again and again; > 30 s kills the gang
    slow_nic          transfers take 1.2-1.6 times as long; ports no longer equal; half of them run at HDR rate
    ecc_storm         bursts of corrected errors, then sometimes one uncorrected: XID 48, 63 or 64, 94 or 95
    gpu_off_bus       the GPU's series vanish (XID 79 first, or frozen pages); peers spin until the watchdog
    node_lost         nothing of the node answers
    decoys            checkpoint_stall, evaluation, power_cap, exporter_restart: benign
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from simulator.effects import (
    REASON_HW_SLOWDOWN,
    REASON_HW_THERMAL,
    REASON_POWER_BRAKE,
    REASON_SW_POWER_CAP,
    REASON_SW_THERMAL,
    Bump,
    Death,
    Effects,
    Load,
)
from simulator.workload import JobPhase

SOFT_HEAT, HARD_HEAT = 0.4, 0.75
FLAP_KILLS_S = 30.0


class Shape(Protocol):
    """`age_s` counts from the fault's start and is negative while a precursor leads up to it."""

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool: ...

    def end(self, effects: Effects, node: int, unit: int) -> None: ...


@dataclass(slots=True)
class _Shape:
    """A shape that leaves nothing behind."""

    def end(self, effects: Effects, node: int, unit: int) -> None:
        return None


@dataclass(slots=True)
class ThermalThrottle(_Shape):
    """`heat` goes 0..1 with time constant `tau_s` while the GPU is busy; soft above 0.4, hard above 0.75."""

    hot_c: float
    soft_ratio: float
    hard_ratio: float
    tau_s: float
    hard: bool
    heat: float = 0.0

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "ThermalThrottle":
        return cls(
            hot_c=rng.uniform(85, 90),
            soft_ratio=rng.uniform(0.62, 0.8),
            hard_ratio=rng.uniform(0.3, 0.5),
            tau_s=rng.uniform(20, 60),
            hard=bool(rng.random() < 0.75),
        )

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        target = 0.0 if not load.busy[node, unit] else 0.35 if age_s < 0 else 1.0 if self.hard else 0.7
        self.heat += (target - self.heat) * -float(np.expm1(-dt_s / self.tau_s))
        if self.heat > 0.05 and load.busy[node, unit]:
            effects.hot_c[node, unit] = 66.0 + (self.hot_c - 66.0) * min(1.0, self.heat / HARD_HEAT)
        if self.heat < SOFT_HEAT or not load.busy[node, unit]:
            return False
        self._throttle(effects, node, unit)
        return True

    def _throttle(self, effects: Effects, node: int, unit: int) -> None:
        if self.heat >= HARD_HEAT:
            effects.clock_ratio[node, unit] = self.hard_ratio
            effects.reasons[node, unit] |= REASON_HW_SLOWDOWN | REASON_HW_THERMAL
            effects.thermal_share[node, unit] = 1.0
            return
        depth = (self.heat - SOFT_HEAT) / (HARD_HEAT - SOFT_HEAT)
        effects.clock_ratio[node, unit] = 0.86 + (self.soft_ratio - 0.86) * depth
        effects.reasons[node, unit] |= REASON_SW_THERMAL
        effects.thermal_share[node, unit] = 0.2 + 0.6 * depth


@dataclass(slots=True)
class PowerBrake(_Shape):
    ratio: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "PowerBrake":
        return cls(ratio=rng.uniform(0.4, 0.5))

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            return False
        effects.clock_ratio[node] = self.ratio
        effects.reasons[node] |= REASON_POWER_BRAKE | REASON_HW_SLOWDOWN
        effects.power_share[node] = 1.0
        return bool(load.busy[node].any())


@dataclass(slots=True)
class PcieDowngrade(_Shape):
    width: int
    gen: int
    replays_per_s: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "PcieDowngrade":
        narrow = rng.random() < 0.6
        return cls(
            width=int(rng.choice([1, 4, 8])) if narrow else 16,
            gen=5 if narrow else int(rng.choice([1, 3])),
            replays_per_s=rng.uniform(0.6, 3.0),
        )

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        effects.replays_per_s[node, unit] += self.replays_per_s if age_s < 300 else 0.02
        if age_s < 0:
            return False
        effects.link_width[node, unit] = self.width
        effects.link_gen[node, unit] = self.gen
        return bool(load.busy[node, unit])

    def end(self, effects: Effects, node: int, unit: int) -> None:
        effects.resets.append((node, unit))


@dataclass(slots=True)
class IbFlap(_Shape):
    """A list of (begin, length) seconds, drawn ahead; what lies wholly inside one step still counts."""

    flaps: list[tuple[float, float]]
    symbols: int

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "IbFlap":
        gaps = rng.uniform(25, 110, 600)
        lengths = np.where(rng.random(600) < 0.02, rng.uniform(32, 45, 600), rng.uniform(1, 16, 600))
        begins = np.concatenate([[2.0], 2.0 + np.cumsum(gaps + lengths)[:-1]])
        return cls(list(zip(begins.tolist(), lengths.tolist(), strict=True)), symbols=int(rng.integers(40, 1500)))

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            effects.symbols_per_s[node, unit] += 0.05
            return False
        for begin_s, length_s in self.flaps:
            if begin_s > age_s:
                break
            if begin_s > age_s - dt_s:
                self._goes_down(effects, node, unit)
            if age_s < begin_s + length_s:
                effects.port_down[node, unit] = True
                if age_s - begin_s > FLAP_KILLS_S and load.networked[node, unit]:
                    effects.deaths.append(Death(node, unit, "network", "NCCL error 12: IB port went down"))
            elif begin_s + length_s > age_s - dt_s:
                effects.bumps.append(Bump("port", "link_error_recovery_total", node, unit, 1))
        return age_s > self.flaps[0][0]

    def _goes_down(self, effects: Effects, node: int, unit: int) -> None:
        for name, amount in (
            ("link_downed_total", 1),
            ("symbol_error_total", self.symbols),
            ("port_discards_transmitted_total", 3 + self.symbols // 50),
            ("port_errors_received_total", 1 + self.symbols // 200),
        ):
            effects.bumps.append(Bump("port", name, node, unit, amount))


@dataclass(slots=True)
class SlowNic(_Shape):
    slow: float
    wait_share: float
    half_rate: bool

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "SlowNic":
        half_rate = bool(rng.random() < 0.5)
        slow = rng.uniform(1.5, 2.0) if half_rate else rng.uniform(1.2, 1.6)
        return cls(slow, wait_share=rng.uniform(0.3, 0.6), half_rate=half_rate)

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            return False
        effects.port_slow[node, unit] = 1.0 + (self.slow - 1.0) * min(1.0, age_s / 5.0)
        effects.port_wait[node, unit] = self.wait_share
        if self.half_rate:
            effects.port_speed[node, unit] /= 2
        return bool(load.networked[node, unit])


@dataclass(slots=True)
class EccStorm(_Shape):
    """Corrected errors in bursts; at `dbe_s` an uncorrected one with its XIDs, which kills the job."""

    sbe_per_s: float
    period_s: float
    burst_s: float
    dbe_s: float | None
    remap_fails: bool
    contained: bool
    previous_s: float = -np.inf

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "EccStorm":
        period_s = rng.uniform(120, 300)
        return cls(
            sbe_per_s=float(np.clip(rng.lognormal(1.2, 0.8), 1.0, 60.0)),
            period_s=period_s,
            burst_s=period_s * rng.uniform(0.4, 0.8),
            dbe_s=rng.uniform(40, 240) if rng.random() < 0.6 else None,
            remap_fails=bool(rng.random() < 0.25),
            contained=bool(rng.random() < 0.6),
        )

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            effects.sbe_per_s[node, unit] += 0.03
            return False
        if age_s % self.period_s < self.burst_s:
            effects.sbe_per_s[node, unit] += self.sbe_per_s
        if self.dbe_s is not None:
            for due_s, bump in self._uncorrected(node, unit):
                if self.previous_s < due_s <= age_s:
                    effects.bumps.append(bump)
            if self.previous_s < self.dbe_s + 4.0 <= age_s:
                effects.deaths.append(Death(node, unit, "hardware", "CUDA error: uncorrectable ECC error (XID 48)"))
        self.previous_s = age_s
        return age_s > 20.0

    def _uncorrected(self, node: int, unit: int) -> list[tuple[float, Bump]]:
        assert self.dbe_s is not None

        def bump(name: str, amount: float, sets: bool = False) -> Bump:
            return Bump("gpu", name, node, unit, amount, sets)

        remap = (
            bump("DCGM_FI_DEV_ROW_REMAP_FAILURE", 1, sets=True)
            if self.remap_fails
            else bump("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", 1)
        )
        xid = "DCGM_FI_DEV_XID_ERRORS"
        return [
            (self.dbe_s, bump("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1)),
            (self.dbe_s, bump(xid, 48, sets=True)),
            (self.dbe_s + 1, bump(xid, 64 if self.remap_fails else 63, sets=True)),
            (self.dbe_s + 1, remap),
            (self.dbe_s + 4, bump(xid, 94 if self.contained else 95, sets=True)),
        ]

    def end(self, effects: Effects, node: int, unit: int) -> None:
        effects.resets.append((node, unit))


@dataclass(slots=True)
class GpuOffBus(_Shape):
    """`warns_s` before the series vanish the XID gauge says 79 (0: at once); or the whole page freezes meanwhile."""

    warns_s: float
    freezes: bool
    delay_s: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "GpuOffBus":
        warns = rng.random() < 0.5
        return cls(
            warns_s=rng.uniform(15, 30) if warns else 0.0,
            freezes=bool(rng.random() < 0.3),
            delay_s=rng.uniform(0.1, 0.4),
        )

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            return False
        if load.slot[node, unit]:
            self._stop_job(effects, load, node, unit, age_s)
        effects.page_delay_s[node] = self.delay_s if age_s < 120 else self.delay_s / 4
        if age_s < self.warns_s:
            effects.bumps.append(Bump("gpu", "DCGM_FI_DEV_XID_ERRORS", node, unit, 79, sets=True))
            effects.frozen[node] = self.freezes
            return True
        effects.present[node, unit] = False
        return True

    def _stop_job(self, effects: Effects, load: Load, node: int, unit: int, age_s: float) -> None:
        job_s = load.age_s[load.slot[node, unit]]
        if job_s >= age_s:
            effects.hung[node, unit] = True
        elif job_s > 8.0:
            effects.deaths.append(Death(node, unit, "hardware", "CUDA error: no CUDA-capable device (XID 79)"))

    def end(self, effects: Effects, node: int, unit: int) -> None:
        effects.resets.append((node, unit))


@dataclass(slots=True)
class NodeLost(_Shape):
    heartbeat_s: float = 45.0

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "NodeLost":
        return cls()

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            return False
        effects.page_down[node] = True
        effects.hung[node] = load.slot[node] > 0
        if age_s > self.heartbeat_s and (load.slot[node] > 0).any():
            effects.deaths.append(Death(node, -1, "node_lost", "node stopped responding"))
        return True

    def end(self, effects: Effects, node: int, unit: int) -> None:
        effects.resets.append((node, -1))


@dataclass(slots=True)
class PhaseDecoy(_Shape):
    """All ranks of the job on this node checkpoint or evaluate together."""

    phase: JobPhase

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        slots = [slot for slot in np.unique(load.slot[node]).tolist() if slot]
        if age_s < 0 or not slots:
            return False
        effects.forced_phase[slots[0]] = self.phase
        return True


@dataclass(slots=True)
class PowerCap(_Shape):
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
class ExporterRestart(_Shape):
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


def draw_shape(kind: str, rng: np.random.Generator) -> Shape:
    """A fault or decoy of this kind with magnitudes of its own. Raises ValueError for an unknown kind."""
    drawn: dict[str, type[_Drawn]] = {
        "thermal_throttle": ThermalThrottle,
        "power_brake": PowerBrake,
        "pcie_downgrade": PcieDowngrade,
        "ib_flap": IbFlap,
        "slow_nic": SlowNic,
        "ecc_storm": EccStorm,
        "gpu_off_bus": GpuOffBus,
        "node_lost": NodeLost,
        "power_cap": PowerCap,
        "exporter_restart": ExporterRestart,
    }
    if kind == "checkpoint_stall":
        return PhaseDecoy(JobPhase.CHECKPOINT)
    if kind == "evaluation":
        return PhaseDecoy(JobPhase.EVALUATION)
    if kind not in drawn:
        raise ValueError(
            f"fault kind {kind!r}: expected one of {', '.join((*drawn, 'checkpoint_stall', 'evaluation'))}"
        )
    return drawn[kind].draw(rng)


class _Drawn(Shape, Protocol):
    @classmethod
    def draw(cls, rng: np.random.Generator) -> Shape: ...
