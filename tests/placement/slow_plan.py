"""A pass over the queue as it is defined: every entry in turn, and every question is asked again.

Two requests fail alike if the filters, an operator's own too, read the same of both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fleet.requests import PlacementRequest, RankPlacement
from placement.engine import decide, fits_now
from placement.filters import screen
from placement.options import Options
from placement.queue import BACKFILL_TRIES, Reservation, Waiting, claim
from placement.timeline import RunningJob, RunTimeQuantiles, Timeline, place, releases
from placement.turns import QueueTurns
from placement.view import ClusterView


class RecordedReads:
    """A request that records what is read of it."""

    def __init__(self, request: PlacementRequest) -> None:
        self._request = request
        self.values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        self.values[name] = getattr(self._request, name)
        return self.values[name]


@dataclass
class SlowPass:
    """The state of it. codes: request_id → why it waits, in order."""

    view: ClusterView
    running: dict[str, RunningJob]
    run_times: RunTimeQuantiles
    options: Options
    turns: QueueTurns
    placed: list[tuple[str, tuple[RankPlacement, ...]]] = field(default_factory=list)
    codes: dict[str, str] = field(default_factory=dict)
    head: Reservation | None = None
    tries: int = 0
    failed: set[Any] = field(default_factory=set)
    never: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.before = self.view

    def form(self, request: PlacementRequest) -> Any:
        """What the filters read of a request, and the least gang that must fit."""
        reads = RecordedReads(request)
        screen(cast(PlacementRequest, reads), self.before, self.options)
        return request.members.min, request.required, frozenset(reads.values.items())

    def take_turn(self, entry: Waiting) -> None:
        request = entry.request
        shape = self.form(request)
        if shape not in self.failed and shape not in self.never:
            allowed = self.turns.allow(request)
            if isinstance(allowed, str):
                self.codes[request.request_id] = "queue"
                later = self.turns.later(request) if self.head is None else None
                if (
                    later is None
                    or self.form(later) in self.failed | self.never
                    or fits_now(later, self.view, self.options)
                ):
                    return
                self.codes[request.request_id] = self.consider(entry, later, self.form(later))
                return
            shape = self.form(allowed)
            code = self.consider(entry, allowed, shape)
        else:
            code = "never" if shape in self.never else "room"
        if code:
            self.codes[request.request_id] = code
            if code != "never":
                self.turns.want(request)

    def consider(self, entry: Waiting, request: PlacementRequest, shape: Any) -> str:
        """Why it waits; "" where it was placed."""
        if shape in self.never:
            return "never"
        if self.head is not None:
            return self.backfill(entry, request, shape, self.head)
        if self.place(entry, request, self.view):
            return ""
        ahead = Timeline(self.view, releases(self.view, self.running, self.run_times, self.options.now_ms))
        step = ahead.first_fit(request, self.options)
        if step is None:
            if request.gpus_per_node:
                self.never.add(shape)
            return "never" if request.gpus_per_node else "unknown"
        last = ahead.ahead[step - 1]
        self.head = claim(Waiting(request, entry.queued_ms), ahead.at(step), last.end_ms, last.job, self.options)
        return "next"

    def backfill(self, entry: Waiting, request: PlacementRequest, shape: Any, head: Reservation) -> str:
        gpus = request.members.desired * request.gpus_per_node
        run_s = self.run_times.run_s(gpus, 0.9, limit_s=request.limit_s)
        if request.limit_s is not None and self.turns.is_overdue(head.entry.request):
            run_s = request.limit_s
        in_time = self.options.now_ms + 1000 * run_s <= head.shadow_ms
        if shape in self.failed or (shape, in_time) in self.failed:
            return "room"
        if self.tries >= BACKFILL_TRIES:
            return "untried"
        self.tries += 1
        if self.place(entry, request, self.view if in_time else head.spare(self.view)):
            return ""
        self.failed.add(shape if in_time else (shape, False))
        return "room"

    def place(self, entry: Waiting, request: PlacementRequest, view: ClusterView) -> bool:
        if not fits_now(request, view, self.options):
            return False
        decision = decide(request, view, self.options)
        self.view = place(self.view, request, decision.ranks)
        gpus = sum(len(rank.gpus) for rank in decision.ranks)
        self.running[request.job_name] = RunningJob(self.options.now_ms, gpus, request.limit_s)
        self.placed.append((request.request_id, decision.ranks))
        self.turns.take(entry.request, decision)
        return True


def slow_plan(
    queue: Sequence[Waiting],
    view: ClusterView,
    running: Mapping[str, RunningJob],
    run_times: RunTimeQuantiles,
    options: Options,
    turns: QueueTurns,
) -> SlowPass:
    """One pass."""
    mine = SlowPass(view, dict(running), run_times, options, turns)
    ordered = turns.in_order(queue)
    for at, entry in enumerate(ordered):
        mine.take_turn(entry)
        if mine.head is not None:
            for behind in turns.behind(ordered[at + 1 :]):
                mine.take_turn(behind)
            break
    return mine
