"""The running jobs that may be stopped for a request, and the reasons of the others."""

import numpy as np
import pytest

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.running_jobs import make_running_jobs
from fleetcast.placement.queues.charges import LeafUse
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.standing import QueueStanding
from fleetcast.placement.queues.tree import ReclaimPolicy
from fleetcast.placement.reclaim.eligibility import (
    Eligibility,
    compute_borrowed_gpus,
    compute_eligibility,
    explain_no_victims,
    make_taker,
)

NOW_MS = 10_000_000
FILE = """
[class.urgent]
preempts = ["low", "lab"]
[class.low]
[queue.owed]
guaranteed = {gpu = 16}
[queue.big]
guaranteed = {gpu = 8}
[queue."big/kept"]
guaranteed = {gpu = 8}
[queue."big/over"]
[queue.lab]
guaranteed = {gpu = 32}
preemptible = "all"
[queue.calm]
preemptible = "none"
[queue.front]
class = "urgent"
[queue.cheap]
class = "low"
"""


def find_codes(queue: str, *jobs: tuple[str, float, dict[str, int]], **held: float) -> list[Eligibility]:
    """Return the eligibility of jobs, which are (leaf, age in s, more columns), for a request of a queue.

    held: leaf, with two underscores for a slash → the GPUs that it holds.
    """
    tree = read_queues(FILE)
    use = {leaf.replace("__", "/"): LeafUse({"gpu": gpus}, 0.0) for leaf, gpus in held.items()}
    standing = QueueStanding(tree, use, {"gpu": 64.0})
    columns = {
        name: [more.get(name, unknown) for *_, more in jobs] for name, unknown in (("preemptible", -1), ("stops", 0))
    }
    table = make_running_jobs(
        [f"j{at}" for at in range(len(jobs))],
        leaf=[leaf for leaf, *_ in jobs],
        started_ms=[NOW_MS - round(1000 * age_s) if np.isfinite(age_s) else -1 for _, age_s, _ in jobs],
        gpus=8,
        **columns,
    )
    taker = make_taker(PlacementRequest(request_id="p", queue=queue, gpus_per_node=8), tree)
    found = compute_eligibility(table, taker, standing, ReclaimPolicy(), NOW_MS)
    return [Eligibility(code) for code in found.tolist()]


def test_only_queues_beyond_their_guarantee_give_gpus_back() -> None:
    jobs = [("big/over", 5000, {}), ("big/kept", 5000, {}), ("lab", 5000, {}), ("owed", 5000, {}), ("gone", 5000, {})]
    codes = find_codes("owed", *jobs, big__over=8, big__kept=8, lab=16, owed=8)
    assert codes == [
        Eligibility.RECLAIM,
        Eligibility.WITHIN_GUARANTEE,
        Eligibility.WITHIN_GUARANTEE,
        Eligibility.OWN_QUEUE,
        Eligibility.OTHER_SCHEDULER,
    ]


def test_a_queue_gives_nothing_while_the_queue_above_it_is_within_its_guarantee() -> None:
    assert find_codes("owed", ("big/over", 5000, {}), big__over=8) == [Eligibility.WITHIN_GUARANTEE]
    assert find_codes("owed", ("big/over", 5000, {}), big__over=9) == [Eligibility.RECLAIM]


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (("cheap", 5000, {"preemptible": 0}), Eligibility.OPTED_OUT),
        (("calm", 5000, {}), Eligibility.OPTED_OUT),
        (("calm", 5000, {"preemptible": 1}), Eligibility.RECLAIM),
        (("cheap", 599, {}), Eligibility.YOUNG),
        (("cheap", np.inf, {}), Eligibility.YOUNG),
        (("cheap", 600, {}), Eligibility.RECLAIM),
        (("cheap", 5000, {"stops": 1}), Eligibility.RECLAIM),
        (("cheap", 5000, {"stops": 2}), Eligibility.STOPPED_OFTEN),
    ],
)
def test_owners_ages_and_stops_protect_a_job(job: tuple[str, float, dict[str, int]], code: Eligibility) -> None:
    assert find_codes("owed", job, cheap=8, calm=8) == [code]


def test_a_class_preempts_classes_and_queues_and_guarantees_only_where_the_queue_allows_all() -> None:
    jobs = [("cheap", 5000, {}), ("lab", 5000, {}), ("big/kept", 5000, {}), ("front", 5000, {})]
    codes = find_codes("front", *jobs, cheap=8, lab=8, big__kept=8, front=8)
    assert codes == [Eligibility.PREEMPT, Eligibility.PREEMPT, Eligibility.WITHIN_GUARANTEE, Eligibility.OWN_QUEUE]


def test_a_job_whose_class_may_stop_the_request_is_never_stopped_for_it() -> None:
    assert find_codes("cheap", ("front", 5000, {}), front=8) == [Eligibility.OUTRANKS]
    assert find_codes("lab", ("front", 5000, {}), front=8) == [Eligibility.OUTRANKS]
    assert find_codes("owed", ("front", 5000, {}), front=8) == [Eligibility.RECLAIM]


def test_borrowed_gpus_are_those_beyond_the_guarantee_of_any_kind() -> None:
    tree = read_queues("[queue.a]\nguaranteed = {H100 = 8}\n[queue.b]\nguaranteed = {gpu = 8}\n[queue.c]")
    use = {
        "a": LeafUse({"gpu": 12.0, "H100": 10.0}, 0.0),
        "b": LeafUse({"gpu": 6.0, "H100": 6.0}, 0.0),
        "c": LeafUse({"gpu": 2.0}, 0.0),
    }
    standing = QueueStanding(tree, use, {"gpu": 64.0, "H100": 32.0})
    assert [compute_borrowed_gpus(standing.stands[name]) for name in "abc"] == [4.0, 0.0, 2.0]


def test_reasons_are_counted_the_commonest_first() -> None:
    codes = np.array([Eligibility.YOUNG, Eligibility.OPTED_OUT, Eligibility.OPTED_OUT, Eligibility.RECLAIM], np.int8)
    said = explain_no_victims(codes)
    assert said == "2 jobs protected by owner or queue, 1 job with too short a run yet"
    assert explain_no_victims(codes[3:]) == ""
