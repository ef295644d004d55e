"""The fold of workloads and their pods into job events: who belongs to whom, and who has to be judged anew."""

from collections.abc import Iterable, Iterator

import msgspec

from fleet.events import Failed, JobEvent
from ingest.kubernetes.attempts import Judgement, Track
from ingest.kubernetes.workloads import Member, Workload
from ingest.lifecycle import ENDED

GONE_KEPT = 20_000  # jobs that are gone, whose successors of the same name go on counting their attempts


class JobState(msgspec.Struct):
    """All that the fold remembers; a part of the source's position."""

    workloads: dict[str, Workload] = {}
    members: dict[str, Member] = {}  # by uid
    tracks: dict[str, Track] = {}
    gone: dict[str, int] = {}  # job → its last attempt


class WorkloadFold:
    """`lost_nodes`: whose pods, when they vanish, are lost with them."""

    def __init__(self, state: JobState, lost_nodes: Iterable[str] = ()) -> None:
        self.state = state
        self.lost_nodes = set(lost_nodes)
        self._members: dict[str, dict[str, Member]] = {}
        self._changed: set[str] = set(state.workloads)  # what was not told yet when it was kept
        self._removed: set[str] = set()
        for member in state.members.values():
            self._members.setdefault(member.job, {})[member.uid] = member

    @property
    def is_waiting(self) -> bool:
        """Whether events may fall due though nothing changes."""
        return bool(self._changed)

    def put_workload(self, made: Workload) -> None:
        job = made.submitted.job
        known = self.state.workloads.get(job)
        if known is not None and known.kind != made.kind and not known.alone and job not in self._removed:
            return  # two kinds, one name: the first keeps it
        if known is not None and job in self._removed:
            self._changed.add(job)  # another of its name came before the end of the first was told
        self.state.workloads[job] = made
        self._removed.discard(job)
        self._changed.add(job)

    def drop_workload(self, kind: str, job: str, uid: str) -> None:
        known = self.state.workloads.get(job)
        if known is not None and known.kind == kind and known.uid == uid:
            self._removed.add(job)
            self._changed.add(job)

    def put_member(self, member: Member, alone: Workload | None) -> None:
        """`alone`: the job as the pod alone describes it."""
        self.state.members[member.uid] = member
        self._members.setdefault(member.job, {})[member.uid] = member
        if alone is not None:
            known = self.state.workloads.get(member.job)
            if known is None or (known.alone and known.uid != alone.uid):
                self.state.workloads[member.job] = alone
        self._changed.add(member.job)

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
        self._changed.add(member.job)

    def events(self, now_ms: int) -> list[JobEvent]:
        """Events that are due by now."""
        jobs, self._changed = self._changed, set()
        return [event for job in sorted(jobs) for event in self._judge(job, now_ms)]

    def _judge(self, job: str, now_ms: int) -> Iterator[JobEvent]:
        workload = self.state.workloads.get(job)
        if workload is None:
            return
        track = self.state.tracks.get(job)
        if track is None or track.uid != workload.uid:
            if track is not None and track.is_submitted and not track.is_ended:
                yield _replaced(job, track.attempt, now_ms)
            base = self.state.gone.pop(job, 0) if track is None else track.attempt
            track = self.state.tracks[job] = Track(workload.uid, base + 1, base)
        members = self._members.get(job, {})
        judged = Judgement(workload, track, members, now_ms, removed=job in self._removed)
        judged.judge(self.lost_nodes)
        yield from judged.events
        if judged.is_over:
            self._forget(job, track)
        elif track.lost_ms is not None:
            self._changed.add(job)

    def _forget(self, job: str, track: Track) -> None:
        self._removed.discard(job)
        del self.state.workloads[job], self.state.tracks[job]
        self.state.gone[job] = track.attempt
        while len(self.state.gone) > GONE_KEPT:
            del self.state.gone[next(iter(self.state.gone))]


def _replaced(job: str, attempt: int, now_ms: int) -> Failed:
    why = "deleted, and made anew under the same name"
    return Failed(job=job, attempt=attempt, sequence=ENDED, time_ms=now_ms, category="cancelled", message=why)
