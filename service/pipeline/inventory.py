"""The topology of the fleet, made from files, schedulers, and the GPUs that exporters count."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.machines import is_local_name
from fleetcast.ingest.node_names import find_known_name, find_or_register_node
from fleetcast.ingest.topology.load import merge_specs


class FleetInventory:
    """The maker of each generation of the topology.

    Facts from files override facts from schedulers. If exporters count more GPUs, their number wins.
    faults: the errors for nodes that could not be registered. The caller removes them.
    """

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
        """Return the next generation of the topology, or `before` if nothing has changed.

        This registers nodes with GPUs that schedulers report. models: node → GPU model. gpus: node → GPUs that
        other pipelines counted. stated: node → NodeSpec from the schedulers.
        """
        stated, gpus = stated or {}, gpus or {}
        if stated != self._stated:
            self._stated = stated
            self._register_other_names()
            self._register_nodes()
        nodes, boards = self._entities[EntityKind.NODE], self._entities[EntityKind.GPU]
        news = len(nodes), nodes.alias_changes, len(boards), boards.moves, models, gpus, stated
        if news == self._news:
            return before
        self._news = news
        facts: dict[str, NodeSpec] = {}
        for name, spec in stated.items():
            known = find_known_name(name, nodes)
            facts[known] = merge_node_specs(facts[known], spec) if known in facts else spec
        specs = [_merge_node_facts(name, self._files.get(name), facts.get(name)) for name in nodes.names]
        placed = [name in self._files or name in facts for name in nodes.names]
        counts = {**dict.fromkeys(count_gpus_by_node(boards.names), 0), **count_gpus_by_node(boards.owned_names)}
        for node, count in gpus.items():
            counts[node] = max(count, counts.get(node, 0))
        base = Topology.build(specs, placed=placed, generation=before.generation, hosts=before.hosts)
        found = base.update_gpu_counts(counts, models)
        return before if found.nodes == before.nodes and placed == before.placed.tolist() else found

    def _register_other_names(self) -> None:
        """Register the host names and addresses that schedulers report as aliases of their nodes.

        If nodes of two sources share a name, they are one machine. A topology file decides the machine's name.
        Without a file, one scheduler may have pods that run the nodes of the other. Then the scheduler with the
        pods decides. Otherwise, the first source decides. A name that would be an alias of two machines becomes
        an alias of neither.
        """
        found: dict[str, str] = {}
        claims: dict[str, tuple[str, str]] = {}  # name → the fleet's name of the node that has it, and its source
        shared: set[str] = set()
        for name, spec in sorted(self._stated.items(), key=lambda row: not row[1].lent_gpus):
            names = [one for one in (name, *spec.other_names) if one == name or self._may_be_other_name(one, spec)]
            joined = (claims[one][0] for one in names if one in claims and claims[one][1] != spec.source)
            known = next((one for one in names if one in self._files), None) or next(joined, name)
            for one in names:
                claims.setdefault(one, (known, spec.source))
                if one != known and found.setdefault(one, known) != known:
                    shared.add(one)
        self._entities[EntityKind.NODE].replace_aliases(
            {other: name for other, name in found.items() if other not in shared}
        )

    def _may_be_other_name(self, name: str, spec: NodeSpec) -> bool:
        """Return whether a name may be an alias of this node.

        A loopback name may not. A name that another node of the same source has may not either.
        """
        return not is_local_name(name) and (name not in self._stated or self._stated[name].source != spec.source)

    def _register_nodes(self) -> None:
        """Register the nodes with GPUs that schedulers report.

        The limit on unknown nodes does not apply to them.
        """
        for name, spec in self._stated.items():
            if spec.gpus:
                try:
                    find_or_register_node(name, self._entities, is_listed=True)
                except RecordError as error:
                    self.faults.append(error)


def merge_node_specs(one: NodeSpec, other: NodeSpec) -> NodeSpec:
    """Merge the facts of two schedulers about one machine.

    The merged node lends no GPUs. If pods of one scheduler run the nodes of the other, the other scheduler
    reports the jobs in these pods.
    """
    return replace(merge_specs(one, other), lent_gpus=0)


def _merge_node_facts(name: str, file: NodeSpec | None, stated: NodeSpec | None) -> NodeSpec:
    """Merge the facts about a node from a topology file and from schedulers.

    name: the name of the node in the fleet.
    """
    found = NodeSpec(name) if stated is None else replace(stated, name=name)
    return found if file is None else merge_specs(file, found)


def count_gpus_by_node(names: Iterable[str]) -> dict[str, int]:
    """Return node → number of its GPUs. names: GPUs as NODE/GPU."""
    counts: dict[str, int] = {}
    for name in names:
        node, _, index = name.rpartition("/")
        if index.isdigit():
            counts[node] = max(counts.get(node, 0), int(index) + 1)
    return counts
