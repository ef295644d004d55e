"""The rhythm of a job's pauses, from telemetry alone, over hours."""

import asyncio

import msgspec
import numpy as np
import pytest

from fleetcast.features.job_past import LONGEST_MS, JobPast, extend_past
from fleetcast.features.job_window import GPU_METRICS, JobWindow
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import Checkpoint
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.service.answers.fingerprints import Fingerprint
from fleetcast.service.pipeline.jobs.fingerprints import Fingerprints
from tests.service.api.routes.test_fingerprints import NOW_MS, start, tell, world

DEFAULT = ("tensor_active", "gpu_util", "power_w", "energy_j")  # what exporters send without a list of their own
SLOT_MS = 15_000


def fingerprint_after(hours: float, period_s: float, pause_s: float, reports: bool = False) -> Fingerprint:
    """Return the answer for a job of two GPUs, looked at every ten minutes while it runs."""
    state, clock = world(), ManualClock(NOW_MS)
    tell(state, *start("train", "n1", 0, 1))
    prints = Fingerprints(clock)
    rng = np.random.default_rng(3)
    joules = 1e9
    for slot in range(round(hours * 3600 / 15)):
        time_ms = NOW_MS + slot * SLOT_MS
        fine_s = slot * 15.0 - np.arange(15)
        works = fine_s % period_s >= pause_s
        watts = np.where(works, 600.0, 120.0) + 5 * rng.standard_normal(15)
        joules += float(watts.sum())
        values = (0.4 * works[0], 0.03 + 0.94 * works[0], float(watts[0]), joules)
        batch = SampleBatch(
            EntityKind.GPU,
            np.repeat([find_metric_row(EntityKind.GPU, name) for name in DEFAULT], 2).astype(np.int16),
            np.tile(np.arange(2, dtype=np.int32), len(DEFAULT)),
            np.full(2 * len(DEFAULT), time_ms, np.int64),
            np.repeat(values, 2),
        )
        state.store.write(batch, time_ms)
        state.store.advance(time_ms)
        if reports and slot % 80 == 10:
            tell(state, Checkpoint(job="train", sequence=10 + slot, time_ms=time_ms, edge="begin"))
        if slot % 40 == 39:
            clock.advance((time_ms - clock.now_ms()) / 1000)
            asyncio.run(prints.run_pass(state))
    return prints.answers["train", 1].fingerprint


def test_a_job_that_pauses_every_240_s_has_a_period_within_half_an_hour() -> None:
    found = fingerprint_after(0.5, 240, 20)
    assert found.period_s == pytest.approx(240, rel=0.02)
    assert found.period_basis == "telemetry"


def test_a_checkpoint_every_40_minutes_is_found_over_hours_and_the_next_one_is_expected() -> None:
    found = fingerprint_after(3.0, 2400, 8)
    assert found.pause_every_s == pytest.approx(2400, rel=0.02)
    assert (found.checkpoint_every_basis, found.pause_reason) == ("telemetry", "")
    assert found.checkpoint_every_s == pytest.approx(2400, rel=0.02)
    assert found.next_checkpoint_ms is not None


def test_what_a_job_reports_wins_over_its_telemetry() -> None:
    found = fingerprint_after(2.0, 600, 20, reports=True)
    assert found.checkpoint_every_basis == "told"
    assert found.checkpoint_every_s == pytest.approx(1200)
    assert found.pause_every_s == pytest.approx(600, rel=0.02)


def test_too_short_a_past_is_named_as_the_reason() -> None:
    found = fingerprint_after(0.5, 2400, 60)
    assert found.pause_every_s is None
    assert "3 times are needed" in found.pause_reason


def window(first_slot: int, slots: int, watts: float) -> JobWindow:
    gpu = np.full((len(GPU_METRICS), slots, 1), np.nan, np.float32)
    gpu[GPU_METRICS.index("power_w")] = watts
    return JobWindow(15.0, first_slot * SLOT_MS, [gpu], np.full(slots, np.nan, np.float32), 1)


def test_a_past_grows_by_windows_and_ends_after_three_hours() -> None:
    past: JobPast | None = None
    for turn in range(20):
        past = extend_past(past, window(100 * turn, 120, float(turn)))
    assert past is not None
    assert past.values.shape[1] == LONGEST_MS // SLOT_MS
    assert past.compute_end_ms(15.0) == (1900 + 120) * SLOT_MS
    assert past.values[0, -121] == 18.0  # the newer window wins where two overlap


def test_a_past_with_a_hole_starts_again() -> None:
    past = extend_past(extend_past(None, window(0, 120, 1.0)), window(500, 120, 2.0))
    assert (past.first_ms, past.values.shape[1]) == (500 * SLOT_MS, 120)


def test_a_fingerprint_keeps_its_contract() -> None:
    found = msgspec.to_builtins(fingerprint_after(0.2, 240, 20))
    assert found["pause_every_s"] is None
    assert found["pause_reason"]
