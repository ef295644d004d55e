"""A model of GPU demand for capacity planning: steady level, bursts, and how long users wait.

    floor      the GPUs in use 99 % of the time
    bands      for each of several shares of time, the GPUs that are in use for at least that share
    burst      a time above the level that is exceeded for a quarter of the day. A burst shorter than the
               measured cold start is noise: GPUs ordered for it are ready only when it is over
    tolerated  the wait that requests state. If they state none, the wait after which a tenth of the jobs
               has given up (Kaplan-Meier: starts are censored)

Floor and bands use ten-minute bins of up to 35 days. They leave out the few bins in which the whole fleet
stood still. Bursts use the minutes of the last day. An unknown part is None and has a reason.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.job_records import JobRecord

Array = NDArray[np.float64]
Key = tuple[str, str]  # queue, class; "all" where it is not divided

EVERYTHING = "all"
FLOOR_SHARE = 0.99
BAND_SHARES = (0.95, 0.75, 0.5, 0.25, 0.05)
BURST_SHARE = 0.25
BIN_S, MINUTE_S = 600, 60
FEWEST_BINS = 6  # an hour
FEWEST_MINUTES = 60
FEWEST_RUNS = 5
FEWEST_COLD = 3
FEWEST_CHECKPOINTS = 3
FEWEST_GAVE_UP = 10
GIVE_UP_SHARE = 0.1
AWAY_SHARE = 0.1  # of the fleet's median: below it the fleet stands still
MOST_AWAY = 0.05  # of the time: more is a habit, which counts


@dataclass(frozen=True, slots=True)
class RunningGpus:
    """The GPUs held by the jobs of one queue and class: (bin,), oldest first, NaN if unknown."""

    minutes: Array
    ten_minute: Array


def make_demand_model(
    running: Mapping[Key, RunningGpus], records: Iterable[JobRecord], residency: Mapping[Key, tuple[float, float]]
) -> list[dict[str, Any]]:
    """Return the demand model: one row of the answer for each queue and class in `running`.

    `running` has the key (queue, "all") for each queue. residency: (queue, class) -> two shares of held GPU
    time: the share with a model loaded, and the share in which the GPUs compute.
    """
    of = _group_by_key(records)
    stood = {key: _find_idle_bins(running.get((EVERYTHING, EVERYTHING), running[key]).ten_minute) for key in running}
    return [_make_row(key, running, of, residency.get(key), stood[key]) for key in running]


def list_cold_starts(records: Iterable[JobRecord]) -> dict[Key, Array]:
    """Return (queue, class) -> (job,) the seconds from the start of each job to its first work.

    Keys with fewer than FEWEST_COLD known cold starts are left out.
    """
    found = {}
    for key, rows in _group_by_key(records).items():
        cold = _list_known_values(row.cold_s for row in rows)
        if len(cold) >= FEWEST_COLD:
            found[key] = cold
    return found


def _group_by_key(records: Iterable[JobRecord]) -> dict[Key, list[JobRecord]]:
    of = defaultdict(list)
    for row in records:
        for queue in {row.queue, EVERYTHING}:
            for class_ in (row.class_, EVERYTHING):
                of[queue, class_].append(row)
    return of


def _make_row(
    key: Key,
    running: Mapping[Key, RunningGpus],
    of: Mapping[Key, list[JobRecord]],
    residency: tuple[float, float] | None,
    stood_still: NDArray[np.bool_],
) -> dict[str, Any]:
    records, reasons = of.get(key, []), {}
    starts = _list_known_values(row.cold_s for row in records)
    cold = starts if len(starts) >= FEWEST_COLD else None
    is_known = np.isfinite(running[key].ten_minute)
    known = running[key].ten_minute[is_known & ~stood_still]
    parts = {
        "bands": _make_bands(known),
        "burst": summarise_bursts(running[key].minutes, cold),
        "mix": _compute_class_shares(key, running),
        "residency": "no GPU of such jobs reported its memory and its activity" if residency is None else residency,
        "duration_s": _summarise_durations(_list_known_values(row.run_s for row in records)),
        "tolerated_wait": estimate_tolerated_wait(records),
        "cold_start_s": _summarise_cold_starts(cold),
    }
    for name, part in parts.items():
        if isinstance(part, str):
            reasons[name] = part
    answered: dict[str, Any] = {name: None if name in reasons else part for name, part in parts.items()}
    if residency is not None:
        answered["residency"] = {"loaded_share": round(residency[0], 3), "active_share": round(residency[1], 3)}
    if answered["burst"] is not None and answered["burst"]["shortest_s"] is None:
        reasons["burst.shortest_s"] = "no cold start was measured" if cold is None else "all was noise"
    floor = find_held_gpus(known, FLOOR_SHARE) if "bands" not in reasons else None
    if floor is None:
        reasons["floor_gpus"] = reasons["bands"]
    head = {
        "queue": key[0],
        "pool": EVERYTHING,
        "class": key[1],
        "window_s": int(is_known.sum()) * BIN_S,
        "stood_still_s": int((is_known & stood_still).sum()) * BIN_S,
        "floor_gpus": floor,
    }
    return {**head, **answered, "reasons": reasons}


def _find_idle_bins(fleet: Array) -> NDArray[np.bool_]:
    """Return (bin,) whether nearly all jobs of the fleet were away, as in an outage or a maintenance.

    If nearly all jobs were away for more than MOST_AWAY of the time, such times are usual. Then the result is
    False everywhere. fleet: (bin,) running GPUs of all queues and classes.
    """
    known = fleet[np.isfinite(fleet)]
    away = fleet < AWAY_SHARE * np.median(known) if len(known) else np.zeros(len(fleet), bool)
    return away if away.sum() <= MOST_AWAY * len(known) else np.zeros(len(fleet), bool)


def _list_known_values(values: Iterable[float | None]) -> Array:
    return np.array([value for value in values if value is not None], np.float64)


def find_held_gpus(levels: Array, share: float) -> float:
    """Return the largest number of GPUs that are in use for at least `share` of the bins.

    >>> find_held_gpus(np.array([1.0, 2.0, 3.0, 4.0]), 0.5)
    3.0
    """
    return float(np.sort(levels)[::-1][max(0, int(np.ceil(share * len(levels) - 1e-9)) - 1)])


def _make_bands(known: Array) -> list[dict[str, float]] | str:
    if len(known) < FEWEST_BINS:
        return "less than an hour of history"
    return [{"share_of_time": share, "gpus": find_held_gpus(known, share)} for share in BAND_SHARES]


def summarise_bursts(minutes: Array, cold: Array | None) -> dict[str, float | None] | str:
    """Return facts about the bursts of the last day, or the reason why there are none.

    minutes: (minute,) running GPUs. cold: (job,) cold starts in seconds. Without cold starts, no burst counts as
    noise.

    ceiling_gpus: the highest level of a burst that is not noise. shortest_s: the length of the shortest burst
    that is not noise. noise_share: the part of the GPU time above the quarter-day level that is noise.
    """
    known = np.isfinite(minutes)
    if known.sum() < FEWEST_MINUTES:
        return "less than an hour of history"
    base = find_held_gpus(minutes[known], BURST_SHARE)
    above = np.where(known, minutes, -np.inf) > base
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(np.int8)))
    runs = edges.reshape(-1, 2)  # (burst, [first, end))
    if not len(runs):
        return "no burst in the last day"
    length_s = (runs[:, 1] - runs[:, 0]) * float(MINUTE_S)
    highest = np.array([minutes[first:end].max() for first, end in runs])
    extra = np.array([(minutes[first:end] - base).sum() for first, end in runs])
    if cold is None:
        return {"ceiling_gpus": float(highest.max()), "shortest_s": None, "noise_share": None}
    real = length_s >= float(np.median(cold))
    return {
        "ceiling_gpus": float(highest[real].max()) if real.any() else base,
        "shortest_s": float(length_s[real].min()) if real.any() else None,
        "noise_share": round(float(extra[~real].sum() / extra.sum()), 3),
    }


def _compute_class_shares(key: Key, running: Mapping[Key, RunningGpus]) -> dict[str, float] | str:
    """Return class -> its share of the queue's GPU time, or the reason why there is none.

    If the key names a single class, the result has the share of that class only.
    """
    total = np.nansum(running[key[0], EVERYTHING].ten_minute)
    if not total > 0:
        return "no GPU was in use"
    classes = [other for other in running if other[0] == key[0] and other[1] != EVERYTHING]
    chosen = classes if key[1] == EVERYTHING else [key]
    return {class_: round(float(np.nansum(running[queue, class_].ten_minute) / total), 3) for queue, class_ in chosen}


def _summarise_durations(runs: Array) -> dict[str, float] | str:
    if len(runs) < FEWEST_RUNS:
        return f"{len(runs)} jobs finished, at least {FEWEST_RUNS} are needed"
    p50, p90, p99 = np.quantile(runs, (0.5, 0.9, 0.99)).round(1).tolist()
    mean = float(runs.mean())
    return {"p50": p50, "p90": p90, "p99": p99, "cv": round(float(runs.std()) / mean, 2) if mean > 0 else 0.0}


def _summarise_cold_starts(cold: Array | None) -> dict[str, float] | str:
    if cold is None:
        return f"fewer than {FEWEST_COLD} jobs whose start was observed reported a step or their steady phase"
    p50, p90 = np.quantile(cold, (0.5, 0.9)).round(1).tolist()
    return {"p50": p50, "p90": p90}


def estimate_tolerated_wait(records: Sequence[JobRecord]) -> dict[str, float | None] | str:
    """Return the tolerated wait in seconds, and the number of jobs that start within one such wait.

    The number of jobs follows from the rate at which jobs have started. Returns the reason in words if the wait
    is unknown.
    """
    known_s = _list_known_values(row.tolerated_s for row in records)
    if len(known_s) >= FEWEST_CHECKPOINTS:
        wait_s: float | None = float(np.median(known_s))
    else:
        if sum(row.gave_up for row in records) < FEWEST_GAVE_UP:
            return f"requests do not say, and fewer than {FEWEST_GAVE_UP} were cancelled while they waited"
        wait_s = _find_give_up_wait(records)
    if wait_s is None:
        return "fewer than a tenth gave up however long they waited"
    starts = [row.started_ms for row in records if row.started_ms is not None]
    span_s = (max(starts) - min(starts)) / 1000 if len(starts) > 1 else 0.0
    return {"s": round(wait_s, 1), "jobs": round(wait_s * (len(starts) - 1) / span_s, 1) if span_s > 0 else None}


def _find_give_up_wait(records: Sequence[JobRecord]) -> float | None:
    """Return the seconds after which GIVE_UP_SHARE of the jobs have given up, or None if fewer ever do."""
    rows = sorted((row.waited_s, row.gave_up) for row in records if row.waited_s is not None)
    waited = np.array([wait for wait, _ in rows])
    gave_up = np.array([gone for _, gone in rows])
    staying = np.cumprod(1 - gave_up / np.arange(len(rows), 0, -1))
    gone = np.flatnonzero(staying <= 1 - GIVE_UP_SHARE)
    return float(waited[gone[0]]) if len(gone) else None
