"""A loader of topology files: our TOML, topology.conf, node labels, ibnetdiscover, NetQ, host wiring.

A fact that a format omits stays unknown, with one exception. By default each node is an NVLink domain of its own,
as is usual for eight GPUs on one board.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.toml_lines import decode_toml
from fleetcast.fleet.topology import Device, Level, NodeSpec, Topology
from fleetcast.fleet.yaml_text import read_yaml
from fleetcast.ingest.node_names import MAX_NODES, check_name_part, expand_nodes, make_too_many_error
from fleetcast.ingest.topology.fabric_topology import is_netq_document, make_fabric_nodes, make_netq_nodes
from fleetcast.ingest.topology.host_wiring import is_nccl_xml, is_topo_matrix, parse_nccl_xml, parse_topo_matrix
from fleetcast.ingest.topology.ibnetdiscover import is_ibnetdiscover, parse_ibnetdiscover
from fleetcast.ingest.topology.kubernetes_nodes import (
    MAX_CPUS,
    MAX_GIB,
    make_kubernetes_node,
    make_label_table,
    make_node_from_labels,
)
from fleetcast.ingest.topology.other_files import READ, describe_bytes, describe_unread_document, describe_unread_file
from fleetcast.ingest.topology.physical_gpus import MAX_GPUS
from fleetcast.ingest.topology.slurm_topology import is_slurm_conf, is_slurm_yaml, parse_slurm_conf, parse_slurm_yaml

_JSON = re.compile(r"\s*+(\{|\[\s*+\{)")
_YAML = re.compile(r"^(?:---|- \S|[\w\"'./-]+:(?:\s|$))", re.MULTILINE)
_TOML = re.compile(r"^[ \t]*+(?:\[\[?[\w\"'. -]+\]\]?|[\w\"'.-]+\s*=)", re.MULTILINE)


class Rack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One [[rack]] of our TOML: similar nodes in one rack.

    `nodes`: names, or ranges such as "n[001-019]".
    """

    name: str
    nodes: str | tuple[str, ...]
    block: str = ""
    rail_group: str = ""
    cluster: str = ""
    nvlink_domain: str = ""
    power_domain: str = ""
    pool: str = "default"
    gpus: int = 0
    gpu_model: str = ""
    gpu_memory_gib: float = 0.0
    cpus: int = 0
    host_memory_gib: float = 0.0


class _Racks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rack: tuple[Rack, ...]


def load_topology(path: Path) -> Topology:
    """Load a file of any known format, or a folder of such files, and merge nodes of the same name.

    A file of host wiring applies to the nodes, pool or GPU model in its file name (H100.xml). Without such a name, it
    applies to all other nodes. Raises ConfigError that names the file and the fault.
    """
    nodes: dict[str, NodeSpec] = {}
    wirings: dict[str, tuple[Device, ...]] = {}
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_dir() or (path.is_dir() and file.name.startswith(".")):
            continue
        try:
            content = file.read_bytes()
            text = content.decode("utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read topology {file}: {error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"cannot read topology {file}: {describe_bytes(content)}") from None
        try:
            wiring = parse_wiring(text)
            if wiring is not None:
                wirings[file.stem] = wiring
                continue
            found = parse_topology(text)
            Topology.build(found)
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"topology {file}: {error}") from None
        for node in found:
            nodes[node.name] = merge_specs(nodes[node.name], node) if node.name in nodes else node
    named = {word for node in nodes.values() for word in (node.name, node.pool, node.gpu_model)}
    hosts = {stem if stem in named else "": wiring for stem, wiring in wirings.items()}
    return Topology.build(list(nodes.values()), hosts=hosts)


def parse_wiring(text: str) -> tuple[Device, ...] | None:
    """Return the network adapters in a text of a host's wiring, or None for any other text.

    Raises ConfigError.
    """
    if is_nccl_xml(text):
        return parse_nccl_xml(text)
    return parse_topo_matrix(text) if is_topo_matrix(text) else None


def merge_specs(one: NodeSpec, other: NodeSpec) -> NodeSpec:
    """Merge the specs of a node from two files. If both state a fact, the first one counts."""
    own = Level.NVLINK_DOMAIN
    domains = {**other.domains, **{level: name for level, name in one.domains.items() if name}}
    if domains.get(own) == one.name:  # its own is what one takes for want of better
        domains[own] = other.domains.get(own) or one.name
    return NodeSpec(
        name=one.name,
        gpus=one.gpus or other.gpus,
        gpu_model=one.gpu_model or other.gpu_model,
        gpu_memory_gib=one.gpu_memory_gib or other.gpu_memory_gib,
        cpus=one.cpus or other.cpus,
        host_memory_gib=one.host_memory_gib or other.host_memory_gib,
        pool=one.pool if one.pool != "default" else other.pool,
        domains=domains,
        power_domain=one.power_domain or other.power_domain,
        devices=one.devices or other.devices,
        counts_resources=(one if one.gpus else other).counts_resources,
        source=one.source or other.source,
        lent_gpus=max(one.lent_gpus, other.lent_gpus),
        other_names=tuple(dict.fromkeys((*one.other_names, *other.other_names))),
    )


def parse_topology(text: str) -> list[NodeSpec]:
    """Return the nodes in a text of any known topology format. Raises ConfigError.

    The formats are TOML, topology.conf, ibnetdiscover, JSON (labels, NetQ) and YAML (Slurm, Kubernetes).
    """
    nodes = _parse_nodes(text)
    for word in {
        word for node in nodes for word in (node.pool, node.gpu_model, node.power_domain, *node.domains.values())
    }:
        if len(word) > MAX_NAME_LENGTH or not word.isprintable():
            raise ConfigError(f"{word[:80]!r} is no name: at most {MAX_NAME_LENGTH} printable characters")
    return nodes


def _parse_nodes(text: str) -> list[NodeSpec]:
    if _JSON.match(text):
        return parse_json_nodes(text)
    if is_ibnetdiscover(text):
        return make_fabric_nodes(parse_ibnetdiscover(text))
    if is_slurm_conf(text):
        return parse_slurm_conf(text)
    if what := describe_unread_file(text):
        raise ConfigError(what)
    if _YAML.search(text[:65_536]) and not _TOML.search(text[:65_536]):
        return _read_yaml_nodes(text)
    try:
        return parse_toml_nodes(text)
    except ConfigError as error:
        raise ConfigError(f"read as our TOML: {error}" + ("" if _TOML.search(text) else f"; read are {READ}")) from None


def _read_yaml_nodes(text: str) -> list[NodeSpec]:
    """Return the nodes in a YAML text: Slurm's topology.yaml, or the output of `kubectl` or topograph.

    Raises ConfigError.
    """
    try:
        document = read_yaml(text)
    except ValueError as error:
        raise ConfigError(f"read as YAML: {error}") from None
    if is_slurm_yaml(document):
        return parse_slurm_yaml(document)
    if isinstance(document, dict) and ("kind" in document or all(isinstance(row, dict) for row in document.values())):
        return read_document_nodes(document)
    expected = "Slurm's topology.yaml (a list of `topology:`), Kubernetes nodes or node labels"
    raise ConfigError(f"read as YAML: expected {expected}; read are {READ}")


def parse_toml_nodes(text: str) -> list[NodeSpec]:
    racks = decode_toml(text, _Racks).rack
    if not racks:
        raise ConfigError("it names no [[rack]]")
    nodes: list[NodeSpec] = []
    for rack in racks:
        nodes += _make_rack_nodes(rack)
        if len(nodes) > MAX_NODES:
            raise make_too_many_error(rack.name)
    return nodes


def _make_rack_nodes(rack: Rack) -> list[NodeSpec]:
    _check_rack(rack)
    names: list[str] = []
    for text in (rack.nodes,) if isinstance(rack.nodes, str) else rack.nodes:
        names += expand_nodes(text)
        if len(names) > MAX_NODES:
            raise make_too_many_error(text)
    shared = {
        Level.RACK: rack.name,
        Level.RAIL_GROUP: rack.rail_group,
        Level.BLOCK: rack.block,
        Level.CLUSTER: rack.cluster,
    }
    return [
        NodeSpec(
            name=name,
            gpus=rack.gpus,
            gpu_model=rack.gpu_model,
            gpu_memory_gib=rack.gpu_memory_gib,
            cpus=rack.cpus,
            host_memory_gib=rack.host_memory_gib,
            pool=rack.pool,
            domains={Level.NVLINK_DOMAIN: rack.nvlink_domain or name, **shared},
            power_domain=rack.power_domain,
        )
        for name in names
    ]


def _check_rack(rack: Rack) -> None:
    check_name_part(rack.name)
    if not 0 <= rack.gpus <= MAX_GPUS:
        raise ConfigError(f"rack {rack.name!r}: gpus = {rack.gpus}, expected 0 to {MAX_GPUS}")
    for key, most in (("gpu_memory_gib", MAX_GIB), ("cpus", MAX_CPUS), ("host_memory_gib", MAX_GIB)):
        value = getattr(rack, key)
        if not 0 <= value <= most:
            raise ConfigError(f"rack {rack.name!r}: {key} = {value}, expected 0 to {most:,}")


def parse_json_nodes(text: str) -> list[NodeSpec]:
    """Return the nodes in a JSON text. Raises ConfigError.

    The text is the output of `kubectl get nodes -o json`, an object {node: {label: value}} (topograph's labels),
    or a document of NetQ.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid JSON: {error}") from None
    return read_document_nodes(document)


def read_document_nodes(document: Any) -> list[NodeSpec]:
    """Return the nodes in a decoded JSON or YAML document. Raises ConfigError."""
    if is_netq_document(document):
        return make_netq_nodes(document)
    if is_slurm_yaml(document):
        return parse_slurm_yaml(document)
    if not isinstance(document, dict):
        raise ConfigError("expected an object of nodes and their labels, or a list as NetQ or Slurm writes it")
    if document.get("kind") == "Node":
        return [make_kubernetes_node(document)]
    if not isinstance(document.get("items"), list):
        if "kind" in document and "apiVersion" in document:
            raise _make_wrong_kind_error(document)
        if what := describe_unread_document(document):
            raise ConfigError(what)
        return [make_node_from_labels(str(name), make_label_table(labels, name)) for name, labels in document.items()]
    for item in document["items"]:
        if isinstance(item, dict) and item.get("kind", "Node") != "Node":
            raise _make_wrong_kind_error(item)
    return [make_kubernetes_node(item) for item in document["items"]]


def _make_wrong_kind_error(thing: Mapping[str, Any]) -> ConfigError:
    kind = str(thing["kind"])[:60]
    return ConfigError(f"it holds a Kubernetes {kind!r}, expected nodes: kubectl get nodes -o json")
