"""Kinds of telemetry that some sites lack. They can be left out of runs before these are judged.

default   GPU metrics that dcgm-exporter exports only when asked to (etc/default-counters.csv of 3.x and 4.x)
ib        everything of InfiniBand ports
xid       XID codes: some images of the exporter lack them, and the kernel log is not read
prof      profiling metrics (DCGM fields from 1001 on), which need a licence or permission from another tool
host      node_exporter's metrics of CPUs, memory, pressure, disks and the chassis
"""

from collections.abc import Callable, Collection

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.metrics import METRICS, Metric
from fleetcast.fleet.samples import EntityKind

# What etc/default-counters.csv has uncommented, of what the catalogue knows.
DEFAULT_COUNTERS = frozenset(
    {
        *("sm_clock_mhz", "mem_clock_mhz", "memory_temp_c", "gpu_temp_c", "power_w", "energy_j", "pcie_replays"),
        *("gpu_util", "mem_copy_util", "encoder_util", "decoder_util", "xid", "fb_free_bytes", "fb_used_bytes"),
        *("remapped_rows_uncorrectable", "remapped_rows_correctable", "row_remap_failure"),
        *("graphics_active", "tensor_active", "dram_active", "pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s"),
    }
)
SCRAPES = frozenset({"scrape_up", "scrape_duration_s", "gpus_reported"})  # which our own scraper measures
PROFILING_FIELDS = 1000
GPUS = (EntityKind.GPU, EntityKind.GPU_INSTANCE)
DROPS: dict[str, Callable[[Metric], bool]] = {
    "default": lambda metric: metric.kind in GPUS and metric.name not in DEFAULT_COUNTERS,
    "ib": lambda metric: metric.kind is EntityKind.PORT or metric.name == "ports_reported",
    "xid": lambda metric: metric.name == "xid",
    "prof": lambda metric: (metric.dcgm_id or 0) > PROFILING_FIELDS,
    "host": lambda metric: metric.kind is EntityKind.NODE and metric.name not in SCRAPES | {"ports_reported"},
}


def find_dropped_metrics(drops: Collection[str]) -> frozenset[Metric]:
    """Return the metrics that belong to any kind of telemetry in `drops`.

    Raises ConfigError that names an unknown kind.

    >>> sorted(metric.name for metric in find_dropped_metrics(["xid"]) if metric.kind is EntityKind.GPU)
    ['xid']
    """
    for name in drops:
        if name not in DROPS:
            raise ConfigError(f"--drop {name!r}: expected one of {', '.join(DROPS)}")
    every = (metric for metrics in METRICS.values() for metric in metrics)
    return frozenset(metric for metric in every if any(DROPS[name](metric) for name in drops))
