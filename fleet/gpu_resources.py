"""Names of Kubernetes resources that stand for GPUs, of every vendor, for the source and for adapters."""

from fnmatch import fnmatchcase
from functools import lru_cache

GPU_RESOURCES = (
    *("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/pgpu", "volcano.sh/vgpu-number"),
    *("amd.com/gpu", "amd.com/?px_nps?", "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi"),
    *("deviceclass.resource.kubernetes.io/*gpu*", "*/gpu"),
)
PERCENT_RESOURCES = (  # a hundred of them are a GPU
    *("koordinator.sh/gpu", "koordinator.sh/gpu-core", "tencent.com/vcuda-core", "aliyun.com/gpu-core.percentage"),
)
MIG_RESOURCES = "nvidia.com/mig-*"


@lru_cache(4096)
def is_gpu_resource(name: str, patterns: tuple[str, ...] = GPU_RESOURCES) -> bool:
    """Return whether a resource counts GPUs, whole or in equal parts; MIG instances are told apart by their profile.

    >>> is_gpu_resource("habana.ai/gaudi"), is_gpu_resource("amd.com/cpx_nps4"), is_gpu_resource("nvidia.com/gpufs")
    (True, True, False)
    >>> is_gpu_resource("metax-tech.com/gpu"), is_gpu_resource("koordinator.sh/gpu")
    (True, False)
    """
    return name not in PERCENT_RESOURCES and any(fnmatchcase(name, pattern) for pattern in patterns)
