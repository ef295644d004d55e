"""The pipeline takes up promoted risk fits, records a challenger beside them, and goes back on a rollback."""

import logging

import pytest

from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.risk.hazard import HorizonFit
from fleetcast.models.risk.record import RiskRecord
from fleetcast.models.risk.score import FleetMoment, FoldedEvents
from fleetcast.models.risk.site_risk import SITE_FILE, SiteFit
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.models.versions.card import Card, GateVerdict
from fleetcast.models.versions.drift import DriftLimits
from fleetcast.models.versions.registry import Registry
from fleetcast.service.pipeline.model_monitor import ModelMonitor
from fleetcast.service.pipeline.served_risk import ServedRisk, make_risk_shadow, summarise_recent_risk

NOW_MS = 1_900_000_000_000
GATE = GateVerdict(True, "log loss 20 % below the shipped fit", "log_loss", "shipped", 0.8, 1.0, 500)


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path)


@pytest.fixture
def watch():
    return FleetWatch(WindowStore(Entities()))


def add(registry, intercept, serve=True):
    """A version whose nodes fail with a probability of its own."""
    fit = SiteFit({"fail": {1: HorizonFit(intercept, {}), 7: HorizonFit(intercept, {})}})
    card = Card(kind="risk", created_ms=NOW_MS, made_by="a test", seed=0, fitted_until_ms=NOW_MS, gate=GATE)
    name = registry.add_version("risk", fit.save, card)
    if serve:
        registry.promote("risk", name)
    return name


def score(watch, now_ms=NOW_MS):
    topology = Topology.build([NodeSpec("n1", gpus=8)])
    return watch.score(FleetMoment(now_ms, topology, [], FoldedEvents(running=(), ended=(), nodes={}))).risk


def test_a_promoted_version_scores_and_a_rollback_brings_the_one_before_back(registry, watch):
    served = ServedRisk(registry, watch)
    served.refresh()
    assert score(watch).model.startswith("rules+logistic")
    add(registry, -6.0)
    served.refresh()
    assert score(watch).model == "risk-0001"
    add(registry, -3.0)
    served.refresh()
    assert score(watch).model == "risk-0002"
    registry.roll_back("risk")
    served.refresh()
    assert score(watch).model == "risk-0001"
    registry.roll_back("risk")
    served.refresh()
    assert score(watch).model.startswith("rules+logistic"), "what shipped serves again"


def test_a_damaged_version_gives_way_to_the_one_before_it(registry, watch, caplog):
    first, second = add(registry, -6.0), add(registry, -3.0)
    (registry.find_folder("risk", second) / SITE_FILE).write_text("{}")
    with caplog.at_level(logging.WARNING):
        ServedRisk(registry, watch).refresh()
    assert score(watch).model == f"risk-{first}"
    assert "is damaged" in caplog.text


def test_a_version_that_cannot_be_read_leaves_what_served_and_says_so_once(registry, watch, caplog):
    served = ServedRisk(registry, watch)
    add(registry, -6.0)
    served.refresh()
    (registry.root / "risk" / "current").write_bytes(b"\xff")
    with caplog.at_level(logging.WARNING):
        served.refresh()
        served.refresh()
    assert watch.site.name == "risk-0001"
    assert len([row for row in caplog.records if "cannot be read" in row.message]) == 1


def test_a_challenger_is_recorded_and_never_serves(registry, watch):
    served = ServedRisk(registry, watch)
    add(registry, -6.0)
    add(registry, -3.0, serve=False)
    served.refresh()
    assert (watch.site.name, watch.shadow.name) == ("risk-0001", "risk-0002")
    assert score(watch).model == "risk-0001"
    found = make_risk_shadow(watch.memory, watch.shadow)
    assert (found.kind, found.version, found.forecasts) == ("risk", "0002", 0)
    registry.choose_shadow("risk", "off")
    served.refresh()
    assert watch.shadow is None
    assert make_risk_shadow(watch.memory, None) is None


def test_models_lists_the_version_with_its_live_record(registry, watch):
    name = add(registry, -6.0)
    day = watch.memory.record
    assert isinstance(day, RiskRecord)
    day.count[2, 0], day.predicted[2, 0], day.seen[2, 0], day.squares[2] = 1000, 10, 20, 15.0
    recent = summarise_recent_risk(watch.memory)
    assert recent.n == 1000
    assert recent.loss_ratio == pytest.approx(15 / 1000 / (0.02 * 0.98), abs=1e-3)
    monitor = ModelMonitor(registry, DriftLimits())
    (row,) = monitor.review([], NOW_MS, risk=recent, loaded={"risk": f"risk-{name}"}).rows
    assert (row.kind, row.version, row.coverage_80, row.forecasts) == ("risk", name, None, 1000)
    assert monitor.review([], NOW_MS, risk=recent, loaded={"risk": "rules+logistic-1"}).rows == []
