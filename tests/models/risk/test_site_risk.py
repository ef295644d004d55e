"""Site risk: features of the past, signed weights, and how a site's fit joins what it does not know."""

import numpy as np
import pytest

from fleetcast.fleet.errors import ModelError
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeTable
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.risk.day_levels import HALF_MS, DayLevels
from fleetcast.models.risk.fault_log import FaultLog
from fleetcast.models.risk.hazard import HorizonFit
from fleetcast.models.risk.node_risk import ExcessHazard, compute_hazards
from fleetcast.models.risk.rules import ROW, RULES
from fleetcast.models.risk.score import FleetMoment, FoldedEvents, score_fleet
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS
from fleetcast.models.risk.site_risk import (
    DAY_MS,
    PAST_FEATURES,
    SITE_FEATURES,
    SITE_FILE,
    SiteFit,
    SiteRisk,
    compute_site_hazard,
    make_event_columns,
)
from fleetcast.models.risk.state import RiskState

NAMES = ("a", "b", "c")
NOW_MS = 1_800_000_000_000
FAIL, DRAIN = RISK_KINDS.index("fail"), RISK_KINDS.index("drain")


def fit(**weights):
    """A fit of failures: a tenth of a percent a day, four times as much a week."""
    return SiteFit({"fail": {1: HorizonFit(-6.9, weights), 7: HorizonFit(-5.5, weights)}})


def columns(nodes=3, **values):
    table = np.zeros((nodes, len(SITE_FEATURES)))
    for name, column in values.items():
        table[:, SITE_FEATURES.index(name)] = column
    return table


def events(*rows):
    table = NodeTable()
    for sequence, (node, type, days_ago, more) in enumerate(rows):
        time_ms = NOW_MS - round(days_ago * DAY_MS)
        table.apply(NodeEvent(node=node, source="s", sequence=sequence, time_ms=time_ms, type=type, **more))
    return table.nodes


def test_columns_say_what_events_told_and_nothing_of_later():
    records = events(
        ("a", "drain", 5, {}),
        ("a", "undrain", 3, {}),
        ("b", "health", 2, {"severity": "warning", "check": "fan"}),
        ("b", "health", 20, {"severity": "warning", "check": "fan"}),  # too long ago
        ("c", "drain", -1, {}),  # tomorrow
        ("elsewhere", "drain", 1, {}),
    )
    faults = FaultLog()
    faults.record_signals({"c": (NOW_MS - 30 * DAY_MS, True)}, 3, NOW_MS - 30 * DAY_MS)
    faults.record_signals({}, 3, NOW_MS)
    found = dict(zip(PAST_FEATURES, make_event_columns(faults, records, NAMES, NOW_MS).T, strict=True))
    assert found["drains_90d"].tolist() == pytest.approx([np.log(2), 0, 0])
    assert found["warnings_7d"].tolist() == pytest.approx([0, np.log(2), 0])
    assert found["faults_90d"].tolist() == pytest.approx([0, 0, np.log(2)])
    assert found["repair_30d"].tolist() == pytest.approx([np.exp(-0.1), 0, np.exp(-1)])


def test_a_negative_weight_lowers_the_hazard_of_a_repaired_node():
    found = compute_site_hazard(fit(repair_30d=-2.0), columns(repair_30d=[0.0, 0.5, 1.0]))
    day = found.hazard[FAIL, RISK_HORIZONS_S.index(86_400)]
    assert day[0] > day[1] > day[2]
    assert np.isnan(found.hazard[DRAIN]).all()  # a kind that was not fitted


def test_hazards_grow_with_the_horizon_whatever_the_evidence():
    rng = np.random.default_rng(0)
    site = compute_site_hazard(fit(link_flap=-3.0, repair_30d=2.0), rng.random((50, len(SITE_FEATURES))))
    parts = rng.random((3, 50, len(RULES))) * (rng.random((3, 50, len(RULES))) < 0.02)
    history = np.outer(np.array(RISK_HORIZONS_S) / 86_400, np.full(50, 0.004))
    found = compute_hazards(ExcessHazard(parts.sum(axis=2), parts), history, site)
    assert (np.diff(found, axis=1) >= -1e-12).all()
    assert (found >= 0).all()


def test_rules_that_the_site_never_saw_speak_as_they_did():
    """A site that knows link flaps takes them for nothing; a lost node is what it was."""
    parts = np.zeros((3, 2, len(RULES)))
    parts[FAIL, 0, ROW["link_flap"]], parts[FAIL, 1, ROW["node_lost"]] = 0.2, 3.0
    site = compute_site_hazard(fit(link_flap=0.01), columns(2, link_flap=[1.0, 0.0]))
    history = np.full((len(RISK_HORIZONS_S), 2), 0.004)
    found = compute_hazards(ExcessHazard(parts.sum(axis=2), parts), history, site)[FAIL]
    assert found[-2, 0] < 0.002  # a day: the site's own
    assert (found[:, 1] > 3.0).all()
    assert found[0, 0] == pytest.approx(found[-2, 0])  # an hour has at most its day's


def test_levels_fade_by_half_and_survive_a_snapshot():
    days = DayLevels()
    levels = np.zeros((2, len(RULES)))
    levels[0, ROW["link_flap"]] = 0.8
    days.record_levels(levels, ("a", "b"), NOW_MS)
    days.record_levels(np.zeros((2, len(RULES))), ("a", "b"), NOW_MS + HALF_MS)
    assert days.compute_levels(("b", "a", "new"), NOW_MS + HALF_MS)[:, ROW["link_flap"]].tolist() == pytest.approx(
        [0, 0.4, 0]
    )
    other = DayLevels()
    other.load(*days.dump())
    assert (
        other.compute_levels(("a", "b"), NOW_MS + 2 * HALF_MS) == days.compute_levels(("a", "b"), NOW_MS + 2 * HALF_MS)
    ).all()
    assert days.compute_levels(("a",), NOW_MS + 40 * HALF_MS).max() == 0


def test_a_fit_survives_its_file_and_a_broken_one_is_named(tmp_path):
    given = fit(repair_30d=-1.0)
    given.save(tmp_path)
    assert SiteFit.load(tmp_path) == given
    for text in ("{", '{"kinds": {"melt": {}}}', '{"kinds": {"fail": {"1": {"intercept": 0, "weights": {}}}}}'):
        (tmp_path / SITE_FILE).write_text(text)
        with pytest.raises(ModelError, match="site_risk"):
            SiteFit.load(tmp_path)


def test_the_service_scores_with_a_sites_fit_and_records_a_challenger_beside_it():
    topology = Topology.build([NodeSpec(name, gpus=8) for name in NAMES])
    records = events(("a", "undrain", 1, {}), ("b", "health", 0.1, {"severity": "warning", "check": "fan"}))
    state = RiskState()

    def score(now_ms, **fits):
        moment = FleetMoment(now_ms, topology, [], FoldedEvents(running=(), ended=(), nodes=records))
        return score_fleet(moment, state, **fits).risk

    site, challenger = SiteRisk(fit(health_degraded=0.1), "risk-0002"), SiteRisk(fit(), "risk-0003")
    shipped = score(NOW_MS)
    own = score(NOW_MS + 10_000, site=site, shadow=challenger)
    assert (shipped.model.startswith("rules"), own.model) == (True, "risk-0002")
    day = RISK_HORIZONS_S.index(86_400)
    assert own.values[FAIL, day, 1] < 0.002 < shipped.values[FAIL, day, 1]  # to this site a warning means little
    assert own.values[DRAIN, day, 1] == pytest.approx(shipped.values[DRAIN, day, 1])
    assert state.shadow.model == "risk-0003"
    assert state.shadow.waiting
    before = state.shadow
    score(NOW_MS + 20_000, site=site, shadow=challenger)
    assert state.shadow is before
    score(NOW_MS + 30_000, site=site, shadow=SiteRisk(fit(), "risk-0004"))
    assert (state.shadow is before, state.shadow.model) == (False, "risk-0004")
