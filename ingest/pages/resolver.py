"""The base class of resolvers, which convert the lines of an exporter into series."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.node_names import is_node_name
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.gpus import GpuInventory
from fleetcast.ingest.machines import resolve_node_name
from fleetcast.ingest.node_names import find_known_name
from fleetcast.ingest.pages.text import Found, Target


class Resolver(ABC):
    """A resolver for the metric names of one exporter. `together`: names whose lines make one sample."""

    names: frozenset[str] = frozenset()  # that it reads, in the exporter's own spelling
    together: frozenset[str] = frozenset()

    def __init__(self, entities: Entities, inventory: GpuInventory) -> None:
        self.entities = entities
        self.inventory = inventory

    @classmethod
    @abstractmethod
    def claims(cls, name: str) -> bool:
        """Return whether a metric of this name belongs to this exporter, read or not."""

    @classmethod
    def reads(cls, name: str) -> bool:
        """Return whether the catalogue may contain a series of this name."""
        return cls.claims(name)

    @abstractmethod
    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Found:
        """Return the series of a sample whose name this resolver claims.

        Returns a SkipRule if a rule skips the line, and None if the name is unknown. Raises RecordError if the
        labels are bad.
        """

    def find_node(self, labels: Mapping[str, str], target: Target) -> str:
        """Return the fleet's name of the node that a line describes. Raises RecordError.

        See `fleetcast.ingest.machines.resolve_node_name`.
        """
        label = labels.get("Hostname") or labels.get("hostname", "")
        return target.register_node_name(resolve_node_name(label, target), self.entities)

    def find_gpu_node(self, labels: Mapping[str, str], target: Target, index: int, uuid: str) -> str:
        """Return the node that contains a GPU, identified by the UUID of its board. Raises RecordError.

        See `fleetcast.ingest.machines.MachineNames`.
        """
        stated = self.find_stated_node(labels, target)
        if not is_node_name(stated):
            return target.register_node_name(stated, self.entities)
        return target.register_node_name(
            self.inventory.machines.record_board(stated, index, uuid, target), self.entities
        )

    def find_stated_node(self, labels: Mapping[str, str], target: Target) -> str:
        """Return the fleet's name of the node that a line states, without checking that the name is valid."""
        label = labels.get("Hostname") or labels.get("hostname", "")
        return find_known_name(resolve_node_name(label, target), self.entities[EntityKind.NODE])
