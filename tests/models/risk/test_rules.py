"""A rule is one row and one function; whatever else is asked of it is derived from its row."""

import re

import numpy as np
import pytest

import fleetcast.models.risk.score  # noqa: F401  imports every module that has functions of rules
from fleetcast.features.extract import AGES, GPU_FEATURES
from fleetcast.features.frame import FeatureFrame
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind
from fleetcast.models.risk import detectors
from fleetcast.models.risk.detectors import (
    DETECTORS,
    REPORTERS,
    Detection,
    FeatureColumns,
    check_rules_have_detectors,
    register_detector,
    register_reporter,
)
from fleetcast.models.risk.repairs import LASTING, PARDONED
from fleetcast.models.risk.rules import COMPUTE, COUNT, LINK, RULES, STOPPED
from fleetcast.models.risk.signals import WORDS


def names(claim):
    return {rule.name for rule in RULES if claim(rule)}


def test_every_rule_has_exactly_one_function() -> None:
    assert DETECTORS.keys() | REPORTERS.keys() == {rule.name for rule in RULES}
    assert not DETECTORS.keys() & REPORTERS.keys()
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_a_rule_without_a_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rules_have_detectors()
    monkeypatch.delitem(detectors.DETECTORS, "clock_low")
    with pytest.raises(ValueError, match="no function sees or reports clock_low"):
        check_rules_have_detectors()


@pytest.mark.parametrize("register", [register_detector, register_reporter])
def test_a_rule_has_no_second_function_and_no_function_an_unknown_rule(register) -> None:
    with pytest.raises(ValueError, match="'clock_low' has a function already"):
        register("clock_low")(lambda view: None)
    with pytest.raises(ValueError, match="there is no rule 'clock_lower'"):
        register("clock_lower")(lambda view: None)


def test_what_a_slow_gang_is_put_down_to() -> None:
    assert names(lambda rule: rule.blames is COMPUTE) == {
        "thermal_throttle", "power_brake", "clock_low", "gang_outlier", "cpu_stolen", "power_cap",
        "clock_halved",
    }  # fmt: skip
    assert names(lambda rule: rule.blames is STOPPED) == {"gpu_vanished", "node_silent", "node_lost", "link_down"}
    assert names(lambda rule: rule.blames is LINK) == {
        "link_flap", "link_errors", "link_speed", "link_timeouts", "slow_nic", "port_waits",
        "pcie_width", "pcie_gen", "pcie_replays", "nvlink_errors", "slow_link", "link_drops",
    }  # fmt: skip
    assert names(lambda rule: rule.by_ratio) == {
        "thermal_throttle", "power_brake", "clock_low", "gang_outlier", "slow_nic", "link_speed", "power_cap",
        "clock_halved", "slow_link",
    }  # fmt: skip


def test_what_a_repair_makes_void_and_for_how_long() -> None:
    counts = {
        "ecc_uncorrectable", "ecc_burst", "ecc_corrected_few", "pcie_replays", "nvlink_errors",
        "link_flap", "link_errors", "link_errors_few", "scrapes_lost", "link_timeouts", "link_drops",
    }  # fmt: skip
    codes = {"xid_hard", "xid_part", "xid_soft", "row_remapped", "xid_reported", "xid_noted"}
    standing = {"node_lost", "drain_requested", "recent_fault", "health_failed", "health_degraded"}
    assert names(lambda rule: rule.evidence is COUNT) == counts
    assert {rule.name for rule, lasts in zip(RULES, LASTING, strict=True) if lasts} == codes | counts
    assert {rule.name for rule, pardoned in zip(RULES, PARDONED, strict=True) if not pardoned} == standing


def test_hard_rules_that_name_no_part_and_those_that_say_that_something_went_away() -> None:
    assert names(lambda rule: rule.hard and not rule.names_part) == {"node_silent", "node_lost", "health_failed"}
    assert names(lambda rule: rule.hard and rule.blames is STOPPED) == {"node_silent", "node_lost", "gpu_vanished"}
    assert names(lambda rule: rule.early) == {
        "gpu_hot_for_its_load", "ecc_corrected_few", "link_errors_few", "scrapes_late", "scrapes_lost"
    }  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_sentence_is_made_of_known_words(rule) -> None:
    assert set(re.findall(r"{(.*?)}", rule.says)) <= WORDS.keys()


def frame(names: tuple[str, ...]) -> FeatureFrame:
    values = np.ones((2, len(names)), np.float32)
    return FeatureFrame(EntityKind.GPU, names, values, np.zeros(2, np.int32), np.zeros(values.shape, np.int64), 0)


def test_a_feature_that_the_frame_does_not_have_raises_and_names_what_is_near() -> None:
    columns = FeatureColumns(frame(GPU_FEATURES))
    assert columns["gpu_temp_c"].tolist() == [1.0, 1.0]
    for read in (columns.__getitem__, columns.changed_ms):
        with pytest.raises(KeyError, match=r"frame of gpu has no feature 'gpu_temp'; did you mean 'gpu_temp_c'"):
            read("gpu_temp")
    with pytest.raises(KeyError, match="has no feature 'qqq'"):
        columns["qqq"]


def test_strength_is_a_share_and_unknown_strength_is_none() -> None:
    on = np.array([True, True, False])
    assert Detection.make_detection(on, np.ones(3), strength=np.array([np.nan, 3.0, -1.0])).strength.tolist() == [
        0.0,
        1.0,
        0.0,
    ]
    assert Detection.make_detection(on, np.ones(3)).strength.tolist() == [1.0, 1.0, 1.0]


RATES = {"B": "B/s", "s": "ratio", "ticks": "times"}  # the unit of a counter → that of its rate beside another
OF_REPORTS = {  # what gangs, events, ended jobs and witnesses report: no column of a frame holds it
    "drained": "flag", "exporter_partial": "GPUs", "failed_job_share": "ratio", "fault_age_s": "s",
    "health": "flag", "node_lost": "flag", "probability": "ratio",
}  # fmt: skip


def units_of(rule) -> set[str]:
    """Return the units in which a reason of this rule may give its value; empty if its feature names nothing."""
    kinds = (rule.kind,) if rule.name in DETECTORS else tuple(EntityKind)
    metrics = [row for kind in kinds for row in METRICS[kind] if row.name == rule.feature]
    if metrics:
        units = {row.unit for row in metrics} | {RATES[row.unit] for row in metrics if row.unit in RATES}
        if rule.evidence is COUNT:  # how often, or in which share of the samples
            units |= {"events", "ratio"}
        return units
    if rule.name in DETECTORS:
        ages = AGES[rule.kind] + (AGES[EntityKind.GPU] if rule.kind is EntityKind.NODE else ())  # a node asks its GPUs
        return {"s"} if rule.feature in ages else set()
    return {OF_REPORTS[rule.feature]} if rule.feature in OF_REPORTS else set()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_feature_of_a_rule_is_a_metric_or_a_report_and_its_unit_fits(rule) -> None:
    assert rule.unit in units_of(rule), f"{rule.feature} in {rule.unit!r}: expected one of {sorted(units_of(rule))}"


def test_no_report_is_listed_that_no_rule_gives() -> None:
    assert OF_REPORTS.keys() <= {rule.feature for rule in RULES if rule.name in REPORTERS}
