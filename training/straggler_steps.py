"""Judging step times: slowdowns of 10 to 60 % over 20 to 600 steps, put by seed into the step times of real runs.

The series are the runs of `faults/megatron_step_times` that recorded at least FEWEST steps, every step or every n-th
alike. A seed draws half of them to tune on; only the other half is judged, each as it was (false alarms) and with
slowdowns drawn (recall, delay). The real runs were slow at times, too: `natural_spells` marks where, from both sides,
which no live rule can see. Alarms there are counted apart, and no slowdown is put there.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fleet.events import Step
from fleet.jobs import JobAttempt
from models.steps import pace_of
from training.results import Results
from training.straggler_metrics import Table

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Rule = Callable[[Array], Mask]
Say = Callable[[str], None]

FILE = "faults/megatron_step_times/step_times.parquet"
KEY = ("suite", "test_case", "platform")
FEWEST = 50
WARM_UP = 30  # no slowdown begins before
SHORTEST, LONGEST = 20, 600
LEAST, MOST = 0.10, 0.60
DRAWS = 3
NEAR = 8
QUIET = 0.05  # robust spread of step times up to which a series is called quiet
TEN_THOUSAND = 10_000


def read_series(data: Path) -> dict[str, Array]:
    """Name -> seconds of each run, in order of step."""
    path = data / FILE
    if not path.exists():
        return {}
    table = pq.read_table(path).to_pandas()
    runs = table.groupby(list(KEY), observed=True)
    series = {"/".join(key): run.sort_values("step").iteration_time_s.to_numpy(np.float64) for key, run in runs}
    return {name: seconds for name, seconds in series.items() if len(seconds) >= FEWEST and (seconds > 0).all()}


def halves(names: list[str], seed: int) -> tuple[list[str], list[str]]:
    """(to tune on, to judge on), drawn by seed."""
    order = np.random.default_rng(seed).permutation(len(names))
    ordered = [sorted(names)[row] for row in order.tolist()]
    return ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]


def natural_spells(seconds: Array, width: int = 5, ratio: float = 1.05, before: int = 24) -> Mask:
    """(step,) whether a run was slow of itself: most of the 5 steps around it take longer than the 24 calm ones before.

    By 5 % and by 3 robust sigmas of the series around its running median, so most of 3 steps in a row count.
    """
    log = np.log(seconds)
    padded = np.pad(log, width // 2, mode="edge")
    running = np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=1)
    margin = max(float(np.log(ratio)), 3 * 1.4826 * float(np.median(np.abs(log - running))))
    slow = np.zeros(len(log), bool)
    usual = float(np.median(log[:NEAR]))
    for at in range(NEAR, len(log)):
        calm = log[max(0, at - before) : at][~slow[max(0, at - before) : at]]
        usual = float(np.median(calm)) if len(calm) else usual
        slow[at] = running[at] > usual + margin
    return slow


def ours(seconds: Array) -> Mask:
    """(step,) whether the pace that is served calls the job slow after each step."""
    attempt, pace, now_ms = JobAttempt("judged", 1), None, 0
    slow = np.zeros(len(seconds), bool)
    for number, duration_s in enumerate(seconds.tolist()):
        now_ms += int(duration_s * 1000)
        attempt.fold(Step(job="judged", sequence=number, time_ms=now_ms, step=number, duration_s=duration_s))
        pace = pace_of(attempt, pace)
        slow[number] = pace.slow
    return slow


def change_point(seconds: Array) -> Mask:
    """(step,) Greyhound's rule: a change of mean of more than 10 %, more than 10 steps ago, posterior above .8.

    The posterior compares one mean with two over the last 60 steps (normal values, BIC), |z| > 3 dropped (Greyhound,
    Wu et al., ATC 2025, whose detector is Bayesian, too); it stays until a change back.
    """
    slow = np.zeros(len(seconds), bool)
    usual = None
    for at in range(len(seconds)):
        window = seconds[max(0, at - 59) : at + 1]
        deviation = window.std()
        window = window[np.abs(window - window.mean()) <= 3 * deviation] if deviation > 0 else window
        if usual is not None and np.median(window[-5:]) > 1.05 * usual:
            slow[at] = True
            continue
        usual = None
        split = _best_split(window) if len(window) >= 22 else None
        if split is not None and split[1] > 1.10 * split[0]:
            usual, slow[at] = split[0], True
    return slow


def _best_split(window: Array) -> tuple[float, float] | None:
    """(mean before, mean after) the likeliest change with more than 10 steps on either side; None below .8."""
    count = len(window)
    sums, squares = np.cumsum(window), np.cumsum(window**2)
    cut = np.arange(11, count - 10)
    left = squares[cut - 1] - sums[cut - 1] ** 2 / cut
    right = (squares[-1] - squares[cut - 1]) - (sums[-1] - sums[cut - 1]) ** 2 / (count - cut)
    whole = squares[-1] - sums[-1] ** 2 / count
    gain = count / 2 * np.log(max(whole, 1e-12) / np.maximum(left + right, 1e-12)) - np.log(count)
    best = int(gain.argmax())
    if 1 / (1 + np.exp(-np.clip(gain[best], -50, 50))) <= 0.8:
        return None
    at = int(cut[best])
    return float(window[:at].mean()), float(window[at:].mean())


def static(ratio: float) -> Rule:
    """A step is slow that takes longer than `ratio` times the median of all steps before."""

    def rule(seconds: Array) -> Mask:
        usual = [np.inf] * 10 + [float(np.median(seconds[:at])) for at in range(10, len(seconds))]
        return np.asarray(seconds > ratio * np.array(usual))

    return rule


RULES: dict[str, Rule] = {
    "ours": ours,
    "Greyhound-style change point": change_point,
    "static 1.1x": static(1.1),
    "static 1.5x": static(1.5),
}


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Steps [first, last) take `factor` times as long."""

    first: int
    last: int
    factor: float

    def on(self, seconds: Array) -> Array:
        """The series with it, up to its end."""
        made = seconds[: self.last].copy()
        made[self.first :] *= self.factor
        return made


def draw_slowdowns(seconds: Array, spells: Mask, rng: np.random.Generator, draws: int = DRAWS) -> list[Slowdown]:
    """Some slowdowns where the run was not slow of itself; those that would reach into such a spell are left out."""
    drawn = []
    for _ in range(draws):
        first = int(rng.integers(WARM_UP, len(seconds) - SHORTEST + 1))
        length = int(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
        one = Slowdown(first, min(len(seconds), first + length), 1 + rng.uniform(LEAST, MOST))
        if not spells[max(0, first - 2 * NEAR) : one.last].any():
            drawn.append(one)
    return drawn


@dataclass(slots=True)
class _Tally:
    """Of one rule. delays: steps to each slowdown's alarm, NaN where there was none; quiet: the series was."""

    steps: int = 0
    false: int = 0
    natural: int = 0
    delays: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    quiet: list[bool] = field(default_factory=list)


def judge_steps(series: dict[str, Array], results: Results, seed: int, say: Say) -> None:
    """Rows of every rule, judged on the same series and the same slowdowns."""
    _, names = halves(sorted(series), seed)
    tallies = {method: _Tally() for method in RULES}
    for number, name in enumerate(names):
        spells = natural_spells(series[name])
        slowdowns = draw_slowdowns(series[name], spells, np.random.default_rng([seed, number]))
        for method, rule in RULES.items():
            _watch(tallies[method], rule, series[name], spells, slowdowns)
        if number % 25 == 24:
            say(f"step times: {number + 1} of {len(names)} series")
    table = Table(results, "megatron_step_times", "slowdown")
    for method, tally in tallies.items():
        _rows(table, method, tally)


def _watch(tally: _Tally, rule: Rule, seconds: Array, spells: Mask, slowdowns: list[Slowdown]) -> None:
    log = np.log(seconds)
    quiet = 1.4826 * float(np.median(np.abs(log - np.median(log)))) < QUIET
    tally.steps += len(seconds)
    for alarm in _alarms(rule(seconds)):
        natural = bool(spells[max(0, alarm - NEAR) : alarm + 3].any())
        tally.natural += natural
        tally.false += not natural
    for one in slowdowns:
        slow = rule(one.on(seconds))
        alarms = np.flatnonzero(slow[one.first :])
        seen = len(alarms) > 0 and not slow[one.first - 1]
        tally.delays.append(float(alarms[0]) + 1 if seen else np.nan)
        tally.factors.append(one.factor)
        tally.quiet.append(quiet)


def _alarms(slow: Mask) -> list[int]:
    """Steps at which it became slow."""
    return np.flatnonzero(slow & ~np.concatenate(([False], slow[:-1]))).tolist()


def _rows(table: Table, method: str, tally: _Tally) -> None:
    delay, factor, quiet = np.array(tally.delays), np.array(tally.factors), np.array(tally.quiet, bool)
    seen = np.isfinite(delay)
    groups = {
        "all": np.ones(len(delay), bool),
        "quiet series": quiet,
        "noisy series": ~quiet,
        "10-20 %": factor < 1.2,
        "20-60 %": factor >= 1.2,
    }
    for series, rows in groups.items():
        table.share("recall", method, int(seen[rows].sum()), int(rows.sum()), series)
        table.median("delay_steps", method, delay[rows].tolist(), series)
    exposure = tally.steps / TEN_THOUSAND
    table.rate("false_alarms_per_10000_steps", method, tally.false, exposure)
    table.rate("natural_spells_per_10000_steps", method, tally.natural, exposure)
