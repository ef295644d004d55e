"""The topology of the fleet, from files, from what schedulers say of nodes, and from boards that exporters count."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fleet.entities import Entities
from fleet.errors import RecordError
from fleet.samples import EntityKind
from fleet.topology import NodeSpec, Topology
from ingest.machines import is_local
from ingest.node_names import known_name, node_name
from ingest.topology.load import merged


class FleetInventory:
    """Makes each generation of a topology. Files win over schedulers, and what an exporter counts over larger numbers.
    faults: nodes that there was no room for, until the caller takes them."""

    def __init__(self, entities: Entities, files: Topology) -> None:
        self._entities = entities
        self._files = {node.name: node for node in files.nodes}
        self._stated: Mapping[str, NodeSpec] = {}
        self._news: object = None  # what the last topology was made of, besides files
        self.faults: list[RecordError] = []

    def refresh(
        self,
        before: Topology,
        models: Mapping[str, str],
        gpus: Mapping[str, int] | None = None,
        stated: Mapping[str, NodeSpec] | None = None,
    ) -> Topology:
        """Return the next generation, or `before` if nothing changed. Registers nodes with GPUs that schedulers report.

        models: node → GPU model; gpus: node → boards that other pipelines saw; stated: node → what schedulers say.
        """
        stated, gpus = stated or {}, gpus or {}
        if stated != self._stated:
            self._stated = stated
            self._learn_names()
            self._register()
        nodes, boards = self._entities[EntityKind.NODE], self._entities[EntityKind.GPU]
        news = len(nodes), nodes.alias_changes, len(boards), boards.moves, models, gpus, stated
        if news == self._news:
            return before
        self._news = news
        facts = {known_name(name, nodes): spec for name, spec in stated.items()}
        specs = [_spec(name, self._files.get(name), facts.get(name)) for name in nodes.names]
        placed = [name in self._files or name in facts for name in nodes.names]
        counts = {**dict.fromkeys(gpu_counts(boards.names), 0), **gpu_counts(boards.owned)}
        for node, count in gpus.items():
            counts[node] = max(count, counts.get(node, 0))
        base = Topology.build(specs, placed=placed, generation=before.generation, hosts=before.hosts)
        found = base.with_gpus(counts, models)
        return before if found.nodes == before.nodes and placed == before.placed.tolist() else found

    def _learn_names(self) -> None:
        """Join what is reported under host names and addresses of a node with the node.

        A topology file decides the name, else the scheduler does. A name that two nodes have stands for neither.
        """
        found: dict[str, str] = {}
        shared: set[str] = set()
        for name, spec in self._stated.items():
            names = (name, *spec.other_names)
            known = next((one for one in names if one in self._files), name)
            others = (one for one in names if one != known and (one == name or one not in self._stated))
            shared.update(other for other in others if not is_local(other) and found.setdefault(other, known) != known)
        self._entities[EntityKind.NODE].alias({other: name for other, name in found.items() if other not in shared})

    def _register(self) -> None:
        nodes = self._entities[EntityKind.NODE]
        for name, spec in self._stated.items():
            if spec.gpus and nodes.machine(name) not in nodes:
                try:
                    node_name(name, self._entities)
                except RecordError as error:
                    self.faults.append(error)


def _spec(name: str, file: NodeSpec | None, stated: NodeSpec | None) -> NodeSpec:
    """Merge what a file and a scheduler say of a node, under the fleet's name of it."""
    found = NodeSpec(name) if stated is None else replace(stated, name=name)
    return found if file is None else merged(file, found)


def gpu_counts(names: Iterable[str]) -> dict[str, int]:
    """Node → GPUs there; names: NODE/GPU."""
    counts: dict[str, int] = {}
    for name in names:
        node, _, index = name.rpartition("/")
        if index.isdigit():
            counts[node] = max(counts.get(node, 0), int(index) + 1)
    return counts
