"""Compare load peaks with persistence, on seeded days of jobs, hour by hour.

    python -m tests.models.jobs.spike_windows        # a JSON line a kind of load

Every minute each method forecasts the sum of a rack's jobs at the minute that the row names. The outcome is the mean
reading of that minute. The loss is the pinball loss of p50 and p90. Persistence says the last sum for both.
"""

import json
from collections.abc import Callable

import numpy as np

from fleetcast.models.jobs.level import shift_to_present_level
from fleetcast.models.jobs.spikes import MINUTE_MS, JobLoad, predict_spikes

INTERVAL_S, A_MINUTE, RECENT = 15, 4, 40
HOURS, JOBS = 8, 6
BINS = HOURS * 3600 // INTERVAL_S
RACK = ("rack", "r1")
Prepare = Callable[[np.ndarray], np.ndarray]


def steady(rng: np.random.Generator) -> np.ndarray:
    return 4000 + rng.normal(0, 80, (JOBS, BINS))


def steps(rng: np.random.Generator) -> np.ndarray:
    """Jobs change their level every half hour to two hours."""
    load = np.empty((JOBS, BINS))
    for row in load:
        at = 0
        while at < BINS:
            lasts = int(rng.integers(120, 480))
            row[at : at + lasts] = rng.uniform(1000, 6000)
            at += lasts
    return load + rng.normal(0, 80, load.shape)


def ramps(rng: np.random.Generator) -> np.ndarray:
    """Slow waves, as of serving."""
    phase = rng.uniform(0, 2 * np.pi, (JOBS, 1))
    return 3000 + 2000 * np.sin(phase + np.arange(BINS) * 2 * np.pi / 960) + rng.normal(0, 80, (JOBS, BINS))


def plateaus(rng: np.random.Generator) -> np.ndarray:
    """Jobs rise or fall for ten minutes to an hour, and then stay as long."""
    load = np.empty((JOBS, BINS))
    for row in load:
        at, level = 0, float(rng.uniform(1000, 6000))
        while at < BINS:
            lasts, to = int(rng.integers(40, 240)), float(rng.uniform(1000, 6000))
            path = np.concatenate([np.linspace(level, to, lasts), np.full(lasts, to)])
            row[at : at + 2 * lasts] = path[: BINS - at]
            at, level = at + 2 * lasts, to
    return load + rng.normal(0, 80, load.shape)


def swings(rng: np.random.Generator) -> np.ndarray:
    """Steps of training: half of the readings high, half low."""
    return np.where(rng.random((JOBS, BINS)) < 0.5, 1500.0, 5000.0)


def dips(rng: np.random.Generator) -> np.ndarray:
    """Checkpoints: half a minute low every ten."""
    phase = rng.integers(0, 40, (JOBS, 1))
    return np.where((np.arange(BINS) + phase) % 40 < 2, 800.0, 5000.0) + rng.normal(0, 80, (JOBS, BINS))


def gang(rng: np.random.Generator) -> np.ndarray:
    """All jobs step together: a restart of the rack."""
    return np.repeat(steps(rng)[:1], JOBS, axis=0)


LOADS = {one.__name__: one for one in (steady, steps, ramps, plateaus, swings, dips, gang)}


def ratios(load: np.ndarray, prepare: Prepare = shift_to_present_level) -> np.ndarray:
    """(hour,) loss over persistence's loss. load: (job, reading) W."""
    total = load.sum(axis=0)
    minute = total.reshape(-1, A_MINUTE).mean(axis=1)
    ours, theirs = np.zeros(HOURS), np.zeros(HOURS)
    for at in range(12, len(minute) - 16):
        seen = load[:, at * A_MINUTE - RECENT : at * A_MINUTE]
        loads = [JobLoad(str(n), {RACK: 1.0}, {"power_w": prepare(row)}) for n, row in enumerate(seen)]
        (row,) = predict_spikes(loads, at * MINUTE_MS, {}, np.random.default_rng(at))
        outcome = minute[row.peak_ms // MINUTE_MS]
        last = total[at * A_MINUTE - 1]
        ours[at // 60] += pinball(row.p50, outcome, 0.5) + pinball(row.p90, outcome, 0.9)
        theirs[at // 60] += pinball(last, outcome, 0.5) + pinball(last, outcome, 0.9)
    return ours / theirs


def pinball(said: float, came: float, level: float) -> float:
    return max(level * (came - said), (level - 1) * (came - said))


def main() -> None:
    for name, make in LOADS.items():
        for method, prepare in (("last ten minutes", lambda values: values), ("present level", shift_to_present_level)):
            found = np.stack([ratios(make(np.random.default_rng(seed)), prepare) for seed in range(3)])
            numbers = {"mean": found.mean().round(3), "worst": found.max().round(3)}
            print(json.dumps({"load": name, "readings": method, **numbers}))


if __name__ == "__main__":
    main()
