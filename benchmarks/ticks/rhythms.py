"""The share of jobs whose rhythm `fleetcast.features.period` finds, and the share of wrong answers.

Jobs pause for 3 to 97 % of a period of 60 s to 40 min, drawn by seed, with scrapes every 15 s.
`exporter default`: activity, utilisation, momentary watts and the energy counter. `momentary`:
without the counter. The peer is the autocorrelation alone, which needs a series that swings for
much of the time.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.features.period import find_period, find_swing_period

SIZES = (300,)  # jobs of each case and seed
SEEDS = (1, 2, 3)
INTERVAL_S, FINE = 15.0, 60
PERIODS_S, WORKS = (60.0, 2400.0), (0.03, 0.97)
SPANS = {"half an hour": 120, "three hours": 720}  # samples
RIGHT = 0.03  # of the period

Array = NDArray[np.float64]


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield three records for each case: no answer, wrong answers, and ms an answer.

    `no answer` is a share of the jobs whose pause lasts at least a scrape. `wrong answers` is a share
    of the answers.
    """
    for jobs in sizes:
        for span, samples in SPANS.items():
            for exporters, points in (("exporter default", 4), ("momentary", 3)):
                yield from _measure_case(f"{exporters}, {span}", jobs, samples, points)


def _measure_case(case: str, jobs: int, samples: int, points: int) -> Iterator[dict[str, Any]]:
    given, right, before, before_right, each_ms = [], [], [], [], []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        shown, good, old, old_good, visible = 0, 0, 0, 0, 0
        answers, old_answers = 0, 0
        spent_s = 0.0
        for _ in range(jobs):
            period_s = float(np.exp(rng.uniform(*np.log(PERIODS_S))))
            works = float(rng.uniform(*WORKS))
            channels, means = make_readings(rng, period_s, works, samples)
            began = time.process_time()
            found = find_period(channels[:points], INTERVAL_S, means[:points]).period_s
            spent_s += time.process_time() - began
            alone = find_swing_period(channels[:points], INTERVAL_S).period_s
            is_visible = min(works, 1 - works) * period_s >= INTERVAL_S
            visible += is_visible
            shown, old = shown + (is_visible and found is not None), old + (is_visible and alone is not None)
            answers, old_answers = answers + (found is not None), old_answers + (alone is not None)
            good += found is not None and abs(found / period_s - 1) <= RIGHT
            old_good += alone is not None and abs(alone / period_s - 1) <= RIGHT
        assert answers, "no job got an answer"
        given.append(shown / visible)
        before.append(old / visible)
        right.append(good / answers)
        before_right.append(old_good / max(old_answers, 1))
        each_ms.append(1000 * spent_s / jobs)
    size = {"jobs": jobs, "seeds": len(SEEDS)}
    cpu_s = sum(each_ms) * jobs / 1000
    peers = [("autocorrelation alone", 1 - float(np.mean(values))) for values in (before, before_right)]
    unanswered, wrong = 1 - float(np.mean(given)), 1 - float(np.mean(right))
    yield make_record("rhythms", f"{case}: no answer", size, [unanswered], "share", cpu_s=cpu_s, peer=peers[0])
    yield make_record("rhythms", f"{case}: wrong answers", size, [wrong], "share", cpu_s=cpu_s, peer=peers[1])
    yield make_record("rhythms", f"{case}: an answer", size, each_ms, "ms", cpu_s=cpu_s)


def make_readings(
    rng: np.random.Generator, period_s: float, works: float, samples: int
) -> tuple[Array, NDArray[np.bool_]]:
    """Return (channel, sample) readings, and (channel,) whether a channel is a mean over the interval.

    The channels are activity, utilisation, watts, and watts by energy. works: the share of the period
    in which the job works.
    """
    first_s = rng.uniform(0, period_s)
    at_s = np.arange(1, samples + 1) * INTERVAL_S
    fine_s = at_s[:, None] - (np.arange(FINE) + 0.5) / FINE * INTERVAL_S
    now = ((at_s + first_s) % period_s < works * period_s).astype(np.float64)
    mean = ((fine_s + first_s) % period_s < works * period_s).mean(axis=1)
    levels = np.stack([0.02 + 0.55 * now, 0.03 + 0.94 * now, 120 + 480 * now, 120 + 480 * mean])
    return levels * (1 + 0.02 * rng.standard_normal(levels.shape)), np.array([False, False, False, True])
