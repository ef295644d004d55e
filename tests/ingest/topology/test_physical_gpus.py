"""Boards of a Kubernetes node, whatever its scheduler counts: shares, MIG instances, partitions."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.topology.load import load_topology
from fleetcast.ingest.topology.physical_gpus import PhysicalGpus, find_physical_gpus
from tests.fuzz.bounds import examples

FIELD = Path(__file__).parents[2] / "field"


def test_a_time_sliced_board_is_one_board() -> None:
    (node,) = load_topology(FIELD / "06-kube-time-slicing.json").nodes
    assert (node.gpus, node.gpu_model, round(node.gpu_memory_gib, 1)) == (1, "A10G", 22.5)


def test_amd_boards_are_counted_with_their_model_and_memory() -> None:
    (node,) = load_topology(FIELD / "08-kube-amd.json").nodes
    assert (node.gpus, node.gpu_model, node.gpu_memory_gib) == (8, "MI300X", 192)


@pytest.mark.parametrize(
    ("labels", "resources", "count", "product"),
    [
        ({}, {"nvidia.com/gpu": "8"}, 8, ""),
        ({"gpu.product": "Tesla-T4-SHARED", "gpu.replicas": "4"}, {"nvidia.com/gpu": "8"}, 2, "Tesla-T4"),
        ({"gpu.replicas": "10", "gpu.count": "2"}, {"nvidia.com/gpu.shared": "20", "nvidia.com/gpu": "0"}, 2, ""),
        ({"gpu.replicas": "10"}, {"nvidia.com/gpu.shared": "20", "nvidia.com/gpu": "0"}, 2, ""),
        (
            {"gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "gpu.count": "56", "mig.strategy": "single"},
            {"nvidia.com/gpu": "56"},
            8,
            "NVIDIA-H100-80GB-HBM3",
        ),
        (
            {"gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb-SHARED", "gpu.count": "4", "gpu.replicas": "5"},
            {"nvidia.com/gpu": "20"},
            2,
            "NVIDIA-A100-SXM4-80GB",
        ),
        ({"gpu.product": "NVIDIA-A30-MIG-1g.6gb", "gpu.count": "8"}, {"nvidia.com/gpu": "8"}, 2, "NVIDIA-A30"),
        (
            {"gpu.product": "A100-SXM4-40GB", "gpu.count": "2", "mig.strategy": "mixed"},
            {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "7", "nvidia.com/mig-3g.20gb": "2"},
            2,
            "A100-SXM4-40GB",
        ),
        ({}, {"nvidia.com/gpu": "1", "nvidia.com/mig-1g.5gb": "7"}, 2, ""),
    ],
)
def test_nvidia(labels: dict[str, str], resources: dict[str, str], count: int, product: str) -> None:
    found = find_physical_gpus("n", {f"nvidia.com/{key}": value for key, value in labels.items()}, resources, {})
    assert (found.boards, found.product) == (count, product)


def test_cloud_labels_count_boards() -> None:
    gke = "cloud.google.com/gke"
    shared = {f"{gke}-accelerator": "nvidia-l4", f"{gke}-max-shared-clients-per-gpu": "8"}
    assert find_physical_gpus("n", shared, {"nvidia.com/gpu": "16"}, {})[:2] == (2, "nvidia-l4")
    divided = {f"{gke}-accelerator": "nvidia-tesla-a100", f"{gke}-gpu-partition-size": "1g.5gb"}
    assert find_physical_gpus("n", divided, {"nvidia.com/gpu": "14"}, {}).boards == 2
    karpenter = {"karpenter.k8s.aws/instance-gpu-count": "1", "karpenter.k8s.aws/instance-gpu-name": "a10g"}
    assert find_physical_gpus("n", karpenter, {"nvidia.com/gpu": "10"}, {})[:2] == (1, "a10g")


def test_vgpu_schedulers_list_their_boards_in_annotations() -> None:
    old = "GPU-1,10,24576,100,NVIDIA-A10,0,true:GPU-2,10,24576,100,NVIDIA-A10,0,true:"
    new = json.dumps([{"id": "GPU-1", "count": 10}, {"id": "GPU-2", "count": 10}])
    for text in (old, new):
        assert find_physical_gpus("n", {}, {"nvidia.com/gpu": "20"}, {"hami.io/node-nvidia-register": text}).boards == 2
    assert find_physical_gpus("n", {}, {"nvidia.com/gpu": "2"}, {"hami.io/node-nvidia-register": "[broken"}).boards == 2


def test_other_vendors() -> None:
    divided = {"amd.com/gpu.compute-memory-partition": "cpx_nps4"}
    assert find_physical_gpus("n", divided, {"amd.com/gpu": "64"}, {}).boards == 8
    assert find_physical_gpus("n", {}, {"amd.com/cpx_nps4": "8", "amd.com/spx_nps1": "7"}, {}).boards == 8
    numbers = {"gpu.intel.com/gpu-numbers": "0.1", "gpu.intel.com/product": "Max_1550"}
    assert find_physical_gpus("n", numbers, {"gpu.intel.com/i915": "20"}, {})[:2] == (2, "Max_1550")
    monitored = {"gpu.intel.com/xe": "4", "gpu.intel.com/xe_monitoring": "1"}
    assert find_physical_gpus("n", {}, monitored, {}).boards == 4
    assert find_physical_gpus("n", {}, {"habana.ai/gaudi": "8"}, {})[:2] == (8, "Gaudi")
    assert find_physical_gpus("n", {}, {"metax-tech.com/gpu": "8", "nvidia.com/gpu": "0"}, {}).boards == 8
    assert find_physical_gpus("n", {}, {"aliyun.com/gpu-count": "4", "aliyun.com/gpu-mem": "64"}, {}).boards == 4
    assert find_physical_gpus("n", {}, {"koordinator.sh/gpu": "800", "nvidia.com/gpu": "8"}, {}).boards == 8
    assert find_physical_gpus("n", {}, {"cpu": "8", "memory": "1Ki"}, {}) == PhysicalGpus()


def test_a_count_that_is_none_names_the_node_and_the_value() -> None:
    with pytest.raises(ConfigError, match=r"node 'n': 'many' is no count of at most 1,024"):
        find_physical_gpus("n", {"nvidia.com/gpu.count": "many"}, {}, {})


@examples(200)
@given(
    boards=st.integers(1, 16),
    replicas=st.integers(1, 48),
    profile=st.sampled_from(["", "1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"]),
    is_labelled=st.booleans(),
    is_renamed=st.booleans(),
)
def test_however_boards_are_divided_they_are_counted_once(
    boards: int, replicas: int, profile: str, is_labelled: bool, is_renamed: bool
) -> None:
    instances = {"": 1, "1g.10gb": 7, "2g.20gb": 3, "3g.40gb": 2, "7g.80gb": 1}[profile]
    product = "NVIDIA-H100-80GB-HBM3" + (f"-MIG-{profile}" if profile else "")
    labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.replicas": str(replicas)}
    if replicas > 1 and not is_renamed:
        labels["nvidia.com/gpu.product"] += "-SHARED"
    if is_labelled:
        labels["nvidia.com/gpu.count"] = str(boards * instances)
    resource = "nvidia.com/gpu.shared" if is_renamed and replicas > 1 else "nvidia.com/gpu"
    found = find_physical_gpus("n", labels, {resource: str(boards * instances * replicas)}, {})
    assert (found.boards, found.product, found.shares) == (boards, "NVIDIA-H100-80GB-HBM3", replicas)
