"""Laws of gangs that give up members for a request."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import Gang, LevelName, PlacementRequest, TopologyConstraint
from fleetcast.placement.elastic.members import RunningMembers, release_gpus
from fleetcast.placement.elastic.shrink import PAUSE_S, ShrunkGangs, find_shrinks, saves_time
from fleetcast.placement.elastic.speed import SPEED_EXPONENT
from fleetcast.placement.machines.running_jobs import RunningJobs, make_running_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.reclaiming import ReclaimInput, ReclaimProposal, propose_reclaim
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.standing import QueueStanding
from fleetcast.placement.queues.tree import ANY, ReclaimPolicy
from fleetcast.placement.reclaim.eligibility import Eligibility
from fleetcast.placement.reclaim.fairness import Queues
from tests.fuzz.bounds import examples
from tests.placement.reclaim.scenes import OPTIONS, G, make_view


def make_queues(view: ClusterView, leaf: Mapping[str, str], rest: float = 0.0) -> Queues:
    """Return the standing of two queues, of which the first is guaranteed half of the fleet. rest: of the second."""
    capacity = {ANY: float(view.usable.sum())}
    tree = read_queues(
        f"[queue.owed]\nguaranteed = {{gpu = {capacity[ANY] / 2}}}\n[queue.rest]\nguaranteed = {{gpu = {rest}}}\n"
    )
    standing = QueueStanding(tree, {}, capacity)
    holds = {}
    for at, name in enumerate(view.jobs):
        holds[name] = QueueHold(leaf[name], {ANY: float((view.holders == at).sum())})
        standing.add_held(leaf[name], holds[name].amounts)
    return Queues(standing, holds)


def shrink(
    view: ClusterView,
    jobs: RunningJobs,
    members: int,
    each: int = G,
    level: LevelName | None = None,
    queue: str = "owed",
    rest: float = 0.0,
) -> ShrunkGangs | None:
    request = PlacementRequest(
        request_id="payer", queue=queue, gang=members, gpus_per_node=each, topology=TopologyConstraint(level)
    )
    kind = [Eligibility.OWN_QUEUE if leaf == queue else Eligibility.RECLAIM for leaf in jobs.leaf]
    queues = make_queues(view, dict(zip(jobs.names, jobs.leaf, strict=True)), rest)
    return find_shrinks(request, view, jobs, np.array(kind, np.int8), queues, OPTIONS)


def make_gangs(view: ClusterView, each: list[int], least: list[int], step: list[int], **more: Any) -> RunningJobs:
    gpus = [int((view.holders == at).sum()) for at in range(len(view.jobs))]
    return make_running_jobs(
        view.jobs,
        **{"leaf": ["rest"] * len(view.jobs), **more},
        gpus=gpus,
        members=[have // size for have, size in zip(gpus, each, strict=True)],
        gpus_per_member=each,
        gang_min=least,
        gang_desired=[have // size for have, size in zip(gpus, each, strict=True)],
        gang_step=step,
    )


@pytest.mark.parametrize("n", [2, 8, 32, 200])
def test_a_gang_that_holds_the_fleet_shrinks_to_exactly_its_minimum(n: int) -> None:
    view = make_view(np.zeros((n, G), np.int64), rack=8)
    jobs = make_gangs(view, [G], [n // 2], [1])
    found = shrink(view, jobs, n // 2)
    assert found is not None
    (one,) = found.shrinks
    assert (one.size, one.gpus, len(one.ranks)) == (n // 2, n // 2 * G, n // 2)
    assert one.cost_gpu_s == PAUSE_S * n * G
    assert found.placed.chosen.jobs == ()
    assert {rank.node for rank in found.placed.decision.ranks} == {rank.node for rank in one.ranks}


def test_a_gang_gives_the_members_in_the_domain_that_is_needed() -> None:
    view = make_view(np.array([[0] * G] * 4 + [[1] * G] * 2), rack=2)
    found = shrink(view, make_gangs(view, [G, G], [2, 2], [1, 1]), 2, level="rack")
    assert found is not None
    (one,) = found.shrinks
    assert (one.job, one.size) == ("j0", 2)
    assert len({view.topology.names.index(rank.node) // 2 for rank in one.ranks}) == 1


def test_a_gang_loses_whole_steps_even_if_fewer_members_are_needed() -> None:
    view = make_view(np.zeros((8, G), np.int64))
    found = shrink(view, make_gangs(view, [G], [2], [3]), 1)
    assert found is not None
    assert (found.shrinks[0].size, found.shrinks[0].gpus) == (5, 3 * G)


@pytest.mark.parametrize(("rest", "shrinks"), [(1, True), (2, False), (3, False)])
def test_members_that_leave_do_not_count_as_started_again_on_free_nodes(rest: int, shrinks: bool) -> None:
    view = make_view(np.array([[0] * G] * 4 + [[-1] * G] * 2), rack=4)
    jobs = make_gangs(view, [G], [1], [1])
    assert (shrink(view, jobs, 3, level="rack", rest=float(rest * G)) is not None) is shrinks


def test_no_gang_shrinks_if_that_makes_too_little_room() -> None:
    view = make_view(np.zeros((4, G), np.int64))
    assert shrink(view, make_gangs(view, [G], [3], [1]), 2) is None
    assert shrink(view, make_gangs(view, [G], [3], [1]), 1) is not None


def test_a_gang_shrinks_for_the_next_request_of_its_own_queue_but_not_for_a_queue_with_more() -> None:
    view = make_view(np.array([[0] * G] * 2 + [[1] * G] * 2))
    jobs = make_gangs(view, [G, G], [1, 2], [1, 1], leaf=["owed", "rest"])
    own = shrink(view, jobs, 1)
    assert own is not None
    assert own.shrinks[0].kind is Eligibility.OWN_QUEUE
    assert shrink(view, jobs, 1, queue="rest") is None  # it would hold more than the queue that gives


@pytest.mark.parametrize(("least", "pause_s"), [(1, np.nan), (1, 900.0), (2, np.nan)])
def test_the_time_that_a_request_saves_is_compared_with_the_time_that_gangs_lose(least: int, pause_s: float) -> None:
    view = make_view(np.zeros((4, G), np.int64))
    jobs = make_gangs(view, [G], [3], [1], leaf=["owed"], resize_pause_s=[pause_s])
    shrunk = shrink(view, jobs, 1)
    assert shrunk is not None
    run_s = 1000.0 / (1 / least) ** SPEED_EXPONENT  # of one of `least` members
    lost_s = run_s * (1 - (3 / 4) ** SPEED_EXPONENT) + 2 * (PAUSE_S if np.isnan(pause_s) else pause_s)
    request = PlacementRequest(request_id="payer", queue="owed", gang=Gang(1, least), gpus_per_node=G)
    slower_s = run_s - 1000.0
    assert saves_time(request, shrunk, jobs, lost_s + slower_s + 1, 1000.0)
    assert not saves_time(request, shrunk, jobs, lost_s + slower_s - 1, 1000.0)
    unknown = replace(jobs, members=np.zeros_like(jobs.members))  # as for a start that names no node
    assert saves_time(request, shrunk, unknown, lost_s + slower_s + 1, 1000.0)
    assert not saves_time(request, shrunk, unknown, lost_s + slower_s - 1, 1000.0)


@pytest.mark.parametrize(
    ("waits_s", "run_s", "queue", "code"),
    [
        (9000, 1000.0, "rest", "found"),
        (9000, 60_000.0, "rest", "none"),
        (100, 1000.0, "rest", "none"),
        (9000, None, "rest", "found"),
        (9000, 60_000.0, "owed", "found"),
    ],
)
def test_gangs_shrink_for_their_own_queue_only_if_that_saves_time(
    waits_s: int, run_s: float | None, queue: str, code: str
) -> None:
    view = make_view(np.array([[0] * G] * 4))
    jobs = make_gangs(view, [G], [1], [1], leaf=["rest"])
    queues, now_ms = make_queues(view, {"j0": "rest"}), OPTIONS.now_ms
    request = PlacementRequest(request_id="payer", queue=queue, gang=2, gpus_per_node=G)
    facts = ReclaimInput(ReclaimPolicy("advise", patience_s=0.0), queues.standing.tree, jobs)
    state = view, queues.standing, queues.holds, facts, OPTIONS
    found: ReclaimProposal = propose_reclaim(request, *state, now_ms + 1000 * waits_s, now_ms, run_s)
    assert (found.code, bool(found.shrinks)) == (code, code == "found")
    assert ("end earlier by less time than j0 would end later" in found.sentence) is (code == "none")


def draw_gangs(rng: np.random.Generator) -> tuple[ClusterView, RunningJobs, int]:
    """Draw elastic gangs and some free GPUs on up to eight nodes. Returns them with the GPUs of a member."""
    n, each = int(rng.integers(2, 9)), int(rng.choice([2, 4, 8]))
    holders = np.repeat(rng.integers(rng.choice([-1, 0]), rng.integers(1, 4), (n, G // each)), each, axis=1)
    used = np.unique(holders[holders >= 0])
    view = make_view(np.where(holders >= 0, np.searchsorted(used, holders), -1))
    j = len(view.jobs)
    step = rng.integers(1, 4, j)
    size = np.array([(view.holders == at).sum() // each for at in range(j)], np.int64)
    least = size - step * rng.integers(0, 4, j)
    least = np.where(least < 1, size, least)
    return view, make_gangs(view, [each] * j, least.tolist(), step.tolist()), each


def shrink_for_drawn_request(view: ClusterView, jobs: RunningJobs, rng: np.random.Generator) -> ShrunkGangs | None:
    levels: tuple[LevelName | None, ...] = (None, "rack", "node")
    return shrink(view, jobs, int(rng.integers(1, 4)), int(rng.choice([1, 2, 4, 8])), levels[rng.integers(3)])


@examples(400)
@given(st.integers(0, 2**32))
def test_sizes_stay_on_the_grid_and_the_request_fits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    view, jobs, each = draw_gangs(rng)
    size, least, step = jobs.members, jobs.gang_min, jobs.gang_step
    found = shrink_for_drawn_request(view, jobs, rng)
    if found is None:
        return
    gone = 0
    for one in found.shrinks:
        at = jobs.row[one.job]
        assert least[at] <= one.size < size[at]
        assert (one.size - least[at]) % step[at] == 0
        assert one.gpus == (size[at] - one.size) * each == sum(len(rank.gpus) for rank in one.ranks)
        for rank in one.ranks:
            assert (view.holders[view.topology.names.index(rank.node), list(rank.gpus)] == at).all()
        gone += one.gpus
    left = found.placed.view
    assert left.jobs == view.jobs
    assert int((left.holders < 0).sum()) == int((view.holders < 0).sum()) + gone
    for rank in found.placed.decision.ranks:
        assert left.free[view.topology.names.index(rank.node), list(rank.gpus)].all()


@examples(400)
@given(st.integers(0, 2**32))
def test_a_search_that_is_left_out_for_lack_of_gpus_finds_nothing(seed: int) -> None:
    found = []
    for bounds in (True, False):
        rng = np.random.default_rng(seed)
        view, jobs, _ = draw_gangs(rng)
        with pytest.MonkeyPatch.context() as patch:
            if not bounds:
                patch.setattr("fleetcast.placement.elastic.shrink._may_be_enough", lambda *_: True)
            one = shrink_for_drawn_request(view, jobs, rng)
        found.append(one and (one.shrinks, one.placed.decision))
    assert found[0] == found[1]


def test_members_of_shared_or_uneven_jobs_never_leave_alone() -> None:
    holders = np.array([[0] * G, [0] * 4 + [1] * 4])
    view = make_view(holders)
    jobs = make_gangs(view, [G, 4], [1, 1], [1, 1])
    assert len(RunningMembers.of(view, jobs, np.ones(2, bool))) == 0
    members = RunningMembers.of(view, make_gangs(view, [4, 2], [1, 1], [1, 1]), np.ones(2, bool))
    assert np.bincount(members.job).tolist() == [3, 2]
    freed = release_gpus(view, members.list_gpus(members.job == 1))
    assert int(freed.free.sum()) == 4
