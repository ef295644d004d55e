"""What was told of run times: of each attempt as it was submitted, of each kind of job, and how often it was right."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.run_history import FEATURES, JobShape
from features.run_past import LEVELS
from features.similarity import Kind, kinds
from models.run_tracker import RunTracker
from service.kind_tables import P50, P90, P99, quantiles_of

MOST_KINDS = 4096
HITS_KEPT = 1000
SCORED = {"p50": P50, "p90": P90, "p99": P99}

_columns = attrgetter(*(row.name for row in fields(JobShape)))

Attempt = tuple[str, int]
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ToldRun:
    """Of one attempt: what was known at its submission, and what was said. Replaced, never changed.

    features: (feature,); run_s: (LEVELS,) as told then, NaN: nothing was known; left_s: (LEVELS,) from `left_ms` on,
    None while it does not run. said, left: of these, what the API tells: worked out once, asked for at each tick.
    """

    features: Array
    run_s: Array
    model: str
    left_s: Array | None = None
    left_ms: int = 0
    is_over: bool = False
    said: dict[str, float] | None = field(init=False)
    left: tuple[float, float] | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "said", quantiles_of(self.run_s) if np.isfinite(self.run_s).all() else None)
        known = self.left_s is not None and bool(np.isfinite(self.left_s).all())
        left = (float(self.left_s[P50]), float(self.left_s[P90])) if known and self.left_s is not None else None
        object.__setattr__(self, "left", left)

    def remaining(self, now_ms: int) -> dict[str, float] | None:
        """p50 and p90 of what is left now, in seconds."""
        if self.left is None:
            return None
        since_s = (now_ms - self.left_ms) / 1000
        return {
            "p50": float(round(max(0.0, self.left[0] - since_s))),
            "p90": float(round(max(0.0, self.left[1] - since_s))),
        }


class RunBook:
    """One writer; `told` is replaced as a whole, so that who holds it may read it in a thread."""

    def __init__(self) -> None:
        self.told: Mapping[Attempt, ToldRun] = {}
        self.hits: deque[tuple[bool, ...]] = deque(maxlen=HITS_KEPT)  # of SCORED, newest last
        self.model = ""  # that spoke last
        self.tracker = RunTracker()
        self._shapes: dict[int, JobShape] = {}  # by kind, the one that was used longest ago first
        self._run_s: dict[int, Array] = {}
        self._due: dict[int, None] = {}

    def coverage(self) -> dict[str, float]:
        """Share of the last runs that lasted no longer than each bound said; empty before the first."""
        shares = np.mean(self.hits, axis=0).tolist() if self.hits else []
        return dict(zip(SCORED, shares, strict=False))

    def score(self, told: ToldRun, run_s: float, ended_ms: int) -> None:
        """A run is over: was it within its bounds? What is told of later ones moves a little towards it."""
        if told.said is not None:
            self.hits.append(tuple(bool(run_s <= told.run_s[at]) for at in SCORED.values()))
            issued = np.log(np.maximum(told.run_s.astype(np.float64), 1.0))
            self.tracker.learn(issued, math.log(max(run_s, 1.0)), ended_ms / 1000)

    def tracked(self, run_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """(job, LEVELS) run times moved by what was learnt of earlier ones; NaN stays."""
        moved: NDArray[np.float64] = np.exp(self.tracker.served(np.log(np.maximum(run_s, 1.0))))
        return moved

    # -- kinds

    def touch(self, shape: JobShape) -> None:
        """A job of this shape came or went: what is said of its kinds is to be made anew."""
        for kind, key in kinds(shape).items():
            self._shapes.pop(key, None)
            self._shapes[key] = _of_kind(shape, kind)
            self._due[key] = None
            if len(self._shapes) > MOST_KINDS:
                oldest = next(iter(self._shapes))
                for kept in (self._shapes, self._run_s, self._due):
                    kept.pop(oldest, None)

    def touch_all(self) -> None:
        """Another model serves."""
        self._due = dict.fromkeys(self._shapes)

    def due(self, most: int) -> list[tuple[int, JobShape]]:
        """Kinds to be worked out, those that have waited longest first; they count as done."""
        keys = [key for key, _ in zip(self._due, range(most), strict=False)]
        for key in keys:
            del self._due[key]
        return [(key, self._shapes[key]) for key in keys]

    def say(self, keys: Sequence[int], run_s: Array) -> None:
        """run_s: (kind, LEVELS)."""
        self._run_s.update((key, row) for key, row in zip(keys, run_s, strict=True) if key in self._shapes)

    def table(self) -> tuple[NDArray[np.uint64], Array]:
        """keys (k,), sorted, and run times (k, LEVELS) of the kinds of which something is known."""
        known = sorted(key for key, row in self._run_s.items() if np.isfinite(row).all())
        values = np.array([self._run_s[key] for key in known], np.float32).reshape(-1, len(LEVELS))
        return np.array(known, np.uint64), values

    # -- snapshots

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """What a snapshot keeps, copied: JSON-able parts, and arrays by name."""
        told = list(self.told.items())
        about = {
            "features": list(FEATURES),
            "model": self.model,
            "told": [[*key, row.model, row.left_ms, row.left_s is not None, row.is_over] for key, row in told],
            "hits": list(self.hits),
            "tracker": self.tracker.dump(),
            "kinds": [[key, _columns(shape)] for key, shape in self._shapes.items()],
            "due": list(self._due),
        }
        none = np.full(len(LEVELS), np.nan, np.float32)
        arrays = {
            "features": _stacked([row.features for _, row in told], len(FEATURES)),
            "run_s": _stacked([row.run_s for _, row in told], len(LEVELS)),
            "left_s": _stacked([none if row.left_s is None else row.left_s for _, row in told], len(LEVELS)),
            "kinds.run_s": _stacked([self._run_s.get(key, none) for key in self._shapes], len(LEVELS)),
        }
        return about, arrays

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """The inverse of `dump`, into an empty one. What was told with other features than today's is told anew."""
        self.model = about["model"]
        if about["features"] == list(FEATURES) and arrays["run_s"].shape[1] == len(LEVELS):
            self.told = {
                (job, attempt): ToldRun(features, run_s, model, left_s if is_left else None, left_ms, is_over)
                for (job, attempt, model, left_ms, is_left, is_over), features, run_s, left_s in zip(
                    about["told"],
                    arrays["features"].copy(),
                    arrays["run_s"].copy(),
                    arrays["left_s"].copy(),
                    strict=True,
                )
            }
            self.hits.extend(tuple(row) for row in about["hits"])
            self.tracker.load(about["tracker"])
        self._shapes = {key: JobShape(*shape) for key, shape in about["kinds"]}
        self._run_s = dict(zip(self._shapes, arrays["kinds.run_s"].copy(), strict=True))
        self._due = dict.fromkeys(key for key in about["due"] if key in self._shapes)


def with_left(
    told: Mapping[Attempt, ToldRun], keys: Iterable[Attempt], left_s: Array, now_ms: int
) -> dict[Attempt, ToldRun]:
    """`told` with what is left of some attempts, (attempt, LEVELS)."""
    fresh = {key: replace(told[key], left_s=row, left_ms=now_ms) for key, row in zip(keys, left_s, strict=True)}
    return {**told, **fresh}


def _of_kind(shape: JobShape, kind: Kind) -> JobShape:
    """The newest job of a kind without what the others of the kind do not share with it."""
    match kind:
        case "user, name and GPUs" | "user and name":
            return shape
        case "user and GPUs" | "user":
            return replace(shape, name="")
        case "queue and GPUs":
            return replace(shape, name="", user="")
        case _:
            return replace(shape, name="", user="", group="", queue="")


def _stacked(rows: Sequence[Array], columns: int) -> Array:
    return np.array(rows, np.float32).reshape(len(rows), columns)
