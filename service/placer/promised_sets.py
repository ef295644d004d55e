"""The GPUs that actions promise: to the request that a set of actions frees them for, and to a gang that gets nodes.

The sets are a mark in the ledger, which is written in the transaction that sends the actions. What a gang gets is in
its own action. So a restart loses none.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from fleetcast.fleet.clock import Clock, ClockWatch
from fleetcast.fleet.requests import WHOLE_GPU, PlacementRequest, RankPlacement
from fleetcast.placement.actions.action import ActionKind, JobAction
from fleetcast.placement.actions.life import ActionRecord, ActionState
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.machines.running_jobs import RUN_LEVELS, JobRun, RunningJobs, make_running_jobs
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.promised import PromisedGpus, make_gang_hold_name, make_hold_name
from fleetcast.placement.plan.timeline import Hold, add_placements
from fleetcast.service.placer.action_follow import mask_ranks
from fleetcast.service.placer.charged_clock import STEP_MS
from fleetcast.service.placer.view import ObservedFleet

PROMISED_SETS = "promised_sets"  # the ledger's mark
FAILED = frozenset({ActionState.REFUSED, ActionState.EXPIRED, ActionState.LATE})
MOST_SETS = 2  # of one request: the first one, and one more if some jobs did not stop


class PromisedSet(msgspec.Struct, frozen=True):
    """A set of actions that were sent for one request.

    ranks: the places of the request once all jobs have stopped. actions: ids. number: 1 for its first set. failed:
    the jobs that did not stop for it, or whose GPUs another job or a new attempt took at once.
    """

    payer: str
    ranks: tuple[RankPlacement, ...]
    actions: tuple[str, ...]
    by_ms: int
    number: int = 1
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FollowedSet:
    """A set with the present records of its actions."""

    row: PromisedSet
    records: Sequence[ActionRecord]
    is_live: bool  # its GPUs are still promised

    def has_failed(self, record: ActionRecord) -> bool:
        """Return whether an action of the set frees nothing for its request."""
        return record.state in FAILED or record.action.job in self.row.failed

    @property
    def is_short(self) -> bool:
        return any(map(self.has_failed, self.records))

    def list_freed(self) -> list[RankPlacement]:
        """Return the ranks that jobs have left for this set."""
        seen = [record.action.ranks for record in self.records if record.state is ActionState.SEEN]
        return [rank for ranks in seen for rank in ranks]

    @property
    def is_exhausted(self) -> bool:
        return self.row.number >= MOST_SETS and (self.is_short or not self.is_live)


class PromisedSets:
    """The promised sets of one ledger. find_leaf: returns the leaf queue that a request is charged to."""

    def __init__(self, ledger: Ledger, clock: Clock, find_leaf: Callable[[PlacementRequest], str]) -> None:
        self._ledger = ledger
        self._clock_watch = ClockWatch(clock, STEP_MS)
        self._due_ms = 0  # by how much the clock was set, and no set has moved yet
        self._find_leaf = find_leaf
        self._stored: Any = None
        self._sets: dict[str, PromisedSet] = {}

    def read(self) -> Mapping[str, PromisedSet]:
        """Return payer → its last set."""
        stored = self._ledger.find_mark(PROMISED_SETS)
        if stored is not self._stored:
            rows = msgspec.convert(stored or [], list[PromisedSet])
            self._stored, self._sets = stored, {row.payer: row for row in rows}
        return self._sets

    def write(self, row: PromisedSet) -> None:
        """Store the set of its payer. The caller holds the ledger's transaction."""
        self._store({**self.read(), row.payer: row})

    def _store(self, sets: Mapping[str, PromisedSet]) -> None:
        self._ledger.record_marks(**{PROMISED_SETS: msgspec.to_builtins(list(sets.values()))})

    def list_followed(self, now_ms: int) -> list[FollowedSet]:
        """Return the sets of the requests that wait."""
        return [
            FollowedSet(row, [record for id_ in row.actions if (record := self._ledger.actions.find_action(id_))],
                        now_ms < row.by_ms)
            for row in self.read().values() if self._ledger.is_queued(row.payer)
        ]  # fmt: skip

    def update(self, view: ClusterView, now_ms: int) -> None:
        """Drop the sets of requests that no longer wait, and record the jobs that freed nothing for them.

        view: without promises. If the clock was set, GPUs are promised as long as before.
        """
        self._due_ms += self._clock_watch.pop_clock_step_ms()
        step_ms, before = self._due_ms, self.read()
        if not before:
            self._due_ms = 0
            return
        after = {}
        for found in self.list_followed(now_ms):
            lost = {
                record.action.job
                for record in found.records
                if record.state in FAILED or (record.state is ActionState.SEEN and _is_taken(record.action, view))
            }
            failed = tuple(sorted(lost.union(found.row.failed)))
            row = found.row
            if step_ms or failed != row.failed:
                row = msgspec.structs.replace(row, failed=failed, by_ms=row.by_ms + step_ms)
            after[row.payer] = row
        if after != before:
            with self._ledger.transaction():
                self._ledger.restore_after_rollback(self)
                self._due_ms = 0
                self._store(after)

    def make_promises(self, now_ms: int) -> dict[str, PromisedGpus]:
        """Return request_id → the GPUs that are promised to it, for a pass.

        The next attempt of a gang that gets other nodes may use the GPUs that are held for the gang.
        """
        requests = {entry.request.request_id: entry.request for entry in self._ledger.list_queue_entries()}
        gangs = {record.action.job: record.action.queue for record in self._list_gang_actions()}
        found = {
            request_id: PromisedGpus(request, frozenset({make_gang_hold_name(request.job_name)}))
            for request_id, request in requests.items()
            if request.job_name in gangs and gangs[request.job_name] == self._find_leaf(request)
        }
        for row in self.list_followed(now_ms):
            if row.is_live:
                payer, stops = row.row.payer, _split_open_jobs(row.records)
                holds = frozenset({make_hold_name(payer)}).union(found[payer].holds if payer in found else ())
                found[payer] = PromisedGpus(requests[payer], holds, *stops, row.is_short and not row.is_exhausted)
        return found

    def release_own_gang(self, view: ClusterView, request: PlacementRequest) -> ClusterView:
        """Return the view in which the GPUs that are held for the request's own gang are free.

        A request of another queue that names the gang gets none of them.
        """
        own = next((row.action for row in self._list_gang_actions() if row.action.job == request.job_name), None)
        if own is None or own.queue != self._find_leaf(request):
            return view
        return remove_jobs(view, {make_gang_hold_name(own.job)})

    def _list_gang_actions(self) -> list[ActionRecord]:
        """Return the open actions that serve their own job, and whose GPUs are promised to it."""
        return [record for record in self._ledger.actions.list_open() if record.is_underway and not record.action.payer]

    def find_next_end_ms(self, now_ms: int) -> int:
        """Return the next time at which GPUs stop being promised, far ahead if none are."""
        return min((row.by_ms for row in self.read().values() if row.by_ms > now_ms), default=1 << 62)

    def add_holds(self, observed: ObservedFleet, now_ms: int) -> ObservedFleet:
        """Return the observed fleet in which promised GPUs that no job holds are held for their requests.

        GPUs that a job leaves are held under another name until its action is seen, even if its payer no longer waits:
        they may still work. GPUs for a gang are held until its action has ended. If an executor may have begun it, they
        count as held until the gang's own end, because the gang then runs there.
        """
        view, names, runs = observed.view, list[str](), list[JobRun]()
        for hold in self._list_holds(now_ms):
            free = tuple(_list_unheld(view, hold.ranks))
            if free:
                view = add_placements(view, [Hold(hold.name, free)])
                names.append(hold.name)
                runs.append(hold.estimate_run(observed.running, now_ms))
        if not names:
            return observed
        unknown = (math.nan,) * len(RUN_LEVELS)
        held = make_running_jobs(
            names,
            gpus=[run.gpus for run in runs],
            started_ms=[run.started_ms for run in runs],
            limit_s=[math.nan if run.limit_s is None else run.limit_s for run in runs],
            remaining_s=[run.left_s or unknown for run in runs],
        )
        return replace(observed, view=view, running=observed.running.append_rows(held))

    def _list_holds(self, now_ms: int) -> Iterator["_ActionHold"]:
        """Yield each hold. Where two name a GPU, the first counts.

        A set names the GPUs of jobs that did not stop for it, too. If another request pays for the stop of such a job,
        its GPUs are held for that request alone.
        """
        for action in [record.action for record in self._ledger.actions.list_open() if record.was_sent]:
            yield _ActionHold(make_freed_hold_name(action.job), action.ranks, action.by_ms)
        for record in self._list_gang_actions():
            action, job = record.action, record.action.job
            ranks, gang = [*action.places, *action.pinned], job if record.may_have_begun else ""
            yield _ActionHold(make_gang_hold_name(job), ranks, action.by_ms, gang)
        live = [found for found in self.list_followed(now_ms) if found.is_live]
        payer_of = {
            (rank.node, gpu): found.row.payer for found in live for rank in found.list_freed() for gpu in rank.gpus
        }
        for found in live:
            payer = found.row.payer
            ranks = [
                msgspec.structs.replace(
                    rank, gpus=tuple(gpu for gpu in rank.gpus if payer_of.get((rank.node, gpu), payer) == payer)
                )
                for rank in (*found.row.ranks, *found.list_freed())
            ]
            yield _ActionHold(make_hold_name(payer), ranks, found.row.by_ms)


class _ActionHold(NamedTuple):
    """GPUs that are held by an action until `by_ms`. gang: the job that will run there after that, "" if none may."""

    name: str
    ranks: Sequence[RankPlacement]
    by_ms: int
    gang: str = ""

    def estimate_run(self, running: RunningJobs, now_ms: int) -> JobRun:
        """Return the run of the hold as if it were a job, for estimates of its end."""
        if self.gang in running.row:
            return running.find_run(self.gang, now_ms)
        return JobRun(now_ms, 1, max(1.0, (self.by_ms - now_ms) / 1000), None)


def make_freed_hold_name(job: str) -> str:
    """Return the name under which a view holds the GPUs that a job leaves, until telemetry shows them idle."""
    return f"freed by {job}"


def _split_open_jobs(records: Sequence[ActionRecord]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the jobs with open actions: those that stop, and the others."""
    stops = {record.action.job: record.action.kind is ActionKind.PREEMPT for record in records if record.is_open}
    return frozenset(job for job in stops if stops[job]), frozenset(job for job in stops if not stops[job])


def _is_taken(action: JobAction, view: ClusterView) -> bool:
    """Return whether a job holds any GPU that an action freed. Shared GPUs do not count: others may stay on them."""
    whole = [rank for rank in action.ranks if rank.milli == WHOLE_GPU]
    return bool((view.holders[mask_ranks(view, whole)] >= 0).any())


def _list_unheld(view: ClusterView, ranks: Sequence[RankPlacement]) -> Iterator[RankPlacement]:
    """Yield the parts of these ranks whose GPUs no job holds, each GPU once."""
    known, g, done = view.inventory.row, view.milli.shape[1], set[tuple[int, int]]()
    for rank in ranks:
        row = known.get(rank.node, -1)
        for gpu in rank.gpus if row >= 0 else ():
            if gpu < g and view.holders[row, gpu] < 0 and (row, gpu) not in done:
                done.add((row, gpu))
                yield RankPlacement(len(done) - 1, rank.node, (gpu,), rank.milli)
