"""Laws of the risk of a gang: it grows with the gang and with the time, and domains tie members together."""

import numpy as np
import pytest

from fleetcast.fleet.shared_domains import interpolate_hazard
from fleetcast.models.risk.gang_risk import compute_gang_risk
from fleetcast.models.risk.node_risk import compute_published_risk, compute_usual_risk
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS

HOUR_S = 3600.0
SHAPE = (len(RISK_KINDS), len(RISK_HORIZONS_S))
USUAL = np.tile(1 - np.exp(-4.2e-3 * np.array(RISK_HORIZONS_S) / 86_400), (len(RISK_KINDS), 1))


def node_risk(*p):
    """(kind, horizon, node) with these probabilities within an hour, growing with the horizon."""
    hour = -np.log1p(-np.array(p))
    day = USUAL[:, :, None]
    return 1 - np.exp(-(np.broadcast_to(hour, (*SHAPE, len(p))) - np.log1p(-day)))


def risk_of(risk, duration_s=HOUR_S, domains=(), heat=None):
    return compute_gang_risk(risk, domains, duration_s, USUAL, heat)


@pytest.mark.parametrize("nodes", [0, 1, 5])
@pytest.mark.filterwarnings("error")
def test_what_no_node_knows_of_a_kind_or_horizon_is_the_published_risk_and_never_nan(nodes):
    risk = np.full((*SHAPE, nodes), 0.25)
    risk[:, 1:] = np.nan  # of one horizon something is known
    risk[0, 0, :1] = np.nan
    found = compute_usual_risk(risk)
    assert np.isfinite(found).all()
    assert (found[:, 1:] == compute_published_risk()[:, 1:]).all()
    assert nodes < 2 or (found[:, 0] == 0.25).all()
    assert nodes == 0 or np.isfinite(compute_gang_risk(risk, (), HOUR_S, found).p_interrupted)


def test_a_gang_survives_when_every_member_does():
    risk = node_risk(0.1, 0.3, 0.02)
    alone = np.array([risk_of(risk[:, :, [at]]).p_interrupted for at in range(3)])
    found = risk_of(risk)
    assert found.p_interrupted == pytest.approx(1 - np.prod(1 - alone))
    assert found.weakest == 1
    assert found.node == pytest.approx(alone)


def test_more_nodes_and_more_time_never_lower_the_risk():
    rng = np.random.default_rng(4)
    for _ in range(30):
        n = int(rng.integers(2, 12))
        risk = np.sort(rng.random((*SHAPE, n)) ** 4, axis=1)
        risk[:, :, rng.random(n) < 0.2] = np.nan
        racks, heat = [f"r{rng.integers(3)}" for _ in range(n)], rng.uniform(50, 95, n)
        found = [
            risk_of(risk[:, :, :m], HOUR_S, [("rack", racks[:m]), ("power", ["p"] * m)], heat[:m])
            for m in range(1, n + 1)
        ]
        longer = [risk_of(risk, hours * HOUR_S, [("rack", racks)], heat) for hours in (0.2, 1, 3, 5, 20, 24, 100, 400)]
        for rows in (found, longer):
            assert (np.diff([row.p_interrupted for row in rows]) >= 0).all()
            assert (np.diff([row.p_slow for row in rows]) >= 0).all()
            assert all(0 <= row.p_interrupted <= 1 for row in rows)


def test_a_shared_domain_adds_to_the_risk_and_is_named_with_its_part():
    risk = node_risk(0.2, 0.001, 0.001)
    apart = risk_of(risk, domains=[("rack", ["a", "b", ""])])
    together = risk_of(risk, domains=[("rack", ["a", "a", "b"]), ("rail", ["x", "", "x"])])
    assert apart.domains == ()
    assert apart.p_interrupted == risk_of(risk).p_interrupted
    assert together.p_interrupted > apart.p_interrupted
    assert [(row.level, row.name, row.nodes) for row in together.domains] == [("rack", "a", 2), ("rail", "x", 2)]
    assert 0 < sum(row.share for row in together.domains) < 1


def test_a_hot_node_starts_its_next_job_slow_and_nothing_else():
    risk = node_risk(0.001, 0.001)
    cold, hot = (risk_of(risk, heat=np.array([60.0, c])) for c in (60.0, 88.0))
    assert hot.p_slow > cold.p_slow
    assert hot.p_interrupted == cold.p_interrupted


def test_a_node_that_nobody_knows_counts_as_an_ordinary_one():
    unknown = risk_of(np.full((*SHAPE, 1), np.nan), 86_400.0)
    assert unknown.p_interrupted == pytest.approx(1 - np.exp(-4.2e-3))


def test_hazards_meet_their_horizons_and_go_on_beyond_the_last():
    p = node_risk(0.05)[0]
    for at, horizon_s in enumerate(RISK_HORIZONS_S):
        assert 1 - np.exp(-interpolate_hazard(p, RISK_HORIZONS_S, horizon_s)) == pytest.approx(p[at])
    week = RISK_HORIZONS_S[-1]
    one, two, three = (interpolate_hazard(p, RISK_HORIZONS_S, weeks * week) for weeks in (1, 2, 3))
    step = two - one
    assert step == pytest.approx(three - two)
    assert step > 0


def test_the_hazard_of_a_gang_of_a_whole_fleet_stays_finite():
    n = 20_000
    racks = [f"r{at // 8}" for at in range(n)]
    found = risk_of(node_risk(*np.full(n, 0.01)), domains=[(level, racks) for level in ("rack", "power", "rail")])
    assert len(found.domains) == 3 * n // 8
    assert found.p_interrupted == 1
    assert found.hazard == pytest.approx(n * (0.01005 + 4.2e-3 / 24 + 3 * 0.01005 / 80), rel=0.01)
