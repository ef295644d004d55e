import math
from typing import Any

import numpy as np
import pytest

from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.simulator.days.backfill import BackfillQueue, GpuPool
from fleetcast.simulator.days.compare import Interval, compare_arms, draw_day
from fleetcast.simulator.days.day import (
    CHECKPOINT_S,
    LAUNCH_S,
    OPERATOR_S,
    RESTART_S,
    Arm,
    DayFault,
    DaySimulation,
    FalseAlarm,
    Losses,
)
from fleetcast.simulator.days.replay import fast_forward_trace
from fleetcast.simulator.days.traces import WEEK_MS, TraceJob, generate_trace
from fleetcast.simulator.faults.detection import DetectionTable, Sighting

START_MS = 3 * WEEK_MS
HOUR_S = 3600.0
SLOW = Sighting("thermal_throttle", slowdown=2.0, delay_s=60.0, p_fail=0.1, p_slow=0.9)
GONE = Sighting("gpu_off_bus", kills_s=600.0, hangs=True, delay_s=30.0, p_fail=0.9, p_slow=0.1)
UNSEEN = Sighting("slow_nic", slowdown=2.0)


def topology(nodes: int = 3) -> Topology:
    return Topology.build([NodeSpec(f"n{row}", gpus=8, domains={Level.RACK: "r1"}) for row in range(nodes)])


def job(name: str, gpus: int = 8, run_s: float = HOUR_S, at_s: float = 0.0) -> TraceJob:
    return TraceJob(name, START_MS + round(at_s * 1000), run_s, gpus, "", "training")


def fault(node: int, sighting: Sighting, start_s: float, end_s: float, gpu: int = -1) -> DayFault:
    return DayFault(node, gpu, START_MS + round(start_s * 1000), START_MS + round(end_s * 1000), sighting)


def play(
    arm: Arm, jobs: list[TraceJob], faults: list[DayFault], nodes: int = 3, **more: Any
) -> tuple[Losses, DaySimulation]:
    """A day of six hours on an empty fleet."""
    cluster = BackfillQueue(GpuPool(np.ones((nodes, 8), bool), np.zeros(nodes, np.int32)))
    end_ms = START_MS + round(6 * HOUR_S * 1000)
    day = DaySimulation(cluster, topology(nodes), START_MS, end_ms, arm=arm, remaining_s=lambda row: 0.0, memo={})
    return day.run(jobs, faults, more.get("alarms", [])), day


def test_without_faults_nothing_is_lost():
    losses, _ = play(Arm.RISK_AWARE, [job("a"), job("b", 16)], [])
    assert losses.total == 0.0


def test_a_slow_node_costs_what_its_job_waits():
    losses, _ = play(Arm.RISK_BLIND, [job("a")], [fault(0, SLOW, 600, 600 + HOUR_S)], nodes=1)
    # ten minutes at full speed, an hour at half, then the last twenty minutes: half an hour of 8 GPUs is lost
    assert losses.slowed == pytest.approx(4.0)
    assert losses.total == losses.slowed


def test_a_fault_on_another_gpu_of_the_node_costs_nothing():
    losses, _ = play(Arm.RISK_BLIND, [job("a", 4)], [fault(0, SLOW, 600, 4000, gpu=7)], nodes=1)
    assert losses.total == 0.0


def test_a_killed_job_loses_its_stall_the_work_since_its_checkpoint_and_a_restart():
    end_s = 3000.0
    losses, _ = play(Arm.RISK_BLIND, [job("a", run_s=4 * HOUR_S)], [fault(0, GONE, 2000, end_s)], nodes=1)
    # hangs from 2000 s to 2600 s; restarts at once on the same broken GPU, three times, until the operator or the end
    attempts = math.floor((end_s - 2600) / LAUNCH_S)
    assert losses.killed_jobs == 1 + attempts
    assert losses.redone == pytest.approx(8 * (2000 - CHECKPOINT_S) / HOUR_S)
    assert losses.slowed == pytest.approx(8 * (end_s - 2000) / HOUR_S)
    assert losses.restarts == pytest.approx(8 * RESTART_S / HOUR_S)


def test_the_operator_drains_a_node_that_kills():
    long = job("a", run_s=9 * HOUR_S)
    _, day = play(Arm.RISK_BLIND, [long], [fault(0, GONE, 100, 5 * HOUR_S)], nodes=2)
    assert day.cluster.running["a"].held[0][0] == 1
    assert OPERATOR_S < (day.cluster.running["a"].started_ms - START_MS) / 1000 < OPERATOR_S + 1000


def test_the_risk_aware_arm_avoids_a_node_once_it_is_seen_and_the_blind_one_does_not():
    # the first job shows the fault; the engine packs the later one onto the same node, unless it knows better
    first, later = job("first", 4, 9 * HOUR_S), job("later", 4, 9 * HOUR_S, at_s=1200)
    bad = fault(0, SLOW, 600, 5 * HOUR_S)

    def node_of(arm: Arm) -> int:
        _, day = play(arm, [first, later], [bad], nodes=2)
        assert day.cluster.running["first"].held[0][0] == 0
        return day.cluster.running["later"].held[0][0]

    assert node_of(Arm.RISK_BLIND) == 0
    assert node_of(Arm.RISK_AWARE) == 1


def test_a_fault_that_is_never_seen_helps_nobody():
    jobs = [job("a"), job("b", at_s=5000)]
    faults = [fault(0, UNSEEN, 600, 5 * HOUR_S), fault(1, UNSEEN, 600, 5 * HOUR_S)]
    blind, _ = play(Arm.RISK_BLIND, jobs, faults, nodes=2)
    aware, _ = play(Arm.RISK_AWARE, jobs, faults, nodes=2)
    assert blind.total == aware.total > 0


def test_a_false_alarm_costs_idle_gpus_while_jobs_wait():
    alarm = FalseAlarm(0, START_MS - 1000, START_MS + 3_600_000)
    losses, _ = play(Arm.RISK_AWARE, [job("a")], [], nodes=1, alarms=[alarm])
    assert losses.idle == pytest.approx(8.0, rel=0.1)
    blind, _ = play(Arm.RISK_BLIND, [job("a")], [], nodes=1, alarms=[alarm])
    assert blind.total == 0.0


def test_an_owner_who_acts_moves_a_slow_job_when_that_pays():
    jobs, faults = [job("a", run_s=3 * HOUR_S)], [fault(0, SLOW, 600, 5 * HOUR_S), fault(1, SLOW, 0, 100)]
    aware, _ = play(Arm.RISK_AWARE, jobs, faults, nodes=2)
    acting, _ = play(Arm.ACTING, jobs, faults, nodes=2)
    assert acting.slowed == pytest.approx(8 * RESTART_S / HOUR_S)
    assert acting.restarts == pytest.approx(8 * RESTART_S / HOUR_S)
    assert acting.total < aware.total / 3


def test_a_hung_job_that_cannot_go_elsewhere_stays():
    acting, _ = play(Arm.ACTING, [job("a", run_s=3 * HOUR_S)], [fault(0, SLOW, 600, 5 * HOUR_S)], nodes=1)
    assert acting.restarts == 0.0


def small_world() -> tuple[Any, Any, Topology]:
    fleet = topology(16)
    trace = generate_trace(128, start_ms=START_MS, seed=2, days_before=8)
    return trace, fast_forward_trace(trace, fleet, weeks=1), fleet


def table() -> DetectionTable:
    return DetectionTable({"thermal_throttle": (SLOW,), "gpu_off_bus": (GONE,), "slow_nic": (UNSEEN, SLOW)}, {})


def test_the_comparison_is_the_same_for_the_same_seed_and_says_both_sides():
    world = small_world()
    one = compare_arms(*world, table(), seed=4, seeds=3)
    assert one == compare_arms(*world, table(), seed=4, seeds=3)
    assert one["seeds"] == 3
    for name in ("risk_blind", "ours", "saved", "ours_acting", "saved_acting"):
        assert one[name]["low"] <= one[name]["mean"] <= one[name]["high"]
    assert one["saved"]["mean"] == pytest.approx(one["risk_blind"]["mean"] - one["ours"]["mean"], abs=0.02)
    assert one["detection"]["slow_nic"] == {"measured": 2, "seen_share": 0.5, "median_delay_s": 60.0}


def test_an_engine_that_cries_wolf_is_reported_as_the_loser():
    crying = DetectionTable({"thermal_throttle": (UNSEEN,)}, {"power_cap": (36_000.0,), "evaluation": (36_000.0,)})
    worth = compare_arms(*small_world(), crying, seed=1, seeds=2)
    assert worth["ours"]["mean"] > worth["risk_blind"]["mean"]
    assert worth["saved"]["mean"] < 0


def test_faults_come_at_their_rates_and_some_nodes_again():
    rng = np.random.default_rng(0)
    fleet = topology(500)
    days = [draw_day(fleet, table(), START_MS, rng, {"thermal_throttle": 20.0})[0] for _ in range(50)]
    counts = [len(faults) for faults in days]
    assert np.mean(counts) == pytest.approx(10.0 * 1.15, rel=0.15)  # some of the repeats fall into the same day
    assert any(len({row.node for row in faults}) < len(faults) for faults in days)


def test_an_interval_holds_its_mean():
    interval = Interval.from_values([0.0, 0.0, 10.0, 2.0])
    assert interval.low >= 0.0
    assert interval.low < interval.mean == 3.0 < interval.high
