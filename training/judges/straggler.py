"""`fleetcast evaluate straggler`: is a slow job detected, and is the right unit blamed?

Our rules are compared with fair baselines. There are three kinds of truth: traces of single
operations with a known slow worker (`faults/straggler_bytedance`), real step times to which
slowdowns are added at random (`faults/megatron_step_times`), and simulated fleets with faults and
look-alikes (`faults/simulated`, from `fleetcast simulate faults`). Nothing is fitted, and only the
test folder is judged.
"""

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from fleetcast.training.reports.results import Results
from fleetcast.training.sets.dropped import find_dropped_metrics
from fleetcast.training.sets.fault_runs import read_fault_runs
from fleetcast.training.sets.operation_traces import FOLDER as TRACES
from fleetcast.training.sets.operation_traces import read_traces
from fleetcast.training.sets.straggler_fleets import judge_fleets
from fleetcast.training.sets.straggler_steps import judge_steps, read_series
from fleetcast.training.sets.straggler_traces import judge_trace

Say = Callable[[str], None]


def evaluate(train: Path, test: Path, seed: int, say: Say, drop: Collection[str] = ()) -> Results:
    """Evaluate straggler detection on every set of the test folder.

    `train` is not read, because the rules learn from the job that they observe. drop: telemetry that is
    left out (see `sets.dropped`). If any is left out, only fleets are judged, because the other sets have no
    telemetry.
    """
    del train
    results = Results("straggler")
    if not drop:
        _judge_steps(test, results, seed, say)
    runs = read_fault_runs(test, skipped=results.skipped, without=find_dropped_metrics(drop))
    if runs:
        judge_fleets(runs, results, seed, say)
    else:
        results.skipped.append(f"faults/simulated: no runs in {test}; `fleetcast simulate faults` makes some")
    return results


def _judge_steps(test: Path, results: Results, seed: int, say: Say) -> None:
    traces = read_traces(test, results.skipped)
    for trace in traces:
        judge_trace(trace, results, np.random.default_rng(seed))
        say(f"{TRACES}: judged {trace.name}")
    if not traces and not any((test / TRACES).glob("trace-*.parquet")):
        results.skipped.append(f"{TRACES}: no trace-*.parquet in {test}")
    series = read_series(test, results.skipped)
    if series:
        judge_steps(series, results, seed, say)
