"""Shadows are scored and never serve; a forecaster that was replaced begins with a clean record."""

import numpy as np

from fleetcast.models.demand.gate import Gate
from fleetcast.models.forecast import QUANTILES

DAYS = 12
HOUR = 6


def run(gate: Gate, days: int = DAYS) -> None:
    """`oracle` knows what comes, persistence does not: values alternate between days."""
    values = np.where(np.arange(days * 144 + 6) // 3 % 2, 100.0, 20.0)
    for bin in range(days * 144):
        gate.score_bin(bin, values[[bin]])
        if bin % 3 == 0:
            spread = np.linspace(-2.0, 2.0, len(QUANTILES))
            raw = np.stack([values[bin] + spread, values[bin + 3] + spread])
            gate.issue_forecast(bin, raw[:, :, None, None])


def test_who_wins_serves_and_a_shadow_that_wins_does_not() -> None:
    raw = np.stack([np.full(len(QUANTILES), 20.0), np.full(len(QUANTILES), 100.0)])[:, :, None, None]
    champion, shadowed = (
        Gate(["persistence", "oracle"], [3], ["s"]),
        Gate(["persistence", "oracle"], [3], ["s"], shadows=["oracle"]),
    )
    for gate in (champion, shadowed):
        run(gate)
    assert champion.make_served_forecast(raw).model.tolist() == [["oracle"]]
    assert shadowed.make_served_forecast(raw).model.tolist() == [["persistence"]]
    for gate in (champion, shadowed):
        losses = gate.compute_mean_losses()
        assert losses["persistence"][0] == 1.0
        assert losses["oracle"][0] < 0.1
        assert losses["oracle"][1] > 500


def test_a_replaced_forecaster_has_no_record() -> None:
    gate = Gate(["persistence", "oracle"], [3], ["s"])
    run(gate)
    mean = gate.compute_mean_losses()["mean"]
    gate.reset_forecaster("oracle")
    assert gate.compute_mean_losses()["oracle"] == gate.compute_mean_losses()["persistence"]
    assert gate.compute_mean_losses()["mean"] == mean
    assert mean[0] < 0.5
    raw = np.zeros((2, len(QUANTILES), 1, 1))
    assert gate.make_served_forecast(raw).model.tolist() == [["mean"]]
