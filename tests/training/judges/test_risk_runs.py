"""Ranks and warnings of simulated faults, from scores made by hand: one node warns of its fault, another does not."""

import numpy as np
import pytest

from fleetcast.training.judges.risk_runs import EVERY_MS, WatchedRun, add_run_rows
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.fault_runs import RunTruth

HOUR_MS = 3_600_000
NODES = ("n0", "n1", "n2")


def watched():
    """Eight hours; n0 is suspected from twenty minutes before its fault at hour 4, n2 is never."""
    time_ms = np.arange(0, 8 * HOUR_MS, EVERY_MS)
    p = np.full((len(time_ms), 3), 0.01)
    p[(time_ms >= 4 * HOUR_MS - 20 * EVERY_MS), 0] = 0.6
    return WatchedRun(time_ms, p, p > 0.1)


def rows_of(*faults):
    results = Results("risk")
    add_run_rows(results, "faults/simulated/own", watched(), NODES, faults, 0.05, 0)
    return {(row.series, row.method, row.metric): row for row in results.rows}


def test_what_led_up_is_warned_of_and_what_did_not_is_not():
    led = RunTruth("ecc_storm", "n0", 4 * HOUR_MS, None, precursor=True)
    sudden = RunTruth("node_lost", "n2", 6 * HOUR_MS, 7 * HOUR_MS)
    rows = rows_of(led, sudden)
    assert rows["all", "truth", "precursor_share"].value == 0.5
    assert rows["with precursor", "ours", "warned_share"].value == 1
    assert rows["with precursor", "ours", "lead_s"].value == 1200
    assert rows["without precursor", "ours", "warned_share"].value == 0
    assert ("without precursor", "ours", "lead_s") not in rows
    assert rows["with precursor", "ours", "auroc"].value == pytest.approx(0.5 + 0.5 * 20 / 60)  # of 60 minutes 20
    assert rows["without precursor", "ours", "auroc"].value == 0.5
    low = rows["with precursor", "ours", "auroc"].low
    assert low is not None
    assert low <= rows["with precursor", "ours", "auroc"].value


def test_minutes_in_which_a_fault_lasts_are_neither_right_nor_wrong():
    led = RunTruth("ecc_storm", "n0", 4 * HOUR_MS, None, precursor=True)
    again = RunTruth("ecc_storm", "n0", 6 * HOUR_MS, None, precursor=True)  # while the first one lasts
    assert rows_of(led, again)["all", "ours", "auroc"].n == 60


def test_the_minutes_after_a_repair_are_neither() -> None:
    seen = watched()
    seen.p[(seen.time_ms >= 4 * HOUR_MS) & (seen.time_ms < 4 * HOUR_MS + 15 * EVERY_MS), 1] = 0.9  # until 5 after it
    results = Results("risk")
    faults = (
        RunTruth("node_lost", "n1", 4 * HOUR_MS, 4 * HOUR_MS + 5 * EVERY_MS),
        RunTruth("ecc_storm", "n2", 0, 1),
    )
    add_run_rows(results, "own", seen, NODES, faults, 0.05, 0)
    (above,) = results.select(metric="quiet_share_above_alarm")
    quiet = 3 * 480 - 60 - 15 - 11  # n1's hour before, its fault and 10 minutes after; n2's likewise
    suspected = 240 + 20  # n0
    assert above.value == pytest.approx(suspected / quiet)
