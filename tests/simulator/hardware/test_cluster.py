"""The fleet as a whole: topology file, jobs, time, and what its pages say of them."""

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import Level, Topology
from fleetcast.ingest.topology.load import parse_topology
from fleetcast.simulator.hardware.cluster import FleetSpec, SimulatedFleet
from fleetcast.simulator.hardware.workload import draw_job_profile

SMALL = FleetSpec(nodes=4, rack_nodes=2)


def read(page: bytes) -> dict[tuple[str, str], float]:
    """(name, GPU or port device) -> value, by the reference parser."""
    return {
        (sample.name, sample.labels.get("gpu") or sample.labels.get("device", "")): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def whole(*nodes: str) -> list[RankPlacement]:
    return [RankPlacement(rank, node, tuple(range(8))) for rank, node in enumerate(nodes)]


def run(fleet: SimulatedFleet, until_s: int, step_s: int = 5) -> None:
    start_ms = fleet.time_ms or 0
    for time_ms in range(start_ms + step_s * 1000, until_s * 1000 + 1, step_s * 1000):
        fleet.advance(time_ms)


def test_the_default_fleet_has_133_nodes_in_seven_racks() -> None:
    spec = FleetSpec()
    assert (len(spec.names), spec.names[0], spec.names[-1]) == (133, "n001", "n133")
    topology = Topology.build(parse_topology(spec.format_topology_toml()))
    assert topology.names == spec.names
    assert set(topology.gpus) == {8}
    sizes = {level: len(names) for level, names in topology.domain_names.items()}
    assert (sizes[Level.RACK], sizes[Level.RAIL_GROUP], sizes[Level.BLOCK]) == (7, 4, 2)


def test_the_last_nodes_may_be_a_rack_and_a_pool_of_their_own() -> None:
    spec = FleetSpec(nodes=7, rack_nodes=3, own_nodes=2, own_pool="research")
    nodes = Topology.build(parse_topology(spec.format_topology_toml())).nodes
    assert [node.name for node in nodes] == list(spec.names)
    assert [node.domains[Level.RACK] for node in nodes] == [*["r01"] * 3, *["r02"] * 2, *["r03"] * 2]
    assert [node.pool for node in nodes] == [*["train"] * 5, *["research"] * 2]


def test_a_running_job_loads_its_gpus_and_leaves_the_others_idle() -> None:
    fleet = SimulatedFleet(SMALL, seed=1)
    fleet.advance(0)
    fleet.start_job("j", 1, whole("n001"), draw_job_profile("j", 8), 0)
    run(fleet, 200)
    busy, idle = read(fleet.render_page("n001", "dcgm")), read(fleet.render_page("n002", "dcgm"))
    assert all(busy["DCGM_FI_DEV_POWER_USAGE", str(gpu)] > 350 for gpu in range(8))
    assert all(64 < idle["DCGM_FI_DEV_POWER_USAGE", str(gpu)] < 78 for gpu in range(8))
    assert {idle["DCGM_FI_DEV_SM_CLOCK", str(gpu)] for gpu in range(8)} == {345}
    assert {busy["DCGM_FI_DEV_SM_CLOCK", str(gpu)] for gpu in range(8)} <= {1965, 1980}


def test_stopping_a_job_twice_frees_its_gpus_once() -> None:
    fleet = SimulatedFleet(SMALL, seed=1)
    fleet.start_job("j", 1, whole("n001"), draw_job_profile("j", 8), 0)
    fleet.stop_job("j", 1000)
    fleet.stop_job("j", 1000)
    assert not fleet.gangs.slot.any()


def test_a_job_that_started_long_ago_is_steady_at_the_first_step() -> None:
    fleet = SimulatedFleet(SMALL, seed=1)
    fleet.start_job("j", 1, whole("n001"), draw_job_profile("j", 8), -200_000)
    fleet.advance(0)
    assert fleet.get_phase("j") == "steady"


def test_a_new_job_loads_then_warms_up() -> None:
    fleet = SimulatedFleet(SMALL, seed=1)
    profile = draw_job_profile("j", 8)
    fleet.start_job("j", 1, whole("n001"), profile, 0)
    fleet.advance(1000)
    assert fleet.get_phase("j") == "loading"
    assert np.isnan(fleet.draw_step_time_s("j"))
    fleet.advance(int(profile.loading_s * 1000) + 1000)
    assert fleet.get_phase("j") == "warmup"


def test_more_jobs_than_slots_make_more_slots() -> None:
    fleet = SimulatedFleet(FleetSpec(nodes=20), seed=1)
    for number in range(100):
        rank = RankPlacement(0, fleet.names[number // 8], (number % 8,))
        fleet.start_job(f"j{number}", 1, [rank], draw_job_profile(f"j{number}", 1), 0)
    fleet.advance(100_000)
    assert len(np.unique(fleet.gangs.slot[fleet.gangs.slot > 0])) == 100


def test_counters_on_a_page_between_steps_equal_those_of_the_next_step() -> None:
    fleet = SimulatedFleet(SMALL, seed=1)
    fleet.start_job("j", 1, whole("n001", "n002"), draw_job_profile("j", 16), -300_000)
    fleet.advance(0)
    fleet.advance(5000)
    ahead, name = read(fleet.render_page("n001", "node", 9000)), "node_infiniband_port_data_transmitted_bytes_total"
    before = read(fleet.render_page("n001", "node"))
    fleet.advance(9000)
    assert ahead[name, "mlx5_0"] == read(fleet.render_page("n001", "node"))[name, "mlx5_0"] > before[name, "mlx5_0"]


def test_the_same_seed_gives_the_same_pages() -> None:
    def pages(seed: int) -> list[bytes]:
        fleet = SimulatedFleet(SMALL, seed=seed)
        fleet.start_job("j", 1, whole("n001", "n002"), draw_job_profile("j", 16, seed=seed), 0)
        run(fleet, 120)
        return [fleet.render_page(name, exporter) for name, exporter in fleet.list_targets()]

    assert pages(1) == pages(1)
    assert pages(1) != pages(2)


def test_members_of_a_healthy_gang_step_together() -> None:
    fleet = SimulatedFleet(SMALL, seed=1)
    fleet.start_job("j", 1, whole("n001", "n002"), draw_job_profile("j", 16), -300_000)
    fleet.advance(0)
    steps = fleet.draw_member_steps("j")
    assert [step.node for step in steps] == ["n001", "n002"]
    assert steps[0].compute_s == pytest.approx(steps[1].compute_s, rel=0.03)


def test_the_parts_of_a_step_are_those_of_its_critical_path() -> None:
    fleet = SimulatedFleet(SMALL, seed=1)
    profile = draw_job_profile("j", 16)
    fleet.start_job("j", 1, whole("n001", "n002"), profile, -300_000)
    fleet.advance(0)
    usual = fleet.split_step("j", profile.step_s)
    assert usual is not None
    own_s = profile.step_s * (1 - profile.communication_share)
    assert usual.compute + usual.data == pytest.approx(own_s, abs=2e-4)
    assert usual.communication == pytest.approx(profile.step_s - own_s, abs=2e-4)
    waited = fleet.split_step("j", 3 * profile.step_s)
    assert waited is not None
    assert waited.data > 1.9 * profile.step_s
    fleet.effects.clock_ratio[0, 0] = 0.5  # its slowest GPU needs twice as long
    slow = fleet.split_step("j", profile.step_s + own_s)
    assert slow is not None
    assert slow.compute + slow.data >= 2 * own_s - 2e-4
    assert fleet.split_step("gone", 1.0) is fleet.split_step("j", float("inf")) is None
