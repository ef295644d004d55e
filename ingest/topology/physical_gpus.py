"""A reader of the physical GPUs of a Kubernetes node from its labels, annotations and resources.

A resource count is not a count of boards: time slicing and MPS multiply it, MIG and AMD's partitions count
parts of a GPU.

    nvidia.com/gpu.count            boards or, where the product ends in -MIG-PROFILE, instances of that profile
    nvidia.com/GA102GL_A10          boards, for virtual machines; nvidia.com/NVIDIA_A10-4Q parts of boards
    nvidia.com/gpu.replicas         shares of each of them (also GKE's clients per GPU)
    GKE, Karpenter                  boards of the machine type
    HAMi, Volcano (annotations)     one entry for each board
    amd.com/gpu_pf, gpu_vf          boards, for virtual machines
    amd.com/*_nps*                  partitions, also where a label says how amd.com/gpu is divided
    gpu.intel.com, habana.ai        boards by name, else the resource
    */gpu of any other vendor       the resource; aliyun.com/gpu-count
"""

import json
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.gpu_resources import parse_board_name
from fleetcast.fleet.mig import SLICES, parse_mig_profile

MAX_GPUS = 1024
MAX_GIB = 10_000_000

Table = Mapping[str, str]

_MIG_PRODUCT = re.compile(r"-MIG-([0-9a-z.+]+)", re.IGNORECASE)
_MIG_RESOURCE = re.compile(r"nvidia\.com/mig-(.+?)(\.shared)?")
_NOMINAL_GB = re.compile(r"(?<![0-9])([0-9]{2,3})GB(?![0-9A-Za-z])")
_AMD_PARTITION = re.compile(r"(?:amd\.com/)?(spx|dpx|tpx|qpx|cpx)(?:_nps[0-9])?", re.IGNORECASE)
_AMD_PARTS = {"spx": 1, "dpx": 2, "tpx": 3, "qpx": 4, "cpx": 8}
_BOARD_LABELS = ("cloud.google.com/gke-accelerator-count", "karpenter.k8s.aws/instance-gpu-count")
_SHARES = ("nvidia.com/gpu.replicas", "cloud.google.com/gke-max-shared-clients-per-gpu")
_REGISTERS = ("hami.io/node-nvidia-register", "volcano.sh/node-vgpu-register", "4pd.io/node-nvidia-register")
_PRODUCTS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name")


class PhysicalGpus(NamedTuple):
    """The GPU boards of a node, with their product and memory.

    is_certain: the number does not depend on a resource count alone. shares: how many jobs may share one board.
    """

    boards: int = 0
    product: str = ""
    memory_gib: float = 0.0
    is_certain: bool = False
    shares: int = 1


def find_physical_gpus(name: str, labels: Table, resources: Table, annotations: Table) -> PhysicalGpus:
    """Return the boards of the vendor with the most boards in the node.

    Raises ConfigError if a number is bad.
    """
    vendors = (
        _read_nvidia_gpus(name, labels, resources, annotations),
        _read_amd_gpus(name, labels, resources),
        _read_intel_gpus(name, labels, resources),
        _read_gaudi_gpus(name, labels, resources),
        _read_other_gpus(name, resources),
    )
    return max(vendors, key=lambda found: (found.boards, bool(found.product)))


def count_shares(name: str, labels: Table) -> int:
    """Return how many jobs may share a GPU of a node by time slicing or MPS. Raises ConfigError."""
    return max([1, *(parse_count(name, labels[key], MAX_GPUS) for key in _SHARES if labels.get(key))])


def _read_nvidia_gpus(name: str, labels: Table, resources: Table, annotations: Table) -> PhysicalGpus:
    product = next((labels[key] for key in _PRODUCTS if labels.get(key)), "") or _find_resource_model(resources)
    found = _MIG_PRODUCT.search(product)
    profile = found[1] if found else labels.get("cloud.google.com/gke-gpu-partition-size", "")
    board = product[: found.start()] if found else product.removesuffix("-SHARED")
    instances, shares = _count_instances_per_gpu(profile, board), count_shares(name, labels)
    certain = [parse_count(name, labels[key], MAX_GPUS) for key in _BOARD_LABELS if labels.get(key)]
    if labels.get("nvidia.com/gpu.count"):
        devices = instances if found else 1  # of a board: with one profile for all, instances are counted
        certain.append(math.ceil(parse_count(name, labels["nvidia.com/gpu.count"], MAX_GPUS * devices) / devices))
    certain += [boards for key in _REGISTERS if (boards := _count_registered_boards(annotations.get(key, "")))]
    boards = min(certain) if certain else _count_resource_boards(name, resources, instances, shares)
    label = labels.get("nvidia.com/gpu.memory") or labels.get("karpenter.k8s.aws/instance-gpu-memory", "0")
    memory = parse_count(name, label, MAX_GIB * 1024) / 1024
    if profile:  # the label is of an instance
        memory = float(_parse_nominal_gb(board))
    return PhysicalGpus(min(boards, MAX_GPUS), board, memory, bool(certain), shares)


def _count_resource_boards(name: str, resources: Table, instances: int, shares: int) -> int:
    whole, sevenths, named = 0, 0.0, 0.0
    for resource, text in resources.items():
        amount = parse_count(name, text, MAX_GPUS * MAX_GPUS) if resource.startswith("nvidia.com/") else 0
        if resource in ("nvidia.com/gpu", "nvidia.com/gpu.shared"):
            whole += amount
        elif found := _MIG_RESOURCE.fullmatch(resource):
            profile = parse_mig_profile(found[1])
            sevenths += amount / (shares if found[2] else 1) * (profile.slices if profile else SLICES)
        elif (board := parse_board_name(resource)) is not None:
            named += amount * (board.part or 1.0)
    return math.ceil(whole / shares / instances) + math.ceil(sevenths / SLICES) + math.ceil(round(named, 6))


def _find_resource_model(resources: Table) -> str:
    """Return the GPU model named in a resource for virtual machines, or "" if no resource names one."""
    boards = (parse_board_name(resource) for resource, text in resources.items() if text not in ("", "0"))
    return next((board.model for board in boards if board is not None), "")


def _count_instances_per_gpu(profile: str, board: str) -> int:
    """Return the largest number of instances of a MIG profile that one board can have.

    If the result is too large, the count of boards is only too low.
    """
    known = parse_mig_profile(profile) if profile else None
    if known is None:
        return 1
    slices = 4 if re.search(r"\bA30\b", board) else SLICES
    most = max(1, slices // known.slices)
    nominal = _parse_nominal_gb(board)
    return max(1, min(most, nominal // known.memory_gib)) if nominal and known.memory_gib else most


def _parse_nominal_gb(board: str) -> int:
    found = _NOMINAL_GB.search(board)
    return int(found[1]) if found else 0


def _count_registered_boards(text: str) -> int:
    """Return the number of boards in an annotation of a vGPU scheduler, or 0 if it lists none."""
    try:
        rows = json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return 0
    if rows is not None:
        return len(rows)
    return sum(entry.count(",") >= 4 for entry in text.split(":"))


def _read_amd_gpus(name: str, labels: Table, resources: Table) -> PhysicalGpus:
    divided = _AMD_PARTITION.match(labels.get("amd.com/gpu.compute-memory-partition", ""))
    boards = 0.0
    for resource, text in resources.items():
        named = _AMD_PARTITION.fullmatch(resource)
        if resource in ("amd.com/gpu", "amd.com/gpu_pf", "amd.com/gpu_vf"):
            boards += parse_count(name, text, MAX_GPUS * 8) / (_AMD_PARTS[divided[1].lower()] if divided else 1)
        elif named:
            boards += parse_count(name, text, MAX_GPUS * 8) / _AMD_PARTS[named[1].lower()]
    product = labels.get("amd.com/gpu.product-name") or labels.get("beta.amd.com/gpu.product-name", "")
    vram = labels.get("amd.com/gpu.vram") or labels.get("beta.amd.com/gpu.vram", "")
    memory = parse_count(name, vram.removesuffix("G"), MAX_GIB) if vram else 0
    return PhysicalGpus(min(math.ceil(boards), MAX_GPUS), product, float(memory), bool(divided))


def _read_intel_gpus(name: str, labels: Table, resources: Table) -> PhysicalGpus:
    offered = sum(
        parse_count(name, resources.get(key, "0"), MAX_GPUS) for key in ("gpu.intel.com/i915", "gpu.intel.com/xe")
    )
    numbers = labels.get("gpu.intel.com/gpu-numbers", "")
    by_device = [
        parse_count(name, value, MAX_GPUS)
        for key, value in labels.items()
        if key.startswith("gpu.intel.com/device-id.") and key.endswith(".count")
    ]
    certain = len(numbers.split(".")) if numbers else sum(by_device)
    boards = min(offered, certain) if certain and offered else offered
    return PhysicalGpus(boards, labels.get("gpu.intel.com/product", ""), is_certain=bool(certain))


def _read_gaudi_gpus(name: str, labels: Table, resources: Table) -> PhysicalGpus:
    boards = parse_count(name, resources.get("habana.ai/gaudi", "0"), MAX_GPUS)
    return PhysicalGpus(boards, labels.get("habana.ai/hpu_type", "") or "Gaudi") if boards else PhysicalGpus()


def _read_other_gpus(name: str, resources: Table) -> PhysicalGpus:
    rows = (key for key in resources if key == "aliyun.com/gpu-count" or key.endswith("/gpu"))
    known = ("nvidia.com/gpu", "amd.com/gpu", "koordinator.sh/gpu")
    boards = max((parse_count(name, resources[key], MAX_GPUS) for key in rows if key not in known), default=0)
    return PhysicalGpus(boards)


def parse_count(name: str, text: str, most: int) -> int:
    """Parse a whole number in a node's label or resource. Raises ConfigError if it is larger than `most`.

    >>> parse_count("n1", "8", 16), parse_count("n1", "1k", 2000)
    (8, 1000)
    """
    digits, factor = (text[:-1], 1000) if text.endswith("k") else (text, 1)
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18 and int(digits) * factor <= most):
        raise ConfigError(f"node {name!r}: {text[:80]!r} is no count of at most {most:,}")
    return int(digits) * factor
