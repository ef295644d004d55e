"""Forecasts of node load are judged against what the nodes did, as the service would have issued them."""

from pathlib import Path

import numpy as np
import pytest

from fleetcast.simulator.faults.fault_file import DrawTable, FaultFile, FleetTable
from fleetcast.simulator.instrument import simulate_faults
from fleetcast.training.judges.node_load import OURS, NodeLoadRun, compute_losses, evaluate

METHODS = {OURS, "last_value", "last_value_spread", "mean_30m_spread"}


def test_a_loss_is_that_of_the_ten_minutes_after_a_forecast() -> None:
    use = np.array([[0.0], [0.4], [0.6], [0.5], [0.5]])  # two rounds are ten minutes
    levels = {OURS: np.array([[0.5], [0.5]])}
    seen = NodeLoadRun(np.arange(5) * 300_000, use, {0: levels, 1: levels, 3: levels})
    found = compute_losses(seen, 300.0)
    assert found[OURS, "mae"] == pytest.approx([0.0, 0.05])  # of the last one only one round came
    assert found[OURS, "pinball_90"] == pytest.approx([(0.01 + 0.09) / 2, 0.09 / 2])


def test_a_simulated_fleet_is_judged_by_hours_beside_the_last_value(tmp_path: Path) -> None:
    file = FaultFile(hours=2.0, interval_s=30.0, fleet=FleetTable(nodes=6, rack_nodes=6), draw=DrawTable(scale=0.0))
    simulate_faults(file, tmp_path)
    results = evaluate(tmp_path, tmp_path, 0, lambda line: None)
    values = {(row.method, row.metric): row.value for row in results.rows}
    assert {method for method, _ in values} == METHODS
    assert all(value is not None and 0 <= value < 1 for value in values.values())
    assert len({row.begin_ms for row in results.windows}) == 2
    assert not results.skipped


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    results = evaluate(tmp_path, tmp_path, 0, lambda line: None)
    assert not results.rows
    assert "simulate faults" in results.skipped[0]
