"""Names of Kubernetes resources that stand for GPUs, for every vendor.

The Kubernetes source and the adapters use this module.
"""

import re
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

BOARD_RESOURCES = "nvidia.com/[A-Z]*"  # of virtual machines: boards and vGPUs are named after their model
GPU_RESOURCES = (
    *("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/pgpu", "volcano.sh/vgpu-number"),
    *("amd.com/gpu", "amd.com/?px_nps?", "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi"),
    *("amd.com/gpu_vf", "amd.com/gpu_pf", "deviceclass.resource.kubernetes.io/*gpu*", "*/gpu", BOARD_RESOURCES),
)
PERCENT_RESOURCES = (  # a hundred of them are a GPU
    *("koordinator.sh/gpu", "koordinator.sh/gpu-core", "tencent.com/vcuda-core", "aliyun.com/gpu-core.percentage"),
)
MIG_RESOURCES = "nvidia.com/mig-*"

_BOARD = re.compile(r"nvidia\.com/(?:(?:NVIDIA|GRID)[_-])?((?=[A-Za-z_]*[0-9])[A-Z][A-Za-z0-9_]*)")
_VGPU = re.compile(rf"{_BOARD.pattern}-(?:([1-7])-)?([0-9]{{1,3}})[ABCQ](?:ME)?")
_CHIP = re.compile(r"[A-Z]{2}[0-9]{3}[A-Z]{0,2}_")  # GA102GL_A10: the device plugin puts the name of the chip first
_NO_GPU = re.compile(r"nvswitch|audio|usb|connectx|bluefield|rdma|sriov|nic\b|hca", re.IGNORECASE)
_VGPU_GIB = {
    **{"A2": 16, "A10": 24, "A16": 16, "A30": 24, "A30X": 24, "A40": 48, "A100": 40, "A100X": 80, "A100D": 80},
    **{"A5000": 24, "A5500": 24, "A6000": 48, "RTXA5000": 24, "RTXA5500": 24, "RTXA6000": 48, "RTX6000": 24},
    **{"RTX8000": 48, "L2": 24, "L4": 24, "L20": 48, "L40": 48, "L40S": 48, "H100": 80, "H100L": 94, "H100XM": 80},
    **{"H200": 141, "H20": 96, "P4": 8, "P40": 24, "P100": 16, "T4": 16, "V100": 16, "V100D": 32, "V100X": 16},
    **{"V100DX": 32, "M10": 8, "M60": 8},
}
_ACCELERATOR = re.compile(
    r"(?:^|[./_-])(?:[a-z]?gpu|gaudi|hpu|npu|mlu|dcu|gcu|xpu|tpu|neuron|ascend|cuda|accelerator)", re.IGNORECASE
)
_BESIDE_GPUS = (  # parts and properties of GPUs that another resource of the same pod counts
    *("nvidia.com/gpucores", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpu-*"),
    *("volcano.sh/vgpu-*", "koordinator.sh/gpu*", "tencent.com/vcuda-*", "aliyun.com/gpu-*", "aliyun.com/gpu-mem"),
    *("gpu.intel.com/*monitoring", "gpu.intel.com/millicores", "gpu.intel.com/memory.max", "gpu.intel.com/tiles"),
    *("amd.com/gpumem", "amd.com/gpucores"),
)


class NamedBoard(NamedTuple):
    """A GPU board, or a part of one, that a virtual machine's resource counts.

    part: the share of the board, 0 to 1, None if the board's size is unknown.
    """

    model: str
    part: float | None = 1.0


@lru_cache(4096)
def is_gpu_resource(name: str, patterns: tuple[str, ...] = GPU_RESOURCES) -> bool:
    """Return whether a resource counts GPUs, whole or in equal parts.

    MIG instances are distinguished by their profile.

    >>> is_gpu_resource("habana.ai/gaudi"), is_gpu_resource("amd.com/cpx_nps4"), is_gpu_resource("nvidia.com/gpufs")
    (True, True, False)
    >>> is_gpu_resource("metax-tech.com/gpu"), is_gpu_resource("koordinator.sh/gpu")
    (True, False)
    """
    found = [] if name in PERCENT_RESOURCES else [row for row in patterns if fnmatchcase(name, row)]
    return found not in ([], [BOARD_RESOURCES]) or (bool(found) and parse_board_name(name) is not None)


@lru_cache(4096)
def parse_board_name(name: str) -> NamedBoard | None:
    """Return the board that a resource's name stands for: a whole board or a vGPU for a virtual machine.

    The size of a vGPU is that of its memory, or of its MIG instance. Returns None for a resource of another
    name.

    >>> parse_board_name("nvidia.com/GA102GL_A10"), parse_board_name("nvidia.com/GRID_T4-4Q")
    (NamedBoard(model='A10', part=1.0), NamedBoard(model='T4', part=0.25))
    >>> parse_board_name("nvidia.com/NVIDIA_A100-3-20C").part == 3 / 7
    True
    >>> parse_board_name("nvidia.com/GH100_H100_NVSWITCH")
    """
    if _NO_GPU.search(name):
        return None
    if (found := _VGPU.fullmatch(name)) is not None:
        model, slices, gib = found.groups()
        whole = _VGPU_GIB.get(model.replace("_", ""))
        part = int(slices) / 7 if slices else min(1.0, int(gib) / whole) if whole else None
        return NamedBoard(model.replace("_", " "), part)
    if (found := _BOARD.match(name)) is None:
        return None
    return NamedBoard(_CHIP.sub("", found[1], count=1).replace("_", " "))


@lru_cache(4096)
def is_unsupported_gpu_resource(name: str, patterns: tuple[str, ...] = GPU_RESOURCES) -> bool:
    """Return whether a resource seems to count accelerators in a form that Fleetcast cannot read.

    >>> names = ("vendor.example/vgpu-2g", "huawei.com/Ascend910", "nvidia.com/gpu")
    >>> [is_unsupported_gpu_resource(name) for name in names]
    [True, True, False]
    >>> names = ("nvidia.com/gpumem", "ephemeral-storage", "rdma/hca_shared")
    >>> [is_unsupported_gpu_resource(name) for name in names]
    [False, False, False]
    """
    if "/" not in name or is_gpu_resource(name, patterns) or name in PERCENT_RESOURCES:
        return False
    return _ACCELERATOR.search(name) is not None and not any(fnmatchcase(name, row) for row in _BESIDE_GPUS)
