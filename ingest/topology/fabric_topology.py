"""The domains of nodes in a fabric, from `ibnetdiscover` or from NetQ's graph in topograph's form.

    all adapters of a node at one leaf switch      rack = that leaf, as in topology.conf
    at several (a rail-optimised fabric)           rail_group = the nodes that share their leaves
    switches above                                 block = the leaves below one set of them

Two sets of switches that have more than half of their switches in common count as one, so a pulled
cable splits no group. A node's adapters are numbered by rail in the order of their names, unless its
wiring says otherwise.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from fleetcast.fleet.decode_faults import find_first_fault
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.topology import Device, Level, NodeSpec
from fleetcast.ingest.node_names import MAX_NODES, check_name, make_too_many_error
from fleetcast.ingest.topology.ibnetdiscover import Fabric, list_cabled_devices


def make_fabric_nodes(fabric: Fabric) -> list[NodeSpec]:
    """Return the nodes of an ibnetdiscover output. Raises ConfigError if it names none."""
    leaves: dict[str, set[str]] = {}
    devices: dict[str, dict[str, Device]] = {}
    for host, device, leaf, bytes_per_s in list_cabled_devices(fabric):
        leaves.setdefault(host, set()).add(leaf)
        devices.setdefault(host, {}).setdefault(device, Device(device, bytes_per_s=bytes_per_s))
    above = _find_switches_above(fabric, set().union(*leaves.values()))
    names = dict(fabric.switches)
    places = find_domains(leaves, above, names)
    if not places:
        raise ConfigError("no adapter in this ibnetdiscover output names its host")
    return [
        NodeSpec(host, domains=domains, devices=_assign_rails(devices[host].values()))
        for host, domains in places.items()
    ]


def _find_switches_above(fabric: Fabric, leaves: set[str]) -> dict[str, set[str]]:
    above: dict[str, set[str]] = {leaf: set() for leaf in leaves}
    for (guid, _), link in fabric.links.items():
        if guid in above and link.peer in fabric.switches and link.peer not in above:
            above[guid].add(link.peer)
    return above


def _assign_rails(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return devices with their rails, in the order of the numbers in their names.

    A single device has no rail.
    """
    ordered = sorted(devices, key=lambda device: _make_natural_sort_key(device.name))
    if len(ordered) == 1:
        return tuple(ordered)
    return tuple(Device(device.name, rail=rail, bytes_per_s=device.bytes_per_s) for rail, device in enumerate(ordered))


def _make_natural_sort_key(name: str) -> tuple[str, int]:
    digits = re.search(r"\d{1,9}$", name)
    return (name[: digits.start()], int(digits.group())) if digits else (name, -1)


def find_domains(
    leaves: Mapping[str, set[str]], above: Mapping[str, set[str]], names: Mapping[str, str]
) -> dict[str, dict[Level, str]]:
    """Return node → its domains, by the switches to which the node is cabled.

    leaves: node → its switches. above: switch → the switches above it. names: switch → its name.
    """
    groups = _group_similar_sets([frozenset(found) for found in leaves.values()])
    tops = _group_similar_sets([frozenset(found) for found in above.values() if found])
    places: dict[str, dict[Level, str]] = {}
    for node, found in sorted(leaves.items()):
        group = groups[frozenset(found)]
        domains = {Level.NVLINK_DOMAIN: check_name(node)}
        level = Level.RACK if len(group) == 1 else Level.RAIL_GROUP
        domains[level] = _choose_group_name(group, names)
        up = frozenset().union(*(above.get(leaf, set()) for leaf in group))
        if up:
            domains[Level.BLOCK] = _choose_group_name(tops.get(up) or up, names)
        places[node] = domains
        if len(places) > MAX_NODES:
            raise make_too_many_error(node)
    return places


def _group_similar_sets(sets: list[frozenset[str]]) -> dict[frozenset[str], frozenset[str]]:
    """Return each set → the set that represents its group.

    The most frequent sets come first. A set is compared with the earlier set with which it shares the
    most members. It joins that set's group if these members are more than half of the smaller set.
    """
    counts: dict[frozenset[str], int] = {}
    for one in sets:
        counts[one] = counts.get(one, 0) + 1
    heads: dict[str, list[frozenset[str]]] = {}  # member -> groups that hold it
    groups: dict[frozenset[str], frozenset[str]] = {}
    for one in sorted(counts, key=lambda found: (-counts[found], -len(found), min(found, default=""))):
        near = {group for member in one for group in heads.get(member, ())}
        best = max(near, key=lambda group: (len(group & one), sorted(group)), default=one)
        same = best if 2 * len(best & one) > min(len(best), len(one)) and (len(best) > 1) == (len(one) > 1) else one
        groups[one] = same
        if same is one:
            for member in one:
                heads.setdefault(member, []).append(one)
    return groups


def _choose_group_name(group: Iterable[str], names: Mapping[str, str]) -> str:
    return min(names.get(guid) or guid for guid in group)


class _Member(msgspec.Struct):
    id: str
    name: str = ""
    tier: int = -1
    device_type: str = ""


class _Tier(msgspec.Struct):
    compounded_nodes: list[_Member] = []


class _Edge(msgspec.Struct):
    src: str
    target: str


class _Graph(msgspec.Struct):
    nodes: list[_Tier]
    links: list[_Edge]


class _Compute(msgspec.Struct):
    Name: str
    DomainUUID: str = ""
    GpuIDList: list[str] = []


def is_netq_document(document: Any) -> bool:
    """Return whether a document is one of NetQ's topologyGraph.json or computeNodes.json."""
    first = document[0] if isinstance(document, list) and document else None
    return isinstance(first, dict) and ({"links", "nodes"} <= first.keys() or {"Name", "DomainUUID"} <= first.keys())


def make_netq_nodes(document: Any) -> list[NodeSpec]:
    """Return the nodes in either of NetQ's documents. Raises ConfigError."""
    try:
        if "Name" in document[0]:
            return [
                NodeSpec(
                    check_name(node.Name),
                    gpus=min(len(node.GpuIDList), 1024),
                    domains={Level.NVLINK_DOMAIN: node.DomainUUID or node.Name},
                )
                for node in msgspec.convert(document, list[_Compute])
            ]
        graphs = msgspec.convert(document, list[_Graph])
    except msgspec.ValidationError as error:
        kind = list[_Compute] if "Name" in document[0] else list[_Graph]
        raise ConfigError(f"NetQ: {find_first_fault(error, kind, document).sentence}") from None
    found = [node for graph in graphs for node in _make_graph_nodes(graph)]
    if not found:
        raise ConfigError("NetQ: no host of the graph is linked to a switch")
    return found


def _make_graph_nodes(graph: _Graph) -> list[NodeSpec]:
    members = {member.id: member for tier in graph.nodes for member in tier.compounded_nodes}
    leaves: dict[str, set[str]] = {}
    above: dict[str, set[str]] = {}
    for edge in graph.links:
        for one, other in ((edge.src, edge.target), (edge.target, edge.src)):
            low, high = members.get(one), members.get(other)
            if low is None or high is None or high.device_type != "switch":
                continue
            if low.device_type != "switch":
                leaves.setdefault(low.name or low.id, set()).add(other)
            elif low.tier < high.tier:
                above.setdefault(one, set()).add(other)
    names = {key: member.name for key, member in members.items()}
    return [NodeSpec(node, domains=domains) for node, domains in find_domains(leaves, above, names).items()]
