import pytest

from fleetcast.fleet.topology import DOMAIN_LEVELS, Level, NodeSpec, Topology


def node(name: str, rack: str = "", gpus: int = 8, **more: str) -> NodeSpec:
    return NodeSpec(name, gpus=gpus, domains={Level.RACK: rack}, **more)  # type: ignore[arg-type]


def test_domains_are_numbered_in_order_of_first_mention() -> None:
    topology = Topology.build([node("n1", "r2"), node("n2", "r1"), node("n3", "r2")])
    assert topology.domain[Level.RACK].tolist() == [0, 1, 0]
    assert topology.domain_names[Level.RACK] == ("r2", "r1")
    assert topology.names == ("n1", "n2", "n3")
    assert len(topology) == 3


def test_a_level_that_nobody_names_is_unknown_everywhere() -> None:
    topology = Topology.build([node("n1", "r1"), node("n2")])
    assert topology.domain[Level.RACK].tolist() == [0, -1]
    assert topology.domain[Level.BLOCK].tolist() == [-1, -1]
    assert set(topology.domain) == set(DOMAIN_LEVELS)


def test_a_node_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'n1' is named twice"):
        Topology.build([node("n1"), node("n2"), node("n1")])


def test_unplaced_nodes_are_appended_and_belong_nowhere() -> None:
    topology = Topology.build([node("n1", "r1")])
    wider = topology.add_unplaced_nodes(["x1", "x2"])
    assert wider.names == ("n1", "x1", "x2")
    assert wider.placed.tolist() == [True, False, False]
    assert all(wider.domain[level][1:].tolist() == [-1, -1] for level in DOMAIN_LEVELS)
    assert wider.generation == topology.generation + 1
    assert topology.names == ("n1",)


def test_an_exporter_fills_what_is_unknown_and_wins_over_a_larger_stated_number() -> None:
    topology = Topology.build([node("n1", gpus=8, gpu_model="H100"), node("n2", gpus=0)]).add_unplaced_nodes(["x1"])
    learnt = topology.update_gpu_counts({"n1": 4, "n2": 8, "x1": 2}, {"n1": "A100", "n2": "H200"})
    assert learnt.gpus.tolist() == [4, 8, 2]
    assert learnt.stated_gpus.tolist() == [8, 8, 2], "four boards that a file states are missing"
    assert [spec.gpu_model for spec in learnt.nodes] == ["H100", "H200", ""]
    assert learnt.placed.tolist() == [True, True, False]
    assert learnt.generation == topology.generation + 1


def test_levels_run_from_the_tightest_to_the_widest() -> None:
    assert [*Level] == ["node", "nvlink_domain", "rack", "rail_group", "block", "cluster"]
    assert tuple(Level)[1:] == DOMAIN_LEVELS


def test_an_empty_topology_is_a_topology() -> None:
    topology = Topology.build([])
    assert len(topology) == 0
    assert topology.add_unplaced_nodes(["x1"]).names == ("x1",)
