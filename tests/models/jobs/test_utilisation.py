import numpy as np

from fleetcast.fleet.events import Step
from fleetcast.models.jobs.utilisation import compute_mfu, measure_use

H100 = "NVIDIA H100 80GB HBM3"


def step(tokens: int | None, rank: int | None = None) -> Step:
    return Step(job="a", sequence=1, time_ms=0, step=1, duration_s=2.0, tokens=tokens, rank=rank)


def test_mfu_is_told_or_the_reason_why_not() -> None:
    assert compute_mfu([step(1_978_000)], 1e9, 2, H100).value == 0.5
    assert "3 times what its GPUs can do" in compute_mfu([step(11_868_000)], 1e9, 2, H100).reason
    assert "no model reported" in compute_mfu([step(1_000)], 1e9, 2, "").reason
    assert "whole step" in compute_mfu([step(None), step(1_000, rank=3)], 1e9, 2, H100).reason
    for odd in (0.0, -1.0, float("nan"), float("inf")):
        assert "no number above 0" in compute_mfu([step(1_000)], odd, 2, H100).reason


def test_a_job_that_looks_busy_and_computes_little() -> None:
    full = np.ones((60, 2))
    use = measure_use(15.0, 0.0625 * full, 0.0 * full, full, 4e10 * full, [])
    assert (use.verdict, use.busy, use.sm_active) == ("busy_but_little_work", 1.0, 0.0625)
    assert measure_use(15.0, np.nan * full, np.nan * full, np.nan * full, np.nan * full, []).verdict == "unknown"


def test_what_was_idle_before_the_window_counts_only_if_it_was_so_throughout() -> None:
    nothing, worked = np.zeros((120, 1)), np.zeros((120, 1))
    worked[60] = 1.0
    held = np.full((120, 1), 4e10)
    idle = measure_use(1.0, nothing, nothing, nothing, held, [], 1680.0)
    assert (idle.verdict, idle.idle_s, idle.span_s) == ("abandoned", 1800.0, 120.0)
    assert measure_use(1.0, worked, worked, worked, held, [], 1680.0).idle_s == 59.0
    assert measure_use(15.0, nothing, nothing, nothing, held, []).span_s == 600.0
