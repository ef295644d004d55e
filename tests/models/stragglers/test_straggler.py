"""Who holds a gang back, or nobody."""

import numpy as np
import pytest

from fleetcast.fleet.events import Checkpoint, Phase, Step, StepParts
from fleetcast.models.stragglers.steps import measure_pace

KEYS = {
    "slow",
    "since_ms",
    "observed_step_s",
    "expected_step_s",
    "ratio",
    "culprit",
    "cause",
    "sentence",
    "not_observed",
}


def report_steps(fleet, job, durations, first=2):
    for number, seconds in enumerate(durations):
        fleet.now_ms += int(seconds * 1000)
        sequence = first + number
        fleet.jobs.apply(
            Step(job=job, sequence=sequence, time_ms=fleet.now_ms, step=sequence, duration_s=float(seconds))
        )


def test_a_throttling_worker_is_named_with_its_share(small_fleet):
    fleet = small_fleet()
    fleet.start("train-1", fleet.names)
    fleet.tick(2)
    report_steps(fleet, "train-1", [2.0] * 20)
    fleet.tick(2)
    fleet.throttle("n003", 5)
    report_steps(fleet, "train-1", [4.0] * 4, first=22)
    body = fleet.tick(3).stragglers["train-1"]
    assert set(body) == KEYS
    assert body["slow"]
    assert body["ratio"] == pytest.approx(2.0)
    assert (body["observed_step_s"], body["expected_step_s"]) == (4.0, 2.0)
    assert body["culprit"] == {"kind": "worker", "name": "n003/5", "share": 1.0}
    assert body["cause"] == "compute"
    assert body["sentence"].startswith("steps take 4 s, usually 2; n003/5 holds the gang back: GPU 5: SM clock 990 MHz")
    assert body["since_ms"] is not None


def test_a_healthy_gang_is_not_slow_and_names_nobody(small_fleet):
    fleet = small_fleet()
    fleet.start("train-1", fleet.names)
    report_steps(fleet, "train-1", [2.0] * 30)
    body = fleet.tick(3).stragglers["train-1"]
    assert not body["slow"]
    assert body["culprit"] == {"kind": "nobody", "name": None, "share": 0.0}
    assert body["sentence"] == "steps take 2 s, as usual"


def test_steps_that_take_no_time_as_they_are_told_are_no_pace(small_fleet):
    fleet = small_fleet()
    fleet.start("train-1", fleet.names)
    report_steps(fleet, "train-1", [0.0] * 30)
    body = fleet.tick(3).stragglers["train-1"]
    assert (body["slow"], body["observed_step_s"], body["expected_step_s"], body["ratio"]) == (False, None, None, None)
    assert "steps are reported to take 0 s, so their pace is unknown" in body["sentence"]


def test_all_slow_together_is_nobodys_fault(small_fleet):
    fleet = small_fleet()
    fleet.start("train-1", fleet.names)
    fleet.tick(2)
    report_steps(fleet, "train-1", [2.0] * 20)
    for node in fleet.names:
        for gpu in range(8):
            fleet.throttle(node, gpu, clock=1400.0)
    report_steps(fleet, "train-1", [2.8] * 6, first=22)
    body = fleet.tick(4).stragglers["train-1"]
    assert body["slow"]
    assert body["culprit"]["kind"] == "nobody"
    assert body["sentence"].endswith("no member stands out")


def test_the_culprit_follows_its_node_through_a_relabelling(small_fleet):
    names = []
    for order in (["a", "b", "c", "d"], ["d", "c", "b", "a"]):
        fleet = small_fleet(names=order)
        fleet.start("train-1", order)
        fleet.tick(2)
        fleet.throttle("b", 1)
        names.append(fleet.tick(3).stragglers["train-1"]["culprit"]["name"])
    assert names == ["b/1", "b/1"]


def test_a_whole_slow_node_is_named_as_a_node(small_fleet):
    fleet = small_fleet()
    fleet.start("train-1", fleet.names)
    fleet.tick(2)
    for gpu in range(8):
        fleet.throttle("n002", gpu)
    body = fleet.tick(3).stragglers["train-1"]
    assert body["slow"]
    assert body["culprit"] == {"kind": "node", "name": "n002", "share": 1.0}


def test_clocks_below_the_gangs_count_without_any_stated_reason(small_fleet):
    fleet = small_fleet()
    fleet.gpu["clock_event_reasons"][:] = np.nan
    fleet.start("train-1", fleet.names)
    fleet.gpu["sm_clock_mhz"][8:16] = fleet.gpu["sm_clock_mhz_mean_2m"][8:16] = 1200.0
    fleet.gpu["max_sm_clock_mhz"][8:16] = 1200.0  # as long as we know it
    answer = fleet.tick(5)
    assert answer.stragglers["train-1"]["culprit"] == {"kind": "node", "name": "n002", "share": 1.0}
    assert fleet.sentences(answer, "n002") == ["SM clocks down to 1,200 MHz, its gang's at 1,980"]


def test_a_port_that_moves_less_than_its_siblings_is_a_link(small_fleet):
    fleet = small_fleet()
    fleet.start("train-1", fleet.names)
    fleet.tick(2)
    for name in ("rx_bytes_per_s", "tx_bytes_per_s", "rx_bytes_per_s_mean_2m", "tx_bytes_per_s_mean_2m"):
        fleet.port[name][9] = 5e9
    answer = fleet.tick(4)
    assert answer.stragglers["train-1"]["culprit"]["name"] == "n002/mlx5_1/1"
    assert answer.stragglers["train-1"]["cause"] == "communication"
    assert fleet.sentences(answer, "n002") == ["port mlx5_1: moves 10 GB/s, its sibling ports 20 GB/s"]
    assert fleet.flagged(answer) == ["n002"]


def test_ports_that_a_job_does_not_use_are_not_slow(small_fleet):
    fleet = small_fleet()
    fleet.start("train-1", fleet.names)
    for direction in ("rx", "tx"):
        for window in ("", "_mean_2m", "_mean_30m"):
            fleet.port[f"{direction}_bytes_per_s{window}"].reshape(4, 8)[:, 2:] = 80.0  # two of eight carry all
    assert fleet.tick(6).risk.reasons == {}


def test_two_jobs_on_one_node_are_not_compared(small_fleet):
    fleet = small_fleet()
    fleet.start("busy", ["n001", "n002"], (0, 1, 2, 3))
    fleet.start("calm", ["n001", "n002"], (4, 5, 6, 7))
    for name in ("rx_bytes_per_s", "tx_bytes_per_s", "rx_bytes_per_s_mean_2m", "tx_bytes_per_s_mean_2m"):
        fleet.port[name].reshape(4, 8)[:, 4:] = 2e9
    assert fleet.tick(6).risk.reasons == {}


def test_a_stopped_gang_names_what_stopped_it(small_fleet):
    fleet = small_fleet()
    fleet.start("train-1", fleet.names)
    report_steps(fleet, "train-1", [2.0] * 20)
    row = fleet.row("n004", 0)
    fleet.tick(2)
    fleet.gpu["silent_s"][row] = fleet.gpu["age_s"][row] = 90.0
    body = fleet.tick(2, every_s=60.0).stragglers["train-1"]
    assert body["slow"]
    assert body["culprit"]["name"] == "n004/0"
    assert body["sentence"].startswith("no step for")


def steps_of(small_fleet, durations, **more):
    fleet = small_fleet(2)
    fleet.start("j", fleet.names)
    report_steps(fleet, "j", durations)
    attempt = fleet.jobs.get("j")
    return fleet, attempt


def test_one_long_step_is_no_alarm(small_fleet):
    _, attempt = steps_of(small_fleet, [1.0] * 30 + [9.0] + [1.0] * 2)
    assert not measure_pace(attempt).slow


def test_four_steps_a_fifth_longer_are(small_fleet):
    _, attempt = steps_of(small_fleet, [1.0] * 30 + [1.2] * 4)
    pace = measure_pace(attempt)
    assert pace.slow
    assert pace.ratio == pytest.approx(1.2)


def test_a_job_whose_steps_vary_is_held_to_its_own_variation(small_fleet):
    _, attempt = steps_of(small_fleet, [1.0, 2.0, 2.0, 2.1, 2.0, 1.0] * 8 + [2.0] * 4)
    assert not measure_pace(attempt).slow


def test_steps_under_a_checkpoint_do_not_count(small_fleet):
    fleet, attempt = steps_of(small_fleet, [1.0] * 30)
    begin_ms = fleet.now_ms
    fleet.jobs.apply(Checkpoint(job="j", sequence=40, time_ms=begin_ms, edge="begin"))
    report_steps(fleet, "j", [5.0] * 4, first=50)
    fleet.jobs.apply(Checkpoint(job="j", sequence=60, time_ms=fleet.now_ms, edge="end"))
    assert not measure_pace(attempt).slow


def test_an_evaluation_is_not_slow(small_fleet):
    fleet, attempt = steps_of(small_fleet, [1.0] * 30 + [3.0] * 5)
    fleet.jobs.apply(Phase(job="j", sequence=99, time_ms=fleet.now_ms, name="evaluation"))
    assert not measure_pace(attempt).slow


def test_a_slow_spell_stays_slow_however_long_it_lasts(small_fleet):
    fleet, _ = steps_of(small_fleet, [1.0] * 30)
    for _ in range(80):
        report_steps(fleet, "j", [2.0] * 5, first=fleet.jobs.get("j").steps[-1].sequence + 1)
        body = fleet.tick(every_s=0.0).stragglers["j"]
    assert body["slow"]
    assert body["expected_step_s"] == 1.0


def test_a_job_whose_steps_are_as_usual_to_what_is_shown_is_not_slow(small_fleet):
    fleet, _ = steps_of(small_fleet, [1.0] * 30)
    seen = []
    for seconds in [2.0] * 8 + [1.004] * 8:
        report_steps(fleet, "j", [seconds], first=fleet.jobs.get("j").steps[-1].sequence + 1)
        body = fleet.tick(every_s=0.0).stragglers["j"]
        seen.append((body["slow"], round(body["ratio"], 2)))
    assert (True, 2.0) in seen
    assert (False, 1.0) in seen
    assert (True, 1.0) not in seen


def test_ranks_that_report_their_compute_name_the_worker(small_fleet):
    fleet = small_fleet(4)
    fleet.start("j", fleet.names, (0,))
    sequence = 2
    for step in range(30):
        fleet.now_ms += 1000
        slow = step >= 24
        for rank in range(4):
            compute = 1.6 if slow and rank == 2 else 0.8
            parts = StepParts(compute=compute, communication=(1.8 if slow else 1.0) - compute)
            duration = 1.8 if slow else 1.0
            event = Step(
                job="j", sequence=sequence, time_ms=fleet.now_ms, step=step, rank=rank, duration_s=duration, parts=parts
            )
            fleet.jobs.apply(event)
            sequence += 1
    body = fleet.tick().stragglers["j"]
    assert body["slow"]
    assert body["culprit"] == {"kind": "worker", "name": "n003/0", "share": 1.0}
    assert body["cause"] == "compute"


def test_a_braked_node_is_to_blame_for_the_job_that_has_it_to_itself(small_fleet):
    fleet = small_fleet()
    fleet.start("train-1", ["n001"])
    fleet.tick(2)
    for gpu in range(8):
        fleet.throttle("n001", gpu)
    body = fleet.tick(3).stragglers["train-1"]
    assert body["slow"]
    assert body["culprit"]["kind"] == "node"
