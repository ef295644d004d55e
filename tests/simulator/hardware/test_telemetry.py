"""Pages are what dcgm-exporter and node_exporter print, and their numbers are like those of real H100 nodes."""

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleetcast.fleet.requests import RankPlacement
from fleetcast.simulator.hardware.cluster import FleetSpec, SimulatedFleet
from fleetcast.simulator.hardware.sensors import FB_TOTAL_MIB
from fleetcast.simulator.hardware.telemetry import GPU_FIELDS, PORT_FIELDS, DcgmPage
from fleetcast.simulator.hardware.workload import WorkloadProfile, draw_job_profile, draw_profile

NODES = ("n001", "n002")
HOT, COOL = (0, 3, 4, 6), (1, 2, 5, 7)
STEADY = WorkloadProfile(
    "accumulation",
    power_w=685.0,
    gpu_util=1.0,
    sm_active=0.88,
    tensor_active=0.58,
    dram_active=0.37,
    nvlink_bytes_per_s=1.5e9,
    ib_bytes_per_s=1.6e10,
    memory_mib=70_000,
    communication_share=0.1,
)


def busy_fleet(profile: WorkloadProfile = STEADY, seed: int = 1) -> SimulatedFleet:
    """Two busy nodes and an idle one, after five minutes."""
    fleet = SimulatedFleet(FleetSpec(nodes=3), seed=seed)
    ranks = [RankPlacement(rank, node, tuple(range(8))) for rank, node in enumerate(NODES)]
    fleet.start_job("j", 1, ranks, profile, -600_000)
    for time_ms in range(0, 300_001, 15_000):
        fleet.advance(time_ms)
    return fleet


def values(fleet: SimulatedFleet, name: str, nodes: slice = slice(0, 2)) -> np.ndarray:
    """(node, GPU) of a field by the reference parser."""
    read = []
    for node in fleet.names[nodes]:
        page = fleet.render_page(node, "dcgm").decode()
        samples = [
            s
            for family in text_string_to_metric_families(page)
            for s in family.samples
            if s.name.removesuffix("_total") == name
        ]
        read.append([sample.value for sample in samples])
    return np.array(read)


def test_a_dcgm_page_has_help_type_and_every_field_of_every_gpu() -> None:
    page = busy_fleet().render_page("n001", "dcgm").decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert len(families) == len(GPU_FIELDS)
    assert all(len(family.samples) == 8 and family.documentation for family in families.values())
    labels = families["DCGM_FI_DEV_GPU_TEMP"].samples[3].labels
    assert (labels["gpu"], labels["device"], labels["Hostname"]) == ("3", "nvidia3", "n001")
    assert list(labels)[:2] == ["gpu", "UUID"]
    assert families["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"].type == "counter"


def test_a_node_page_has_eight_ports_and_says_whose_it_is() -> None:
    page = busy_fleet().render_page("n002", "node").decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for field in PORT_FIELDS:
        devices = [sample.labels["device"] for sample in families[field.name.removesuffix("_total")].samples]
        assert devices == [f"mlx5_{port}" for port in range(8)]
    assert families["node_uname_info"].samples[0].labels["nodename"] == "n002"
    assert {"node_cpu_seconds", "node_pressure_cpu_waiting_seconds", "node_load1"} <= set(families)


def test_uuids_are_the_same_in_every_run_and_differ_between_gpus() -> None:
    page = busy_fleet(seed=1).render_page("n001", "dcgm").decode()
    other = busy_fleet(seed=2).render_page("n001", "dcgm").decode()
    uuids = {part.split('"')[0] for part in page.split('UUID="')[1:]}
    assert len(uuids) == 8
    assert uuids == {part.split('"')[0] for part in other.split('UUID="')[1:]}


def test_an_absent_gpu_has_no_line_and_comes_back() -> None:
    page = DcgmPage("n001", 2)
    numbers = np.zeros((len(GPU_FIELDS), 2))
    assert b'gpu="1"' not in page.render(numbers, np.array([True, False]))
    assert b'gpu="1"' in page.render(numbers, np.array([True, True]))


def test_an_xid_appears_with_its_code_and_message() -> None:
    page = DcgmPage("n001", 1)
    numbers = np.zeros((len(GPU_FIELDS), 1))
    numbers[[field.name for field in GPU_FIELDS].index("DCGM_FI_DEV_XID_ERRORS")] = 48
    line = next(
        line for line in page.render(numbers, np.ones(1, bool)).split(b"\n") if line.startswith(b"DCGM_FI_DEV_X")
    )
    assert b'err_code="48"' in line
    assert line.endswith(b"} 48")


def test_busy_power_lies_within_what_was_measured_and_under_the_limit() -> None:
    power = values(busy_fleet(), "DCGM_FI_DEV_POWER_USAGE")
    assert (power > 640).all()
    assert (power <= 700).all()
    assert power.std() < 25


def test_a_held_context_takes_118_watts_at_full_clocks() -> None:
    fleet = busy_fleet(draw_profile(np.random.default_rng(1), 16, "interactive"))
    assert values(fleet, "DCGM_FI_DEV_POWER_USAGE") == pytest.approx(119, abs=6)
    assert values(fleet, "DCGM_FI_DEV_SM_CLOCK").min() >= 1965


def test_the_hot_cooling_group_is_more_than_eight_degrees_hotter_at_the_same_power() -> None:
    temp = values(busy_fleet(), "DCGM_FI_DEV_GPU_TEMP")
    spread = temp[:, HOT].mean() - temp[:, COOL].mean()
    assert 8 < spread < 15
    assert temp.max() < 80


def test_the_software_power_cap_is_reported_at_full_power_and_idle_when_idle() -> None:
    fleet = busy_fleet()
    assert set(values(fleet, "DCGM_FI_DEV_CLOCKS_EVENT_REASONS").ravel()) == {4}
    assert set(values(fleet, "DCGM_FI_DEV_CLOCKS_EVENT_REASONS", slice(2, 3)).ravel()) == {1}


def test_frame_buffer_parts_sum_up_to_the_memory_of_the_board() -> None:
    fleet = busy_fleet()
    parts = [values(fleet, f"DCGM_FI_DEV_FB_{part}") for part in ("FREE", "USED", "RESERVED")]
    assert sum(parts) == pytest.approx(FB_TOTAL_MIB, abs=2)


def test_ports_of_a_gang_carry_the_same_bytes_within_three_percent() -> None:
    fleet = busy_fleet()
    before = fleet.sensors.port[1].copy()
    fleet.advance(315_000)
    rate = ((fleet.sensors.port[1] - before) / 15)[:2]
    assert rate.max() / rate.min() < 1.03
    assert rate.sum(axis=1) == pytest.approx(1.6e10, rel=0.03)
    assert (fleet.sensors.port[1] - before)[2].max() < 10_000


def test_energy_grows_by_power_times_time() -> None:
    fleet = busy_fleet()
    energy, power = (values(fleet, f"DCGM_FI_DEV_{name}") for name in ("TOTAL_ENERGY_CONSUMPTION", "POWER_USAGE"))
    fleet.advance(310_000)
    grown_mj = values(fleet, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION") - energy
    assert grown_mj == pytest.approx(power * 10_000, rel=1e-3)


def test_temperature_follows_power_with_the_time_constant_of_its_group() -> None:
    fleet = SimulatedFleet(FleetSpec(nodes=1), seed=1)
    fleet.advance(0)
    cold = fleet.sensors.gpu[3, 0].copy()
    fleet.start_job("j", 1, [RankPlacement(0, "n001", ())], STEADY, -600_000)
    fleet.advance(10_000)
    warming = fleet.sensors.gpu[3, 0] - cold
    for time_ms in range(20_000, 200_000, 10_000):
        fleet.advance(time_ms)
    share = warming / (fleet.sensors.gpu[3, 0] - cold)
    assert share[list(HOT)].mean() == pytest.approx(1 - np.exp(-10 / 18), abs=0.06)
    assert share[list(COOL)].mean() == pytest.approx(1 - np.exp(-1), abs=0.06)


def test_a_job_of_one_gpu_uses_no_network_and_a_large_one_does() -> None:
    rng = np.random.default_rng(3)
    alone = [draw_profile(rng, 1) for _ in range(30)]
    assert {profile.ib_bytes_per_s for profile in alone} == {0.0}
    assert {profile.nvlink_bytes_per_s for profile in alone} == {0.0}
    assert all(draw_profile(rng, 64).ib_bytes_per_s > 0 for _ in range(30))


def test_profiles_are_named_by_their_job_not_by_their_order() -> None:
    first = draw_job_profile("a", 16)
    draw_job_profile("b", 16)
    assert draw_job_profile("a", 16) == first
    assert draw_job_profile("a", 16, seed=2) != first


def test_training_profiles_stay_within_measured_power() -> None:
    rng = np.random.default_rng(4)
    power = [draw_profile(rng, gpus).power_w for gpus in (1, 4, 8, 64) for _ in range(50)]
    assert min(power) > 405
    assert max(power) < 695
