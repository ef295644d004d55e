"""Step times of real runs: the false-alarm floor, and a job whose slow worker is known. Skipped without the data."""

import os
from pathlib import Path

import numpy as np
import pytest

from fleetcast.training.sets.operation_traces import read_traces
from fleetcast.training.sets.straggler_steps import find_natural_spells, read_series
from fleetcast.training.sets.straggler_steps import flag_by_pace as slow_steps
from fleetcast.training.sets.straggler_traces import score_by_serving_rule

DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[2] / "../shared/data"))
MEGATRON = DATA / "faults" / "megatron_step_times" / "step_times.parquet"
BYTEDANCE = DATA / "faults" / "straggler_bytedance" / "trace-AR.parquet"


@pytest.mark.skipif(not MEGATRON.exists(), reason="no Megatron step times under FLEETCAST_DATA")
def test_accepted_runs_raise_few_alarms():
    runs = [seconds for seconds in read_series(DATA, []).values() if len(seconds) == 100][::3]  # a third, to be quick
    false = natural = 0
    for seconds in runs:
        slow, spells = np.array(list(slow_steps(seconds))), find_natural_spells(seconds)
        for at in np.flatnonzero(slow[1:] & ~slow[:-1]).tolist():
            near = bool(spells[max(0, at - 7) : at + 4].any())
            natural += near
            false += not near
    # A few of these runs do slow down by 20 % to 2,000 %, some of them for good; nothing else may ring.
    assert sum(map(len, runs)) > 1000
    assert false == 0
    assert 0 < natural <= 8


@pytest.mark.skipif(not BYTEDANCE.exists(), reason="no ByteDance trace under FLEETCAST_DATA")
def test_the_slow_worker_of_a_production_job_is_named_in_every_step():
    (trace,) = read_traces(DATA, [])
    found = score_by_serving_rule(trace.seconds)
    assert np.argwhere(found.all(axis=0)).tolist() == [[0, 0]]  # replica 0, stage 0, as its authors found
    assert (found > 0).sum() == len(found)
