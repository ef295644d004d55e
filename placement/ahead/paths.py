"""Simulation of the queue along sampled futures: when each GPU becomes free on each path.

1. For each path, the remaining time of every running job and the run time of every waiting one are drawn.
   Within one path the draws are correlated: jobs tend to be long together or short together.
2. The plan decides which entries start now (`fleetcast.placement.plan.queue`).
3. The waiting entries are played by the rules of the queue, with jobs that may still come
   (`fleetcast.placement.ahead.futures`). This gives their start times.
4. The queue is also played in order, without arrivals. This gives the start of a request that comes now, and
   the jobs that each request waits for. Each member of a gang needs a *slot*, a number of GPUs on one node.
   A gang starts when all its slots are free. If its members must share a domain, the gang gets the domain
   that is free first. GPUs that are reserved for a gang lie idle until it starts. A later job may use them
   before if it is planned to end in time. A part of a GPU counts as a whole one, unless it is free now.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ahead.calendars import (
    Array,
    Calendar,
    PlaceFinder,
    RoomCache,
    StartRestrictions,
    find_earliest_start,
)
from fleetcast.placement.ahead.futures import ArrivalForecast, FutureSampler
from fleetcast.placement.ahead.run_draws import PATHS, RunTimeSample, RunTimeSource
from fleetcast.placement.ahead.searches import choose_searches
from fleetcast.placement.ahead.slot_times import Place
from fleetcast.placement.ahead.stops import NO_STOPS, StopsAhead
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.slots import list_held_parts
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.queue import ONE_LINE, Plan, WaitingEntry, plan
from fleetcast.placement.plan.timeline import (
    Basis,
    Release,
    RunTimeQuantiles,
    Timeline,
    estimate_releases,
    find_remaining_basis,
)
from fleetcast.placement.plan.turns import QueueTurns
from fleetcast.placement.queues.queues_ahead import find_allowed_delay_s

MIDDLE = PATHS // 2
BACKFILLED = 64  # entries of the queue, from the first, that may start in gaps
PLAYED = 2000  # entries that are played by the rules of the queue; later ones are told by the calendars
MOST_CALENDARS = 16  # and as many bytes as that, together
MOST_CALENDAR_BYTES = 2**28
NAMED = 5  # jobs that a request waits for


@dataclass(frozen=True, slots=True)
class Hindrance:
    """A job that holds a GPU on a node until a gang can start, on the median path.

    job: an index into `Timelines.jobs`. node: the node's row.
    """

    job: int
    node: int


@dataclass(frozen=True, slots=True)
class Timelines:
    """The sampled paths of the queue. The service computes them periodically, and estimates only read them."""

    view: ClusterView
    options: Options
    run_times: RunTimeQuantiles
    jobs: tuple[str, ...]  # names by `Calendar.holder`, the running ones first
    calendars: tuple[tuple[float, Calendar], ...]  # (priority, after all that waits with at least it), highest first
    starts_s: Mapping[str, Array]  # request_id → (path,)
    ends_s: Mapping[int, Array]  # holder, an index into `jobs` → (path,)
    holders: Mapping[str, int]  # request_id of what waits and starts → its holder
    waits: Mapping[str, str]  # job → request_id of what waits
    before_start: Mapping[str, "GpusBeforeStart"]  # request_id of what starts → its GPUs, before it starts
    rooms: "RoomCache"
    gpus: Mapping[str, int]  # request_id → how many it waits for
    entries: tuple[WaitingEntry, ...]  # that wait, in order
    now: Plan
    turns: QueueTurns  # after that plan
    basis: Mapping[str, Basis]  # job that runs or waits → what its run time is known by

    @property
    def unknown_jobs(self) -> tuple[str, ...]:
        """The jobs without any estimate of their run time, the running ones first.

        They never end in these paths.
        """
        return tuple(job for job, basis in self.basis.items() if basis == "prior")

    @property
    def start_basis(self) -> Basis:
        """The basis of start times that depend on other jobs.

        It is "limit" if the run time of any job is known by its time limit alone. Otherwise it is "runs".
        """
        return "limit" if "limit" in self.basis.values() else "runs"

    @property
    def now_ms(self) -> int:
        return self.options.now_ms

    def list_running_ends(self) -> dict[str, Array]:
        """Return job → (path,) seconds until it ends, for running jobs and those that the plan starts now."""
        running = self.jobs[: len(self.now.view.jobs)]
        return {job: self.ends_s[holder] for holder, job in enumerate(running) if holder in self.ends_s}

    def choose_calendar(self, request: PlacementRequest) -> Calendar:
        """Return the calendar that applies to a request that comes now.

        The calendar includes the waiting entries that go before the request.
        """
        level: float = request.priority
        if self.turns is not ONE_LINE:
            mine = WaitingEntry(request, self.now_ms)
            level = -self.turns.sort_entries([*self.entries, mine]).index(mine)
        return [calendar for highest, calendar in self.calendars if highest >= level][-1]

    def make_restrictions(self, request: PlacementRequest) -> StartRestrictions:
        """Return the restrictions by quota and closed nodes for a request that comes now."""
        return StartRestrictions(
            compute_planned_s(request, self.run_times),
            self._compute_seconds_until_allowed(request),
            self.turns.find_closures(request),
        )

    def _compute_seconds_until_allowed(self, request: PlacementRequest) -> Array:
        """Return (path,) seconds until the quota of its queue allows a request.

        The result is 0 if the quota allows the request now, and inf if it never does.
        """
        mine, standing = self.turns.find_hold(request), self.turns.standing
        if mine is None or standing is None or standing.find_refusing_queue(mine.leaf, mine.amounts) is None:
            return np.zeros(PATHS, np.float32)
        begun = np.full(PATHS, -1.0)
        running_s = self.list_running_ends()
        spans = [(begun, running_s[job], one) for job, one in self.turns.holds.items() if job in running_s]
        for entry in self.entries:
            request_id, other = entry.request.request_id, self.turns.find_hold(entry.request)
            if other is not None and request_id in self.holders:
                spans.append((self.starts_s[request_id], self.ends_s[self.holders[request_id]], other))
        paths = [
            find_allowed_delay_s(
                standing, [(float(start_s[path]), float(end_s[path]), one) for start_s, end_s, one in spans], mine
            )
            for path in range(PATHS)
        ]
        return np.array(paths, np.float32)

    def fits_now(self, request: PlacementRequest) -> bool:
        """Return whether the plan would start a request that comes now, behind all waiting requests."""
        allowed = self.turns.limit_to_quota(request)
        if isinstance(allowed, str):
            return False
        end_ms = self.now_ms + 1000 * compute_planned_s(request, self.run_times)
        return fits_now(allowed, self.now.make_unclaimed_view(end_ms), self.options)

    def find_waiting_id(self, request: PlacementRequest) -> str | None:
        """Return the id under which the request, or its job, already waits.

        Returns None if the request is hypothetical.
        """
        return request.request_id if request.request_id in self.starts_s else self.waits.get(request.job_name)


def sample_timelines(
    queue: Sequence[WaitingEntry],
    view: ClusterView,
    running: RunningJobs,
    run_times: RunTimeQuantiles,
    options: Options,
    run_quantiles: Callable[[PlacementRequest], Sequence[float] | None] = lambda request: None,
    arrivals: ArrivalForecast | None = None,
    turns: QueueTurns = ONE_LINE,
    stops: StopsAhead = NO_STOPS,
) -> Timelines:
    """Play the queue along `PATHS` sampled paths, and return the start and end times on each.

    run_quantiles: function that returns the run times of a request at `RUN_LEVELS`, or None if unknown. stops: the
    stops of running jobs, after which some requests start earlier and these jobs wait again.
    """
    now_ms = options.now_ms
    draw = RunTimeSample(np.random.default_rng(0), run_times)
    rooms = _make_room_cache(view, running, run_times, options)
    line = [entry for entry in turns.sort_entries(queue) if entry.request.gpus_per_node]  # calendars are of GPUs
    turns = turns.make_fresh_copy()  # who starts now is told so, and nobody else
    now = plan(queue, view, running, run_times, options, turns)
    begun = [entry.request for entry, _ in now.placed if entry.request.gpus_per_node]
    sources = [_make_run_time_source(one, run_quantiles) for one in begun]
    begun_s = dict(zip((one.job_name for one in begun), draw.draw_run_times(sources), strict=True))
    calendar, left_s = _make_initial_calendar(now.view, now.running, draw, now_ms, begun_s)
    jobs, calendars = list(now.view.jobs), [(float("inf"), calendar)]
    ends_s = {holder: left_s[job] for holder, job in enumerate(jobs) if job in left_s}
    holders: dict[str, int] = {}  # a job that runs may wait as well: the next attempt, a second request
    basis = _list_run_time_bases(now.running, left_s, dict(zip(begun, sources, strict=True)), run_times, now_ms)
    starts_s = {one.request_id: np.zeros(PATHS, np.float32) for one in begun}
    before_start = {one.request_id: NO_GPUS for one in begun}
    entries = [entry for entry in line if entry.request.request_id not in starts_s]
    requests = [entry.request for entry in entries]
    waits = {one.job_name: one.request_id for one in (*begun, *requests)}
    levels, searches = turns.make_sort_keys(entries).levels, choose_searches(len(entries))
    finder = PlaceFinder(rooms, searches.slot_times)
    chosen = choose_saved_entries(levels, _compute_calendar_limit(calendar))
    sources = [_make_run_time_source(one, run_quantiles) for one in requests]
    runs_s = draw.draw_run_times(sources)
    for number, (request, run_s, source) in enumerate(zip(requests, runs_s, sources, strict=True)):
        if number in chosen:
            calendar = calendar.copy()
            calendars.append((levels[number], calendar))
        if number < BACKFILLED:
            place = find_earliest_start(request, calendar, rooms, compute_planned_s(request, run_times))
        else:
            place = finder.find_place(request, calendar)
        starts_s[request.request_id] = place.start_s
        basis.setdefault(request.job_name, source.find_basis(run_times))
        if np.isfinite(place.start_s).any():
            before_start[request.request_id] = GpusBeforeStart.from_calendar(place, calendar)
            finder.record_changes(searches.record_gang_hold(calendar, place, run_s, len(jobs)))
            holders[request.request_id], ends_s[len(jobs)] = len(jobs), place.start_s + run_s
            jobs.append(request.job_name)
    del finder  # its times are as large as calendars
    planned_s = compute_planned_ends(estimate_releases(now.view, now.running, run_times, now_ms), now_ms)
    first = entries[:PLAYED], [rooms.count_members_per_node(one) for one in requests[:PLAYED]], runs_s
    is_settled = _has_tried_every_entry(now)
    drawn = FutureSampler(
        now.view, left_s, planned_s, *first, run_times, now_ms, turns, arrivals, is_settled, searches.fleet,
        stops.find_stops(entries, now.view, turns, options), stops.restart_s, running, rooms.count_members_per_node,
    )  # fmt: skip
    _use_played_starts(drawn, starts_s, holders, ends_s)
    gpus = {one.request_id: count_gpus(one) for one in (*begun, *requests)}
    play, left = (tuple(jobs), tuple(calendars), starts_s, ends_s, holders), (tuple(entries), now, turns)
    return Timelines(view, options, run_times, *play, waits, before_start, rooms, gpus, *left, basis)


def _make_room_cache(
    view: ClusterView, running: RunningJobs, run_times: RunTimeQuantiles, options: Options
) -> RoomCache:
    """Return the members that each node could host once every running job has ended."""
    ahead = Timeline(view, estimate_releases(view, running, run_times, options.now_ms))
    return RoomCache(ahead.make_view_after(len(ahead.ahead)), options)


def _list_run_time_bases(
    running: RunningJobs,
    left_s: Mapping[str, Array],
    begun: Mapping[PlacementRequest, RunTimeSource],
    run_times: RunTimeQuantiles,
    now_ms: int,
) -> dict[str, Basis]:
    """Return job → the basis of its estimated end, for jobs that run or start now."""
    basis = {name: find_remaining_basis(running.find_run(name, now_ms), run_times, now_ms) for name in left_s}
    return basis | {one.job_name: source.find_basis(run_times) for one, source in begun.items()}


def _use_played_starts(
    drawn: FutureSampler, starts_s: dict[str, Array], holders: Mapping[str, int], ends_s: dict[int, Array]
) -> None:
    """Replace the starts and ends of the first waiting entries with those of the played paths.

    If an entry did not start on a played path, it starts at its previous start or at the end of that path, whichever
    is later.
    """
    played_s, until_s = drawn.play_paths(PATHS)
    for entry, run_s, start_s in zip(drawn.queue, drawn.run_s, played_s, strict=False):
        request_id = entry.request.request_id
        later_s = np.maximum(starts_s[request_id], until_s)
        starts_s[request_id] = answer_s = np.where(np.isfinite(start_s), start_s, later_s)
        if request_id in holders:
            ends_s[holders[request_id]] = answer_s + run_s


def _make_run_time_source(
    request: PlacementRequest, run_quantiles: Callable[[PlacementRequest], Sequence[float] | None]
) -> RunTimeSource:
    """Return the source of a waiting request's run time."""
    known = run_quantiles(request)
    return RunTimeSource(count_gpus(request), request.limit_s, None if known is None else tuple(known))


def _has_tried_every_entry(now: Plan) -> bool:
    """Return whether the pass tried all waiting entries, so that a further pass would start none of them."""
    return all(wait.reason.code != "untried" for wait in now.waiting)


def choose_saved_entries(priorities: Sequence[float], most: int) -> frozenset[int]:
    """Return the numbers of at most `most` entries. A copy of the calendar is saved before each of them.

    These are the entries at which the priority changes. If there are too many, those nearest to a
    geometric series remain. So the saved calendars are dense at the front of the queue and sparse
    behind.

    >>> sorted(choose_saved_entries([9, 9, 5, 0], 16)), sorted(choose_saved_entries(range(100, 0, -1), 4))
    ([0, 2, 3], [0, 4, 21, 99])
    """
    changes = np.array([at for at, one in enumerate(priorities) if at == 0 or one != priorities[at - 1]], np.int64)
    if len(changes) > most:
        row = np.rint(np.geomspace(1, changes[-1] + 1, most)).astype(np.int64) - 1
        changes = changes[np.searchsorted(changes, row)]
    return frozenset(changes.tolist())


def _compute_calendar_limit(one: Calendar) -> int:
    return min(MOST_CALENDARS, max(2, MOST_CALENDAR_BYTES // max(1, one.nbytes)))


@dataclass(frozen=True, slots=True)
class GpusBeforeStart:
    """The GPUs that a gang receives on the median path, and the jobs that hold them before it starts.

    start_s: the start of the gang. nodes: (member,) node rows. holders: (member × each,) the last job
    on each GPU, -1 for none. ends_s: (member × each,) when that job ends.
    """

    start_s: float
    nodes: NDArray[np.int32]
    holders: NDArray[np.int32]
    ends_s: Array

    @classmethod
    def from_calendar(cls, place: Place, calendar: Calendar) -> "GpusBeforeStart":
        """Read the GPUs from the calendar. The caller records the gang in the calendar only afterwards."""
        path = int(np.argsort(place.start_s, kind="stable")[MIDDLE])
        _, n, g = calendar.free_s.shape
        nodes = place.nodes[path]
        at = ((path * n + nodes % n)[:, None] * g + place.gpus[path]).ravel()
        return cls(float(place.start_s[path]), nodes.copy(), calendar.holder.take(at), calendar.free_s.take(at))

    def list_hindrances(self) -> tuple[Hindrance, ...]:
        """Return the jobs that hold the GPUs until the gang starts.

        Returns at most NAMED jobs. The job that ends last comes first.
        """
        if not len(self.nodes):
            return ()
        each = len(self.holders) // len(self.nodes)
        holders, until_s = self.holders.tolist(), self.ends_s.tolist()
        found: dict[int, Hindrance] = {}
        for row in np.argsort(-self.ends_s, kind="stable").tolist():
            job = holders[row]
            if job >= 0 and job not in found and 0 < until_s[row] <= self.start_s:
                found[job] = Hindrance(job, int(self.nodes[row // each]))
                if len(found) == NAMED:
                    break
        return tuple(found.values())


NO_GPUS = GpusBeforeStart(0.0, np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))


def compute_planned_ends(ahead: Sequence[Release], now_ms: int) -> dict[str, float]:
    """Return running job → seconds from now until it ends by the queue's estimate."""
    return {release.job: (release.end_ms - now_ms) / 1000 for release in ahead}


def count_gpus(request: PlacementRequest) -> int:
    return request.members.desired * request.gpus_per_node


def compute_planned_s(request: PlacementRequest, run_times: RunTimeQuantiles) -> float:
    """Return the seconds that the queue plans for the job's run."""
    return run_times.estimate_run_s(count_gpus(request), 0.9, limit_s=request.limit_s)


def _make_initial_calendar(
    view: ClusterView,
    running: RunningJobs,
    draw: RunTimeSample,
    now_ms: int,
    begun_s: Mapping[str, Array],
) -> tuple[Calendar, dict[str, Array]]:
    """Return the calendar of the running jobs, and job → (path,) seconds until it ends.

    GPUs that are free now are free at 0. Unusable GPUs are never free.

    begun_s: job → (path,) seconds that a job will run, for the jobs that start now.
    """
    n, g = view.free.shape
    left_s = {}
    table = np.zeros((len(view.jobs) + 1, PATHS), np.float32)  # the last row stands for nobody
    for index in np.unique(list_held_parts(view.holders, view.parts).job).tolist():
        name = view.jobs[index]
        own_s = begun_s.get(name)
        table[index] = left_s[name] = (
            draw.draw_remaining_times(running.find_run(name, now_ms), now_ms) if own_s is None else own_s
        )
    free_s = np.ascontiguousarray(np.moveaxis(table[view.holders], -1, 0))
    for job, gpu in zip(view.parts.job.tolist(), view.parts.gpu.tolist(), strict=True):  # free when the last has ended
        row = divmod(gpu, g)
        free_s[:, row[0], row[1]] = np.maximum(free_s[:, row[0], row[1]], table[job])
    free_s[:, ~view.usable] = np.inf
    order = np.argsort(free_s, axis=-1, kind="stable")
    holder = np.broadcast_to(view.holders, (PATHS, n, g))
    calendar = Calendar(
        free_s=np.take_along_axis(free_s, order, -1),
        gap_s=np.full((PATHS, n, g), np.inf, np.float32),
        until_s=np.full((PATHS, n, g), -np.inf, np.float32),
        holder=np.ascontiguousarray(np.take_along_axis(holder, order, -1)),
    )
    return calendar, left_s
