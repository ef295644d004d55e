"""A converter of Kubernetes nodes into `NodeSpec`.

The domains come from labels, the GPUs from `find_physical_gpus`, and the CPUs and the memory from
the capacity.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from fleetcast.fleet.decode_faults import find_first_fault
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.topology import Level, NodeSpec
from fleetcast.ingest.gpus import shorten_model
from fleetcast.ingest.node_names import check_name
from fleetcast.ingest.topology.physical_gpus import find_physical_gpus

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


def make_kubernetes_node(item: Any) -> NodeSpec:
    """Convert one item of `kubectl get nodes -o json`. Raises ConfigError."""
    try:
        metadata = msgspec.convert(item["metadata"], dict[str, Any])
        name = msgspec.convert(metadata["name"], str)
        capacity = item.get("status", {}).get("capacity", {})
        annotations = metadata.get("annotations") or {}
    except (KeyError, TypeError, AttributeError, msgspec.ValidationError):
        raise ConfigError(f"an item is no Kubernetes node: {str(item)[:80]}") from None
    labels = make_label_table(metadata.get("labels") or {}, name)
    return make_node_from_labels(name, labels, make_label_table(capacity, name), make_label_table(annotations, name))


def make_label_table(value: Any, name: object) -> dict[str, str]:
    """Convert a decoded value into a table of texts. Raises ConfigError that names the node."""
    try:
        return msgspec.convert(value, dict[str, str])
    except msgspec.ValidationError as error:
        raise ConfigError(f"labels of {name!r}: {find_first_fault(error, dict[str, str], value).sentence}") from None


def make_node_from_labels(
    name: str,
    labels: Mapping[str, str],
    capacity: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> NodeSpec:
    """Build a node from its Kubernetes labels, `status.capacity` and annotations.

    Raises ConfigError on a bad number.

    >>> make_node_from_labels("n1", {"nvidia.com/gpu.clique": "c.7"}).domains[Level.NVLINK_DOMAIN]
    'c.7'
    """
    domains = {Level.NVLINK_DOMAIN: check_name(name)}
    for key, level in reversed(LABEL_LEVELS):
        if labels.get(key):
            domains[level] = labels[key]
    capacity = capacity or {}
    gpus = find_physical_gpus(name, labels, capacity, annotations or {})
    return NodeSpec(
        name=name,
        gpus=gpus.boards,
        gpu_model=shorten_model(gpus.product),
        gpu_memory_gib=gpus.memory_gib,
        cpus=int(_parse_quantity(name, capacity.get("cpu", "0"), MAX_CPUS)),
        host_memory_gib=_parse_quantity(name, capacity.get("memory", "0"), MAX_GIB * 2**30) / 2**30,
        domains=domains,
        counts_resources=not gpus.is_certain,
    )


_SUFFIXES = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}


def _parse_quantity(name: str, text: str, most: float) -> float:
    """Parse a Kubernetes quantity such as 64, 500m or 2113502228Ki. Raises ConfigError."""
    digits = text.rstrip("".join(_SUFFIXES))
    try:
        value = float(digits) * (_SUFFIXES[text[len(digits) :]] if text != digits else 1.0)
    except (ValueError, KeyError):
        raise ConfigError(f"node {name!r}: {text[:80]!r} is no quantity such as 64 or 2048Gi") from None
    if not 0 <= value <= most:
        raise ConfigError(f"node {name!r}: {text[:80]!r}, expected 0 to {most:,}")
    return value
