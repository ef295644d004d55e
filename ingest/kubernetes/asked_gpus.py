"""The GPUs that a pod requests, by resources, device claims (DRA) and annotations of schedulers.

nvidia.com/gpu, amd.com/gpu, gpu.intel.com/*, habana.ai/gaudi    boards, or shares where the node divides its boards
nvidia.com/mig-PROFILE                                           parts by the slices of the profile
nvidia.com/GA102GL_A10, nvidia.com/NVIDIA_A10-4Q                 a virtual machine's boards, and vGPUs by their memory
resource.k8s.io ResourceClaim, ResourceClaimTemplate             devices of the classes of GPUs
gpu-fraction, gpu-memory (KAI, Run:ai)                           a part of one or more boards
nvidia.com/gpucores, gpumem-percentage, gpumem (HAMi)            the part of each board
koordinator.sh/gpu-core, tencent.com/vcuda-core, …               percents of boards
aliyun.com/gpu-mem                                               GiB of one board
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetcast.fleet.gpu_resources import (
    GPU_RESOURCES,
    MIG_RESOURCES,
    PERCENT_RESOURCES,
    is_gpu_resource,
    is_unsupported_gpu_resource,
    parse_board_name,
)
from fleetcast.fleet.mig import SLICES, parse_mig_profile
from fleetcast.fleet.requests import WHOLE_GPU
from fleetcast.ingest.kubernetes.claims import ClaimedGpus
from fleetcast.ingest.kubernetes.objects import Container, PodSpec, Resources, parse_quantity

FRACTION, FRACTION_DEVICES, GPU_MEMORY = "gpu-fraction", "gpu-fraction-num-devices", "gpu-memory"
HAMI_MIB, ALIYUN_GIB = ("nvidia.com/gpumem", "volcano.sh/vgpu-memory"), "aliyun.com/gpu-mem"
HAMI_PERCENT = ("nvidia.com/gpucores", "nvidia.com/gpumem-percentage", "volcano.sh/vgpu-cores")
ASKED_RESOURCES = (*GPU_RESOURCES, MIG_RESOURCES)
_MIG = re.compile(r"mig-(.+?)(\.shared)?$")


class AskedGpus(NamedTuple):
    """The GPUs or MIG instances that a pod requests.

    share: the average size of each in thousandths of a GPU, or None for whole GPUs. unread: device claims
    without a known object, each counted as one GPU.
    """

    gpus: int
    profile: str = ""
    share: int | None = None
    unread: tuple[str, ...] = ()


class NodeGpus(NamedTuple):
    """The way in which a pod's node divides its GPUs.

    shares: how many jobs may share one GPU. memory_gib: the memory of one GPU, 0 if unknown.
    """

    shares: int = 1
    memory_gib: float = 0.0


def read_asked_gpus(
    spec: PodSpec,
    resources: tuple[str, ...],
    *,
    annotations: Mapping[str, str] | None = None,
    node: NodeGpus | None = None,
    claimed: ClaimedGpus | None = None,
) -> AskedGpus:
    """Return the GPUs that a pod requests. Raises RecordError if a quantity is invalid.

    A MIG instance counts by its slices, or as one GPU if its profile is unknown. claimed: the GPUs of the pod's
    device claims.
    """
    node, claimed, annotations = node or NodeGpus(), claimed or ClaimedGpus(), annotations or {}
    asked = max(
        (_count_resource_gpus(containers, resources, node) for containers in _group_by_phase(spec)),
        key=lambda found: found.gpus * (found.share or WHOLE_GPU),
    )
    if asked.gpus < 1:
        asked = _read_part_resources(spec, node.memory_gib)
    if asked.gpus < 1:
        asked = _read_annotations(annotations, node.memory_gib)
    if not claimed.gpus:
        return asked
    whole = asked.gpus * (asked.share or WHOLE_GPU) + claimed.milli
    gpus = asked.gpus + claimed.gpus
    return AskedGpus(gpus, asked.profile, _compute_share(whole, gpus), claimed.unread)


def may_hold_gpus(spec: PodSpec, resources: tuple[str, ...], annotations: Mapping[str, str] | None) -> bool:
    """Return whether a pod may hold GPUs, before its device claims are known."""
    return bool(spec.resource_claims) or read_asked_gpus(spec, resources, annotations=annotations).gpus >= 1


def list_unread_resources(spec: PodSpec, resources: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a pod's resources that look like GPUs but are not supported."""
    names = {
        name
        for row in list_running_containers(spec)
        for name in row.resources.names
        if is_unsupported_gpu_resource(name, resources)
    }
    return tuple(
        sorted(name for name in names if any(row.resources.get_amount(name) for row in list_running_containers(spec)))
    )


def _group_by_phase(spec: PodSpec) -> list[list[Container]]:
    """Return the groups of containers that run at the same time, one group for each phase of the pod.

    A pod holds the resources of its largest phase until it ends.
    """
    return [
        list_running_containers(spec),
        *([row] for row in spec.init_containers or () if row.restart_policy != "Always"),
    ]


def _count_resource_gpus(containers: Sequence[Container], resources: tuple[str, ...], node: NodeGpus) -> AskedGpus:
    count, profile, milli, shares = 0.0, "", 0.0, node.shares
    for container in containers:
        percent = _find_board_part(container.resources, node.memory_gib)
        for name in sorted(container.resources.names):
            if not is_gpu_resource(name, resources):
                continue
            amount, found = container.resources.get_amount(name), _MIG.search(name)
            if found:
                profile, known = found[1], parse_mig_profile(found[1])
                slices = (known.slices if known else SLICES) / (shares if found[2] else 1)
                count, milli = count + amount, milli + amount * WHOLE_GPU * slices / SLICES
            elif shares > 1 and name in ("nvidia.com/gpu", "nvidia.com/gpu.shared"):
                count, milli = count + math.ceil(amount / shares), milli + WHOLE_GPU * amount / shares
            elif (board := parse_board_name(name)) is not None:
                count, milli = count + amount, milli + amount * WHOLE_GPU * (board.part or 1.0)
            else:
                count, milli = count + amount, milli + amount * WHOLE_GPU * percent
    return AskedGpus(round(count), profile, _compute_share(milli, round(count)))


def _find_board_part(resources: Resources, memory_gib: float) -> float:
    """Return the part of each board, from 0 to 1, that a vGPU scheduler gives a container."""
    stated = [resources.get_amount(name) / 100 for name in HAMI_PERCENT]
    if not any(stated) and memory_gib:
        stated = [resources.get_amount(name) / 1024 / memory_gib for name in HAMI_MIB]
    return min((part for part in stated if 0 < part <= 1), default=1.0)


def _read_part_resources(spec: PodSpec, memory_gib: float) -> AskedGpus:
    """Return the GPUs requested by resources that count percents of boards, or GiB of one board.

    A board of unknown memory counts as a whole GPU.
    """
    containers = list_running_containers(spec)
    percents = max(sum(row.resources.get_amount(name) for row in containers) for name in PERCENT_RESOURCES)
    gib = sum(row.resources.get_amount(ALIYUN_GIB) for row in containers)
    boards = percents / 100 or (min(1.0, gib / memory_gib) if memory_gib else 1.0 if gib else 0.0)
    gpus = math.ceil(boards)
    return AskedGpus(gpus, share=_compute_share(WHOLE_GPU * boards, gpus))


def _read_annotations(annotations: Mapping[str, str], memory_gib: float) -> AskedGpus:
    part = 0.0
    if annotations.get(FRACTION):
        part = parse_quantity(annotations[FRACTION])
    elif annotations.get(GPU_MEMORY):
        mib = parse_quantity(annotations[GPU_MEMORY])
        part = min(1.0, mib / 1024 / memory_gib) if memory_gib and mib > 0 else 1.0 if mib > 0 else 0.0
    if part <= 0:
        return AskedGpus(0)
    boards = max(1, round(parse_quantity(annotations.get(FRACTION_DEVICES) or 1)))
    return AskedGpus(boards, share=_compute_share(WHOLE_GPU * min(part, 1.0) * boards, boards))


def _compute_share(milli: float, gpus: int) -> int | None:
    """Return the average size of `gpus` GPUs in thousandths of a GPU, or None if they are whole.

    milli: their total size in thousandths.
    """
    share = max(1, round(milli / gpus)) if gpus >= 1 else WHOLE_GPU
    return share if share < WHOLE_GPU else None


def list_running_containers(spec: PodSpec) -> list[Container]:
    """Return the containers that run as long as the pod does."""
    return [*spec.containers, *(row for row in spec.init_containers or () if row.restart_policy == "Always")]
