"""Laws of the serving plan, played through time on a small fleet with queues, parts of GPUs and refused starts.

`make soak` plays thousands of scenes; else it is dozens.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.play.replay import Floats, Replay, Trace
from fleetcast.placement.play.seen_runs import SeenRuns
from fleetcast.placement.play.served import ServedPlan, make_empty_view
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.tree import QueueTree
from tests.fuzz.bounds import examples

NODES, EACH = 2, 4
BOUND_S = 100.0
TREE = read_queues("""
[policy]
half_life_h = 1
[queue.a]
weight = 3
guaranteed = {gpu = 3}
credits = {rate = 0.5, cap_gpu_h = 0.1}
[queue.b]
limit = {gpu = 5}
[queue."b/x"]
limit = {gpu = 4}
[queue."b/y"]
per_user = true
[queue.c]
order = "fifo"
guaranteed = {gpu = 1}
lend = {gpu = 0}
""")
ONE = read_queues(f"[policy]\nmax_wait_h = {BOUND_S / 3600}\n[queue.default]")


@dataclass(frozen=True)
class Job:
    """GPUs below 1 are a part of one."""

    submit_s: int
    run_s: int
    gpus: float
    queue: str = "default"
    user: str = "ada"
    limit: float = 1.0  # of the run time


jobs = st.builds(
    Job,
    st.integers(0, 300),
    st.integers(1, 90),
    st.sampled_from([0.25, 0.6, 1, 1, 2, 3, 4]),
    st.sampled_from(["a", "b/x", "b/y", "c"]),
    st.sampled_from(["ada", "bob"]),
    st.sampled_from([1.0, 3.0]),
)
scenes = st.lists(jobs, min_size=2, max_size=12).map(lambda rows: sorted(rows, key=lambda job: job.submit_s))
few = examples(25)


class Exact(SeenRuns):
    """Knows that limits are run times."""

    def record_end(self, gpus: int, run_s: float) -> None:
        """Learns nothing."""


def asked(rows: Sequence[Job]) -> Callable[[int], PlacementRequest]:
    def ask(job: int) -> PlacementRequest:
        row = rows[job]
        return PlacementRequest(
            request_id=f"j{job:03}",
            queue=row.queue,
            user=row.user,
            gpus_per_node=max(1, int(row.gpus)),
            gpu_share=round(1000 * row.gpus) if row.gpus < 1 else None,
            limit_s=row.run_s * row.limit,
        )

    return ask


def played(rows: Sequence[Job], tree: QueueTree | None = TREE, exact: bool = False) -> tuple[ServedPlan, Replay]:
    submit_s, run_s = [float(row.submit_s) for row in rows], [float(row.run_s) for row in rows]
    trace = Trace([], submit_s, run_s, [1] * len(rows), [None] * len(rows))
    plan = ServedPlan(make_empty_view([EACH] * NODES), asked(rows), tree, runs=Exact() if exact else SeenRuns())
    return plan, Replay(trace, plan, refuses=lambda job, tried: not exact and job % 5 == 0 and tried == 0)


def starts(rows: Sequence[Job], tree: QueueTree | None = TREE, exact: bool = False) -> Floats:
    return played(rows, tree, exact)[1].play()


@few
@given(scenes)
def test_no_gpu_is_given_twice_limits_hold_and_every_wait_has_a_reason(rows: list[Job]) -> None:
    plan, replay = played(rows)
    for _ in replay.play_steps():
        held: Counter[tuple[str, int]] = Counter()
        by_queue: Counter[str] = Counter()
        for hold in plan.holds.values():
            for rank in hold.ranks:
                held.update({(rank.node, gpu): rank.milli for gpu in rank.gpus})
                for node in TREE.list_path(TREE.find_request_leaf(hold.request)):
                    by_queue[node.name] += len(rank.gpus) * rank.milli
        assert max(held.values(), default=0) <= 1000
        assert all(by_queue[node.name] <= 1000 * node.find_limit("gpu") for node in TREE.nodes)
        assert int(plan.view.milli.sum()) <= 1000 * NODES * EACH - sum(held.values())
        assert all(wait.why for wait in plan.waits)


@few
@given(scenes)
def test_all_that_can_run_start_and_charges_are_the_integral_of_what_was_held(rows: list[Job]) -> None:
    plan, replay = played(rows)
    start_s = replay.play()
    assert np.isfinite(start_s).all()
    held = sum(row.gpus * row.run_s for row in rows)
    held += sum(300.0 * rows[job].gpus * tries for job, tries in replay._tries.items())
    assert plan.played is not None
    assert not plan.played.opened
    charged = sum(charge.compute_held_gpu_s(0, 10**12) for charge in plan.played.closed)
    assert charged == pytest.approx(held, abs=1e-6)


@few
@given(scenes)
def test_credits_are_conserved(rows: list[Job]) -> None:
    plan, replay = played(rows)
    assert plan.played is not None
    for now_s in replay.play_steps():
        for bank in plan.played.banks.values():
            assert bank.banked == pytest.approx(bank.earned - bank.spent - bank.expired, abs=1e-6)
            assert 0 <= bank.banked <= 360.0 + 1e-6
            assert bank.earned <= 0.5 * 3 * now_s + 1e-6


@few
@given(scenes)
def test_the_same_input_gives_the_same_bytes(rows: list[Job]) -> None:
    (one, first), (two, second) = played(rows), played(rows)
    assert first.play().tobytes() == second.play().tobytes()
    assert one.played is not None
    assert two.played is not None
    assert one.played.closed == two.played.closed


@few
@given(scenes)
def test_a_pass_made_twice_is_a_pass_made_once(rows: list[Job]) -> None:
    """In one line: nobody starts in the second pass who did not in the first. (Shares move with each start.)"""
    plan, replay = played(rows, tree=None)
    for now_s in replay.play_steps():
        waits = [(wait.entry.request.request_id, wait.start_ms) for wait in plan.waits]
        assert not plan.start_jobs(now_s)
        assert [(wait.entry.request.request_id, wait.start_ms) for wait in plan.waits] == waits


@few
@given(scenes)
def test_nobody_waits_beyond_the_bound_plus_what_ran_before_it(rows: list[Job]) -> None:
    """With exact run times, least area first: as the head it waits for what runs, before that for who came earlier."""
    rows = [replace(row, queue="default", limit=1.0, gpus=max(1, row.gpus)) for row in rows]
    start_s = starts(rows, ONE, exact=True)
    longest_s = max(row.run_s for row in rows)
    for at, row in enumerate(rows):
        due_s = row.submit_s + BOUND_S
        if start_s[at] > due_s:
            before = zip(start_s.tolist(), rows, strict=True)
            earlier = sum(start > due_s and other.submit_s <= row.submit_s for start, other in before)
            assert start_s[at] <= due_s + earlier * longest_s


@examples(10)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(20, 60))
def test_more_weight_is_never_less_share(less: int, more: int, run_s: int) -> None:
    """Of two queues with standing demand, within the time of one job on every GPU."""
    rows = [Job(0, run_s + 7 * (at % 3), 1, "p" if at % 2 else "q") for at in range(64)]
    until_s, found = 4.0 * run_s, []
    for weight in sorted((less, less + more)):
        start_s = starts(rows, read_queues(f"[queue.p]\nweight = {weight}\n[queue.q]"), exact=True)
        mine = [(start, row.run_s) for start, row in zip(start_s.tolist(), rows, strict=True) if row.queue == "p"]
        found.append(sum(max(0.0, min(run, until_s - start)) for start, run in mine))
    assert found[1] >= found[0] - (run_s + 14)
