"""A claim has its nodes for as long as its job runs: windows and spare nodes are rows of the profile."""

from datetime import UTC, datetime

import numpy as np

from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.machines.options import Options
from fleetcast.placement.plan.profile import Claim
from fleetcast.placement.plan.queue import Plan, WaitingEntry, plan
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.queues_file import read_queues
from tests.placement.conftest import build
from tests.placement.runs import Run, table_of

NOW_MS = 1_800_000_000_000
MINUTE_MS = 60_000
TIMES = RunTimeQuantiles({})  # a job runs until its limit


def make_window(kind: str, nodes: list[str], begin: int, end: int, queue: str = "") -> str:
    """Return the text of a window. begin, end: minutes from now."""
    first, last = (
        datetime.fromtimestamp(NOW_MS / 1000 + 60 * at, UTC).isoformat().replace("+00:00", "Z") for at in (begin, end)
    )
    owner = f'queue = "{queue}"\n' if queue else ""
    return f'[[{kind}]]\nname = "w"\n{owner}nodes = {nodes!r}\nfrom = {first}\nto = {last}\n'


def ask(name: str, minutes: int, gang: int = 1, queue: str = "a", **fields: object) -> WaitingEntry:
    request = PlacementRequest(
        request_id=name,
        gang=gang,
        gpus_per_node=8,
        queue=queue,
        limit_s=60.0 * minutes,
        **fields,  # type: ignore[arg-type]
    )
    return WaitingEntry(request, NOW_MS - 1000)


def run_pass(queue: list[WaitingEntry], left: list[int], table: str) -> Plan:
    """Run a pass over nodes of eight GPUs. left: minutes until the job of each node ends, 0 for a free node."""
    holders = np.repeat([[at if minutes else -1] for at, minutes in enumerate(left)], 8, axis=1).astype(np.int32)
    milli = np.where(holders < 0, 1000, 0).astype(np.int16)
    jobs = tuple(f"job{at}" for at in range(len(left)))
    view = build({"r0": [8] * len(left)}, milli=milli, holders=holders, jobs=jobs)
    running = table_of({job: Run(NOW_MS, 8, 60.0 * minutes) for job, minutes in zip(jobs, left, strict=True)})
    tree = read_queues(f'[policy]\norder = "fifo"\n[queue.a]\n[queue.b]\n{table}')
    turns = TreeTurns(tree, {}, view, TIMES, NOW_MS)
    return plan(queue, view, running, TIMES, Options(now_ms=NOW_MS), turns)


def describe(claim: Claim) -> tuple[int, list[int]]:
    """Return the start of a claim in minutes from now, and the rows of its nodes."""
    return (claim.start_ms - NOW_MS) // MINUTE_MS, np.flatnonzero(claim.gpus.any(axis=1)).tolist()


def test_a_claim_avoids_nodes_that_a_window_closes_while_its_job_would_run() -> None:
    # the first node is free in 10 minutes, but maintenance begins before the job of 30 minutes would end there
    window = make_window("maintenance", ["n001"], 35, 60)
    found = run_pass([ask("head", 30)], [10, 20], window)
    assert describe(found.claims[0]) == (20, [1])
    assert found.claims[0].blocker == "job1"
    assert describe(run_pass([ask("head", 30)], [10, 20], "").claims[0]) == (10, [0])
    assert describe(run_pass([ask("head", 25)], [10, 20], window).claims[0]) == (10, [0])


def test_a_claim_waits_for_the_end_of_a_window_if_no_other_node_comes_sooner() -> None:
    found = run_pass([ask("head", 30)], [10, 90], make_window("maintenance", ["n001"], 35, 60))
    assert describe(found.claims[0]) == (60, [0])
    assert found.waiting[0].why.endswith("it is next, when maintenance 'w' ends at 2027-01-15 09:00 UTC")


def test_a_claim_may_have_the_nodes_of_a_window_that_is_over_by_then() -> None:
    found = run_pass([ask("head", 30)], [10, 20], make_window("maintenance", ["n001"], -5, 10))
    assert describe(found.claims[0]) == (10, [0])


def test_a_window_after_the_end_of_a_job_does_not_matter() -> None:
    window = make_window("maintenance", ["n001"], 300, 400)
    assert describe(run_pass([ask("head", 30, gang=2)], [10, 20, 90], window).claims[0]) == (20, [0, 1])


def test_a_reservation_closes_nodes_only_to_other_queues() -> None:
    window = make_window("reservation", ["n001"], 35, 60, "b")
    assert describe(run_pass([ask("head", 30)], [10, 20], window).claims[0]) == (20, [1])
    assert describe(run_pass([ask("head", 30, queue="b")], [10, 20], window).claims[0]) == (10, [0])


def test_a_short_request_uses_the_nodes_of_a_window_before_it_begins() -> None:
    window = make_window("maintenance", ["n001"], 35, 60)
    found = run_pass([ask("head", 30, gang=2), ask("short", 20), ask("long", 40)], [0, 20], window)
    assert [entry.request.request_id for entry, _ in found.placed] == ["short"]
    assert describe(found.claims[0]) == (60, [0, 1])  # between 20 and 35 it could not end before the window


def test_a_spare_node_is_claimed_only_for_jobs_that_may_be_stopped() -> None:
    spares = '[spares]\nlevel = "rack"\ncount = 1\n'
    assert describe(run_pass([ask("head", 30, gang=2)], [0, 10, 20], spares).claims[0]) == (20, [1, 2])
    may_stop = run_pass([ask("head", 30, gang=2, preemptible=True)], [0, 10, 20], spares)
    assert describe(may_stop.claims[0]) == (10, [0, 1])


def test_a_claim_starts_at_the_end_of_a_window_that_closes_the_nodes_now() -> None:
    window = make_window("maintenance", ["n001", "n002"], -5, 60)
    found = run_pass([ask("head", 30, gang=2), ask("long", 90)], [0, 20], window)
    assert describe(found.claims[0]) == (60, [0, 1])
    (why, _) = found.waiting
    assert (why.reason.code, why.start_ms) == ("window", NOW_MS + 60 * MINUTE_MS)
    assert why.why.endswith("it is next, when maintenance 'w' ends at 2027-01-15 09:00 UTC")


def test_a_claim_starts_at_the_end_of_the_last_window_that_its_run_would_overlap() -> None:
    windows = make_window("maintenance", ["n001"], -5, 60) + make_window("maintenance", ["n001"], 90, 120)
    assert describe(run_pass([ask("head", 40)], [0], windows).claims[0]) == (120, [0])
    assert describe(run_pass([ask("head", 30)], [0], windows).claims[0]) == (60, [0])


def test_a_request_that_no_window_hinders_never_fits() -> None:
    window = make_window("maintenance", ["n001"], -5, 60)
    found = run_pass([ask("head", 30, gang=2, topology=TopologyConstraint("node"))], [0, 20], window)
    assert (found.claims, found.waiting[0].reason.code) == ((), "never")
    assert "maintenance" not in found.waiting[0].why
