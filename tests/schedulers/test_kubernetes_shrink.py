"""The rules by which the executor `kubernetes` shrinks a Job."""

from typing import Any

import msgspec
import pytest

from fleetcast.schedulers.kubernetes_shrink import POD_INDEX, plan_shrink
from fleetcast.schedulers.kubernetes_stop import StoppableJob, StoppablePod


def make_job(labels: dict[str, str] | None = None, **spec: Any) -> StoppableJob:
    sizes = {"parallelism": 4, "completions": 4, "completionMode": "Indexed"}
    return msgspec.convert({"metadata": {"name": "j", "labels": labels}, "spec": {**sizes, **spec}}, StoppableJob)


def make_pods(places: str) -> list[StoppablePod]:
    """Pod 0 is on the node of the first letter, and so on."""
    return [
        msgspec.convert(
            {"metadata": {"name": f"j-{index}", "labels": {POD_INDEX: str(index)}}, "spec": {"nodeName": node}},
            StoppablePod,
        )
        for index, node in enumerate(places)
    ]


@pytest.mark.parametrize(
    ("places", "named", "size"), [("abcd", "d", 3), ("abcd", "cd", 2), ("abcc", "c", 2), ("aabb", "b", 2)]
)
def test_the_pods_with_the_highest_indexes_leave(places: str, named: str, size: int) -> None:
    assert plan_shrink(make_job(), make_pods(places), set(named)) == size


@pytest.mark.parametrize(
    ("job", "places", "named", "why"),
    [
        (make_job(), "abcd", "a", "a Job gives up its highest indexes first: 3, and the action names 0"),
        (make_job(), "abba", "a", "a Job gives up its highest indexes first: 2, 3, and the action names 0, 3"),
        (make_job(), "aaaa", "a", "no pod would be left"),
        (make_job(), "abcd", "e", "another attempt: the Job has no pod on e"),
        (make_job({"kueue.x-k8s.io/queue-name": "q"}), "abcd", "d", "Kueue suspends a Job whose parallelism changes"),
        *(
            (job, "abcd", "d", "only an Indexed Job whose completions equal its parallelism can give up pods")
            for job in (make_job(completionMode="NonIndexed"), make_job(completions=8), make_job(completions=None))
        ),
    ],
)
def test_other_pods_stay(job: StoppableJob, places: str, named: str, why: str) -> None:
    assert plan_shrink(job, make_pods(places), set(named)) == why


def test_a_jobset_keeps_its_pods() -> None:
    job = make_job()
    job.is_set = True
    assert plan_shrink(job, make_pods("abcd"), {"d"}) == "a JobSet keeps its number of pods"
