"""The effect of each kind of fault by its age. A shape is drawn once and applied at every step.

    thermal_throttle  the GPU heats to 83-90 °C; SM clock 1980 -> 1200-1700 (soft), then <= 990 MHz (hard)
    power_brake       all GPUs of the node at half the clock
    pcie_downgrade    x16 -> x8/x4/x1 or Gen5 -> 3/1 until reseated; replays climb before
    ib_flap           the port goes 4 -> 1 -> 2 -> 4 for 1-20 s, again and again; > 30 s kills the gang
    slow_nic          transfers take 1.2-1.6 times as long; ports no longer equal; half of them run at HDR rate
    ecc_storm         bursts of corrected errors, then sometimes one uncorrected: XID 48, 63 or 64, 94 or 95
    gpu_off_bus       the GPU's series vanish (XID 79 first, or frozen pages); peers spin until the watchdog
    node_lost         no exporter of the node answers
    cpu_contention    the host's GPUs wait for their kernels in gusts, steal and pressure rise, the peers wait
    decoys            checkpoint_stall, evaluation, power_cap, exporter_restart, label_rename, sequence_imbalance,
                      phase_change: benign

The precursor of a loss (gpu_off_bus, node_lost) is slow and lost scrapes. The precursor of an error kind is
a few errors.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fleetcast.simulator.faults.board_faults import (
    CpuContention,
    EccStorm,
    GpuOffBus,
    LostNode,
    PcieDowngrade,
    PowerBrake,
    ThermalThrottle,
)
from fleetcast.simulator.faults.decoys import ExporterRestart, PhaseChange, PhaseDecoy, PowerCap, SequenceImbalance
from fleetcast.simulator.faults.effects import FaultShape
from fleetcast.simulator.faults.magnitudes import USUAL, Magnitudes
from fleetcast.simulator.faults.port_faults import IbFlap, SlowNic
from fleetcast.simulator.hardware.workload import JobPhase

_DRAW: dict[str, Callable[[np.random.Generator, Any], FaultShape]] = {
    "thermal_throttle": ThermalThrottle.draw,
    "power_brake": PowerBrake.draw,
    "pcie_downgrade": PcieDowngrade.draw,
    "ib_flap": IbFlap.draw,
    "slow_nic": SlowNic.draw,
    "ecc_storm": EccStorm.draw,
    "gpu_off_bus": GpuOffBus.draw,
    "node_lost": LostNode.draw,
    "cpu_contention": CpuContention.draw,
    "power_cap": PowerCap.draw,
    "exporter_restart": ExporterRestart.draw,
    "label_rename": ExporterRestart.draw_rename,
    "sequence_imbalance": SequenceImbalance.draw,
    "phase_change": PhaseChange.draw,
    "checkpoint_stall": lambda rng, kind: PhaseDecoy(JobPhase.CHECKPOINT),
    "evaluation": lambda rng, kind: PhaseDecoy(JobPhase.EVALUATION),
}


def draw_shape(kind: str, rng: np.random.Generator, magnitudes: Magnitudes = USUAL) -> FaultShape:
    """Draw a fault or decoy of a kind, with numbers from `magnitudes`.

    Raises ValueError for an unknown kind.
    """
    ranges = magnitudes.get_kind(kind)
    return _DRAW[kind](rng, ranges)
