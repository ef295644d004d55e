"""How long a comparison must hold: samples count, not the ticks between them, and a lost scrape is no pause."""

import pytest

from fleetcast.models.risk.signals import Signal
from fleetcast.models.stragglers.gang_signals import GangStreaks

SLOW = Signal("gang_outlier", 0, "n001", 1200.0, 1980.0)


@pytest.mark.parametrize(("interval_s", "seconds"), [(15.0, 30), (30.0, 30), (60.0, 60)])
def test_ticks_that_see_one_sample_again_raise_nothing(interval_s: float, seconds: int) -> None:
    streaks = GangStreaks(interval_s)
    raised = [at for at in range(0, 120, 10) if streaks.filter_sustained_signals([SLOW], 1_000_000 + at * 1000)]
    assert raised[0] == seconds


def test_a_lost_scrape_is_no_pause_where_they_come_once_a_minute() -> None:
    streaks = GangStreaks(60.0)
    assert streaks.filter_sustained_signals([SLOW], 60_000) == []
    assert streaks.filter_sustained_signals([], 120_000) == []
    (seen,) = streaks.filter_sustained_signals([SLOW], 180_000)
    assert seen.since_ms == 60_000


def test_what_is_intended_is_said_at_once() -> None:
    cap = Signal("power_cap", 0, "n001", 1700.0, 1980.0)
    assert [seen.rule for seen in GangStreaks().filter_sustained_signals([cap, SLOW], 60_000)] == ["power_cap"]
