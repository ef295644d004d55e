"""The record of run-time forecasts by attempt and by job kind, with their accuracy."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.past_runs import JobShape
from fleetcast.features.run_past import LEVELS
from fleetcast.features.similarity import Kind, make_kind_keys
from fleetcast.fleet.stateful import Dump, Stateful
from fleetcast.models.run_times.tracker import RunTracker
from fleetcast.models.versions.drift import RecentAccuracy
from fleetcast.service.answers.jobs import RemainingTime
from fleetcast.service.board.kind_tables import P50, P90, P99, round_run_quantiles

MOST_KINDS = 4096
MAX_RUNS = 1000
USUAL_LIMIT_OF = 10  # jobs: how fast the usual limit of a kind follows
SCORED = {"p50": P50, "p90": P90, "p99": P99}
P10 = LEVELS.index(0.1)
ROUNDING = 1e-6  # of a logarithm, by float32: a run that was stopped at its limit is within a bound of that length

_columns = attrgetter(*(row.name for row in fields(JobShape)))
_levels = np.array(LEVELS)

Attempt = tuple[str, int]
Array = NDArray[np.float32]


class IssuedRunTime(msgspec.Struct, frozen=True, kw_only=True):
    """The run-time forecast of one attempt, made at its submission. It is replaced, but never changed."""

    run_s: Array  # (LEVELS,) seconds, not capped by limit_s, NaN unknown
    similar_s: Array  # the same by similar jobs alone
    limit_s: float | None
    model: str
    in_time: bool  # issued as it came; late ones are not scored
    quantiles: dict[str, float] | None  # what the API shows of run_s
    left_s: Array | None = None  # (LEVELS,) from `left_ms` on, None while it does not run
    left: tuple[float, float] | None = None  # what the API shows of left_s
    left_ms: int = 0
    is_over: bool = False

    def compute_remaining_time(self, now_ms: int) -> RemainingTime | None:
        """Return p50 and p90 of the remaining time in seconds, or None if it is unknown."""
        if self.left is None:
            return None
        since_s = (now_ms - self.left_ms) / 1000
        return RemainingTime(*(float(round(max(0.0, left_s - since_s))) for left_s in self.left))

    def drop_remaining_time(self) -> "IssuedRunTime":
        """Return a copy of the forecast without its remaining time, for a job that has ended."""
        return msgspec.structs.replace(self, left_s=None, left=None, left_ms=0, is_over=True)


def issue_run_time(
    run_s: Array, similar_s: Array, limit_s: float | None, model: str, in_time: bool, is_over: bool = False
) -> IssuedRunTime:
    """Make the forecast of one attempt.

    run_s: (LEVELS,) seconds by the model. similar_s: (LEVELS,) seconds by the runs of similar jobs.
    """
    quantiles = round_run_quantiles(np.minimum(run_s, limit_s or np.inf)) if np.isfinite(run_s).all() else None
    return IssuedRunTime(
        run_s=run_s,
        similar_s=similar_s,
        limit_s=limit_s,
        model=model,
        in_time=in_time,
        quantiles=quantiles,
        is_over=is_over,
    )


class Outcome(NamedTuple):
    """The outcome of one run-time forecast.

    below_p50, below_p90, below_p99: the run lasted no longer than this bound. in_80: it lay within the 80 %
    band. loss, similar_loss: mean pinball loss of log seconds over LEVELS. similar_loss is None if there were
    no similar jobs.
    """

    model: str
    below_p50: bool
    below_p90: bool
    below_p99: bool
    in_80: bool
    loss: float
    similar_loss: float | None


class RunTimeRecord(Stateful):
    """The record of run-time forecasts. Only one thread writes it at a time.

    `issued` is replaced as a whole, so another thread may continue to read the old one.
    """

    def __init__(self) -> None:
        self.issued: Mapping[Attempt, IssuedRunTime] = {}
        self.outcomes: deque[Outcome] = deque(maxlen=MAX_RUNS)  # newest last
        self.model = ""  # the one in use
        self.tracker = RunTracker()
        self._shapes: dict[int, JobShape] = {}  # by kind, the one that was used longest ago first
        self._run_s: dict[int, Array] = {}
        self._runs: dict[int, int] = {}  # ended ones of each kind that had some
        self._bare: dict[int, None] = {}  # kinds without one, likewise
        self._due: dict[int, None] = {}

    def compute_coverage(self) -> dict[str, float]:
        """Return bound → share of the last runs that lasted no longer than it. Empty before the first run."""
        shares = np.mean([row[1:4] for row in self.outcomes], axis=0).tolist() if self.outcomes else []
        return dict(zip(SCORED, shares, strict=False))

    def summarise_recent(self) -> RecentAccuracy:
        """Summarise the recent outcomes of the model in use.

        They are the coverage of the 80 % band, the loss divided by the loss of similar jobs, and the number of
        runs.
        """
        rows = [row for row in self.outcomes if row.model == self.model]
        if not rows:
            return RecentAccuracy()
        both = [(row.loss, row.similar_loss) for row in rows if row.similar_loss is not None]
        ours, theirs = map(sum, zip(*both, strict=True)) if both else (0.0, 0.0)
        return RecentAccuracy(
            sum(row.in_80 for row in rows) / len(rows), ours / theirs if theirs > 0 else None, len(rows)
        )

    def use_model(self, model: str) -> None:
        """Set the model in use. After a change of the model, learnt errors are dropped and all kinds become due."""
        if model != self.model:
            self.model, self.tracker = model, RunTracker()
            self._due = dict.fromkeys(self._shapes)

    def record_outcome(self, issued: IssuedRunTime, shape: JobShape, run_s: float, ended_ms: int) -> None:
        """Record whether an ended run was within its bounds, and adapt later forecasts a little to it."""
        if issued.quantiles is None or not issued.in_time:
            return
        limit_s = issued.limit_s or np.inf
        log_run, most = math.log(max(min(run_s, limit_s), 1.0)), np.log(max(limit_s, 1.0))
        both = issued.run_s, issued.similar_s
        forecast, similar = (np.log(np.maximum(row.astype(np.float64), 1.0)) for row in both)
        capped = np.minimum(forecast, most)
        below = log_run <= capped + ROUNDING
        in_80 = bool(below[P90] and log_run >= capped[P10] - ROUNDING)
        similar_loss = _compute_loss(np.minimum(similar, most), log_run) if np.isfinite(similar).all() else None
        p50, p90, p99 = (bool(below[at]) for at in SCORED.values())
        self.outcomes.append(Outcome(issued.model, p50, p90, p99, in_80, _compute_loss(capped, log_run), similar_loss))
        if issued.model == self.model:
            self.tracker.learn_outcome(forecast, similar, (shape.group_or_queue, shape.gpus), log_run, ended_ms / 1000)

    # -- kinds

    def mark_kinds_due(self, shape: JobShape, *, is_over: bool = False) -> None:
        """Mark the kinds of a shape as due, because such a job arrived or ended."""
        for kind, key in make_kind_keys(shape).items():
            before = self._shapes.pop(key, None)
            self._shapes[key] = _drop_unshared_fields(shape, kind, before)
            self._due[key] = None
            self._bare.pop(key, None)
            if is_over:
                self._runs[key] = self._runs.get(key, 0) + 1
            elif key not in self._runs:
                self._bare[key] = None
            if len(self._shapes) > MOST_KINDS:
                oldest = next(iter(self._bare or self._shapes))  # submissions alone push out no kind with runs
                for one_table in (self._shapes, self._run_s, self._due, self._runs, self._bare):
                    one_table.pop(oldest, None)

    def pop_due_kinds(self, most: int) -> list[tuple[int, JobShape]]:
        """Return at most `most` kinds that are due, longest waiting first. They are then no longer due."""
        keys = [key for key, _ in zip(self._due, range(most), strict=False)]
        for key in keys:
            del self._due[key]
        return [(key, self._shapes[key]) for key in keys]

    def update_kinds(self, keys: Sequence[int], run_s: Array) -> None:
        """Record the forecast run times of kinds. run_s: (kind, LEVELS) seconds."""
        self._run_s.update((key, row) for key, row in zip(keys, run_s, strict=True) if key in self._shapes)

    def make_table(self) -> tuple[NDArray[np.uint64], Array, NDArray[np.uint32]]:
        """Return the known kinds as columns, sorted by key.

        The columns are (k,) uint64 keys, (k, LEVELS) run times in seconds, and (k,) uint32 numbers of ended runs.
        """
        known = sorted(key for key, row in self._run_s.items() if np.isfinite(row).all())
        values = np.array([self._run_s[key] for key in known], np.float32).reshape(-1, len(LEVELS))
        return np.array(known, np.uint64), values, np.array([self._runs.get(key, 0) for key in known], np.uint32)

    # -- snapshots

    def dump(self) -> Dump:
        issued = list(self.issued.items())
        about = {
            "model": self.model,
            "issued": [
                [*key, row.limit_s, row.model, row.in_time, row.left_ms, row.left_s is not None, row.is_over]
                for key, row in issued
            ],
            "outcomes": list(self.outcomes),
            "tracker": self.tracker.dump(),
            "kinds": [[key, _columns(shape), self._runs.get(key, 0)] for key, shape in self._shapes.items()],
            "due": list(self._due),
        }
        none = np.full(len(LEVELS), np.nan, np.float32)
        arrays = {
            "run_s": _stack_rows([row.run_s for _, row in issued]),
            "similar_s": _stack_rows([row.similar_s for _, row in issued]),
            "left_s": _stack_rows([none if row.left_s is None else row.left_s for _, row in issued]),
            "kinds.run_s": _stack_rows([self._run_s.get(key, none) for key in self._shapes]),
        }
        return about, arrays

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump` into an empty record."""
        self._shapes = {key: JobShape(*shape) for key, shape, _ in about["kinds"]}
        self._runs = {key: runs for key, _, runs in about["kinds"] if runs}
        self._bare = dict.fromkeys(key for key in self._shapes if key not in self._runs)
        self._run_s = dict(zip(self._shapes, arrays["kinds.run_s"].copy(), strict=True))
        self._due = dict.fromkeys(key for key in about["due"] if key in self._shapes)
        self.model = about["model"]
        self.outcomes.extend(Outcome(*row) for row in about["outcomes"])
        self.tracker.load(about["tracker"])
        issued: dict[Attempt, IssuedRunTime] = {}
        run_s, similar_s, left_s = (arrays[name].copy() for name in ("run_s", "similar_s", "left_s"))
        for at, (job, attempt, limit_s, model, in_time, left_ms, is_left, is_over) in enumerate(about["issued"]):
            issued[job, attempt] = issue_run_time(run_s[at], similar_s[at], limit_s, model, in_time, is_over)
            if is_left:
                issued |= update_remaining_times(issued, [(job, attempt)], left_s[at : at + 1], left_ms)
        self.issued = issued


def update_remaining_times(
    issued: Mapping[Attempt, IssuedRunTime], keys: Iterable[Attempt], left_s: Array, now_ms: int
) -> dict[Attempt, IssuedRunTime]:
    """Return the forecasts of `keys` with new remaining times. left_s: (attempt, LEVELS) seconds."""
    known = np.isfinite(left_s.sum(axis=1)).tolist()
    bounds = left_s[:, [P50, P90]].tolist()
    return {
        key: msgspec.structs.replace(issued[key], left_s=row, left=(p50, p90) if is_known else None, left_ms=now_ms)
        for key, row, (p50, p90), is_known in zip(keys, left_s, bounds, known, strict=True)
    }


def _compute_loss(issued: NDArray[np.float64], log_run: float) -> float:
    """Return the mean pinball loss over LEVELS. issued: (LEVELS,) log seconds. log_run: the outcome."""
    error = log_run - issued
    return float(np.maximum(_levels * error, (_levels - 1) * error).mean())


def _drop_unshared_fields(shape: JobShape, kind: Kind, before: JobShape | None) -> JobShape:
    """Return the newest job of a kind, without the fields in which jobs of this kind differ.

    before: the previous shape of the kind. The limits of several users differ widely, so the kind has a
    typical limit. This is their geometric mean, in which the newest limit has the highest weight.
    """
    match kind:
        case "user, name and GPUs" | "user and name":
            return shape
        case "user and GPUs" | "user":
            return replace(shape, name="")
        case "queue and GPUs":
            return replace(shape, name="", user="", limit_s=_compute_usual_limit_s(shape, before))
        case _:
            return replace(shape, name="", user="", group="", queue="", limit_s=_compute_usual_limit_s(shape, before))


def _compute_usual_limit_s(shape: JobShape, before: JobShape | None) -> float | None:
    known = None if before is None else before.limit_s
    if shape.limit_s is None or known is None:
        return shape.limit_s or known
    return float(max(known, 1.0) * (max(shape.limit_s, 1.0) / max(known, 1.0)) ** (1 / USUAL_LIMIT_OF))


def _stack_rows(rows: Sequence[Array]) -> Array:
    return np.array(rows, np.float32).reshape(len(rows), len(LEVELS))
