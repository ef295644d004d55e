"""Laws of the node risk model, with and without fitted coefficients."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeTable
from fleetcast.fleet.topology import Device, NodeSpec, Topology
from fleetcast.models.risk.hazard import PUBLISHED, compute_features
from fleetcast.models.risk.node_events import make_event_signals
from fleetcast.models.risk.node_risk import (
    KindFit,
    RiskFit,
    compute_excess_hazard,
    compute_probabilities,
    load_risk_fit,
    load_shipped_fit,
    score_nodes,
)
from fleetcast.models.risk.part_risk import list_usual_parts
from fleetcast.models.risk.rules import ACTIONS, ROW, RULES
from fleetcast.models.risk.scores import RISK_HORIZONS_S, HardReason
from fleetcast.models.risk.signals import Signal, Signals, describe_signal

FIT = RiskFit(
    version=1,
    kinds={"slow": KindFit(-6.0, {"thermal_throttle": 8.0, "gpu_hot": 2.0}, (0.0, 0.5, 1.0), (0.0, 0.4, 0.9))},
)
NOW_MS = 1_750_000_000_000


def random_levels(rows=200):
    rng = np.random.default_rng(3)
    return rng.random((rows, len(RULES))) * (rng.random((rows, len(RULES))) < 0.1)


@pytest.mark.parametrize("fit", [None, FIT, "shipped"], ids=["priors", "hand-made", "shipped"])
def test_probabilities_lie_in_their_range_and_grow_with_the_horizon(fit):
    levels = random_levels()
    fit = load_shipped_fit() if fit == "shipped" else fit
    excess = compute_excess_hazard(levels, fit)
    since = np.linspace(0, 30, len(levels))
    history = PUBLISHED.compute_hazard(compute_features(since, since, since < 15), RISK_HORIZONS_S)
    values = compute_probabilities(excess, history, np.ones(len(levels), bool))
    assert ((values >= 0) & (values <= 1)).all()
    assert (np.diff(values, axis=1) >= 0).all()


def test_parts_of_the_hazard_sum_to_it():
    excess = compute_excess_hazard(random_levels(), FIT)
    assert np.allclose(excess.parts.sum(axis=2), excess.total)
    assert (excess.parts >= 0).all()


def test_more_evidence_never_lowers_a_risk():
    levels = random_levels()
    more = np.minimum(levels + random_levels() * 0.5, 1.0)
    assert (compute_excess_hazard(more, None).total >= compute_excess_hazard(levels, None).total - 1e-12).all()


def test_the_fit_raises_what_the_priors_leave_low():
    levels = np.zeros((1, len(RULES)))
    levels[0, ROW["gpu_hot"]] = 1.0
    levels[0, ROW["thermal_throttle"]] = 0.1
    slow = 2
    assert compute_excess_hazard(levels, FIT).total[slow, 0] >= compute_excess_hazard(levels, None).total[slow, 0]


def test_the_gravest_firm_action_is_given_with_the_first_reason():
    signals = Signals.from_signals(
        [
            Signal("link_flap", 0, "n1/mlx5_0/1", 2.0),
            Signal("row_remap_failure", 0, "n1/4", 1.0),
            Signal("thermal_throttle", 1, "n2/0", 990.0, 1980.0, firm=False),
        ]
    )
    scores = score_nodes(signals, np.ones(3, bool), NOW_MS, None)
    assert scores.actions[0].code == "replace_part"
    assert scores.actions[0].sentence == "Drain now and replace the part: GPU 4: row remapping failed."
    assert scores.actions[1].code == "watch"
    assert scores.hard.tolist() == [True, False, False]
    assert 2 not in scores.reasons


def test_a_reason_of_a_hard_rule_is_hard_and_reads_as_others_do():
    given = [Signal("xid_hard", 0, "n1/4", 79.0), Signal("xid_old", 1, "n2/4", 79.0)]
    scores = score_nodes(Signals.from_signals(given), np.ones(2, bool), NOW_MS, None)
    hard, soft = scores.reasons[0][0], scores.reasons[1][0]
    assert (isinstance(hard, HardReason), isinstance(soft, HardReason)) == (True, False)
    assert msgspec.to_builtins(hard).keys() == msgspec.to_builtins(soft).keys()


def test_every_rule_has_a_sentence_and_a_known_action():
    assert {rule.action for rule in RULES} <= set(ACTIONS)
    for rule in RULES:
        assert describe_signal(rule.name, "n1", 3.0, 4.0, NOW_MS - 60_000, NOW_MS)
        assert "nan" not in describe_signal(rule.name, "n1", 3.0, float("nan"), 0, NOW_MS)


def test_events_of_a_node_are_evidence():
    nodes = NodeTable()
    hour_ms = 3_600_000
    events = [
        NodeEvent(node="n1", source="kernel", sequence=1, time_ms=NOW_MS - hour_ms, type="xid", gpu=3, code=79),
        NodeEvent(node="n1", source="kernel", sequence=2, time_ms=NOW_MS - hour_ms, type="xid", gpu=3, code=31),
        NodeEvent(node="n2", source="admin", sequence=1, time_ms=NOW_MS - 60_000, type="lost"),
        NodeEvent(node="n3", source="admin", sequence=1, time_ms=NOW_MS - 60_000, type="drain"),
        NodeEvent(node="elsewhere", source="admin", sequence=1, time_ms=NOW_MS, type="lost"),
    ]
    for event in events:
        nodes.apply(event)
    rows = {"n1": 0, "n2": 1, "n3": 2}
    signals = make_event_signals(nodes.nodes, rows, {}, NOW_MS)
    said = {(RULES[rule].name, entity) for rule, entity in zip(signals.rule.tolist(), signals.entity, strict=True)}
    assert said == {
        ("xid_reported", "n1/3"),
        ("recent_fault", "n1"),
        ("node_lost", "n2"),
        ("recent_fault", "n2"),
        ("drain_requested", "n3"),
    }


def test_a_recent_fault_raises_the_week_more_than_the_hour():
    signals = Signals.from_signals([Signal("recent_fault", 0, "n1", 3600.0)])
    since = np.array([0.05, np.inf])
    history = PUBLISHED.compute_hazard(compute_features(since, since, np.array([True, False])), RISK_HORIZONS_S)
    scores = score_nodes(signals, np.ones(2, bool), NOW_MS, None, history)
    gain = scores.values[0, :, 0] - scores.values[0, :, 1]
    assert (np.diff(gain) > 0).all()
    assert 0.08 < gain[2] < 0.25  # 22 % again within a day, over all days since the return
    (reason,) = scores.reasons[0]
    assert reason.share > 0.9


def test_serving_imports_no_scikit_learn():
    imports = "import sys, fleetcast.models.risk.score, fleetcast.models.demand.forecaster"
    code = f"{imports}; sys.exit('sklearn' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_training_wrote_into_a_folder_is_what_serves(tmp_path: Path):
    (tmp_path / "node_risk.json").write_bytes(msgspec.json.encode(FIT))
    assert load_risk_fit(tmp_path) == FIT


@pytest.mark.parametrize("text", [None, "{}", "no JSON"])
def test_a_folder_without_a_fitted_model_is_refused(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "node_risk.json").write_text(text)
    with pytest.raises(ConfigError, match=r"node_risk\.json"):
        load_risk_fit(tmp_path)


@pytest.mark.parametrize("text", [b"{}", b"[" * 100_000, b'{"version": 1, "kinds": {}, "notes": {"a": "\xff"}}'])
def test_a_file_that_is_no_fitted_model_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "node_risk.json").write_bytes(text)
    with pytest.raises(ConfigError, match="no fitted model"):
        load_risk_fit(tmp_path)


def test_the_parts_that_signals_name_have_a_risk_of_their_own():
    devices = (Device("mlx5_0", (0,), 3),)
    topology = Topology.build([NodeSpec("n1", gpus=8, devices=devices), NodeSpec("n2", gpus=8)])
    signals = Signals.from_signals(
        [
            Signal("xid_hard", 0, "n1/4", 79.0),
            Signal("nvlink_errors", 0, "n1/5", 9.0, strength=0.5),
            Signal("link_errors", 0, "n1/mlx5_0/1", 9.0),
            Signal("health_degraded", 1, "n2", 1.0),
        ]
    )
    scores = score_nodes(signals, np.ones(2, bool), NOW_MS, None, None, topology)
    parts = {(part.part, part.entity): part.p for part in scores.parts[0]}
    assert list(parts) == [("gpu", "n1/4"), ("link", "n1/5"), ("port", "n1/mlx5_0/1"), ("rail", "n1/rail3")]
    assert all(list(p) == sorted(p) for p in parts.values())
    assert 1 not in scores.parts
    usual = {row.part: row.p for row in list_usual_parts()}
    assert all(p[0] > usual[part][0] for (part, _), p in parts.items())
    apart = 1 - np.prod([1 - p[0] for key, p in parts.items() if key[0] != "rail"])
    assert apart == pytest.approx(scores.values[:2, 0, 0].max(), abs=2e-3)  # of the likeliest kind


def test_a_repaired_node_below_all_others_gives_no_other_node_a_reason():
    """Where a return from repair lowers the hazard, the recent fault of another explains only what it adds itself."""
    history = np.tile(np.array([0.001, 0.004, 0.012]), (len(RISK_HORIZONS_S), 1))  # repaired, never failed, failed
    at = {"strength": 1.0, "since_ms": NOW_MS - 86_400_000}
    signals = Signals.from_signals(
        [Signal("recent_fault", 0, "n1", 86_400.0, **at), Signal("recent_fault", 2, "n3", 1.0, **at)]
    )
    shares = {
        node: rows[0].share
        for node, rows in score_nodes(signals, np.ones(3, bool), NOW_MS, None, history).reasons.items()
    }
    assert shares == {0: 0.0, 2: pytest.approx(2 / 3, abs=0.01)}
