"""The pass over the queue: priority first, then first come, first served, with backfill behind claims.

All functions are pure: they receive a state and return a plan.

1. Entries are placed in order until one does not fit: the head.
2. The head gets a claim (`fleetcast.placement.plan.profile`). Running jobs end one after the other, as estimated,
   until the head fits. That time is its *shadow time*. The GPUs that `decide` gives it then, under all its
   constraints, are reserved. Further entries that cannot start get claims, too, up to the number that the policy of
   the queues allows. One claim makes EASY backfill (Lifka, "The ANL/IBM SP Scheduling System", 1995). More approach
   conservative backfill.
3. Another entry may start now if it delays no claim: it ends before the start of each claim by its own estimate, or
   uses none of the claim's GPUs. Overdue entries are tried first while more claims are possible. Behind the last
   claim they have no precedence (`fleetcast.placement.play.backfill`).
4. An entry that would not fit into the fleet with all jobs gone waits without delaying any other entry.

Estimates are the p90 of finished jobs of the same GPU count, never a job's own future. A request is
skipped if one with the same fit key (`fleetcast.placement.queues.asks`) failed in this pass. At
most `BACKFILL_TRIES` keys are tried. So the cost of a pass depends on how many different requests
it has.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.placement.engine import decide_screened, fits_now, has_room_for_gang
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RunningJobs, make_running_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.machines.words import explain_shortage
from fleetcast.placement.plan.profile import AvailabilityProfile, Claim, subtract_claims
from fleetcast.placement.plan.promised import Promises, count_promises, hold_placement
from fleetcast.placement.plan.reasons import StateAfterPass, WaitCode, WaitReason
from fleetcast.placement.plan.reclaiming import ReclaimInput, ReclaimProposal, propose_reclaim
from fleetcast.placement.plan.timeline import RunTimeQuantiles, add_request_placement
from fleetcast.placement.plan.turns import OneLine, QueueTurns
from fleetcast.placement.queues.asks import FitKey, QueueAsk, make_fit_key, make_queue_ask

BACKFILL_TRIES = 64
MAX_MS = 1 << 62  # a time that never comes
FitKeys = tuple[FitKey, FitKey]


@dataclass(frozen=True, slots=True)
class WaitingEntry:
    """A request that waits in the queue, and the time since which it waits."""

    request: PlacementRequest
    queued_ms: int


class Wait(msgspec.Struct, gc=False):
    """An entry that still waits after a pass, with its position and the reason.

    position: counts from 1. start_ms: the start of its claim, None for an entry without one.
    """

    entry: WaitingEntry
    position: int
    reason: WaitReason
    start_ms: int | None = None

    @property
    def why(self) -> str:
        """The reason as a sentence."""
        return self.reason.sentence


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of one pass over the queue.

    placed: entries in the order of their decisions. view, running: the fleet and its jobs after these
    placements. claims: the first is that of the head. proposal: which running jobs would be stopped for the head, if
    the policy of the queues lets the pass look for them.
    """

    placed: tuple[tuple[WaitingEntry, Decision], ...]
    waiting: tuple[Wait, ...]
    view: ClusterView
    running: RunningJobs
    claims: tuple[Claim, ...] = ()
    proposal: ReclaimProposal | None = None

    @property
    def head(self) -> Claim | None:
        """The claim of the head of the queue. None if no entry has one."""
        return self.claims[0] if self.claims else None

    def make_unclaimed_view(self, end_ms: float = math.inf) -> ClusterView:
        """Return the view without the GPUs of the claims that start before `end_ms`."""
        return subtract_claims(self.view, (claim for claim in self.claims if claim.start_ms < end_ms))


def make_order_key(entry: WaitingEntry) -> tuple[int, int, str]:
    """Return a key by which entries are sorted: higher priority first, then the longer wait, then the id."""
    return -entry.request.priority, entry.queued_ms, entry.request.request_id


ONE_LINE = OneLine(make_order_key)


def plan(
    queue: Sequence[WaitingEntry],
    view: ClusterView,
    running: RunningJobs,
    run_times: RunTimeQuantiles,
    options: Options,
    turns: QueueTurns | None = None,
    dropped: Collection[str] = (),
    reclaim: ReclaimInput | None = None,
    promises: Promises | None = None,
) -> Plan:
    """Make one pass over the queue at `options.now_ms`.

    running: the jobs that hold GPUs in the view. dropped: requests whose claims reserve nothing in this pass
    (`fleetcast.placement.plan.dropped_claims`). reclaim: the facts by which the pass may propose to stop jobs for the
    head. None if it may not. promises: the GPUs that stops free for one request each. Such a
    request is tried first, on these GPUs.
    """
    after = StateAfterPass(options, view, turns or ONE_LINE)
    profile = AvailabilityProfile(run_times, options, after.turns)
    cycle = PassState(view, running, profile, options, after.turns, after, dropped, reclaim, promises or {})
    ordered = iter(cycle.place_promised(queue) if promises else cycle.turns.sort_entries(queue))
    for entry in ordered:
        cycle.try_entry(entry)
        if profile.is_full:
            break
    for entry in cycle.turns.sort_behind_head(list(ordered)):
        cycle.try_entry(entry)
    cycle.after.view = cycle.view
    if cycle.proposal is None and cycle.postponed is not None:
        cycle.proposal = cycle.postponed()
    found = tuple(cycle.placed), tuple(cycle.waiting), cycle.view, cycle.running, tuple(profile.claims)
    return Plan(*found, cycle.proposal)


def make_begun_jobs(begun: Sequence[tuple[PlacementRequest, int]], now_ms: int) -> RunningJobs:
    """Return the table of the jobs that a pass has placed. begun: each request with its GPUs."""
    return make_running_jobs(
        (request.job_name for request, _ in begun),
        gpus=[gpus for _, gpus in begun],
        started_ms=now_ms,
        limit_s=[np.nan if request.limit_s is None else request.limit_s for request, _ in begun],
    )


class AskInPass(msgspec.Struct, gc=False):
    """The findings of one pass about all entries with the same ask.

    reason: why none of them can start in this pass. version: the version of the turns for which
    `refused` holds. refused: why the queue's quota refuses the ask, None if it does not. final: a
    refusal that makes no entry the head. is_whole: whether the quota allows all that the ask wants.
    wants: whether the queue may still lack part of its guarantee. may_claim: whether the queue may still get a claim
    for the ask.
    """

    ask: QueueAsk
    reason: WaitReason | None = None
    version: int = -1
    refused: WaitReason | None = None
    final: WaitReason | None = None
    is_whole: bool = True
    wants: bool = True
    may_claim: bool = True


@dataclass(slots=True)
class PassState:
    """The state of one pass over the queue."""

    view: ClusterView
    known: RunningJobs  # that ran before the pass
    profile: AvailabilityProfile
    options: Options
    turns: QueueTurns
    after: StateAfterPass
    dropped: Collection[str]
    reclaim: ReclaimInput | None = None
    promises: Promises = field(default_factory=dict)
    proposal: ReclaimProposal | None = None
    postponed: Callable[[], ReclaimProposal] | None = None  # a search that counts if no later one does
    placed: list[tuple[WaitingEntry, Decision]] = field(default_factory=list)
    begun: list[tuple[PlacementRequest, int]] = field(default_factory=list)  # what was placed, with its GPUs
    waiting: list[Wait] = field(default_factory=list)
    tries: int = 0
    asks: dict[QueueAsk, AskInPass] = field(default_factory=dict)
    final: dict[FitKey, WaitReason] = field(default_factory=dict)  # of what cannot start in this pass
    late: dict[int, dict[FitKey, WaitReason]] = field(default_factory=dict)  # nor if it would delay these claims
    in_line: bool = field(init=False)  # all wait in one line: in which queue does not matter
    has_plugins: bool = field(init=False)  # the operator's own filters may read which queue that is

    def __post_init__(self) -> None:
        self.has_plugins = bool(self.options.filters)
        self.in_line = self.turns.standing is None and not self.has_plugins

    @property
    def running(self) -> RunningJobs:
        """The running jobs, with those that this pass has placed."""
        if not self.begun:
            return self.known
        return self.known.append_rows(make_begun_jobs(self.begun, self.options.now_ms))

    def list_fit_keys(self, request: PlacementRequest) -> FitKeys:
        """Return the two fit keys of a request: for the built-in filters alone, and for all filters.

        A failure may be recorded under either of them. Without plugins both are the same.
        """
        built_in = make_fit_key(request, has_plugins=False)
        return built_in, make_fit_key(request, has_plugins=True) if self.has_plugins else built_in

    def make_failure_key(self, request: PlacementRequest, view: ClusterView) -> FitKey:
        """Return the fit key under which the failure of a request is recorded.

        Every request with this key fails, too. If a plugin rejected a node, the key includes all fields that
        plugins may read.
        """
        plugins = {name for name, _ in self.options.filters}
        by_plugin = bool(plugins) and not plugins.isdisjoint(screen(request, view, self.options).by_reason)
        return make_fit_key(request, has_plugins=by_plugin)

    def place_promised(self, queue: Sequence[WaitingEntry]) -> list[WaitingEntry]:
        """Place the requests for which jobs stop, each if it fits with the GPUs that are promised to it.

        Returns the other entries in their order. If some jobs did not stop for a request, look for others. A pass
        proposes the first set that is sent, or else the last one. So if nothing is sent anyway, only the last of these
        requests counts, and only if no head searches after it.
        """
        left, short = [], None
        for entry in self.turns.sort_entries(queue):
            promised = self.promises.get(entry.request.request_id)
            allowed = None if promised is None else self.turns.limit_to_quota(entry.request)
            if promised is None or allowed is None or isinstance(allowed, str):
                left.append(entry)
                continue
            if self._place_entry(entry, allowed, promised.release(self.view), promised.release):
                continue
            left.append(entry)
            if promised.is_short and self.reclaim is not None and not self.reclaim.may_send:
                short = allowed
            elif promised.is_short:
                self._propose_reclaim(allowed, MAX_MS, 0)
        if short is not None:
            self._propose_reclaim(short, MAX_MS, 0, is_postponed=True)
        return self.turns.sort_entries(left) if self.placed else left

    def try_entry(self, entry: WaitingEntry) -> None:
        """Place an entry if it fits and its queue's quota allows it. Otherwise record why it waits."""
        promised = self.promises.get(entry.request.request_id)
        if promised is not None:
            self._add_wait(entry, WaitReason("room", entry.request, self.after, said=promised.sentence))
            return
        ask = make_queue_ask(entry.request)
        if self.in_line and ask.in_line is not None:
            ask = ask.in_line
        row = self.asks.get(ask)
        if row is None:
            row = self.asks[ask] = AskInPass(ask)
        reason = row.reason or self._find_skip_reason(row, entry)
        if not self.profile.is_full and row.may_claim and reason is not None and reason.code in ("room", "kept"):
            allowed = self.turns.limit_to_quota(entry.request)
            later = self.turns.make_later_request(entry.request) if isinstance(allowed, str) else allowed
            self._claim_or_wait(entry, row, later, reason)
        elif reason is not None and reason is row.reason:
            self.waiting.append(Wait(entry, len(self.waiting) + 1, reason))  # of thousands nothing else is asked
        elif reason is not None:
            self._refuse_entry(entry, row, reason)
        elif self._try_to_place(entry, row):
            return
        if row.wants and row.refused is None:
            row.wants = self.waiting[-1].reason.code != "never" and self.turns.count_waiting(entry.request)

    def _refuse_entry(self, entry: WaitingEntry, row: AskInPass, reason: WaitReason) -> None:
        """Record that an entry waits. It gets a claim if its queue only lacks GPUs that jobs hold now."""
        may_claim = reason is row.refused and reason is not row.final and not self.profile.is_full
        later = self.turns.make_later_request(entry.request) if may_claim else None
        if later is None or self._find_final_reason(later) is not None or fits_now(later, self.view, self.options):
            row.final = reason
            self._add_wait(entry, reason)
        else:
            self._claim_or_wait(entry, row, later, reason)

    def _find_final_reason(self, request: PlacementRequest) -> WaitReason | None:
        wide, narrow = self.list_fit_keys(request)
        return self.final.get(wide) or self.final.get(narrow)

    def _find_skip_reason(self, row: AskInPass, entry: WaitingEntry) -> WaitReason | None:
        """Return why an entry is skipped, or None to try it."""
        wide, narrow = row.ask.wide, row.ask.narrow
        final = self.final.get(wide) or self.final.get(narrow)
        if final is not None:
            row.reason, row.refused = final, None
            return row.reason
        if self.tries >= BACKFILL_TRIES:
            row.reason = self._make_behind_reason("untried", entry.request)
            row.wants = False  # this pass places nothing more
            return row.reason
        if row.version != self.turns.version:
            self._record_allowance(row, entry.request)
        if row.refused is not None or not self.late or not row.is_whole:
            return row.refused
        return self._find_late_reason(
            self.profile.find_delayed_claims(row.ask.gpus, entry.request.limit_s), wide, narrow
        )

    def _find_late_reason(self, delayed: int, wide: FitKey, narrow: FitKey) -> WaitReason | None:
        """Return why a request cannot start if it would delay these claims, or None if it may be tried."""
        for claims, failed in self.late.items():
            if claims & delayed == claims and (reason := failed.get(wide) or failed.get(narrow)) is not None:
                return reason
        return None

    def _record_allowance(self, row: AskInPass, request: PlacementRequest) -> None:
        """Record whether the queue's quota allows the ask now, and whether it allows all of it."""
        allowed, row.version = self.turns.limit_to_quota(request), self.turns.version
        row.is_whole = allowed is request
        row.refused = WaitReason("queue", request, self.after, said=allowed) if isinstance(allowed, str) else None

    def _try_to_place(self, entry: WaitingEntry, row: AskInPass) -> bool:
        """Place an entry if it fits. Otherwise record why it waits. Returns whether it was placed."""
        allowed = self.turns.limit_to_quota(entry.request)
        assert not isinstance(allowed, str), allowed
        final = None if allowed is entry.request else self._find_final_reason(allowed)
        if final is not None:
            self._claim_or_wait(entry, row, allowed, final)
        elif self.profile.claims:
            return self._backfill_entry(entry, row, allowed)
        elif self._place_entry(entry, allowed, self.view):
            return True
        else:
            self._add_claim(entry, allowed)
        return False

    def _place_entry(
        self,
        entry: WaitingEntry,
        request: PlacementRequest,
        view: ClusterView,
        release: Callable[[ClusterView], ClusterView] | None = None,
    ) -> bool:
        """Place an entry if its request fits within `view`. Returns whether it was placed.

        request: the entry's request, limited to its quota. view: the view of this pass, its unreserved part, or
        the view with GPUs that only this entry may use. release: makes these GPUs free in the view of the pass.
        """
        screened = screen(request, view, self.options)
        if not has_room_for_gang(request, view, screened):
            return False
        decision = decide_screened(request, view, self.options, screened)
        assert decision.outcome == "placed", decision.sentence
        self.view = add_request_placement(release(self.view) if release else self.view, request, decision.ranks)
        gpus = sum(len(rank.gpus) for rank in decision.ranks)
        self.begun.append((request, gpus))
        self.placed.append((entry, decision))
        self.turns.record_placement(entry.request, decision)
        return True

    def _claim_or_wait(
        self, entry: WaitingEntry, row: AskInPass, request: PlacementRequest | None, reason: WaitReason
    ) -> None:
        """Give an entry that cannot start a claim, if there may be another one and its queue may hold it.

        request: the entry's request, limited to its quota. None if its queue may not hold it later either. reason: why
        the entry cannot start.
        """
        if reason.code in ("never", "unknown") or self.profile.is_full or request is None:
            self._add_wait(entry, reason)
        elif self.profile.claims and not self.turns.may_claim(request):
            row.may_claim = False
            self._add_wait(entry, reason)
        else:
            self._add_claim(entry, request)

    def _add_claim(self, entry: WaitingEntry, request: PlacementRequest) -> None:
        """Reserve GPUs for an entry. The first entry with a claim is the head.

        The entry gets no claim if it never fits, or if its start time cannot be predicted.
        """
        timeline = self.profile.update_timeline(self.view, self.running)
        step, later = timeline.find_first_fit(request, self.options), request
        if step is None:
            later = self.profile.open_windows(request)
            step = None if later is request else timeline.find_first_fit(later, self.options)
        if step is None and not request.gpus_per_node:
            reason = WaitReason("unknown", request, self.after)
            self.final[self.make_failure_key(request, self.view)] = reason
        elif step is None:
            empty = timeline.make_view_after(len(timeline.ahead))
            lack = explain_shortage(later, empty, screen(later, empty, self.options))
            said = f"does not fit even when all running jobs have ended: {lack}"
            reason = WaitReason("never", request, self.after, said=said)
            self.final[self.make_failure_key(request, empty)] = reason
        else:
            is_dropped, is_overdue = entry.request.request_id in self.dropped, self.turns.is_overdue(request)
            claim = self.profile.add_claim(request, timeline, step, is_overdue, is_dropped)
            number = len(self.profile.claims)
            if number == 1:
                self._propose_reclaim(request, claim.start_ms, entry.queued_ms)
            if not self.profile.is_full:
                self.turns.record_claim(request)
            code: WaitCode = "window" if claim.blocker in self.turns.window_names else "next"
            reason = WaitReason(code, request, self.after, claim.blocker, number, start_ms=claim.start_ms)
            self._add_wait(entry, reason, claim.start_ms)
            return
        self._add_wait(entry, reason)

    def _propose_reclaim(
        self, request: PlacementRequest, shadow_ms: int, queued_ms: int, is_postponed: bool = False
    ) -> None:
        """Look for running jobs to stop for a request, which should fit by itself at `shadow_ms`.

        A pass proposes one set of jobs. is_postponed: the search keeps the present state of the pass, and runs at its
        end if no other search has run.
        """
        standing, facts, options = self.turns.standing, self.reclaim, self.options
        if facts is None or standing is None or (self.proposal is not None and self.proposal.sends):
            return
        own = self.promises.get(request.request_id)
        others = {name: promised for name, promised in self.promises.items() if promised is not own}
        placed = {entry.request.request_id for entry, _ in self.placed}
        final = count_promises(standing, self.turns.holds, facts.leaving, others, placed)
        if is_postponed and final is standing:
            final = standing.copy()
        view, holds, run_s = self.view, dict(self.turns.holds), self._estimate_limited_run_s(request)

        def search() -> ReclaimProposal:
            released = view if own is None else own.release_all(view)
            propose = facts.propose or propose_reclaim
            return propose(request, released, final, holds, facts, options, shadow_ms, queued_ms, run_s)

        if is_postponed:
            self.postponed = search
            return
        self.proposal = found = search()
        if found.sends and found.victims is not None:
            self.view = hold_placement(self.view, request, found.victims.decision.ranks)

    def _estimate_limited_run_s(self, request: PlacementRequest) -> float | None:
        """Return the median run time of a request at full size. Returns None without a limit: too little is known."""
        if request.limit_s is None:
            return None
        gpus = request.members.desired * request.gpus_per_node
        return self.profile.run_times.estimate_run_s(gpus, 0.5, limit_s=request.limit_s)

    def _backfill_entry(self, entry: WaitingEntry, row: AskInPass, request: PlacementRequest) -> bool:
        """Place an entry if it fits without a delay of any claim. Returns whether it was placed."""
        gpus = request.members.desired * request.gpus_per_node
        delayed = self.profile.find_delayed_claims(gpus, request.limit_s)
        late = self._find_late_reason(delayed, *self.list_fit_keys(request))
        if late is not None:
            self._claim_or_wait(entry, row, request, late)
            return False
        self.tries += 1
        view = self.profile.make_free_view(self.view, delayed)
        if self._place_entry(entry, request, view):
            return True
        first = self.profile.find_first_delayed(request, self.view, delayed) if delayed else None
        reason = self._make_behind_reason("room" if first is None else "kept", request, first or 0)
        failed = self.late.setdefault(delayed, {}) if delayed else self.final
        failed[self.make_failure_key(request, view)] = reason
        self._claim_or_wait(entry, row, request, reason)
        return False

    def _make_behind_reason(self, code: WaitCode, request: PlacementRequest, number: int = 0) -> WaitReason:
        """Return the reason of an entry that waits behind a claim. number: counts claims from 0, the head's."""
        return WaitReason(code, request, self.after, self.profile.claims[number].request.job_name, number + 1)

    def _add_wait(self, entry: WaitingEntry, reason: WaitReason, start_ms: int | None = None) -> None:
        self.waiting.append(Wait(entry, len(self.waiting) + 1, reason, start_ms))
