from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import Decision, Gang, PlacementRequest, TopologyConstraint
from fleetcast.placement.engine import decide
from fleetcast.placement.machines.view import Advice, ClusterView
from tests.fuzz.bounds import examples

NONE, AVOID, DRAIN = Advice.NONE, Advice.AVOID, Advice.DRAIN


def advised(view: ClusterView, *advice: Advice) -> ClusterView:
    return replace(view, advice=np.array([*advice, *[NONE] * (len(view) - len(advice))], np.int8))


def place(view: ClusterView, gang: Gang | int, each: int = 8, required: Any = None) -> Decision:
    constraint = TopologyConstraint(required=required)
    return decide(PlacementRequest(request_id="r", gang=gang, gpus_per_node=each, topology=constraint), view)


def hosts(decision: Decision) -> set[str]:
    return {rank.node for rank in decision.ranks}


def test_a_gang_grows_only_onto_nodes_that_nobody_advises_against(make_view) -> None:
    view = advised(make_view({"r1": [8] * 6}), DRAIN, DRAIN)
    decision = place(view, Gang(2, 6))
    assert hosts(decision) == {"n003", "n004", "n005", "n006"}
    assert decision.sentence == (
        "placed 4 x 8 GPUs in rack r1 (4 of 6 members wanted: the other nodes with room are to be drained)"
    )
    assert decision.nodes == decision.candidates + sum(decision.rejected.values())


def test_the_sentence_says_what_is_advised_about_the_others(make_view) -> None:
    view = make_view({"r1": [8] * 6})
    assert "are to be avoided)" in place(advised(view, AVOID), Gang(2, 6)).sentence
    assert "are to be drained or to be avoided)" in place(advised(view, AVOID, DRAIN), Gang(2, 6)).sentence
    assert "wanted" not in place(advised(view, AVOID), Gang(2, 5)).sentence  # five have room elsewhere


def test_a_gang_that_healthy_nodes_cannot_hold_stays_at_its_minimum(make_view) -> None:
    view = advised(make_view({"r1": [8] * 6}), DRAIN, AVOID, AVOID, AVOID)
    assert len(place(view, Gang(3, 6)).ranks) == 3
    assert len(place(view, 6).ranks) == 6  # a fixed gang has no choice


def test_advice_about_a_node_without_room_changes_nothing(make_view) -> None:
    view = make_view({"r1": [8, 8, 8, 0]})
    assert place(advised(view, NONE, NONE, NONE, DRAIN), Gang(1, 4)) == place(view, Gang(1, 4))


def test_a_gang_does_not_grow_onto_a_node_that_costs_more_than_it_adds(make_view) -> None:
    p_fail = np.array([0.001, 0.001, 0.001, 0.4])
    decision = place(make_view({"r1": [8] * 4}, p_fail=p_fail), Gang(1, 4))
    assert hosts(decision) == {"n001", "n002", "n003"}
    assert "(3 of 4 members wanted: the other nodes with room are too risky for what they add)" in decision.sentence
    p_fail = np.array([0.001, 0.001, 0.001, 0.2])  # four members x .8 is more than three
    assert len(place(make_view({"r1": [8] * 4}, p_fail=p_fail), Gang(1, 4)).ranks) == 4


def test_the_domain_with_most_progress_sets_the_size(make_view) -> None:
    # r1 holds 4 of which 3 are to be drained, r2 holds 3 healthy ones
    view = advised(make_view({"r1": [8] * 4, "r2": [8] * 3}), DRAIN, DRAIN, DRAIN)
    assert hosts(place(view, Gang(1, 4), required="rack")) == {"n005", "n006", "n007"}


@pytest.mark.parametrize("each", [8, 4, 3])
@examples(150)
@given(
    racks=st.lists(
        st.lists(st.tuples(st.integers(0, 8), st.sampled_from([NONE, AVOID, DRAIN]), st.floats(0, 0.49)), max_size=4),
        min_size=1,
        max_size=3,
    ),
    least=st.integers(1, 4),
    more=st.integers(1, 6),
    step=st.integers(1, 3),
    required=st.sampled_from([None, "rack", "node"]),
)
def test_growth_keeps_its_laws(make_view, each, racks, least, more, step, required) -> None:
    """Above its minimum a gang lies on no advised node; it is at most as large as without advice."""
    nodes = [node for rack in racks for node in rack]
    free = {f"r{number}": [node[0] for node in rack] for number, rack in enumerate(racks)}
    view = make_view(free, p_fail=np.array([node[2] for node in nodes]), p_slow=np.zeros(len(nodes)))
    gang = Gang(least, least + more, step)
    told = advised(view, *[node[1] for node in nodes])
    decision = place(told, gang, each, required)
    placed = len(decision.ranks)
    assert (placed == 0) == (not place(view, least, each, required).ranks)  # advice refuses nobody
    assert placed == 0 or (placed - least) % step == 0
    assert placed <= gang.desired
    advice = dict(zip(told.topology.names, told.advice.tolist(), strict=True))
    if placed > least:
        assert not any(advice[name] for name in hosts(decision))
    if placed > least and each == 8 and step == 1:  # a member a node: leaving out the riskiest gains nothing
        worst = max(view.p_fail[view.inventory.row[name]] for name in hosts(decision))
        assert placed * (1 - worst) >= placed - 1 - 1e-9
