"""An evaluation on step times: slowdowns are added at random to the step times of real runs.

A slowdown is 10 to 60 % over 20 to 600 steps. The series are the runs of
`faults/megatron_step_times` that recorded at least FEWEST steps, either every step or every n-th
one. A hash of the name decides which runs may be tuned on and which are judged. A judged run is
played as it was (false alarms) and with drawn slowdowns (recall, delay). Some real runs were slow
by themselves. `find_natural_spells` finds these spells from the steps before and after, which no
live rule can see. Alarms in them are counted apart, their steps do not count as exposure, and no
slowdown is added there.

Most runs recorded 50 to 100 steps, so a run is extended with blocks of its own calm steps. Long
healthy runs are made in the same way, and their false alarms have rows of their own. Because blocks
repeat, their bound is an optimistic one.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fleetcast.fleet.events import Step
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.stragglers.steps import measure_pace
from fleetcast.training.judges.straggler_metrics import Table
from fleetcast.training.reports.results import Results

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Rule = Callable[[Array], Iterator[bool]]  # seconds of each step -> whether the job is called slow after it
Say = Callable[[str], None]

FILE = "faults/megatron_step_times/step_times.parquet"
KEY = ("suite", "test_case", "platform")
FEWEST = 50
WARM_UP = 30  # no slowdown begins before
SHORTEST, LONGEST = 20, 600
LEAST, MOST = 0.10, 0.60
DRAWS = 3
NEAR = 8
BLOCK = 16  # steps that are continued with together
CONTINUED = 500  # steps of a continued healthy run
QUIET = 0.05  # robust spread of step times up to which a series is called quiet
IN_TIME = 0.20, 3, 60.0  # a slowdown of so much must show within so many steps or seconds
TEN_THOUSAND = 10_000


def read_series(data: Path, skipped: list[str]) -> dict[str, Array]:
    """Read the step times of the runs. Returns name → (step,) seconds.

    For each run or file that cannot be used, the reason is added to `skipped`.
    """
    path = data / FILE
    if not path.exists():
        skipped.append(f"{FILE}: not in {data}")
        return {}
    try:
        table = pq.read_table(path, columns=[*KEY, "step", "iteration_time_s"]).to_pandas()
        runs = table.astype(dict.fromkeys(KEY, str)).groupby(list(KEY))
        series = {"/".join(key): run.sort_values("step").iteration_time_s.to_numpy(np.float64) for key, run in runs}
    except (OSError, ValueError, KeyError, TypeError) as error:
        skipped.append(f"{FILE}: no table of {', '.join(KEY)}, step, iteration_time_s ({str(error)[:200]})")
        return {}
    odd = {name for name, seconds in series.items() if not (np.isfinite(seconds) & (seconds > 0)).all()}
    if odd:
        skipped.append(f"{FILE}: {len(odd)} runs with a step of no time or no number, such as {min(odd)}")
    even = {name: seconds for name, seconds in series.items() if name not in odd and len(seconds) >= FEWEST}
    if not even and not odd:
        skipped.append(f"{FILE}: no run of at least {FEWEST} steps")
    return even


def is_judged(name: str) -> bool:
    """Return whether a run is judged, by a hash of its name. The other runs are for tuning.

    >>> [is_judged(name) for name in ("a", "b", "e")]
    [False, False, True]
    """
    return bool(hashlib.sha256(name.encode()).digest()[0] & 1)


def find_natural_spells(seconds: Array, width: int = 5, ratio: float = 1.05, before: int = 24) -> Mask:
    """Return (step,) whether the recorded run was slow at each step by itself.

    A step is slow if the median of the 5 steps around it is far enough above that of the 24 calm steps
    before it. Far enough is 5 % or 3 robust sigmas, whichever is more.
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


def extend_run(seconds: Array, spells: Mask, steps: int, rng: np.random.Generator) -> Array:
    """Extend the run to `steps` steps with blocks of its own calm steps.

    A run without a calm block is not extended.
    """
    starts = np.array([at for at in range(NEAR, len(seconds) - BLOCK + 1) if not spells[at : at + BLOCK].any()])
    missing = steps - len(seconds)
    if missing <= 0 or not len(starts):
        return seconds[:steps]
    drawn = rng.choice(starts, -(-missing // BLOCK))
    blocks = seconds[(drawn[:, None] + np.arange(BLOCK)).ravel()]
    return np.concatenate((seconds, blocks[:missing]))


def flag_by_pace(seconds: Array) -> Iterator[bool]:
    """Yield after each step whether the pace that the service computes counts as slow."""
    attempt, pace, now_ms = JobAttempt("judged", 1), None, 0
    for number, duration_s in enumerate(seconds.tolist()):
        now_ms += int(duration_s * 1000)
        attempt.fold(Step(job="judged", sequence=number, time_ms=now_ms, step=number, duration_s=duration_s))
        pace = measure_pace(attempt, pace)
        yield pace.slow


def flag_by_change_point(seconds: Array) -> Iterator[bool]:
    """Yield after each step whether Greyhound's rule flags the job as slow (Wu et al., ATC 2025).

    The job is slow once the mean has changed by more than 10 %, more than 10 steps ago, with a
    posterior above 0.8. It stays slow until the mean changes back. The rule decides between one mean
    and two over the last 60 steps (normal, BIC, |z| > 3 dropped).
    """
    usual = None
    for at in range(len(seconds)):
        window = seconds[max(0, at - 59) : at + 1]
        deviation = window.std()
        window = window[np.abs(window - window.mean()) <= 3 * deviation] if deviation > 0 else window
        if usual is None or np.median(window[-5:]) <= 1.05 * usual:
            split = _find_best_split(window) if usual is None and len(window) >= 22 else None
            usual = split[0] if split is not None and split[1] > 1.10 * split[0] else None
        yield usual is not None


def _find_best_split(window: Array) -> tuple[float, float] | None:
    """Return the means before and after the likeliest change, or None if its posterior is not above 0.8.

    There are more than 10 steps on either side of the change.
    """
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


def make_static_rule(ratio: float) -> Rule:
    """Return a rule that calls a step slow if it takes more than `ratio` times the usual step time.

    The usual step time is the median of all earlier steps. The first ten steps are never slow.
    """

    def flag_steps(seconds: Array) -> Iterator[bool]:
        for at in range(len(seconds)):
            yield at >= 10 and bool(seconds[at] > ratio * np.median(seconds[:at]))

    return flag_steps


RULES: dict[str, Rule] = {
    "ours": flag_by_pace,
    "Greyhound-style change point": flag_by_change_point,
    "static 1.1x": make_static_rule(1.1),
    "static 1.5x": make_static_rule(1.5),
}


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A slowdown that is added to a series: the steps [first, last) take `factor` times as long."""

    first: int
    last: int
    factor: float

    def apply_to(self, seconds: Array) -> Array:
        """Return the first `last` steps of a series, with the slowdown applied.

        seconds: (step,) with at least `last` steps.
        """
        made = seconds[: self.last].copy()
        made[self.first :] *= self.factor
        return made


def draw_slowdowns(seconds: Array, spells: Mask, rng: np.random.Generator, draws: int = DRAWS) -> list[Slowdown]:
    """Draw random slowdowns that do not touch a natural spell.

    They begin within the recorded steps and may end long after them.
    """
    drawn = []
    for _ in range(draws):
        first = int(rng.integers(WARM_UP, len(seconds)))
        length = round(np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST))))
        one = Slowdown(first, first + length, 1 + rng.uniform(LEAST, MOST))
        if not spells[max(0, first - 2 * NEAR) : one.last].any():
            drawn.append(one)
    return drawn


@dataclass(slots=True)
class _AlarmCounts:
    """Counts of a rule's alarms in recorded or extended runs.

    steps: steps outside natural spells. A natural spell is a slowdown that the recorded run itself had.
    false, natural: alarms outside and inside natural spells.
    """

    steps: int = 0
    false: int = 0
    natural: int = 0

    def count_alarms(self, slow: Iterable[bool], spells: Mask) -> None:
        """Count the alarms of one run, and its steps outside natural spells.

        spells: (step,) whether the recorded run was slow by itself. Steps after the end of `spells` are a calm
        continuation.
        """
        was = False
        for at, is_slow in enumerate(slow):
            natural = bool(spells[max(0, at - NEAR) : at + 3].any())
            rings = is_slow and not was
            self.steps += not natural
            self.natural += rings and natural
            self.false += rings and not natural
            was = is_slow


@dataclass(slots=True)
class Tally:
    """The results of one rule over all judged runs.

    slowdowns: for each slowdown, the steps and the seconds until the alarm (NaN without an alarm), its factor,
    and whether the series is quiet.
    """

    recorded: _AlarmCounts = field(default_factory=_AlarmCounts)
    continued: _AlarmCounts = field(default_factory=_AlarmCounts)
    slowdowns: list[tuple[float, float, float, bool]] = field(default_factory=list)


def is_quiet(seconds: Array) -> bool:
    """Return whether the step times of a run vary little around their median."""
    log = np.log(seconds)
    return 1.4826 * float(np.median(np.abs(log - np.median(log)))) < QUIET


def evaluate_rule(tally: Tally, rule: Rule, seconds: Array, seed: list[int]) -> None:
    """Evaluate a rule on one run: as recorded, extended with calm steps, and with slowdowns.

    With the same seed, every rule gets the same series.
    """
    rng = np.random.default_rng(seed)
    spells, quiet = find_natural_spells(seconds), is_quiet(seconds)
    tally.recorded.count_alarms(rule(seconds), spells)
    tally.continued.count_alarms(rule(extend_run(seconds, spells, CONTINUED, rng)), spells)
    for one in draw_slowdowns(seconds, spells, rng):
        made = one.apply_to(extend_run(seconds, spells, one.last, rng))
        delay = _count_steps_to_alarm(rule(made), one.first)
        took_s = float(made[one.first : one.first + int(delay)].sum()) if np.isfinite(delay) else np.nan
        tally.slowdowns.append((delay, took_s, one.factor, quiet))


def _count_steps_to_alarm(slow: Iterator[bool], first: int) -> float:
    """Return the number of steps from the beginning of a slowdown to its alarm.

    first: the first step of the slowdown. Returns NaN if there is no alarm, or if the rule already called the job
    slow just before.
    """
    for at, is_slow in enumerate(slow):
        if is_slow and at == first - 1:
            return np.nan
        if is_slow and at >= first:
            return float(at - first + 1)
    return np.nan


def judge_steps(series: dict[str, Array], results: Results, seed: int, say: Say) -> None:
    """Add the rows of every rule, judged on the same series and the same slowdowns."""
    names = [name for name in sorted(series) if is_judged(name)]
    tallies = {method: Tally() for method in RULES}
    for number, name in enumerate(names):
        for method, rule in RULES.items():
            evaluate_rule(tallies[method], rule, series[name], [seed, number])
        if number % 25 == 24:
            say(f"step times: {number + 1} of {len(names)} series")
    table = Table(results, "megatron_step_times", "slowdown")
    for method, tally in tallies.items():
        _add_rows(table, method, tally)


def _add_rows(table: Table, method: str, tally: Tally) -> None:
    delay, took_s, factor, quiet = np.array(tally.slowdowns).reshape(-1, 4).T
    seen, quiet = np.isfinite(delay), quiet.astype(bool)
    groups = {
        "all": np.ones(len(delay), bool),
        "quiet series": quiet,
        "noisy series": ~quiet,
        "10-20 %": factor < 1.2,
        "20-60 %": factor >= 1.2,
    }
    least, steps, seconds = IN_TIME
    in_time = (delay <= steps) | (took_s <= seconds)
    for series, rows in groups.items():
        table.add_share("recall", method, int(seen[rows].sum()), int(rows.sum()), series)
        table.add_median("delay_steps", method, delay[rows].tolist(), series)
        grave = rows & (factor >= 1 + least)
        table.add_share("seen_in_time", method, int(in_time[grave].sum()), int(grave.sum()), series)
    for series, alarms in (("all", tally.recorded), ("continued", tally.continued)):
        exposure = alarms.steps / TEN_THOUSAND
        table.add_rate("false_alarms_per_10000_steps", method, alarms.false, exposure, series)
        table.add_rate("natural_spells_per_10000_steps", method, alarms.natural, exposure, series)
