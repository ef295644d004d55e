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

from typing import Protocol

import numpy as np

from simulator.board_faults import EccStorm, GpuOffBus, NodeLost, PcieDowngrade, PowerBrake, ThermalThrottle
from simulator.decoys import ExporterRestart, PhaseDecoy, PowerCap
from simulator.port_faults import IbFlap, SlowNic
from simulator.shape import Shape
from simulator.workload import JobPhase


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
