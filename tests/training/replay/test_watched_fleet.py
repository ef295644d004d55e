"""The whole way from exporter pages to scores, on a small simulated fleet in process."""

import numpy as np

from fleetcast.cli.lab.train import simulate_rows
from fleetcast.cli.lab.watch import SimulatedJobs
from fleetcast.models.risk.node_risk import score_nodes
from fleetcast.simulator.faults.faults import FaultSettings
from fleetcast.simulator.faults.magnitudes import DECOY_KINDS
from fleetcast.training.replay.dataset import PageObserver

START_MS = 1_750_000_000_000
SCRAPE_MS = 15_000


def watch(fleet, scrapes):
    """(time, flagged nodes) at each scrape, and the last answer about stragglers."""
    observer = PageObserver(fleet.topology)
    log, stragglers = [], {}
    for scrape in range(scrapes):
        now_ms = START_MS + scrape * SCRAPE_MS
        events = fleet.advance_to(now_ms)
        evidence = observer.watch.collect_evidence(observer.apply_pages(fleet.read_pages(), events, now_ms))
        scores = score_nodes(evidence.signals, evidence.known, now_ms, None)
        flagged = {
            fleet.topology.names[row] for row, action in scores.actions.items() if action.code not in ("none", "watch")
        }
        log.append((now_ms, flagged))
        stragglers = observer.detect_stragglers(evidence, now_ms)
    return log, stragglers


def test_a_throttling_gpu_is_flagged_within_a_minute_and_holds_its_gang_back():
    fleet = SimulatedJobs(4, 4, FaultSettings())
    begins_ms = START_MS + 30 * SCRAPE_MS
    fleet.fleet.faults.inject("thermal_throttle", "n002", 3, begins_ms, end_ms=START_MS + 10**9, hard=True, tau_s=20.0)
    log, stragglers = watch(fleet, 45)
    (record,) = [row for row in fleet.fleet.faults.list_records() if row.kind == "thermal_throttle"]
    first_ms = next(now_ms for now_ms, flagged in log if flagged)
    assert {node for _, flagged in log for node in flagged} == {"n002"}
    assert record.visible_ms <= first_ms <= record.visible_ms + 60_000
    (slow,) = [body for body in stragglers.values() if body["slow"]]
    assert slow["culprit"]["name"] == "n002/3"


def test_decoys_are_not_flagged():
    fleet = SimulatedJobs(5, 6, FaultSettings(decoy_every_s=30.0))
    log, _ = watch(fleet, 60)
    assert {row.kind for row in fleet.fleet.faults.list_records()} == set(DECOY_KINDS)
    assert all(not flagged for _, flagged in log)


def test_the_same_seed_gives_the_same_rows():
    first, again = (simulate_rows(3, 0.05, 3, 3600.0) for _ in range(2))
    assert len(first) == 3 * 3  # nodes, minutes
    assert np.array_equal(first.levels, again.levels)
    assert np.array_equal(first.labels, again.labels)
