"""Packing for the demand of now, and what of the free GPUs it cannot use."""

from dataclasses import replace

import numpy as np
import pytest

from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.engine import decide
from fleetcast.placement.fragmentation import measure_fragmentation
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.potential import PotentialGrowth
from fleetcast.placement.machines.shapes import MemberShape, make_member_shape, make_shape_demand


def wants(*shapes: MemberShape) -> Options:
    return Options(demand=make_shape_demand(dict.fromkeys(shapes, 1), ["H100"]))


def host(view, options: Options, **fields: object) -> str:
    decision = decide(PlacementRequest(request_id="a", **fields), view, options)  # type: ignore[arg-type]
    return decision.ranks[0].node


def test_a_request_goes_where_it_leaves_most_to_the_demand_of_now(make_view) -> None:
    view = make_view({"r01": [3, 2]})
    assert host(view, wants(MemberShape(2))) == "n001", "two of its three GPUs are left to a pair"
    assert host(view, wants(MemberShape(3))) == "n002", "three are left together"


def test_a_part_of_a_gpu_leaves_whole_ones_to_those_who_want_them(make_view) -> None:
    view = make_view({"r01": [8, 8]})
    milli = view.milli.copy()
    milli[1, 0] = 300
    assert host(replace(view, milli=milli), wants(MemberShape(8)), gpu_share=300) == "n002"


def test_work_without_gpus_spares_the_cpus_that_gpus_want(make_view) -> None:
    view = make_view({"r01": [8, 1]}, free_cpus=np.array([64.0, 64.0]))
    assert host(view, wants(MemberShape(1, cpus=8.0)), gpus_per_node=0, cpus=32) == "n002"


@pytest.mark.parametrize("fields", [{"gpus_per_node": 2}, {"gpu_share": 400}, {"gpus_per_node": 0, "cpus": 4}])
def test_the_growth_is_a_score(make_view, fields: dict[str, int]) -> None:
    view, request = make_view({"r01": [8, 3, 2]}), PlacementRequest(request_id="a", **fields)  # type: ignore[arg-type]
    demand = wants(MemberShape(2, cpus=8.0), make_member_shape(request)).demand
    assert demand is not None
    fit = PotentialGrowth(request, view, demand, np.arange(3)).score_members(np.arange(3), np.array([2, 1, 1]))
    assert ((fit >= 0) & (fit <= 1)).all()


def test_lost_gpus_and_the_largest_gang_by_level(make_view) -> None:
    view = make_view({"r01": [8, 1], "r02": [3, 8]})
    state = view.state.copy()
    state[3] = NodeState.DRAINED
    (row,) = measure_fragmentation(replace(view, state=state), wants(MemberShape(2)))
    assert (row.pool, row.free_gpus, row.lost_gpus) == ("default", 12.0, 1.0)
    assert row.largest_gang == {
        **{"node": 8, "nvlink_domain": 8, "rack": 9, "rail_group": 12, "block": 12, "cluster": 12},
        "anywhere": 12,
    }
    (unknown,) = measure_fragmentation(view, Options())
    assert (unknown.lost_gpus, unknown.stranded_gpus) == (None, None)
