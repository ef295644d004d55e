"""The words of `fleetcast drift`."""

import numpy as np

from fleetcast.cli.lab.drift import _describe_drifted_features, _explain_no_refit
from fleetcast.models.versions.card import Card
from fleetcast.models.versions.drift import RecentAccuracy, compare_features, judge_drift
from fleetcast.training.fits.drift_report import FeatureDrift

CARD = Card(kind="demand", version="0003", created_ms=0, made_by="a test", seed=0, fitted_until_ms=0)


def test_a_version_without_matured_forecasts_is_not_called_fine() -> None:
    drift = judge_drift(CARD, RecentAccuracy(n=12), 0)
    assert _explain_no_refit(drift, 1) == (
        "demand 0003 need not be fitted again: its age is within its limit; 12 of its forecasts have matured, its "
        "errors are judged from 200 on; features that drifted ask for nothing by themselves"
    )
    drift = judge_drift(CARD, RecentAccuracy(0.8, 0.9, 400), 0)
    assert (
        _explain_no_refit(drift, 0)
        == "demand 0003 need not be fitted again: its errors and its age are within their limits"
    )


def test_a_set_says_what_drifted_and_what_cannot_be_told() -> None:
    rng = np.random.default_rng(0)
    before, now = rng.normal(size=(2000, 2)), rng.normal(size=(500, 2)) + 4.0
    now[8:, 1] = np.nan
    said = _describe_drifted_features(
        FeatureDrift("venus running", compare_features(("a", "b"), before, now), ("a", "b"), before, now)
    )
    assert said.startswith("1 of 2 features drifted: a (PSI ")
    assert said.endswith("; of 1 too few rows to say (as few as 7 independent rows): their PSI may be chance")
