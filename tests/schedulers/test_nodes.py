import numpy as np

from fleetcast.schedulers.nodes import CONDITION, FEATURE, LABEL, TAINT, THEIRS, NodeMarks
from tests.schedulers.small_fleet import weather

RISKS = {"a": 0.9, "b": 0.1, "c": 0.0, "unknown": np.nan, "elsewhere": 0.9}
SEEN: dict[str, dict[str, str]] = {name: {} for name in (*RISKS, "stranger") if name != "elsewhere"}


def wishes(
    effect: str, seen: dict[str, dict[str, str]], risk: dict[str, float] | None = RISKS, **more: object
) -> dict[tuple[str, str], str | None]:
    given = weather(risk, **more)
    return {(write.key, write.field): write.value for write in NodeMarks(effect).wishes(given, seen)}


def test_marks_follow_the_band_of_nodes_that_the_cluster_has() -> None:
    assert wishes("NoSchedule", SEEN, causes={"a": "sm_clock_mhz"}) == {
        ("a", CONDITION): "True SmClockMhz",
        ("a", LABEL): "high",
        ("a", TAINT): "high:NoSchedule",
        ("b", CONDITION): "False NoFailureExpected",
        ("b", LABEL): "elevated",
        ("c", CONDITION): "False NoFailureExpected",
        ("c", LABEL): "low",
    }


def test_a_taint_is_for_those_who_ask_for_it() -> None:
    assert not [field for _, field in wishes("", SEEN) if field == TAINT]


def test_slurm_operator_is_told_the_band_where_that_is_asked_for() -> None:
    told = {
        (write.key, write.value)
        for write in NodeMarks(slinky=True).wishes(weather(RISKS), SEEN)
        if write.field == FEATURE
    }
    assert told == {("a", "risk_high"), ("b", "risk_elevated"), ("c", "risk_low")}
    assert not [field for _, field in wishes("", SEEN) if field == FEATURE]
    assert wishes("", {"a": {CONDITION: "True X", LABEL: "high", FEATURE: "risk_high"}}) == {("a", FEATURE): None}
    assert wishes("", {"a": {FEATURE: "risk_high"}}, None) == {("a", FEATURE): None}


def test_another_cause_is_no_change_and_the_sentence_says_why() -> None:
    seen = {"a": {CONDITION: "True Xid", LABEL: "high"}}
    assert wishes("", seen, causes={"a": "sm_clock_mhz"}) == {}
    (first, *_) = NodeMarks().wishes(weather({"a": 0.9}, reasons={"a": "GPU 3: XID 79"}), {"a": {}})
    assert (first.why, first.cost) == ("risk 90% within 1 h: GPU 3: XID 79", 900)


def test_what_somebody_else_has_taken_is_theirs() -> None:
    seen = {"a": {THEIRS + LABEL: "mine", THEIRS + CONDITION: "True Mine"}}
    assert wishes("", seen) == {}


def test_without_a_forecast_only_an_unknown_condition_stays() -> None:
    seen = {"a": {CONDITION: "True Xid", LABEL: "high", TAINT: "high:NoSchedule"}, "new": {}}
    assert wishes("NoSchedule", seen, None) == {
        ("a", CONDITION): "Unknown NoForecast",
        ("a", LABEL): None,
        ("a", TAINT): None,
    }
    assert wishes("", {"stranger": {LABEL: "high"}}) == {("stranger", LABEL): None}
