"""A resolver of node_exporter's host metrics: CPUs, pressure, memory, NUMA, NVMe, network and power.

CPU times are means over CPUs. Traffic is a sum over NVMe drives or physical interfaces, because a bond
would count twice. Pressure is the seconds in which some task waited (PSI). Power comes from the meter of
the whole board.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.resolver import Resolver
from fleetcast.ingest.pages.text import Found, Target
from fleetcast.ingest.series import Fold, Form, Series, hash_part
from fleetcast.ingest.tally import SkipRule

_NVME = re.compile(r"nvme\d+n\d+")
_PHYSICAL = re.compile(  # without bonds and representors, whose bytes pass through a port that counts them, too
    r"(?:eth|em|ib)\d+|en(?!bond)(?![a-zA-Z0-9]*pf\d+[vs]f\d+)[a-zA-Z0-9]+|p\d+p\d+|ib[sp][a-z0-9]+|hsn\d+|rdma\d+"
)
_POWER_METER = re.compile(r".*power_meter.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Reading:
    """The way to read a metric: its row, the fold of its lines, and the label that must match, if any."""

    metric: int
    fold: Fold = Fold.WHOLE
    label: str = ""
    pattern: re.Pattern[str] | None = None
    optional: bool = False  # a line without the label counts
    form: Form = Form.PLAIN


def _make_reading(
    metric: str,
    fold: Fold = Fold.WHOLE,
    label: str = "",
    pattern: re.Pattern[str] | None = None,
    optional: bool = False,
    form: Form = Form.PLAIN,
) -> _Reading:
    return _Reading(find_metric_row(EntityKind.NODE, metric), fold, label, pattern, optional, form)


_MODES = {"steal": _make_reading("cpu_steal_s", Fold.MEAN), "idle": _make_reading("cpu_idle_s", Fold.MEAN)}
_READINGS = {
    "node_pressure_cpu_waiting_seconds_total": _make_reading("cpu_pressure"),
    "node_pressure_memory_waiting_seconds_total": _make_reading("memory_pressure"),
    "node_pressure_io_waiting_seconds_total": _make_reading("io_pressure"),
    "node_memory_MemTotal_bytes": _make_reading("memory_total_bytes", form=Form.POSITIVE),
    "node_memory_MemAvailable_bytes": _make_reading("memory_available_bytes"),
    "node_memory_numa_numa_hit_total": _make_reading("numa_hits", Fold.SUM),
    "node_memory_numa_numa_miss_total": _make_reading("numa_misses", Fold.SUM),
    "node_disk_read_bytes_total": _make_reading("nvme_read_bytes", Fold.SUM, "device", _NVME),
    "node_disk_written_bytes_total": _make_reading("nvme_written_bytes", Fold.SUM, "device", _NVME),
    "node_disk_io_time_seconds_total": _make_reading("nvme_busy_s", Fold.MEAN, "device", _NVME),
    "node_network_receive_bytes_total": _make_reading("net_rx_bytes", Fold.SUM, "device", _PHYSICAL),
    "node_network_transmit_bytes_total": _make_reading("net_tx_bytes", Fold.SUM, "device", _PHYSICAL),
    "node_network_receive_errs_total": _make_reading("net_errors", Fold.SUM, "device", _PHYSICAL),
    "node_network_transmit_errs_total": _make_reading("net_errors", Fold.SUM, "device", _PHYSICAL),
    "node_hwmon_power_average_watt": _make_reading(
        "bmc_power_w", label="chip", pattern=_POWER_METER, optional=True, form=Form.POSITIVE
    ),
}
_CPU = "node_cpu_seconds_total"
_PARTS = ("cpu", "device", "node")  # labels that split a sum: CPUs, drives and interfaces, NUMA nodes
HOST_NAMES = frozenset({*_READINGS, _CPU})


class HostResolver(Resolver):
    """A resolver of node_exporter lines to series of the target's node."""

    names = HOST_NAMES
    together = frozenset({"node_network_receive_errs_total", "node_network_transmit_errs_total"})

    @classmethod
    def claims(cls, name: str) -> bool:
        return name in HOST_NAMES

    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Found:
        """Resolve a line. Skips lines of modes and devices that belong to no sample, as OTHER_PART.

        Raises RecordError if no node name is known.
        """
        reading = _MODES.get(labels.get("mode", "")) if name == _CPU else _READINGS.get(name)
        if reading is None or not _is_counted(reading, labels):
            return SkipRule.OTHER_PART
        node = self.entities.find_or_add_node(target.register_node_name(target.node, self.entities))
        part = hash_part(name, *(labels.get(label, "") for label in _PARTS)) if reading.fold else 0
        return Series(EntityKind.NODE, reading.metric, node, node, form=reading.form, fold=reading.fold, part=part)


def _is_counted(reading: _Reading, labels: Mapping[str, str]) -> bool:
    if reading.pattern is None:
        return True
    stated = labels.get(reading.label)
    return reading.optional if stated is None else reading.pattern.fullmatch(stated) is not None
