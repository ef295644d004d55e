"""Hours of a small fleet through the real pipeline: what it keeps is bounded by what there is, not by what was.

`make soak` runs two days of a larger one; the assertions are the same.
"""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from fleetcast.benchmarks.ticks.soak import SoakSite

GPUS, TICK_S = int(os.environ.get("FLEETCAST_SOAK_GPUS", "256")), 600
HOURS = int(os.environ.get("FLEETCAST_SOAK_HOURS", "7"))
RESTS_AFTER_H = 2


@pytest.mark.integration
@pytest.mark.timeout(6 * 3600)  # it is all computing: how long it takes says how busy the machine is
def test_hours_of_coming_and_going_leave_no_more_than_there_is(tmp_path: Path) -> None:
    site = SoakSite(GPUS, tmp_path)
    hours = list(site.run_hours(HOURS, TICK_S))
    pipeline, state = site.pipeline, site.pipeline.state
    live = len(site.mill.running) + len(state.jobs.list_queued())
    ended_lately = max(later.jobs_at_rest - before.jobs_at_rest for before, later in pairwise(hours))
    awake = live + (RESTS_AFTER_H + 1) * ended_lately
    assert hours[-1].jobs_at_rest > 10, "no job was laid to rest"
    assert all(hour.jobs_awake <= awake for hour in hours)
    assert len(state.jobs.latest) <= awake
    assert len(state.demand.dump()[0]["known"]) <= awake
    assert len(pipeline.memory.paces) <= awake
    assert len(pipeline.memory.streaks) == 0
    assert not any(attempt.steps for attempt in state.jobs if attempt.over_ms is not None)
    assert [path.name.isdigit() for path in (tmp_path / "snapshot").iterdir()] == [True, True]
    assert max(len(list(path.glob("*/*"))) for path in (tmp_path / "snapshot").iterdir()) <= 2 * 60 + 2
    grown = [later.objects - before.objects for before, later in pairwise(hours[4:])]
    assert sum(grown) / len(grown) < 10 * GPUS, f"objects by hour: {[hour.objects for hour in hours]}"
