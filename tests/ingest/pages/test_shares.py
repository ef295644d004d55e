"""Shares: every node, target and sample goes to exactly one of several pipelines."""

import numpy as np
import pytest

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.pages.target_spec import parse_target
from fleetcast.ingest.shares import OwnNodeFilter, Share


def blocks(**nodes: str) -> Topology:
    return Topology.build([NodeSpec(node, domains={Level.BLOCK: block}) for node, block in nodes.items()])


@pytest.mark.parametrize("instances", [1, 2, 3, 7])
def test_every_node_has_one_owner_whatever_it_is_called(instances: int) -> None:
    shares = [Share(number, instances) for number in range(instances)]
    for name in ("n1", "gpu-07.rack3.example.com", "10.0.0.7", "fe80::1"):
        assert sum(share.owns(name) for share in shares) == 1


def test_a_short_name_and_the_full_one_go_together_and_addresses_are_whole() -> None:
    shares = [Share(number, 16) for number in range(16)]
    for number in range(20):
        assert [share.owns(f"n{number}") for share in shares] == [share.owns(f"n{number}.a.b") for share in shares]
    assert len({tuple(share.owns(f"10.0.0.{number}") for share in shares) for number in range(40)}) > 8


def test_blocks_are_dealt_out_by_name_in_whatever_order_a_file_names_them() -> None:
    one, other = blocks(n1="b2", n2="b1", n3="b3"), blocks(n3="b3", n2="b1", n1="b2")
    for topology in (one, other):
        owners = {
            node: [k for k in range(2) if Share.from_topology(k, 2, topology).owns(node)]
            for node in ("n1", "n2", "n3", "n1.x")
        }
        assert owners == {"n2": [0], "n1": [1], "n1.x": [1], "n3": [0]}


def test_targets_go_with_their_node_or_host_and_one_by_one_on_this_machine() -> None:
    shares = [Share(number, 2) for number in range(2)]
    for text, node in (("http://n1:9400", "n1"), ("http://n1.x:9100", "n1"), ("http://10.0.0.7:9400 n9", "n9")):
        assert [share.scrapes(parse_target(text)) for share in shares] == [share.owns(node) for share in shares]
    taken = [
        sum(share.scrapes(parse_target(f"http://127.0.0.1:{port}")) for port in range(9000, 9064)) for share in shares
    ]
    assert sum(taken) == 64
    assert min(taken) > 16


def test_samples_are_kept_of_own_nodes_and_what_no_node_owns_goes_to_the_first() -> None:
    entities = Entities()
    names = [f"n{number}" for number in range(32)]
    rows = [entities.add_to_node(EntityKind.GPU, name, 0) for name in names]
    batch = SampleBatch.from_rows(EntityKind.GPU, [(0, row, 1000, float(row)) for row in rows])
    pools = SampleBatch.from_rows(EntityKind.POOL, [(0, entities[EntityKind.POOL].add("train"), 1000, 1.0)])
    kept = [OwnNodeFilter(Share(number, 3), entities) for number in range(3)]
    values = [own.filter_samples(batch).value for own in kept]
    assert sorted(np.concatenate(values).tolist()) == [float(row) for row in rows]
    for share, own in enumerate(values):
        assert all(Share(share, 3).owns(names[int(value)]) for value in own)
    assert [len(own.filter_samples(pools)) for own in kept] == [1, 0, 0]
    later = entities.add_to_node(EntityKind.GPU, "later", 0)
    more = SampleBatch.from_rows(EntityKind.GPU, [(0, later, 1000, 1.0)])
    assert sum(len(own.filter_samples(more)) for own in kept) == 1
