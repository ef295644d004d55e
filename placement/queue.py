"""The queue: priority first, then first come, first served, with EASY backfill. Pure: state in, plan out.

1. Entries are placed in order until one does not fit: the head.
2. The head gets a reservation. Running jobs end one after the other, as estimated, until the head fits: its *shadow
   time*. The GPUs that `decide` gives it then, under all its constraints, are reserved.
3. A later entry may start now if it ends before the shadow time by its own estimate, or on GPUs that are not
   reserved. (Lifka, "The ANL/IBM SP Scheduling System", 1995.)
4. An entry that would not fit into the fleet with all jobs gone waits without holding anybody up.

Estimates are the p90 of finished jobs of the same GPU count: never a job's own future. A shape that failed is not tried
again in the same pass, nor are more than `BACKFILL_TRIES` shapes: a pass costs what its different shapes cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fleet.requests import Decision, PlacementRequest
from placement.engine import decide, fits_now
from placement.filters import screen
from placement.options import Options
from placement.timeline import RunningJob, RunTimeQuantiles, Timeline, place, releases
from placement.turns import OneLine, QueueTurns
from placement.view import ClusterView
from placement.words import fitting, needs, shortage

BACKFILL_TRIES = 64


@dataclass(frozen=True, slots=True)
class Waiting:
    """An entry of the queue."""

    request: PlacementRequest
    queued_ms: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Why an entry still waits; `position` counts from 1. `start_ms`: the head's shadow time, else None."""

    entry: Waiting
    position: int
    why: str
    start_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """placed: in the order in which they were decided; view, running: after them; reservation: the head's."""

    placed: tuple[tuple[Waiting, Decision], ...]
    waiting: tuple[Wait, ...]
    view: ClusterView
    running: Mapping[str, RunningJob]
    reservation: "Reservation | None" = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """The head's claim. gpus: (n, g) bool, what it will use at `shadow_ms`; cpus, memory: (n,) likewise."""

    entry: Waiting
    shadow_ms: int
    blocker: str
    gpus: NDArray[np.bool_]
    cpus: NDArray[np.float64]
    host_memory_gib: NDArray[np.float64]

    def spare(self, view: ClusterView) -> ClusterView:
        """What the head leaves to others."""
        return replace(
            view,
            milli=np.where(self.gpus, np.int16(0), view.milli),
            free_cpus=view.free_cpus - self.cpus,
            free_host_memory_gib=view.free_host_memory_gib - self.host_memory_gib,
        )


def in_order(queue: Sequence[Waiting]) -> list[Waiting]:
    """Higher priority first, then the longer wait, then the request's id."""
    return sorted(queue, key=order_key)


def order_key(entry: Waiting) -> tuple[int, int, str]:
    """What the queue is sorted by."""
    return -entry.request.priority, entry.queued_ms, entry.request.request_id


ONE_LINE = OneLine(order_key)


def plan(
    queue: Sequence[Waiting],
    view: ClusterView,
    running: Mapping[str, RunningJob],
    run_times: RunTimeQuantiles,
    options: Options,
    turns: QueueTurns | None = None,
) -> Plan:
    """One pass over the queue at `options.now_ms`; `running` tells of the jobs that hold GPUs in the view."""
    cycle = Cycle(view, dict(running), run_times, options, turns or ONE_LINE)
    for entry in cycle.turns.in_order(queue):
        cycle.take_turn(entry)
    return Plan(tuple(cycle.placed), tuple(cycle.waiting), cycle.view, cycle.running, cycle.reservation)


@dataclass(slots=True)
class Cycle:
    """The state of one pass."""

    view: ClusterView
    running: dict[str, RunningJob]
    run_times: RunTimeQuantiles
    options: Options
    turns: QueueTurns
    placed: list[tuple[Waiting, Decision]] = field(default_factory=list)
    waiting: list[Wait] = field(default_factory=list)
    reservation: Reservation | None = None
    tries: int = 0
    failed: set[tuple[object, ...]] = field(default_factory=set)
    hopeless: dict[tuple[object, ...], str] = field(default_factory=dict)
    rooms: dict[tuple[object, ...], int] = field(default_factory=dict)

    def take_turn(self, entry: Waiting) -> None:
        """Consider an entry as far as its queue may have it."""
        shape = shape_of(entry.request)
        if shape in self.failed or shape in self.hopeless:  # what a queue may have is never more than is asked for
            self.consider(entry)
            if shape not in self.hopeless:
                self.turns.want(entry.request)
            return
        allowed = self.turns.allow(entry.request)
        if isinstance(allowed, str):
            self._wait(entry, allowed)
            return
        before = len(self.placed)
        self.consider(entry if allowed is entry.request else Waiting(allowed, entry.queued_ms))
        if len(self.placed) > before:
            self.placed[-1] = (entry, self.placed[-1][1])
            self.turns.take(entry.request, self.placed[-1][1])
        elif shape_of(allowed) not in self.hopeless:
            self.turns.want(entry.request)

    def consider(self, entry: Waiting) -> None:
        shape = shape_of(entry.request)
        if shape in self.hopeless:
            self._wait(entry, self.hopeless[shape])
        elif self.reservation is not None:
            self._backfill(entry, shape)
        elif not self._place(entry, self.view):
            self._reserve(entry, shape)

    def _place(self, entry: Waiting, view: ClusterView) -> bool:
        """Decide within `view`, which is the cycle's or a part of it; True when the entry was placed."""
        if not fits_now(entry.request, view, self.options):
            return False
        decision = decide(entry.request, view, self.options)
        assert decision.outcome == "placed", decision.sentence
        self.view = place(self.view, entry.request, decision.ranks)
        gpus = sum(len(rank.gpus) for rank in decision.ranks)
        self.running[entry.request.job_name] = RunningJob(self.options.now_ms, gpus, entry.request.limit_s)
        self.placed.append((entry, decision))
        return True

    def _reserve(self, entry: Waiting, shape: tuple[object, ...]) -> None:
        now_ms = self.options.now_ms
        timeline = Timeline(self.view, releases(self.view, self.running, self.run_times, now_ms))
        step = timeline.first_fit(entry.request, self.options)
        if step is None and not entry.request.gpus_per_node:
            self._wait(entry, f"waits for {needs(entry.request)}; {self._free(entry)}; when more comes is not known")
            return
        if step is None:
            empty = timeline.at(len(timeline.ahead))
            lack = shortage(entry.request, empty, screen(entry.request, empty, self.options))
            self.hopeless[shape] = f"does not fit even when all running jobs have ended: {lack}"
            self._wait(entry, self.hopeless[shape])
            return
        last = timeline.ahead[step - 1]
        self.reservation = claim(entry, timeline.at(step), last.end_ms, last.job, self.options)
        why = f"waits for {needs(entry.request)}; {self._free(entry)}; it is next, when {last.job} has ended"
        self._wait(entry, why, last.end_ms)

    def _backfill(self, entry: Waiting, shape: tuple[object, ...]) -> None:
        head = self.reservation
        assert head is not None
        request = entry.request
        run_s = self.run_times.run_s(request.members.desired * request.gpus_per_node, 0.9, limit_s=request.limit_s)
        ends_in_time = self.options.now_ms + run_s * 1000 <= head.shadow_ms
        behind = f"{head.entry.request.job_name} is next"
        if shape in self.failed or (shape, ends_in_time) in self.failed:
            self._wait(entry, f"waits for {needs(request)}; {self._free(entry)}; {behind}")
            return
        if self.tries >= BACKFILL_TRIES:
            self._wait(entry, f"waits for {needs(request)}; not tried in this pass ({BACKFILL_TRIES} were); {behind}")
            return
        self.tries += 1
        if self._place(entry, self.view if ends_in_time else head.spare(self.view)):
            return
        self.failed.add(shape if ends_in_time else (shape, False))
        if not ends_in_time and fits_now(request, self.view, self.options):
            self._wait(entry, f"would fit, but on GPUs kept free: {behind}, and should start before this job ends")
        else:
            self._wait(entry, f"waits for {needs(request)}; {self._free(entry)}; {behind}")

    def _free(self, entry: Waiting) -> str:
        key = (len(self.placed), *shape_of(entry.request))
        if key not in self.rooms:
            room = int(screen(entry.request, self.view, self.options).room.sum())
            self.rooms[key] = room
        return fitting(entry.request, self.rooms[key])

    def _wait(self, entry: Waiting, why: str, start_ms: int | None = None) -> None:
        self.waiting.append(Wait(entry, len(self.waiting) + 1, why, start_ms))


def claim(entry: Waiting, view: ClusterView, shadow_ms: int, blocker: str, options: Options) -> Reservation:
    """What the head will use in the view of its shadow time."""
    gpus = np.zeros(view.free.shape, bool)
    members = np.zeros(len(view))
    for rank in decide(entry.request, view, options).ranks:
        row = view.inventory.row[rank.node]
        gpus[row, list(rank.gpus)] = True
        members[row] += 1
    cpus = members * (entry.request.cpus or 0)
    return Reservation(entry, shadow_ms, blocker, gpus, cpus, members * (entry.request.host_memory_gib or 0.0))


def shape_of(request: PlacementRequest) -> tuple[object, ...]:
    """Requests of one shape fit, or do not, alike."""
    return (
        *(request.members.min, request.gpus_per_node, request.spread, request.topology.required, request.cluster),
        *(request.gpu_share, request.gpu_models, request.pool),
        *(request.gpu_model, request.gpu_memory_gib, request.cpus, request.host_memory_gib),
        *(request.max_risk, request.avoid_nodes),
    )
