"""Only alike things are compared: ports of one speed and layer on like hosts, GPUs of one model."""

from collections.abc import Callable

import numpy as np
import pytest

from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import NodeSpec, Topology
from tests.models.conftest import SmallFleet

Small = Callable[..., SmallFleet]
PORT = EntityKind.PORT


def port(fleet: SmallFleet, name: str) -> int:
    row = fleet.entities[PORT].find_row(name)
    assert row is not None
    return row


def at_speed(fleet: SmallFleet, name: str, bytes_per_s: float) -> None:
    for column in ("speed_bytes_per_s", "max_speed_bytes_per_s"):
        fleet.port[column][port(fleet, name)] = bytes_per_s


def test_a_slower_port_among_its_hosts_ports_is_no_slow_port(small_fleet: Small) -> None:
    fleet = small_fleet(1)
    at_speed(fleet, "n001/mlx5_7/1", 12.5e9)
    assert fleet.tick(20).risk.reasons == {}


def test_a_port_below_its_own_past_is_slow(small_fleet: Small) -> None:
    fleet = small_fleet(1)
    fleet.tick(2)
    fleet.port["speed_bytes_per_s"][port(fleet, "n001/mlx5_7/1")] = 25e9
    assert fleet.flagged(fleet.tick(6)) == ["n001"]


def test_a_port_of_another_link_layer_is_no_peer(small_fleet: Small) -> None:
    fleet = small_fleet(8)
    for name in fleet.names:
        fleet.entities.record_trait(f"{name}/mlx5_4/1", "InfiniBand")
    at_speed(fleet, "n003/mlx5_4/1", 12.5e9)
    fleet.entities.record_trait("n003/mlx5_4/1", "Ethernet")
    assert fleet.tick(20).risk.reasons == {}
    fleet.entities.record_trait("n003/mlx5_4/1", "InfiniBand")
    fleet.memory.links._peers = None
    assert fleet.flagged(fleet.tick(6)) == ["n003"]


def test_a_port_that_its_administrator_disabled_is_not_down(small_fleet: Small) -> None:
    fleet = small_fleet(1)
    fleet.port["physical_state"] = np.full(8, 5.0)
    fleet.tick(2)
    row = port(fleet, "n001/mlx5_7/1")
    fleet.port["state"][row], fleet.port["physical_state"][row] = 1.0, 3.0
    assert fleet.tick(6).risk.reasons == {}
    fleet.port["physical_state"][row] = 2.0  # polling: the cable is gone
    assert fleet.flagged(fleet.tick(6)) == ["n001"]


def test_a_storage_port_that_moves_less_is_no_slow_nic(small_fleet: Small) -> None:
    fleet = small_fleet(2)
    fleet.start("train", fleet.names)
    for name in fleet.names:
        at_speed(fleet, f"{name}/mlx5_7/1", 12.5e9)
        for column in ("rx_bytes_per_s", "tx_bytes_per_s", "rx_bytes_per_s_mean_2m", "tx_bytes_per_s_mean_2m"):
            fleet.port[column][port(fleet, f"{name}/mlx5_7/1")] = 2e9
    assert fleet.tick(20).risk.reasons == {}


MODELS = ["H100"] * 4 + ["L4"] * 4


def two_models(fleet: SmallFleet, known: bool = True) -> SmallFleet:
    """The last four GPUs of each node are L4s: slower clocks, warmer, with narrower links."""
    fleet.topology = Topology.build([NodeSpec(name, gpus=8, gpu_model="H100") for name in fleet.names])
    for node, name in enumerate(fleet.names):
        rows = slice(8 * node + 4, 8 * node + 8)
        for column, value in {
            "sm_clock_mhz": 1200.0,
            "sm_clock_mhz_mean_2m": 1200.0,
            "max_sm_clock_mhz": 1200.0,
            "clock_event_reasons": 0.0,
            "gpu_temp_c": 85.0,
            "power_w": 70.0,
            "pcie_link_width": 8.0,
            "pcie_max_link_width": np.nan,
            "pcie_link_gen": 4.0,
            "pcie_max_link_gen": np.nan,
        }.items():
            fleet.gpu[column][rows] = value
        if known:
            for index, model in enumerate(MODELS):
                fleet.entities.record_trait(f"{name}/{index}", model)
    return fleet


@pytest.mark.parametrize("job", [False, True])
def test_gpus_of_two_models_in_a_host_accuse_nobody(small_fleet: Small, job: bool) -> None:
    fleet = two_models(small_fleet(2))
    if job:
        fleet.start("train", fleet.names)
    assert fleet.tick(30).risk.reasons == {}


def test_a_slow_gpu_among_those_of_its_model_is_found(small_fleet: Small) -> None:
    fleet = two_models(small_fleet(1))
    fleet.tick(2)
    row = fleet.row("n001", 5)
    fleet.gpu["sm_clock_mhz"][row] = fleet.gpu["sm_clock_mhz_mean_2m"][row] = 800.0
    assert fleet.flagged(fleet.tick(8)) == ["n001"]


def test_a_gang_of_two_models_has_no_slow_half(small_fleet: Small) -> None:
    fleet = small_fleet(4)
    fleet.start("train", fleet.names)
    for node, name in enumerate(fleet.names):
        rows, clock = slice(8 * node, 8 * node + 8), 1410.0 if node == 3 else 1980.0
        for column in ("sm_clock_mhz", "sm_clock_mhz_mean_2m", "max_sm_clock_mhz"):
            fleet.gpu[column][rows] = clock
        for index in range(8):
            fleet.entities.record_trait(f"{name}/{index}", "A100" if node == 3 else "H100")
    assert fleet.tick(20).risk.reasons == {}
