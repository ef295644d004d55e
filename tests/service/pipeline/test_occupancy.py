import msgspec
import numpy as np

from fleet.events import Started, Submitted
from fleet.jobs import JobAttempt
from fleet.requests import RankPlacement
from fleet.topology import NodeSpec, Topology
from service.pipeline.occupancy import observe

TOPOLOGY = Topology.build([NodeSpec("a", gpus=4), NodeSpec("b", gpus=2)])
INDEX = {"a": 0, "b": 1}


def attempt(job: str, started: Started, gpus_per_node: int = 1, cpus: int | None = None) -> JobAttempt:
    row = JobAttempt(job, 1)
    row.fold(Submitted(job=job, sequence=0, time_ms=0, gpus_per_node=gpus_per_node, cpus=cpus))
    row.fold(started)
    return row


def test_ranks_hold_the_gpus_they_name() -> None:
    ranks = (RankPlacement(0, "a", (1, 3)), RankPlacement(1, "b", (0,)))
    seen = observe([attempt("j", Started(job="j", sequence=1, time_ms=1, ranks=ranks))], TOPOLOGY, INDEX)
    assert seen.holder.tolist() == [[-1, 0, -1, 0], [0, -1, -1, -1]]
    assert seen.node_jobs == {0: ["j"], 1: ["j"]}


def test_a_job_that_names_nodes_only_takes_free_gpus_there() -> None:
    first = attempt("x", Started(job="x", sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", (0,)),)))
    second = attempt("y", Started(job="y", sequence=1, time_ms=1, nodes=("a",)), gpus_per_node=2)
    assert observe([first, second], TOPOLOGY, INDEX).holder[0].tolist() == [0, 1, 1, -1]


def test_unknown_nodes_and_gpus_beyond_the_node_are_ignored() -> None:
    ranks = (RankPlacement(0, "nowhere", (0,)), RankPlacement(1, "a", (0, 99)))
    seen = observe([attempt("j", Started(job="j", sequence=1, time_ms=1, ranks=ranks))], TOPOLOGY, INDEX)
    assert np.flatnonzero(seen.holder.ravel() >= 0).tolist() == [0]


def test_cpus_count_once_a_node() -> None:
    ranks = (RankPlacement(0, "a", (0,)), RankPlacement(1, "a", (1,)))
    started = Started(job="j", sequence=1, time_ms=1, ranks=ranks)
    assert observe([attempt("j", started, cpus=8)], TOPOLOGY, INDEX).used_cpus.tolist() == [8, 0]


def test_gpus_that_a_smaller_node_does_not_have_are_held_by_nobody() -> None:
    started = Started(job="j", sequence=1, time_ms=1, ranks=(RankPlacement(0, "b", (1, 2, 3)),))
    assert observe([attempt("j", started)], TOPOLOGY, INDEX).holder[1].tolist() == [-1, 0, -1, -1]


def test_jobs_that_take_parts_share_a_gpu_and_a_whole_one_is_nobody_elses() -> None:
    told = (RankPlacement(0, "a", (0,), 300), RankPlacement(1, "a", (1,), 300))
    by_ranks = attempt("x", Started(job="x", sequence=1, time_ms=1, ranks=told))
    by_submission = attempt("y", Started(job="y", sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", (0,)),)))
    assert by_submission.submission is not None
    by_submission.submission = msgspec.structs.replace(by_submission.submission, gpu_share=500)
    whole = attempt("z", Started(job="z", sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", (1,)),)))
    seen = observe([by_ranks, by_submission, whole], TOPOLOGY, INDEX)
    assert seen.holder[0].tolist() == [0, 2, -1, -1]
    assert seen.parts.tolist() == [[0, 0, 0, 300], [1, 0, 0, 500]]


def test_gpus_that_somebody_names_are_not_guessed_for_another() -> None:
    guessed = attempt("x", Started(job="x", sequence=1, time_ms=1, nodes=("a",)), gpus_per_node=2)
    named = attempt("y", Started(job="y", sequence=1, time_ms=1, ranks=(RankPlacement(0, "a", (0, 1)),)))
    assert observe([guessed, named], TOPOLOGY, INDEX).holder[0].tolist() == [1, 1, 0, 0]
