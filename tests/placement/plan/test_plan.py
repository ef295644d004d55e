"""The pass finds what a plain pass finds, entry by entry, and says why the others wait."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetcast.fleet.requests import Gang, PlacementRequest, TopologyConstraint
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.queue import ONE_LINE, WaitingEntry, plan
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import QueueTurns, TreeTurns
from fleetcast.placement.queues.queues_file import read_queues
from tests.fuzz.bounds import examples
from tests.placement.conftest import build
from tests.placement.plan.slow_plan import slow_plan
from tests.placement.runs import Run, runs_of, table_of

NOW_MS = 1_800_000_000_000
OPTIONS = Options(now_ms=NOW_MS)
TIMES = RunTimeQuantiles({8: (600.0, 3600.0), 0: (60.0, 7200.0)})
TREE = (
    "[policy]\nmax_wait_h = 0.002\n[class.c]\npriority = 1\n[queue.a]\nguaranteed = {gpu = 8}\nlimit = {gpu = 20}\n"
    '[queue.b]\nguaranteed = {gpu = 8}\nlend = {gpu = 2}\n[queue."b/x"]\nper_user = true\n[queue.c]\norder = "fifo"\n'
    '[[reservation]]\nname = "kept"\nqueue = "a"\nnodes = ["n001"]\n'
    "from = 2027-01-15T00:00:00Z\nto = 2027-01-16T00:00:00Z\n"
)
MORE_CLAIMS = TREE.replace("[policy]\n", "[policy]\nclaims = 4\n")
WINDOWS = MORE_CLAIMS.replace("[queue.c]\n", '[queue.c]\npreemptible = "all"\n') + (
    '[[maintenance]]\nname = "soon"\nnodes = ["n001", "n003"]\n'
    "from = 2027-01-15T08:30:00Z\nto = 2027-01-15T09:30:00Z\n"
    '[[reservation]]\nname = "later"\nqueue = "b"\nnodes = ["n002"]\n'
    "from = 2027-01-15T10:00:00Z\nto = 2027-01-15T12:00:00Z\n"
)  # now it is 08:00
SPARES = WINDOWS + '[spares]\nlevel = "rack"\ncount = 1\n'
requests = st.fixed_dictionaries(
    {
        "gang": st.one_of(st.integers(1, 3), st.just(Gang(1, 5, 2))),
        "limit_s": st.sampled_from([None, 60.0, 1800.0, 9e4]),
    },
    optional={
        "gpus_per_node": st.sampled_from([1, 2, 8]),
        "topology": st.sampled_from([TopologyConstraint("rack"), TopologyConstraint(None, "node")]),
        "priority": st.integers(0, 1),
        "cpus": st.sampled_from([1, 40]),
        "preemptible": st.booleans(),
        "gpu_model": st.sampled_from(["H100", "B200"]),
    },
)
odd = st.sampled_from([{"gpu_share": 300, "gang": 2}, {"gpus_per_node": 0, "cpus": 100}])
queued = st.lists(
    st.tuples(st.one_of(requests, odd), st.sampled_from(["a", "b/x", "c"]), st.integers(0, 9)), max_size=24
)
free = st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3), min_size=1, max_size=3)


def scene(nodes: list[list[int]], drawn: list[Any]) -> tuple[list[WaitingEntry], ClusterView, RunningJobs]:
    racks = {f"r{at}": counts for at, counts in enumerate(nodes)}
    view = build(racks)
    holders = np.where(view.free, -1, np.arange(len(view))[:, None]).astype(np.int32)
    view = build(racks, holders=holders, jobs=tuple(f"job{row}" for row in range(len(view))))
    running = table_of({job: Run(NOW_MS - 60_000 * at, 8, 1200.0 * (at + 1)) for at, job in enumerate(view.jobs)})
    queue = [
        WaitingEntry(
            PlacementRequest(request_id=f"q{at}", queue=queue, user=f"u{at % 2}", **columns), NOW_MS - 1000 * waited
        )
        for at, (columns, queue, waited) in enumerate(drawn)
    ]
    return queue, view, running


def turns_of(tree: str, view: ClusterView) -> QueueTurns:
    return TreeTurns(read_queues(tree), {}, view, TIMES, NOW_MS) if tree else ONE_LINE


def keep_off(request: PlacementRequest, view: ClusterView, options: Options) -> Any:
    """A filter of an operator: it keeps some users, queues and priorities off some nodes, and large gangs off one."""
    mask = np.zeros(len(view), bool)
    if request.user == "u0":
        mask[::2] = True
    if request.queue == "c" or request.priority:
        mask[1::2] = True
    mask[0] |= request.members.desired > 2
    return mask


def keep_out(request: PlacementRequest, view: ClusterView, options: Options) -> Any:
    """Another one: it asks nothing of most, and refuses one user everything."""
    return np.ones(len(view), bool) if request.user == "u1" else None


ONE = (("keep_off", keep_off),)
plugins = st.sampled_from([(), ONE, (*ONE, ("keep_out", keep_out))])


ELASTIC = {"gang": Gang(1, 5, 2), "limit_s": None}, "a"
CPUS = {"gpus_per_node": 0, "cpus": 100}, "a"
PART = {"gpu_share": 300, "gang": 2}, "a"


@examples(375)
@given(st.sampled_from(["", TREE, MORE_CLAIMS, WINDOWS, SPARES]), free, queued, plugins)
@example("", [[0, 8]], [(*ELASTIC, 0), *[(*CPUS, 0)] * 2, (*ELASTIC, 0), (*CPUS, 1), (*ELASTIC, 0), (*CPUS, 1)], ONE)
@example(
    "", [[0, 8]], [(*ELASTIC, 0), (*PART, 0), (*CPUS, 0), (*ELASTIC, 0), (*CPUS, 1), (*ELASTIC, 0), (*CPUS, 1)], ONE
)
@example(TREE, [[0]], [(ELASTIC[0], "b/x", 1), (*ELASTIC, 0)], ())  # a reservation keeps one of two that ask alike out
def test_the_pass_is_what_a_plain_pass_is(tree: str, nodes: list[list[int]], drawn: list[Any], filters: Any) -> None:
    queue, view, running = scene(nodes, drawn)
    options = replace(OPTIONS, filters=filters)
    expected = slow_plan(queue, view, running, TIMES, options, turns_of(tree, view))
    found = plan(queue, view, running, TIMES, options, turns_of(tree, view))
    assert [(entry.request.request_id, decision.ranks) for entry, decision in found.placed] == expected.placed
    codes = {wait.entry.request.request_id: wait.reason.code.replace("kept", "room") for wait in found.waiting}
    assert list(codes.items()) == list(expected.codes.items())
    assert [(one.request.request_id, one.start_ms, one.end_ms, one.blocker) for one in found.claims] == [
        (one.request.request_id, one.start_ms, one.end_ms, one.blocker) for one in expected.claims
    ]
    assert all(np.array_equal(mine.gpus, other.gpus) for mine, other in zip(found.claims, expected.claims, strict=True))
    assert np.array_equal(found.view.milli, expected.view.milli)
    assert runs_of(found.running) == expected.running
    assert all(wait.why for wait in found.waiting)


def test_sentences_are_made_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, view, running = scene([[0, 0]], [({"gang": 2, "gpus_per_node": 8}, "a", at) for at in range(9)])
    monkeypatch.setattr(
        "fleetcast.placement.plan.reasons.describe_needs",
        lambda request: pytest.fail("a sentence that nobody reads"),
    )
    assert len(plan(queue, view, running, TIMES, OPTIONS).waiting) == 9


def test_what_is_free_is_told_as_it_is_after_the_pass() -> None:
    drawn = [({"gang": 2, "gpus_per_node": 8}, "a", 9), ({"gpus_per_node": 4, "limit_s": 60.0}, "a", 1)]
    result = plan(*scene([[8, 0]], drawn), TIMES, OPTIONS)
    assert [entry.request.request_id for entry, _ in result.placed] == ["q1"]
    assert result.waiting[0].why == ("waits for 16 GPUs (2 x 8 GPUs); 0 free GPUs fit; it is next, when job1 has ended")


@examples(375)
@given(st.sampled_from(["", TREE]), free, st.one_of(requests, odd), st.sampled_from(["a", "b/x", "c"]), st.booleans())
def test_another_free_node_makes_nobody_unplaceable(
    tree: str, nodes: list[list[int]], asked: dict[str, Any], queue: str, in_last_rack: bool
) -> None:
    """The request waits alone."""
    more = [*nodes[:-1], [*nodes[-1], 8]] if in_last_rack else [*nodes, [8]]
    found = []
    for fleet in (nodes, more):
        waiting, view, running = scene(fleet, [(asked, queue, 1)])
        found.append(len(plan(waiting, view, running, TIMES, OPTIONS, turns_of(tree, view)).placed))
    assert found[1] >= found[0]
