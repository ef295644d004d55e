"""The sensors of all GPUs, ports and hosts, whose readings the exporters show.

Between steps, counters grow at a constant rate.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.simulator.faults.effects import Bump, Effects
from fleetcast.simulator.hardware import physics
from fleetcast.simulator.hardware.gangs import RunningGangs
from fleetcast.simulator.hardware.telemetry import (
    CPU_MODES,
    GPU_FIELDS,
    GPU_ROW,
    HOST_FIELDS,
    HOST_ROW,
    PORT_FIELDS,
    PORT_ROW,
    SATURATES_AT,
)
from fleetcast.simulator.hardware.workload import JobPhase

FB_TOTAL_MIB = 81_559.0
FB_RESERVED_MIB = 576.0
NOISE_TAU_S = 20.0
RETRANSMITTED = 0.01  # packets sent again for each congestion notification
GIB = 1024.0**3
HOST_MEMORY_BYTES = 2048 * GIB

Values = NDArray[np.float64]
_GPU_COUNTERS = np.array([field.type == "counter" for field in GPU_FIELDS])
_PORT_COUNTERS = np.array([field.type == "counter" for field in PORT_FIELDS])
_HOST_COUNTERS = np.array([field.type == "counter" for field in HOST_FIELDS])
_VOLATILE = [
    GPU_ROW[name]
    for name in (
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
        "DCGM_FI_DEV_XID_ERRORS",
        "DCGM_FI_DEV_POWER_VIOLATION",
        "DCGM_FI_DEV_THERMAL_VIOLATION",
        "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    )
]


class Sensors:
    """The readings of all sensors of a fleet.

    `gpu`: (field, node, GPU). `port`: (field, node, port). `host`: (field, node). `cpu`: (mode, node) in seconds.
    """

    def __init__(self, nodes: int, gpus: int, seed: int) -> None:
        rng = np.random.default_rng([seed, 1])
        self._rng = np.random.default_rng([seed, 2])
        self.body = physics.GpuTraits.draw(rng, nodes, gpus)
        self.gpu = np.zeros((len(GPU_FIELDS), nodes, gpus))
        self.port = np.zeros((len(PORT_FIELDS), nodes, gpus))
        self.host = np.zeros((len(HOST_FIELDS), nodes))
        self.cpu = np.zeros((len(CPU_MODES), nodes))
        self._gpu_rate, self._port_rate = np.zeros_like(self.gpu), np.zeros_like(self.port)
        self._host_rate, self._cpu_rate = np.zeros_like(self.host), np.zeros_like(self.cpu)
        self._noise = self._rng.standard_normal((nodes, gpus))
        self._temp_c = self.body.inlet_c + self.body.resistance_c_per_w * self.body.idle_w
        self._fill_constants(rng)

    def grow_counters(self, dt_s: float) -> None:
        """Increase the counters for `dt_s` seconds at the rates of the last step.

        Classic port counters stop at their largest value.
        """
        self.gpu[_GPU_COUNTERS] += self._gpu_rate[_GPU_COUNTERS] * dt_s
        self.port[_PORT_COUNTERS] += self._port_rate[_PORT_COUNTERS] * dt_s
        self.host[_HOST_COUNTERS] += self._host_rate[_HOST_COUNTERS] * dt_s
        self.cpu += self._cpu_rate * dt_s
        for name, largest in SATURATES_AT.items():
            np.minimum(self.port[PORT_ROW[name]], largest, out=self.port[PORT_ROW[name]])

    def apply_effects(self, effects: Effects) -> None:
        """Apply the single changes of this step: counters jump or restart, and gauges are set."""
        for node, gpu in effects.resets:
            self.gpu[_VOLATILE, node, slice(None) if gpu < 0 else gpu] = 0.0
        for bump in effects.bumps:
            self._apply_bump(bump)

    def update(
        self,
        gangs: RunningGangs,
        phase: NDArray[np.int64],
        factor: Values,
        effects: Effects,
        now_ms: int,
        dt_s: float,
    ) -> None:
        """Update the gauges, and the rates of the counters, after a step of `dt_s` seconds.

        `phase`: (slots,) JobPhase. `factor`: (slots,) slowdown of each job.
        """
        keep = float(np.exp(-dt_s / NOISE_TAU_S))
        fresh = self._rng.standard_normal(self._noise.shape)
        self._noise = keep * self._noise + np.sqrt(1 - keep**2) * fresh
        activity = physics.compute_activity(gangs, phase, factor, effects)
        power = physics.compute_power_w(gangs, self.body, activity, effects, self._noise, now_ms)
        self._temp_c = physics.compute_temperature_c(self._temp_c, power, self.body, effects, dt_s)
        sent = self._update_port_rates(gangs, activity, factor, effects)
        self._update_gpu_state(gangs, power, effects)
        self._update_gpu_activity(gangs, activity, effects, sent, now_ms)
        self._update_host_metrics(power, activity, effects)

    def extrapolate_gpu_values(self, node: int, ahead_s: float) -> Values:
        """Return (field, GPU) the values of one node's GPUs, with counters extrapolated by `ahead_s` seconds."""
        return self.gpu[:, node] + self._gpu_rate[:, node] * ahead_s

    def extrapolate_host_values(self, node: int, ahead_s: float) -> tuple[Values, Values, Values]:
        """Return the (field, port), (mode,) and (field,) values of one node's ports, CPUs and host.

        Counters are extrapolated by `ahead_s` seconds.
        """
        return (
            self.port[:, node] + self._port_rate[:, node] * ahead_s,
            self.cpu[:, node] + self._cpu_rate[:, node] * ahead_s,
            self.host[:, node] + self._host_rate[:, node] * ahead_s,
        )

    def _fill_constants(self, rng: np.random.Generator) -> None:
        shape = self._noise.shape
        self._set_gpu_values("DCGM_FI_DEV_MEM_CLOCK", 2619.0)
        self._set_gpu_values("DCGM_FI_DEV_PCIE_MAX_LINK_GEN", 5.0)
        self._set_gpu_values("DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH", 16.0)
        self._set_gpu_values("DCGM_FI_DEV_FB_RESERVED", FB_RESERVED_MIB)
        self._set_gpu_values("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", rng.uniform(1e12, 3e12, shape))
        self._set_gpu_values("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", rng.poisson(0.3, shape))
        self._set_gpu_values("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", rng.poisson(0.2, shape))
        self._set_gpu_values("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", rng.random(shape) < 0.02)
        for name, mean in (("link_downed_total", 1.0), ("symbol_error_total", 0.5)):
            self.port[PORT_ROW[name]] = rng.poisson(mean, shape)
        self.port[PORT_ROW["excessive_buffer_overrun_errors_total"]] = np.where(rng.random(shape) < 0.2, 15, 0)
        for name in ("port_data_received_bytes_total", "port_data_transmitted_bytes_total"):
            self.port[PORT_ROW[name]] = rng.uniform(1e13, 9e14, shape)
        for name in ("port_packets_received_total", "port_packets_transmitted_total"):
            self.port[PORT_ROW[name]] = rng.uniform(3e9, 2e11, shape)
        self.cpu[:] = rng.uniform(1e3, 1e5, self.cpu.shape)
        self.host[HOST_ROW["node_memory_MemTotal_bytes"]] = HOST_MEMORY_BYTES

    def _set_gpu_values(self, name: str, value: NDArray[Any] | float) -> None:
        self.gpu[GPU_ROW[name]] = value

    def _set_gpu_rate(self, name: str, value: Values) -> None:
        self._gpu_rate[GPU_ROW[name]] = value

    def _apply_bump(self, bump: Bump) -> None:
        table, rows = (self.gpu, GPU_ROW) if bump.table == "gpu" else (self.port, PORT_ROW)
        row = rows[bump.field]
        value = bump.amount if bump.sets else table[row, bump.node, bump.unit] + bump.amount
        table[row, bump.node, bump.unit] = min(value, SATURATES_AT.get(bump.field, np.inf))

    def _update_gpu_state(self, gangs: RunningGangs, power: Values, effects: Effects) -> None:
        """Update clocks, temperatures, power, throttling, the PCIe link and errors of the GPUs."""
        self._set_gpu_values("DCGM_FI_DEV_SM_CLOCK", physics.compute_clock_mhz(gangs, self.body, effects))
        self._set_gpu_values("DCGM_FI_DEV_GPU_TEMP", self._temp_c)
        self._set_gpu_values("DCGM_FI_DEV_MEMORY_TEMP", self._temp_c + 4.0 + 0.01 * power)
        self._set_gpu_values("DCGM_FI_DEV_POWER_USAGE", power)
        self._set_gpu_values("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", effects.power_limit_w)
        self._set_gpu_values("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", physics.compute_event_reasons(gangs, power, effects))
        self._set_gpu_values("DCGM_FI_DEV_PCIE_LINK_GEN", np.where(gangs.slot > 0, effects.link_gen, 1.0))
        self._set_gpu_values("DCGM_FI_DEV_PCIE_LINK_WIDTH", effects.link_width)
        self._set_gpu_rate("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", power * 1000.0)
        self._set_gpu_rate("DCGM_FI_DEV_POWER_VIOLATION", effects.power_share * 1e9)
        self._set_gpu_rate("DCGM_FI_DEV_THERMAL_VIOLATION", effects.thermal_share * 1e9)
        self._set_gpu_rate("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", effects.sbe_per_s)
        self._set_gpu_rate("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", effects.replays_per_s)

    def _update_gpu_activity(
        self, gangs: RunningGangs, activity: physics.Activity, effects: Effects, sent: Values, now_ms: int
    ) -> None:
        """Update utilisation, activities, memory and traffic of the GPUs."""
        slot = gangs.slot
        wobble = 1.0 + 0.01 * self._noise
        for name, source in (
            ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", activity.util * np.minimum(activity.busy * 1.2, 1.0)),
            ("DCGM_FI_PROF_SM_ACTIVE", gangs.get_levels("sm_active")[slot] * activity.busy * wobble),
            ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", gangs.get_levels("tensor_active")[slot] * activity.busy * wobble),
            ("DCGM_FI_PROF_DRAM_ACTIVE", gangs.get_levels("dram_active")[slot] * activity.work * wobble),
        ):
            self._set_gpu_values(name, np.clip(source, 0.0, 1.0))
        self._set_gpu_values(
            "DCGM_FI_DEV_GPU_UTIL", np.round(100 * np.clip(activity.util * (1 + 0.01 * self._noise), 0, 1))
        )
        dram = self.gpu[GPU_ROW["DCGM_FI_PROF_DRAM_ACTIVE"]]
        self._set_gpu_values("DCGM_FI_DEV_MEM_COPY_UTIL", np.minimum(np.round(129 * dram), 100))
        nvlink = gangs.get_levels("nvlink_bytes_per_s")[slot] * activity.nvlink * wobble
        self._set_gpu_values("DCGM_FI_PROF_NVLINK_TX_BYTES", nvlink)
        self._set_gpu_values("DCGM_FI_PROF_NVLINK_RX_BYTES", nvlink)
        link = physics.compute_pcie_capacity(effects)
        for name, level in (("TX", "pcie_tx_bytes_per_s"), ("RX", "pcie_rx_bytes_per_s")):
            asked = 6e5 + gangs.get_levels(level)[slot] * activity.pcie * wobble + sent
            self._set_gpu_values(f"DCGM_FI_PROF_PCIE_{name}_BYTES", np.minimum(asked, link))
        self._update_gpu_memory(gangs, activity, now_ms)

    def _update_gpu_memory(self, gangs: RunningGangs, activity: physics.Activity, now_ms: int) -> None:
        loaded = np.clip(gangs.compute_age_s(now_ms) / np.maximum(gangs.get_levels("loading_s"), 1.0), 0.02, 1.0)
        held = (gangs.get_levels("memory_mib") * loaded)[gangs.slot]
        used = np.where(activity.phase == JobPhase.EMPTY, self.body.idle_mib, held)
        self._set_gpu_values("DCGM_FI_DEV_FB_USED", used)
        self._set_gpu_values("DCGM_FI_DEV_FB_FREE", FB_TOTAL_MIB - FB_RESERVED_MIB - used)

    def _update_port_rates(
        self, gangs: RunningGangs, activity: physics.Activity, factor: Values, effects: Effects
    ) -> Values:
        """Update the port counters' rates. Returns (node, port) the bytes/s that each port sends.

        A step exchanges the same bytes through each port of a gang, however slow one of them is.
        """
        wobble = self.body.port_skew * (1 + 0.002 * self._noise)
        sent = physics.compute_port_traffic(gangs) * activity.ib * wobble
        sent = np.where(np.isin(gangs.slot, physics.find_stalled_slots(gangs, effects)), 0.0, sent)
        waits = np.minimum(0.01 + 0.2 * (1 - 1 / factor[gangs.slot]) + effects.port_wait, 0.95)
        self._port_rate[PORT_ROW["port_transmit_wait_total"]] = (
            np.where(sent > 0, waits, 0.0) * physics.WAIT_TICKS_PER_S
        )
        up = ~effects.port_down
        for direction, skew in (("received", 1.001), ("transmitted", 1.0)):
            total = (sent * skew + 80.0) * up
            self._port_rate[PORT_ROW[f"port_data_{direction}_bytes_total"]] = total
            self._port_rate[PORT_ROW[f"port_packets_{direction}_total"]] = total / physics.PACKET_BYTES
        self._port_rate[PORT_ROW["symbol_error_total"]] = effects.symbols_per_s
        self._port_rate[PORT_ROW["rp_cnp_packets_handled_total"]] = effects.cnp_per_s
        self._port_rate[PORT_ROW["roce_adp_retransmits_total"]] = RETRANSMITTED * effects.cnp_per_s
        self.port[PORT_ROW["state_id"]] = np.where(up, 4, 1)
        self.port[PORT_ROW["physical_state_id"]] = np.where(up, 5, 2)
        self.port[PORT_ROW["rate_bytes_per_second"]] = effects.port_speed
        return sent

    def _update_host_metrics(self, power: Values, activity: physics.Activity, effects: Effects) -> None:
        """Update CPU seconds, pressure, load, memory and chassis power of the hosts.

        The chassis draws 2.1 kW if idle and 8.1 kW if busy.
        """
        busy = activity.work.mean(axis=1)
        writes = (activity.phase == JobPhase.CHECKPOINT).mean(axis=1)
        rates = {
            "user": 0.02 + 0.12 * busy,
            "system": 0.01 + 0.03 * busy,
            "iowait": 0.001 + 0.08 * writes,
            "softirq": 0.001 + 0.004 * busy,
            "steal": effects.steal,
        }
        for mode, rate in rates.items():
            self._cpu_rate[CPU_MODES.index(mode)] = rate
        self._cpu_rate[CPU_MODES.index("idle")] = 1.0 - sum(rates.values())
        self._host_rate[HOST_ROW["node_pressure_cpu_waiting_seconds_total"]] = (
            0.002 + 0.006 * busy + 1.5 * effects.steal
        )
        self._host_rate[HOST_ROW["node_pressure_io_waiting_seconds_total"]] = 0.001 + 0.1 * writes
        self.host[HOST_ROW["node_load1"]] = 3.0 + 16.0 * busy + 128 * effects.steal
        self.host[HOST_ROW["node_memory_MemAvailable_bytes"]] = HOST_MEMORY_BYTES * (0.93 - 0.3 * busy)
        self.host[HOST_ROW["node_hwmon_power_average_watt"]] = np.round((1450 + 1.17 * power.sum(axis=1)) / 25) * 25
