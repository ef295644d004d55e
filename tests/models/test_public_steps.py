"""Step times of real runs: the false-alarm floor, and a job whose slow worker is known. Skipped without the data."""

import os
from pathlib import Path

import numpy as np
import pytest

from fleet.events import Started, Step, StepParts
from fleet.jobs import JobAttempt, JobTable
from fleet.requests import RankPlacement
from models.steps import pace_of, slow_worker

DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[2] / "../shared/data"))
MEGATRON = DATA / "faults" / "megatron_step_times" / "step_times.parquet"
BYTEDANCE = DATA / "faults" / "straggler_bytedance" / "trace-AR.parquet"


@pytest.mark.skipif(not MEGATRON.exists(), reason="no Megatron step times under FLEETCAST_DATA")
def test_accepted_runs_raise_few_alarms():
    import pandas as pd

    table = pd.read_parquet(MEGATRON)
    runs = [run.sort_values("step").iteration_time_s for _, run in table.groupby(["suite", "test_case", "platform"])]
    steps = alarms = 0
    for run in [run for run in runs if len(run) == 100][::3]:  # a third of them, to be quick
        seconds = run.to_numpy()
        attempt, pace, now_ms = JobAttempt("j", 1), None, 0
        for number, duration_s in enumerate(seconds.tolist()):
            now_ms += int(duration_s * 1000)
            attempt.fold(Step(job="j", sequence=number, time_ms=now_ms, step=number, duration_s=duration_s))
            before, pace = pace, pace_of(attempt, pace)
            alarms += pace.slow and not (before and before.slow)
        steps += len(seconds)
    # A few of these runs do slow down by 20 % to 2,000 % and stay so; nothing else may ring.
    assert steps > 1000
    assert alarms <= 3


@pytest.mark.skipif(not BYTEDANCE.exists(), reason="no ByteDance trace under FLEETCAST_DATA")
def test_the_slow_worker_of_a_production_job_is_named():
    import pandas as pd

    trace = pd.read_parquet(BYTEDANCE)
    compute = trace[trace.optype.isin(["forward-compute", "backward-compute"])]
    seconds = compute.groupby(["step", "stage", "dp_rank"], observed=True).duration.sum()
    whole = trace.assign(end=trace.start_ts + trace.duration).groupby("step").end.max()
    jobs = JobTable()
    jobs.apply(Started(job="ar", sequence=0, time_ms=0, ranks=tuple(RankPlacement(r, f"n{r}") for r in range(16))))
    stages = int(trace.stage.max()) + 1
    sequence, now_ms = 1, 0
    named = []
    for step in sorted(trace.step.unique()):
        now_ms += int(whole[step] * 1000)
        for (stage, dp), compute_s in seconds[step].items():
            rank = int(dp) * stages + int(stage)
            parts = StepParts(compute=float(compute_s), communication=max(0.0, float(whole[step] - compute_s)))
            jobs.apply(
                Step(
                    job="ar", sequence=sequence, time_ms=now_ms, step=int(step), rank=rank, stage=int(stage),
                    duration_s=float(whole[step]), parts=parts,
                )
            )  # fmt: skip
            sequence += 1
        named.append(slow_worker(jobs.get("ar"))[0])
    assert set(named[3:]) == {0}  # stage 0, replica 0, as its authors found
    assert np.all([rank is None for rank in named[:2]])
