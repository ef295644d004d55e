"""Faults have the shape and the side effects that were seen in real fleets, and a truth that says when they show."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetcast.fleet.requests import RankPlacement
from fleetcast.simulator.faults.faults import DEMO, LEADING_KINDS, QUIET, FaultSettings
from fleetcast.simulator.faults.magnitudes import DECOY_KINDS, FAULT_KINDS
from fleetcast.simulator.faults.truth import FaultRecord, append_truth, read_truth
from fleetcast.simulator.hardware.cluster import FleetSpec, SimulatedFleet
from fleetcast.simulator.hardware.telemetry import GPU_ROW, HOST_ROW, PORT_ROW
from fleetcast.simulator.hardware.workload import WorkloadProfile, draw_job_profile

BUSY = WorkloadProfile(
    "sharded",
    power_w=620.0,
    gpu_util=0.99,
    sm_active=0.75,
    tensor_active=0.4,
    dram_active=0.4,
    nvlink_bytes_per_s=2e10,
    ib_bytes_per_s=6e10,
    memory_mib=70_000,
    step_s=3.0,
    communication_share=0.3,
    power_noise_w=8.0,
)


def gang_fleet(settings: FaultSettings = QUIET, nodes: int = 3) -> SimulatedFleet:
    """A job on n001 and n002, the others idle; steady at time 0."""
    fleet = SimulatedFleet(FleetSpec(nodes=nodes), seed=1, settings=settings)
    ranks = [RankPlacement(rank, node, tuple(range(8))) for rank, node in enumerate(("n001", "n002"))]
    fleet.start_job("j", 1, ranks, BUSY, -600_000)
    fleet.advance(0)
    return fleet


def run(fleet: SimulatedFleet, until_s: int, step_s: int = 5) -> None:
    start_s = (fleet.time_ms or 0) // 1000
    for time_s in range(start_s + step_s, until_s + 1, step_s):
        fleet.advance(time_s * 1000)


def gpu(fleet: SimulatedFleet, name: str) -> np.ndarray:
    """(node, GPU) of a field."""
    return np.array(fleet.sensors.gpu[GPU_ROW[f"DCGM_FI_{name}"]])


def port(fleet: SimulatedFleet, name: str) -> np.ndarray:
    return np.array(fleet.sensors.port[PORT_ROW[name]])


def truth(fleet: SimulatedFleet) -> FaultRecord:
    (record,) = fleet.faults.list_records()
    return record


def test_a_thermal_throttle_heats_first_then_slows_softly_then_hard() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("thermal_throttle", "n001", 3, 0, hard=True, tau_s=30.0)
    reasons, clocks = [], []
    for _ in range(30):
        run(fleet, (fleet.time_ms or 0) // 1000 + 5)
        reasons.append(int(gpu(fleet, "DEV_CLOCKS_EVENT_REASONS")[0, 3]) & (32 | 64 | 8))
        clocks.append(gpu(fleet, "DEV_SM_CLOCK")[0, 3])
    order = [bits for row, bits in enumerate(reasons) if row == 0 or bits != reasons[row - 1]]
    assert order == [0, 32, 72]
    assert clocks[-1] <= 990
    assert 83 <= gpu(fleet, "DEV_GPU_TEMP")[0, 3] <= 90
    assert np.delete(gpu(fleet, "DEV_SM_CLOCK")[:2].ravel(), 3).min() >= 1965


def test_peers_of_a_throttled_gpu_stay_at_full_utilisation_and_lose_power_and_tensor_activity() -> None:
    fleet = gang_fleet()
    run(fleet, 60)
    before = {name: gpu(fleet, name)[1] for name in ("DEV_POWER_USAGE", "PROF_PIPE_TENSOR_ACTIVE")}
    step_s = fleet.draw_step_time_s("j")
    fleet.faults.inject("thermal_throttle", "n001", 3, 60_000, hard=True, tau_s=20.0, hard_ratio=0.5)
    run(fleet, 240)
    slower = fleet.draw_step_time_s("j") / step_s
    tensor = before["PROF_PIPE_TENSOR_ACTIVE"] / gpu(fleet, "PROF_PIPE_TENSOR_ACTIVE")[1]
    assert slower == pytest.approx(1.7, rel=0.1)  # 0.7 / 0.5 + 0.3
    assert tensor == pytest.approx(1.7, rel=0.1)
    assert (gpu(fleet, "DEV_POWER_USAGE")[1] < before["DEV_POWER_USAGE"] - 100).all()
    assert gpu(fleet, "DEV_GPU_UTIL")[:2].min() >= 95
    compute = {step.node: step.compute_s for step in fleet.draw_member_steps("j")}
    assert compute["n001"] == pytest.approx(2 * compute["n002"], rel=0.05)


def test_thermal_violation_counts_up_to_a_second_a_second() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("thermal_throttle", "n001", 3, 0, hard=True, tau_s=10.0)
    run(fleet, 100)
    before = gpu(fleet, "DEV_THERMAL_VIOLATION")
    run(fleet, 110)
    grown = gpu(fleet, "DEV_THERMAL_VIOLATION") - before
    assert grown[0, 3] == pytest.approx(10e9)
    assert np.count_nonzero(grown) == 1


def test_a_thermal_fault_of_an_idle_gpu_is_invisible_until_a_job_comes() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("thermal_throttle", "n003", 0, 0, tau_s=20.0)
    run(fleet, 300)
    assert not truth(fleet).visible
    fleet.start_job("k", 1, [RankPlacement(0, "n003", (0,))], draw_job_profile("k", 1), 100_000)
    run(fleet, 600)
    assert truth(fleet).visible
    assert 300_000 < (truth(fleet).visible_ms or 0) < 400_000


def test_a_power_brake_halves_all_clocks_of_the_node() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("power_brake", "n002", None, 10_000)
    watts = fleet.sensors.host[HOST_ROW["node_hwmon_power_average_watt"], 1]
    run(fleet, 60)
    assert gpu(fleet, "DEV_SM_CLOCK")[1].max() <= 990
    assert gpu(fleet, "DEV_SM_CLOCK")[0].min() >= 1965
    assert set(gpu(fleet, "DEV_CLOCKS_EVENT_REASONS")[1].astype(int) & 136) == {136}
    assert fleet.sensors.host[HOST_ROW["node_hwmon_power_average_watt"], 1] < watts - 1500


def test_a_pcie_downgrade_narrows_the_link_and_caps_its_traffic() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("pcie_downgrade", "n001", 5, 10_000, width=1, gen=5)
    step_s = fleet.draw_step_time_s("j")
    run(fleet, 60)
    width = gpu(fleet, "DEV_PCIE_LINK_WIDTH")
    assert (width[0, 5], np.delete(width[0], 5).min()) == (1, 16)
    assert gpu(fleet, "PROF_PCIE_RX_BYTES")[0, 5] <= 3.94e9
    assert fleet.draw_step_time_s("j") > 1.5 * step_s
    assert truth(fleet).visible


def test_replays_climb_during_the_minutes_before_a_pcie_downgrade() -> None:
    settings = FaultSettings(
        kinds=("pcie_downgrade",), every_s=10_000, first_s=10, precursor_share=1.0, precursor_s=(100, 101)
    )
    fleet = gang_fleet(settings)
    before = gpu(fleet, "DEV_PCIE_REPLAY_COUNTER")
    run(fleet, 100)
    assert (gpu(fleet, "DEV_PCIE_REPLAY_COUNTER") - before).max() > 30
    assert gpu(fleet, "DEV_PCIE_LINK_WIDTH").min() == 16
    run(fleet, 130)
    assert min(gpu(fleet, "DEV_PCIE_LINK_WIDTH").min() / 16, gpu(fleet, "DEV_PCIE_LINK_GEN")[:2].min() / 5) < 1


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_only_what_shows_before_it_starts_is_told_to_have_a_precursor(kind: str) -> None:
    settings = FaultSettings(
        kinds=(kind,), every_s=10_000, first_s=10, precursor_shares={kind: 1.0}, precursor_s=(300.0, 300.0)
    )
    fleet = gang_fleet(settings)
    usual = snapshot(fleet)
    shown = False
    for time_s in range(5, 250, 5):
        fleet.advance(time_s * 1000)
        shown |= snapshot(fleet) != usual
        leads = [incident.lead_ms for incident in fleet.faults.list_incidents() if time_s * 1000 < incident.start_ms]
    assert bool(leads and leads[0]) == shown == (kind in LEADING_KINDS)


def snapshot(fleet: SimulatedFleet) -> tuple[float, ...]:
    """What faults do to the hardware before they start, as sums."""
    doing = fleet.effects
    heat = np.isfinite(doing.hot_c).sum()
    rates = (doing.sbe_per_s, doing.replays_per_s, doing.symbols_per_s, doing.page_delay_s)
    return float(heat), *(float(rate.sum()) for rate in rates)


def test_a_flapping_port_goes_down_and_up_and_stalls_the_gang() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("ib_flap", "n001", 2, 0, flaps=[(10.0, 6.0), (100.0, 3.0)], symbols=500)
    downed, symbols = port(fleet, "link_downed_total")[0, 2], port(fleet, "symbol_error_total")[0, 2]
    run(fleet, 12, step_s=2)
    assert (port(fleet, "state_id")[0, 2], port(fleet, "physical_state_id")[0, 2]) == (1, 2)
    assert gpu(fleet, "PROF_PIPE_TENSOR_ACTIVE")[:2].max() < 0.05
    run(fleet, 60, step_s=2)
    assert port(fleet, "state_id")[0, 2] == 4
    assert port(fleet, "link_downed_total")[0, 2] == downed + 1
    assert port(fleet, "symbol_error_total")[0, 2] >= symbols + 500
    assert gpu(fleet, "PROF_PIPE_TENSOR_ACTIVE")[:2].min() > 0.3


def test_a_flap_shorter_than_a_step_still_counts() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("ib_flap", "n003", 2, 0, flaps=[(1.0, 2.0), (20.0, 2.0)], symbols=50)
    downed = port(fleet, "link_downed_total")[2, 2]
    fleet.advance(15_000)
    fleet.advance(30_000)
    assert port(fleet, "link_downed_total")[2, 2] == downed + 2


def test_a_long_flap_kills_the_gang_as_a_network_failure() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("ib_flap", "n001", 2, 0, flaps=[(5.0, 40.0)])
    run(fleet, 60)
    assert [failed[:3] for failed in fleet.pop_failed_jobs()] == [("j", "network", "n001")]
    assert fleet.pop_failed_jobs() == []


def test_classic_port_counters_saturate() -> None:
    fleet = gang_fleet()
    flaps = [(float(second), 0.5) for second in range(1, 400)]
    fleet.faults.inject("ib_flap", "n003", 1, 0, flaps=flaps, symbols=1000)
    run(fleet, 400)
    assert port(fleet, "link_downed_total")[2, 1] == 255
    assert port(fleet, "symbol_error_total")[2, 1] == 65_535


def test_a_slow_port_waits_and_slows_the_step_while_all_ports_send_alike() -> None:
    fleet = gang_fleet()
    step_s = fleet.draw_step_time_s("j")
    run(fleet, 60)
    healthy = port(fleet, "port_data_transmitted_bytes_total").copy()
    run(fleet, 75)
    usual = port(fleet, "port_data_transmitted_bytes_total") - healthy
    fleet.faults.inject("slow_nic", "n001", 4, 75_000, slow=1.5, half_rate=False)
    run(fleet, 90)
    before = {name: port(fleet, name) for name in ("port_data_transmitted_bytes_total", "port_transmit_wait_total")}
    run(fleet, 105)
    sent, waited = (port(fleet, name) - before[name] for name in before)
    share = sent[:2] / usual[:2]
    assert share.max() / share.min() < 1.02
    assert share.mean() == pytest.approx(1 / 1.15, rel=0.06)
    assert waited[0, 4] > 3 * np.delete(waited[0], 4).max()
    assert fleet.draw_step_time_s("j") / step_s == pytest.approx(1.15, rel=0.06)  # 0.7 + 0.3 * 1.5


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("slow_nic", {"slow": 2.0, "half_rate": True}),
        ("ib_flap", {"flaps": [(2.0, 20.0)], "symbols": 100}),
        ("pcie_downgrade", {}),
    ],
)
def test_a_step_moves_the_same_share_of_the_usual_bytes_through_each_member(kind: str, more: dict[str, Any]) -> None:
    fleet = gang_fleet()
    run(fleet, 90)
    first = port(fleet, "port_data_transmitted_bytes_total").copy()
    run(fleet, 105)
    usual = port(fleet, "port_data_transmitted_bytes_total") - first
    fleet.faults.inject(kind, "n001", 4, 105_000, **more)
    for second in range(110, 140, 5):
        first = port(fleet, "port_data_transmitted_bytes_total").copy()
        run(fleet, second)
        share = (port(fleet, "port_data_transmitted_bytes_total") - first)[:2] / usual[:2]
        assert share.max() - share.min() < 0.02


def test_a_slow_port_under_an_idle_node_is_not_visible() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("slow_nic", "n003", 4, 0)
    run(fleet, 300)
    assert not truth(fleet).visible


def test_an_uncorrected_error_writes_its_xids_and_kills_the_job() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("ecc_storm", "n001", 6, 0, dbe_s=50.0, remap_fails=False, contained=True, sbe_per_s=5.0)
    seen = []
    for time_ms in range(1000, 70_000, 1000):
        fleet.advance(time_ms)
        seen.append(int(gpu(fleet, "DEV_XID_ERRORS")[0, 6]))
    assert list(dict.fromkeys(seen)) == [0, 48, 63, 94]
    assert gpu(fleet, "DEV_ECC_DBE_VOL_TOTAL").sum() == 1
    assert gpu(fleet, "DEV_UNCORRECTABLE_REMAPPED_ROWS")[0, 6] == 1
    assert gpu(fleet, "DEV_ECC_SBE_VOL_TOTAL")[0, 6] > 100
    assert [failed[:3] for failed in fleet.pop_failed_jobs()] == [("j", "hardware", "n001")]


def test_a_repaired_gpu_starts_with_fresh_counters_and_no_xid() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("ecc_storm", "n001", 6, 0, end_ms=100_000, dbe_s=50.0, sbe_per_s=5.0)
    run(fleet, 120)
    assert gpu(fleet, "DEV_XID_ERRORS")[0, 6] == gpu(fleet, "DEV_ECC_SBE_VOL_TOTAL")[0, 6] == 0
    assert truth(fleet).end_ms == 100_000


def test_a_gpu_off_the_bus_vanishes_and_its_peers_spin_until_the_watchdog() -> None:
    fleet = gang_fleet(FaultSettings(watchdog_s=300))
    fleet.faults.inject("gpu_off_bus", "n001", 7, 10_000, warns_s=0.0)
    run(fleet, 120)
    assert b'gpu="7"' not in fleet.render_page("n001", "dcgm")
    assert b'gpu="6"' in fleet.render_page("n001", "dcgm")
    assert fleet.draw_step_time_s("j") == np.inf
    assert gpu(fleet, "DEV_GPU_UTIL")[1].min() >= 95
    assert gpu(fleet, "DEV_POWER_USAGE")[1] == pytest.approx(119, abs=5)
    assert gpu(fleet, "PROF_PIPE_TENSOR_ACTIVE")[1].max() == 0
    assert fleet.pop_failed_jobs() == []
    run(fleet, 330)
    assert [failed[:3] for failed in fleet.pop_failed_jobs()] == [("j", "hardware", "n001")]


def test_a_gpu_off_the_bus_can_say_xid_79_first() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("gpu_off_bus", "n001", 7, 10_000, warns_s=20.0, freezes=False)
    run(fleet, 20)
    assert b'err_code="79"' in fleet.render_page("n001", "dcgm")
    run(fleet, 40)
    assert b'gpu="7"' not in fleet.render_page("n001", "dcgm")


def test_a_freezing_page_repeats_itself_before_the_gpu_vanishes() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("gpu_off_bus", "n001", 7, 10_000, warns_s=60.0, freezes=True)
    run(fleet, 15)
    first = fleet.render_page("n001", "dcgm")
    run(fleet, 50)
    assert fleet.render_page("n001", "dcgm") == first
    run(fleet, 80)
    assert b'gpu="7"' not in fleet.render_page("n001", "dcgm")


def test_a_job_started_on_a_lost_gpu_dies_soon() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("gpu_off_bus", "n003", 0, 10_000, warns_s=0.0)
    run(fleet, 60)
    fleet.start_job("k", 1, [RankPlacement(0, "n003", (0,))], draw_job_profile("k", 1), 60_000)
    run(fleet, 75)
    assert [failed[:3] for failed in fleet.pop_failed_jobs()] == [("k", "hardware", "n003")]


def test_a_lost_node_does_not_answer_and_loses_its_jobs() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("node_lost", "n001", None, 10_000)
    run(fleet, 100)
    assert not fleet.is_answering("n001", "dcgm")
    assert not fleet.is_answering("n001", "node")
    assert fleet.is_answering("n002", "dcgm")
    assert [failed[:3] for failed in fleet.pop_failed_jobs()] == [("j", "node_lost", "n001")]


def test_an_exporter_restart_misses_a_scrape_and_forgets_counters_and_xid() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("exporter_restart", "n001", None, 10_000, end_ms=30_000, down_s=15.0)
    energy = gpu(fleet, "DEV_TOTAL_ENERGY_CONSUMPTION")
    run(fleet, 20)
    assert not fleet.is_answering("n001", "dcgm")
    run(fleet, 35)
    assert fleet.is_answering("n001", "dcgm")
    assert gpu(fleet, "DEV_TOTAL_ENERGY_CONSUMPTION")[0].max() < energy.min()
    assert truth(fleet).benign


@pytest.mark.parametrize("kind", ["checkpoint_stall", "evaluation", "power_cap"])
def test_decoys_change_all_ranks_of_a_node_alike_and_are_benign(kind: str) -> None:
    fleet = gang_fleet()
    whole_node = {"at": None} if kind == "power_cap" else {}
    fleet.faults.inject(kind, "n001", None, 10_000, end_ms=200_000, **whole_node)
    run(fleet, 60)
    activity = gpu(fleet, "PROF_PIPE_TENSOR_ACTIVE")[0]
    assert activity.std() <= 0.05 * activity.mean()
    assert fleet.faults.list_records()[0].benign
    assert fleet.faults.list_faulty_nodes() == set()


def test_a_repair_ends_the_faults_of_its_node_only() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("power_brake", "n001", None, 0)
    fleet.faults.inject("power_brake", "n003", None, 0)
    run(fleet, 30)
    fleet.faults.end_node_faults("n001", 30_000)
    run(fleet, 40)
    ended = {record.node: record.end_ms for record in fleet.faults.list_records()}
    assert ended == {"n001": 30_000, "n003": None}
    assert gpu(fleet, "DEV_SM_CLOCK")[0].min() >= 1965


def demo_fleet(seed: int) -> SimulatedFleet:
    """Forty nodes with gangs and small jobs, as in a demonstration."""
    fleet = SimulatedFleet(FleetSpec(nodes=40), seed=seed, settings=DEMO)
    free = list(fleet.names)
    for number, nodes in enumerate([8, 4, 4, 2, 2, 2, *([1] * 14)]):
        ranks = [RankPlacement(rank, free.pop(0), tuple(range(8))) for rank in range(nodes)]
        fleet.start_job(f"j{number}", 1, ranks, draw_job_profile(f"j{number}", 8 * nodes, seed=seed), -900_000)
    fleet.advance(0)
    return fleet


@pytest.mark.parametrize("seed", range(4))
def test_a_quarter_of_an_hour_of_the_demonstration_shows_five_to_eight_faults_of_different_kinds(seed: int) -> None:
    fleet = demo_fleet(seed)
    run(fleet, 900)
    faults = [record for record in fleet.faults.list_records() if not record.benign]
    assert 5 <= len(faults) <= 9
    assert len({record.kind for record in faults}) >= 5
    assert len({record.node for record in faults}) == len(faults)
    assert sum(record.visible for record in faults) >= len(faults) - 2
    assert any(record.benign for record in fleet.faults.list_records())


def test_the_same_seed_plans_the_same_faults() -> None:
    def plan(seed: int) -> list[FaultRecord]:
        fleet = demo_fleet(seed)
        run(fleet, 600, step_s=15)
        return fleet.faults.list_records()

    assert plan(5) == plan(5)
    assert plan(5) != plan(6)


def test_realistic_rates_draw_about_as_many_faults_as_they_say() -> None:
    settings = FaultSettings(rates={"power_brake": 1000.0}, only_busy=False, limit_s=600)
    fleet = SimulatedFleet(FleetSpec(nodes=100), seed=2, settings=settings)
    for time_ms in range(0, 86_400_001, 300_000):
        fleet.advance(time_ms)
    assert len(fleet.faults.list_records()) == pytest.approx(100, abs=30)  # 1 a node-day


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="thermal_throttle"):
        gang_fleet().faults.inject("gremlins", "n001", 0, 0)


@pytest.mark.parametrize("kind", [*FAULT_KINDS, *DECOY_KINDS])
def test_every_kind_can_be_injected_anywhere_with_any_step(kind: str) -> None:
    fleet = gang_fleet()
    for node in ("n001", "n003"):
        fleet.faults.inject(kind, node, None, 10_000, end_ms=400_000)
    for time_ms in (9_000, 10_000, 10_000, 40_000, 350_000, 1_000_000):
        fleet.advance(time_ms)
        for name in fleet.names:
            assert fleet.render_page(name, "dcgm").endswith(b"\n")
    assert len(fleet.faults.list_records()) == 2
    assert all(record.end_ms == 400_000 for record in fleet.faults.list_records())


def test_the_last_line_of_a_fault_is_its_truth(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"
    assert read_truth(path) == []
    fleet = gang_fleet()
    fleet.faults.inject("thermal_throttle", "n001", 3, 0, tau_s=20.0)
    for _ in range(40):
        run(fleet, (fleet.time_ms or 0) // 1000 + 5)
        append_truth(path, fleet.faults.pop_changed_records())
    assert len(path.read_bytes().splitlines()) == 2
    assert read_truth(path) == fleet.faults.list_records()
    assert read_truth(path)[0].visible


def test_a_truth_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "truth.jsonl"
    records = [FaultRecord("a", "slow_nic", "n1", None, 0, 1, None, visible, False) for visible in (False, True)]
    append_truth(path, records)
    with path.open("ab") as file:
        file.write(b'{"fault_id": "b", "ki')
    assert read_truth(path) == records[1:]


@pytest.mark.parametrize("exempt", [(), ("n001", "n003")])
def test_no_fault_is_drawn_on_exempt_nodes(exempt: tuple[str, ...]) -> None:
    settings = FaultSettings(kinds=("ib_flap",), every_s=10.0, limit_s=5.0, shortest_s=5.0, only_busy=False)
    fleet = SimulatedFleet(FleetSpec(nodes=4, rack_nodes=2), 1, settings)
    fleet.faults.exempt_nodes(exempt)
    run(fleet, 600)
    found = {record.node for record in fleet.faults.list_records()}
    assert found == {"n001", "n002", "n003", "n004"} - set(exempt)
