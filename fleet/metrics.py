"""The closed catalogue of metrics: name, unit, gauge or counter, entity kind, DCGM field id.

Exporters rename DCGM fields between versions, so the id identifies them. Other vendors' exporters fill
the same rows by name. Ratios are 0..1, memory is in bytes, and times are in seconds. `ingest/` converts
all values to these units. A counter is stored as a rate per second. Counters of `events` also store their
raw increments in windows.

A gauge has limits that no working hardware reaches. So a number beyond the limits is in another unit, or is no
measurement.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.samples import EntityKind

GAUGE = "gauge"
COUNTER = "counter"


LARGEST_VALUE = 1e30  # beyond it a value is garbage, and float32 is near its end


@dataclass(frozen=True, slots=True)
class Limits:
    """The range of values that a gauge can have in its unit, both ends included.

    0 is always possible, because a missing sensor reads 0.

    mistaken: units that exporters use instead, as (name, scale, offset): value = scale * reported +
    offset.
    """

    low: float
    high: float
    mistaken: tuple[tuple[str, float, float], ...] = ()

    def guess_unit(self, value: float) -> tuple[str, float] | None:
        """Return the probable unit of a value beyond the limits, and the value converted to our unit.

        Returns None if no unit fits.

        >>> LIMITS["°C"].guess_unit(131.0), LIMITS["MHz"].guess_unit(1.98e9)
        (('°F', 55.0), ('Hz', 1980.0))
        """
        meant = ((unit, round(scale * value + offset, 6)) for unit, scale, offset in self.mistaken)
        return next(((unit, number) for unit, number in meant if self.low <= number <= self.high), None)


_TIB = 2.0**40
# By unit, or by name where a metric is narrower than its unit.
LIMITS = {
    # Silicon shuts down at 90 to 110 °C and its memory is rated to 105; no machine room is colder than -40.
    "°C": Limits(-40.0, 120.0, (("°F", 5 / 9, -160 / 9), ("K", 1.0, -273.15), ("m°C", 1e-3, 0.0))),
    # SM clocks end near 3 GHz, those of graphics memory near 14 GHz.
    "MHz": Limits(0.0, 20_000.0, (("kHz", 1e-3, 0.0), ("Hz", 1e-6, 0.0))),
    # A powered board draws 5 W (A2) to 120 W (MI300X) in idle, and 1,400 W (B300) at most: 1.2 is of a board in kW.
    "W": Limits(2.0, 5000.0, (("kW", 1e3, 0.0), ("mW", 1e-3, 0.0))),
    "bmc_power_w": Limits(10.0, 200_000.0, (("kW", 1e3, 0.0), ("mW", 1e-3, 0.0))),  # to a whole rack
    # Hardware counters of a window measure some percent above 1.
    "ratio": Limits(0.0, 1.05, (("%", 0.01, 0.0),)),
    "lanes": Limits(0.0, 32.0),
    "generation": Limits(0.0, 12.0),
    "B": Limits(0.0, 64 * _TIB),  # of a host; of a GPU, whose MiB become bytes at the door:
    **dict.fromkeys(
        ("fb_total_bytes", "fb_free_bytes", "fb_used_bytes", "fb_reserved_bytes"),
        Limits(0.0, 4 * _TIB, (("B where MiB are expected", 2.0**-20, 0.0),)),
    ),
    # NVLink 6 carries 3.6 TB/s a GPU, a port of 1.6 Tbit/s 0.2 TB/s.
    "B/s": Limits(0.0, 2e13),
    "speed_bytes_per_s": Limits(0.0, 3e11, (("bit/s", 0.125, 0.0),)),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the catalogue. `dcgm_id` is None if DCGM does not measure it."""

    name: str
    unit: str
    type: str
    kind: EntityKind
    dcgm_id: int | None = None

    @property
    def is_counter(self) -> bool:
        return self.type == COUNTER

    @property
    def limits(self) -> Limits | None:
        """The limits of a gauge. None for counters, and for gauges whose unit has none."""
        return None if self.is_counter else LIMITS.get(self.name, LIMITS.get(self.unit))

    @property
    def feature(self) -> str:
        """The metric's name in feature frames. A counter has the name of its rate.

        >>> [METRICS[EntityKind.GPU][find_metric_row(EntityKind.GPU, name)].feature for name in ("power_w", "energy_j")]
        ['power_w', 'energy_w']
        """
        if not self.is_counter:
            return self.name
        if self.unit == "s":
            return self.name.removesuffix("_s") + "_share"
        return self.name.removesuffix("_j") + "_w" if self.unit == "J" else f"{self.name}_per_s"


def _make_gpu_metric(name: str, unit: str, dcgm_id: int | None = None, type: str = GAUGE) -> Metric:
    return Metric(name, unit, type, EntityKind.GPU, dcgm_id)


_GPU = (
    _make_gpu_metric("sm_clock_mhz", "MHz", 100),
    _make_gpu_metric("mem_clock_mhz", "MHz", 101),
    _make_gpu_metric("clock_event_reasons", "bit mask", 112),
    _make_gpu_metric("memory_temp_c", "°C", 140),
    _make_gpu_metric("gpu_temp_c", "°C", 150),
    _make_gpu_metric("power_w", "W", 155),
    _make_gpu_metric("energy_j", "J", 156, COUNTER),
    _make_gpu_metric("pcie_replays", "events", 202, COUNTER),
    _make_gpu_metric("gpu_util", "ratio", 203),
    _make_gpu_metric("mem_copy_util", "ratio", 204),
    _make_gpu_metric("encoder_util", "ratio", 206),
    _make_gpu_metric("decoder_util", "ratio", 207),
    _make_gpu_metric("xid", "code", 230),
    _make_gpu_metric("pcie_max_link_gen", "generation", 235),
    _make_gpu_metric("pcie_max_link_width", "lanes", 236),
    _make_gpu_metric("pcie_link_gen", "generation", 237),
    _make_gpu_metric("pcie_link_width", "lanes", 238),
    _make_gpu_metric("power_violation_s", "s", 240, COUNTER),
    _make_gpu_metric("thermal_violation_s", "s", 241, COUNTER),
    _make_gpu_metric("fb_total_bytes", "B", 250),
    _make_gpu_metric("fb_free_bytes", "B", 251),
    _make_gpu_metric("fb_used_bytes", "B", 252),
    _make_gpu_metric("fb_reserved_bytes", "B", 253),
    _make_gpu_metric("ecc_sbe_volatile", "events", 310, COUNTER),
    _make_gpu_metric("ecc_dbe_volatile", "events", 311, COUNTER),
    _make_gpu_metric("ecc_sbe_aggregate", "events", 312, COUNTER),
    _make_gpu_metric("ecc_dbe_aggregate", "events", 313, COUNTER),
    _make_gpu_metric("retired_pages_sbe", "pages", 390),
    _make_gpu_metric("retired_pages_dbe", "pages", 391),
    _make_gpu_metric("retired_pages_pending", "flag", 392),
    _make_gpu_metric("remapped_rows_uncorrectable", "rows", 393),
    _make_gpu_metric("remapped_rows_correctable", "rows", 394),
    _make_gpu_metric("row_remap_failure", "flag", 395),
    _make_gpu_metric("nvlink_crc_flit_errors", "events", 409, COUNTER),
    _make_gpu_metric("nvlink_crc_data_errors", "events", 419, COUNTER),
    _make_gpu_metric("nvlink_replay_errors", "events", 429, COUNTER),
    _make_gpu_metric("nvlink_recovery_errors", "events", 439, COUNTER),
    _make_gpu_metric("graphics_active", "ratio", 1001),
    _make_gpu_metric("sm_active", "ratio", 1002),
    _make_gpu_metric("sm_occupancy", "ratio", 1003),
    _make_gpu_metric("tensor_active", "ratio", 1004),
    _make_gpu_metric("dram_active", "ratio", 1005),
    _make_gpu_metric("fp64_active", "ratio", 1006),
    _make_gpu_metric("fp32_active", "ratio", 1007),
    _make_gpu_metric("fp16_active", "ratio", 1008),
    _make_gpu_metric("pcie_tx_bytes_per_s", "B/s", 1009),
    _make_gpu_metric("pcie_rx_bytes_per_s", "B/s", 1010),
    _make_gpu_metric("nvlink_tx_bytes_per_s", "B/s", 1011),
    _make_gpu_metric("nvlink_rx_bytes_per_s", "B/s", 1012),
    _make_gpu_metric("power_limit_w", "W", 164),
)

# A MIG instance reports the profiling and memory fields of its slice; whole-GPU fields stay with the GPU.
_INSTANCE_IDS = frozenset({230, 250, 251, 252, 253, 1001, 1002, 1003, 1004, 1005, 1006, 1007, 1008})
_INSTANCE = tuple(
    Metric(metric.name, metric.unit, metric.type, EntityKind.GPU_INSTANCE, metric.dcgm_id)
    for metric in _GPU
    if metric.dcgm_id in _INSTANCE_IDS
)


def _make_port_metric(name: str, unit: str, type: str = COUNTER) -> Metric:
    return Metric(name, unit, type, EntityKind.PORT)


_PORT = (
    _make_port_metric("rx_bytes", "B"),
    _make_port_metric("tx_bytes", "B"),
    _make_port_metric("rx_packets", "packets"),
    _make_port_metric("tx_packets", "packets"),
    _make_port_metric("tx_wait", "ticks"),
    _make_port_metric("link_downed", "events"),
    _make_port_metric("link_recoveries", "events"),
    _make_port_metric("symbol_errors", "events"),
    _make_port_metric("rx_errors", "events"),
    _make_port_metric("tx_discards", "events"),
    _make_port_metric("rx_remote_physical_errors", "events"),
    _make_port_metric("integrity_errors", "events"),
    _make_port_metric("buffer_overruns", "events"),
    _make_port_metric("constraint_errors", "events"),
    _make_port_metric("state", "id", GAUGE),
    _make_port_metric("physical_state", "id", GAUGE),
    _make_port_metric("speed_bytes_per_s", "B/s", GAUGE),
    # RoCE and transport counters of the adapter itself (hw_counters): 64 bits wide, so they never stick.
    _make_port_metric("cnp_sent", "packets"),  # congestion on the way in: we ask senders to slow down
    _make_port_metric("cnp_handled", "packets"),  # congestion on the way out: we are asked to slow down
    _make_port_metric("out_of_sequence", "packets"),
    _make_port_metric("packet_seq_errors", "events"),
    _make_port_metric("ack_timeouts", "events"),
    _make_port_metric("adp_retransmits", "events"),
    _make_port_metric("rnr_naks", "packets"),
)


def _make_node_metric(name: str, unit: str, type: str = GAUGE) -> Metric:
    return Metric(name, unit, type, EntityKind.NODE)


_NODE = (
    _make_node_metric("scrape_duration_s", "s"),
    _make_node_metric("scrape_up", "flag"),
    _make_node_metric("gpus_reported", "GPUs"),
    _make_node_metric("ports_reported", "ports"),
    _make_node_metric("cpu_steal", "ratio"),
    _make_node_metric(
        "cpu_pressure", "s", COUNTER
    ),  # its rate is the share of time in which some task waited for a CPU
    _make_node_metric("bmc_power_w", "W"),
    _make_node_metric("cpu_steal_s", "s", COUNTER),  # mean over CPUs, as the next: the rate is a share of time
    _make_node_metric("cpu_idle_s", "s", COUNTER),
    _make_node_metric("memory_pressure", "s", COUNTER),
    _make_node_metric("io_pressure", "s", COUNTER),
    _make_node_metric("memory_total_bytes", "B"),
    _make_node_metric("memory_available_bytes", "B"),
    _make_node_metric(
        "numa_hits", "pages", COUNTER
    ),  # sums over NUMA nodes, NVMe drives and physical network interfaces
    _make_node_metric("numa_misses", "pages", COUNTER),
    _make_node_metric("nvme_read_bytes", "B", COUNTER),
    _make_node_metric("nvme_written_bytes", "B", COUNTER),
    _make_node_metric("nvme_busy_s", "s", COUNTER),  # mean over drives: the rate is a share of time
    _make_node_metric("net_rx_bytes", "B", COUNTER),
    _make_node_metric("net_tx_bytes", "B", COUNTER),
    _make_node_metric("net_errors", "events", COUNTER),
)

# Upper edges (ms) of histograms of the time to first token in vLLM, SGLang, TensorRT-LLM, Triton: each fills its own.
TTFT_EDGES_MS = (100, 200, 250, 400, 500, 1000, 2000, 2500, 4000, 5000, 10_000, 20_000, 40_000)


def _make_served_metric(name: str, unit: str, type: str = COUNTER) -> Metric:
    return Metric(name, unit, type, EntityKind.SERVED_MODEL)


_SERVED_MODEL = (
    _make_served_metric("requests_running", "requests", GAUGE),
    _make_served_metric("requests_waiting", "requests", GAUGE),
    _make_served_metric("kv_cache_used", "ratio", GAUGE),
    _make_served_metric("prompt_tokens", "tokens"),
    _make_served_metric("generated_tokens", "tokens"),
    _make_served_metric("requests_finished", "requests"),
    _make_served_metric("ttft_s", "s"),  # time to first token, added up over requests
    _make_served_metric("ttft_requests", "requests"),
    *(_make_served_metric(f"ttft_le_{edge}ms", "requests") for edge in TTFT_EDGES_MS),
)

METRICS: dict[EntityKind, tuple[Metric, ...]] = dict.fromkeys(EntityKind, ()) | {
    EntityKind.GPU: _GPU,
    EntityKind.GPU_INSTANCE: _INSTANCE,
    EntityKind.PORT: _PORT,
    EntityKind.NODE: _NODE,
    EntityKind.SERVED_MODEL: _SERVED_MODEL,
}

_ROWS = {(kind, metric.name): row for kind, metrics in METRICS.items() for row, metric in enumerate(metrics)}
_DCGM_ROWS = {
    (kind, metric.dcgm_id): row
    for kind, metrics in METRICS.items()
    for row, metric in enumerate(metrics)
    if metric.dcgm_id is not None
}


def find_metric_row(kind: EntityKind, name: str) -> int:
    """Return the row of a metric in `METRICS[kind]`. Raises KeyError if the catalogue lacks it.

    >>> METRICS[EntityKind.GPU][find_metric_row(EntityKind.GPU, "power_w")].dcgm_id
    155
    """
    return _ROWS[kind, name]


def find_dcgm_row(kind: EntityKind, dcgm_id: int) -> int | None:
    """Return the row of a DCGM field id in `METRICS[kind]`, or None if the catalogue lacks it."""
    return _DCGM_ROWS.get((kind, dcgm_id))


@cache
def list_plausible_ranges(kind: EntityKind) -> NDArray[np.float64]:
    """Return (2, metric) float64, the least and the largest plausible value of each metric of a kind."""
    limits = [metric.limits or Limits(-LARGEST_VALUE, LARGEST_VALUE) for metric in METRICS[kind]]
    return np.array([[row.low for row in limits], [row.high for row in limits]])


def explain_implausible_value(metric: Metric, value: float) -> str:
    """Describe a value beyond the limits, with the unit that it seems to have.

    >>> explain_implausible_value(METRICS[EntityKind.GPU][find_dcgm_row(EntityKind.GPU, 150) or 0], 131.0)
    'gpu_temp_c = 131 °C: 131 looks like °F: 55 °C'
    """
    limits = metric.limits
    found = limits.guess_unit(value) if limits else None
    measured = f"{metric.name} = {value:g} {metric.unit}: "
    if found is None:
        return measured + (f"expected {limits.low:g} to {limits.high:g}" if limits else "no measurement")
    unit, number = found
    return f"{measured}{value:g} looks like {unit}: {number:g} {metric.unit}"
