from fleet.entities import Entities
from fleet.samples import EntityKind
from ingest.node_names import known_name, node_name


def test_a_short_name_is_the_full_one_that_is_known_whichever_came_first() -> None:
    for first, second in (("n1", "n1.cluster.example"), ("n1.cluster.example", "n1")):
        entities = Entities()
        assert node_name(first, entities) == first
        assert node_name(second, entities) == first
        assert entities[EntityKind.NODE].names == [first]


def test_a_short_name_that_two_full_ones_begin_with_is_neither() -> None:
    entities = Entities()
    for name in ("n1.east.example", "n1.west.example"):
        assert node_name(name, entities) == name
    assert node_name("n1", entities) == "n1"
    assert len(entities[EntityKind.NODE]) == 3


def test_addresses_have_no_short_form() -> None:
    entities = Entities()
    node_name("10.0.0.7", entities)
    assert known_name("10", entities[EntityKind.NODE]) == "10"
    assert known_name("10.0.0.8", entities[EntityKind.NODE]) == "10.0.0.8"


def test_what_a_save_brought_back_is_known_by_its_short_name_too() -> None:
    entities = Entities()
    node_name("n1.cluster.example", entities)
    assert node_name("n1", Entities.load(entities.dump())) == "n1.cluster.example"
