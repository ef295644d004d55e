from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.requests import Decision, Gang, PlacementRequest, TopologyConstraint
from fleetcast.fleet.topology import Level
from fleetcast.placement.engine import decide, fits_now, is_still_valid
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.view import ClusterView
from tests.fuzz.bounds import examples


def ask(**fields: Any) -> PlacementRequest:
    required, preferred = fields.pop("required", None), fields.pop("preferred", None)
    return PlacementRequest(
        request_id="r", topology=TopologyConstraint(required=required, preferred=preferred), **fields
    )


def lawful(decision: Decision) -> Decision:
    assert decision.nodes == decision.candidates + sum(decision.rejected.values())
    return decision


def hosts(decision: Decision) -> list[str]:
    return [rank.node for rank in decision.ranks]


def test_a_required_rack_holds_the_whole_gang_or_nothing(make_view) -> None:
    # 64 GPUs are free, 8 + 16 + 40, but no rack has 64
    view = make_view({"r01": [8, 0], "r02": [8, 8], "r03": [8, 8, 8, 8, 8, 0, 0, 0]})
    refused = lawful(decide(ask(gang=8, gpus_per_node=8, required="rack"), view))
    assert refused.outcome == "refused"
    assert refused.sentence == (
        "refused: needs 64 GPUs (8 x 8 GPUs) inside one rack; the best rack r03 has 40 free; "
        "64 free GPUs are scattered over 3 racks"
    )
    milli = view.milli.copy()
    milli[-3:] = 1000  # the blockers in r03 end
    placed = lawful(decide(ask(gang=8, gpus_per_node=8, required="rack"), replace(view, milli=milli)))
    assert placed.outcome == "placed"
    assert hosts(placed) == [f"n{number:03d}" for number in range(5, 13)]
    assert placed.topology_level == Level.RACK
    assert placed.sentence == "placed 8 x 8 GPUs in rack r03"


def test_ranks_name_free_gpus_only_and_none_twice(make_view) -> None:
    view = make_view({"r01": [3, 5, 8]})
    decision = decide(ask(gang=4, gpus_per_node=3), view)
    taken = Counter((rank.node, gpu) for rank in decision.ranks for gpu in rank.gpus)
    assert set(taken.values()) == {1}
    assert len(taken) == 12
    for node, gpu in taken:
        assert view.free[view.inventory.row[node], gpu]


def test_a_single_gpu_goes_where_it_breaks_least(make_view) -> None:
    decision = decide(ask(), make_view({"r01": [8, 4, 1, 2]}))
    assert hosts(decision) == ["n003"]
    assert decision.topology_level == "node"
    assert decision.sentence == "placed 1 GPU on n003"


def test_a_gang_prefers_the_tightest_rack_that_holds_it(make_view) -> None:
    decision = decide(ask(gang=2, gpus_per_node=8, required="rack"), make_view({"r01": [8, 8, 8], "r02": [8, 8]}))
    assert hosts(decision) == ["n004", "n005"]


def test_members_share_a_node_unless_spread(make_view) -> None:
    view = make_view({"r01": [8, 8, 8]})
    assert len(set(hosts(decide(ask(gang=3, gpus_per_node=2), view)))) == 1
    assert len(set(hosts(decide(ask(gang=3, gpus_per_node=2, spread=True), view)))) == 3
    refused = lawful(decide(ask(gang=4, spread=True), view))
    assert refused.outcome == "refused"
    assert "on 4 different nodes" in refused.sentence


def test_an_elastic_gang_takes_the_largest_size_of_its_steps(make_view) -> None:
    decision = decide(ask(gang=Gang(2, 8, 2), gpus_per_node=8), make_view({"r01": [8] * 7}))
    assert len(decision.ranks) == 6
    assert "(6 of 8 members wanted)" in decision.sentence
    assert decide(ask(gang=Gang(8, 9), gpus_per_node=8), make_view({"r01": [8] * 7})).outcome == "refused"


def test_a_preferred_level_widens_and_says_so(make_view) -> None:
    racks = {"r01": [8], "r02": [8], "r03": [8, 8, 8]}
    tight = decide(ask(gang=3, gpus_per_node=8, preferred="rack"), make_view(racks))
    assert tight.topology_level == "rack"
    wide = decide(ask(gang=4, gpus_per_node=8, preferred="rack"), make_view(racks))
    assert wide.topology_level == "block"
    assert "no single rack had room" in wide.sentence
    # the roomiest sub-domain is filled first: all of r03, then one node of the other rail group
    assert hosts(wide) == ["n001", "n003", "n004", "n005"]


def test_a_preferred_level_stops_at_the_required_one(make_view) -> None:
    view = make_view({"r01": [8, 8], "r02": [8], "r03": [8]})
    assert decide(ask(gang=4, gpus_per_node=8, preferred="rack", required="rail_group"), view).outcome == "refused"
    assert decide(ask(gang=3, gpus_per_node=8, preferred="rack", required="rail_group"), view).outcome == "placed"


def test_a_node_without_topology_serves_only_who_requires_no_level(make_view) -> None:
    view = make_view({"r01": [0]}, unplaced=[8, 8])
    refused = lawful(decide(ask(gang=2, gpus_per_node=8, required="rack"), view))
    assert refused.rejected == {"unknown_topology": 2, "busy": 1}
    placed = lawful(decide(ask(gang=2, gpus_per_node=8), view))
    assert hosts(placed) == ["x0", "x1"]
    assert placed.topology_level == ""
    assert placed.sentence == "placed 2 x 8 GPUs on 2 nodes"


def test_risky_nodes_are_avoided_and_named_with_their_reason(make_view) -> None:
    view = make_view({"r01": [8, 8, 8, 0]})
    p = view.p_slow.copy()
    p[[0, 3]] = 0.9, 0.95
    view = replace(view, p_slow=p, reason={0: "SM clock 990 MHz, usual 1,980 (thermal slowdown)", 3: "XID 79."})
    decision = lawful(decide(ask(gang=2, gpus_per_node=8), view))
    assert hosts(decision) == ["n002", "n003"]
    assert decision.rejected == {"risk": 2}
    assert decision.sentence == (
        "placed 2 x 8 GPUs in rack r01; avoided n001: SM clock 990 MHz, usual 1,980 (thermal slowdown); n004: XID 79"
    )


def test_a_risk_below_the_limit_costs_a_gang_more_than_a_single_gpu(make_view) -> None:
    view = make_view({"r01": [8] * 9})
    p = view.p_fail.copy()
    p[:1] = 0.2
    view = replace(view, p_fail=p, reason={0: "ECC errors rise"})
    decision = decide(ask(gang=8, gpus_per_node=8), view)
    assert "n001" not in hosts(decision)
    assert decision.sentence.endswith("avoided n001: ECC errors rise")
    assert decide(ask(gang=9, gpus_per_node=8), view).outcome == "placed"


def test_many_risky_nodes_are_counted_not_listed(make_view) -> None:
    view = make_view({"r01": [8] * 6})
    p = view.p_fail.copy()
    p[:5] = 0.8, 0.9, 0.7, 0.6, 0.6
    decision = decide(ask(), replace(view, p_fail=p))
    assert decision.sentence == "placed 1 GPU on n006; avoided n002: risk 0.9; n001: risk 0.8; and 3 more"


def test_an_unknown_risk_is_neither_best_nor_worst(make_view) -> None:
    view = make_view({"r01": [8, 8, 8]})
    p = np.array([0.3, np.nan, 0.1])
    first = decide(ask(), replace(view, p_fail=p))
    assert hosts(first) == ["n003"]
    second = decide(ask(avoid_nodes=("n003",)), replace(view, p_fail=p))
    assert hosts(second) == ["n002"]
    nothing_known = replace(view, p_fail=np.full(3, np.nan), p_slow=np.full(3, np.nan))
    assert decide(ask(), nothing_known).outcome == "placed"


def test_nodes_without_a_score_are_not_refused_for_the_risk_of_others(make_view) -> None:
    view = make_view({"r01": [8, 8, 8]})
    view = replace(view, p_fail=np.array([0.9, np.nan, np.nan]), p_slow=np.full(3, np.nan))
    decision = decide(ask(gang=2, gpus_per_node=8), view)
    assert hosts(decision) == ["n002", "n003"]
    assert decision.rejected == {"risk": 1}


def test_max_risk_of_the_request_wins_over_the_operators(make_view) -> None:
    view = make_view({"r01": [8]})
    view = replace(view, p_fail=np.array([0.3]))
    assert decide(ask(max_risk=0.1), view).rejected == {"risk": 1}
    assert decide(ask(), view, Options(max_risk=0.2)).rejected == {"risk": 1}
    assert decide(ask(max_risk=0.4), view, Options(max_risk=0.2)).outcome == "placed"


def test_every_node_counts_under_its_first_reason(make_view) -> None:
    view = make_view({"r01": [8, 8, 8, 8, 8, 0]}, unplaced=[8])
    state = view.state.copy()
    state[1:3] = 1, 2
    cpus = view.free_cpus.copy()
    cpus[3] = 4
    decision = lawful(
        decide(
            ask(required="rack", gpus_per_node=8, avoid_nodes=("n001", "nobody"), cpus=8),
            replace(view, state=state, free_cpus=cpus),
        )
    )
    assert decision.rejected == {"unknown_topology": 1, "avoided": 1, "drained": 1, "lost": 1, "cpus": 1, "busy": 1}
    assert decision.candidates == 1


def test_what_a_scheduler_withholds_is_no_candidate_with_a_reason_of_its_own(make_view) -> None:
    view = make_view({"r01": [8, 8, 8, 8]})
    state = view.state.copy()
    state[1:] = NodeState.MAINTENANCE, NodeState.RESERVED, NodeState.WITHHELD
    decision = lawful(decide(ask(gpus_per_node=8), replace(view, state=state)))
    assert decision.rejected == {"maintenance": 1, "reserved": 1, "withheld": 1}
    assert hosts(decision) == ["n001"]


def test_gpu_model_and_memory_are_hard(make_view) -> None:
    view = make_view({"r01": [8, 8]})
    assert decide(ask(gpu_model="h100"), view).outcome == "placed"
    assert decide(ask(gpu_model="A100"), view).rejected == {"gpu_model": 2}
    assert decide(ask(gpu_memory_gib=80), view).outcome == "placed"
    assert decide(ask(gpu_memory_gib=141), view).rejected == {"gpu_memory": 2}


def test_a_member_larger_than_any_node_is_refused_in_words(make_view) -> None:
    decision = lawful(decide(ask(gpus_per_node=16), make_view({"r01": [8, 8]})))
    assert decision.rejected == {"gpus_per_node": 2}
    assert decision.sentence == "refused: needs 16 GPUs, 16 of them on one node; the largest node has 8"


def test_cpus_limit_how_many_members_share_a_node(make_view) -> None:
    decision = decide(ask(gang=4, cpus=64), make_view({"r01": [8, 8]}))
    assert sorted(Counter(hosts(decision)).values()) == [2, 2]


def test_heavy_host_traffic_prefers_a_quiet_node(make_view) -> None:
    view = make_view({"r01": [4, 8]})
    assert hosts(decide(ask(gang=4), view)) == ["n001"] * 4
    quiet = decide(ask(gang=4, host_offload=True), view)
    assert "quiet" in quiet.parts
    assert hosts(quiet) == ["n002"] * 4


def test_an_empty_fleet_refuses(make_view) -> None:
    decision = lawful(decide(ask(), make_view({})))
    assert decision.outcome == "refused"
    assert decision.nodes == 0


def test_the_parts_sum_to_the_score_and_runners_up_lose(make_view) -> None:
    decision = decide(ask(gang=2, gpus_per_node=8), make_view({"r01": [8, 8], "r02": [8, 8], "r03": [8, 8, 8]}))
    assert sum(decision.parts.values()) == pytest.approx(decision.score, abs=1e-3)
    assert decision.runners_up
    assert all(other.score <= decision.score for other in decision.runners_up)


def test_a_filter_and_a_scorer_of_the_operator_take_part(make_view) -> None:
    def odd(request: PlacementRequest, view: ClusterView, options: Options) -> np.ndarray:
        return np.arange(len(view)) % 2 == 0

    def last(request: PlacementRequest, view: ClusterView, options: Options) -> np.ndarray:
        return np.arange(len(view)) / len(view)

    view = make_view({"r01": [8, 8, 8, 8]})
    decision = lawful(decide(ask(), view, Options(filters=(("odd", odd),), scorers=(("last", last),))))
    assert decision.rejected == {"odd": 2}
    assert hosts(decision) == ["n004"]
    assert "last" in decision.parts


@pytest.mark.parametrize("field", ["mig_profile", "nvme_gib", "power_w"])
def test_a_demand_that_nobody_keeps_is_refused_by_name(make_view, field: str) -> None:
    with pytest.raises(RequestError, match="not honoured yet") as caught:
        decide(ask(**{field: 0.5}), make_view({"r01": [8]}))
    assert caught.value.field == field


LEVELS = st.sampled_from([None, "node", "nvlink_domain", "rack", "rail_group", "block", "cluster"])


@examples(375)
@given(
    free=st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=5), min_size=1, max_size=4),
    unplaced=st.lists(st.integers(0, 8), max_size=2),
    gang=st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(1, 3)),
    each=st.integers(1, 9),
    required=LEVELS,
    preferred=LEVELS,
    spread=st.booleans(),
    risk=st.lists(st.sampled_from([0.01, 0.3, 0.9, float("nan")]), min_size=22, max_size=22),
)
def test_any_decision_keeps_the_laws(make_view, free, unplaced, gang, each, required, preferred, spread, risk) -> None:
    view = make_view({f"r{index}": counts for index, counts in enumerate(free)}, unplaced=unplaced)
    view = replace(view, p_fail=np.array(risk[: len(view)]))
    request = ask(
        gang=Gang(gang[0], gang[0] + gang[1], gang[2]),
        gpus_per_node=each,
        required=required,
        preferred=preferred,
        spread=spread,
    )
    decision = lawful(decide(request, view))
    assert decision == decide(request, view)
    assert fits_now(request, view) == (decision.outcome == "placed")
    if decision.outcome == "refused":
        return
    size = len(decision.ranks)
    assert size in range(gang[0], gang[0] + gang[1] + 1, gang[2])
    assert [rank.rank for rank in decision.ranks] == list(range(size))
    gpus = [(view.inventory.row[rank.node], gpu) for rank in decision.ranks for gpu in rank.gpus]
    assert len(set(gpus)) == len(gpus) == size * each
    assert all(view.free[row, gpu] for row, gpu in gpus)
    nodes = sorted({row for row, _ in gpus})
    assert not spread or len(nodes) == size
    if required == "node":
        assert len(nodes) == 1
    elif required is not None:
        domain = view.topology.domain[Level(required)][nodes]
        assert (domain == domain[0]).all()
        assert domain[0] >= 0
    assert 0 <= decision.score <= 1


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"milli": np.zeros((4, 8), np.int16)}, False),
        ({"free_cpus": np.full(4, 3.0)}, False),
        ({"p_fail": np.full(4, 0.9)}, False),
        ({"state": np.ones(4, np.int8)}, False),
        ({"generation": 4}, False),
    ],
)
def test_a_decision_holds_until_something_takes_its_place(make_view, change: dict[str, Any], holds: bool) -> None:
    view = make_view({"r01": [8, 8, 8, 8]})
    request = ask(gang=2, gpus_per_node=4, cpus=4)
    decision = decide(request, view)
    assert is_still_valid(request, decision, replace(view, **change)) is holds


def test_a_decision_does_not_hold_where_its_node_is_gone(make_view) -> None:
    request = ask(gang=1, gpus_per_node=4, avoid_nodes=("n001",))
    decision = decide(request, make_view({"r01": [8, 8]}))
    assert not is_still_valid(request, decision, make_view({"r01": [8]}))
