"""Faults that are hard to tell from what is benign, and what is benign and looks like a fault."""

import msgspec
import numpy as np
import pytest

from fleetcast.simulator.faults.decoys import PowerCap
from fleetcast.simulator.faults.effects import ActivityLevels
from fleetcast.simulator.faults.faults import FaultSettings
from fleetcast.simulator.faults.magnitudes import USUAL, NodeLostKind, PowerCapKind
from fleetcast.simulator.hardware.telemetry import CPU_MODES
from tests.simulator.faults.test_faults import gang_fleet, gpu, port, run, truth


def test_a_pressed_host_slows_its_gang_in_gusts_and_its_own_gpus_show_it() -> None:
    fleet = gang_fleet()
    run(fleet, 60)
    fleet.faults.inject("cpu_contention", "n001", None, 60_000, slow=1.25, util_drop=0.2, gust_s=30.0, calm_s=30.0)
    run(fleet, 80)
    steal = float(fleet.sensors.cpu[CPU_MODES.index("steal"), 0])
    assert steal > 0
    assert fleet.find_job_slowdown("j") == pytest.approx(0.7 * 1.25 + 0.3)
    util, compute = gpu(fleet, "DEV_GPU_UTIL"), [step.compute_s for step in fleet.draw_member_steps("j")]
    assert util[0].max() < 85
    assert util[1].min() > 95
    assert compute[0] > 1.15 * compute[1]
    run(fleet, 110)
    assert fleet.find_job_slowdown("j") == pytest.approx(1.0)
    (record,) = fleet.faults.list_records()
    assert (record.gpu, record.benign) == (None, False)


def test_uneven_sequences_make_all_wait_for_the_longest_and_nothing_is_wrong() -> None:
    fleet = gang_fleet()
    run(fleet, 60)
    fleet.faults.inject("sequence_imbalance", "n001", None, 60_000, spread=0.2, hold_s=1000.0, end_ms=10**9)
    run(fleet, 70)
    steps = fleet.draw_member_steps("j")
    longest = max(steps, key=lambda step: step.load)
    assert fleet.find_job_slowdown("j") == pytest.approx(0.7 * longest.load + 0.3)
    assert longest.compute_s == max(step.compute_s for step in steps)
    assert truth(fleet).benign
    assert not fleet.faults.list_faulty_nodes()


def test_a_change_of_phase_moves_all_ranks_alike() -> None:
    fleet = gang_fleet()
    run(fleet, 60)
    before, step_s = gpu(fleet, "PROF_SM_ACTIVE"), fleet.draw_step_time_s("j")
    fleet.faults.inject("phase_change", "n001", None, 60_000, end_ms=10**9, levels=ActivityLevels(0.7, 1.2, 1.4))
    run(fleet, 120)
    moved = gpu(fleet, "PROF_SM_ACTIVE")[:2] / before[:2]
    assert moved == pytest.approx(0.7, abs=0.06)
    assert fleet.draw_step_time_s("j") == pytest.approx(1.4 * step_s, rel=0.1)


def test_a_capped_node_draws_what_its_limit_allows_and_says_so() -> None:
    fleet = gang_fleet()
    run(fleet, 60)
    free_w = gpu(fleet, "DEV_POWER_USAGE")[0].mean()
    fleet.faults.inject("power_cap", "n001", None, 60_000, ratio=0.8, at=None, end_ms=10**9)
    run(fleet, 120)
    limit, power = gpu(fleet, "DEV_ENFORCED_POWER_LIMIT"), gpu(fleet, "DEV_POWER_USAGE")
    assert limit[0].max() == limit[0].min() < 0.85 * free_w
    assert (power[0] <= limit[0]).all()
    assert power[0].min() > 0.9 * limit[0].max()
    assert limit[1].min() == 700.0
    assert (gpu(fleet, "DEV_CLOCKS_EVENT_REASONS")[0].astype(int) & 4).all()
    assert gpu(fleet, "DEV_SM_CLOCK")[0].max() < 0.82 * gpu(fleet, "DEV_SM_CLOCK")[1].min()


def test_a_single_capped_gpu_draws_less_than_the_others_that_wait_for_it() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("power_cap", "n001", None, 60_000, ratio=0.7, at=0.4, end_ms=10**9)
    run(fleet, 180)
    clock, power = gpu(fleet, "DEV_SM_CLOCK")[0], gpu(fleet, "DEV_POWER_USAGE")[0]
    assert np.flatnonzero(clock < 0.8 * np.median(clock)).tolist() == [3]
    assert power[3] == gpu(fleet, "DEV_ENFORCED_POWER_LIMIT")[0][3] < 0.85 * np.median(power)


def test_some_caps_are_of_one_gpu() -> None:
    kind = PowerCapKind(one_gpu_share=0.5)
    caps = [PowerCap.draw(np.random.default_rng(seed), kind) for seed in range(40)]
    places = [cap.at for cap in caps if cap.at is not None]
    assert 10 <= len(places) <= 30
    assert 0 <= min(places) < max(places) < 1


def test_a_renewed_exporter_says_the_same_under_other_names() -> None:
    fleet = gang_fleet()
    fleet.faults.inject("label_rename", "n001", None, 10_000, end_ms=40_000, down_s=15.0)
    before = fleet.render_page("n001", "dcgm")
    run(fleet, 60)
    after = fleet.render_page("n001", "dcgm")
    assert b"Hostname=" in before
    assert b"DCGM_FI_DEV_POWER_USAGE{" in before
    assert b"Hostname=" not in after
    assert b'hostname="n001"' in after
    assert b"DCGM_FI_DEV_BOARD_POWER_WATTS{" in after
    assert b"Hostname=" in fleet.render_page("n002", "dcgm")


def test_congestion_is_told_by_the_adapter_of_the_slow_port_alone() -> None:
    fleet = gang_fleet()
    run(fleet, 60)
    fleet.faults.inject("slow_nic", "n001", 3, 60_000, cnp_per_s=100.0, half_rate=False)
    run(fleet, 70)
    handled = port(fleet, "rp_cnp_packets_handled_total")
    assert np.argwhere(handled > 0).tolist() == [[0, 3]]


def test_a_loss_can_lead_up_with_late_and_lost_scrapes() -> None:
    sure = {"node_lost": NodeLostKind(rate=1e6, delay_s=(0.3, 0.3), lost_scrapes_share=0.5)}
    settings = FaultSettings(
        kinds=("node_lost",),
        rates={"node_lost": 1e6},
        precursor_shares={"node_lost": 1.0},
        precursor_s=(300.0, 300.0),
        magnitudes=msgspec.structs.replace(USUAL, **sure),
    )
    fleet = gang_fleet(settings)
    late, lost = 0, 0
    for time_s in range(5, 200, 5):
        fleet.advance(time_s * 1000)
        late += fleet.get_delay_s("n001") > 0
        lost += not fleet.is_answering("n001", "dcgm")
    assert late > 20
    assert lost > 5
    assert all(not record.visible for record in fleet.faults.list_records())


def test_what_was_repaired_can_come_again() -> None:
    settings = FaultSettings(repeat_share=1.0, repeat_within_s=60.0, shortest_s=30.0, limit_s=30.0)
    fleet = gang_fleet(settings)
    fleet.faults.inject("power_brake", "n001", None, 10_000, end_ms=40_000)
    run(fleet, 300)
    again = fleet.faults.list_records()
    assert len(again) > 2
    assert {(record.kind, record.node) for record in again} == {("power_brake", "n001")}
