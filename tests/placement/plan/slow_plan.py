"""A pass over the queue as it is defined: every entry in turn, and every question is asked again.

Two requests fail alike if the built-in filters read the same of both and no filter of an operator rejected a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.placement.engine import decide, fits_now
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.queue import BACKFILL_TRIES, Reservation, WaitingEntry, make_reservation
from fleetcast.placement.plan.timeline import (
    RunTimeQuantiles,
    Timeline,
    add_request_placement,
    estimate_releases,
)
from fleetcast.placement.plan.turns import QueueTurns
from fleetcast.placement.queues.asks import IDS_AND_TIMES
from tests.placement.runs import Run, table_of


class RecordedReads:
    """A request that records what is read of it. `isinstance` takes it for one of its request's class."""

    def __init__(self, request: PlacementRequest) -> None:
        self._request = request
        self.values: dict[str, Any] = {}

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._request)

    def __getattr__(self, name: str) -> Any:
        self.values[name] = getattr(self._request, name)
        return self.values[name]


@dataclass
class SlowPass:
    """The state of it. codes: request_id → why it waits, in order.

    known: form → `never` or `unknown`, once for a pass.
    failed: forms that found no room. (form, False): forms that found none beside the head.
    """

    view: ClusterView
    running: dict[str, Run]
    run_times: RunTimeQuantiles
    options: Options
    turns: QueueTurns
    placed: list[tuple[str, tuple[RankPlacement, ...]]] = field(default_factory=list)
    codes: dict[str, str] = field(default_factory=dict)
    head: Reservation | None = None
    tries: int = 0
    failed: set[Any] = field(default_factory=set)
    known: dict[Any, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = self.view

    def forms(self, request: PlacementRequest) -> tuple[Any, Any]:
        """What the built-in filters read of a request and the least gang that must fit; and all but ids and times."""
        reads = RecordedReads(request)
        screen(cast(PlacementRequest, reads), self.before, replace(self.options, filters=()))
        wide = request.members.min, request.required, frozenset(reads.values.items())
        rest = {name: getattr(request, name) for name in request.__struct_fields__ if name not in IDS_AND_TIMES}
        return wide, frozenset(rest.items())

    def failed_form(self, request: PlacementRequest, view: ClusterView) -> Any:
        """The form of those that fail alike: a filter of the operator may treat any two requests differently."""
        reasons = screen(request, view, self.options).by_reason
        return self.forms(request)[any(name in reasons for name, _ in self.options.filters)]

    def code_of(self, request: PlacementRequest) -> str:
        """Why no request of its forms is tried in this pass; "" if one may be."""
        for form in self.forms(request):
            if form in self.known or form in self.failed:
                return self.known.get(form, "room")
        return ""

    def try_entry(self, entry: WaitingEntry) -> None:
        request = entry.request
        code = self.code_of(request)
        if not code:
            allowed = self.turns.limit_to_quota(request)
            if isinstance(allowed, str):
                self.codes[request.request_id] = "queue"
                later = self.turns.make_later_request(request) if self.head is None else None
                if later is None or self.code_of(later) or fits_now(later, self.view, self.options):
                    return
                self.codes[request.request_id] = self.consider(entry, later)
                return
            code = self.consider(entry, allowed)
        if code:
            self.codes[request.request_id] = code
            if code != "never":
                self.turns.count_waiting(request)

    def consider(self, entry: WaitingEntry, request: PlacementRequest) -> str:
        """Why it waits; "" where it was placed."""
        if code := self.code_of(request):
            return code
        if self.head is not None:
            return self.backfill(entry, request, self.head)
        if self.place(entry, request, self.view):
            return ""
        ahead = Timeline(
            self.view, estimate_releases(self.view, table_of(self.running), self.run_times, self.options.now_ms)
        )
        step = ahead.find_first_fit(request, self.options)
        if step is None:
            code, view = (
                ("never", ahead.make_view_after(len(ahead.ahead))) if request.gpus_per_node else ("unknown", self.view)
            )
            self.known[self.failed_form(request, view)] = code
            return code
        last = ahead.ahead[step - 1]
        self.head = make_reservation(
            WaitingEntry(request, entry.queued_ms), ahead.make_view_after(step), last.end_ms, last.job, self.options
        )
        return "next"

    def backfill(self, entry: WaitingEntry, request: PlacementRequest, head: Reservation) -> str:
        gpus = request.members.desired * request.gpus_per_node
        run_s = self.run_times.estimate_run_s(gpus, 0.9, limit_s=request.limit_s)
        if request.limit_s is not None and self.turns.is_overdue(head.entry.request):
            run_s = request.limit_s
        in_time = self.options.now_ms + 1000 * run_s <= head.shadow_ms
        if any((form, in_time) in self.failed for form in self.forms(request)):
            return "room"
        if self.tries >= BACKFILL_TRIES:
            return "untried"
        self.tries += 1
        view = self.view if in_time else head.subtract_from_view(self.view)
        if self.place(entry, request, view):
            return ""
        form = self.failed_form(request, view)
        self.failed.add(form if in_time else (form, False))
        return "room"

    def place(self, entry: WaitingEntry, request: PlacementRequest, view: ClusterView) -> bool:
        if not fits_now(request, view, self.options):
            return False
        decision = decide(request, view, self.options)
        self.view = add_request_placement(self.view, request, decision.ranks)
        gpus = sum(len(rank.gpus) for rank in decision.ranks)
        self.running[request.job_name] = Run(self.options.now_ms, gpus, request.limit_s)
        self.placed.append((request.request_id, decision.ranks))
        self.turns.record_placement(entry.request, decision)
        return True


def slow_plan(
    queue: Sequence[WaitingEntry],
    view: ClusterView,
    running: RunningJobs,
    run_times: RunTimeQuantiles,
    options: Options,
    turns: QueueTurns,
) -> SlowPass:
    """One pass."""
    runs = {name: Run(*running.find_run(name, options.now_ms)) for name in running.names}
    mine = SlowPass(view, runs, run_times, options, turns)
    ordered = turns.sort_entries(queue)
    for at, entry in enumerate(ordered):
        mine.try_entry(entry)
        if mine.head is not None:
            for behind in turns.sort_behind_head(ordered[at + 1 :]):
                mine.try_entry(behind)
            break
    return mine
