from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.node_names import find_known_name, find_or_register_node


def test_a_short_name_is_the_full_one_that_is_known_whichever_came_first() -> None:
    for first, second in (("n1", "n1.cluster.example"), ("n1.cluster.example", "n1")):
        entities = Entities()
        assert find_or_register_node(first, entities) == first
        assert find_or_register_node(second, entities) == first
        assert entities[EntityKind.NODE].names == [first]


def test_a_short_name_that_two_full_ones_begin_with_is_neither() -> None:
    entities = Entities()
    for name in ("n1.east.example", "n1.west.example"):
        assert find_or_register_node(name, entities) == name
    assert find_or_register_node("n1", entities) == "n1"
    assert len(entities[EntityKind.NODE]) == 3


def test_addresses_have_no_short_form() -> None:
    entities = Entities()
    find_or_register_node("10.0.0.7", entities)
    assert find_known_name("10", entities[EntityKind.NODE]) == "10"
    assert find_known_name("10.0.0.8", entities[EntityKind.NODE]) == "10.0.0.8"


def test_what_a_save_brought_back_is_known_by_its_short_name_too() -> None:
    entities = Entities()
    find_or_register_node("n1.cluster.example", entities)
    assert find_or_register_node("n1", Entities.load(entities.dump())) == "n1.cluster.example"


def test_capitals_and_a_dot_at_the_end_make_no_other_machine_whichever_came_first() -> None:
    """Kubernetes writes the names of hosts in small letters, and `hostname` prints them as they were typed."""
    names = ["GPU-Node01", "gpu-node01", "gpu-node01.", "gpu-node01.example.com", "GPU-NODE01.EXAMPLE.COM."]
    for first in names:
        entities = Entities()
        for name in (first, *names):
            assert find_or_register_node(name, entities) == first
        assert entities[EntityKind.NODE].names == [first]
        again = Entities.load(entities.dump())
        assert find_or_register_node("gpu-NODE01", again) == first


def test_names_that_two_nodes_have_but_for_capitals_are_neither() -> None:
    entities = Entities()
    for name in ("n1", "N1"):
        entities.find_or_add_node(name)
    assert [find_or_register_node(name, entities) for name in ("n1", "N1", "n1.")] == ["n1", "N1", "n1."]
