import numpy as np
import pytest

from fleetcast.features.fingerprint import compute_shape, estimate_class_odds
from fleetcast.features.period import Period

NO_PERIOD = Period(None, "nothing repeats")


def likely(activity: float, tensor: float, exchange: float, host: float, period: Period = NO_PERIOD) -> str:
    flat = np.ones(100)
    odds = estimate_class_odds(compute_shape(activity * flat, tensor * flat, exchange * flat, host * flat, period))
    assert sum(odds.values()) == pytest.approx(1.0)
    return max(odds, key=lambda name: odds[name])


def test_classes_of_the_usual_kinds() -> None:
    assert likely(0.6, 0.2, 9e9, 7e7) == "training"
    assert likely(0.2, 0.03, 0.0, 3e8) == "inference"
    assert likely(0.0, 0.0, 0.0, 5e5) == "idle"
    assert likely(0.5, 0.12, 5e10, 2e9, Period(3.5, "", 0.9)) == "training"


def test_unknown_channels_do_not_decide_alone() -> None:
    odds = estimate_class_odds(
        compute_shape(np.full(50, 0.6), np.full(50, np.nan), np.full(50, np.nan), np.full(50, 1e7), NO_PERIOD)
    )
    assert 0.5 < odds["training"] < 0.9
