"""CoRuns: which jobs share hardware, how fast each went alone and beside the other, and what each takes alone.

    share      as features.sharing tells; who has several neighbours of the tightest kind counts for nothing there
    alone      median of the step times while nothing is shared, or, where that was never seen, while only wider
               hardware is: beside a job on the same rail it is alone on its GPU
    together   the same since the two began to share
    co-run     together and alone are both known (in either order): speed = alone / together, one for each job

Steps of the first MIXED steps after a change do not count. What is kept is small and bounded; the newest co-runs stay.
"""

import hashlib
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from features.run_history import JobShape
from features.sharing import LEVELS, Attempt, Company, Neighbours, Share, Wiring
from features.similarity import shape_of
from fleet.events import Step, Submitted
from fleet.jobs import JobAttempt
from fleet.requests import RankPlacement

Keys = tuple[int, int]

FEWEST_STEPS = 8
MIXED = 1
SETTLED_S = 60.0  # a load is read when a job has been alone for so long
MOST_CO_RUNS, MOST_KEPT = 512, 4096
SLOWEST, FASTEST = 0.01, 1.1  # relative to alone: the rest is a mistake
LATELY_MS = 120_000
LOOK_MS = 60_000  # a pace that is known is measured again after so long
STEPS_LOOKED = 64
NOWHERE = Wiring()
NOT_ALONE = 0  # the level of those that share a GPU


def job_keys(shape: JobShape) -> Keys:
    """The job (user, name without numbers, GPUs) and its kind (without GPUs), as 64-bit keys that are never 0."""
    name = shape.words or shape.name
    return _key(shape.user, name, f"{shape.gpus:g}"), _key(shape.user, name)


def _key(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, slots=True)
class CoRun:
    """One attempt beside one partner: `speed` relative to alone."""

    share: Share
    keys: Keys
    partner_keys: Keys
    speed: float


@dataclass(slots=True)
class _Watched:
    """An attempt that runs: what it shares with whom since when, and its paces. share: "" is nothing.

    company: None are several or nobody; paces: level of what was shared (features.sharing.LEVELS) -> seconds of a step.
    """

    keys: Keys
    company: Attempt | None
    share: Share | Literal[""]
    since_ms: int
    paces: dict[int, float]
    look_ms: int = 0  # when its steps and its load are looked at again

    def goes_on(self, company: Company | None) -> bool:
        """Whether it shares what it shared."""
        if company is None:
            return self.share == ""
        return company.share == self.share and company.other == self.company

    def alone_s(self, share: str) -> float | None:
        """Seconds of a step where nothing as tight as `share` was shared; the wider the rest was the better."""
        level = max((level for level in self.paces if level > LEVELS[share]), default=None)
        return None if level is None else self.paces[level]


@dataclass(frozen=True, slots=True)
class _Named:
    """The keys of an attempt, and what they were made of."""

    told: Submitted | None
    ranks: tuple[RankPlacement, ...]
    keys: Keys


class CoRuns:
    """One writer. `see` at each tick; everything may be seen as often as one likes."""

    def __init__(self) -> None:
        self._watched: dict[Attempt, _Watched] = {}
        self._together: dict[tuple[Attempt, Attempt], tuple[Share, Keys, Keys, float]] = {}  # and seconds of a step
        self._found: dict[tuple[Attempt, Attempt], CoRun] = {}  # oldest first
        self._loads: dict[int, tuple[float, ...]] = {}  # key -> load alone, the oldest first
        self._turns: dict[int, tuple[float, ...]] = {}
        self._keys: dict[Attempt, _Named] = {}
        self._neighbours = Neighbours()
        self.divided: frozenset[str] = frozenset()  # as last seen

    @property
    def found(self) -> Mapping[tuple[Attempt, Attempt], CoRun]:
        """Attempt and partner -> their newest co-run, the oldest first."""
        return self._found

    @property
    def going(self) -> dict[tuple[Attempt, Attempt], CoRun]:
        """Those of `found` that go on."""
        pairs = ((key, row.company) for key, row in self._watched.items() if row.company is not None)
        return {pair: self._found[pair] for pair in pairs if pair in self._found}

    @property
    def loads(self) -> Mapping[int, tuple[float, ...]]:
        """Job and kind -> compute, bandwidth, memory (ratios) as last seen of one that ran alone; NaN: unknown."""
        return self._loads

    @property
    def turns(self) -> Mapping[int, tuple[float, ...]]:
        """Job and kind -> seconds of a step alone, and the share of it that is communication, where steps tell it."""
        return self._turns

    def keys_of(self, attempts: Iterable[JobAttempt]) -> dict[Attempt, Keys]:
        """The keys of these attempts; of those that were asked for before they are remembered."""
        known, self._keys = self._keys, {}
        for row in attempts:
            key = row.job, row.attempt
            named = known.get(key)
            if named is None or named.told is not row.submission or named.ranks is not row.ranks:
                named = _Named(row.submission, row.ranks, job_keys(shape_of(row)))
            self._keys[key] = named
        return {key: named.keys for key, named in self._keys.items()}

    def see(
        self,
        running: Sequence[JobAttempt],
        keys: Mapping[Attempt, Keys],
        divided: Collection[str],
        loads: NDArray[np.floating],
        now_ms: int,
        wiring: Wiring = NOWHERE,
    ) -> None:
        """Take in one moment.

        keys: of the running ones; divided: GPUs (`node/index`) with MIG instances; loads: (running, 3)
        compute, bandwidth and memory, NaN unknown; wiring: the same object until another topology tells otherwise.
        """
        self.divided = frozenset(divided)
        met = self._neighbours.see(running, self.divided, wiring)
        rows = {(attempt.job, attempt.attempt): attempt for attempt in running}
        for key in self._watched.keys() - rows.keys():
            del self._watched[key]
        for number, (key, attempt) in enumerate(rows.items()):
            company, last = met.get(key), self._watched.get(key)
            if last is None or last.keys != keys[key] or not last.goes_on(company):
                joined_ms = _joined_ms(rows, key, company, now_ms)
                watched = self._watched[key] = _begun(last, keys[key], company, joined_ms, now_ms)
            else:
                watched = last
            if 0 < watched.look_ms - now_ms <= LOOK_MS:
                continue
            pace_s = self._look(watched, attempt, loads[number], now_ms)
            other = watched.company
            if pace_s is None or other is None or company is None or met.get(other) != Company(company.share, key):
                continue
            self._together[key, other] = company.share, watched.keys, keys[other], pace_s
        self._match()

    def _look(self, watched: _Watched, attempt: JobAttempt, load: NDArray[np.floating], now_ms: int) -> float | None:
        """Its pace since it shares what it shares, as far as that is known yet; what is alone is kept."""
        level = LEVELS[watched.share]
        steps = _since(attempt, watched.since_ms, now_ms)
        pace_s = _pace(steps) if len(steps) >= FEWEST_STEPS else None
        if pace_s is not None:
            watched.paces[level], watched.look_ms = pace_s, now_ms + LOOK_MS
            told = [step.parts.communication / step.duration_s for step in steps if step.parts and step.duration_s > 0]
            if told and (level == LEVELS[""] or (level > NOT_ALONE and watched.keys[0] not in self._turns)):
                _keep(self._turns, watched.keys, (pace_s, min(1.0, _median(told))))
        settled = now_ms - watched.since_ms >= SETTLED_S * 1000
        if level > NOT_ALONE and settled and math.isfinite(load[0]):
            watched.look_ms = now_ms + LOOK_MS
            _keep(self._loads, watched.keys, tuple(round(float(value), 4) for value in load))
        return pace_s

    def _match(self) -> None:
        """Co-runs of which both paces are known. A pace beside another waits until then, or until its own job ends."""
        for pair, (share, keys, partner, together_s) in list(self._together.items()):
            watched = self._watched.get(pair[0])
            if watched is None:
                del self._together[pair]
            elif (alone_s := watched.alone_s(share)) is not None:
                del self._together[pair]
                self._found.pop(pair, None)
                self._found[pair] = CoRun(share, keys, partner, _clipped(alone_s / together_s))
                while len(self._found) > MOST_CO_RUNS:
                    del self._found[next(iter(self._found))]
        while len(self._together) > MOST_CO_RUNS:
            del self._together[next(iter(self._together))]

    def move(self, by_ms: int) -> None:
        """Move what goes on with a clock that was set."""
        for row in self._watched.values():
            row.since_ms += by_ms
            row.look_ms += by_ms

    def dump(self) -> dict[str, Any]:
        """What a snapshot keeps: plain lists and numbers, copied."""
        return {
            "watched": [
                [*key, row.keys, row.company, row.share, row.since_ms, row.paces, row.look_ms]
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

    def load(self, kept: Mapping[str, Any]) -> None:
        """The inverse of `dump`, into an empty one; what is no speed is left out."""
        for job, attempt, keys, company, share, since_ms, paces, look_ms in kept["watched"]:
            if share in LEVELS and isinstance(paces, dict):  # versions before kept one pace, and other shares
                other = tuple(company) if company else None
                self._watched[job, attempt] = _Watched(_pair(keys), other, share, since_ms, paces, look_ms)
        for job, attempt, other, number, share, keys, partner, seconds in kept["together"]:
            if seconds > 0:
                self._together[(job, attempt), (other, number)] = share, _pair(keys), _pair(partner), seconds
        for job, attempt, other, number, share, keys, partner, speed in kept["found"]:
            if math.isfinite(speed):
                self._found[(job, attempt), (other, number)] = CoRun(
                    share, _pair(keys), _pair(partner), _clipped(speed)
                )
        self._loads = {key: tuple(load) for key, *load in kept["loads"]}
        self._turns = {key: tuple(turns) for key, *turns in kept["turns"]}
        self.divided = frozenset(kept.get("divided", ()))  # versions before kept none


def _joined_ms(rows: Mapping[Attempt, JobAttempt], key: Attempt, company: Company | None, now_ms: int) -> int:
    """When the younger of the two started."""
    both = (key, company.other if company else None)
    return max(rows[one].started_ms or now_ms for one in both if one is not None)


def _begun(last: _Watched | None, keys: Keys, company: Company | None, joined_ms: int, now_ms: int) -> _Watched:
    """A new watch, for the company or the size has changed.

    It counts from when the younger of the two started, if that was lately and nothing was shared before.
    """
    if last is not None and last.keys != keys:
        last = None
    share: Share | Literal[""] = "" if company is None else company.share
    other = None if company is None else company.other
    came = joined_ms >= now_ms - LATELY_MS and (last is None or (last.share == "" and other is not None))
    return _Watched(keys, other, share, joined_ms if came else now_ms, {} if last is None else last.paces)


def _pair(keys: Sequence[int]) -> Keys:
    return keys[0], keys[1]


def _since(attempt: JobAttempt, since_ms: int, now_ms: int) -> list[Step]:
    """The job's steps that began after `since_ms`; the first ones are of both times.

    What lies ahead was told by a clock that was set back since, and may be of another time.
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


def _keep(table: dict[int, tuple[float, ...]], keys: Keys, values: tuple[float, ...]) -> None:
    """Of the job and of its kind; what was kept longest ago makes room."""
    for key in keys:
        table.pop(key, None)
        table[key] = values
    while len(table) > MOST_KEPT:
        del table[next(iter(table))]


def _clipped(speed: float) -> float:
    return min(max(speed, SLOWEST), FASTEST)


def _pace(steps: Sequence[Step]) -> float | None:
    """Median seconds of a step; None where that is no pace."""
    pace_s = _median(step.duration_s for step in steps)
    return pace_s if 0 < pace_s < math.inf else None


def _median(values: Iterable[float]) -> float:
    """Of some tens of numbers, for which numpy takes longer."""
    return float(statistics.median(values))
