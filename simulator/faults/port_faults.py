"""Faults of InfiniBand ports: a link that flaps, and a port that is slow. Port i serves GPU i."""

from dataclasses import dataclass

import numpy as np

from fleetcast.simulator.faults.effects import Bump, Death, Effects, HardwareLoad, TransientShape
from fleetcast.simulator.faults.magnitudes import IbFlapKind, SlowNicKind

FLAP_KILLS_S = 30.0
FIRST_FLAP_S = 2.0


@dataclass(slots=True)
class IbFlap(TransientShape):
    """A fault of a link that goes down again and again.

    flaps: (begin, length) in seconds, drawn in advance. A flap that lies entirely within one step still counts.
    """

    flaps: list[tuple[float, float]]
    symbols: int

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: IbFlapKind) -> "IbFlap":
        gaps = rng.uniform(*kind.gap_s, 600)
        long = rng.random(600) < kind.long_share
        lengths = np.where(long, rng.uniform(*kind.long_s, 600), rng.uniform(*kind.down_s, 600))
        begins = FIRST_FLAP_S + np.concatenate([[0.0], np.cumsum(gaps + lengths)[:-1]])
        flaps = list(zip(begins.tolist(), lengths.tolist(), strict=True))
        symbols = int(rng.integers(int(kind.symbols[0]), int(kind.symbols[1]) + 1))
        if kind.stays_down_share and rng.random() < kind.stays_down_share:
            flaps = [(FIRST_FLAP_S, np.inf)]
        return cls(flaps, symbols)

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            effects.symbols_per_s[node, unit] += 0.05
            return False
        for begin_s, length_s in self.flaps:
            if begin_s > age_s:
                break
            if begin_s > age_s - dt_s:
                self._add_link_down_bumps(effects, node, unit)
            if age_s < begin_s + length_s:
                effects.port_down[node, unit] = True
                if age_s - begin_s > FLAP_KILLS_S and load.networked[node, unit]:
                    effects.deaths.append(Death(node, unit, "network", "NCCL error 12: IB port went down"))
            elif begin_s + length_s > age_s - dt_s:
                effects.bumps.append(Bump("port", "link_error_recovery_total", node, unit, 1))
        return age_s > self.flaps[0][0]

    def _add_link_down_bumps(self, effects: Effects, node: int, unit: int) -> None:
        for name, amount in (
            ("link_downed_total", 1),
            ("symbol_error_total", self.symbols),
            ("port_discards_transmitted_total", 3 + self.symbols // 50),
            ("port_errors_received_total", 1 + self.symbols // 200),
        ):
            effects.bumps.append(Bump("port", name, node, unit, amount))


@dataclass(slots=True)
class SlowNic(TransientShape):
    slow: float
    wait_share: float
    half_rate: bool
    cnp_per_s: float

    @classmethod
    def draw(cls, rng: np.random.Generator, kind: SlowNicKind) -> "SlowNic":
        half_rate = bool(rng.random() < kind.half_rate_share)
        slow = rng.uniform(*(kind.half_rate_slow if half_rate else kind.slow))
        wait_share = rng.uniform(*kind.wait_share)
        congested = not half_rate and rng.random() < kind.congested_share
        return cls(slow, wait_share, half_rate, rng.uniform(*kind.notifications_per_s) if congested else 0.0)

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        if age_s < 0:
            return False
        effects.port_slow[node, unit] = 1.0 + (self.slow - 1.0) * min(1.0, age_s / 5.0)
        effects.port_wait[node, unit] = self.wait_share
        effects.cnp_per_s[node, unit] = self.cnp_per_s if load.networked[node, unit] else 0.0
        if self.half_rate:
            effects.port_speed[node, unit] /= 2
        return bool(load.networked[node, unit])
