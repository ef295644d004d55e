"""Every exporter we read, behind one `Resolve`: DCGM by the prefix of its names, then ports, then the node itself."""

from collections.abc import Mapping

from fleet.entities import Entities
from fleet.metrics import metric_row
from fleet.samples import EntityKind
from ingest.dcgm import DcgmResolver, GpuInventory
from ingest.infiniband import InfinibandResolver
from ingest.nodes import node_name
from ingest.series import Series
from ingest.text import Target

# node_exporter: seconds in which some task waited for a CPU (pressure stall information); the board's power meter.
NODE_READINGS = {
    "node_pressure_cpu_waiting_seconds_total": metric_row(EntityKind.NODE, "cpu_pressure"),
    "node_hwmon_power_average_watt": metric_row(EntityKind.NODE, "bmc_power_w"),
}
_POWER_METER = "power_meter"  # the chip that sees the whole board; others are single rails


class ExporterResolver:
    """One for all targets of a process; the decoders' caches hold what it answered."""

    def __init__(self, entities: Entities) -> None:
        self.inventory = GpuInventory()
        self.dcgm = DcgmResolver(entities, self.inventory)
        self._ports = InfinibandResolver(entities)
        self._entities = entities

    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Series | None:
        if name.startswith("DCGM_"):
            return self.dcgm(name, labels, target)
        metric = NODE_READINGS.get(name)
        if metric is None:
            return self._ports(name, labels, target)
        if "chip" in labels and _POWER_METER not in labels["chip"]:
            return None
        node = self._entities.node(node_name(target.node, self._entities))
        return Series(EntityKind.NODE, metric, node, node)
