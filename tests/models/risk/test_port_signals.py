from collections.abc import Callable

import numpy as np

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Step
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import Device, NodeSpec, Topology
from fleetcast.models.risk.port_peers import PortPeers, describe_port_place
from tests.models.conftest import SmallFleet

Small = Callable[..., SmallFleet]
WIRING = {"H100": tuple(Device(f"mlx5_{gpu}", (gpu,), gpu) for gpu in range(8))}


def wired(fleet: SmallFleet, **more: object) -> SmallFleet:
    nodes = [NodeSpec(name, gpus=8, gpu_model="H100", **more) for name in fleet.names]  # type: ignore[arg-type]
    fleet.topology = Topology.build(nodes, hosts=WIRING)
    return fleet


def at_speed(fleet: SmallFleet, port: str, bytes_per_s: float) -> None:
    """As if the port had never run at another speed."""
    row = fleet.entities[EntityKind.PORT].find_row(port)
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
        "port mlx5_3 (rail 3, GPU 3): 40 packets without acknowledgement in time in 10 min"
    ]
    assert fleet.flagged(answer) == ["n001"]


def test_peers_are_made_anew_only_when_ports_or_the_topology_change(small_fleet: Small) -> None:
    fleet = wired(small_fleet(2))
    table = fleet.entities[EntityKind.PORT]
    first = PortPeers.from_ports(table.names, table.node, fleet.topology)
    assert PortPeers.from_ports(table.names, table.node, fleet.topology, first) is first
    later = fleet.topology.add_unplaced_nodes(["n9"])
    assert PortPeers.from_ports(table.names, table.node, later, first) is not first


def test_the_second_port_of_an_adapter_is_named() -> None:
    assert describe_port_place("n1/mlx5_3/2", Device("mlx5_3", (2, 3), 1)) == "port 2, rail 1, GPUs 2 and 3"
    assert describe_port_place("n1/mlx5_3/1", None) == ""


def test_a_host_that_shares_its_processors_or_runs_out_of_memory_is_said_to(small_fleet: Small) -> None:
    fleet = small_fleet(2)
    fleet.node["cpu_steal_share_mean_2m"] = np.array([0.08, 0.01])
    fleet.node["memory_pressure_share"] = np.array([0.3, 0.0])
    answer = fleet.tick(4)
    assert sorted(fleet.sentences(answer, "n001")) == [
        "other guests of its host take 8 % of its CPU time",
        "tasks wait for memory 30 % of the time",
    ]
    assert fleet.sentences(answer, "n002") == []
    assert fleet.flagged(answer) == ["n001"], "nothing large is placed there"


def test_where_all_nodes_share_their_hosts_nobody_stands_out(small_fleet: Small) -> None:
    fleet = small_fleet(4)
    fleet.node["cpu_steal_share_mean_2m"] = np.array([0.08, 0.05, 0.04, 0.06])
    assert fleet.flagged(fleet.tick(4)) == []


def test_a_pressed_host_holds_back_the_gang_that_is_slow(small_fleet: Small) -> None:
    fleet = small_fleet(4)
    fleet.start("j", fleet.names)
    for number, duration_s in enumerate([2.0] * 20 + [2.4] * 8):
        step = Step(
            job="j", sequence=10 + number, time_ms=fleet.now_ms + 2000 * number, step=number, duration_s=duration_s
        )
        fleet.jobs.apply(step)
    fleet.node["cpu_steal_share_mean_2m"] = np.array([0.0, 0.0, 0.1, 0.0])
    body = fleet.tick(4).stragglers["j"]
    assert body["slow"]
    assert (body["culprit"]["name"], body["cause"]) == ("n003", "compute")


def test_a_node_is_silent_after_four_scrapes_in_vain(small_fleet: Small) -> None:
    fleet = small_fleet(4)
    fleet.tick()
    fleet.node["scrape_up"][1] = 0.0
    ages = []
    for age_s in (30.0, 46.0, 61.0):
        fleet.gpu["age_s"][8:16] = fleet.port["age_s"][8:16] = age_s
        ages += [age_s] * (fleet.flagged(fleet.tick()) == ["n002"])
    assert ages == [61.0]


def test_a_host_that_goes_on_telling_is_not_silent_where_no_port_is_told(small_fleet: Small) -> None:
    fleet = small_fleet(4, ports=False)
    fleet.tick()
    fleet.node["scrape_up"][1] = 0.0
    fleet.node_since["memory_available_bytes"] = np.zeros(4, np.int64)
    flagged = []
    for age_s, host_s in ((61.0, 5.0), (91.0, 5.0), (121.0, 61.0)):
        fleet.gpu["age_s"][8:16] = age_s
        fleet.node_since["memory_available_bytes"][:] = fleet.now_ms + 15_000 - round(host_s * 1000)
        flagged.append(fleet.flagged(fleet.tick()))
    assert flagged == [[], [], ["n002"]]


def rates(fleet: SmallFleet, row: int, last: float, mean: float) -> None:
    for name in ("rx_bytes_per_s", "tx_bytes_per_s"):
        fleet.port[name][row], fleet.port[f"{name}_mean_2m"][row] = last, mean


def test_ports_with_byte_rates_alone_are_compared_where_no_gpu_is_reported(small_fleet: Small) -> None:
    fleet = SmallFleet(2)
    fleet.entities = Entities()
    for name in fleet.names:
        for index in range(8):
            fleet.entities.add_to_node(EntityKind.PORT, name, f"mlx5_{index}", 1)
    fleet.gpu = {name: column[:0] for name, column in fleet.gpu.items()}
    fleet.gpu_since = {name: column[:0] for name, column in fleet.gpu_since.items()}
    fleet.start("j", fleet.names)
    rates(fleet, 3, 8e9, 9e9)  # of 10e9: too little to tell, if the others were not alike
    assert fleet.flagged(fleet.tick(6)) == ["n001"]
    rates(fleet, 3, 9.6e9, 9.6e9)  # what siblings differ by
    assert fleet.flagged(fleet.tick(20)) == []


def test_a_port_that_goes_dead_again_and_again_while_its_siblings_retry_is_found(small_fleet: Small) -> None:
    fleet = small_fleet(2)
    fleet.start("j", fleet.names)
    flagged = []
    for number in range(8):
        down = number % 3 == 0  # for one scrape in three; the gang stalls as a whole
        for row in range(16):
            rates(fleet, row, 4e8 if down else 10e9, 6e9)
        if down:
            rates(fleet, 5, 0.0, 6e9)
        flagged.append(fleet.flagged(fleet.tick()))
    assert flagged[:3] == [[], [], []], "once is no evidence"
    assert flagged[-1] == ["n001"]


def test_ports_that_all_stop_accuse_nobody(small_fleet: Small) -> None:
    fleet = small_fleet(2)
    fleet.start("j", fleet.names)
    for row in range(16):
        rates(fleet, row, 0.0, 6e9)
    assert fleet.flagged(fleet.tick(6)) == []
