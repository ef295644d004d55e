"""A converter of the current workload and pods of one job into the new events of its attempts.

Only the current state counts, so a list and a watch, in any order, give the same events. For a
gang:

    submitted ─ queued ─ started (all members run) ─┬─ finished, failed, preempted (as the workload says)
                            └─ failed, preempted (a member is lost) ─ attempt + 1, submitted, …

A lost member resizes an elastic job. A member that vanishes or leaves for no known reason counts as
lost only after `QUIET_MS`. Before that, another watch usually reports that the workload ended or was
suspended, which explains the loss.
"""

from collections.abc import Mapping

import msgspec

from fleetcast.fleet.events import Failed, Finished, JobEvent, Preempted, Queued, Resized, Started
from fleetcast.fleet.requests import RankPlacement
from fleetcast.ingest.kubernetes.failures import FINISHED, Ending
from fleetcast.ingest.kubernetes.waits import ADMISSION, PodWait
from fleetcast.ingest.kubernetes.workloads import Member, Workload
from fleetcast.ingest.lifecycle import (
    ENDED,
    QUEUED,
    RESIZED,
    STARTED,
    SUBMITTED,
    compute_queued_sequence,
    compute_submitted_sequence,
)

QUIET_MS = 2_000
LIVE = frozenset({"pending", "running", "broken"})
HOLDING = frozenset({"running", "broken"})

Slot = tuple[int, ...]


class MemberPlace(msgspec.Struct, frozen=True, array_like=True):
    """A pod that an attempt started with, and its node."""

    uid: str
    restarts: int
    name: str
    node: str


class Track(msgspec.Struct, omit_defaults=True):
    """The facts already delivered about a job's current attempt. The first attempt is number `base` + 1.

    began: uid → place, for each member with which the attempt began. slots: pod → slot, if no label
    states it. failures: uid → the failure of a pod that no longer exists. lost_ms: when a member was
    first missing for no known reason, or None.
    """

    uid: str
    attempt: int
    base: int
    is_submitted: bool = False
    submitted_ms: int | None = None  # its time
    preemptible: bool | None = None  # the owner's word, as delivered last
    is_queued: bool = False
    blocked_by: str = ""  # the delivered reason, while it is blocked
    queued: int = 0  # sequence of the last `queued` event
    is_started: bool = False
    is_ended: bool = False
    resizes: int = 0
    began: dict[str, MemberPlace] = {}
    slots: dict[str, int] = {}
    failures: dict[str, Ending] = {}
    lost_ms: int | None = None

    def start_next_attempt(self, attempt: int) -> None:
        """Reset the track to the beginning of attempt number `attempt`."""
        self.attempt = attempt
        self.is_submitted = self.is_queued = self.is_started = self.is_ended = False
        self.resizes, self.lost_ms, self.blocked_by, self.queued = 0, None, "", 0
        self.began, self.failures = {}, {}


class JobEvaluation:
    """An evaluation of one job at one time.

    `events`: the new events. `is_over`: whether no more events will follow for this job.
    """

    def __init__(
        self,
        workload: Workload,
        track: Track,
        members: Mapping[str, Member],
        now_ms: int,
        *,
        removed: bool,
    ) -> None:
        self.workload, self.track = workload, track
        self.members = members if workload.alone else _drop_other_owners(members, workload.uid)
        self.now_ms = now_ms
        self.events: list[JobEvent] = []
        self.current = self._list_elastic_members() if workload.elastic else self._find_newest_members()
        self.is_over = removed or (workload.alone and not members)
        self._removed = removed

    def evaluate_job(self, lost_nodes: set[str]) -> None:
        track, workload = self.track, self.workload
        over = self._find_ending()
        if track.is_started and not track.is_ended and over is None and not workload.elastic:
            self._end_if_member_lost(lost_nodes)
        if over is None:
            self._update_attempt_number()
        self._add_submission()
        if workload.suspended and track.is_started and not track.is_ended and over is None:
            self._end_attempt(Ending(self.now_ms, message="suspended", by="suspension"))
            track.start_next_attempt(track.attempt + 1)
            self._add_submission()
        if not track.is_ended:
            if not track.is_started:
                self._start_or_queue_attempt()
            elif over is None:
                self._resize_job()
        if over is not None:
            self._end_attempt(over)

    def find_bound_members(self) -> list[Member]:
        """Return the members that hold GPUs but do not belong to a running attempt."""
        began = self.track.began if self.track.is_started and not self.track.is_ended else {}
        return [row for row in self.members.values() if row.node and row.stage in LIVE and row.uid not in began]

    def _list_elastic_members(self) -> dict[Slot, Member]:
        """Return slot → member, for the members of an elastic job that hold GPUs, numbered in order."""
        rows = sorted(self.members.values(), key=lambda row: (row.slot, row.created_ms, row.name))
        return {(number,): row for number, row in enumerate(row for row in rows if row.stage in HOLDING)}

    def _find_newest_members(self) -> dict[Slot, Member]:
        """Return slot → the newest pod in the slot, for a gang."""
        newest: dict[Slot, Member] = {}
        rows = sorted(self.members.values(), key=lambda row: (row.created_ms, row.stage in LIVE, row.name))
        self.track.slots = {uid: slot for uid, slot in self.track.slots.items() if uid in self.members}
        for row in rows:
            newest[row.slot or self._assign_slot(row, newest)] = row
        return newest

    def _assign_slot(self, member: Member, newest: Mapping[Slot, Member]) -> Slot:
        """Return a slot for a pod without an index: the slot of a failed pod, else the next free one."""
        if self.workload.members == 1:
            return (0,)
        slots = self.track.slots
        if member.uid not in slots:
            taken = {slots[row.uid] for row in newest.values() if row.stage != "failed" and row.uid in slots}
            slots[member.uid] = next(number for number in range(len(taken) + 1) if number not in taken)
        return (slots[member.uid],)

    def _find_ending(self) -> Ending | None:
        """Return the job's final end, or None while it continues.

        A successful end has the category "finished".
        """
        workload = self.workload
        if workload.finished_ms is not None:
            return Ending(workload.finished_ms, FINISHED)
        if workload.failed is not None:
            return self._join_failures(workload.failed)
        if workload.deleted_ms is not None or (self._removed and not workload.alone):
            return Ending(workload.deleted_ms or self.now_ms, "cancelled", "deleted")
        return self._find_ending_by_pods() if workload.alone else None

    def _find_ending_by_pods(self) -> Ending | None:
        """Return the end of a job that is known only by its pods, or None while one of them is alive."""
        rows = list(self.members.values())
        if any(row.stage in LIVE for row in rows):
            self.track.lost_ms = None
            return None
        failed = next((row.ending for row in rows if row.stage == "failed"), None)
        good = next((row.ending for row in rows if row.stage == "succeeded"), None)
        if not self.workload.elastic:
            gone = next(iter(self.track.failures.values()), Ending(self.now_ms, "cancelled", "deleted"))
            return failed or (Ending(good.time_ms, FINISHED) if good else gone)
        if rows and not self._is_loss_confirmed():
            return None
        return failed if failed and not good else Ending(self.now_ms, FINISHED)

    def _join_failures(self, stated: Ending) -> Ending:
        """Combine the workload's failure with the more detailed failure of its first failed pod."""
        if stated.category != "unknown":
            return stated
        endings = [row.ending for row in self.members.values() if row.stage == "failed" and row.ending]
        endings += list(self.track.failures.values())
        first = min(endings, key=lambda row: row.time_ms, default=None)
        if first is None:
            return stated
        return Ending(stated.time_ms, first.category, "; ".join(filter(None, (first.message, stated.message))))

    def _is_loss_confirmed(self) -> bool:
        """Return whether a member has been missing for `QUIET_MS`. The first call sets the start of this time."""
        if self.track.lost_ms is None:
            self.track.lost_ms = self.now_ms
        return self.now_ms - self.track.lost_ms >= QUIET_MS

    def _end_if_member_lost(self, lost_nodes: set[str]) -> None:
        """End the attempt if it has lost a member.

        A loss without a known reason counts only after `QUIET_MS`.
        """
        missing = None
        for key, place in self.track.began.items():
            lost = self._find_member_failure(place, lost_nodes)
            if lost is None:
                continue
            if lost.category != "unknown" or lost.by or self._has_pod_stayed(place):
                self._end_attempt(lost, place.node)
                return
            missing = missing or (key, place, lost)
        if missing is None:
            self.track.lost_ms = None
        elif self._is_loss_confirmed():
            self._end_attempt(missing[2], missing[1].node)

    def _has_pod_stayed(self, place: MemberPlace) -> bool:
        """Return whether the pod still exists and is not being deleted."""
        member = self.members.get(place.uid)
        return member is not None and member.left_ms is None

    def _find_member_failure(self, place: MemberPlace, lost_nodes: set[str]) -> Ending | None:
        member = self.members.get(place.uid)
        if member is None:
            stated = self.track.failures.get(place.uid) or Ending(self.now_ms, message=f"pod {place.name} is gone")
        elif member.stage in ("failed", "broken") or member.restarts > place.restarts:
            stated = member.ending or Ending(self.now_ms, message=f"pod {place.name} failed")
        elif member.ending is not None and member.ending.by:
            stated = member.ending
        else:
            return None
        if place.node in lost_nodes and stated.category == "unknown" and not stated.by:
            return Ending(stated.time_ms, "node_lost", f"{place.node} is lost; {stated.message}")
        return stated

    def _update_attempt_number(self) -> None:
        """Begin the next attempt if restart counters or successor pods show that there is one.

        The attempt number is never below the job's own restart counters.
        """
        track = self.track
        if not self.workload.elastic:
            counted = max((max(row.attempt - 1, row.restarts) for row in self.current.values()), default=0)
            floor = track.base + 1 + max(self.workload.restarts, counted)
            if floor > track.attempt:
                if track.is_submitted:
                    self._end_attempt(next(iter(track.failures.values()), Ending(self.now_ms, message="restarted")))
                track.start_next_attempt(floor)
        if track.is_ended and self._has_new_pod():
            track.start_next_attempt(track.attempt + 1)

    def _has_new_pod(self) -> bool:
        """Return whether the job has a new or restarted pod after its attempt ended."""
        rows = self.current.values() if not self.workload.elastic else self.members.values()
        known = {place.uid: place.restarts for place in self.track.began.values()}
        return any(
            row.stage in ("pending", "running") and row.left_ms is None and row.restarts > known.get(row.uid, -1)
            for row in rows
        )

    def _add_submission(self) -> None:
        """Add the attempt's submission, or a correction of it when the owner's word on preemption has changed."""
        track, submitted = self.track, self.workload.submitted
        is_correction = track.is_submitted
        if track.is_ended or (is_correction and track.preemptible == submitted.preemptible):
            return
        again = track.attempt > track.base + 1
        gang = submitted.gang
        if self.workload.alone and self.workload.elastic:
            gang = max(1, sum(row.stage in LIVE for row in self.members.values()))
        at_ms = self.now_ms if again else min(submitted.time_ms, self.now_ms)
        if is_correction and track.submitted_ms is not None:
            at_ms = track.submitted_ms
        number = compute_submitted_sequence(submitted.time_ms, self.now_ms) if is_correction else SUBMITTED
        self.events.append(
            msgspec.structs.replace(submitted, attempt=track.attempt, sequence=number, time_ms=at_ms, gang=gang)
        )
        track.is_submitted, track.submitted_ms, track.preemptible = True, at_ms, submitted.preemptible

    def _start_or_queue_attempt(self) -> None:
        """Start the attempt if enough members run. Otherwise queue it if the reason for its wait is known."""
        track = self.track
        ready = {
            slot: row
            for slot, row in self.current.items()
            if row.stage in ("running", "succeeded")
            and row.node
            and row.left_ms is None
            and not (0 < row.attempt < self._find_newest_restart())
        }
        if len(ready) >= self.workload.least and not self.workload.suspended:
            at_ms = max((row.running_ms or self.now_ms for row in ready.values()), default=self.now_ms)
            at_ms = min(at_ms, self.now_ms)
            ranks = self._record_members(ready)
            track.is_started = True
            job = self.workload.submitted.job
            self.events.append(Started(job=job, attempt=track.attempt, sequence=STARTED, time_ms=at_ms, ranks=ranks))
            return
        self._queue_attempt()

    def _queue_attempt(self) -> None:
        """Add a `queued` event once the reason for the job's wait is known.

        Adds another one when the job becomes blocked, is blocked for another reason, or is released.
        """
        track, wait = self.track, self._find_wait_reason()
        blocked_by = wait.reason if wait.is_blocked else ""
        if blocked_by == track.blocked_by and (track.is_queued or not wait.reason):
            return
        submitted = self.workload.submitted
        number = (
            max(compute_queued_sequence(submitted.time_ms, self.now_ms), track.queued + 1)
            if track.is_queued
            else QUEUED
        )
        track.is_queued, track.blocked_by, track.queued = True, blocked_by, number
        self.events.append(
            Queued(
                job=submitted.job,
                attempt=track.attempt,
                sequence=number,
                time_ms=self.now_ms,
                reason=wait.reason or "released",
                blocked=wait.is_blocked,
            )
        )

    def _find_newest_restart(self) -> int:
        """Return the number of the newest restart, counted from 1.

        Pods of earlier restarts are about to be replaced.
        """
        return max([self.workload.restarts + 1, *(row.attempt for row in self.current.values())])

    def _find_wait_reason(self) -> PodWait:
        """Return why the job waits. A gang is blocked while one of its members is blocked."""
        if self.workload.suspended:
            if self.workload.awaits_admission:
                return PodWait(f"suspended: {ADMISSION}")
            return PodWait("suspended", is_blocked=True)
        rows = [PodWait(row.waiting, row.is_blocked) for row in self.members.values() if row.stage == "pending"]
        return max((row for row in rows if row.reason), key=lambda row: row.is_blocked, default=PodWait())

    def _record_members(self, ready: Mapping[Slot, Member]) -> tuple[RankPlacement, ...]:
        """Record the members that run, and return their placement. Ranks follow the order of their slots."""
        rows = [ready[slot] for slot in sorted(ready)]
        self.track.began = {row.uid: MemberPlace(row.uid, row.restarts, row.name, row.node) for row in rows}
        return tuple(RankPlacement(rank, row.node) for rank, row in enumerate(rows))

    def _resize_job(self) -> None:
        """Add a `resized` event when an elastic job's members change, or when a gang gets all wanted members."""
        track = self.track
        rows = {slot: row for slot, row in self.current.items() if row.stage in HOLDING and row.node}
        whole = bool(rows) if self.workload.elastic else len(rows) == self.workload.members
        if not whole or {row.uid for row in rows.values()} == track.began.keys():
            return
        if not self.workload.elastic and len(rows) == len(track.began):
            return  # a successor, of whose predecessor's end nothing is known yet
        self.events.append(
            Resized(
                job=self.workload.submitted.job,
                attempt=track.attempt,
                sequence=RESIZED + track.resizes,
                time_ms=self.now_ms,
                ranks=self._record_members(rows),
            )
        )
        track.resizes += 1

    def _end_attempt(self, ending: Ending, node: str = "") -> None:
        track = self.track
        if track.is_ended:
            return
        job, at_ms = self.workload.submitted.job, min(ending.time_ms, self.now_ms)
        if ending.category == FINISHED:
            self.events.append(Finished(job=job, attempt=track.attempt, sequence=ENDED, time_ms=at_ms))
        elif ending.by:
            by, reason = ending.by, ending.message
            self.events.append(
                Preempted(job=job, attempt=track.attempt, sequence=ENDED, time_ms=at_ms, by=by, reason=reason)
            )
        else:
            failed = Failed(
                job=job,
                attempt=track.attempt,
                sequence=ENDED,
                time_ms=at_ms,
                category=ending.category,
                node=node,
                message=ending.message,
            )
            self.events.append(failed)
        track.is_ended, track.lost_ms = True, None


def _drop_other_owners(members: Mapping[str, Member], uid: str) -> Mapping[str, Member]:
    """Return the members without pods of another object that has the same name. uid: the workload's uid."""
    if all(row.owner in ("", uid) for row in members.values()):
        return members
    return {key: row for key, row in members.items() if row.owner in ("", uid)}
