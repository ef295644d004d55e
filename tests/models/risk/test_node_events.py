"""What health checkers and kernel logs say of a node, as evidence with their own words."""

import numpy as np

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import MAX_RUNS, NodeTable
from fleetcast.fleet.xids import ACTION_OF, ACTIONS, HARD, SOFT, WORDS, classify_severity, find_advice
from fleetcast.models.risk.node_events import STANDS_MS, make_event_signals
from fleetcast.models.risk.node_risk import score_nodes
from fleetcast.models.risk.rules import RULES
from fleetcast.models.risk.signals import Signals

NOW_MS = 1_760_000_000_000
known = {"n1": 0}


def event(sequence: int, **fields: object) -> NodeEvent:
    given = {"node": "n1", "source": "checker", "sequence": sequence, "time_ms": NOW_MS - 60_000, "type": "health"}
    return NodeEvent(**{**given, **fields})  # type: ignore[arg-type]


def signals_of(*events: NodeEvent, now_ms: int = NOW_MS) -> Signals:
    table = NodeTable()
    for one in events:
        table.apply(one)
    return make_event_signals(table.nodes, known, {}, now_ms)


def names(signals: Signals) -> list[tuple[str, str]]:
    rules = (RULES[rule].name for rule in signals.rule.tolist())
    return [row for row in zip(rules, signals.entity, strict=True) if row[0] != "recent_fault"]


def test_fatal_health_asks_for_a_drain_and_quotes_the_checker() -> None:
    said = event(1, check="GpuNvlinkWatch", severity="fatal", gpu=7, message="1 error", advice="contact support")
    signals = signals_of(said)
    assert names(signals) == [("health_failed", "n1/7")]
    risk = score_nodes(signals, np.array([True]), NOW_MS, None)
    assert risk.actions[0].code == "drain_now"
    assert "checker: GpuNvlinkWatch: 1 error; advice: contact support" in risk.reasons[0][0].sentence


def test_a_drained_node_says_why() -> None:
    drained = event(1, type="drain", message="NHC: fan 3 is slow")
    risk = score_nodes(signals_of(drained), np.array([True]), NOW_MS, None)
    assert risk.reasons[0][0].sentence.endswith(": NHC: fan 3 is slow")
    assert risk.actions[0].sentence.endswith(": NHC: fan 3 is slow.")


def test_a_warning_is_a_reason_and_an_ok_takes_it_back() -> None:
    bad = event(1, check="fan", severity="warning")
    assert names(signals_of(bad)) == [("health_degraded", "n1")]
    good = event(2, check="fan", severity="ok", time_ms=NOW_MS - 1)
    assert names(signals_of(good, bad)) == []
    assert names(signals_of(bad, event(3, check="psu", severity="ok", time_ms=NOW_MS - 1))) == [
        ("health_degraded", "n1")
    ]


def test_health_that_nobody_took_back_is_forgotten_after_a_week() -> None:
    assert names(signals_of(event(1, severity="fatal"), now_ms=NOW_MS + STANDS_MS)) == []


def test_a_flood_of_application_errors_does_not_hide_a_lost_gpu() -> None:
    lost = event(1, type="xid", code=79, gpu=3)
    flood = [event(n, type="xid", code=31, gpu=1, time_ms=NOW_MS - 1) for n in range(2, 300)]
    assert names(signals_of(lost, *flood)) == [("xid_reported", "n1/3")]


def test_the_severity_of_an_xid_line_outweighs_its_code() -> None:
    nonfatal = event(1, type="xid", code=149, severity="warning")
    assert classify_severity(nonfatal) == "warning"
    assert names(signals_of(nonfatal, event(2, type="xid", code=62, gpu=0))) == [
        ("xid_noted", "n1"),
        ("xid_noted", "n1/0"),
    ]


def test_a_predicted_link_failure_weighs_as_much_as_it_is_likely() -> None:
    signals = signals_of(event(1, probability=0.4, device="mlx5_3/1", check="link"))
    assert names(signals) == [("link_predicted", "n1/mlx5_3/1")]
    assert signals.strength.tolist() == [0.4]


def test_an_xid_comes_with_the_advice_of_its_maker() -> None:
    risk = score_nodes(signals_of(event(1, type="xid", code=79, gpu=3)), np.array([True]), NOW_MS, None)
    assert risk.actions[0].sentence.endswith("NVIDIA's advice for XID 79: restart the node.")


def test_an_address_that_no_exporter_knows_is_told_as_it_is() -> None:
    lost = event(1, type="xid", code=79, device="0000:9b:00")
    risk = score_nodes(signals_of(lost), np.array([True]), NOW_MS, None)
    assert risk.reasons[0][0].sentence.endswith("reported by the node: 0000:9b:00")
    placed = event(1, type="xid", code=79, device="0000:9b:00", gpu=3)
    assert (
        score_nodes(signals_of(placed), np.array([True]), NOW_MS, None).reasons[0][0].sentence.endswith("by the node")
    )


def test_every_code_of_the_tables_has_words_and_an_action_that_is_known() -> None:
    assert set(ACTION_OF.values()) <= set(ACTIONS)
    assert not HARD.keys() & SOFT.keys()
    assert all(find_advice(code) for code in HARD)
    assert set(WORDS) >= HARD.keys() | SOFT.keys()


def test_sequences_with_gaps_take_bounded_room_and_nothing_counts_twice() -> None:
    table = NodeTable()
    for number in range(0, 4 * MAX_RUNS, 2):
        assert table.apply(event(number)) is not None
    assert len(table.dump()[0][1]["checker"].runs) <= MAX_RUNS
    assert table.apply(event(0)) is None
    assert table.apply(event(4 * MAX_RUNS - 2)) is None


def test_a_loss_of_a_drained_node_is_no_fault_and_one_after_it_is() -> None:
    def faults(*told: tuple[str, int]) -> int:
        rows = [event(at, type=type, time_ms=NOW_MS - ago_ms) for at, (type, ago_ms) in enumerate(told)]
        return sum(RULES[rule].name == "recent_fault" for rule in signals_of(*rows).rule.tolist())

    assert faults(("drain", 900), ("lost", 800), ("returned", 700), ("undrain", 600)) == 0
    assert faults(("drain", 900), ("undrain", 800), ("lost", 700)) == 1
    assert faults(("lost", 900), ("drain", 800)) == 1
    assert faults(("drain", 900), ("lost", 900)) == 1, "drained because it was lost"
