"""The base class of resolvers: what the lines of one exporter stand for."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from fleet.entities import Entities
from fleet.node_names import is_node_name
from fleet.samples import EntityKind
from ingest.gpus import GpuInventory
from ingest.machines import stated_node
from ingest.node_names import known_name
from ingest.pages.text import Found, Target


class Resolver(ABC):
    """One exporter's metric names. `together`: names that make one sample."""

    names: frozenset[str] = frozenset()  # that it reads, in the exporter's own spelling
    together: frozenset[str] = frozenset()

    def __init__(self, entities: Entities, inventory: GpuInventory) -> None:
        self.entities = entities
        self.inventory = inventory

    @classmethod
    @abstractmethod
    def claims(cls, name: str) -> bool:
        """Return whether a metric of this name is this exporter's, read or not."""

    @classmethod
    def reads(cls, name: str) -> bool:
        """Return whether a series of this name may be in the catalogue."""
        return cls.claims(name)

    @abstractmethod
    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Found:
        """Return the series of a claimed name, the rule that leaves the line out, or None for an unknown name.

        Raises RecordError for its labels.
        """

    def node(self, labels: Mapping[str, str], target: Target) -> str:
        """Return the node that a line is about (`ingest.machines.stated_node`). Raises RecordError."""
        label = labels.get("Hostname") or labels.get("hostname", "")
        return target.register(stated_node(label, target), self.entities)

    def gpu_node(self, labels: Mapping[str, str], target: Target, index: int, uuid: str) -> str:
        """Return the node of a GPU, which its board's UUID proves (`MachineNames.place`). Raises RecordError."""
        label = labels.get("Hostname") or labels.get("hostname", "")
        stated = known_name(stated_node(label, target), self.entities[EntityKind.NODE])
        if not is_node_name(stated):
            return target.register(stated, self.entities)
        return target.register(self.inventory.machines.place(stated, index, uuid, target), self.entities)
