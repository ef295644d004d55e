"""Every exporter we read, behind one `Resolve`: DCGM and serving engines by the prefix of their names, hosts, ports."""

from collections.abc import Mapping

from fleet.entities import Entities
from ingest.dcgm import DcgmResolver, GpuInventory
from ingest.host import HOST_NAMES, HostResolver
from ingest.infiniband import InfinibandResolver
from ingest.series import Series
from ingest.serving import PREFIXES, ServingResolver
from ingest.text import Target


class ExporterResolver:
    """One for all targets of a process; the decoders' caches hold what it answered."""

    def __init__(self, entities: Entities) -> None:
        self.inventory = GpuInventory()
        self.dcgm = DcgmResolver(entities, self.inventory)
        self._ports = InfinibandResolver(entities)
        self._hosts = HostResolver(entities)
        self._served = ServingResolver(entities)

    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Series | None:
        if name.startswith("DCGM_"):
            return self.dcgm(name, labels, target)
        if name in HOST_NAMES:
            return self._hosts(name, labels, target)
        if name.startswith(PREFIXES):
            return self._served(name, labels, target)
        return self._ports(name, labels, target)
