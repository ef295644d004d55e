"""Fitting node risk: labels, splits, and coefficients that do what the evidence says."""

import numpy as np
import pytest

from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.risk.node_risk import compute_fitted_excess
from fleetcast.models.risk.rules import ROW, RULES
from fleetcast.models.risk.scores import RISK_KINDS
from fleetcast.training.fits.fit import fit_risk, score_kinds, split_by_run
from fleetcast.training.replay.dataset import ExporterPage, LabelledFault, PageObserver, RiskRows, label_rows

SLOW, FAIL = RISK_KINDS.index("slow"), RISK_KINDS.index("fail")


def made_rows(seed, n=3000):
    """Throttled nodes are slow nine times in ten, others once in a hundred; flaps say nothing."""
    rng = np.random.default_rng(seed)
    levels = np.zeros((n, len(RULES)), np.float32)
    throttled = rng.random(n) < 0.1
    levels[throttled, ROW["thermal_throttle"]] = rng.uniform(0.5, 1.0, throttled.sum())
    levels[rng.random(n) < 0.1, ROW["link_flap"]] = 1.0
    labels = np.zeros((3, n), bool)
    labels[SLOW] = rng.random(n) < np.where(throttled, 0.9, 0.01)
    labels[FAIL] = rng.random(n) < 0.03
    return RiskRows(np.arange(n, dtype=np.int64), np.zeros(n, np.int32), levels, labels)


def test_a_fault_labels_its_node_from_an_hour_before_to_its_end():
    minutes = np.arange(-120, 121, 30, dtype=np.int64) * 60_000  # of n2 only
    node = np.full(len(minutes), 1, np.int32)
    labels = label_rows(minutes, node, [LabelledFault("ecc_storm", "n2", 0, 3_600_000)], ["n1", "n2"], 3600.0)
    #                                    -120   -90    -60   -30   0     30    60     90     120
    assert labels[FAIL].tolist() == [False, False, True, True, True, True, False, False, False]
    assert not labels[SLOW].any()


def test_runs_are_never_split():
    split = split_by_run([made_rows(seed, 10 * (seed + 1)) for seed in range(5)])
    assert (len(split.fit), len(split.calibrate), len(split.test)) == (60, 40, 50)
    with pytest.raises(ValueError, match="at least 3"):
        split_by_run([made_rows(0), made_rows(1)])


def test_the_fit_finds_what_speaks_for_a_fault_and_repeats_itself():
    split = split_by_run([made_rows(seed) for seed in range(3)])
    fit = fit_risk(split, {"seed": 1})
    weights = fit.kinds["slow"].weights
    assert weights["thermal_throttle"] > 3
    assert weights.get("link_flap", 0.0) < 0.5
    assert fit_risk(split, {"seed": 1}) == fit


def test_a_rule_that_speaks_for_a_node_has_a_negative_weight_and_lowers_its_risk():
    def rows(seed):
        made = made_rows(seed)
        spared = made.levels[:, ROW["link_flap"]] > 0
        labels = made.labels.copy()
        labels[SLOW] &= ~spared
        return RiskRows(made.time_ms, made.node, made.levels, labels)

    fit = fit_risk(split_by_run([rows(seed) for seed in range(3)]), {})
    assert fit.kinds["slow"].weights["link_flap"] < -1
    levels = np.zeros((2, len(RULES)))
    levels[:, ROW["thermal_throttle"]] = 0.6
    levels[1, ROW["link_flap"]] = 1.0
    throttled, spared = compute_fitted_excess(levels, fit).total[SLOW]
    assert spared < throttled


def test_scores_on_the_test_run_are_better_than_the_base_rate():
    split = split_by_run([made_rows(seed) for seed in range(3)])
    scores = score_kinds(split.test, fit_risk(split, {}))
    assert scores["slow"]["auroc"] > 0.9
    assert scores["slow"]["brier_skill"] > 0.5
    assert scores["drain"]["auroc"] is None  # nothing to judge by


def test_an_observer_sees_what_pages_hold():
    topology = Topology.build([NodeSpec("n1", gpus=2)])
    observer = PageObserver(topology)

    def page(clock, bits):
        lines = [
            f'DCGM_FI_DEV_{name}{{gpu="{gpu}",UUID="GPU-{gpu}",Hostname="n1"}} {value}'
            for gpu in range(2)
            for name, value in (
                ("SM_CLOCK", clock if gpu else 1980),
                ("CLOCKS_EVENT_REASONS", bits if gpu else 0),
                ("GPU_UTIL", 99),
            )
        ]
        return [ExporterPage("n1", "dcgm", ("\n".join(lines) + "\n").encode())]

    for scrape in range(3):
        evidence = observer.watch.collect_evidence(observer.apply_pages(page(1980, 0), [], 15_000 * (scrape + 1)))
    assert len(evidence.signals) == 0
    for scrape in range(3, 6):
        evidence = observer.watch.collect_evidence(observer.apply_pages(page(990, 64), [], 15_000 * (scrape + 1)))
        observer.add_training_rows(evidence, 15_000 * (scrape + 1))
    assert [RULES[row].name for row in evidence.signals.rule] == ["thermal_throttle"]
    rows = observer.make_risk_rows([LabelledFault("thermal_throttle", "n1", 60_000, None)], 3600.0)
    assert len(rows) == 3
    assert rows.labels[SLOW].all()
    assert (rows.levels[:, ROW["thermal_throttle"]] > 0.9).all()
