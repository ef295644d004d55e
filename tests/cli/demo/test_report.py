import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleetcast.cli.demo.evidence import SHOWN_BY, UNFLAGGED, parse_flag_reasons
from fleetcast.cli.demo.monitor import LATE_S, DemoRun
from fleetcast.cli.demo.processes import DemoOptions
from fleetcast.cli.demo.report import (
    RESIZE_LIMIT_MS,
    STOP_LIMIT_MS,
    FlagHistory,
    IngestionTotals,
    are_stories_done,
    find_false_nodes,
    judge_faults,
    list_problems,
    list_story_problems,
)
from fleetcast.cli.demo.screen import DemoScreen
from fleetcast.models.risk.rules import BY_NAME
from fleetcast.simulator.faults.magnitudes import FAULT_KINDS

MINUTE = 60_000


def row(node: str, code: str = "avoid", reason: str = "hot") -> dict[str, Any]:
    return {"node": node, "reason": reason, "action": {"code": code}}


def fault(node: str, start_ms: int, **extra: Any) -> dict[str, Any]:
    return {"fault_id": f"{node}-{start_ms}", "kind": "thermal_throttle", "node": node, "gpu": 3} | {
        "start_ms": start_ms,
        "end_ms": None,
        "visible": True,
        "benign": False,
        **extra,
    }


THROTTLES = "GPU 3: SM clock 990 MHz, usual 1,980; thermal slowdown since 14:02 UTC"
ECC = "GPU 3: 416 corrected ECC errors in 10 min"


def reason(feature: str, entity: str, sentence: str, value: float = 1.0) -> dict[str, Any]:
    return {"feature": feature, "entity": entity, "sentence": sentence, "value": value}


def flagged(node: str, since_ms: int, *reasons: dict[str, Any]) -> FlagHistory:
    watch = FlagHistory()
    watch.record_answer([row(node)], since_ms)
    watch.record_evidence(node, parse_flag_reasons(list(reasons)), since_ms)
    return watch


def report(faults: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    return {
        "samples": 1,
        "placements": {"placed": 1},
        "bad_records": 0,
        "bad_records_injected": 0,
        "faults": faults,
        "false_nodes": [],
        **extra,
    }


def test_a_fault_is_detected_when_its_node_is_flagged_for_it() -> None:
    watch = FlagHistory()
    watch.record_answer([row("n1", "none")], 10)
    assert watch.record_answer([row("n1")], 20) == [("n1", "hot")]
    watch.record_evidence(
        "n1", parse_flag_reasons([reason("gpu_temp_c", "n1/3", "GPU 3: 90 °C, its node's other GPUs 60")]), 20
    )
    assert watch.record_answer([row("n1")], 30) == []
    watch.record_evidence("n1", parse_flag_reasons([reason("sm_clock_mhz", "n1/3", THROTTLES)]), 30)
    (judged,) = judge_faults([fault("n1", 15)], watch, 40)
    assert (judged["detected_ms"], judged["reason"]) == (30, THROTTLES)


@pytest.mark.parametrize(
    ("found", "extra", "reasons"),
    [
        (True, {}, [("sm_clock_mhz", "n1/3", THROTTLES)]),
        (False, {}, [("sm_clock_mhz", "n1/4", THROTTLES)]),  # another GPU's
        (False, {}, [("ecc_sbe_volatile", "n1/3", ECC)]),  # another kind's
        (True, {}, [("ecc_sbe_volatile", "n1/3", ECC), ("sm_clock_mhz", "n1/3", THROTTLES)]),
        (True, {"kind": "ecc_storm"}, [("ecc_sbe_volatile", "n1/3", ECC)]),
        (True, {"kind": "power_brake", "gpu": None}, [("sm_clock_mhz", "n1/0", "GPU 0: power brake since 20:35 UTC")]),
        (False, {"kind": "power_brake", "gpu": None}, [("sm_clock_mhz", "n1/0", THROTTLES)]),
        (
            True,
            {"kind": "slow_nic", "gpu": None, "port": 1},
            [("tx_bytes", "n1/mlx5_1/1", "port mlx5_1: moves 2.45 GB/s, its sibling ports 3.86 GB/s")],
        ),
        (
            False,
            {"kind": "slow_nic", "gpu": None, "port": 1},
            [("tx_bytes", "n1/mlx5_2/1", "port mlx5_2: moves 2.45 GB/s, its sibling ports 3.86 GB/s")],
        ),
        (False, {"kind": "ib_flap", "gpu": None, "port": 1}, [("sm_clock_mhz", "n1/1", THROTTLES)]),
    ],
)
def test_only_a_flag_of_its_own_kind_and_part_finds_a_fault(
    found: bool, extra: dict[str, Any], reasons: list[tuple[str, str, str]]
) -> None:
    watch = flagged("n1", 20, *(reason(*each) for each in reasons))
    (judged,) = judge_faults([fault("n1", 15, **extra)], watch, 40)
    assert (judged["detected_ms"] is not None) is found


def test_an_xid_finds_the_kind_that_it_is_a_code_of() -> None:
    xid = reason("xid", "n1/3", "GPU 3: XID 79: GPU has fallen off the bus at 21:24 UTC", 79.0)
    truth = [fault("n1", 15, kind=kind) for kind in ("gpu_off_bus", "ecc_storm")]
    found = [row["detected_ms"] for row in judge_faults(truth, flagged("n1", 20, xid), 40)]
    assert found == [20, None]


def test_every_fault_kind_of_the_simulator_has_rules_that_show_it() -> None:
    assert set(SHOWN_BY) == set(FAULT_KINDS)
    assert all(BY_NAME[rule].action not in UNFLAGGED for rules in SHOWN_BY.values() for rule in rules)


def test_a_healthy_node_that_a_visitor_reports_lost_is_not_held_against_the_service() -> None:
    lost = reason("node_lost", "n1", "node reported lost at 20:41 UTC")
    assert find_false_nodes([], flagged("n1", 20, lost)) == []
    assert find_false_nodes([], flagged("n1", 20, lost, reason("sm_clock_mhz", "n1/3", THROTTLES))) == ["n1"]


def test_a_flag_that_ended_before_the_fault_detects_nothing() -> None:
    watch = FlagHistory()
    watch.record_answer([row("n1")], 10)
    watch.record_answer([], 20)
    (judged,) = judge_faults([fault("n1", 15)], watch, 40)
    assert judged["detected_ms"] is None
    assert find_false_nodes([fault("n1", 15)], watch) == ["n1"]


def test_a_node_without_a_fault_or_with_a_benign_one_is_false() -> None:
    watch = FlagHistory()
    watch.record_answer([row("n1"), row("n2"), row("n3")], 50)
    assert find_false_nodes([fault("n1", 10), fault("n2", 10, benign=True)], watch) == ["n2", "n3"]


def test_an_invisible_fault_excuses_a_flag_but_is_not_counted_as_missed() -> None:
    watch = FlagHistory()
    hidden = fault("n1", 0, visible=False)
    assert list_problems(report(judge_faults([hidden], watch, 10 * MINUTE)), 10 * MINUTE) == []
    watch.record_answer([row("n1")], 50)
    assert find_false_nodes([hidden], watch) == []


def test_missed_faults_fail_the_run_only_once_they_are_a_minute_old() -> None:
    faults = judge_faults([fault("n1", 0)], FlagHistory(), MINUTE)
    assert list_problems(report(faults), MINUTE - 1) == []
    assert "0 of 1 visible faults" in list_problems(report(faults), MINUTE)[0]


def test_every_broken_promise_is_named() -> None:
    bad = report([], samples=0, bad_records=3, false_nodes=["a", "b", "c"], placements={"placed": 0})
    assert len(list_problems(bad, 0)) == 4


def test_flags_of_a_pipeline_that_began_anew_are_not_told_again() -> None:
    watch = FlagHistory()
    assert watch.record_answer([row("n1"), row("n2")], 10 * MINUTE)
    watch.record_answer([row("n1")], 12 * MINUTE)
    watch.record_answer([], 13 * MINUTE)
    watch.record_restart(13 * MINUTE)
    assert watch.record_answer([row("n1"), row("n2"), row("n3")], 20 * MINUTE) == [("n2", "hot"), ("n3", "hot")]
    assert [(flag.since_ms, flag.until_ms) for flag in watch.flags["n1"]] == [(10 * MINUTE, 20 * MINUTE)]


def test_without_a_restart_a_flag_that_comes_back_is_a_new_one() -> None:
    watch = FlagHistory()
    watch.record_answer([row("n1")], 10 * MINUTE)
    watch.record_answer([], 11 * MINUTE)
    assert watch.record_answer([row("n1")], 12 * MINUTE) == [("n1", "hot")]


def test_counters_go_on_over_the_lives_of_a_pipeline() -> None:
    totals = IngestionTotals()
    lives = [(100, 3), (200, 5), (40, 1), (90, 4)]
    began = [totals.record_answer(ingestion(samples, scrape=bad)) for samples, bad in lives]
    assert began == [False, False, True, False]
    assert (totals["samples_total"], totals["bad_telemetry"], totals.restarts) == (290, 9, 1)


def ingestion(samples: int, **bad: int) -> dict[str, Any]:
    sources = [{"name": name, "kind": name, "bad": count} for name, count in bad.items()]
    return {"samples_total": samples, "bad_total": sum(bad.values()), "ticks": 1, "sources": sources}


def test_bad_records_that_a_visitor_pushes_are_not_counted_against_the_injected_ones() -> None:
    totals = IngestionTotals()
    totals.record_answer(ingestion(100, scrape=3, inbox=500))
    assert totals["bad_telemetry"] == 3


def test_bad_records_need_not_all_be_counted_where_a_pipeline_ended() -> None:
    lost = report([], bad_records=4, bad_records_injected=5)
    assert "4 bad records counted, 5 were injected" in list_problems(lost, 0)
    assert list_problems(lost | {"pipeline_restarts": 1}, 0) == []
    assert list_problems(lost | {"pipeline_restarts": 1, "bad_records": 6}, 0) != []


def story(**at_ms: int) -> list[dict[str, Any]]:
    return [{"event": event, "time_ms": time_ms, "sentence": ""} for event, time_ms in at_ms.items()]


def test_a_stop_for_the_urgent_gang_must_lead_to_its_start() -> None:
    late_ms = STOP_LIMIT_MS + 1
    assert list_story_problems(story(urgent=0), late_ms) == []
    assert list_story_problems(story(urgent=0, urgent_placed=5), late_ms) == [], "it needed no stop"
    assert list_story_problems(story(urgent=0, stop=0), late_ms - 1) == [], "there is still time"
    assert list_story_problems(story(urgent=0, stop=0), late_ms) == ["no job stopped in time for the urgent gang"]
    assert list_story_problems(story(urgent=0, stop=0, stop_seen=9, urgent_runs=10), late_ms) == []
    assert len(list_story_problems(story(urgent=0, stop=0, urgent_placed=9), 10)) == 1


def test_a_gang_that_lost_a_node_must_get_another_one() -> None:
    late_ms = STOP_LIMIT_MS + 1
    gone = ["the gang that lost a node got no other one"]
    assert list_story_problems(story(node_lost=0), late_ms - 1) == [], "there is still time"
    assert list_story_problems(story(node_lost=0), late_ms) == gone
    assert list_story_problems(story(node_lost=0, node_not_replaced=9), 10) == gone
    assert list_story_problems(story(node_lost=0, replace=5, node_replaced=9), late_ms) == []


def test_the_elastic_gang_must_shrink_and_grow_back() -> None:
    late_ms = RESIZE_LIMIT_MS + 1
    shrunk = {"short": 0, "shrink_seen": 5}
    assert list_story_problems(story(short=0), late_ms - 1) == [], "there is still time"
    (problem,) = list_story_problems(story(short=0), late_ms)
    assert "did not shrink" in problem
    assert list_story_problems(story(short=0, shrink_failed=9), 10) == [problem]
    (problem,) = list_story_problems(story(**shrunk), late_ms + 5)
    assert "did not start" in problem
    done = {**shrunk, "short_runs": 6, "short_ended": 9}
    assert list_story_problems(story(**done), late_ms) == [], "there is still time"
    (problem,) = list_story_problems(story(**done), late_ms + 9)
    assert "did not grow back" in problem
    assert list_story_problems(story(**done, grow_failed=10), 10) == [problem]
    assert list_story_problems(story(**done, grow_seen=12), late_ms + 9) == []


def test_a_run_waits_for_the_steps_of_a_story_that_may_still_come() -> None:
    assert are_stories_done([], 10)
    whole = story(urgent=0, node_lost=0, short=0, urgent_runs=5, node_replaced=5, grow_seen=5)
    assert are_stories_done(whole, 10)
    for end in ("urgent_runs", "node_replaced", "grow_seen"):
        assert not are_stories_done([turn for turn in whole if turn["event"] != end], 10)
    assert are_stories_done(story(short=0, shrink_failed=1), 10), "it has failed already"


@pytest.mark.parametrize(("seconds", "elapsed_s", "is_over"), [
    (None, 1e6, False), (60.0, 59.0, False), (60.0, 61.0, False), (60.0, 60.0 + LATE_S, True), (20.0, 20.0, True),
])  # fmt: skip
def test_a_bounded_run_lasts_until_its_stories_have_ended(
    tmp_path: Path, seconds: float | None, elapsed_s: float, is_over: bool
) -> None:
    options = DemoOptions(seconds, 1, 15.0, "", "trace", None, 8080, tmp_path, True, True, "")
    run = DemoRun(options, tmp_path, DemoScreen(8080), asyncio.Event())
    run._story, run._fleet = story(short=0), {"as_of_ms": 10}
    assert run._is_over(elapsed_s) is is_over
    run._story = story(short=0, grow_seen=5)
    assert run._is_over(elapsed_s) is (seconds is not None and elapsed_s >= seconds)
