"""A parser of Slurm's topology.conf, topology.yaml and the output of `scontrol show topology`.

They describe the tree plugin (SwitchName, Switches, Nodes) or the block plugin (BlockName, Nodes).

    leaf switch                                   rack
    its parent ... child of the root, if one      block
                                      if more     rail_group (lowest), block (highest)
    root                                          cluster, and block if nothing lies between leaf and root

In a tree that has only leaves, a node has only a rack. Several roots are several clusters.
"""

import re
from dataclasses import dataclass

import msgspec

from fleetcast.fleet.decode_faults import find_first_fault
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.topology import Level, NodeSpec
from fleetcast.ingest.node_names import MAX_NODES, check_name_part, expand_nodes, make_too_many_error

MAX_LEVELS = 32

_ITEM = re.compile(r"^[ \t]*+(switchname|blockname)[ \t]*+=", re.IGNORECASE | re.MULTILINE)
_PAIR = re.compile(r"(?<!\w)(\w++)\s*+=\s*+(\S++)")  # possessive: a long line costs its length, not its square
_KNOWN = {
    "switchname": {"switchname", "nodes", "switches", "linkspeed", "level"},
    "blockname": {"blockname", "nodes", "blockindex", "blocksize"},
    "blocksizes": {"blocksizes"},
}


@dataclass(frozen=True, slots=True)
class _Switch:
    name: str
    nodes: tuple[str, ...]
    children: tuple[str, ...]


def is_slurm_conf(text: str) -> bool:
    return _ITEM.search(text) is not None


def parse_slurm_conf(text: str) -> list[NodeSpec]:
    """Return the nodes of a topology.conf in the order of the file.

    Raises ConfigError with the line number and the bad value.
    """
    switches: dict[str, _Switch] = {}
    blocks: dict[str, str] = {}
    named = 0
    for number, line in _join_lines(text):
        pairs = _parse_pairs(number, line)
        if "blockname" in pairs:
            named += _add_block(blocks, number, pairs)
        elif "switchname" in pairs:
            named += _add_switches(switches, number, pairs)
        if named > MAX_NODES:
            raise make_too_many_error(line)
    if blocks and switches:
        raise ConfigError("SwitchName and BlockName in one file: Slurm takes one topology plugin")
    if blocks:
        return [_make_spec(node, {Level.BLOCK: block}) for node, block in blocks.items()]
    return _make_tree_nodes(switches)


def _join_lines(text: str) -> list[tuple[int, str]]:
    """Return (number, content) of the lines without comments and empty lines.

    A line that ends in a backslash continues on the next line.
    """
    lines: list[tuple[int, str]] = []
    pending, start = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].strip()
        start = start if pending else number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        if pending + line:
            lines.append((start, pending + line))
        pending = ""
    return lines


def _parse_pairs(number: int, line: str) -> dict[str, str]:
    pairs = {key.lower(): value for key, value in _PAIR.findall(line)}
    left = _PAIR.sub("", line).strip()
    first = next((key for key in _KNOWN if key in pairs), None)
    if left or first is None:
        raise ConfigError(f"line {number}: {left or line!r}: expected SwitchName=, BlockName= or BlockSizes= first")
    unknown = pairs.keys() - _KNOWN[first]
    if unknown:
        raise ConfigError(f"line {number}: unknown key {min(unknown)!r}, expected one of {sorted(_KNOWN[first])}")
    return pairs


def _get_required(pairs: dict[str, str], key: str, number: int) -> str:
    if key not in pairs:
        raise ConfigError(f"line {number}: {key} is missing")
    return pairs[key]


def _add_block(blocks: dict[str, str], number: int, pairs: dict[str, str]) -> int:
    """Add the nodes of a block's line, and return their number. Raises ConfigError."""
    nodes = expand_nodes(_get_required(pairs, "nodes", number))
    for node in nodes:
        _assign_domain(blocks, node, check_name_part(pairs["blockname"]))
    return len(nodes)


def _add_switches(switches: dict[str, _Switch], number: int, pairs: dict[str, str]) -> int:
    """Add the switches of a line, and return the number of names that the line adds. Raises ConfigError.

    Each node or child counts once for each switch.
    """
    names = expand_nodes(pairs["switchname"])
    nodes = tuple(expand_nodes(pairs["nodes"])) if "nodes" in pairs else ()
    children = tuple(expand_nodes(pairs["switches"])) if "switches" in pairs else ()
    if "level" in pairs and children:
        nodes = ()  # `scontrol show topology` lists the nodes of a switch's children, too
    for name in names:
        if name in switches:
            raise ConfigError(f"line {number}: switch {name!r} is named twice")
        if bool(nodes) == bool(children):
            raise ConfigError(f"line {number}: switch {name!r} needs either Nodes or Switches")
        switches[name] = _Switch(name, nodes, children)
    return len(names) * (len(nodes) + len(children))


class _YamlSwitch(msgspec.Struct, frozen=True):
    """A switch in `tree: switches:` of topology.yaml."""

    switch: str
    nodes: str = ""
    children: str = ""


class _YamlBlock(msgspec.Struct, frozen=True):
    block: str
    nodes: str = ""


class _YamlTree(msgspec.Struct, frozen=True):
    switches: tuple[_YamlSwitch, ...]


class _YamlBlocks(msgspec.Struct, frozen=True):
    blocks: tuple[_YamlBlock, ...]


class _YamlTopology(msgspec.Struct, frozen=True):
    """One topology of topology.yaml: a tree, blocks, or flat."""

    topology: str
    cluster_default: bool = False
    tree: _YamlTree | None = None
    block: _YamlBlocks | None = None
    flat: bool = False


def is_slurm_yaml(document: object) -> bool:
    """Return whether a YAML document is a topology.yaml: a list in which an entry has a `topology`."""
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(row, dict) for row in document)
        and (any("topology" in row for row in document))
    )


def parse_slurm_yaml(document: object) -> list[NodeSpec]:
    """Return the nodes in a topology.yaml. Raises ConfigError.

    A node in several topologies gets its place from the cluster's default topology, else from the first.
    """
    try:
        rows = msgspec.convert(document, list[_YamlTopology])
    except msgspec.ValidationError as error:
        raise ConfigError(f"topology.yaml: {find_first_fault(error, list[_YamlTopology], document).sentence}") from None
    found: dict[str, NodeSpec] = {}
    for row in sorted(rows, key=lambda row: not row.cluster_default):
        if row.tree is None and row.block is None and not row.flat:
            raise ConfigError(f"topology.yaml: topology {row.topology!r} has none of `tree`, `block` and `flat`")
        for node in (*_read_yaml_tree(row), *_read_yaml_blocks(row)):
            found.setdefault(node.name, node)
        if len(found) > MAX_NODES:
            raise make_too_many_error(row.topology)
    if not found:
        raise ConfigError("topology.yaml: it names no node; a flat topology says nothing of where nodes lie")
    return list(found.values())


def _read_yaml_tree(row: _YamlTopology) -> list[NodeSpec]:
    switches: dict[str, _Switch] = {}
    for one in row.tree.switches if row.tree else ():
        where = f"topology.yaml: switch {one.switch!r} of {row.topology!r}"
        nodes = tuple(expand_nodes(one.nodes)) if one.nodes else ()
        children = tuple(expand_nodes(one.children)) if one.children else ()
        if one.switch in switches:
            raise ConfigError(f"{where} is named twice")
        if bool(nodes) == bool(children):
            raise ConfigError(
                f"topology.yaml: switch {one.switch!r} of {row.topology!r} needs either nodes or children"
            )
        switches[check_name_part(one.switch)] = _Switch(one.switch, nodes, children)
    return _make_tree_nodes(switches)


def _read_yaml_blocks(row: _YamlTopology) -> list[NodeSpec]:
    blocks: dict[str, str] = {}
    for one in row.block.blocks if row.block else ():
        for node in expand_nodes(one.nodes) if one.nodes else ():
            _assign_domain(blocks, node, check_name_part(one.block))
    return [_make_spec(node, {Level.BLOCK: block}) for node, block in blocks.items()]


def _assign_domain(placed: dict[str, str], node: str, domain: str) -> None:
    if node in placed:
        raise ConfigError(f"node {node!r} is in {placed[node]!r} and in {domain!r}")
    placed[node] = domain


def _make_tree_nodes(switches: dict[str, _Switch]) -> list[NodeSpec]:
    parents: dict[str, str] = {}
    for switch in switches.values():
        for child in switch.children:
            if child not in switches:
                raise ConfigError(f"switch {switch.name!r} names {child!r}, which no line defines")
            _assign_domain(parents, child, switch.name)
    leaf_of: dict[str, str] = {}
    for switch in switches.values():
        for node in switch.nodes:
            _assign_domain(leaf_of, node, switch.name)
    levels = {leaf: _map_levels(_find_path_to_root(leaf, parents)) for leaf in set(leaf_of.values())}
    return [_make_spec(node, levels[leaf]) for node, leaf in leaf_of.items()]


def _find_path_to_root(leaf: str, parents: dict[str, str]) -> list[str]:
    """Return the switches from a leaf up to its root. Raises ConfigError if there is a cycle."""
    path = [leaf]
    while path[-1] in parents:
        path.append(parents[path[-1]])
        if path[-1] in path[:-1]:
            raise ConfigError(f"switch {path[-1]!r} is above itself")
        if len(path) > MAX_LEVELS:
            raise ConfigError(f"switch {leaf!r} lies below more than {MAX_LEVELS} others")
    return path


def _map_levels(path: list[str]) -> dict[Level, str]:
    levels = {Level.RACK: path[0]}
    if len(path) == 1:
        return levels
    between = path[1:-1]
    if len(between) > 1:
        levels[Level.RAIL_GROUP] = between[0]
    levels[Level.BLOCK] = between[-1] if between else path[-1]
    levels[Level.CLUSTER] = path[-1]
    return levels


def _make_spec(node: str, levels: dict[Level, str]) -> NodeSpec:
    return NodeSpec(node, domains={Level.NVLINK_DOMAIN: node, **levels})
