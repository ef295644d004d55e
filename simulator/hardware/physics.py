"""The physics of the simulated fleet: sensor readings from the load of jobs and the effects of faults.

All arrays are over (node, GPU), without loops.

A job is as slow as its slowest member. The speed s of a member is its clock ratio, divided by its load and by
the slowness of its host. With communication share c, a step of the job takes k = (1 - c)/min(s) + c * max(r)
times as long. Here r is how much longer a transfer takes on a member's worst port. All members then do 1/k of
their work per second. Power above the idle context, tensor and SM activity and traffic fall by that factor.
Utilisation stays high because waiting ranks spin. Members are synchronous: a step moves the same bytes through
each of them. So a slow link does not show in any member's share of the traffic.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.simulator.faults.effects import REASON_SW_POWER_CAP, Effects
from fleetcast.simulator.hardware.gangs import RunningGangs
from fleetcast.simulator.hardware.workload import CONTEXT_POWER_W, IDLE_POWER_W, PHASE_LEVELS, POWER_BY_CLOCK, JobPhase

STALL = 25.0  # a step takes this many times as long while a port that the gang needs is down
BURST = 3.0  # traffic over PCIe comes in bursts of this many times the mean
POWER_CAP_W = 650.0  # above this the driver reports the software power cap, which is normal
CLOCK_STEP_MHZ = 15.0
PCIE_LANE_BYTES_PER_S = np.array([0.0, 0.25e9, 0.5e9, 0.985e9, 1.97e9, 3.94e9])
# Fans turn up only towards full power, so per watt a GPU is warmer in between: 68 °C at 560 W, 69 °C at 690 W.
FAN_AT_W, FAN_WARMER = (150.0, 400.0, 580.0, 690.0), (1.0, 1.16, 1.16, 1.0)
WAIT_TICKS_PER_S = 5e8
PACKET_BYTES = 3900.0


@dataclass(frozen=True, slots=True)
class GpuTraits:
    """The fixed traits of each GPU, (node, GPU). inlet_c is (node, 1)."""

    inlet_c: NDArray[np.float64]
    resistance_c_per_w: NDArray[np.float64]
    tau_s: NDArray[np.float64]
    power_skew: NDArray[np.float64]
    port_skew: NDArray[np.float64]
    clock_mhz: NDArray[np.float64]
    idle_w: NDArray[np.float64]
    idle_mib: NDArray[np.float64]

    @classmethod
    def draw(cls, rng: np.random.Generator, nodes: int, gpus: int) -> "GpuTraits":
        """Draw the traits of a fleet's GPUs.

        A chassis has two cooling groups: GPUs 0, 3, 4, 6 run hotter and slower than 1, 2, 5, 7.
        """
        shape = (nodes, gpus)
        hot = np.isin(np.arange(gpus) % 8, (0, 3, 4, 6))
        return cls(
            inlet_c=rng.normal(29.5, 1.0, (nodes, 1)),
            resistance_c_per_w=np.where(hot, rng.uniform(0.055, 0.059, shape), rng.uniform(0.038, 0.044, shape)),
            tau_s=np.broadcast_to(np.where(hot, 18.0, 10.0), shape),
            power_skew=np.clip(rng.normal(1.0, 0.008, shape), 0.975, 1.02),
            port_skew=np.clip(rng.normal(1.0, 0.004, shape), 0.99, 1.01),
            clock_mhz=np.where(rng.random(shape) < 0.08, 1965.0, 1980.0),
            idle_w=rng.uniform(IDLE_POWER_W - 3, IDLE_POWER_W + 4, shape),
            idle_mib=rng.choice([0.0, 3.0, 560.0], shape, p=[0.3, 0.6, 0.1]),
        )


@dataclass(frozen=True, slots=True)
class Activity:
    """The present work of each GPU, (node, GPU).

    Jobs and faults determine it, and the sensor readings follow from it.
    """

    phase: NDArray[np.int64]
    work: NDArray[np.float64]  # share of the steady work per second that gets done
    busy: NDArray[np.float64]  # share of its own clock cycles that work
    util: NDArray[np.float64]
    nvlink: NDArray[np.float64]
    ib: NDArray[np.float64]
    pcie: NDArray[np.float64]


def compute_pcie_capacity(effects: Effects) -> NDArray[np.float64]:
    """Return (node, GPU) the capacity of each GPU's PCIe link in bytes/s."""
    per_lane: NDArray[np.float64] = PCIE_LANE_BYTES_PER_S[effects.link_gen.astype(int)]
    return per_lane * effects.link_width


def compute_port_traffic(gangs: RunningGangs) -> NDArray[np.float64]:
    """Return (node, GPU) the bytes/s that a healthy, steady gang sends through each GPU's port.

    They are 0 for gangs on a single node.
    """
    ports = np.maximum(gangs.get_levels("ib_ports"), 1.0)
    per_port = np.where(gangs.spans_nodes, gangs.get_levels("ib_bytes_per_s") / ports, 0.0)
    used = np.arange(gangs.slot.shape[1]) < ports[gangs.slot]
    return np.where(used, per_port[gangs.slot], 0.0)


def compute_slowdowns(gangs: RunningGangs, effects: Effects) -> NDArray[np.float64]:
    """Return (slots,) float64, the factor by which each job's worst member makes the job's steps longer.

    It is 1 for a healthy job.
    """
    cells = gangs.slot.ravel()
    sends = compute_port_traffic(gangs)
    speed = np.ones(len(gangs.size))
    fastest = np.full(len(gangs.size), np.inf)
    np.minimum.at(fastest, cells, compute_own_speed(effects).ravel())
    speed = np.where(np.isfinite(fastest), fastest, speed)
    through_pcie = (
        (gangs.get_levels("pcie_rx_bytes_per_s")[gangs.slot] + sends) * BURST / compute_pcie_capacity(effects)
    )
    transfer = np.maximum(np.where(sends > 0, effects.port_slow, 1.0), through_pcie)
    worst = np.ones(len(gangs.size))
    np.maximum.at(worst, cells, transfer.ravel())
    share = gangs.get_levels("communication_share")
    share = np.where(worst > 1.0, np.maximum(share, 0.1), share)
    factor = (1 - share) / speed + share * worst
    np.maximum.at(factor, cells, (through_pcie / BURST).ravel())  # no link carries more than it can
    factor[find_stalled_slots(gangs, effects)] *= STALL
    factor[0] = 1.0
    return factor


def find_stalled_slots(gangs: RunningGangs, effects: Effects) -> NDArray[np.int32]:
    """Return (n,) int32, the slots of jobs that wait for a port which is down.

    No member of such a job exchanges data.
    """
    waiting: NDArray[np.int32] = np.unique(gangs.slot[effects.port_down & (compute_port_traffic(gangs) > 0)])
    return waiting


def compute_own_speed(effects: Effects) -> NDArray[np.float64]:
    """Return (node, GPU) the speed at which each GPU does its own part of a step. 1 is usual."""
    return effects.clock_ratio / (effects.load * effects.host_slow)


def compute_activity(
    gangs: RunningGangs, phase: NDArray[np.int64], factor: NDArray[np.float64], effects: Effects
) -> Activity:
    """Return the activity of each GPU, by its job's phase and slowdown and by the effects of faults.

    phase: (slots,) JobPhase. factor: (slots,) slowdown of each job.
    """
    levels = PHASE_LEVELS[phase]  # (slots, 5)
    for slot, changed in effects.levels.items():
        levels[slot] *= (changed.activity, 1.0, changed.traffic, changed.traffic, 1.0)
    done = 1.0 / factor
    per_slot = np.stack([levels[:, 0] * done, levels[:, 2] * done, levels[:, 3] * done, levels[:, 4] * done], axis=0)
    work, nvlink, ib, pcie = per_slot[:, gangs.slot]
    spins = (factor > 1.1) & (levels[:, 0] > 0.5)
    util = np.minimum(gangs.get_levels("gpu_util") * levels[:, 1], 1.0)
    util = np.where(spins, np.maximum(util, 0.99), util)
    work = work * effects.load
    busy = np.minimum(work / effects.clock_ratio, 1.05)
    seen = util[gangs.slot]
    seen = np.where(effects.util_drop > 0, np.minimum(seen, gangs.get_levels("gpu_util")[gangs.slot]), seen)
    return Activity(phase[gangs.slot], work, busy, np.maximum(seen - effects.util_drop, 0.0), nvlink, ib, pcie)


def compute_power_w(
    gangs: RunningGangs, body: GpuTraits, activity: Activity, effects: Effects, noise: NDArray[np.float64], now_ms: int
) -> NDArray[np.float64]:
    """Return (node, GPU) board power in W. Its dynamic part is proportional to clock ** POWER_BY_CLOCK.

    The exponent accounts for the voltage, which falls with the clock.
    """
    slot = gangs.slot
    above = np.maximum(gangs.get_levels("power_w") - CONTEXT_POWER_W, 0.0)[slot]
    swing = gangs.get_levels("power_swing_w") * np.sin(
        2 * np.pi * gangs.compute_age_s(now_ms) / np.maximum(gangs.get_levels("step_s"), 0.1)
    )
    moving = gangs.get_levels("power_noise_w")[slot] * noise + swing[slot]
    dynamic = (above * body.power_skew + moving) * activity.busy * effects.clock_ratio**POWER_BY_CLOCK
    loaded = CONTEXT_POWER_W + 3.0 * (body.power_skew - 1.0) * 50 + 0.14 * noise + np.maximum(dynamic, 0.0)
    idle = body.idle_w + 0.3 * noise
    return np.minimum(np.where(slot > 0, loaded, idle), effects.power_limit_w)


def compute_clock_mhz(gangs: RunningGangs, body: GpuTraits, effects: Effects) -> NDArray[np.float64]:
    """Return (node, GPU) the SM clock in MHz, in steps of 15. It is 345 without a job."""
    running = np.round(body.clock_mhz * effects.clock_ratio / CLOCK_STEP_MHZ) * CLOCK_STEP_MHZ
    return np.where(gangs.slot > 0, running, 345.0)


def compute_event_reasons(gangs: RunningGangs, power: NDArray[np.float64], effects: Effects) -> NDArray[np.int64]:
    """Return (node, GPU) int64 clock event reasons as bits: idle, the software power cap, and faults.

    The software power cap is normal near the limit. power: (node, GPU) in W.
    """
    idle = np.where(gangs.slot > 0, 0, 1)
    capped = np.where(power > np.minimum(POWER_CAP_W, effects.power_limit_w - 1.0), REASON_SW_POWER_CAP, 0)
    return idle | capped | effects.reasons


def compute_temperature_c(
    temp_c: NDArray[np.float64], power: NDArray[np.float64], body: GpuTraits, effects: Effects, dt_s: float
) -> NDArray[np.float64]:
    """Return (node, GPU) temperature in °C after `dt_s` at this power.

    It approaches its equilibrium exponentially, with each GPU's time constant.
    """
    target = body.inlet_c + body.resistance_c_per_w * power * np.interp(power, FAN_AT_W, FAN_WARMER)
    relaxed = temp_c + (target - temp_c) * -np.expm1(-dt_s / body.tau_s)
    return np.maximum(relaxed, effects.hot_c)


def is_computing(phase: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return (n,) whether GPUs compute in each of the phases."""
    return np.isin(phase, (JobPhase.WARMUP, JobPhase.STEADY, JobPhase.EVALUATION))
