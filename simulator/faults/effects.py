"""The present effects of faults on the hardware, as arrays over (node, GPU) or (node, port).

Port i serves GPU i.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetcast.simulator.hardware.telemetry import IB_BYTES_PER_S
from fleetcast.simulator.hardware.workload import MAX_POWER_W, JobPhase

REASON_SW_POWER_CAP = 4
REASON_HW_SLOWDOWN = 8
REASON_SW_THERMAL = 32
REASON_HW_THERMAL = 64
REASON_POWER_BRAKE = 128


@dataclass(frozen=True, slots=True)
class Bump:
    """A change of one value of a GPU or port: `amount` is added to a counter, or a gauge is set to it."""

    table: str  # "gpu" or "port"
    field: str
    node: int
    unit: int
    amount: float
    sets: bool = False


@dataclass(frozen=True, slots=True)
class Death:
    """The death of a job in this step. `gpu`: a GPU that the job holds, -1 for every job of the node."""

    node: int
    gpu: int
    category: str
    message: str


@dataclass(frozen=True, slots=True)
class HardwareLoad:
    """The present load of jobs on the hardware. It decides which effects a fault has.

    Slot 0 means no job.
    """

    slot: NDArray[np.int32]  # (n, g) job slot
    busy: NDArray[np.bool_]  # (n, g) computes at more than 250 W
    networked: NDArray[np.bool_]  # (n, g) its gang spans nodes and this GPU's port carries traffic
    asks_w: NDArray[np.float64]  # (n, g) what its job draws of the board at full clock
    size: NDArray[np.int64]  # (slots,) GPUs of the job
    age_s: NDArray[np.float64]  # (slots,) since the job's start


@dataclass(frozen=True, slots=True)
class ActivityLevels:
    """The factors on a job's usual activity, traffic and step time while the job changes its work."""

    activity: float = 1.0
    traffic: float = 1.0
    step: float = 1.0


@dataclass(slots=True)
class Effects:
    """The effects of all faults in one step.

    They are neutral after a reset. Then each fault writes into a few cells.
    """

    nodes: int
    gpus: int
    clock_ratio: NDArray[np.float64] = field(init=False)  # of the usual SM clock
    reasons: NDArray[np.int64] = field(init=False)  # clock event reason bits to add
    hot_c: NDArray[np.float64] = field(init=False)  # temperature at least this
    thermal_share: NDArray[np.float64] = field(init=False)  # of time in thermal violation
    power_share: NDArray[np.float64] = field(init=False)  # of time in power violation
    power_limit_w: NDArray[np.float64] = field(init=False)
    link_width: NDArray[np.float64] = field(init=False)  # PCIe lanes at most
    link_gen: NDArray[np.float64] = field(init=False)  # PCIe generation at most
    sbe_per_s: NDArray[np.float64] = field(init=False)
    replays_per_s: NDArray[np.float64] = field(init=False)
    symbols_per_s: NDArray[np.float64] = field(init=False)
    cnp_per_s: NDArray[np.float64] = field(init=False)  # congestion notifications that the port has to heed
    port_slow: NDArray[np.float64] = field(init=False)  # a transfer takes this many times as long
    port_wait: NDArray[np.float64] = field(init=False)  # share of time that data wait to be sent
    port_speed: NDArray[np.float64] = field(init=False)  # B/s
    port_down: NDArray[np.bool_] = field(init=False)
    host_slow: NDArray[np.float64] = field(init=False)  # the own part of a step takes this many times as long
    util_drop: NDArray[np.float64] = field(init=False)  # utilisation lost to a host that does not launch kernels
    load: NDArray[np.float64] = field(init=False)  # of the work of a step, relative to the usual share
    steal: NDArray[np.float64] = field(init=False)  # (n,) share of CPU time that something else takes
    present: NDArray[np.bool_] = field(init=False)  # the driver sees the GPU
    hung: NDArray[np.bool_] = field(init=False)  # collectives with this GPU never end
    frozen: NDArray[np.bool_] = field(init=False)  # (n,) the DCGM page repeats itself
    page_down: NDArray[np.bool_] = field(init=False)  # (n, 2) dcgm and node exporter do not answer
    page_delay_s: NDArray[np.float64] = field(init=False)  # (n,) wall seconds of extra scrape time
    forced_phase: dict[int, JobPhase] = field(init=False, default_factory=dict)  # by job slot
    levels: dict[int, ActivityLevels] = field(init=False, default_factory=dict)  # by job slot
    renamed: NDArray[np.bool_] = field(init=False)  # (n,) a newer DCGM exporter, for good
    bumps: list[Bump] = field(init=False, default_factory=list)
    deaths: list[Death] = field(init=False, default_factory=list)
    resets: list[tuple[int, int]] = field(init=False, default_factory=list)  # (node, GPU or -1): counters restart

    def __post_init__(self) -> None:
        self.renamed = np.zeros(self.nodes, bool)
        self.reset()

    def reset(self) -> None:
        """Reset all effects to those of healthy hardware. A renamed exporter stays renamed."""
        shape = (self.nodes, self.gpus)
        self.clock_ratio = np.ones(shape)
        self.reasons = np.zeros(shape, np.int64)
        self.hot_c = np.full(shape, -np.inf)
        self.thermal_share, self.power_share = np.zeros(shape), np.zeros(shape)
        self.power_limit_w = np.full(shape, MAX_POWER_W)
        self.link_width, self.link_gen = np.full(shape, 16.0), np.full(shape, 5.0)
        self.sbe_per_s, self.replays_per_s = np.zeros(shape), np.zeros(shape)
        self.symbols_per_s, self.cnp_per_s = np.zeros(shape), np.zeros(shape)
        self.host_slow, self.load = np.ones(shape), np.ones(shape)
        self.util_drop, self.steal = np.zeros(shape), np.zeros(self.nodes)
        self.port_slow, self.port_wait = np.ones(shape), np.zeros(shape)
        self.port_speed = np.full(shape, IB_BYTES_PER_S)
        self.port_down, self.hung = np.zeros(shape, bool), np.zeros(shape, bool)
        self.present = np.ones(shape, bool)
        self.frozen = np.zeros(self.nodes, bool)
        self.page_down = np.zeros((self.nodes, 2), bool)
        self.page_delay_s = np.zeros(self.nodes)
        self.forced_phase, self.levels = {}, {}
        self.bumps, self.deaths, self.resets = [], [], []


class FaultShape(Protocol):
    """The interface of a fault that is applied at every step.

    `age_s` counts from the fault's start, and is negative during a precursor.
    """

    def apply(self, effects: Effects, load: HardwareLoad, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        """Write the fault's effects into the cells of (node, unit).

        Returns whether the work there shows the fault in this step.
        """

    def end(self, effects: Effects, node: int, unit: int) -> None:
        """Undo the lasting effects of a fault that is over or repaired."""


@dataclass(slots=True)
class TransientShape:
    """The base of a fault that leaves nothing behind when it ends."""

    def end(self, effects: Effects, node: int, unit: int) -> None:
        return None


@dataclass(slots=True)
class ResetShape:
    """The base of a fault whose repair resets the GPU (unit -1: all GPUs of the node).

    Volatile counters and the XID then restart.
    """

    def end(self, effects: Effects, node: int, unit: int) -> None:
        effects.resets.append((node, unit))
