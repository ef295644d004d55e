"""Who holds a GPU, as labels of its series say: in Kubernetes, through a Prometheus, and under Slurm."""

import pytest

from fleetcast.ingest.gpu_labels import find_host_pod, parse_job_label, parse_owner

OWN = {"pod": "nvidia-dcgm-exporter-x8k2p", "namespace": "gpu-operator", "container": "nvidia-dcgm-exporter"}


def test_a_pod_names_its_job_and_its_queue() -> None:
    found = parse_job_label({"pod": "train-42-worker-0", "namespace": "ml", "container": "torch"})
    assert found is not None
    assert (found.job, found.queue, found.pod, found.class_) == ("ml/train-42", "ml", "train-42-worker-0", "training")


def test_a_prometheus_that_keeps_its_own_labels_renames_the_pods() -> None:
    found = parse_job_label(
        {**OWN, "exported_pod": "bert-x7k2p", "exported_namespace": "nlp", "exported_container": "main"}
    )
    assert found is not None
    assert (found.job, found.queue) == ("nlp/bert", "nlp")


@pytest.mark.parametrize("container", ["slurmd", "ray-worker", "htcondor-execute", "yarn-nodemanager", "dask-worker"])
@pytest.mark.parametrize("prefix", ["", "exported_"])
def test_the_worker_of_another_scheduler_is_a_host_and_no_job(container: str, prefix: str) -> None:
    stated = {f"{prefix}{key}": value for key, value in (("pod", "w-0"), ("namespace", "a"), ("container", container))}
    assert (parse_job_label(stated), find_host_pod(stated)) == (None, ("w-0", "a"))


@pytest.mark.parametrize("container", ["torch", "worker", "dask-worker-image-job", "notebook", "main"])
def test_other_containers_are_jobs(container: str) -> None:
    stated = {"pod": "w-0", "namespace": "a", "container": container}
    assert (parse_job_label(stated) is None, find_host_pod(stated)) == (False, None)


def test_the_exporters_own_pod_holds_nothing() -> None:
    assert parse_job_label(OWN) is None


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"pod": "", "namespace": "", "container": ""},
        {"hpc_job": ""},
        {"hpc_job": "0"},
        {"job_id": "17"},
        {"pod": "a\x07"},
    ],
    ids=["absent", "empty", "no Slurm job", "job 0", "another's job_id", "no name"],
)
def test_other_labels_name_nobody(labels: dict[str, str]) -> None:
    assert parse_job_label(labels) is None


def test_slurms_jobs_are_called_as_the_slurm_source_calls_them() -> None:
    found = parse_job_label({"hpc_job": "4711_3", "pod": "", "namespace": ""})
    assert found is not None
    assert (found.job, found.queue) == ("4711_3", "")
    amd = parse_job_label({"job_id": "4712", "job_user": "ada", "job_partition": "mi300"})
    assert amd is not None
    assert (amd.job, amd.queue, amd.user) == ("4712", "mi300", "ada")


@pytest.mark.parametrize(
    ("pod", "owner"),
    [
        ("vllm-6d4cf56db6-x7k2p", "vllm"),
        ("bert-x7k2p", "bert"),
        ("train-42-worker-11", "train-42"),
        ("train-42-master-0", "train-42"),
        ("set-workers-0-3-x7k2p", "set"),
        ("train-42", "train-42"),
        ("notebook-first", "notebook-first"),
        ("web-0", "web-0"),
    ],
)
def test_a_pods_owner_is_its_name_without_what_controllers_append(pod: str, owner: str) -> None:
    assert parse_owner(pod)[0] == owner
