"""Entities: append-only rows per kind.

A row is never reused, so an index stays valid for the process's life. Snapshots, archive and
answers hold names, never rows:

    node            n001                     gpu            n001/3          (node / index)
    gpu_instance    n001/3/7                 port           n001/mlx5_0/1   (node / device / port)
    pool            train                    served_model   pool/model/instance  (the model may hold '/')
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.devices import GpuDevices
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.samples import EntityKind

MAX_NAME_LENGTH = 253
MOST_NODES = 200_000
MOST_GPUS, MOST_INSTANCES, MOST_PORTS = 16, 16, 32  # of a node of the topology: GPUs, instances of one, ports


class EntityTable:
    """The rows of one kind of entity.

    `node[row]` is the node row that owns the entity (its own row for nodes), or -1.
    """

    def __init__(self, kind: EntityKind) -> None:
        self.kind = kind
        self.names: list[str] = []
        self._rows: dict[str, int] = {}
        self._of_host: dict[str, int] = {}  # first part of a node's full name -> its row, -1 where several have it
        self._of_case: dict[str, int] = {}  # a node's name in small letters -> its row, -1 where several have it
        self._node = np.full(64, -1, np.int32)
        self.moves = 0  # grows where a row loses its owner, or has one again
        self._aliases: dict[str, str] = {}
        self._pods: dict[str, tuple[str, str]] = {}  # pod of another scheduler's node → its namespace and node
        self.renames = 0  # grows where a known name becomes another name of a node, or stops being one
        self.alias_changes = 0  # grows with every change of another name, known or not

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    @property
    def node(self) -> NDArray[np.int32]:
        """The owning node row of each entity, (rows,) int32, as a read-only view."""
        view = self._node[: len(self.names)]
        view.flags.writeable = False
        return view

    @property
    def owned_names(self) -> list[str]:
        """The names of the entities that a node owns."""
        return [name for name, node in zip(self.names, self._node.tolist(), strict=False) if node >= 0]

    def remove_from_node(self, row: int) -> None:
        """Remove a row from its node, because the device is elsewhere now. `add` can assign it again."""
        self.moves += bool(self._node[row] >= 0)
        self._node[row] = -1

    def find_row(self, name: str) -> int | None:
        return self._rows.get(name)

    def replace_aliases(self, aliases: Mapping[str, str]) -> None:
        """Replace the aliases of nodes. aliases: other name → the fleet's name, as schedulers report."""
        before, self._aliases = self._aliases, dict(aliases)
        changed = [name for name in aliases.keys() | before.keys() if aliases.get(name) != before.get(name)]
        self.renames += any(name in self._rows for name in changed)
        self.alias_changes += bool(changed)

    def record_pod_alias(self, pod: str, namespace: str, node: str) -> None:
        """Record that a pod, which another scheduler treats as a node, runs on this node according to labels.

        If pods of two namespaces have the same name, the name is ambiguous and stands for no node.
        """
        known = self._pods.get(pod)
        place = (namespace, node) if known is None or known[0] == namespace else ("", pod)
        if pod != node and known != place and (known is None or known[1] != pod):
            self._pods[pod] = place
            self.renames += pod in self._rows
            self.alias_changes += 1

    def resolve_name(self, name: str) -> str:
        """Return the fleet's name of a machine. `name` may be this name or an alias."""
        if name in self._aliases:
            return self._aliases[name]
        return self._pods[name][1] if name in self._pods else name

    def find_by_short_name(self, short: str) -> str | None:
        """Return the only full name that begins with `short` and a dot, or None.

        >>> table = EntityTable(EntityKind.NODE)
        >>> table.add("n1.cluster.example"), table.find_by_short_name("n1")
        (0, 'n1.cluster.example')
        """
        row = self._of_host.get(_fold_name(short), -1)
        return None if row < 0 else self.names[row]

    def find_ignoring_case(self, name: str) -> str | None:
        """Return the only node whose name differs at most in capitals and a final dot, or None.

        Host names ignore capitals.

        >>> table = EntityTable(EntityKind.NODE)
        >>> table.add("GPU-Node01"), table.find_ignoring_case("gpu-node01."), table.find_ignoring_case("gpu-node02")
        (0, 'GPU-Node01', None)
        """
        row = self._of_case.get(_fold_name(name), -1)
        return None if row < 0 else self.names[row]

    def add(self, name: str, node: int = -1) -> int:
        """Return the row of `name`. Appends the name if it is new. node: the row of its owner, -1 for none."""
        row = self._rows.get(name)
        if row is not None:
            if node >= 0 and self._node[row] < 0 and self.kind is not EntityKind.NODE:
                self._node[row] = node
                self.moves += 1
            return row
        row = len(self.names)
        if row == len(self._node):
            self._node = np.concatenate([self._node, np.full(len(self._node), -1, np.int32)])
        self._node[row] = row if self.kind is EntityKind.NODE else node
        self.names.append(name)
        self._rows[name] = row
        if self.kind is EntityKind.NODE:
            folded = _fold_name(name)
            self._of_case[folded] = -1 if folded in self._of_case else row
            short, dot, _ = folded.partition(".")
            if dot:
                self._of_host[short] = -1 if short in self._of_host else row
        return row


def _fold_name(name: str) -> str:
    return name.lower().rstrip(".")


class DeviceRoom:
    """The limits on how many GPUs, MIG instances and ports may be registered.

    A node of the topology has room of its own: for MOST_GPUS, or more if the topology states more, and for
    MOST_INSTANCES and MOST_PORTS. All other nodes share room for `most` GPUs, and for twice as many instances
    and ports.
    """

    def __init__(self, placed: Mapping[str, int], most: int) -> None:
        """Set up the limits. placed: nodes of the topology and their number of GPUs."""
        self._placed = dict(placed)
        self._beyond: dict[str, Counter[EntityKind]] = {}  # node → its devices that share the room
        self._ports: Counter[str] = Counter()  # by node
        self.most = {EntityKind.GPU: most, EntityKind.PORT: 2 * most, EntityKind.GPU_INSTANCE: 2 * most}
        self.used: Counter[EntityKind] = Counter()

    def count_new(self, kind: EntityKind, name: str) -> None:
        """Count a newly registered device. Raises RecordError unknown_gpus if there is no room for it."""
        if self._is_beyond_limits(kind, name) and self.used[kind] >= self.most[kind]:
            used = f"{self.used[kind]:,} rows of {kind} that no topology answers for"
            raise RecordError("unknown_gpus", f"{used}, the limit; not added: {name[:80]!r}")
        self.count_existing(kind, name)

    def count_existing(self, kind: EntityKind, name: str) -> None:
        """Count a device that is already registered, even if there is no room for it."""
        node = name.partition("/")[0]
        if self._is_beyond_limits(kind, name):
            self.used[kind] += 1
            self._beyond.setdefault(node, Counter())[kind] += 1
        self._ports[node] += kind is EntityKind.PORT

    def give_own_room(self, node: str) -> None:
        """Give a node its own room from now on. Its devices no longer use the common room."""
        if node not in self._placed:
            self._placed[node] = 0
            self.used -= self._beyond.pop(node, Counter())

    def _is_beyond_limits(self, kind: EntityKind, name: str) -> bool:
        node, *parts = name.split("/")
        gpus = self._placed.get(node)
        if gpus is None:
            return True
        if kind is EntityKind.PORT:
            return self._ports[node] >= MOST_PORTS
        most = (max(gpus, MOST_GPUS), MOST_INSTANCES)
        return not all(part.isdecimal() and int(part) < below for part, below in zip(parts, most, strict=False))


class Entities:
    """The tables of all kinds of entities, for one writer: the process that decodes."""

    def __init__(self) -> None:
        self._tables = {kind: EntityTable(kind) for kind in EntityKind}
        self.devices = GpuDevices()
        self.traits: dict[str, str] = {}  # GPU → model, port → link layer: only alike devices are peers
        self.traits_learnt = 0  # grows with every new trait
        self.most_nodes = MOST_NODES  # decoders register no more; the nodes of a topology are there before them
        self.room: DeviceRoom | None = None
        self.bounds_set = 0  # grows with every new bound and every listed node, which has room of its own
        self.listed: set[str] = set()  # nodes that the operator lists, beyond those of the topology
        self._placed: Mapping[str, int] = {}

    def set_limits(self, placed: Mapping[str, int], unknown_nodes: int, unknown_gpus: int) -> None:
        """Limit new registrations beyond the nodes of a topology.

        placed: number of GPUs by node. All of these nodes get registered.
        """
        self._placed, self.bounds_set = placed, self.bounds_set + 1
        self.listed -= placed.keys()
        self.most_nodes = len(placed) + len(self.listed) + unknown_nodes
        self.room = DeviceRoom(placed, unknown_gpus)
        for node in self.listed:
            self.room.give_own_room(node)
        for kind in NODE_OWNED:
            for name in self._tables[kind].names:
                self.room.count_existing(kind, name)

    def record_listed_node(self, name: str) -> None:
        """Record that the operator lists a node, as a target or in a scheduler.

        The limits do not apply to it, because they only protect against senders.
        """
        if name not in self.listed and name not in self._placed:
            self.listed.add(name)
            self.most_nodes += 1
            self.bounds_set += 1
            if self.room is not None:
                self.room.give_own_room(name)

    def __getitem__(self, kind: EntityKind) -> EntityTable:
        return self._tables[kind]

    def find_or_add_node(self, name: str) -> int:
        """Return the node's row. Appends the node if it is unknown.

        An unknown node stays unplaced until a topology names it.
        """
        return self._tables[EntityKind.NODE].add(name)

    def add_to_node(self, kind: EntityKind, node: str, *parts: object) -> int:
        """Return the row of a node's entity. Appends the entity if it is new.

        Raises RecordError unknown_gpus if there is no room for it. parts: the parts of its name after the node.

        >>> Entities().add_to_node(EntityKind.GPU, "n001", 3)
        0
        """
        name = "/".join((node, *(str(part) for part in parts)))
        table = self._tables[kind]
        if self.room is not None and name not in table:
            self.room.count_new(kind, name)
        return table.add(name, self.find_or_add_node(node))

    def record_trait(self, name: str, trait: str) -> None:
        """Record the model of a GPU or the link layer of a port."""
        if trait and self.traits.get(name) != trait:
            self.traits[name] = trait
            self.traits_learnt += 1

    def remove_from_node(self, kind: EntityKind, name: str) -> None:
        """Remove a device from its node, if it is known, because it is elsewhere now."""
        row = self._tables[kind].find_row(name)
        if row is not None:
            self._tables[kind].remove_from_node(row)

    def remove_node_devices(self, node: str) -> None:
        """Remove all devices from a node, because its machine now has another name."""
        at = self._tables[EntityKind.NODE].find_row(node)
        for kind in NODE_OWNED if at is not None else ():
            for row in np.flatnonzero(self._tables[kind].node == at).tolist():
                self._tables[kind].remove_from_node(row)

    def dump(self) -> dict[str, list[str]]:
        """Return the names of all entities for a snapshot, by kind and in row order.

        The result also has the names of the entities without an owner.
        """
        moved = [
            f"{kind}:{name}"
            for kind in NODE_OWNED
            for name, node in zip(self._tables[kind].names, self._tables[kind].node.tolist(), strict=True)
            if node < 0
        ]
        return {**{kind.value: list(table.names) for kind, table in self._tables.items()}, DISOWNED: moved}

    @classmethod
    def load(cls, names: Mapping[str, Iterable[str]]) -> "Entities":
        """Restore the result of `dump`. Each entity gets its old row."""
        entities = cls()
        for name in names.get(EntityKind.NODE.value, ()):
            entities.find_or_add_node(name)
        for kind in EntityKind:
            if kind is EntityKind.NODE:
                continue
            for name in names.get(kind.value, ()):
                owner = name.split("/", 1)[0] if kind in NODE_OWNED else None
                entities[kind].add(name, entities.find_or_add_node(owner) if owner else -1)
        for text in names.get(DISOWNED, ()):
            kind_name, _, name = text.partition(":")
            entities.remove_from_node(EntityKind(kind_name), name)
        return entities


DISOWNED = "disowned"
NODE_OWNED = frozenset({EntityKind.GPU, EntityKind.GPU_INSTANCE, EntityKind.PORT})
