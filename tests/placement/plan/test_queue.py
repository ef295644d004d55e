from typing import Any

import numpy as np
import pytest

from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.plan.queue import BACKFILL_TRIES, ONE_LINE, Plan, WaitingEntry, plan
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from tests.placement.runs import Run, table_of

NOW_MS = 1_589_310_000_000  # 19:00 UTC
OPTIONS = Options(now_ms=NOW_MS)
HOUR_S = 3600.0
UNKNOWN = RunTimeQuantiles({})


def entry(name: str, gang: int = 1, each: int = 8, *, queued: int = 0, **fields: Any) -> WaitingEntry:
    level = fields.pop("required", None)
    request = PlacementRequest(
        request_id=name, gang=gang, gpus_per_node=each, topology=TopologyConstraint(required=level), **fields
    )
    return WaitingEntry(request, NOW_MS - 60_000 + queued)


@pytest.fixture
def busy(make_view):
    """Four nodes; a holds n001 for an hour more, b holds n002 for two; n003 and n004 are free."""
    holders = np.full((4, 8), -1, np.int32)
    holders[0], holders[1] = 0, 1
    view = make_view({"r01": [0, 0], "r02": [8, 8]}, holders=holders, jobs=("a", "b"))
    running = table_of({"a": Run(NOW_MS, 8, limit_s=HOUR_S), "b": Run(NOW_MS, 8, limit_s=2 * HOUR_S)})
    return view, running


def run(queue: list[WaitingEntry], state: Any, times: RunTimeQuantiles = UNKNOWN) -> Plan:
    return plan(queue, *state, times, OPTIONS)


def names(result: Plan) -> list[str]:
    return [entry.request.request_id for entry, _ in result.placed]


def test_order_is_priority_then_arrival_then_id() -> None:
    queue = [entry("late", queued=9), entry("b"), entry("a"), entry("urgent", queued=99, priority=5)]
    assert [row.request.request_id for row in ONE_LINE.sort_entries(queue)] == ["urgent", "a", "b", "late"]


def test_what_fits_starts_in_order(busy) -> None:
    result = run([entry("a1"), entry("a2", queued=1), entry("a3", queued=2)], busy)
    assert names(result) == ["a1", "a2"]
    assert {rank.node for _, decision in result.placed for rank in decision.ranks} == {"n003", "n004"}
    assert [wait.position for wait in result.waiting] == [1]
    assert not result.view.free.any()


def test_the_head_says_when_and_after_whom_it_starts(busy) -> None:
    (wait,) = run([entry("head", 3)], busy).waiting
    assert wait.start_ms == NOW_MS + 3_600_000
    assert wait.why == "waits for 24 GPUs (3 x 8 GPUs); 16 free GPUs fit; it is next, when a has ended"


def test_a_short_job_passes_a_long_one_does_not(busy) -> None:
    # the head needs 24 GPUs in an hour: n001 and both free nodes
    result = run([entry("head", 3), entry("long", limit_s=2 * HOUR_S), entry("short", limit_s=0.5 * HOUR_S)], busy)
    assert names(result) == ["short"]
    why = {wait.entry.request.request_id: wait.why for wait in result.waiting}
    assert why["long"] == ("would fit, but on reserved GPUs: head is next, and should start before this job ends")


def test_a_long_job_may_use_what_the_head_leaves(busy) -> None:
    # the head needs a whole rack, r01, in two hours: r02 is nobody's
    result = run([entry("head", 2, required="rack", avoid_nodes=("n003",)), entry("long", limit_s=9 * HOUR_S)], busy)
    assert names(result) == ["long"]
    assert result.waiting[0].start_ms == NOW_MS + 2 * 3_600_000


def test_backfill_never_delays_the_head(busy) -> None:
    _, running = busy
    queue = [entry("head", 4), *(entry(f"j{i}", each=2, queued=i + 1, limit_s=600.0 * i + 60) for i in range(12))]
    result = run(queue, busy)
    after = plan([queue[0]], result.view, running.append_rows(_started(result)), RunTimeQuantiles({}), OPTIONS)
    assert result.placed
    assert after.waiting[0].start_ms == result.waiting[0].start_ms


def _started(result: Plan) -> RunningJobs:
    return table_of(
        {
            entry.request.job_name: Run(NOW_MS, entry.request.gpus_per_node, entry.request.limit_s)
            for entry, _ in result.placed
        }
    )


def test_what_can_never_fit_holds_nobody_up(busy) -> None:
    result = run([entry("huge", 3, required="rack"), entry("small", queued=1)], busy)
    assert names(result) == ["small"]
    assert result.waiting[0].why.startswith("does not fit even when all running jobs have ended: needs 24 GPUs")
    assert result.waiting[0].start_ms is None


def test_the_estimate_of_finished_jobs_decides_what_is_short(busy) -> None:
    finished = RunTimeQuantiles.from_durations({"by_gpus": {"4": {"p50": 60, "p90": 600, "n": 9}}})
    assert names(run([entry("head", 3), entry("job", each=4, queued=1)], busy, finished)) == ["job"]
    assert names(run([entry("head", 3), entry("job", each=4, queued=1)], busy)) == []


def test_a_thousand_waiting_cost_little_and_say_why(busy) -> None:
    # 200 different shapes, none of which fits, five entries each: a shape is tried once
    queue = [entry(f"j{i:04d}", 5 + i % 200, queued=i, limit_s=60.0) for i in range(1000)]
    queue.insert(0, entry("head", 4, queued=-1))
    result = run(queue, busy)
    assert len(result.waiting) == 1001
    assert all(wait.why for wait in result.waiting)
    assert sum("not tried in this pass" in wait.why for wait in result.waiting) == 1000 - 5 * BACKFILL_TRIES
    assert BACKFILL_TRIES < 200
