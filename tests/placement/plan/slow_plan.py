"""A pass over the queue as it is defined: every entry in turn, and every question is asked again.

Two requests fail alike if the built-in filters read the same of both and no filter of an operator rejected a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, cast

from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.placement.engine import decide, find_claimed_gpus, fits_now
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.profile import Claim, subtract_claims
from fleetcast.placement.plan.queue import BACKFILL_TRIES, WaitingEntry
from fleetcast.placement.plan.timeline import (
    RunTimeQuantiles,
    Timeline,
    add_request_placement,
    estimate_releases,
)
from fleetcast.placement.plan.turns import QueueTurns, TreeTurns
from fleetcast.placement.queues.asks import IDS_AND_TIMES
from fleetcast.placement.queues.closed import ClosedNodes, close_nodes
from fleetcast.placement.queues.tree import describe_window
from fleetcast.placement.recovery.spares import choose_spare_nodes
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
    failed: (form, claims): forms that found no room without the GPUs of these claims.
    """

    view: ClusterView
    running: dict[str, Run]
    run_times: RunTimeQuantiles
    options: Options
    turns: QueueTurns
    placed: list[tuple[str, tuple[RankPlacement, ...]]] = field(default_factory=list)
    codes: dict[str, str] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    tries: int = 0
    failed: set[Any] = field(default_factory=set)
    known: dict[Any, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = self.view
        windows = self.turns.tree.windows if isinstance(self.turns, TreeTurns) else ()
        self.windows = [window for window in windows if window.to_ms > self.options.now_ms]

    def forms(self, request: PlacementRequest) -> tuple[Any, Any]:
        """Return what the built-in filters read of a request and its least gang, and all of it but ids and times."""
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
            if form in self.known or (form, frozenset()) in self.failed:
                return self.known.get(form, "room")
        return ""

    @property
    def is_full(self) -> bool:
        return len(self.claims) >= self.turns.most_claims

    def try_entry(self, entry: WaitingEntry) -> None:
        request = entry.request
        code = self.code_of(request)
        allowed = self.turns.limit_to_quota(request)
        if code == "room" and not self.is_full:
            later = self.turns.make_later_request(request) if isinstance(allowed, str) else allowed
            code = code if later is None else self.claim_or(code, later)
        if not code:
            if isinstance(allowed, str):
                self.codes[request.request_id] = "queue"
                later = None if self.is_full else self.turns.make_later_request(request)
                if later is None or self.code_of(later) or fits_now(later, self.view, self.options):
                    return
                code = self.claim_or("queue", later)
                self.codes[request.request_id] = code
                return
            code = self.consider(entry, allowed)
        if code:
            self.codes[request.request_id] = code
            if code != "never":
                self.turns.count_waiting(request)

    def consider(self, entry: WaitingEntry, request: PlacementRequest) -> str:
        """Why it waits; "" where it was placed."""
        if code := self.code_of(request):
            return code if code in ("never", "unknown") else self.claim_or(code, request)
        if self.claims:
            return self.backfill(entry, request)
        return "" if self.place(entry, request, self.view) else self.claim_or("room", request)

    def claim_or(self, code: str, request: PlacementRequest) -> str:
        """Why it waits, after it was given a claim if there may be another one and its queue may hold it."""
        if self.is_full or (self.claims and not self.turns.may_claim(request)):
            return code
        running = table_of(self.running)
        ahead = Timeline(self.view, estimate_releases(self.view, running, self.run_times, self.options.now_ms))
        run_ms = round(1000 * self.likely_s(request))
        first = request
        ended = [(release.end_ms, step, release.job) for step, release in enumerate(ahead.ahead, 1)]
        for claim in self.claims:
            done = sum(release.end_ms <= claim.end_ms for release in ahead.ahead)
            ended.append((claim.end_ms, done, claim.request.job_name))
        for window in self.windows:
            done = sum(release.end_ms <= window.to_ms for release in ahead.ahead)
            ended.append((window.to_ms, done, describe_window(window)))
        for start_ms, step, job in sorted(ended, key=lambda row: row[:2]):  # noqa: B007
            kept = [claim for claim in self.claims if claim.start_ms < start_ms + run_ms and claim.end_ms > start_ms]
            view = subtract_claims(ahead.make_view_after(step), kept)
            request = self.close(request, start_ms, start_ms + run_ms)
            if fits_now(request, view, self.options):
                break
        else:
            code, view = (
                ("never", ahead.make_view_after(len(ahead.ahead))) if request.gpus_per_node else ("unknown", self.view)
            )
            self.known[self.failed_form(first, view)] = code
            return code
        gpus, members = find_claimed_gpus(request, view, self.options)
        amounts = members * float(request.cpus or 0), members * float(request.host_memory_gib or 0.0)
        overdue = self.turns.is_overdue(request)
        self.claims.append(Claim(request, start_ms, start_ms + run_ms, job, overdue, gpus, *amounts))
        if not self.is_full:
            self.turns.record_claim(request)
        return "window" if any(job == describe_window(window) for window in self.windows) else "next"

    def close(self, request: PlacementRequest, start_ms: int, end_ms: int) -> PlacementRequest:
        """The request with the nodes closed to it that others may have at some time of this span, and full models."""
        if not isinstance(self.turns, TreeTurns):
            return request
        tree, closed = self.turns.tree, [one for one in getattr(request, "closed", ()) if one.reason == "model_quota"]
        leaf = tree.find_known_leaf(request)
        for window in self.windows:
            is_mine = window.queue is not None and f"{leaf}/".startswith(f"{window.queue}/")
            if not is_mine and not (window.to_ms <= start_ms or end_ms <= window.from_ms):
                closed.append(ClosedNodes("maintenance_window", window.nodes, window.name))
        can_leave = tree.list_path(leaf)[0].preemptible == "all" if request.preemptible is None else request.preemptible
        if tree.spares is not None and not can_leave:
            spares = choose_spare_nodes(self.before, tree.spares)
            names = [name for name, is_spare in zip(self.before.topology.names, spares, strict=True) if is_spare]
            closed.append(ClosedNodes("spare", tuple(names), "spare"))
        return close_nodes(request, tuple(closed))

    def likely_s(self, request: PlacementRequest) -> float:
        gpus = request.members.desired * request.gpus_per_node
        return self.run_times.estimate_run_s(gpus, 0.9, limit_s=request.limit_s)

    def backfill(self, entry: WaitingEntry, request: PlacementRequest) -> str:
        delayed = []
        for claim in self.claims:
            run_s = self.likely_s(request)
            if request.limit_s is not None and claim.is_overdue:
                run_s = request.limit_s
            if self.options.now_ms + 1000 * run_s > claim.start_ms:
                delayed.append(claim)
        kept = frozenset(claim.request.request_id for claim in delayed)
        if any((form, some) in self.failed for form in self.forms(request) for some in subsets(kept)):
            return self.claim_or("room", request)
        if self.tries >= BACKFILL_TRIES:
            return "untried"
        self.tries += 1
        view = subtract_claims(self.view, delayed)
        if self.place(entry, request, view):
            return ""
        self.failed.add((self.failed_form(request, view), kept))
        return self.claim_or("room", request)

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


def subsets(names: frozenset[str]) -> list[frozenset[str]]:
    return [frozenset(some) for size in range(len(names) + 1) for some in combinations(names, size)]


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
        if mine.is_full:
            for behind in turns.sort_behind_head(ordered[at + 1 :]):
                mine.try_entry(behind)
            break
    return mine
