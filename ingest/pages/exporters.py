"""Every exporter we read, behind one `Resolve`: one row of RESOLVERS each."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fleet.entities import Entities
from fleet.samples import EntityKind
from ingest.gpu_labels import job_label
from ingest.gpus import GpuInventory
from ingest.pages.amd import AmdResolver
from ingest.pages.dcgm import DcgmResolver
from ingest.pages.host import HostResolver
from ingest.pages.infiniband import InfinibandResolver
from ingest.pages.resolver import Resolver
from ingest.pages.serving import ServingResolver
from ingest.pages.text import Target
from ingest.series import Series

GPUS = (EntityKind.GPU, EntityKind.GPU_INSTANCE)
RESOLVERS: tuple[type[Resolver], ...] = (DcgmResolver, HostResolver, ServingResolver, InfinibandResolver, AmdResolver)


class ExporterResolver:
    """One for all targets of a process: the first row of RESOLVERS that claims a name says what it stands for."""

    def __init__(self, entities: Entities) -> None:
        self.inventory = GpuInventory()
        self._resolvers = [make(entities, self.inventory) for make in RESOLVERS]

    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Series | None:
        for resolver in self._resolvers:
            if resolver.claims(name):
                series = resolver(name, labels, target)
                return series if series is None or series.kind not in GPUS else _labelled(series, labels)
        return None

    def unknown(self) -> dict[str, int]:
        """Names that exporters of ours have and we do not read → how often they were resolved."""
        return {name: count for resolver in self._resolvers for name, count in resolver.unknown.items()}


def _labelled(series: Series, labels: Mapping[str, str]) -> Series:
    """The series of a GPU with the job that its labels name, if they do."""
    label = job_label(labels)
    return series if label is None else replace(series, label=label, divided=bool(labels.get("GPU_I_ID")))


def names_read(names: Iterable[str]) -> list[str]:
    """Those of `names` that some series of the catalogue may come from; what makes one sample is joined by `|`."""
    samples: dict[str, list[str]] = {}
    for name in names:
        for resolver in RESOLVERS:
            if resolver.reads(name):
                samples.setdefault(min(resolver.together) if name in resolver.together else name, []).append(name)
    return ["|".join(parts) for parts in samples.values()]
