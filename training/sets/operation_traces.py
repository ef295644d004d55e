"""Traces of single operations of production jobs, with the results that their authors published.

They are in `faults/straggler_bytedance`. `trace-NAME.parquet` has an operation in each row
(dp_rank, stage, step, optype, start_ts and duration in seconds, mb_id). `result-NAME.json` and
`mw-NAME.json`, which may be missing, have the authors' slowdowns and the share of the worst
workers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fleetcast.models.stragglers.what_if import OP_TYPES

Array = NDArray[np.float64]

FOLDER = "faults/straggler_bytedance"
TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
COLUMNS = ("optype", "dp_rank", "stage", "mb_id", "step", "start_ts", "duration")
MOST_CELLS = 2e8
SLOW_JOB = 1.10  # a job that is slower than its ideal by less has no culprit
EXPLAINED = 0.5  # the least share of the slowdown that the worst worker must explain to be one


@dataclass(frozen=True, slots=True)
class OperationTrace:
    """The times of all operations of one job.

    seconds: (step, replica, stage, type, micro-batch), NaN if there was no such operation. order: the schedule of
    each stage. answers: the authors' results, None if unknown. culprit: the slow worker (replica, stage) in these
    results, None if unknown.
    """

    name: str
    seconds: Array
    order: tuple[tuple[tuple[int, int], ...], ...]
    transfer_s: float
    answers: Mapping[str, Any] | None
    culprit: tuple[int, int] | None


def read_traces(data: Path, skipped: list[str]) -> list[OperationTrace]:
    """Read every trace below a data folder, by name.

    The reason for each file that cannot be read is added to `skipped`.
    """
    traces = []
    for path in sorted((data / FOLDER).glob("trace-*.parquet")):
        try:
            traces.append(_read_trace_file(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # ArrowInvalid is a ValueError
            skipped.append(f"{FOLDER}/{path.name}: not a trace of operations ({_describe_error(error)})")
    return traces


def _describe_error(error: Exception) -> str:
    """Return one line about an error that a library or an unexpected file raised."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _read_trace_file(path: Path) -> OperationTrace:
    table = pq.read_table(path)
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing or not table.num_rows:
        raise ValueError(f"no column {', '.join(missing)}" if missing else "no rows")
    kind = np.asarray(table.column("optype").combine_chunks().dictionary_encode().cast("string").to_numpy(False))
    columns = {name: table.column(name).to_numpy() for name in ("dp_rank", "stage", "mb_id", "step")}
    starts, lasts = (table.column(name).to_numpy().astype(np.float64) for name in ("start_ts", "duration"))
    numbers, step = np.unique(columns["step"], return_inverse=True)
    replica, stage, micro = (columns[name].astype(np.int64) for name in ("dp_rank", "stage", "mb_id"))
    if min(replica.min(), stage.min()) < 0 or not (np.isfinite(lasts).all() and np.isfinite(starts).all()):
        raise ValueError("a rank or stage below 0, or a time that is no number")
    shape = (len(numbers), int(replica.max()) + 1, int(stage.max()) + 1, len(OP_TYPES), int(micro.max()) + 1)
    if np.prod(shape, dtype=np.float64) > MOST_CELLS:
        raise ValueError(f"steps, replicas, stages, types and micro-batches {shape}: more than can be held")
    seconds, began = np.full(shape, np.nan), np.full(shape, np.nan)
    for row, name in enumerate(OP_TYPES):
        at = (kind == name) & (micro >= 0)
        where = (step[at], replica[at], stage[at], row, micro[at])
        seconds[where], began[where] = lasts[at], starts[at]
    if not np.isfinite(seconds).any():
        raise ValueError(f"no operation {' or '.join(OP_TYPES)}")
    moved = lasts[np.isin(kind, TRANSFERS)]
    answers, culprit = _read_answers(path)
    if culprit is not None and not (culprit[0] < shape[1] and culprit[1] < shape[2]):
        raise ValueError(f"its result blames worker {culprit}, which is not in it")
    transfer_s = float(np.quantile(moved, 0.05)) if len(moved) else 0.0
    return OperationTrace(
        path.stem.removeprefix("trace-"), seconds, _find_schedules(began), transfer_s, answers, culprit
    )


def _find_schedules(began: Array) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return, for each stage, the order of operations that its first replica ran in the first step."""
    _, _, stages, _, micros = began.shape
    orders = []
    for stage in range(stages):
        flat = began[0, 0, stage].ravel()
        orders.append(tuple(divmod(int(at), micros) for at in np.argsort(flat)[: int(np.isfinite(flat).sum())]))
    return tuple(orders)


def _read_answers(path: Path) -> tuple[Mapping[str, Any] | None, tuple[int, int] | None]:
    """Return the authors' results, and the (replica, stage) of the worker that they blame.

    The worker is None if the job is not slow, or if slow workers do not explain its slowness. Both are None if
    the result file is missing.
    """
    result = path.with_name(path.stem.replace("trace-", "result-") + ".json")
    worst = path.with_name(path.stem.replace("trace-", "mw-") + ".json")
    if not result.exists():
        return None, None
    answers: Mapping[str, Any] = json.loads(result.read_bytes())
    explained = float(json.loads(worst.read_bytes())["Mw"]) if worst.exists() else 1.0
    if answers["blocking_slowdown"] < SLOW_JOB or explained < EXPLAINED:
        return answers, None
    by_replica, by_stage = answers["blocking_decompose_by_dp_rank"], answers["blocking_decompose_by_stage"]
    return answers, (int(max(by_replica, key=by_replica.get)), int(max(by_stage, key=by_stage.get)))
