"""Pods that are nodes of another scheduler: they hold no GPUs as jobs, and the jobs in them meet the telemetry."""

from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.samples import EntityKind
from fleetcast.service.board.board import Board
from tests.ingest.slurm_outputs import node, nodes
from tests.service.bare_world import BUSY, IDLE, BareWorld, page
from tests.service.pipeline.test_slurm_sites import FIELD_MS, SlurmWorld

FIELD = Path(__file__).parents[2] / "field"
QUEUE, PAGE = ((FIELD / name).read_bytes() for name in ("45-slurmd-pod-labels-queue.json", "45-slurmd-pod-labels.prom"))


def held(board: Board) -> dict[str, list[str | None]]:
    """Who holds each GPU, of nodes with GPUs."""
    rows = board.json("doc.fleet")["nodes"]
    return {row["node"]: [gpu.get("job") or gpu.get("held_by") for gpu in row["gpus"]] for row in rows if row["gpus"]}


@pytest.mark.parametrize("first", ["slurm", "page"])
def test_a_slurm_node_in_a_pod_is_a_host_and_its_job_holds_what_it_uses(tmp_path: Path, first: str) -> None:
    world = SlurmWorld(tmp_path, QUEUE, nodes(node("worker-0", "mixed")))
    world.clock.advance((FIELD_MS - world.clock.now_ms()) / 1000)
    if first == "slurm":
        world.poll()
        world.tick()
    world.run(75, **{"computeinstance-1": PAGE})
    world.poll()
    board = world.run(75, **{"computeinstance-1": PAGE})
    assert held(board) == {"computeinstance-1": ["208", "208", None, None]}
    assert board.json("doc.fleet")["gpus"]["total"] == 4
    assert [row.job for row in world.pipeline.state.jobs.list_running()] == ["208"]
    placed = world.decide(board, gang=1, gpus_per_node=2)
    assert [(rank.node, rank.gpus) for rank in placed.ranks] == [("computeinstance-1", (2, 3))]


def labels(pod: str, container: str, namespace: str = "ml") -> dict[str, str]:
    return {"pod": pod, "namespace": namespace, "container": container}


@pytest.mark.parametrize(
    "container",
    [
        *("slurmd", "slurmd-pyxis", "ray-worker", "ray-head", "pbs_mom", "condor_startd", "htcondor-execute"),
        *("nodemanager", "dask-worker"),
    ],
)
def test_gpus_of_a_host_are_held_by_nobody_until_they_work(tmp_path: Path, container: str) -> None:
    world = BareWorld(tmp_path)
    about = labels("worker-0", container)
    board = world.run(240, n1=page("n1", [(IDLE, about), (BUSY, about)]))
    assert held(board) == {"n1": [None, "unknown"]}
    assert world.pipeline.state.jobs.list_running() == []


def test_a_prometheus_that_renames_the_labels_names_the_same_host(tmp_path: Path) -> None:
    about = {f"exported_{key}": value for key, value in labels("worker-0", "slurmd").items()}
    world = BareWorld(tmp_path)
    board = world.run(240, n1=page("n1", [(IDLE, about)]))
    assert held(board) == {"n1": [None]}


def test_other_pods_of_the_page_stay_jobs(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    gpus: list[Any] = [(BUSY, labels("worker-0", "slurmd")), (BUSY, labels("train-worker-0", "torch"))]
    board = world.run(240, n1=page("n1", gpus))
    assert held(board) == {"n1": ["unknown", "ml/train"]}


def test_one_pod_name_in_two_namespaces_stands_for_no_node(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    one, other = (labels("worker-0", "slurmd", space) for space in ("a", "b"))
    world.run(30, n1=page("n1", [(IDLE, one)]), n2=page("n2", [(IDLE, other)]))
    table = world.pipeline.state.entities[EntityKind.NODE]
    assert table.resolve_name("worker-0") == "worker-0"
