"""Pods that stand for their machine: nodes of other schedulers are no jobs, and exporters report under their pods."""

import json
from typing import Any

import pytest

from tests.ingest.kubernetes.test_owners import Fed, owned
from tests.ingest.small_kubernetes import meta, running, template


def labelled(name: str, **labels: str) -> dict[str, Any]:
    about = meta(name, labels={key.replace("__", "/"): value for key, value in labels.items()})
    return running({"metadata": about, "spec": template(), "status": {}}, "n0")


def running_program(name: str, container: str = "main", image: str = "") -> dict[str, Any]:
    thing = labelled(name)
    thing["spec"]["containers"][0] |= {"name": container, "image": image}
    return thing


RAY = {"ray.io/cluster": "c", "ray.io/node-type": "worker"}
HOSTS = {
    "slinky": owned("worker-0", "slinky.slurm.net/v1beta1", "NodeSet", "worker"),
    "label": labelled("worker-0", app__kubernetes__io="x", **{"app.kubernetes.io/name": "slurmd"}),
    "soperator": owned("worker-0", "slurm.nebius.ai/v1alpha1", "NodeSet", "worker"),
    "container": running_program("worker-0", container="slurmd"),
    "image": running_program("worker-0", image="ghcr.io/slinkyproject/slurmd-pyxis:25.05"),
    "ray": owned("c-worker-0", "ray.io/v1", "RayCluster", "c", **RAY),
    "condor": running_program("execute-0", container="condor_startd"),
}


@pytest.mark.parametrize("kind", HOSTS)
def test_a_node_of_another_scheduler_is_no_job(kind: str) -> None:
    fed = Fed()
    fed.put("pods", HOSTS[kind])
    assert fed.running() == {}
    assert fed.source.health()["hosts"] == 1
    assert fed.source.health()["pods"] == 0


def test_ray_nodes_of_a_ray_job_are_that_job() -> None:
    labels = {**RAY, "ray.io/originated-from-crd": "RayJob", "ray.io/originated-from-cr-name": "tune"}
    fed = Fed()
    fed.put("pods", owned("c-worker-0", "ray.io/v1", "RayCluster", "c", **labels))
    assert fed.running() == {"ml/tune": ("n-c-worker-0",)}


def test_a_site_may_count_hosts_as_jobs() -> None:
    fed = Fed(host_labels=[])
    fed.put("pods", HOSTS["ray"], HOSTS["container"])
    assert fed.running().keys() == {"ml/c", "ml/worker-0"}


def test_a_host_that_an_earlier_version_took_for_a_job_ends_as_one() -> None:
    before = Fed(host_labels=[])
    before.put("pods", HOSTS["container"])
    fed = Fed()
    fed.source.seek(json.loads(json.dumps(before.source.position())))
    for event in before.events:
        fed.table.apply(event)
    fed.put("pods", HOSTS["container"])
    fed.wait(3)
    assert fed.running() == {}


def node(name: str, *addresses: tuple[str, str], **labels: str) -> dict[str, Any]:
    rows = [{"type": kind, "address": address} for kind, address in addresses]
    about = {**meta(name), "labels": {key.replace("__", "/"): value for key, value in labels.items()}}
    return {"metadata": about, "status": {"addresses": rows, "capacity": {"nvidia.com/gpu": "8"}}}


def test_a_node_has_its_host_name_addresses_and_the_names_of_pods_that_stand_for_it() -> None:
    fed = Fed()
    addresses = [("Hostname", "ip-10-0-0-5"), ("InternalIP", "10.0.0.5"), ("ExternalIP", "1.2.3.4")]
    fed.put("nodes", node("gpu-1", *addresses, kubernetes__io="x", **{"kubernetes.io/hostname": "gpu-1.local"}))
    exporter = owned("dcgm-exporter-6ldbb", "apps/v1", "DaemonSet", "dcgm-exporter")
    exporter = running(exporter, "gpu-1")
    exporter["status"]["podIP"] = "10.244.1.7"
    fed.put("pods", exporter, running(HOSTS["slinky"], "gpu-1"))
    names = ("ip-10-0-0-5", "10.0.0.5", "gpu-1.local")
    pods = ("dcgm-exporter-6ldbb", "10.244.1.7", "worker-0")
    assert fed.source.nodes()["gpu-1"].other_names == (*names, *pods)
    fed.put("pods", exporter, kind="DELETED")
    assert fed.source.nodes()["gpu-1"].other_names == (*names, "worker-0")


@pytest.mark.parametrize("kind", ["DaemonSet", "DaemonSet.apps.kruise.io"])
def test_gpus_of_a_pod_that_runs_on_every_node_are_held_and_no_job(kind: str) -> None:
    """A server that a DaemonSet puts on each node holds its GPUs as long as it is there."""
    fed = Fed()
    fed.put("nodes", node("gpu-1"), node("gpu-2"))
    name, _, group = kind.partition(".")
    pod = owned("server-x7k2p", f"{group or 'apps'}/v1", name, "server")
    pod["spec"]["containers"] = [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]
    pod = running(pod, "gpu-1")
    fed.put("pods", pod)
    specs = fed.source.nodes()
    assert ({row: spec.lent_gpus for row, spec in specs.items()}, fed.running()) == ({"gpu-1": 2, "gpu-2": 0}, {})
    assert fed.source.health()["hosts"] == 0
    assert specs["gpu-1"].other_names == (), "it stands for nothing but itself"
    fed.put("pods", pod, kind="DELETED")
    assert fed.source.nodes()["gpu-1"].lent_gpus == 0


def test_a_share_that_a_daemon_set_holds_is_no_whole_board() -> None:
    fed = Fed()
    shared = {**node("gpu-1"), "status": {"capacity": {"nvidia.com/gpu": "12"}}}
    shared["metadata"]["labels"] = {"nvidia.com/gpu.count": "1", "nvidia.com/gpu.replicas": "12"}
    pod = owned("server-x7k2p", "apps/v1", "DaemonSet", "server")
    pod["spec"]["containers"] = [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    fed.put("nodes", shared)
    fed.put("pods", running(pod, "gpu-1"))
    assert fed.source.nodes()["gpu-1"].lent_gpus == 0
