"""Topology files → `Topology`: our TOML, topology.conf, node labels, ibnetdiscover, NetQ, and host wiring.

What a format omits stays unknown, but for the NVLink domain: by default a node is its own (eight GPUs on one board).
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleet.decode_faults import explain
from fleet.entities import MAX_NAME_LENGTH
from fleet.errors import ConfigError
from fleet.toml_lines import decode_toml
from fleet.topology import Device, Level, NodeSpec, Topology
from ingest.gpus import short_model
from ingest.node_names import MAX_NODES, check_name, check_part, expand_nodes, too_many
from ingest.topology.fabric_topology import fabric_nodes, is_netq, netq_nodes
from ingest.topology.host_wiring import is_matrix, is_nccl, parse_matrix, parse_nccl
from ingest.topology.ibnetdiscover import is_ibnetdiscover, parse_ibnetdiscover
from ingest.topology.slurm_topology import is_slurm, parse_slurm

_JSON = re.compile(r"\s*+(\{|\[\s*+\{)")
MAX_GPUS = 1024
MAX_CPUS = 1_000_000
MAX_GIB = 10_000_000

# Label key -> level; of several keys for one level, the first that a node carries wins. A leaf switch is our rack.
LABEL_LEVELS: tuple[tuple[str, Level], ...] = (
    ("nvidia.com/gpu.clique", Level.NVLINK_DOMAIN),
    ("network.topology.nvidia.com/accelerator", Level.NVLINK_DOMAIN),
    ("cloud.provider.com/topology-rack", Level.RACK),
    ("network.topology.nvidia.com/leaf", Level.RACK),
    ("cloud.google.com/gce-topology-subblock", Level.RACK),
    ("topology.k8s.aws/network-node-layer-3", Level.RACK),
    ("cloud.provider.com/topology-block", Level.BLOCK),
    ("network.topology.nvidia.com/spine", Level.BLOCK),
    ("network.topology.nvidia.com/block", Level.BLOCK),
    ("cloud.google.com/gce-topology-block", Level.BLOCK),
    ("topology.k8s.aws/network-node-layer-2", Level.BLOCK),
    ("network.topology.nvidia.com/core", Level.CLUSTER),
    ("network.topology.nvidia.com/datacenter", Level.CLUSTER),
    ("topology.k8s.aws/network-node-layer-1", Level.CLUSTER),
    ("topology.kubernetes.io/zone", Level.CLUSTER),
)


class Rack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One [[rack]] of our TOML: like nodes that share a rack. `nodes`: names, or ranges such as "n[001-019]"."""

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
    """Read a file of any known format, or a folder of them, merged by name. Raises ConfigError naming file and fault.
    Host wiring applies to the nodes, pool or GPU model that its file is named after (H100.xml), else to all others."""
    nodes: dict[str, NodeSpec] = {}
    wirings: dict[str, tuple[Device, ...]] = {}
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_dir() or (path.is_dir() and file.name.startswith(".")):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read topology {file}: {error}") from None
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
            nodes[node.name] = merged(nodes[node.name], node) if node.name in nodes else node
    named = {word for node in nodes.values() for word in (node.name, node.pool, node.gpu_model)}
    hosts = {stem if stem in named else "": wiring for stem, wiring in wirings.items()}
    return Topology.build(list(nodes.values()), hosts=hosts)


def parse_wiring(text: str) -> tuple[Device, ...] | None:
    """Adapters of a text that says how a host is wired inside; None for any other. Raises ConfigError."""
    if is_nccl(text):
        return parse_nccl(text)
    return parse_matrix(text) if is_matrix(text) else None


def merged(one: NodeSpec, other: NodeSpec) -> NodeSpec:
    """A node that two files tell of: the first counts where both say something."""
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
    )


def parse_topology(text: str) -> list[NodeSpec]:
    """Nodes of a TOML, topology.conf, ibnetdiscover or JSON (labels, NetQ) text. Raises ConfigError."""
    if _JSON.match(text):
        nodes = parse_json(text)
    elif is_ibnetdiscover(text):
        nodes = fabric_nodes(parse_ibnetdiscover(text))
    else:
        nodes = parse_slurm(text) if is_slurm(text) else parse_toml(text)
    for word in {
        word for node in nodes for word in (node.pool, node.gpu_model, node.power_domain, *node.domains.values())
    }:
        if len(word) > MAX_NAME_LENGTH or not word.isprintable():
            raise ConfigError(f"{word[:80]!r} is no name: at most {MAX_NAME_LENGTH} printable characters")
    return nodes


def parse_toml(text: str) -> list[NodeSpec]:
    racks = decode_toml(text, _Racks).rack
    if not racks:
        raise ConfigError("it names no [[rack]]")
    nodes: list[NodeSpec] = []
    for rack in racks:
        nodes += _rack_nodes(rack)
        if len(nodes) > MAX_NODES:
            raise too_many(rack.name)
    return nodes


def _rack_nodes(rack: Rack) -> list[NodeSpec]:
    _check_rack(rack)
    names: list[str] = []
    for text in (rack.nodes,) if isinstance(rack.nodes, str) else rack.nodes:
        names += expand_nodes(text)
        if len(names) > MAX_NODES:
            raise too_many(text)
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
    check_part(rack.name)
    if not 0 <= rack.gpus <= MAX_GPUS:
        raise ConfigError(f"rack {rack.name!r}: gpus = {rack.gpus}, expected 0 to {MAX_GPUS}")
    for key, most in (("gpu_memory_gib", MAX_GIB), ("cpus", MAX_CPUS), ("host_memory_gib", MAX_GIB)):
        value = getattr(rack, key)
        if not 0 <= value <= most:
            raise ConfigError(f"rack {rack.name!r}: {key} = {value}, expected 0 to {most:,}")


def parse_json(text: str) -> list[NodeSpec]:
    """`kubectl get nodes -o json`, an object {node: {label: value}} (topograph's labels), or a document of NetQ."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid JSON: {error}") from None
    if is_netq(document):
        return netq_nodes(document)
    if not isinstance(document, dict):
        raise ConfigError("expected an object of nodes and their labels, or a list as NetQ writes it")
    if not isinstance(document.get("items"), list):
        return [node_from_labels(str(name), _mapping(labels, name)) for name, labels in document.items()]
    return [_kubernetes_node(item) for item in document["items"]]


def _kubernetes_node(item: Any) -> NodeSpec:
    try:
        metadata = msgspec.convert(item["metadata"], dict[str, Any])
        name = msgspec.convert(metadata["name"], str)
        capacity = _mapping(item.get("status", {}).get("capacity", {}), name)
    except (KeyError, TypeError, AttributeError, msgspec.ValidationError):
        raise ConfigError(f"an item is no Kubernetes node: {str(item)[:80]}") from None
    return node_from_labels(name, _mapping(metadata.get("labels", {}), name), capacity)


def _mapping(value: Any, name: object) -> dict[str, str]:
    try:
        return msgspec.convert(value, dict[str, str])
    except msgspec.ValidationError as error:
        raise ConfigError(f"labels of {name!r}: {explain(error, dict[str, str], value).sentence}") from None


def node_from_labels(name: str, labels: Mapping[str, str], capacity: Mapping[str, str] | None = None) -> NodeSpec:
    """Make a node of its Kubernetes labels and `status.capacity`. Raises ConfigError on a bad number.

    >>> node_from_labels("n1", {"nvidia.com/gpu.clique": "c.7"}).domains[Level.NVLINK_DOMAIN]
    'c.7'
    """
    domains = {Level.NVLINK_DOMAIN: check_name(name)}
    for key, level in reversed(LABEL_LEVELS):
        if labels.get(key):
            domains[level] = labels[key]
    capacity = capacity or {}
    return NodeSpec(
        name=name,
        gpus=_count(name, capacity.get("nvidia.com/gpu") or labels.get("nvidia.com/gpu.count", "0"), MAX_GPUS),
        gpu_model=short_model(labels.get("nvidia.com/gpu.product", "")),
        gpu_memory_gib=_count(name, labels.get("nvidia.com/gpu.memory", "0"), MAX_GIB * 1024) / 1024,
        cpus=int(_quantity(name, capacity.get("cpu", "0"), MAX_CPUS)),
        host_memory_gib=_quantity(name, capacity.get("memory", "0"), MAX_GIB * 2**30) / 2**30,
        domains=domains,
    )


_SUFFIXES = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}


def _quantity(name: str, text: str, most: float) -> float:
    """A Kubernetes quantity: 64, 500m, 2113502228Ki."""
    digits = text.rstrip("".join(_SUFFIXES))
    try:
        value = float(digits) * (_SUFFIXES[text[len(digits) :]] if text != digits else 1.0)
    except (ValueError, KeyError):
        raise ConfigError(f"node {name!r}: {text[:80]!r} is no quantity such as 64 or 2048Gi") from None
    if not 0 <= value <= most:
        raise ConfigError(f"node {name!r}: {text[:80]!r}, expected 0 to {most:,}")
    return value


def _count(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and int(text) <= most):
        raise ConfigError(f"node {name!r}: {text[:80]!r} is no count of at most {most:,}")
    return int(text)
