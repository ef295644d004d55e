"""CoRuns: which jobs share hardware, and how fast each job runs alone and next to its partner.

share      as in fleetcast.features.sharing. An attempt with several neighbours of the tightest kind is not measured
alone      median step time while nothing is shared, or only wider hardware (for sharing a rail: alone on its GPUs)
together   median step time since the two began to share
co-run     both times are known: speed = alone / together, one for each job
"""

import hashlib
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.frame import FeatureFrame
from fleetcast.features.past_runs import JobShape
from fleetcast.features.sharing import LEVELS, Attempt, Neighbours, Share, SharedHardware, Wiring
from fleetcast.features.similarity import make_job_shape
from fleetcast.features.sums import divide
from fleetcast.fleet.events import Step, Submitted
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.stateful import Dump, Stateful

Array = NDArray[np.float64]
Keys = tuple[int, int]

READ = (("sm_active_mean_2m", "gpu_util_mean_2m"), ("dram_active", "mem_copy_util"))  # the first that is known

FEWEST_STEPS = 8
MIXED = 1  # steps after a change that do not count
SETTLED_S = 60.0  # a load is read when a job has been alone for so long
MOST_CO_RUNS, MAX_REMEMBERED = 512, 4096
SLOWEST, FASTEST = 0.01, 1.1  # relative to alone: the rest is a mistake
LATELY_MS = 120_000
POLL_MS = 60_000  # a pace that is known is measured again after so long
STEPS_LOOKED = 64
NOWHERE = Wiring()
NOT_ALONE = 0  # the level of those that share a GPU


def compute_mean_loads(gpu: FeatureFrame, number: NDArray[np.intp], rows: NDArray[np.intp], attempts: int) -> Array:
    """Return (attempts, 3) compute, bandwidth and memory loads: means over each attempt's GPUs.

    A load is NaN if unknown. number, rows: (held,) for each held GPU, the number of its attempt and its
    row in the frame.
    """
    found = np.full((attempts, 3), np.nan)
    if not len(gpu.values):
        return found
    for column, names in enumerate(READ):
        first, other = (gpu.column(name)[rows].astype(np.float64) for name in names)
        found[:, column] = _compute_attempt_means(number, np.where(np.isfinite(first), first, other), attempts)
    used, free = (gpu.column(name)[rows].astype(np.float64) for name in ("fb_used_bytes", "fb_free_bytes"))
    total = used + free
    share = divide(used, total)
    found[:, 2] = _compute_attempt_means(number, share, attempts)
    return found


def _compute_attempt_means(number: NDArray[np.intp], values: Array, length: int) -> Array:
    known = np.isfinite(values)
    count = np.bincount(number[known], minlength=length).astype(np.float64)
    total = np.bincount(number[known], weights=values[known], minlength=length)
    means: Array = np.divide(total, count, out=np.full(length, np.nan), where=count > 0)
    return means


def make_job_keys(shape: JobShape) -> Keys:
    """Return the keys of a job and of its kind: 64-bit hashes, never 0.

    The job's key is made of its user, its name without numbers, and its GPUs. The key of its kind omits
    the GPUs.
    """
    name = shape.words or shape.name
    return _hash_key(shape.user, name, f"{shape.gpus:g}"), _hash_key(shape.user, name)


def _hash_key(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, slots=True)
class CoRun:
    """A measured co-run: one attempt that shares hardware with one partner.

    speed: the attempt's speed relative to running alone.
    """

    share: Share
    keys: Keys
    partner_keys: Keys
    speed: float


@dataclass(slots=True)
class _WatchedAttempt:
    """The state of a running attempt: its partner, their shared hardware since `since_ms`, and step times."""

    keys: Keys
    company: Attempt | None  # None: several, or nobody
    share: Share | Literal[""]  # "": nothing
    since_ms: int
    paces: dict[int, float]  # level of what was shared (fleetcast.features.sharing.LEVELS) -> seconds of a step
    due_ms: int = 0  # when its steps and its load are looked at again

    def is_unchanged(self, company: SharedHardware | None) -> bool:
        """Return whether the attempt still shares the same hardware with the same partner."""
        if company is None:
            return self.share == ""
        return company.share == self.share and company.other == self.company

    def find_alone_s(self, share: str) -> float | None:
        """Return the attempt's step time in seconds without sharing hardware as tight as `share`, or None if unknown.

        If several such times are known, returns the one with the widest shared hardware.
        """
        level = max((level for level in self.paces if level > LEVELS[share]), default=None)
        return None if level is None else self.paces[level]


@dataclass(frozen=True, slots=True)
class _AttemptKeys:
    """The keys of an attempt, and the facts from which they were made."""

    submission: Submitted | None
    ranks: tuple[RankPlacement, ...]
    keys: Keys


class KeyTable:
    """A cache of the keys of attempts. It holds the attempts of the last call only."""

    def __init__(self) -> None:
        self._keys: dict[Attempt, _AttemptKeys] = {}

    def __call__(self, attempts: Iterable[JobAttempt]) -> dict[Attempt, Keys]:
        """Return the keys of each attempt. Keys are computed again only if the attempt's facts have changed."""
        known, self._keys = self._keys, {}
        for row in attempts:
            key = row.job, row.attempt
            named = known.get(key)
            if named is None or named.submission is not row.submission or named.ranks is not row.ranks:
                named = _AttemptKeys(row.submission, row.ranks, make_job_keys(make_job_shape(row)))
            self._keys[key] = named
        return {key: named.keys for key, named in self._keys.items()}


class CoRuns(Stateful):
    """The co-runs of all running attempts. Only one task may change them.

    Call `observe` at each tick. Observing a moment twice changes nothing.
    """

    def __init__(self) -> None:
        self._watched: dict[Attempt, _WatchedAttempt] = {}
        self._together: dict[tuple[Attempt, Attempt], tuple[Share, Keys, Keys, float]] = {}  # and seconds of a step
        self._found: dict[tuple[Attempt, Attempt], CoRun] = {}  # oldest first
        self._loads: dict[int, tuple[float, ...]] = {}  # key -> load alone, the oldest first
        self._turns: dict[int, tuple[float, ...]] = {}
        self.keys_of = KeyTable()
        self._watched_of: tuple[object, ...] = ()  # of the last call that looked whether attempts begin or change
        self._watched_rows: list[_WatchedAttempt] = []  # the running attempts of that call, in their order
        self._neighbours = Neighbours()
        self.divided: frozenset[str] = frozenset()  # as last seen

    @property
    def newest_co_runs(self) -> Mapping[tuple[Attempt, Attempt], CoRun]:
        """(attempt, partner) → their newest co-run. The oldest entry is first."""
        return self._found

    @property
    def active_co_runs(self) -> dict[tuple[Attempt, Attempt], CoRun]:
        """(attempt, partner) → their newest co-run, for pairs that still run together."""
        pairs = ((key, row.company) for key, row in self._watched.items() if row.company is not None)
        return {pair: self._found[pair] for pair in pairs if pair in self._found}

    @property
    def loads_alone(self) -> Mapping[int, tuple[float, ...]]:
        """Key of a job or kind → its compute, bandwidth and memory load (ratios) when it last ran alone.

        An unknown load is NaN.
        """
        return self._loads

    @property
    def step_times_alone(self) -> Mapping[int, tuple[float, ...]]:
        """Key of a job or kind → its step time alone in seconds, and the share of it spent on communication.

        A job whose steps do not state their communication has no entry.
        """
        return self._turns

    def observe(
        self,
        running: Sequence[JobAttempt],
        keys: Mapping[Attempt, Keys],
        divided: Collection[str],
        loads: NDArray[np.floating],
        now_ms: int,
        wiring: Wiring = NOWHERE,
        places: RunningPlaces | None = None,
    ) -> None:
        """Record the running attempts, their loads and the hardware that they share at one moment.

        keys: at least those of `running`. divided: GPUs (`node/index`) with MIG instances. loads: (running,
        3) compute, bandwidth and memory, NaN if unknown. wiring: the same object until the topology
        changes. places: the places of `running`, the same object until an attempt starts, ends or moves.
        """
        self.divided = frozenset(divided)
        met = self._neighbours.observe(running, self.divided, wiring, places)
        attempts = [(row.job, row.attempt) for row in running] if places is None else places.keys
        if places is None or (places, keys, wiring, self.divided) != self._watched_of:  # the first three by identity
            self._watch_attempts(dict(zip(attempts, running, strict=True)), keys, met, now_ms)
            self._watched_of = places, keys, wiring, self.divided
            self._watched_rows = [self._watched[key] for key in attempts]
        settled_ms = now_ms - round(SETTLED_S * 1000)
        for number, (key, attempt, watched) in enumerate(zip(attempts, running, self._watched_rows, strict=True)):
            if 0 < watched.due_ms - now_ms <= POLL_MS or not (attempt.steps or watched.since_ms <= settled_ms):
                continue
            pace_s = self._measure_step_time(watched, attempt, loads[number], now_ms)
            company, other = met.get(key), watched.company
            if (
                pace_s is None
                or other is None
                or company is None
                or met.get(other) != SharedHardware(company.share, key)
            ):
                continue
            self._together[key, other] = company.share, watched.keys, keys[other], pace_s
        self._make_co_runs()

    def _watch_attempts(
        self,
        rows: Mapping[Attempt, JobAttempt],
        keys: Mapping[Attempt, Keys],
        met: Mapping[Attempt, SharedHardware],
        now_ms: int,
    ) -> None:
        """Watch attempts that are new or share other hardware than before. Drop attempts that have ended."""
        for key in self._watched.keys() - rows.keys():
            del self._watched[key]
        for key in rows:
            company, last = met.get(key), self._watched.get(key)
            if last is None or last.keys != keys[key] or not last.is_unchanged(company):
                joined_ms = _find_later_start_ms(rows, key, company, now_ms)
                self._watched[key] = _start_watch(last, keys[key], company, joined_ms, now_ms)

    def _measure_step_time(
        self, watched: _WatchedAttempt, attempt: JobAttempt, load: NDArray[np.floating], now_ms: int
    ) -> float | None:
        """Return the median step time in seconds since the partner last changed, or None while unknown.

        Also stores the load and step times of an attempt that runs alone.
        """
        level = LEVELS[watched.share]
        steps = _find_steps_since(attempt, watched.since_ms, now_ms)
        pace_s = _compute_pace_s(steps) if len(steps) >= FEWEST_STEPS else None
        if pace_s is not None:
            watched.paces[level], watched.due_ms = pace_s, now_ms + POLL_MS
            shares = [
                step.parts.communication / step.duration_s for step in steps if step.parts and step.duration_s > 0
            ]
            if shares and (level == LEVELS[""] or (level > NOT_ALONE and watched.keys[0] not in self._turns)):
                _store_for_job_and_kind(self._turns, watched.keys, (pace_s, min(1.0, _compute_median(shares))))
        settled = now_ms - watched.since_ms >= SETTLED_S * 1000
        if level > NOT_ALONE and settled and math.isfinite(load[0]):
            watched.due_ms = now_ms + POLL_MS
            _store_for_job_and_kind(self._loads, watched.keys, tuple(round(float(value), 4) for value in load))
        return pace_s

    def _make_co_runs(self) -> None:
        """Make a co-run for each pair whose step times alone and together are known. Drop co-runs of ended attempts."""
        for pair, (share, keys, partner, together_s) in list(self._together.items()):
            watched = self._watched.get(pair[0])
            if watched is None:
                del self._together[pair]
            elif (alone_s := watched.find_alone_s(share)) is not None:
                del self._together[pair]
                self._found.pop(pair, None)
                self._found[pair] = CoRun(share, keys, partner, _clip_speed(alone_s / together_s))
                while len(self._found) > MOST_CO_RUNS:
                    del self._found[next(iter(self._found))]
        while len(self._together) > MOST_CO_RUNS:
            del self._together[next(iter(self._together))]

    def shift_times(self, by_ms: int) -> None:
        """Shift the times of running attempts after the clock was set."""
        for row in self._watched.values():
            row.since_ms += by_ms
            row.due_ms += by_ms

    def dump(self) -> Dump:
        """Return a copy for a snapshot: plain lists and numbers."""
        about = {
            "watched": [
                [*key, row.keys, row.company, row.share, row.since_ms, row.paces, row.due_ms]
                for key, row in self._watched.items()
            ],
            "together": [[*one, *other, *rest] for (one, other), rest in self._together.items()],
            "found": [
                [*one, *other, row.share, row.keys, row.partner_keys, row.speed]
                for (one, other), row in self._found.items()
            ],
            "loads": [[key, *load] for key, load in self._loads.items()],
            "turns": [[key, *turns] for key, turns in self._turns.items()],
            "divided": sorted(self.divided),
        }
        return about, {}

    def load(self, saved: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump` into an empty object. Skips speeds and step times that are not valid."""
        for job, attempt, keys, company, share, since_ms, paces, due_ms in saved["watched"]:
            other = tuple(company) if company else None
            self._watched[job, attempt] = _WatchedAttempt(_make_key_pair(keys), other, share, since_ms, paces, due_ms)
        for job, attempt, other, number, share, keys, partner, seconds in saved["together"]:
            if seconds > 0:
                self._together[(job, attempt), (other, number)] = (
                    share,
                    _make_key_pair(keys),
                    _make_key_pair(partner),
                    seconds,
                )
        for job, attempt, other, number, share, keys, partner, speed in saved["found"]:
            if math.isfinite(speed):
                self._found[(job, attempt), (other, number)] = CoRun(
                    share, _make_key_pair(keys), _make_key_pair(partner), _clip_speed(speed)
                )
        self._loads = {key: tuple(load) for key, *load in saved["loads"]}
        self._turns = {key: tuple(turns) for key, *turns in saved["turns"]}
        self.divided = frozenset(saved["divided"])


def _find_later_start_ms(
    rows: Mapping[Attempt, JobAttempt], key: Attempt, company: SharedHardware | None, now_ms: int
) -> int:
    """Return the later of the two starts of an attempt and its partner, in Unix ms."""
    both = (key, company.other if company else None)
    return max(rows[one].started_ms or now_ms for one in both if one is not None)


def _start_watch(
    last: _WatchedAttempt | None, keys: Keys, company: SharedHardware | None, joined_ms: int, now_ms: int
) -> _WatchedAttempt:
    """Return the new state of an attempt whose partner, shared hardware or keys have changed.

    The state begins at `joined_ms` if the two have started to share recently, and otherwise now.
    """
    if last is not None and last.keys != keys:
        last = None
    share: Share | Literal[""] = "" if company is None else company.share
    other = None if company is None else company.other
    came = joined_ms >= now_ms - LATELY_MS and (last is None or (last.share == "" and other is not None))
    return _WatchedAttempt(keys, other, share, joined_ms if came else now_ms, {} if last is None else last.paces)


def _make_key_pair(keys: Sequence[int]) -> Keys:
    return keys[0], keys[1]


def _find_steps_since(attempt: JobAttempt, since_ms: int, now_ms: int) -> list[Step]:
    """Return the attempt's steps since `since_ms`. The first steps are omitted, because both states mix in them.

    Skips steps in the future, which arrived before the clock was set back.
    """
    if not attempt.steps or attempt.steps[-1].time_ms <= since_ms:
        return []
    found: list[Step] = []
    for step in reversed(attempt.steps):
        if step.time_ms > now_ms + LATELY_MS:
            continue
        if step.time_ms - step.duration_s * 1000 < since_ms or len(found) == STEPS_LOOKED:
            break
        found.append(step)
    return found[-1 - MIXED :: -1]


def _store_for_job_and_kind(table: dict[int, tuple[float, ...]], keys: Keys, values: tuple[float, ...]) -> None:
    """Store `values` for the job and for its kind. Drops the oldest entries if there are too many."""
    for key in keys:
        table.pop(key, None)
        table[key] = values
    while len(table) > MAX_REMEMBERED:
        del table[next(iter(table))]


def _clip_speed(speed: float) -> float:
    return min(max(speed, SLOWEST), FASTEST)


def _compute_pace_s(steps: Sequence[Step]) -> float | None:
    """Return the median step time in seconds, or None if it is not a valid pace."""
    pace_s = _compute_median(step.duration_s for step in steps)
    return pace_s if 0 < pace_s < math.inf else None


def _compute_median(values: Iterable[float]) -> float:
    """Return the median of a few dozen numbers. For so few, numpy is slower."""
    return float(statistics.median(values))
