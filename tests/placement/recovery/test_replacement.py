"""Recovery of gangs that lost any number of nodes: which step, and which places."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetcast.fleet.requests import Gang, LevelName, PlacementRequest, RankPlacement, TopologyConstraint
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.slots import convert_to_milli
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.reclaim.victims import ChosenVictims, find_victims
from fleetcast.placement.recovery.replacement import BorrowedNodes, BrokenGang, GangRecovery, find_recovery
from fleetcast.placement.recovery.steps import RecoveryStep, RecoveryTimes
from tests.placement.conftest import build

TIMES = RecoveryTimes()
NEVER = float("inf")


def make_fleet(owners: list[int], rack: int = 4) -> ClusterView:
    """Nodes of 8 GPUs in racks. owners: the job of each whole node, -1 for none. Job 0 is the gang."""
    holders = np.repeat(np.array(owners, np.int32)[:, None], 8, axis=1)
    racks = {f"r{at}": [8] * min(rack, len(owners) - at) for at in range(0, len(owners), rack)}
    jobs = tuple(f"j{at}" for at in range(max(owners) + 1))
    return build(racks, milli=convert_to_milli(holders < 0), holders=holders, jobs=jobs)


def recover(
    owners: list[int],
    failed: set[int],
    *,
    cost: float = NEVER,
    after_s: float = 0.0,
    required: LevelName | None = None,
    gang: Gang | int | None = None,
    spares: set[int] = frozenset(),  # type: ignore[assignment]
) -> GangRecovery:
    view = make_fleet(owners)
    names = view.topology.names
    rows = [row for row, owner in enumerate(owners) if owner == 0]
    ranks = tuple(RankPlacement(rank, names[row], tuple(range(8))) for rank, row in enumerate(rows))
    request = PlacementRequest(
        request_id="q", job="j0", gang=gang or len(rows), gpus_per_node=8, topology=TopologyConstraint(required)
    )
    n = np.arange(len(owners))
    costs = np.full(len(view.jobs), cost)
    costs[0] = NEVER

    def borrow(missing: PlacementRequest, options: Options) -> BorrowedNodes | None:
        found = find_victims(missing, view, costs, options)
        if not isinstance(found, ChosenVictims):
            return None
        return BorrowedNodes(found.decision.ranks, found.chosen.jobs, found.chosen.cost_gpu_s, after_s)

    held_ready = np.isin(n, [*spares]) if spares else None
    state = view, np.isin(n, [*failed]), Options(), TIMES, held_ready
    return find_recovery(BrokenGang(request, ranks, 8), *state, borrow)


def test_healthy_nodes_restart_in_place() -> None:
    found = recover([0, 0, -1, -1], set())
    assert (found.step.step, found.lost, found.places) == (RecoveryStep.IN_PLACE, (), ())


def test_a_spare_goes_before_a_free_node() -> None:
    found = recover([0, 0, -1, -1], {1}, spares={3})
    assert found.step.step is RecoveryStep.SPARE
    assert [place.node for place in found.places] == ["n004"]


def test_a_free_node_of_the_gang_s_rack_goes_before_one_of_another() -> None:
    found = recover([0, 0, 1, -1, -1, -1, -1, -1], {1})
    assert found.step.step is RecoveryStep.FREE
    assert [place.node for place in found.places] == ["n004"]


def test_several_lost_nodes_are_one_recovery() -> None:
    found = recover([0, 0, 0, 0, -1, -1, -1, -1], {0, 2})
    assert [rank.rank for rank in found.lost] == [0, 2]
    assert [place.rank for place in found.places] == [0, 2]
    assert found.step.step is RecoveryStep.FREE


def test_a_cheap_job_gives_its_node_and_a_dear_one_does_not() -> None:
    cheap = recover([0, 0, 1, 2], {1}, cost=600.0)
    assert (cheap.step.step, len(cheap.victims)) == (RecoveryStep.BORROW, 1)
    dear = recover([0, 0, 1, 2], {1}, cost=1e9)
    assert (dear.step.step, dear.victims) == (RecoveryStep.WAIT, ())


def test_an_elastic_gang_shrinks_where_nothing_is_free() -> None:
    assert recover([0, 0, 0, 1], {1}, gang=Gang(2, 3)).step.step is RecoveryStep.SHRINK
    assert recover([0, 0, 0, 1], {1}, gang=Gang(3, 4)).step.step is RecoveryStep.WAIT


def test_the_gang_moves_where_its_rack_has_no_room() -> None:
    found = recover([0, 0, 1, 1, -1, -1, 1, 1], {1}, required="rack")
    assert found.step.step is RecoveryStep.ELSEWHERE
    assert sorted(place.node for place in found.places) == ["n005", "n006"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-1, 2), min_size=4, max_size=12).filter(lambda owners: 0 in owners),
    st.sets(st.integers(0, 11)),
    st.sampled_from([None, "rack"]),
    st.sampled_from([300.0, NEVER]),
)
def test_pinned_members_stay_and_no_gpu_is_used_twice(
    owners: list[int], failed: set[int], required: LevelName | None, cost: float
) -> None:
    if required:
        owners = [
            0 if owner == 0 and at < 4 else max(owner, -1) if owner != 0 else 1 for at, owner in enumerate(owners)
        ]
        if 0 not in owners:
            return
    found = recover(owners, failed, required=required, cost=cost)
    view = make_fleet(owners)
    row = view.inventory.row
    assert {row[rank.node] for rank in found.lost} == {at for at in failed if at < len(owners) and owners[at] == 0}
    stopped = {int(name[1:]) for name in found.victims}
    stays = () if found.step.step is RecoveryStep.ELSEWHERE else found.pinned
    after = [*stays, *found.places]
    used = [(place.node, gpu) for place in after for gpu in place.gpus]
    assert len(used) == len(set(used))
    assert len({rank.rank for rank in after}) == len(after)
    assert 0 not in stopped
    for place in found.places:
        owner = owners[row[place.node]]
        assert row[place.node] not in failed
        assert owner in {-1, *stopped} or (owner == 0 and found.step.step is RecoveryStep.ELSEWHERE)
    if found.places:
        gpus = 8 * owners.count(0)
        assert len(used) == gpus
        if required:
            assert len({row[place.node] // 4 for place in after}) == 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_cost_is_the_gang_s_delay_and_the_loss_of_others(nodes: int) -> None:
    found = recover([0, 0, 0, 1, 2], set(range(nodes)), cost=600.0)
    assert found.step.cost_gpu_s == 24 * 420 + 600 * nodes


def test_a_borrow_that_must_wait_costs_that_time_and_loses_against_a_cheaper_step() -> None:
    assert recover([0, 0, 0, 1], {1}, gang=Gang(2, 3), cost=0.0).step.cost_gpu_s == 24 * 420
    waits = recover([0, 0, 0, 1], {1}, cost=600.0, after_s=300.0)
    assert (waits.step.step, waits.step.cost_gpu_s) == (RecoveryStep.BORROW, 24 * (300 + 420) + 600)
    assert recover([0, 0, 0, 1], {1}, cost=600.0, after_s=1700.0).step.step is RecoveryStep.WAIT


def test_jobs_outside_the_required_domain_leave_no_node() -> None:
    found = recover([0, 0, 0, 0, 1, 1, 1, 1], {1}, required="rack", cost=0.0)
    assert (found.step.step, found.victims) == (RecoveryStep.WAIT, ())
    assert recover([0, 0, 0, 0, 1, 1, 1, 1], {1}, cost=0.0).victims == ("j1",)
