from collections.abc import Callable

import numpy as np

from fleet.samples import EntityKind
from fleet.topology import Device, NodeSpec, Topology
from models.port_peers import PortPeers, whereabouts
from tests.models.conftest import SmallFleet

Small = Callable[..., SmallFleet]
WIRING = {"H100": tuple(Device(f"mlx5_{gpu}", (gpu,), gpu) for gpu in range(8))}


def wired(fleet: SmallFleet, **more: object) -> SmallFleet:
    nodes = [NodeSpec(name, gpus=8, gpu_model="H100", **more) for name in fleet.names]  # type: ignore[arg-type]
    fleet.topology = Topology.build(nodes, hosts=WIRING)
    return fleet


def at_speed(fleet: SmallFleet, port: str, bytes_per_s: float) -> None:
    """As if the port had never run at another speed."""
    row = fleet.entities[EntityKind.PORT].row(port)
    for name in ("speed_bytes_per_s", "max_speed_bytes_per_s"):
        fleet.port[name][row] = bytes_per_s


def test_a_port_that_was_always_slower_than_its_peers_on_the_fleet_is_found_and_placed(small_fleet: Small) -> None:
    fleet = wired(small_fleet(6))
    for device in range(8):  # all of the node: its own ports cannot tell
        at_speed(fleet, f"n002/mlx5_{device}/1", 25e9)
    answer = fleet.tick(4)
    assert fleet.flagged(answer) == ["n002"]
    assert "port mlx5_3 (rail 3, GPU 3): InfiniBand link at 200 Gbit/s, usual 400 Gbit/s" in [
        reason.sentence for reason in answer.risk.reasons[1]
    ]


def test_two_generations_of_adapters_accuse_nobody(small_fleet: Small) -> None:
    fleet = wired(small_fleet(6))
    for node in ("n001", "n002", "n003"):
        for device in range(8):
            at_speed(fleet, f"{node}/mlx5_{device}/1", 25e9)
    assert fleet.flagged(fleet.tick(4)) == []


def test_other_models_and_other_devices_are_no_peers(small_fleet: Small) -> None:
    fleet = small_fleet(6)
    models = ["A100"] + ["H100"] * 5
    specs = [NodeSpec(name, gpus=8, gpu_model=model) for name, model in zip(fleet.names, models, strict=True)]
    fleet.topology = Topology.build(specs)
    for device in range(8):
        at_speed(fleet, f"n001/mlx5_{device}/1", 25e9)
    for node in fleet.names:
        at_speed(fleet, f"{node}/mlx5_7/1", 12.5e9)  # the storage adapter
    answer = fleet.tick(4)
    slow = {reason.entity for reasons in answer.risk.reasons.values() for reason in reasons}
    assert "n001/mlx5_0/1" not in slow


def test_what_the_topology_states_is_expected_of_a_port_without_peers(small_fleet: Small) -> None:
    fleet = wired(small_fleet(1), devices=tuple(Device(f"mlx5_{gpu}", bytes_per_s=50e9) for gpu in range(8)))
    for device in range(8):
        at_speed(fleet, f"n001/mlx5_{device}/1", 12.5e9)
    assert any("100.0 Gbit/s, usual 400 Gbit/s" in text for text in fleet.sentences(fleet.tick(4), "n001"))


def test_packets_that_nobody_acknowledges_are_a_reason(small_fleet: Small) -> None:
    fleet = wired(small_fleet(2))
    fleet.port["ack_timeouts_count_10m"] = np.zeros(16)
    fleet.port["ack_timeouts_count_10m"][3] = 40.0
    answer = fleet.tick(4)
    assert fleet.sentences(answer, "n001") == [
        "port mlx5_3 (rail 3, GPU 3): 40 packets that nobody acknowledged in time in 10 min"
    ]
    assert fleet.flagged(answer) == ["n001"]


def test_peers_are_made_anew_only_when_ports_or_the_topology_change(small_fleet: Small) -> None:
    fleet = wired(small_fleet(2))
    table = fleet.entities[EntityKind.PORT]
    first = PortPeers.of(table.names, table.node, fleet.topology)
    assert PortPeers.of(table.names, table.node, fleet.topology, first) is first
    later = fleet.topology.with_unplaced(["n9"])
    assert PortPeers.of(table.names, table.node, later, first) is not first


def test_the_second_port_of_an_adapter_is_named() -> None:
    assert whereabouts("n1/mlx5_3/2", Device("mlx5_3", (2, 3), 1)) == "port 2, rail 1, GPUs 2 and 3"
    assert whereabouts("n1/mlx5_3/1", None) == ""


def test_a_host_that_shares_its_processors_or_runs_out_of_memory_is_said_to(small_fleet: Small) -> None:
    fleet = small_fleet(2)
    fleet.node["cpu_steal_s"] = np.array([0.08, 0.01])
    fleet.node["memory_pressure"] = np.array([0.3, 0.0])
    answer = fleet.tick(4)
    assert sorted(fleet.sentences(answer, "n001")) == [
        "other guests of its host take 8 % of its CPU time",
        "tasks wait for memory 30 % of the time",
    ]
    assert fleet.sentences(answer, "n002") == []
    assert fleet.flagged(answer) == [], "watched, not avoided"
