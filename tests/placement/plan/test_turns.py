"""The order within a queue of the tree, in the plan."""

from dataclasses import replace

import numpy as np
import pytest

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import NO_RUNNING_JOBS
from fleetcast.placement.plan.queue import WaitingEntry, plan
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.charges import LeafUse
from fleetcast.placement.queues.queues_file import read_queues
from tests.placement.runs import Run, table_of

NOW_MS = 1_700_000_000_000
UNKNOWN = RunTimeQuantiles({})


def entry(name: str, gpus: int, limit_s: float | None, waited_s: float = 60.0, priority: int = 0) -> WaitingEntry:
    request = PlacementRequest(request_id=name, queue="a", gpus_per_node=gpus, limit_s=limit_s, priority=priority)
    return WaitingEntry(request, NOW_MS - round(1000 * waited_s))


WIDE = entry("wide", 8, 60.0, waited_s=90.0)
LONG = entry("long", 1, 9000.0, waited_s=80.0)
SMALL = entry("small", 2, 60.0)
QUEUE = [WIDE, LONG, SMALL]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("shortest", ["small", "wide", "long"]), ("fifo", ["wide", "long", "small"])],
)
def test_a_queue_is_ordered_as_its_file_says(make_view, order: str, expected: list[str]) -> None:
    tree = read_queues(f'[queue.a]\norder = "{order}"\n')
    turns = TreeTurns(tree, {}, make_view({"r01": [8]}), UNKNOWN, NOW_MS)
    assert [row.request.request_id for row in turns.sort_entries(QUEUE)] == expected


def test_a_higher_priority_and_who_is_overdue_go_before_the_least_area(make_view) -> None:
    view = make_view({"r01": [8]})
    turns = TreeTurns(read_queues("[queue.a]\nmax_wait_h = 1\n"), {}, view, UNKNOWN, NOW_MS)
    overdue, urgent = entry("overdue", 8, 9e5, waited_s=3600.0), entry("urgent", 8, 9e5, priority=1)
    queue = [SMALL, urgent, overdue]
    assert [row.request.request_id for row in turns.sort_entries(queue)] == ["overdue", "urgent", "small"]


def test_without_a_limit_a_request_counts_as_a_day_long(make_view) -> None:
    turns = TreeTurns(read_queues("[queue.a]\n"), {}, make_view({"r01": [8]}), UNKNOWN, NOW_MS)
    queue = [entry("unknown", 1, None), entry("long", 1, 86_399.0)]
    assert [row.request.request_id for row in turns.sort_entries(queue)] == ["long", "unknown"]


def test_beside_the_head_the_least_area_goes_first_whoever_has_waited(make_view) -> None:
    view = make_view({"r01": [3]})
    tree = read_queues("[queue.a]\nmax_wait_h = 1\n")
    head, overdue = entry("head", 8, 60.0, waited_s=9000.0), entry("overdue", 2, 70.0, waited_s=8000.0)
    queue = [overdue, SMALL, entry("smaller", 2, 50.0), head]
    running = table_of({"job": Run(NOW_MS, 5, 3600.0)})
    view = replace(view, jobs=("job",), holders=np.where(view.free, -1, 0).astype(np.int32))

    def turns() -> TreeTurns:
        return TreeTurns(tree, {}, view, UNKNOWN, NOW_MS)

    assert [row.request.request_id for row in turns().sort_entries(queue)] == ["head", "overdue", "smaller", "small"]
    found = plan(queue, view, running, UNKNOWN, Options(now_ms=NOW_MS), turns())
    assert [row.request.request_id for row, _ in found.placed] == ["smaller"]
    assert [wait.entry.request.request_id for wait in found.waiting] == ["head", "small", "overdue"]
    late = [entry("overdue", 2, 70.0, waited_s=8000.0), SMALL, entry("smaller", 2, 50.0)]
    found = plan(late, view, running, UNKNOWN, Options(now_ms=NOW_MS), turns())
    assert [row.request.request_id for row, _ in found.placed] == ["overdue"]


def test_a_large_request_of_a_queue_without_a_guarantee_is_the_head_until_jobs_have_ended(make_view) -> None:
    view = make_view({"r01": [2]})
    view = replace(view, jobs=("job",), holders=np.where(view.free, -1, 0).astype(np.int32))
    use = {"a": LeafUse({"gpu": 6.0}, 0.0)}
    queue, running = [entry("large", 8, 600.0), entry("small", 1, 7200.0)], table_of({"job": Run(NOW_MS, 6, 3600.0)})
    for others, code in (("", "next"), ("[queue.b]\nguaranteed = {gpu = 1}\nlend = {gpu = 0}\n", "queue")):
        turns = TreeTurns(read_queues(f"[queue.a]\n{others}"), use, view, UNKNOWN, NOW_MS)
        found = plan(queue, view, running, UNKNOWN, Options(now_ms=NOW_MS), turns)
        waits = {wait.entry.request.request_id: wait.reason.code for wait in found.waiting}
        assert waits["large"] == code
        assert ("small" in waits) == (code == "next")


@pytest.mark.parametrize(("waited_s", "placed"), [(60.0, ["guess", "sure"]), (9000.0, ["sure"])])
def test_an_overdue_head_is_passed_by_who_must_end_in_time_and_by_nobody_who_only_should(
    make_view, waited_s: float, placed: list[str]
) -> None:
    """The head starts in an hour. Nine of ten are done in a minute, but a limit of two hours promises nothing."""
    view = make_view({"r01": [4]})
    view = replace(view, jobs=("job",), holders=np.where(view.free, -1, 0).astype(np.int32))
    times = RunTimeQuantiles({2: (30.0, 60.0), 4: (3600.0, 3600.0)})
    queue = [entry("head", 8, 60.0, waited_s), entry("guess", 2, 7200.0), entry("sure", 2, 3000.0)]
    turns = TreeTurns(read_queues("[queue.a]\nmax_wait_h = 1\n"), {}, view, UNKNOWN, NOW_MS)
    found = plan(queue, view, table_of({"job": Run(NOW_MS, 4, 3600.0)}), times, Options(now_ms=NOW_MS), turns)
    assert sorted(row.request.request_id for row, _ in found.placed) == placed


def test_the_plan_places_the_least_area_first(make_view) -> None:
    view = make_view({"r01": [2]})
    turns = TreeTurns(read_queues("[queue.a]\n"), {}, view, UNKNOWN, NOW_MS)
    placed = plan(QUEUE, view, NO_RUNNING_JOBS, UNKNOWN, Options(now_ms=NOW_MS), turns).placed
    assert [row.request.request_id for row, _ in placed] == ["small"]
