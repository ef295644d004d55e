from zoneinfo import ZoneInfo

import numpy as np
import pytest

from fleetcast.schedulers.adapter import Seen, Write
from fleetcast.schedulers.slurm import (
    COMMENT,
    DRAIN,
    EXTRA,
    FEATURE,
    PENDING,
    THEIRS,
    SlurmMarks,
    SlurmSettings,
)
from fleetcast.schedulers.weather import JobOutlook, StartOutlook, Weather
from tests.schedulers.small_fleet import NOW_MS, outlook, start

RISKS = {"a": 0.81, "b": 0.1, "c": 0.0, "unknown": np.nan, "elsewhere": 0.9}
ALL = SlurmSettings(extra=True, comments=True)
REASON = "[fleetcast] p_fail_1h=0.81 cause=ecc_ue"
STAMPED = "[fleetcast] start 2025-10-09T09:23 (p90 2025-10-09T10:03)"


def weather(
    risk: dict[str, float] | None = RISKS,
    jobs: dict[str, JobOutlook] | None = None,
    starts: dict[str, StartOutlook] | None = None,
) -> Weather:
    nodes = None if risk is None else outlook(risk, causes={"a": "ecc_ue"}, reasons={"a": "GPU 3: ECC"})
    return Weather(1, NOW_MS, NOW_MS, nodes, None, jobs, starts)


def told(given: Weather | None, seen: Seen, aims: SlurmSettings = ALL) -> dict[tuple[str, str], str | None]:
    return {(write.key, write.field): write.value for write in SlurmMarks(aims).wishes(given, seen)}


def test_nodes_are_told_by_their_band_as_far_as_slurm_and_a_forecast_know_them() -> None:
    assert told(weather(), {"a": {}, "b": {}, "c": {}, "unknown": {}, "stranger": {}}) == {
        ("a", DRAIN): REASON,
        ("a", FEATURE): "risk_high",
        ("a", EXTRA): "2",
        ("b", FEATURE): "risk_elevated",
        ("b", EXTRA): "1",
        ("c", FEATURE): "risk_low",
        ("c", EXTRA): "0",
    }
    (first, *_) = SlurmMarks().wishes(weather(), {"a": {}})
    assert first == Write("a", DRAIN, REASON, None, "risk 81% within 1 h: GPU 3: ECC", 810)


def test_a_site_chooses_what_is_done() -> None:
    assert told(weather(), {"a": {}}, SlurmSettings(drain=False)) == {("a", FEATURE): "risk_high"}
    assert told(weather(), {"a": {FEATURE: "risk_high"}}, SlurmSettings(features=False)) == {
        ("a", DRAIN): REASON,
        ("a", FEATURE): None,
    }


def test_a_node_of_which_somebody_says_something_is_not_drained() -> None:
    assert (("a", DRAIN)) not in told(weather(), {"a": {THEIRS + DRAIN: "fan 3"}})
    assert told(weather({"a": 0.0}), {"a": {THEIRS + DRAIN: "fan 3", FEATURE: "risk_low", EXTRA: "0"}}) == {}


@pytest.mark.parametrize(("risk", "lifted"), [({"a": 0.0}, True), ({"a": 0.1}, False), ({"a": 0.9}, False)])
def test_a_drain_of_ours_is_lifted_by_a_low_band_alone(risk: dict[str, float], lifted: bool) -> None:
    wishes = told(weather(risk), {"a": {DRAIN: "[fleetcast] older"}})
    assert (wishes.get(("a", DRAIN), "stays") is None) == lifted
    assert lifted == (
        ("a", DRAIN) in told(weather(risk), {"a": {DRAIN: "[fleetcast] older"}}, SlurmSettings(drain=False))
    )


def test_what_is_not_known_lifts_no_drain_but_takes_back_the_rest() -> None:
    seen = {"a": {DRAIN: REASON, FEATURE: "risk_high", EXTRA: "2"}, "job 7": {COMMENT: STAMPED, PENDING: "yes"}}
    rest: dict[tuple[str, str], str | None] = {("a", FEATURE): None, ("a", EXTRA): None, ("job 7", COMMENT): None}
    assert told(weather(None), seen) == rest
    assert told(weather({"other": 0.0}), seen) == rest
    assert told(weather({"a": np.nan}), seen) == {("job 7", COMMENT): None}
    assert told(None, seen) == {**rest, ("a", DRAIN): None}


def test_somebody_elses_extra_is_left_alone() -> None:
    assert ("a", EXTRA) not in told(weather(), {"a": {THEIRS + EXTRA: "rack 7"}})
    assert told(weather(), {"a": {EXTRA: "soon"}})["a", EXTRA] == "2"


def test_a_job_that_waits_is_told_when_it_starts() -> None:
    starts = {"7": start(30, 70), "8": start(5), "9": StartOutlook(None, None, None, 3, "")}
    waits = {PENDING: "yes"}
    seen: Seen = {"job 7": waits, "job 8": {}, "job 9": waits, "job 10": waits}
    assert told(weather(starts=starts), seen) == {("job 7", COMMENT): STAMPED}
    assert told(weather(starts=starts), {"job 7": {**waits, THEIRS + COMMENT: "mine"}}) == {}
    assert told(weather(starts=starts), {"job 8": {COMMENT: STAMPED}}) == {("job 8", COMMENT): None}
    assert told(
        weather(starts={"site-7": start(30, 70)}), {"job 7": waits}, SlurmSettings(comments=True, prefix="site-")
    )
    berlin = SlurmSettings(comments=True, zone=ZoneInfo("Europe/Berlin"))
    assert told(weather(starts={"7": start(30)}), {"job 7": waits}, berlin) == {
        ("job 7", COMMENT): "[fleetcast] start 2025-10-09T11:23"
    }


@pytest.mark.parametrize(("p50", "p90", "is_news"), [(34, 70, False), (36, 70, True), (30, 76, False), (30, 80, True)])
def test_a_start_that_hardly_moves_is_no_news(p50: float, p90: float, is_news: bool) -> None:
    wishes = told(weather(starts={"7": start(p50, p90)}), {"job 7": {PENDING: "yes", COMMENT: STAMPED}})
    assert bool(wishes) == is_news


def test_another_comment_of_ours_makes_way() -> None:
    for held in ("[fleetcast] hello", "[fleetcast] start 2025-10-09T09:23", "[fleetcast] 9999-99-99T99:99 and later"):
        assert told(weather(starts={"7": start(30, 70)}), {"job 7": {PENDING: "yes", COMMENT: held}})
