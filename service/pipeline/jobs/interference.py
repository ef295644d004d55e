"""Facts about jobs that share hardware. The pipeline publishes them for the API.

    share.job       (k,) uint64 hashes of job names, sorted    share.job.keys    (k, 2) uint64: the job and its kind
    share.load      (k,) uint64 keys, sorted                   share.load.alone  (k, ALONE) NaN unknown
    doc.interference    gpu|mig|pcie|nic|rail → co-runs and the residuals learnt from them
    doc.co_runs         job → the co-run that it is in now, and whether it is slower there than its bound

A rule predicts the speed of jobs that share a GPU. MIG slices lose nothing. On a link, the prediction
depends on how often the sending phases of two periodic jobs coincide. Observed co-runs correct these
predictions (fleetcast.models.jobs.interference). Learning has cubic cost. A few co-runs are learnt at
once, and many each half minute.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.co_runs import MOST_CO_RUNS, READ, CoRun, CoRuns, Keys, KeyTable, compute_mean_loads
from fleetcast.features.sharing import Attempt, Wiring
from fleetcast.fleet.topology import Topology
from fleetcast.models.jobs.interference import (
    LOADS,
    Pairs,
    Prediction,
    Residuals,
    compute_gpu_prior,
    compute_held_out_margins,
    fit_residuals,
    predict_speeds,
)
from fleetcast.models.jobs.link_overlap import LinkFit, SendingTurns, compute_overlap, fit_link
from fleetcast.models.versions.registry import Registry
from fleetcast.service.board.board import Board, Section
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.documents import round_number
from fleetcast.service.pipeline.jobs.co_run_versions import ServedCoRuns
from fleetcast.service.pipeline.jobs.isolation import make_isolation_sections, stack_gpu_readings
from fleetcast.service.pipeline.publish import encode
from fleetcast.service.pipeline.tick import Tick

SECTION, NOW = "doc.interference", "doc.co_runs"
JOBS, ALONE_OF = ("share.job", "share.job.keys"), ("share.load", "share.load.alone")
ALONE = (*LOADS, "step_s", "communication")
LEARN_MS = 30_000
FEW = 64  # co-runs that take no time to learn from
FEATURES = (*(name for names in READ for name in names), "fb_used_bytes", "fb_free_bytes")
ON_GPU = ("gpu", "mig")
EXPLAINED = ("unknown", "compute", "communication")  # what of a job's steps grows beside another
NO_KEYS: Keys = (0, 0)
UNKNOWN = (math.nan,) * len(LOADS)

Array = NDArray[np.float64]
Pair = tuple[Attempt, Attempt]


class LearntCoRuns(msgspec.Struct):
    """The co-runs on one kind of hardware, with the residuals learnt from them.

    pairs: one row for each co-run, [the job's load, its partner's load, the job's keys, its partner's keys].
    """

    pairs: list[tuple[list[float | None], list[float | None], Keys, Keys]]
    weight: list[float]
    errors: list[float]
    strange: list[float]


@dataclass(frozen=True, slots=True)
class CoRunTables:
    """The tables on a board about shared hardware. The module's docstring lists them."""

    jobs: NDArray[np.uint64]
    job_keys: NDArray[np.uint64]
    keys: NDArray[np.uint64]
    alone: NDArray[np.float32]

    @classmethod
    def from_board(cls, board: Board) -> "CoRunTables":
        """Read the tables from a board. Raises KeyError before the pipeline publishes them."""
        return cls(*(board.array(name) for name in (*JOBS, *ALONE_OF)))

    def find_job_keys(self, job: str) -> Keys | None:
        at = _find_row(self.jobs, hash_job_name(job))
        return None if at < 0 else (int(self.job_keys[at, 0]), int(self.job_keys[at, 1]))

    def find_party(self, keys: Keys | None) -> "Party":
        """Return one side of a co-run. Its loads are those of the job, or of its kind if the job's are unknown.

        If `keys` is None, nothing is known about the job.
        """
        if keys is None:
            return Party(NO_KEYS)
        rows = [self.alone[at].tolist() for key in keys if (at := _find_row(self.keys, key)) >= 0]
        return _make_party(keys, rows)


class Party(msgspec.Struct):
    """One of two jobs that share hardware: its keys, and how it behaves when it runs alone."""

    keys: Keys
    load: Sequence[float] = UNKNOWN
    turns: SendingTurns | None = None

    @property
    def is_known(self) -> bool:
        return math.isfinite(self.load[0])


class Speeds(msgspec.Struct):
    """The predicted speeds of two jobs a and b that share hardware.

    known: for each job, whether anything is known about it. fit: how well the jobs fit together on a link. It
    is None on other hardware, or if the traffic of a job is unknown.
    """

    found: Prediction
    known: tuple[bool, bool]
    fit: LinkFit | None


class ActiveCoRun(msgspec.Struct):
    """A co-run in progress: the job's speed relative to running alone, and the lower bound of this speed.

    lower_90: the speed that nine in ten such co-runs exceed.
    """

    beside: str
    share: str
    speed: float
    lower_90: float | None
    slower: bool


class InterferenceLearner(Capability):
    """The capability that learns how jobs on shared hardware slow each other down.

    It publishes the latest results as board sections.
    """

    def __init__(self, co_runs: CoRuns, registry: Registry | None = None) -> None:
        """Start with the pipeline's own co-runs.

        registry: the registry with versions of past co-runs, which are used in addition to `co_runs`. None if
        there is no registry.
        """
        self.co_runs = co_runs
        self._served = ServedCoRuns(registry)
        self._found: dict[Pair, CoRun] = {}
        self._bounds: dict[Pair, float] = {}
        self._learnt_ms = -LEARN_MS
        self._document = encode({})
        self._topology: Topology | None = None
        self._wiring, self._waiting_keys = Wiring(), KeyTable()

    def make_sections(self, tick: Tick) -> list[Section]:
        """Observe a tick's co-runs. Returns the sections about them and about isolation."""
        if tick.topology is not self._topology:
            self._topology, self._wiring = tick.topology, Wiring(tick.topology)
        running, waiting = tick.events.running, tick.open.waiting
        places = tick.events.placements
        keys = tick.memory.get_or_make("keys", (places,), lambda: self.co_runs.keys_of(running))
        divided = tick.mig.keys() | _find_silent_gpus(self.co_runs.divided - tick.mig.keys(), tick)
        self.co_runs.observe(running, keys, divided, compute_attempt_loads(tick), tick.now_ms, self._wiring, places)
        waiting_keys = self._waiting_keys(waiting)
        jobs = tick.memory.get_or_make("jobs by key", (keys, *waiting), lambda: _make_jobs_table(keys | waiting_keys))
        fresh = self._served.refresh(tick.now_ms)
        alone = self._served.alone | _collect_alone_values(self.co_runs)
        self._learn_if_due(alone, tick.now_ms, fresh)
        data: list[tuple[str, NDArray[Any] | bytes]] = [
            *zip(JOBS, jobs, strict=True),
            *zip(ALONE_OF, _make_table(alone, len(ALONE), np.float32), strict=True),
            (SECTION, self._document),
            (NOW, encode(self.list_active_co_runs())),
        ]
        return [Section(name, part, tick.now_ms) for name, part in data] + make_isolation_sections(tick)

    @property
    def version(self) -> str:
        """The version of past co-runs in use, such as interference-0002. Empty if no version is in use."""
        return self._served.version

    def list_active_co_runs(self) -> dict[str, ActiveCoRun]:
        """Return job → the co-run that the job is in now."""
        rows = {}
        for pair, row in self.co_runs.active_co_runs.items():
            bound = self._bounds.get(pair, math.nan)
            slower = row.speed < bound
            rows[pair[0][0]] = ActiveCoRun(pair[1][0], row.share, round(row.speed, 4), round_number(bound), slower)
        return rows

    def _learn_if_due(self, alone: Mapping[int, tuple[float, ...]], now_ms: int, fresh: bool) -> None:
        found = self.co_runs.newest_co_runs
        due = fresh or not 0 <= now_ms - self._learnt_ms < LEARN_MS  # a clock may be set back
        if found == self._found and not fresh and not (due and found):
            return
        if not due and len(found) > FEW:
            return
        self._found, self._learnt_ms, self._bounds = dict(found), now_ms, {}
        taught = {}
        past = self._served.co_runs[max(0, len(self._served.co_runs) + len(found) - MOST_CO_RUNS) :]
        for share in sorted({row.share for row in (*past, *found.values())}):
            rows = {pair: row for pair, row in found.items() if row.share == share}
            before = [row for row in past if row.share == share]
            of = taught[share] = _learn_co_runs([*before, *rows.values()], alone)
            speed, errors = np.array([row.speed for row in rows.values()]), np.array(of.errors)[len(before) :]
            bounds = np.clip(speed - errors + np.minimum(compute_held_out_margins(errors), 0.0), 0.0, None)
            self._bounds |= dict(zip(rows, bounds.tolist(), strict=True))
        self._document = encode(taught)


def explain_by_co_run(score: Mapping[str, Any], going: Mapping[str, Any] | None) -> dict[str, str]:
    """Return a cause and a sentence if a job's co-run explains why the job is slow. Returns {} otherwise.

    A co-run explains this only if it is slower than its bound and no other cause is known. score: the job's
    straggler score. going: the job's present co-run, or None if it has none.
    """
    unexplained = score["slow"] and score["culprit"]["kind"] == "nobody" and score["cause"] in EXPLAINED
    if not unexplained or going is None or not going["slower"]:
        return {}
    beside = (
        f"next to {going['beside']} on the same {going['share']} it runs at {going['speed']:.0%} of its speed alone"
    )
    more = f"{beside}, where {going['lower_90']:.0%} and more was expected"
    return {"cause": "interference", "sentence": f"{score['sentence']}; {more}"}


def _collect_alone_values(co_runs: CoRuns) -> dict[int, tuple[float, ...]]:
    """Return key → the values named in ALONE, from the pipeline's own co-runs."""
    unknown = (math.nan,) * 2
    found = {key: (*load, *co_runs.step_times_alone.get(key, unknown)) for key, load in co_runs.loads_alone.items()}
    return found | {key: (*UNKNOWN, *turns) for key, turns in co_runs.step_times_alone.items() if key not in found}


def _make_table(rows: Mapping[int, Sequence[float]], width: int, kind: Any) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    """Return the sorted keys, (k,) uint64, and the values of each key, (k, width)."""
    keys = np.fromiter(rows, np.uint64, len(rows))
    values = np.array(list(rows.values()), kind).reshape(len(rows), width)
    order = np.argsort(keys)
    return keys[order], values[order]


def _make_jobs_table(keys: Mapping[Attempt, Keys]) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    return _make_table({_cached_name_key(job): own for (job, _), own in keys.items()}, 2, np.uint64)


def _find_row(keys: NDArray[np.uint64], key: int) -> int:
    """Return the row of a key in a sorted column, or -1 if the column lacks it."""
    at = int(np.searchsorted(keys, np.uint64(key)))
    return at if at < len(keys) and int(keys[at]) == key else -1


def hash_job_name(job: str) -> int:
    digest = hashlib.blake2b(job.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


_cached_name_key = lru_cache(65_536)(hash_job_name)  # of the fleet's jobs, never of what a client asks


def compute_attempt_loads(tick: Tick) -> Array:
    """Return the mean loads over the GPUs that each attempt holds: (running, LOADS).

    The loads are those of the last two minutes, or else the present ones.
    """
    gpu = tick.frames.gpu
    seen = tick.held & (tick.gpu_rows >= 0) & (tick.gpu_rows < len(gpu.values))
    number = tick.occupancy.holder[seen].astype(np.intp)
    return compute_mean_loads(gpu, number, tick.gpu_rows[seen].astype(np.intp), len(tick.events.running))


def _find_silent_gpus(gpus: Collection[str], tick: Tick) -> set[str]:
    """Return the GPUs among `gpus` without telemetry now.

    Their last known state is still used.
    """
    if not gpus:
        return set()
    is_known = np.isfinite(stack_gpu_readings(tick))
    found = set()
    for gpu in gpus:
        node, _, index = gpu.rpartition("/")
        if node in tick.rows and not (
            index.isdigit() and int(index) < is_known.shape[1] and is_known[tick.rows[node], int(index)].any()
        ):
            found.add(gpu)
    return found


def _learn_co_runs(rows: Sequence[CoRun], alone: Mapping[int, tuple[float, ...]]) -> LearntCoRuns:
    def make_party(keys: Keys) -> Party:
        return _make_party(keys, [alone[key] for key in keys if key in alone])

    parties = [(make_party(row.keys), make_party(row.partner_keys)) for row in rows]
    pairs = Pairs.from_rows([(one.load, other.load, one.keys, other.keys) for one, other in parties])
    prior = predict_prior_speeds(pairs, parties, [row.share for row in rows])
    residuals = fit_residuals(pairs, np.array([row.speed for row in rows]) - np.nan_to_num(prior, nan=1.0))
    stated = [
        (
            [_convert_nan_to_none(value) for value in one.load],
            [_convert_nan_to_none(value) for value in other.load],
            one.keys,
            other.keys,
        )
        for one, other in parties
    ]
    return LearntCoRuns(stated, residuals.weight.tolist(), residuals.errors.tolist(), residuals.strange.tolist())


def _convert_nan_to_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _make_party(keys: Keys, alone: Sequence[Sequence[float]]) -> Party:
    """Make one side of a co-run from the loads that were observed while the job ran alone.

    alone: rows of ALONE, first the row of the job itself, then the row of its kind. Either may be missing.
    """
    load = next((row[: len(LOADS)] for row in alone if math.isfinite(row[0])), UNKNOWN)
    turns = next((row[len(LOADS) :] for row in alone if math.isfinite(row[len(LOADS)])), None)
    return Party(keys, load, None if turns is None else SendingTurns(turns[0], turns[1]))


def decode_residuals(taught: LearntCoRuns | None) -> Residuals:
    """Return the residuals learnt from co-runs, as on a board."""
    if taught is None:
        return fit_residuals(Pairs.from_rows([]), np.zeros(0))
    rows = [([math.nan if value is None else value for value in load] for load in row[:2]) for row in taught.pairs]
    loads = [tuple(row) for row in rows]
    pairs = Pairs.from_rows(
        [(one, other, row[2], row[3]) for (one, other), row in zip(loads, taught.pairs, strict=True)]
    )
    return Residuals(pairs, np.array(taught.weight), np.array(taught.errors), np.array(taught.strange))


def predict_prior_speeds(pairs: Pairs, parties: Sequence[tuple[Party, Party]], shares: Sequence[str]) -> Array:
    """Predict the speed of each job next to its partner without learning from co-runs: (n,), NaN if unknown.

    parties: the two sides of each of `pairs`. shares: the hardware that the two share.
    """
    rows = zip(compute_gpu_prior(pairs), parties, shares, strict=True)
    return np.array([prior if share == "gpu" else _predict_off_gpu(*sides, share) for prior, sides, share in rows])


def _predict_off_gpu(a: Party, b: Party, share: str) -> float:
    """Predict the speed of a next to b on MIG slices or a link. Returns NaN if it is unknown."""
    if share == "mig":
        return 1.0 if a.is_known or b.is_known else math.nan
    if a.turns is None or b.turns is None:
        return math.nan
    return float(_meets(a.turns, b.turns).speed_a.mean())


_meets = lru_cache(4096)(compute_overlap)


def predict_party_speeds(a: Party, b: Party, share: str, residuals: Residuals, more: Sequence[Party] = ()) -> Speeds:
    """Predict the speeds of two jobs that share hardware.

    more: other jobs on the same link. How well the jobs fit together depends on them, too.
    """
    pairs = Pairs.from_rows([(a.load, b.load, a.keys, b.keys), (b.load, a.load, b.keys, a.keys)])
    found = predict_speeds(pairs, predict_prior_speeds(pairs, [(a, b), (b, a)], [share, share]), residuals)
    on_gpu = share in ON_GPU
    alone = [one.is_known if on_gpu else one.turns is not None for one in (a, b)]
    known = alone[0] or found.observed[0] > 0, alone[1] or found.observed[1] > 0
    turns = [one.turns for one in (a, b, *more) if one.turns is not None]
    fits = not on_gpu and len(turns) == 2 + len(more)
    return Speeds(found, (bool(known[0]), bool(known[1])), fit_link(turns) if fits else None)
