import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind


def test_rows_are_given_in_order_of_first_mention_and_kept() -> None:
    entities = Entities()
    assert [entities.find_or_add_node(name) for name in ("n2", "n1", "n2")] == [0, 1, 0]
    assert entities[EntityKind.NODE].names == ["n2", "n1"]


def test_an_entity_of_a_node_registers_the_node() -> None:
    entities = Entities()
    entities.find_or_add_node("n1")
    gpu = entities.add_to_node(EntityKind.GPU, "n2", 3)
    port = entities.add_to_node(EntityKind.PORT, "n2", "mlx5_0", 1)
    assert entities[EntityKind.GPU].names[gpu] == "n2/3"
    assert entities[EntityKind.PORT].names[port] == "n2/mlx5_0/1"
    assert entities[EntityKind.GPU].node.tolist() == [1]
    assert entities[EntityKind.PORT].node.tolist() == [1]
    assert entities[EntityKind.NODE].node.tolist() == [0, 1]


def test_a_table_grows_past_its_first_allocation() -> None:
    entities = Entities()
    rows = [entities.add_to_node(EntityKind.GPU, f"n{number // 8}", number % 8) for number in range(1000)]
    assert rows == list(range(1000))
    assert entities[EntityKind.GPU].node.tolist() == [number // 8 for number in range(1000)]


def test_the_owner_column_is_read_only() -> None:
    entities = Entities()
    entities.find_or_add_node("n1")
    with pytest.raises(ValueError, match="read-only"):
        entities[EntityKind.NODE].node[0] = 7


def test_an_unknown_name_has_no_row() -> None:
    table = Entities()[EntityKind.POOL]
    assert table.find_row("train") is None
    assert "train" not in table
    assert table.add("train") == 0
    assert "train" in table
    assert table.node.tolist() == [-1]


MENTIONS = st.lists(st.tuples(st.sampled_from(["n1", "n2", "n3"]), st.none() | st.integers(0, 3)), max_size=20)


@given(MENTIONS)
def test_what_was_dumped_comes_back_row_by_row(mentions: list[tuple[str, int | None]]) -> None:
    entities = Entities()
    for node, gpu in mentions:
        if gpu is None:
            entities.find_or_add_node(node)
        else:
            entities.add_to_node(EntityKind.GPU, node, gpu)
    entities[EntityKind.POOL].add("train")
    again = Entities.load(entities.dump())
    for kind in EntityKind:
        assert again[kind].names == entities[kind].names
        assert again[kind].node.tolist() == entities[kind].node.tolist()
