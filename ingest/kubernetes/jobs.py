"""A converter of workloads and their pods into job events.

It records which pods belong to which job, and which jobs must be evaluated again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from fleetcast.fleet.events import Failed, JobEvent
from fleetcast.ingest.kubernetes.attempts import JobEvaluation, Track
from fleetcast.ingest.kubernetes.workloads import Member, Workload
from fleetcast.ingest.lifecycle import ENDED

MAX_GONE = 20_000  # jobs that are gone, whose successors of the same name go on counting their attempts


class JobState(msgspec.Struct):
    """The known workloads and pods, and the progress of each job. It is a part of the source's position."""

    workloads: dict[str, Workload] = {}
    members: dict[str, Member] = {}  # by uid
    tracks: dict[str, Track] = {}
    gone: dict[str, int] = {}  # job → its last attempt
    bound: dict[str, dict[str, int]] = {}  # job → node → GPUs of its pods that run in no attempt


class WorkloadConverter:
    """A converter of workloads and pods into job events.

    `lost_nodes`: the nodes that are lost. If a pod vanishes from a lost node, the pod counts as lost too.
    """

    def __init__(self, state: JobState, lost_nodes: Iterable[str] = ()) -> None:
        self.state = state
        self.lost_nodes = set(lost_nodes)
        self._members: dict[str, dict[str, Member]] = {}
        self._kinds: dict[str, str] = {name: row.kind for name, row in state.workloads.items()}  # job → its kind
        self._changed: set[str] = set(state.workloads)  # what was not told yet when it was kept
        self._removed: set[str] = set()
        for member in state.members.values():
            self._members.setdefault(member.job, {})[member.uid] = member
            self._kinds.setdefault(member.job, member.kind)

    @property
    def has_pending_changes(self) -> bool:
        """Return whether more events may become due even if no object changes."""
        return bool(self._changed)

    def _choose_job_name(self, job: str, kind: str) -> str:
        """Return the name of an object's job.

        Two objects of different kinds may have the same name. The name of the second job then contains its kind for
        as long as that job lives.
        """
        own = f"{job} ({kind})"
        return job if own not in self._kinds and self._kinds.get(job, kind) == kind else own

    def put_workload(self, made: Workload) -> None:
        job = self._choose_job_name(made.submitted.job, made.kind)
        self._kinds[job] = made.kind
        made = _rename_workload(made, job)
        known = self.state.workloads.get(job)
        if known is not None and job in self._removed:
            self._changed.add(job)  # another of its name came before the end of the first was told
        self.state.workloads[job] = made
        self._removed.discard(job)
        self._changed.add(job)

    def drop_workload(self, kind: str, job: str, uid: str) -> None:
        """Record that a workload was deleted. `job`: its name in Kubernetes, or the name that this converter chose."""
        job = self._choose_job_name(job, kind)
        known = self.state.workloads.get(job)
        if known is not None and known.kind == kind and known.uid == uid:
            self._removed.add(job)
            self._changed.add(job)

    def put_member(self, member: Member, alone: Workload | None) -> None:
        """Add or update a pod.

        `alone`: the job as the pod alone describes it, or None if its owner is followed.
        """
        self._rename_kind(member)
        member = msgspec.structs.replace(member, job=self._choose_job_name(member.job, member.kind))
        self._kinds[member.job] = member.kind
        self.state.members[member.uid] = member
        self._members.setdefault(member.job, {})[member.uid] = member
        if alone is not None:
            known = self.state.workloads.get(member.job)
            if known is None or (known.alone and known.uid != alone.uid):
                self.state.workloads[member.job] = _rename_workload(alone, member.job)
        self._changed.add(member.job)

    def _rename_kind(self, member: Member) -> None:
        """Update the kind of a known pod's job if it has changed.

        An earlier version wrote the kind without its API group.
        """
        before = self.state.members.get(member.uid)
        if before is None or before.kind == member.kind or self._kinds.get(before.job) != before.kind:
            return
        self._kinds[before.job] = member.kind
        known = self.state.workloads.get(before.job)
        if known is not None and known.alone:
            self.state.workloads[before.job] = msgspec.structs.replace(known, kind=member.kind)

    def drop_member(self, uid: str) -> None:
        member = self.state.members.pop(uid, None)
        if member is None:
            return
        rows, track = self._members[member.job], self.state.tracks.get(member.job)
        if track is not None and uid in track.began and member.ending is not None and member.stage != "succeeded":
            track.failures[uid] = member.ending
        del rows[uid]
        if not rows:
            del self._members[member.job]
            if member.job not in self.state.workloads:
                self._kinds.pop(member.job, None)
        self._changed.add(member.job)

    def _record_bound_gpus(self, judged: JobEvaluation) -> None:
        """Record the GPUs of a job's pods that belong to no running attempt."""
        job, found = judged.workload.submitted.job, Counter[str]()
        for row in () if judged.is_over else judged.find_bound_members():
            found[row.node] += judged.workload.submitted.gpus_per_node
        self.state.bound.pop(job, None)
        if found.total():
            self.state.bound[job] = dict(found)

    def make_due_events(self, now_ms: int) -> list[JobEvent]:
        """Return the events that are due by now."""
        jobs, self._changed = self._changed, set()
        return [event for job in sorted(jobs) for event in self._evaluate_job(job, now_ms)]

    def _evaluate_job(self, job: str, now_ms: int) -> Iterator[JobEvent]:
        workload = self.state.workloads.get(job)
        if workload is None:
            return
        track = self.state.tracks.get(job)
        if track is None or track.uid != workload.uid:
            if track is not None and track.is_submitted and not track.is_ended:
                yield _make_replacement_failure(job, track.attempt, now_ms)
            base = self.state.gone.pop(job, 0) if track is None else track.attempt
            track = self.state.tracks[job] = Track(workload.uid, base + 1, base)
        members = self._members.get(job, {})
        judged = JobEvaluation(workload, track, members, now_ms, removed=job in self._removed)
        judged.evaluate_job(self.lost_nodes)
        self._record_bound_gpus(judged)
        yield from judged.events
        if judged.is_over:
            self._forget_job(job, track)
        elif track.lost_ms is not None:
            self._changed.add(job)

    def _forget_job(self, job: str, track: Track) -> None:
        self._removed.discard(job)
        del self.state.workloads[job], self.state.tracks[job]
        self.state.bound.pop(job, None)
        if job not in self._members:
            self._kinds.pop(job, None)
        self.state.gone[job] = track.attempt
        while len(self.state.gone) > MAX_GONE:
            del self.state.gone[next(iter(self.state.gone))]


def _rename_workload(made: Workload, job: str) -> Workload:
    if made.submitted.job == job:
        return made
    return msgspec.structs.replace(made, submitted=msgspec.structs.replace(made.submitted, job=job))


def _make_replacement_failure(job: str, attempt: int, now_ms: int) -> Failed:
    why = "deleted, and created again under the same name"
    return Failed(job=job, attempt=attempt, sequence=ENDED, time_ms=now_ms, category="cancelled", message=why)
