"""Faults of GPUs, of their slots and power, and of whole nodes. Times are fleet seconds."""

from dataclasses import dataclass

import numpy as np

from fleetcast.simulator.faults.effects import (
    REASON_HW_SLOWDOWN,
    REASON_HW_THERMAL,
    REASON_POWER_BRAKE,
    REASON_SW_THERMAL,
    Bump,
    Death,
    Effects,
    HardwareLoad,
    ResetShape,
    TransientShape,
)
from fleetcast.simulator.faults.magnitudes import (
    CpuContentionKind,
    EccStormKind,
    GpuOffBusKind,
    NodeLostKind,
    PcieDowngradeKind,
    PowerBrakeKind,
    ThermalThrottleKind,
)

SOFT_HEAT, HARD_HEAT = 0.4, 0.75


@dataclass(slots=True)
class ThermalThrottle(TransientShape):
    """A fault in which a GPU overheats and throttles.

    `heat` goes from 0 to 1 with time constant `tau_s` while the GPU is busy. Throttling is soft from 0.4 and
    hard from 0.75 on.
    """

    hot_c: float
    soft_ratio: float
    hard_ratio: float
    tau_s: float
    hard: bool
    heat: float = 0.0

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: ThermalThrottleKind) -> "ThermalThrottle":
        return cls(
            hot_c=rng.uniform(*kind.hot_c),
            soft_ratio=rng.uniform(*kind.soft_clock),
            hard_ratio=rng.uniform(*kind.hard_clock),
            tau_s=rng.uniform(*kind.tau_s),
            hard=bool(rng.random() < kind.hard_share),
        )

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
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
class PowerBrake(TransientShape):
    ratio: float

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: PowerBrakeKind) -> "PowerBrake":
        return cls(ratio=rng.uniform(*kind.clock))

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            return False
        effects.clock_ratio[node] = self.ratio
        effects.reasons[node] |= REASON_POWER_BRAKE | REASON_HW_SLOWDOWN
        effects.power_share[node] = 1.0
        return bool(load.busy[node].any())


@dataclass(slots=True)
class PcieDowngrade(ResetShape):
    width: int
    gen: int
    replays_per_s: float

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: PcieDowngradeKind) -> "PcieDowngrade":
        narrow = rng.random() < kind.narrow_share
        return cls(
            width=int(rng.choice(kind.widths)) if narrow else 16,
            gen=5 if narrow else int(rng.choice(kind.generations)),
            replays_per_s=rng.uniform(*kind.replays_per_s),
        )

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        effects.replays_per_s[node, unit] += self.replays_per_s if age_s < 300 else 0.02
        if age_s < 0:
            return False
        effects.link_width[node, unit] = self.width
        effects.link_gen[node, unit] = self.gen
        return bool(load.busy[node, unit])


@dataclass(slots=True)
class EccStorm(ResetShape):
    """A fault with corrected errors in bursts.

    At age `dbe_s` an uncorrected error occurs with its XIDs, and kills the job. If `dbe_s` is None, this error
    never occurs.
    """

    sbe_per_s: float
    period_s: float
    burst_s: float
    dbe_s: float | None
    remap_fails: bool
    contained: bool
    previous_s: float = -np.inf

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: EccStormKind) -> "EccStorm":
        period_s = rng.uniform(*kind.burst_every_s)
        return cls(
            sbe_per_s=float(np.clip(rng.lognormal(1.2, 0.8), *kind.sbe_per_s)),
            period_s=period_s,
            burst_s=period_s * rng.uniform(*kind.burst_share),
            dbe_s=rng.uniform(*kind.uncorrected_after_s) if rng.random() < kind.uncorrected_share else None,
            remap_fails=bool(rng.random() < kind.remap_fails_share),
            contained=bool(rng.random() < kind.contained_share),
        )

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            effects.sbe_per_s[node, unit] += 0.03
            return False
        if age_s % self.period_s < self.burst_s:
            effects.sbe_per_s[node, unit] += self.sbe_per_s
        if self.dbe_s is not None:
            for due_s, bump in self._make_error_bumps(node, unit):
                if self.previous_s < due_s <= age_s:
                    effects.bumps.append(bump)
            if self.previous_s < self.dbe_s + 4.0 <= age_s:
                effects.deaths.append(Death(node, unit, "hardware", "CUDA error: uncorrectable ECC error (XID 48)"))
        self.previous_s = age_s
        return age_s > 20.0

    def _make_error_bumps(self, node: int, unit: int) -> list[tuple[float, Bump]]:
        assert self.dbe_s is not None

        def make_bump(name: str, amount: float, sets: bool = False) -> Bump:
            return Bump("gpu", name, node, unit, amount, sets)

        remap = (
            make_bump("DCGM_FI_DEV_ROW_REMAP_FAILURE", 1, sets=True)
            if self.remap_fails
            else make_bump("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", 1)
        )
        xid = "DCGM_FI_DEV_XID_ERRORS"
        return [
            (self.dbe_s, make_bump("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1)),
            (self.dbe_s, make_bump(xid, 48, sets=True)),
            (self.dbe_s + 1, make_bump(xid, 64 if self.remap_fails else 63, sets=True)),
            (self.dbe_s + 1, remap),
            (self.dbe_s + 4, make_bump(xid, 94 if self.contained else 95, sets=True)),
        ]


@dataclass(slots=True)
class GpuOffBus(ResetShape):
    """A fault in which a GPU falls off the bus and its series vanish.

    For `warns_s` before that, the XID gauge shows 79, or the page freezes. If `warns_s` is 0, the series
    vanish at once.
    """

    warns_s: float
    freezes: bool
    delay_s: float
    slipping: "ScrapeDegradation"

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: GpuOffBusKind) -> "GpuOffBus":
        warns = rng.random() < kind.warns_share
        freezes = bool(rng.random() < kind.freezes_share)
        warns_s = rng.uniform(*kind.warns_s) if warns else 0.0
        delay_s = rng.uniform(*kind.delay_s)
        return cls(warns_s, freezes, delay_s, ScrapeDegradation(delay_s / 2, kind.lost_scrapes_share, rng.spawn(1)[0]))

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            self.slipping.apply(effects, node)
            return False
        if load.slot[node, unit]:
            self._stop_job(effects, load, node, unit, age_s)
        effects.page_delay_s[node] = self.delay_s if age_s < 120 else self.delay_s / 4
        if age_s < self.warns_s:
            effects.frozen[node] = self.freezes
            if not self.freezes:
                effects.bumps.append(Bump("gpu", "DCGM_FI_DEV_XID_ERRORS", node, unit, 79, sets=True))
            return not self.freezes
        effects.present[node, unit] = False
        return True

    def _stop_job(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float) -> None:
        job_s = load.age_s[load.slot[node, unit]]
        if job_s >= age_s:
            effects.hung[node, unit] = True
        elif job_s > 8.0:
            effects.deaths.append(Death(node, unit, "hardware", "CUDA error: no CUDA-capable device (XID 79)"))


@dataclass(slots=True)
class ScrapeDegradation:
    """The precursor of a loss: scrapes take longer, and some get no answer. No values change."""

    delay_s: float
    lost_share: float
    rng: np.random.Generator

    def apply(self, effects: Effects, node: int) -> None:
        effects.page_delay_s[node] = max(effects.page_delay_s[node], self.delay_s * self.rng.uniform(0.3, 1.0))
        if self.rng.random() < self.lost_share:
            effects.page_down[node, 0] = True


@dataclass(slots=True)
class LostNode(ResetShape):
    heartbeat_s: float
    slipping: ScrapeDegradation

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: NodeLostKind) -> "LostNode":
        own = rng.spawn(1)[0]
        slipping = ScrapeDegradation(own.uniform(*kind.delay_s), kind.lost_scrapes_share, own)
        return cls(own.uniform(*kind.heartbeat_s), slipping)

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            self.slipping.apply(effects, node)
            return False
        effects.page_down[node] = True
        effects.hung[node] = load.slot[node] > 0
        if age_s > self.heartbeat_s and (load.slot[node] > 0).any():
            effects.deaths.append(Death(node, -1, "node_lost", "node stopped responding"))
        return True


@dataclass(slots=True)
class CpuContention(TransientShape):
    """A fault in which another program takes the CPUs of a host, in gusts.

    The GPUs of that host wait for their kernels, and the other ranks of the gang wait for the ranks on that
    host.
    """

    slow: float
    util_drop: float
    steal_share: float
    gust_s: float
    calm_s: float

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: CpuContentionKind) -> "CpuContention":
        return cls(
            slow=rng.uniform(*kind.slow),
            util_drop=rng.uniform(*kind.util_drop),
            steal_share=rng.uniform(*kind.steal_share),
            gust_s=rng.uniform(*kind.gust_s),
            calm_s=rng.uniform(*kind.calm_s),
        )

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            return False
        share = self._compute_gust_share(age_s, dt_s)
        effects.host_slow[node] = 1.0 + (self.slow - 1.0) * share
        effects.util_drop[node] = self.util_drop * share
        effects.steal[node] = self.steal_share * share
        return bool(load.busy[node].any())

    def _compute_gust_share(self, age_s: float, dt_s: float) -> float:
        """Return which share of the last `dt_s` seconds lay within gusts, from 0 to 1."""
        span = self.gust_s + self.calm_s

        def compute_gust_s(until_s: float) -> float:
            whole, within_s = divmod(max(until_s, 0.0), span)
            return float(whole * self.gust_s + min(within_s, self.gust_s))

        if dt_s <= 0:
            return float(age_s % span < self.gust_s)
        return (compute_gust_s(age_s) - compute_gust_s(age_s - dt_s)) / dt_s
