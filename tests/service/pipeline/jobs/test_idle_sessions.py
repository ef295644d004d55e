"""Sessions that do nothing: for how long is known beyond what the rings hold, at any interval."""

import asyncio

import numpy as np
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.service.pipeline.jobs.fingerprints import Fingerprints
from fleetcast.service.pipeline.state import FleetState
from tests.service.api.routes.test_fingerprints import NOW_MS, start, tell, world


def pass_by(
    state: FleetState, prints: Fingerprints, clock: ManualClock, interval_s: int, spans: list[tuple[int, float]]
) -> None:
    """Spans of (s, activity of a GPU that holds memory), with a look at the end of each."""
    metrics = np.array([find_metric_row(EntityKind.GPU, name) for name in ("sm_active", "fb_used_bytes")], np.int16)
    for span_s, activity in spans:
        times = clock.now_ms() + 1000 * np.arange(0, span_s, interval_s)
        for some in np.array_split(times, -(-len(times) // 10)):
            many = len(some)
            values = np.repeat([activity, 2.0**34], many)
            columns = np.repeat(metrics, many), np.zeros(2 * many, np.int32), np.tile(some, 2).astype(np.int64)
            state.store.write(SampleBatch(EntityKind.GPU, *columns, values), int(some[-1]))
        clock.advance(span_s)
        state.store.advance(clock.now_ms())
        asyncio.run(prints.run_pass(state))


@pytest.mark.parametrize("interval_s", [1, 10, 15])
def test_a_session_is_abandoned_after_half_an_hour_however_short_the_window(interval_s: int) -> None:
    state, clock = world(interval_s), ManualClock(NOW_MS)
    tell(state, *start("nb", "n1", 0))
    prints = Fingerprints(clock)
    pass_by(state, prints, clock, interval_s, [(30, 0.9), *[(90, 0.0)] * 10])
    use = prints.answers["nb", 1].use
    assert (use.verdict, use.idle_s) == ("idle", pytest.approx(900, abs=2 * interval_s))
    pass_by(state, prints, clock, interval_s, [(105, 0.0)] * 9)
    use = prints.answers["nb", 1].use
    assert (use.verdict, use.idle_s) == ("abandoned", pytest.approx(1845, abs=2 * interval_s))
    assert use.idle_s > 1800  # what the alert waits for
    pass_by(state, prints, clock, interval_s, [(60, 0.9), (30, 0.0)])
    assert prints.answers["nb", 1].use.idle_s <= 30


def test_idleness_that_nobody_watched_is_not_made_up() -> None:
    state, clock = world(1), ManualClock(NOW_MS)
    tell(state, *start("nb", "n1", 0))
    prints = Fingerprints(clock)
    pass_by(state, prints, clock, 1, [(90, 0.0), (300, 0.0)])  # a window is two minutes
    assert prints.answers["nb", 1].use.idle_s == 120
    assert prints.answers["nb", 1].use.span_s == 120
