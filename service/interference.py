"""What is known of jobs that share hardware, from the pipeline to the API: one board section, learned once.

    doc.interference   jobs {job: keys}   loads {key: compute, bandwidth, memory}   turns {key: seconds, communication}
                       shares {gpu|mig|pcie|nic|rail: co-runs, what they teach}

Keys are texts of 64-bit numbers. The rule speaks for jobs that share a GPU; MIG slices divide it, so nothing is lost
by them; on a link it is how often two periodic jobs meet. What co-runs add comes on top (models.interference).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from features.co_runs import CoRun, CoRuns, Keys
from models.interference import LOADS, Pairs, Prediction, Residuals, gpu_prior, learn, predict
from models.link_overlap import Overlap, Turns, overlap
from service.board import Section
from service.isolation import isolation_sections
from service.publish import Tick, encode

SECTION = "doc.interference"
READ = (("sm_active", "gpu_util"), ("dram_active", "mem_copy_util"))  # the first that is known
NOBODY: Keys = (0, 0)
UNKNOWN = (math.nan,) * len(LOADS)
QUANTILE = 0.1

Array = NDArray[np.float64]


class Taught(msgspec.Struct):
    """Co-runs on one kind of hardware. pairs: [load, partner's load, keys, partner's keys] a row."""

    pairs: list[tuple[list[float | None], list[float | None], Keys, Keys]]
    weight: list[float]
    errors: list[float]


class Known(msgspec.Struct):
    """The section."""

    jobs: dict[str, Keys]
    loads: dict[str, list[float | None]]
    turns: dict[str, tuple[float, float]]
    shares: dict[str, Taught]


class Party(msgspec.Struct):
    """One of two jobs: what it is called by, and what is known of it alone."""

    keys: Keys
    load: Sequence[float] = UNKNOWN
    turns: Turns | None = None

    @property
    def known(self) -> bool:
        return math.isfinite(self.load[0])


class Speeds(msgspec.Struct):
    """Of a beside b and of b beside a. meets: on a link, at which shifts how fast."""

    found: Prediction
    meets: Overlap | None


def sharing_sections(co_runs: CoRuns, tick: Tick, mig: Mapping[str, Mapping[str, float]]) -> list[Section]:
    """What jobs that share hardware do to each other, and what isolations rest on. mig: GPU -> instance -> GiB."""
    return [interference_section(co_runs, tick, mig), *isolation_sections(tick, mig)]


def interference_section(co_runs: CoRuns, tick: Tick, divided: Collection[str]) -> Section:
    """What this tick teaches, and all that is known after it. divided: GPUs (`node/index`) with MIG instances."""
    keys = co_runs.keys_of([*tick.running, *tick.queued])
    co_runs.see(tick.running, keys, divided, loads_of(tick), tick.now_ms)
    known = Known(
        jobs={job: of for (job, _), of in keys.items()},
        loads={str(key): [_told(value) for value in load] for key, load in co_runs.loads.items()},
        turns={str(key): (turns[0], turns[1]) for key, turns in co_runs.turns.items()},
        shares={},
    )
    for share in sorted({row.share for row in co_runs.found}):
        known.shares[share] = _taught(known, [row for row in co_runs.found if row.share == share])
    return Section(SECTION, encode(known), tick.now_ms)


def _told(value: float) -> float | None:
    return value if math.isfinite(value) else None


def loads_of(tick: Tick) -> Array:
    """(running, LOADS) means over the GPUs that each attempt holds, as they were in the last two minutes or are now."""
    found = np.full((len(tick.running), len(LOADS)), np.nan)
    if tick.gpu is None or not len(tick.gpu.values):
        return found
    seen = (tick.occupancy.holder >= 0) & (tick.gpu_rows >= 0) & (tick.gpu_rows < len(tick.gpu.values))
    number, rows = tick.occupancy.holder[seen], tick.gpu_rows[seen]
    for column, names in enumerate(READ):
        first, other = (_lately(tick, name)[rows] for name in names)
        found[:, column] = _mean(number, np.where(np.isfinite(first), first, other), len(found))
    used, free = (tick.gpu.column(name)[rows].astype(np.float64) for name in ("fb_used_bytes", "fb_free_bytes"))
    total = used + free
    share = np.divide(used, total, out=np.full(len(used), np.nan), where=total > 0)
    found[:, 2] = _mean(number, share, len(found))
    return found


def _lately(tick: Tick, name: str) -> Array:
    assert tick.gpu is not None
    mean = f"{name}_mean_2m"
    return tick.gpu.column(mean if mean in tick.gpu.names else name).astype(np.float64)


def _mean(number: NDArray[np.int32], values: Array, length: int) -> Array:
    known = np.isfinite(values)
    count = np.bincount(number[known], minlength=length).astype(np.float64)
    total = np.bincount(number[known], weights=values[known], minlength=length)
    means: Array = np.divide(total, count, out=np.full(length, np.nan), where=count > 0)
    return means


def _taught(known: Known, rows: Sequence[CoRun]) -> Taught:
    parties = [(_party(known, row.keys), _party(known, row.partner_keys)) for row in rows]
    pairs = Pairs.of([(one.load, other.load, one.keys, other.keys) for one, other in parties])
    prior = np.array([prior_of(one, other, row.share)[0] for (one, other), row in zip(parties, rows, strict=True)])
    residuals = learn(pairs, np.array([row.speed for row in rows]) - np.nan_to_num(prior, nan=1.0))
    told = [
        ([_told(value) for value in one.load], [_told(value) for value in other.load], one.keys, other.keys)
        for one, other in parties
    ]
    return Taught(told, residuals.weight.tolist(), residuals.errors.tolist())


def _party(known: Known, keys: Keys) -> Party:
    """What is known of the job itself, else of its kind."""
    load = next((found for key in keys if (found := known.loads.get(str(key)))), None)
    turns = next((pace for key in keys if (pace := known.turns.get(str(key)))), None)
    told = UNKNOWN if load is None else [math.nan if value is None else value for value in load]
    return Party(keys, told, None if turns is None else Turns(turns[0], turns[1]))


def party(known: Known, keys: Keys | None) -> Party:
    """The job of these keys; None is one that nobody knows."""
    return Party(NOBODY) if keys is None else _party(known, keys)


def residuals_of(taught: Taught | None) -> Residuals:
    """What the board says that co-runs teach."""
    if taught is None:
        return learn(Pairs.of([]), np.zeros(0))
    rows = [([math.nan if value is None else value for value in load] for load in row[:2]) for row in taught.pairs]
    loads = [tuple(row) for row in rows]
    pairs = Pairs.of([(one, other, row[2], row[3]) for (one, other), row in zip(loads, taught.pairs, strict=True)])
    return Residuals(pairs, np.array(taught.weight), np.array(taught.errors))


def prior_of(a: Party, b: Party, share: str) -> tuple[float, Overlap | None]:
    """How fast a should be beside b before any co-run is looked at; NaN where that cannot be told."""
    if share == "gpu":
        return float(gpu_prior(Pairs.of([(a.load, b.load, a.keys, b.keys)]))[0]), None
    if share == "mig":
        return (1.0 if a.known or b.known else math.nan), None
    if a.turns is None or b.turns is None:
        return math.nan, None
    meets = overlap(a.turns, b.turns)
    return float(meets.speed_a.mean()), meets


def speeds(a: Party, b: Party, share: str, residuals: Residuals) -> Speeds:
    """Both ways. On a link the bound is at most what one shift in ten falls below."""
    pairs = Pairs.of([(a.load, b.load, a.keys, b.keys), (b.load, a.load, b.keys, a.keys)])
    prior, meets = prior_of(a, b, share)
    found = predict(pairs, np.array([prior, prior_of(b, a, share)[0]]), residuals)
    if meets is not None:
        worst = np.quantile([meets.speed_a, meets.speed_b], QUANTILE, axis=1)
        found = replace(found, lower_90=np.fmin(found.lower_90, np.minimum(found.p50, worst)))
    return Speeds(found, meets)
