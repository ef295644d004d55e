"""The base class of resolvers: what the lines of one exporter stand for."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping

from fleet.entities import Entities
from ingest.gpus import GpuInventory
from ingest.node_names import node_name
from ingest.pages.text import Target
from ingest.series import Series

UNKNOWN_NAMES_KEPT = 1000


class Resolver(ABC):
    """One exporter's metric names. `unknown` counts those we do not read; `together`: names that make one sample."""

    together: frozenset[str] = frozenset()

    def __init__(self, entities: Entities, inventory: GpuInventory) -> None:
        self.entities = entities
        self.inventory = inventory
        self.unknown: Counter[str] = Counter()

    @classmethod
    @abstractmethod
    def claims(cls, name: str) -> bool:
        """Whether a metric of this name is this exporter's, read or not."""

    @classmethod
    def reads(cls, name: str) -> bool:
        """Whether a series of this name may be one of the catalogue."""
        return cls.claims(name)

    @abstractmethod
    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Series | None:
        """The series of a name that it claims; None where the catalogue has none. Raises RecordError for its labels."""

    def node(self, labels: Mapping[str, str], target: Target) -> str:
        """The node that a line is about: as its labels say, unless the configuration fixed it. Raises RecordError."""
        stated = "" if target.fixed else labels.get("Hostname") or labels.get("hostname", "")
        return node_name(stated or target.node, self.entities)

    def note_unknown(self, name: str) -> None:
        if name in self.unknown or len(self.unknown) < UNKNOWN_NAMES_KEPT:
            self.unknown[name] += 1
