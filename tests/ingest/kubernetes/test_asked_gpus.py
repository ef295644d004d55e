"""GPUs that pods ask for in other ways than whole `nvidia.com/gpu`: claims, fractions, shares, other vendors."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.clients.kubernetes import Changes
from fleetcast.ingest.kubernetes.asked_gpus import ASKED_RESOURCES, NodeGpus, read_asked_gpus
from fleetcast.ingest.kubernetes.objects import Container, PodSpec, Resources
from tests.fuzz.bounds import examples
from tests.ingest.kubernetes.test_owners import Fed
from tests.ingest.small_kubernetes import job, meta, running

FIELD = Path(__file__).parents[2] / "field"
DRA_POD = json.loads((FIELD / "30-kube-dra-pod.json").read_text())


def devices(count: int, version: str = "v1", device_class: str = "gpu.nvidia.com", **more: Any) -> dict[str, Any]:
    """The devices that a claim asks for, as a version of the API writes them."""
    asked = {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": count, **more}
    row = {"name": "gpus", **asked} if version == "v1beta1" else {"name": "gpus", "exactly": asked}
    return {"devices": {"requests": [row]}}


def claim_template(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": meta(name), "spec": {"spec": asked}}


def claiming(name: str, **claim: str) -> dict[str, Any]:
    spec = {"containers": [{"name": "c"}], "resourceClaims": [{"name": "gpus", **claim}]}
    return running({"metadata": meta(name), "spec": spec}, "n0")


def resources(gpus: str, amount: str = "1", **annotations: str) -> dict[str, Any]:
    containers = [{"name": "c", "resources": {"limits": {gpus: amount} if gpus else {}}}]
    about = meta("p", annotations={key.replace("_", "-"): value for key, value in annotations.items()})
    return running({"metadata": about, "spec": {"containers": containers}}, "n0")


def shared_node(name: str, **labels: str) -> dict[str, Any]:
    about = {f"nvidia.com/{key.replace('_', '.')}": value for key, value in labels.items()}
    return {"metadata": {**meta(name), "labels": about}, "status": {"capacity": {"nvidia.com/gpu": "12"}}}


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_a_pod_with_a_claim_template_holds_the_devices_of_the_template(version: str) -> None:
    fed = Fed()
    fed.put("resourceclaimtemplates", claim_template("eight-h100", devices(8, version)))
    fed.put("pods", DRA_POD)
    assert fed.running() == {"ml/train-0": ("n0",)}
    submitted = fed.submitted("ml/train-0")
    assert (submitted.gpus_per_node, submitted.gpu_share) == (8, None)


def test_a_claim_that_no_object_explains_is_one_gpu_and_the_job_says_so() -> None:
    fed = Fed()
    fed.put("pods", DRA_POD)
    submitted = fed.submitted("ml/train-0")
    assert (submitted.gpus_per_node, submitted.labels["unread_claims"]) == (1, "eight-h100")


def test_claims_count_devices_by_their_class_and_what_is_allocated() -> None:
    fed = Fed()
    fed.put("resourceclaims", {"metadata": meta("nic"), "spec": devices(2, device_class="dranet")})
    fed.put("resourceclaims", {"metadata": meta("watch"), "spec": devices(8, adminAccess=True)})
    results = [{"request": "gpus", "device": f"gpu-{number}"} for number in range(4)]
    status = {"allocation": {"devices": {"results": [*results, {"request": "nics"}]}}}
    asked = devices(1, allocationMode="All")
    fed.put("resourceclaims", {"metadata": meta("all"), "spec": asked, "status": status})
    for name in ("nic", "watch", "all"):
        fed.put("pods", claiming(f"p-{name}", resourceClaimName=name))
    assert fed.running().keys() == {"ml/p-all"}
    assert fed.submitted("ml/p-all").gpus_per_node == 4


def test_the_first_choice_of_a_request_with_several_counts() -> None:
    choices = [{"name": "big", "deviceClassName": "gpu.nvidia.com", "count": 2}, {"name": "small", "count": 1}]
    fed = Fed()
    asked = {"devices": {"requests": [{"name": "gpus", "firstAvailable": choices}]}}
    fed.put("resourceclaims", {"metadata": meta("some"), "spec": asked})
    fed.put("pods", claiming("p", resourceClaimName="some"))
    assert fed.submitted("ml/p").gpus_per_node == 2


def test_pods_that_hold_one_claim_together_hold_its_gpu_in_parts() -> None:
    pods = [{"resource": "pods", "name": name, "uid": f"u-{name}"} for name in ("a", "b")]
    fed = Fed()
    fed.put("resourceclaims", {"metadata": meta("one"), "spec": devices(1), "status": {"reservedFor": pods}})
    fed.put("pods", *[claiming(name, resourceClaimName="one") for name in ("a", "b")])
    assert [fed.submitted(f"ml/{name}").gpu_share for name in ("a", "b")] == [500, 500]


def test_a_job_object_counts_the_claims_of_its_template() -> None:
    fed = Fed()
    fed.put("resourceclaimtemplates", claim_template("four", devices(4)))
    spec = {"containers": [{"name": "c"}], "resourceClaims": [{"name": "g", "resourceClaimTemplateName": "four"}]}
    thing = job("train", 2)
    thing["spec"]["template"]["spec"] = spec
    fed.put("jobs", thing)
    assert (fed.submitted("ml/train").gang, fed.submitted("ml/train").gpus_per_node) == (2, 4)


def test_claims_that_are_deleted_are_forgotten_and_the_others_survive_a_restart() -> None:
    fed = Fed()
    fed.put("resourceclaimtemplates", claim_template("four", devices(4)), claim_template("two", devices(2)))
    fed.put("resourceclaimtemplates", claim_template("two", devices(2)), kind="DELETED")
    again = Fed()
    again.source.seek(json.loads(json.dumps(fed.source.position())))
    again.put("pods", claiming("p", resourceClaimTemplateName="four"), claiming("q", resourceClaimTemplateName="two"))
    assert again.submitted("ml/p").gpus_per_node == 4
    assert again.submitted("ml/q").labels["unread_claims"] == "two"


@pytest.mark.parametrize(
    ("resource", "amount", "gpus"),
    [
        *(("amd.com/gpu", "8", 8), ("gpu.intel.com/i915", "2", 2), ("gpu.intel.com/xe", "1", 1)),
        *(("habana.ai/gaudi", "8", 8), ("nvidia.com/gpu.shared", "1", 1), ("nvidia.com/mig-1g.10gb", "2", 2)),
        *(("gpu.intel.com/xe_monitoring", "1", 0), ("deviceclass.resource.kubernetes.io/gpu.nvidia.com", "2", 2)),
        *(("metax-tech.com/gpu", "4", 4), ("hami.io/gpu", "1", 1), ("example.com/gpu-exporter", "1", 0)),
        *(("amd.com/cpx_nps4", "1", 1), ("nvidia.com/mig-1g.10gb.shared", "1", 1), ("cpu", "8", 0)),
    ],
)
def test_resources_of_every_vendor_are_seen(resource: str, amount: str, gpus: int) -> None:
    fed = Fed()
    fed.put("pods", resources(resource, amount))
    assert [fed.submitted(name).gpus_per_node for name in fed.running()] == ([gpus] if gpus else [])


@pytest.mark.parametrize(
    ("resource", "amount", "asked"),
    [
        *(("koordinator.sh/gpu-core", "50", (1, 500)), ("koordinator.sh/gpu", "200", (2, None))),
        *(("tencent.com/vcuda-core", "150", (2, 750)), ("aliyun.com/gpu-core.percentage", "25", (1, 250))),
        ("aliyun.com/gpu-mem", "8", (1, None)),
    ],
)
def test_percents_of_gpus_are_parts_of_them(resource: str, amount: str, asked: tuple[int, int | None]) -> None:
    assert asked_of(resources(resource, amount)) == asked


def test_memory_of_a_board_is_a_part_of_it_where_its_size_is_known() -> None:
    def on(memory_gib: float, **limits: str) -> tuple[int, int | None]:
        rows = {name.replace("__", "/").replace("_", "."): amount for name, amount in limits.items()}
        spec = PodSpec(containers=(Container(resources=Resources(limits=rows)),))
        found = read_asked_gpus(spec, ASKED_RESOURCES, node=NodeGpus(1, memory_gib))
        return found.gpus, found.share

    assert on(32.0, nvidia_com__gpu="1", nvidia_com__gpumem="8192") == (1, 250)
    assert on(0.0, nvidia_com__gpu="1", nvidia_com__gpumem="8192") == (1, None)
    assert on(32.0, nvidia_com__gpu="2", nvidia_com__gpumem="8192", nvidia_com__gpucores="50") == (2, 500)


def test_fractions_of_kai_are_parts_of_gpus() -> None:
    assert asked_of(resources("", gpu_fraction="0.5")) == (1, 500)
    assert asked_of(resources("", gpu_fraction="0.25", gpu_fraction_num_devices="2")) == (2, 250)
    assert asked_of(resources("", gpu_fraction="nothing at all")) == "quantity 'nothing at all'"


def test_gpu_memory_of_kai_is_a_part_by_the_memory_of_the_node() -> None:
    node = shared_node("n0", gpu_memory="40960", gpu_count="1")
    assert asked_of(resources("", gpu_memory="10240"), node) == (1, 250)
    assert asked_of(resources("", gpu_memory="10240")) == (1, None), "of a node whose memory is not known"


def test_a_pod_that_only_reserves_a_gpu_for_fractions_is_no_job() -> None:
    pod = resources("nvidia.com/gpu")
    pod["metadata"]["namespace"] = "kai-resource-reservation"
    fed = Fed()
    fed.put("pods", pod)
    assert fed.running() == {}


def test_a_share_of_a_time_sliced_board_is_a_part_of_it() -> None:
    node = shared_node("n0", gpu_replicas="12", gpu_count="1")
    assert asked_of(resources("nvidia.com/gpu"), node) == (1, 83)
    assert asked_of(resources("nvidia.com/gpu.shared", "3"), node) == (1, 250)
    assert asked_of(resources("nvidia.com/gpu", "2")) == (2, None)


def test_cores_of_hami_are_the_part_of_each_board() -> None:
    spec = PodSpec((Container(resources=Resources(limits={"nvidia.com/gpu": 2, "nvidia.com/gpucores": "30"})),))
    assert read_asked_gpus(spec, ASKED_RESOURCES)[:3] == (2, "", 300)


def launcher(*devices: str) -> dict[str, Any]:
    """The pod of a virtual machine as KubeVirt makes it: each device is a resource of its own of one container."""
    pod = resources("")
    counts = {name: str(devices.count(name)) for name in devices}
    owner = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "name": "vm",
        "uid": "v",
        "controller": True,
    }
    pod["metadata"]["name"], pod["metadata"]["ownerReferences"] = "virt-launcher-vm-x7k2p", [owner]
    pod["spec"]["containers"] = [
        {"name": "compute", "resources": {"limits": counts, "requests": {**counts, "devices.kubevirt.io/kvm": "1"}}},
        {"name": "guest-console-log", "resources": {"limits": {"cpu": "15m"}}},
    ]
    return pod


@pytest.mark.parametrize(
    ("device", "asked"),
    [
        *(("nvidia.com/GA102GL_A10", (2, None)), ("nvidia.com/GH100_H100_PCIE", (2, None))),
        *(("nvidia.com/TU104GL_Tesla_T4", (2, None)), ("nvidia.com/pgpu", (2, None)), ("amd.com/gpu_vf", (2, None))),
        *(
            ("nvidia.com/NVIDIA_A10-4Q", (2, 167)),
            ("nvidia.com/GRID_T4-1Q", (2, 62)),
            ("nvidia.com/A100-1-5C", (2, 143)),
        ),
        *(("nvidia.com/NVIDIA_L40S-48Q", (2, None)), ("nvidia.com/NVIDIA_NEWBOARD9-8C", (2, None))),
    ],
)
def test_a_virtual_machine_holds_the_boards_that_it_gets_whole_and_its_virtual_gpus(
    device: str, asked: tuple[int, int | None]
) -> None:
    fed = Fed()
    fed.put("pods", launcher(device, device))
    assert fed.running() == {"ml/vm": ("n0",)}
    submitted = fed.submitted("ml/vm")
    assert (submitted.gpus_per_node, submitted.gpu_share) == asked
    assert submitted.labels["kind"] == "VirtualMachineInstance"


@pytest.mark.parametrize(
    ("capacity", "boards", "model"),
    [
        ({"nvidia.com/GA102GL_A10": "2", "nvidia.com/gpu": "0"}, 2, "A10"),
        ({"nvidia.com/GH100_H100_SXM5_80GB": "8", "nvidia.com/GH100_H100_NVSWITCH": "4"}, 8, "H100"),
        ({"nvidia.com/NVIDIA_A10-4Q": "12"}, 2, "A10"),
        ({"nvidia.com/GRID_T4-16Q": "1", "nvidia.com/GRID_T4-4Q": "4"}, 2, "T4"),
        ({"amd.com/gpu_pf": "8"}, 8, ""),
        ({"nvidia.com/ConnectX7_VF": "16", "nvidia.com/hostdev": "4"}, 0, ""),
    ],
)
def test_a_node_of_virtual_machines_has_the_boards_that_its_resources_stand_for(
    capacity: dict[str, str], boards: int, model: str
) -> None:
    fed = Fed()
    fed.put("nodes", {"metadata": meta("n0"), "status": {"capacity": capacity}})
    spec = fed.source.nodes()["n0"]
    assert (spec.gpus, spec.gpu_model) == (boards, model)


@pytest.mark.parametrize(
    "name", ["huawei.com/Ascend910", "vendor.example/vgpu-2g", "gpu.intel.com/new", "aws.amazon.com/neuron"]
)
def test_a_resource_that_looks_like_a_gpu_and_is_not_read_is_counted_and_named(name: str) -> None:
    fed = Fed()
    decode = fed.decode["pods"]
    pod = Changes("pods", (("ADDED", decode(json.dumps(resources(name, "8")).encode())),), "2")
    tally = fed.source.apply_messages([pod]).get_tally()
    assert (tally.unread, tally.names, tally.all) == (1, (name,), 1)
    node = {"metadata": meta("n1"), "status": {"capacity": {name: "8"}}}
    tally = fed.source.apply_messages(
        [Changes("nodes", (("ADDED", fed.decode["nodes"](json.dumps(node).encode())),), "3")]
    ).get_tally()
    assert (tally.read, tally.names, tally.unknown_fields) == (1, (name,), 1)


@pytest.mark.parametrize(
    "name", ["cpu", "rdma/hca_shared_devices_a", "nvidia.com/gpumem", "gpu.intel.com/xe_monitoring"]
)
def test_resources_that_are_no_gpus_are_left_out_by_rule(name: str) -> None:
    fed = Fed()
    pod = Changes("pods", (("ADDED", fed.decode["pods"](json.dumps(resources(name)).encode())),), "2")
    tally = fed.source.apply_messages([pod]).get_tally()
    assert (tally.unread, tally.names, sum(tally.ignored.values())) == (0, (), 1)


@pytest.mark.parametrize(
    ("init", "policy", "main", "gpus"),
    [
        ("4", None, "0", 4),
        ("4", None, "2", 4),
        ("2", None, "8", 8),
        ("2", "Always", "8", 10),
        ("1", "OnFailure", "1", 1),
    ],
)
def test_a_pod_holds_what_the_largest_of_its_phases_asks_for(
    init: str, policy: str | None, main: str, gpus: int
) -> None:
    """A container that runs before the others holds its GPUs for the pod, and the scheduler keeps them to its end."""
    pod = resources("nvidia.com/gpu", main)
    first = {"name": "check", "resources": {"limits": {"nvidia.com/gpu": init}}}
    pod["spec"]["initContainers"] = [first | ({"restartPolicy": policy} if policy else {})]
    fed = Fed()
    fed.put("pods", pod)
    assert fed.submitted("ml/p").gpus_per_node == gpus


def test_a_site_may_count_a_resource_that_is_not_known() -> None:
    fed = Fed(gpu_resources=["huawei.com/Ascend910"])
    fed.put("pods", resources("huawei.com/Ascend910", "8"))
    assert fed.submitted("ml/p").gpus_per_node == 8


def asked_of(pod: dict[str, Any], *nodes: dict[str, Any]) -> Any:
    fed = Fed()
    fed.put("nodes", *nodes)
    fed.put("pods", pod)
    if fed.bad:
        return fed.bad[0].partition(": expected")[0]
    submitted = fed.submitted("ml/p")
    return submitted.gpus_per_node, submitted.gpu_share


@examples(200)
@given(shares=st.integers(1, 64), boards=st.integers(1, 8), data=st.data())
def test_pods_that_fill_a_node_of_shares_hold_no_more_than_its_boards(
    shares: int, boards: int, data: st.DataObject
) -> None:
    left, milli = shares * boards, 0
    while left:
        amount = data.draw(st.integers(1, left))
        left -= amount
        spec = PodSpec((Container(resources=Resources(limits={"nvidia.com/gpu": amount})),))
        asked = read_asked_gpus(spec, ASKED_RESOURCES, node=NodeGpus(shares))
        milli += asked.gpus * (asked.share or 1000)
    assert milli <= 1000 * boards + shares * boards, "each part is rounded to a thousandth"
