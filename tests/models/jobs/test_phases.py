import numpy as np

from fleetcast.models.jobs.phases import PHASES, JobLevels, PhaseRule


def said(levels: JobLevels) -> list[str]:
    return [PHASES[code] for code in PhaseRule().classify_phases(levels)]


def run(scale: float = 1.0, age_s: float = 0.0) -> JobLevels:
    """Seconds: 5 without memory, 15 loading, 200 computing, 20 evaluating, 10 writing, 100 computing, 10 given back."""
    activity = np.repeat([0.0, 0.0, 0.8, 0.4, 0.0, 0.8, 0.0], [5, 15, 200, 20, 10, 100, 10]) * scale
    memory = np.concatenate([np.zeros(5), np.linspace(1, 40, 15), np.full(330, 40.0), np.full(10, 4.0)]) * scale
    exchange = np.repeat([0.0, 0.0, 1e10, 0.0, 0.0, 1e10, 0.0], [5, 15, 200, 20, 10, 100, 10]) * scale
    host = np.repeat([1e6, 1e8, 1e7, 1e7, 5e9, 1e7, 0.0], [5, 15, 200, 20, 10, 100, 10]) * scale
    return JobLevels(1.0, activity, memory, exchange, host, age_s)


def test_a_run_goes_through_its_phases() -> None:
    phases = said(run())
    assert [phases[at] for at in (2, 12, 30, 100, 230, 245, 300, 355)] == [
        "init", "loading", "warmup", "steady", "evaluation", "checkpoint", "steady", "cooldown",
    ]  # fmt: skip
    assert phases.count("warmup") == 30


def test_levels_are_relative_to_the_job_itself() -> None:
    assert said(run(0.5)) == said(run())


def test_a_phase_is_told_from_the_past_alone() -> None:
    whole = run()
    cut = JobLevels(1.0, whole.activity[:241], whole.memory_gib[:241], whole.exchange[:241], whole.host[:241])
    assert said(cut) == said(whole)[:241]


def test_an_old_job_does_not_warm_up_again() -> None:
    busy = np.full(60, 0.8)
    level = JobLevels(15.0, busy, busy * 50, busy, busy, age_s=86_400.0)
    assert set(said(level)) == {"steady"}


def test_missing_readings_are_no_pause_of_memory() -> None:
    whole = run()
    memory = np.where(np.arange(360) % 7 == 0, np.nan, whole.memory_gib)
    gaps = JobLevels(1.0, whole.activity, memory, whole.exchange, whole.host)
    assert said(gaps)[40:220] == said(whole)[40:220]
