"""Sampled futures of the queue. Prepares waiting, running and arriving jobs for `sampled_future`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import Level
from fleetcast.placement.ahead.sampled_future import Arrival, Future, PayerStop, StoppedJob
from fleetcast.placement.ahead.stops import PlannedStop
from fleetcast.placement.machines.fit import get_widest_level
from fleetcast.placement.machines.gang_room import Fleet, GangAsk, Slot
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.slots import WHOLE, list_held_parts
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.next_attempt import make_next_attempt
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import QueueTurns, SortKeys
from fleetcast.placement.queues.queues_ahead import Closure, QueueHold, QueuesAhead
from fleetcast.placement.queues.tree import ANY

Array = NDArray[np.float32]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
AskKey = tuple[int, Level | None, int, int, bool]  # id of its room, level, members, thousandths of each, spread

BIN_S = 600.0  # what an arrival forecast counts GPUs in
MOST_BINS = 1008  # a week
SIZES = 256  # that are drawn at once
FIRST_STOP = -(10**9)  # the number of the first stop of a path; each further stop has the next lower number
NO_RELEASE = np.zeros(0, np.int64), np.zeros(0, np.int64)  # an end that releases nothing
RUNS = 256  # run times of each size, of which one that comes has one


@dataclass(frozen=True, slots=True)
class ArrivalForecast:
    """A forecast of how many GPUs arriving jobs will ask for in each bin of ten minutes.

    horizon_s: (horizon,) seconds from now until the end of a bin. quantiles: (level,) quantile levels. gpus:
    (level, horizon) GPUs. sizes, weights: (k,) GPU counts of observed jobs, and how many jobs had each count.
    After the last horizon, the values of the last horizon apply.
    """

    horizon_s: Floats
    quantiles: Floats
    gpus: Floats
    sizes: Ints
    weights: Floats

    def draw_jobs(self, rng: np.random.Generator) -> Iterator[tuple[float, int]]:
        """Draw the jobs that arrive within MOST_BINS bins, and yield them in order of time.

        Each is (seconds from now, GPUs).
        """
        sizes, left = self._draw_sizes(rng), 0.0
        for at, gpus in enumerate(self._draw_gpus_per_bin(rng)):
            left += gpus
            coming = []
            while left > 0:
                coming.append(next(sizes))
                left -= coming[-1]
            if coming:
                yield from zip(np.sort(BIN_S * (at + rng.random(len(coming)))).tolist(), coming, strict=True)

    def _draw_gpus_per_bin(self, rng: np.random.Generator) -> list[float]:
        """Draw the number of GPUs that arriving jobs ask for in each of MOST_BINS bins.

        The quantile level of each bin is random. Between the forecast's levels the values are interpolated linearly.
        """
        end_s = BIN_S * np.arange(1, MOST_BINS + 1)
        known = np.stack([np.interp(end_s, self.horizon_s, row) for row in self.gpus])
        level, bins = rng.random(MOST_BINS), np.arange(MOST_BINS)
        right = np.searchsorted(self.quantiles, level).clip(1, len(self.quantiles) - 1)
        low, high = self.quantiles[right - 1], self.quantiles[right]
        share = ((level - low) / (high - low)).clip(0.0, 1.0)
        gpus = known[right - 1, bins] + share * (known[right, bins] - known[right - 1, bins])
        found: list[float] = np.maximum(gpus, 0.0).tolist()
        return found

    def _draw_sizes(self, rng: np.random.Generator) -> Iterator[int]:
        share = self.weights / self.weights.sum()
        while True:
            yield from rng.choice(self.sizes, SIZES, p=share).tolist()


class FutureVictim(NamedTuple):
    """A running job that stops on every path, or a hold that ends then.

    number: its number among the ends. nodes, milli: (k,) rows of nodes, and the thousandths of GPUs that it holds on
    each. ask: the ask of its next attempt, None if there is none. key: the sort key of the entry behind which the next
    attempt waits.
    """

    job: str
    number: int
    nodes: Ints
    milli: Ints
    ask: GangAsk | None
    key: float


@dataclass(slots=True)
class FutureSampler:
    """A simulator of the queue along sampled paths. It holds the data that all paths share.

    left_s: running job → (path,) sampled seconds until it ends. planned_end_s: running job → seconds
    until it ends by the queue's estimate. room: of each entry. is_settled: whether all entries that may start now have
    started. stops: request_id → the jobs that stop for it. restart_s: running job → seconds until its next attempt
    works. running: the running jobs, without those that begin now. find_room: a function from a request to its room.
    Room: (n,) the members that fit on each node of the empty fleet.
    """

    view: ClusterView
    left_s: Mapping[str, Array]
    planned_end_s: Mapping[str, float]
    queue: Sequence[WaitingEntry]
    room: Sequence[Ints]
    run_s: Array  # (entry, path)
    run_times: RunTimeQuantiles
    now_ms: int
    turns: QueueTurns
    arrivals: ArrivalForecast | None
    is_settled: bool
    fleet_type: type[Fleet]
    stops: Mapping[str, PlannedStop]
    restart_s: Mapping[str, float]
    running: RunningJobs
    find_room: Callable[[PlacementRequest], Ints]
    _following: list[Ints] = field(default_factory=list)  # rooms of next attempts: `_make_ask` needs them alive
    _slots: list[Slot] = field(default_factory=list)
    _found: dict[tuple[object, ...], int] = field(default_factory=dict)
    _slot_by_ask: dict[AskKey, int | None] = field(default_factory=dict)  # None: the empty fleet has no room
    _asks: dict[tuple[object, ...], GangAsk] = field(default_factory=dict)
    places: SortKeys = field(init=False)

    def __post_init__(self) -> None:
        self.places = self.turns.make_sort_keys(self.queue)

    def play_paths(self, paths: int) -> tuple[Array, Array]:
        """Return (entry, path) seconds until each entry starts, and (path,) the length of each simulation in seconds.

        The value is NaN for an entry that has not started by the end of the simulation.
        """
        gangs = self._list_job_releases()
        ready_s = self._compute_ready_times(gangs)
        waiting = self._list_startable_entries()
        come, queues, reopen = (
            self._make_arrival_generator(),
            self._make_queues_ahead(list(gangs), waiting),
            self._list_reopenings(waiting),
        )
        victims = self._list_victims(gangs)
        found, until_s = np.full((len(self.queue), paths), np.nan, np.float32), np.zeros(paths, np.float32)
        free = np.where(self.view.usable, self.view.milli, 0).sum(axis=1, dtype=np.int64)
        fleet = self.fleet_type(free, ready_s, self._slots)
        for path in range(paths):
            left_s = [(float(self.left_s[job][path]), -1 - n, *gang) for n, (job, gang) in enumerate(gangs.items())]
            ends = [end for end in left_s if np.isfinite(end[0])]  # a job of unknown run time never ends
            mine = [Arrival(0.0, order, ask, float(self.run_s[number][path]), number) for number, order, ask in waiting]
            own = queues.copy() if queues is not None else None
            times_s, stops = self._make_stops(path, victims, mine)
            future = Future(fleet.copy(), ends + reopen + times_s, come(path), own, self.is_settled, stops)
            for number, start_s in future.play(mine).items():
                found[number, path] = start_s
            until_s[path] = future.now_s
        return found, until_s

    def _list_job_releases(self) -> dict[str, tuple[Ints, Ints]]:
        """Return running job → (node rows, thousandths of GPUs that the job releases on each row)."""
        view, found = self.view, {}
        parts = list_held_parts(view.holders, view.parts)
        milli = np.where(view.usable.ravel()[parts.gpu], parts.milli, 0)
        edges = np.searchsorted(parts.job, np.arange(len(view.jobs) + 1))
        for index, job in enumerate(view.jobs):
            own = slice(edges[index], edges[index + 1])
            if job in self.left_s:
                count = np.bincount(parts.gpu[own] // view.milli.shape[1], milli[own], len(view)).astype(np.int64)
                nodes = np.flatnonzero(count)
                found[job] = (nodes, count[nodes])
        return found

    def _make_queues_ahead(
        self, jobs: Sequence[str], waiting: Sequence[tuple[int, Any, GangAsk]]
    ) -> QueuesAhead | None:
        """Return the state of the queues at the beginning of every path.

        The n-th running job has the number -1 - n, both for its hold and for its end. Returns None without a tree
        of queues.
        """
        if self.turns.standing is None:
            return None
        holds = {-1 - n: self.turns.holds[job] for n, job in enumerate(jobs) if job in self.turns.holds}
        wanted = [ask.hold for _, _, ask in waiting if ask.hold is not None]
        return QueuesAhead.from_standing(self.turns.standing, holds, wanted)

    def _list_reopenings(self, waiting: Sequence[tuple[int, Any, GangAsk]]) -> list[tuple[float, int, Ints, Ints]]:
        """Return the times at which closed nodes open again.

        Each has the form of the end of a job that releases no GPUs, because a pass over the queue follows each end.
        """
        times = {closure.to_s for _, _, ask in waiting for closure in ask.closures}
        return [(to_s, -1 - len(self.view.jobs) - at, *NO_RELEASE) for at, to_s in enumerate(sorted(times))]

    def _list_victims(self, gangs: Mapping[str, tuple[Ints, Ints]]) -> dict[str, list[FutureVictim]]:
        """Return payer → the jobs that stop for it, and the holds that end then."""
        if not self.stops:
            return {}
        numbers = {job: -1 - n for n, job in enumerate(gangs)}
        leaves = [hold.leaf if (hold := self.turns.find_hold(one.request)) is not None else "" for one in self.queue]
        behind = dict(zip(leaves, self.places.newcomers, strict=False))
        found: dict[str, list[FutureVictim]] = {}
        for payer, stop in self.stops.items():
            found[payer] = []
            jobs = stop.jobs & self.running.row.keys()  # a next attempt that begins now is not asked to stop
            for job in sorted((jobs | stop.holds) & gangs.keys()):
                hold = self.turns.holds.get(job)
                key = behind.get(hold.leaf if hold is not None else "", max(self.places.newcomers))
                ask = self._make_returning_ask(job, *gangs[job]) if job in jobs else None
                found[payer].append(FutureVictim(job, numbers[job], *gangs[job], ask, key))
        return found

    def _make_stops(
        self, path: int, victims: Mapping[str, Sequence[FutureVictim]], waiting: Sequence[Arrival]
    ) -> tuple[list[tuple[float, int, Ints, Ints]], dict[int, PayerStop]]:
        """Return the times of the stops on a path, in the form of ends that release nothing, and number → stop."""
        times_s: list[tuple[float, int, Ints, Ints]] = []
        stops: dict[int, PayerStop] = {}
        for payer in waiting if victims else ():
            request_id = self.queue[payer.number].request.request_id
            if request_id not in victims:
                continue
            at_s, jobs = float(self.stops[request_id].at_s[path]), []
            for one in victims[request_id]:
                left_s, following = float(self.left_s[one.job][path]) - at_s, None
                if one.ask is not None and left_s > 0:
                    order = one.key, self.now_ms / 1000 + at_s
                    following = Arrival(at_s, order, one.ask, left_s + self.restart_s.get(one.job, 0.0))
                jobs.append(StoppedJob(one.number, one.nodes, one.milli, following))
            number = FIRST_STOP - len(stops)
            times_s.append((at_s, number, *NO_RELEASE))
            stops[number] = PayerStop(payer, jobs)
        return times_s, stops

    def _make_returning_ask(self, job: str, nodes: Ints, milli: Ints) -> GangAsk | None:
        """Return the ask of the next attempt of a running job. nodes, milli: what it holds now.

        Returns None if it has no place even in an empty fleet, or if none of its GPUs is usable: then its size is
        unknown.
        """
        request = self._make_next_attempt(job, nodes, milli) if len(nodes) else None
        if request is None:
            return None
        self._following.append(self.find_room(request))
        return self._make_ask(request, self._following[-1])

    def _make_next_attempt(self, job: str, nodes: Ints, milli: Ints) -> PlacementRequest:
        """Return the request of a job's next attempt, which may run on other nodes.

        Parts of several GPUs on one node count as whole GPUs.
        """
        jobs, row = self.running, self.running.row[job]
        member, held = int(jobs.gpus_per_member[row]), int(-(-milli // WHOLE).sum())
        is_even, share = bool((milli == milli[0]).all()), None
        if is_even and milli[0] < WHOLE:
            members, each, share = len(nodes), 1, int(milli[0])
        elif member and held % member == 0:
            members, each = held // member, member
        elif is_even:
            members, each = len(nodes), held // len(nodes)
        else:
            members, each = split_into_equal_members(held, self.view.free.shape[1])
        request = make_next_attempt(jobs, row, members, nodes.tolist(), self.view, job)
        hold, standing = self.turns.holds.get(job), self.turns.standing
        queue, user = ("", "") if hold is None or standing is None else standing.tree.split_leaf(hold.leaf)
        limit_s = float(jobs.limit_s[row])
        return structs.replace(
            request,
            gpus_per_node=each,
            gpu_share=share,
            queue=queue,
            user=user,
            limit_s=None if math.isnan(limit_s) else limit_s,
        )

    def _compute_ready_times(self, gangs: Mapping[str, tuple[Ints, Ints]]) -> Floats:
        ready_s = np.zeros(len(self.view))
        for job, (nodes, _) in gangs.items():
            ready_s[nodes] = np.maximum(ready_s[nodes], self.planned_end_s.get(job, 0.0))
        return ready_s

    def _list_startable_entries(self) -> list[tuple[int, tuple[float, float], GangAsk]]:
        """Return the entries that can ever start, in the queue's order."""
        found = []
        for number, (entry, room) in enumerate(zip(self.queue, self.room, strict=True)):
            ask = self._make_ask(entry.request, room)
            if ask is not None:
                found.append((number, self.places.orders[number], ask))
        return found

    def _make_ask(self, request: PlacementRequest, room: Ints) -> GangAsk | None:
        """Return the slots that a request asks for, or None if even the empty fleet has no room for them."""
        level, members, each = get_widest_level(request), request.members.min, request.gpus_per_node * request.milli
        key = id(room), level, members, each, request.spread  # `self.room` and `self._following` keep the array alive
        if key not in self._slot_by_ask:
            self._slot_by_ask[key] = self._find_slot_with_room(key, room)
        slot = self._slot_by_ask[key]
        if slot is None:
            return None
        gpus = request.members.desired * request.gpus_per_node
        planned_s = self.run_times.estimate_run_s(gpus, 0.9, limit_s=request.limit_s)
        members = 1 if level is Level.NODE else members
        return self._find_or_add_ask(
            slot, members, planned_s, self.turns.find_hold(request), self.turns.find_closures(request)
        )

    def _find_slot_with_room(self, key: AskKey, room: Ints) -> int | None:
        """Return the index of the slot for a gang's members, or None if even the empty fleet has too few such slots."""
        _, level, members, each, spread = key
        if level is Level.NODE:
            room, members, each = room // members, 1, each * members
        if spread:
            room = np.minimum(room, 1)
        domain = None
        if level is not None and level is not Level.NODE:
            domain = self.view.topology.domain[level].astype(np.int64)
        slot = self._find_or_add_slot(each, room, level, domain)
        most = self._slots[slot].most
        sums = most.sum() if domain is None else np.bincount(np.maximum(domain, 0), most * (domain >= 0)).max(initial=0)
        return slot if sums >= members else None

    def _find_or_add_ask(
        self,
        slot: int,
        members: int,
        planned_s: float,
        hold: QueueHold | None = None,
        closures: tuple[Closure, ...] = (),
    ) -> GangAsk:
        key = (slot, members, planned_s, closures, hold and (hold.leaf, *sorted(hold.amounts.items())))
        if key not in self._asks:
            self._asks[key] = GangAsk(slot, members, planned_s, hold, closures)
        return self._asks[key]

    def _find_or_add_slot(self, each: int, room: Ints, level: Level | None, domain: Ints | None) -> int:
        key = (each, room.tobytes(), level)
        if key not in self._found:
            self._found[key] = len(self._slots)
            self._slots.append(Slot(each, room.astype(np.int64), domain))
        return self._found[key]

    def _make_arrival_generator(self) -> Callable[[int], Iterator[Arrival]]:
        """Return a function that takes a path's number and yields the jobs that arrive along the path.

        Only the size of these jobs is known. So each joins the queue behind a random waiting entry.
        """
        asks = (
            {}
            if self.arrivals is None
            else {int(size): self._make_arriving_ask(int(size)) for size in self.arrivals.sizes}
        )
        fits = np.array([ask is not None for ask in asks.values()], bool)
        if self.arrivals is None or not fits.any():
            return lambda path: iter(())
        forecast = replace(self.arrivals, sizes=self.arrivals.sizes[fits], weights=self.arrivals.weights[fits])
        places, now_s = self.places.newcomers, self.now_ms / 1000

        levels = (np.arange(RUNS) + 0.5) / RUNS
        runs_s = {
            size: self.run_times.compute_run_times(size, levels, 0.0, None).tolist() for size in forecast.sizes.tolist()
        }

        def draw_arrivals(path: int) -> Iterator[Arrival]:
            rng = np.random.default_rng((1, path))
            runs, ranks = _draw_integers(rng, RUNS), _draw_integers(rng, len(places))
            for (at_s, size), run, rank in zip(forecast.draw_jobs(rng), runs, ranks, strict=False):
                if (ask := asks[size]) is not None:
                    yield Arrival(
                        at_s, (places[rank], now_s + at_s), self._assign_queue(ask, size, rank), runs_s[size][run]
                    )

        return draw_arrivals

    def _assign_queue(self, ask: GangAsk, gpus: int, rank: int) -> GangAsk:
        """Return the ask of an arriving job, charged to the queue of a waiting entry.

        rank: the number of this entry.
        """
        request = self.queue[rank].request if self.queue else None
        hold = self.turns.find_hold(request) if request is not None else None
        if request is None or hold is None:
            return ask
        closures = self.turns.find_closures(request)
        return self._find_or_add_ask(
            ask.slot, ask.members, ask.planned_s, QueueHold(hold.leaf, {ANY: float(gpus)}), closures
        )

    def _make_arriving_ask(self, gpus: int) -> GangAsk | None:
        """Return the ask of an arriving job of this many GPUs on any nodes.

        Returns None if the fleet is too small.
        """
        members, each = split_into_equal_members(gpus, self.view.free.shape[1])
        room = np.count_nonzero(self.view.usable, axis=1) // each
        fits = int(room.sum()) >= members
        slot = self._find_or_add_slot(WHOLE * each, room, None, None)
        return self._find_or_add_ask(slot, members, self.run_times.estimate_run_s(gpus, 0.9)) if fits else None


def _draw_integers(rng: np.random.Generator, below: int) -> Iterator[int]:
    """Yield random integers from 0 to `below` - 1 without end."""
    while True:
        yield from rng.integers(below, size=SIZES).tolist()


def split_into_equal_members(gpus: int, width: int) -> tuple[int, int]:
    """Return (members, GPUs of each): the fewest equal members that fit on nodes of `width` GPUs.

    >>> split_into_equal_members(4, 8), split_into_equal_members(64, 8), split_into_equal_members(12, 8)
    ((1, 4), (8, 8), (2, 6))
    """
    members = -(-gpus // width)
    while gpus % members:
        members += 1
    return members, gpus // members
