"""Estimates of when a request starts, as quantiles over sampled futures, with the constraint and jobs it waits for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint, check_request
from fleetcast.fleet.topology import Level
from fleetcast.placement.ahead.calendars import Array, StartRestrictions, find_earliest_start
from fleetcast.placement.ahead.paths import MIDDLE, NO_GPUS, GpusBeforeStart, Hindrance, Timelines
from fleetcast.placement.ahead.slot_times import Place
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.words import describe_needs, explain_shortage, format_count
from fleetcast.placement.plan.promised import make_gang_hold_name, make_hold_name

WORTH_S = 60.0  # a constraint that costs less is not the one that it waits for
LEVELS = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
NEVER_SHARE = 0.5
ROUNDING_S = 0.5  # sampled times are float32 seconds

KNOWN_SHARE = 0.9  # of the paths in which it must start, where a job's run time is unknown
NEXT_JOB = "the next job"
NAMED = 3  # jobs of unknown run time, in a sentence

Quantiles = dict[str, int]
StartBasis = Literal["room", "runs", "limit"]  # it starts now; ended jobs or a fitted model; time limits alone


class Blocker(msgspec.Struct, frozen=True):
    """A job that holds, or will hold, a GPU that the request waits for.

    ends_ms: p10, p50 and p90 of the time at which the job releases the GPU.
    """

    job: str
    node: str
    ends_ms: Quantiles


class StartEstimate(msgspec.Struct, frozen=True):
    """The start time of a request, and the constraint and jobs that it waits for."""

    start_ms: Quantiles | None  # p10, p50, p90; None: not even when everything has ended
    blocked_by: tuple[Blocker, ...]
    constraint: str  # what it waits for longest: gpus, gpu_model, pool, topology, risk, quota, cpus, memory, power
    sentence: str
    as_of_ms: int = 0  # of the sampling
    by: StartBasis | None = None  # what start_ms is known by; None: it is not known
    awaits: str = ""  # what ends when it starts: `the next job`, `reservation 'mlperf'`; empty: nothing does


@dataclass(frozen=True, slots=True)
class Relaxation:
    """A constraint of a request, and the request without this constraint."""

    constraint: str
    request: PlacementRequest


class RoomForecast(msgspec.Struct, frozen=True):
    """The GPUs that are free now, the GPUs that requests wait for, and when one further GPU will be free.

    opens_ms: p10, p50 and p90 of the time when all these requests have started and a GPU is free. None
    if no GPU is free even after all jobs have ended.
    """

    free_gpus: int
    waiting_gpus: int
    opens_ms: Quantiles | None
    sentence: str
    as_of_ms: int = 0  # of the sampling
    by: StartBasis | None = None  # as of a start time


Adjust = Callable[[str | None, Quantiles], Quantiles]


def skip_correction(waiting: str | None, start_ms: Quantiles) -> Quantiles:
    """Return the sampled start times without a correction."""
    return start_ms


def estimate_start(
    request: PlacementRequest, timelines: Timelines, now_ms: int | None = None, adjust: Adjust = skip_correction
) -> StartEstimate:
    """Estimate when a request starts, whether it waits already or comes now.

    A newcomer goes behind all waiting requests of its priority. Raises RequestError if the request is
    invalid.

    adjust: function that corrects the sampled quantiles. Its arguments are the request_id of a waiting
    request (None for a newcomer) and the quantiles.
    """
    check_request(request)
    now_ms = max(timelines.now_ms, now_ms or 0)
    if not request.gpus_per_node:
        return _estimate_without_gpus(request, timelines, now_ms)
    place = _find_request_place(request, timelines)
    loosest = _find_tightest_constraint(request, timelines, place)
    constraint = loosest.constraint if loosest else "gpus"
    if is_behind_unknown(request, place.start_s, timelines) or _has_unknown_ahead(request, timelines):
        return StartEstimate(None, (), constraint, describe_unknown_jobs(timelines), timelines.now_ms)
    if not _is_likely_to_start(place):
        return StartEstimate(None, (), constraint, _explain_no_start(request, timelines), timelines.now_ms)
    waiting = timelines.find_waiting_id(request)
    if waiting is None or waiting not in timelines.before_start:
        start_s, hindrances = (
            place.start_s,
            GpusBeforeStart.from_calendar(place, timelines.choose_calendar(request)).list_hindrances(),
        )
    else:
        start_s, hindrances = timelines.starts_s[waiting], timelines.before_start[waiting].list_hindrances()
        if is_behind_unknown(request, start_s, timelines):
            own = request.job_name if request.job_name in timelines.unknown_jobs else ""
            said = describe_unknown_jobs(timelines, own)
            return StartEstimate(None, (), constraint, said, timelines.now_ms)
    awaits = _find_awaited_window(start_s, timelines.make_restrictions(request)) or (NEXT_JOB if hindrances else "")
    start_ms = clip_to_now(now_ms, adjust(waiting, compute_quantiles_ms(start_s, timelines.now_ms, now_ms)))
    ends = BlockerEnds(start_s, start_ms, lambda ends_ms: adjust(None, ends_ms))
    blockers = _find_blockers(request, hindrances, timelines, now_ms, ends)
    job = f"job {blockers[0].job}" if blockers else ""
    sentence = _describe_start(request, timelines, start_ms, job if awaits == NEXT_JOB else awaits, now_ms)
    basis = choose_start_basis(start_ms, timelines, now_ms)
    return StartEstimate(start_ms, blockers, constraint, sentence, timelines.now_ms, basis, awaits)


def _find_awaited_window(start_s: Array, bars: StartRestrictions) -> str:
    """Return the name of the window that ends when the request starts on the median path.

    Returns "" if there is no such window.
    """
    middle_s = float(np.sort(start_s)[MIDDLE])
    return next((one.name for one in bars.closures if abs(one.to_s - middle_s) <= ROUNDING_S), "")


def _explain_no_start(request: PlacementRequest, timelines: Timelines) -> str:
    """Explain in words why a request starts in none of the sampled futures.

    Work that no job event reports never ends in these futures, although it may really end.
    """
    view = timelines.rooms.empty
    screened = screen(request, view, timelines.options)
    lack = explain_shortage(request, view, screened)
    if "unknown_use" in screened.by_reason:
        return f"no start time is known, as no job event says when the work on the GPUs ends: {lack}"
    return f"does not fit even when all jobs have ended: {lack}"


def choose_start_basis(start_ms: Quantiles, timelines: Timelines, now_ms: int) -> StartBasis:
    """Return the basis of a start time: "room", "runs" or "limit".

    "room" means that there is room now. "limit" means that the run time of a job is known by its time limit
    alone. Otherwise the basis is "runs".
    """
    if start_ms["p90"] - now_ms < 1000 * WORTH_S:
        return "room"
    return "limit" if timelines.start_basis == "limit" else "runs"


def is_behind_unknown(request: PlacementRequest, start_s: Array, timelines: Timelines) -> bool:
    """Return whether a request has no start time only because of jobs whose run time is unknown."""
    if not timelines.unknown_jobs or np.isfinite(start_s).mean() >= KNOWN_SHARE:
        return False
    return fits_now(request, timelines.rooms.empty, timelines.options)


def _has_unknown_ahead(request: PlacementRequest, timelines: Timelines) -> bool:
    """Return whether a newcomer has to wait behind requests whose own start times are unknown."""
    if not timelines.unknown_jobs or timelines.find_waiting_id(request) is not None or timelines.fits_now(request):
        return False
    before = (entry.request for entry in timelines.entries)
    return any(is_behind_unknown(one, timelines.starts_s[one.request_id], timelines) for one in before)


def describe_unknown_jobs(timelines: Timelines, own: str = "") -> str:
    """Describe the jobs of unknown run time that a request waits behind.

    own: the request's own job, if it is one of them.

    `behind 2 jobs whose run time is not known ('a', 'b'): too few jobs have ended yet, and they have no
    time limit`.
    """
    if len(timelines.unknown_jobs) == 1:
        own = ""
    count = len(timelines.unknown_jobs) - bool(own)
    jobs = islice((job for job in timelines.unknown_jobs if job != own), NAMED)
    names = ", ".join(map(repr, jobs)) + (", …" if count > NAMED else "")
    have = "it has" if count == 1 else "they have"
    return (
        f"behind {format_count(count, 'job')} whose run time is not known ({names}): too few jobs have ended yet, "
        f"and {have} no time limit"
    )


def _estimate_without_gpus(request: PlacementRequest, timelines: Timelines, now_ms: int) -> StartEstimate:
    """Estimate the start of a request without GPUs: now if there is room, otherwise unknown.

    The sampled futures do not say when CPUs and host memory become free.
    """
    constraint = "cpus" if request.cpus is not None else "memory"
    if fits_now(request, timelines.view, timelines.options):
        start_ms = dict.fromkeys(LEVELS, now_ms)
        sentence = f"needs {describe_needs(request)}; there is room now"
        return StartEstimate(start_ms, (), constraint, sentence, timelines.now_ms, "room")
    lack = explain_shortage(request, timelines.view, screen(request, timelines.view, timelines.options))
    return StartEstimate(None, (), constraint, f"{lack}; when more comes free is not known", timelines.now_ms)


def compute_start_times(timelines: Timelines) -> dict[str, tuple[int, int, int]]:
    """Return request_id → start_ms at p10, p50 and p90 for all waiting requests.

    Requests that never fit, or whose start is unknown, are left out.
    """
    least = KNOWN_SHARE if timelines.unknown_jobs else np.nextafter(NEVER_SHARE, 1.0)
    ids = [name for name, start_s in timelines.starts_s.items() if np.isfinite(start_s).mean() >= least]
    if not ids:
        return {}
    starts_s = _compute_start_quantiles(np.stack([timelines.starts_s[name] for name in ids]).astype(np.float64))
    rows = (timelines.now_ms + np.round(1000 * starts_s)).astype(np.int64).tolist()
    return {name: (low, middle, high) for name, (low, middle, high) in zip(ids, rows, strict=True)}


def forecast_room(
    timelines: Timelines, starts_ms: Mapping[str, tuple[int, int, int]], newcomer: StartEstimate
) -> RoomForecast:
    """Forecast when there is room for one more GPU, once all waiting requests have started.

    starts_ms: the start times of the waiting requests. newcomer: the estimate for a request of one GPU
    behind them.
    """
    free = int(np.count_nonzero(timelines.view.free[timelines.view.is_open]))
    waiting_gpus = sum(timelines.gpus[name] for name in timelines.starts_s)  # of starts that are not known, too
    as_of_ms = timelines.now_ms
    if timelines.unknown_jobs and len(starts_ms) < len(timelines.starts_s):
        return RoomForecast(
            free, waiting_gpus, None, f"not known: requests wait {describe_unknown_jobs(timelines)}", as_of_ms
        )
    if newcomer.start_ms is None:
        word = "not known" if timelines.unknown_jobs else "no room"
        return RoomForecast(free, waiting_gpus, None, f"{word}: {newcomer.sentence}", as_of_ms)
    rows = [*starts_ms.values(), tuple(newcomer.start_ms.values())]
    opens_ms = {name: max(row[at] for row in rows) for at, name in enumerate(LEVELS)}
    free_now = 0 if newcomer.awaits else free  # those that are free are kept for others
    sentence = _describe_room(free_now, len(starts_ms), opens_ms, as_of_ms, newcomer.awaits)
    return RoomForecast(
        free, waiting_gpus, opens_ms, sentence, as_of_ms, choose_start_basis(opens_ms, timelines, as_of_ms)
    )


def _describe_room(free: int, waiting: int, opens_ms: Quantiles, now_ms: int, awaits: str = NEXT_JOB) -> str:
    """Return a sentence on when there is room for one more request.

    `room in 40 min (p90 65 min), once the 3 requests that wait have started`.
    awaits: the job or window whose end a newcomer waits for, or an empty text.
    """
    ending = f", when {awaits} ends" if awaits else ""
    if opens_ms["p90"] - now_ms < 1000 * WORTH_S:
        if not free:
            return f"room within a minute{ending}"
        return f"room now: {format_count(free, 'GPU')} {'is' if free == 1 else 'are'} free"
    lead = f"in {_format_lead(opens_ms['p50'] - now_ms)} (p90 {_format_lead(opens_ms['p90'] - now_ms)})"
    if not waiting:
        return f"room {lead}{ending}"
    who = "the request that waits has" if waiting == 1 else f"the {waiting:,} requests that wait have"
    return f"room {lead}, once {who} started"


def clip_to_now(now_ms: int, times_ms: Quantiles) -> Quantiles:
    """Return the quantiles with `now_ms` in place of times that have passed since the sampling.

    The event has not happened yet, so its time cannot be in the past.
    """
    return {name: max(now_ms, time_ms) for name, time_ms in times_ms.items()}


def compute_quantiles_ms(after_s: Array, since_ms: int, now_ms: int = 0) -> Quantiles:
    """Return {"p10", "p50", "p90"} in Unix ms of (path,) seconds after `since_ms`.

    No time is earlier than `now_ms`.
    """
    values = since_ms + np.round(1000 * _compute_start_quantiles(after_s[None].astype(np.float64)))[0]
    return {name: max(now_ms, int(value)) for name, value in zip(LEVELS, values.tolist(), strict=True)}


def _compute_start_quantiles(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (row, level) quantiles of (row, path) start times.

    If a request never starts on a path, its latest start on any other path is used.
    """
    finite = np.where(np.isfinite(rows), rows, -np.inf)
    rows = np.where(np.isfinite(rows), rows, finite.max(axis=1, keepdims=True))
    return np.asarray(np.quantile(rows, list(LEVELS.values()), axis=1).T)


def _find_request_place(request: PlacementRequest, timelines: Timelines) -> Place:
    bars = timelines.make_restrictions(request)
    place = find_earliest_start(request, timelines.choose_calendar(request), timelines.rooms, bars.run_s, bars)
    if request.gpu_share and _is_likely_to_start(place) and timelines.fits_now(request):
        return replace(place, start_s=np.zeros_like(place.start_s))
    return place


def _is_likely_to_start(place: Place) -> bool:
    return bool(np.isfinite(place.start_s).mean() > NEVER_SHARE)


def _find_tightest_constraint(request: PlacementRequest, timelines: Timelines, place: Place) -> Relaxation | None:
    """Return the constraint without which the request would start soonest, and the request without it.

    Returns None if the request only lacks free GPUs.
    """
    started, best = _compute_median_start(place), None
    soonest = started - WORTH_S
    allowed_s = float(np.sort(timelines.make_restrictions(request).allowed_s)[MIDDLE])
    if allowed_s > max(soonest, 0.0):
        return Relaxation("quota", request)
    room = timelines.rooms.count_members_per_node(request)
    for relaxed in _list_relaxations(request):
        if relaxed.constraint != "topology" and np.array_equal(
            timelines.rooms.count_members_per_node(relaxed.request), room
        ):
            continue  # no node is lost to it
        start_s = _compute_median_start(_find_request_place(relaxed.request, timelines))
        if start_s < soonest:
            soonest, best = start_s, relaxed
    return best


def _compute_median_start(place: Place) -> float:
    return float(np.sort(place.start_s)[MIDDLE])


def _list_relaxations(request: PlacementRequest) -> list[Relaxation]:
    def relax(**changed: Any) -> PlacementRequest:
        return msgspec.structs.replace(request, **changed)

    found = []
    if request.required is not None or request.spread:
        found.append(Relaxation("topology", relax(topology=TopologyConstraint(), spread=False)))
    if request.models:
        found.append(Relaxation("gpu_model", relax(gpu_model="", gpu_models=())))
    if request.pool:
        found.append(Relaxation("pool", relax(pool="")))
    if request.gpu_memory_gib is not None or request.host_memory_gib is not None:
        found.append(Relaxation("memory", relax(gpu_memory_gib=None, host_memory_gib=None)))
    if request.cpus is not None:
        found.append(Relaxation("cpus", relax(cpus=None)))
    found.append(Relaxation("risk", relax(max_risk=1.0)))
    return found


@dataclass(frozen=True, slots=True)
class BlockerEnds:
    """A calculator of when blockers end in the sampled futures. No blocker ends after the request's start.

    start_s: (path,) start of the request in seconds. start_ms: the start quantiles that were issued, or
    None. corrected: function that corrects the quantiles of ends in the same way as those of starts.
    """

    start_s: Array
    start_ms: Quantiles | None
    corrected: Callable[[Quantiles], Quantiles]

    def blocks(self, ends_s: Array) -> bool:
        """Return whether the request starts only after the job's end, in at least half of the futures."""
        return bool((ends_s <= self.start_s + ROUNDING_S).mean() >= NEVER_SHARE)

    def compute_end_quantiles(self, ends_s: Array, since_ms: int, now_ms: int) -> Quantiles:
        """Return the quantiles, in Unix ms, of the time when a job releases its GPUs to the request.

        None of them is later than the same quantile of the request's start.
        """
        ends_ms = self.corrected(compute_quantiles_ms(np.minimum(ends_s, self.start_s), since_ms, now_ms))
        if self.start_ms is None:
            return ends_ms
        return {name: min(end_ms, self.start_ms[name]) for name, end_ms in ends_ms.items()}


def _find_blockers(
    request: PlacementRequest, hindrances: Sequence[Hindrance], timelines: Timelines, now_ms: int, ends: BlockerEnds
) -> tuple[Blocker, ...]:
    """Return the jobs that the request waits for.

    The request's own job, the GPUs that are held for it, and jobs that still run when it starts are left out.
    """
    nodes, found = timelines.view.topology.nodes, []
    own = {request.job_name, make_hold_name(request.request_id), make_gang_hold_name(request.job_name)}
    for one in hindrances:
        job, ends_s = timelines.jobs[one.job], timelines.ends_s[one.job]
        if job not in own and ends.blocks(ends_s):
            found.append(
                Blocker(job, nodes[one.node].name, ends.compute_end_quantiles(ends_s, timelines.now_ms, now_ms))
            )
    return tuple(found)


def _describe_start(
    request: PlacementRequest, timelines: Timelines, start_ms: Quantiles, awaited: str, now_ms: int
) -> str:
    """Return a sentence on what a request needs and when it starts.

    `needs 8 GPUs with fast intra-node links in pool train; the earliest such block is in 40 min (p90 65 min), …`.
    awaited: the job or window whose end it waits for, or an empty text.
    """
    text = f"needs {_describe_request(request)}{_describe_pool(request, timelines)}"
    if start_ms["p50"] - now_ms < 1000 * WORTH_S:
        text += "; such a block is free now"
        return (
            text
            if start_ms["p90"] - now_ms < 1000 * WORTH_S
            else f"{text} (p90 {_format_lead(start_ms['p90'] - now_ms)})"
        )
    lead = f"in {_format_lead(start_ms['p50'] - now_ms)} (p90 {_format_lead(start_ms['p90'] - now_ms)})"
    text += f"; the earliest such block is {lead}"
    return f"{text}, when {awaited} ends" if awaited else text


def format_start_time(start_ms: Quantiles, now_ms: int) -> str:
    """Format a start time as a phrase, such as `starts in 40 min (p90 65 min)`."""
    return f"starts {format_time_until(start_ms, now_ms)}"


def format_time_until(times_ms: Quantiles, now_ms: int) -> str:
    """Format the time until an event, such as `in 40 min (p90 65 min)` or `within a minute`."""
    soon, late = times_ms["p50"] - now_ms, times_ms["p90"] - now_ms
    if late < 1000 * WORTH_S:
        return "within a minute"
    middle = "within a minute" if soon < 1000 * WORTH_S else f"in {_format_lead(soon)}"
    return f"{middle} (p90 {_format_lead(late)})"


def list_blockers(
    request: PlacementRequest,
    timelines: Timelines,
    now_ms: int,
    start_ms: Quantiles | None = None,
    adjust: Adjust = skip_correction,
) -> tuple[Blocker, ...]:
    """Return the jobs that a waiting request waits for. The job that ends last comes first.

    start_ms: the start quantiles that were issued for the request.
    """
    waiting = timelines.find_waiting_id(request)
    if waiting is None or waiting not in timelines.starts_s:
        return ()
    ends = BlockerEnds(timelines.starts_s[waiting], start_ms, lambda ends_ms: adjust(None, ends_ms))
    return _find_blockers(
        request, timelines.before_start.get(waiting, NO_GPUS).list_hindrances(), timelines, now_ms, ends
    )


def _describe_request(request: PlacementRequest) -> str:
    if request.required not in (Level.NODE, Level.NVLINK_DOMAIN):
        return describe_needs(request)
    plain = describe_needs(msgspec.structs.replace(request, topology=TopologyConstraint()))
    links = "with fast intra-node links" if request.required is Level.NODE else "with NVLink between all of them"
    return f"{plain} {links}"


def _describe_pool(request: PlacementRequest, timelines: Timelines) -> str:
    """Return the pool if all nodes that could host the request belong to one named pool.

    Otherwise returns an empty text.
    """
    nodes = timelines.view.topology.nodes
    pools = {nodes[row].pool for row in np.flatnonzero(timelines.rooms.count_members_per_node(request) > 0).tolist()}
    pool = next(iter(pools)) if len(pools) == 1 else "default"
    return f" in pool {pool}" if pool != "default" else ""


def _format_lead(ms: int) -> str:
    """Format a duration in minutes, hours or days.

    >>> _format_lead(40 * 60_000), _format_lead(5 * 3_600_000), _format_lead(4 * 86_400_000)
    ('40 min', '5 h', '4 days')
    """
    minutes = max(1, round(ms / 60_000))
    if minutes < 120:
        return f"{minutes} min"
    return f"{round(minutes / 60)} h" if minutes < 2880 else f"{round(minutes / 1440)} days"
