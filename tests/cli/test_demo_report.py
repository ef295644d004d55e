from typing import Any

from cli.demo_report import Totals, Watch, false_nodes, judge_faults, verdict

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


def test_a_fault_is_detected_when_its_node_is_flagged() -> None:
    watch = Watch()
    watch.note([row("n1", "none")], 10)
    assert watch.note([row("n1")], 20) == [("n1", "hot")]
    assert watch.note([row("n1")], 30) == []
    (judged,) = judge_faults([fault("n1", 15)], watch, 40)
    assert (judged["detected_ms"], judged["reason"]) == (20, "hot")


def test_a_flag_that_ended_before_the_fault_detects_nothing() -> None:
    watch = Watch()
    watch.note([row("n1")], 10)
    watch.note([], 20)
    (judged,) = judge_faults([fault("n1", 15)], watch, 40)
    assert judged["detected_ms"] is None
    assert false_nodes([fault("n1", 15)], watch) == ["n1"]


def test_a_node_without_a_fault_or_with_a_benign_one_is_false() -> None:
    watch = Watch()
    watch.note([row("n1"), row("n2"), row("n3")], 50)
    assert false_nodes([fault("n1", 10), fault("n2", 10, benign=True)], watch) == ["n2", "n3"]


def test_an_invisible_fault_excuses_a_flag_but_is_not_counted_as_missed() -> None:
    watch = Watch()
    hidden = fault("n1", 0, visible=False)
    assert verdict(report(judge_faults([hidden], watch, 10 * MINUTE)), 10 * MINUTE) == []
    watch.note([row("n1")], 50)
    assert false_nodes([hidden], watch) == []


def test_missed_faults_fail_the_run_only_once_they_are_a_minute_old() -> None:
    faults = judge_faults([fault("n1", 0)], Watch(), MINUTE)
    assert verdict(report(faults), MINUTE - 1) == []
    assert "0 of 1 visible faults" in verdict(report(faults), MINUTE)[0]


def test_every_broken_promise_is_named() -> None:
    bad = report([], samples=0, bad_records=3, false_nodes=["a", "b", "c"], placements={"placed": 0})
    assert len(verdict(bad, 0)) == 4


def test_flags_of_a_pipeline_that_began_anew_are_not_told_again() -> None:
    watch = Watch()
    assert watch.note([row("n1"), row("n2")], 10 * MINUTE)
    watch.note([row("n1")], 12 * MINUTE)
    watch.note([], 13 * MINUTE)
    watch.restarted(13 * MINUTE)
    assert watch.note([row("n1"), row("n2"), row("n3")], 20 * MINUTE) == [("n2", "hot"), ("n3", "hot")]
    assert [(flag.since_ms, flag.until_ms) for flag in watch.flags["n1"]] == [(10 * MINUTE, 20 * MINUTE)]


def test_without_a_restart_a_flag_that_comes_back_is_a_new_one() -> None:
    watch = Watch()
    watch.note([row("n1")], 10 * MINUTE)
    watch.note([], 11 * MINUTE)
    assert watch.note([row("n1")], 12 * MINUTE) == [("n1", "hot")]


def test_counters_go_on_over_the_lives_of_a_pipeline() -> None:
    totals = Totals()
    lives = [(100, 3), (200, 5), (40, 1), (90, 4)]
    began = [totals.note({"samples_total": samples, "bad_total": bad, "ticks": 1}) for samples, bad in lives]
    assert began == [False, False, True, False]
    assert (totals["samples_total"], totals["bad_total"], totals.restarts) == (290, 9, 1)


def test_bad_records_need_not_all_be_counted_where_a_pipeline_ended() -> None:
    lost = report([], bad_records=4, bad_records_injected=5)
    assert "4 bad records counted, 5 were injected" in verdict(lost, 0)
    assert verdict(lost | {"pipeline_restarts": 1}, 0) == []
    assert verdict(lost | {"pipeline_restarts": 1, "bad_records": 6}, 0) != []
