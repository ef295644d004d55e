"""A tracker of jobs that only exporters' labels report. It converts holders of GPUs to job events.

    pages, remote write ── LabelledGpus: each GPU's holder by its labels, despite lost pages ── LabelHold
    holds of all pipelines ── LabelJobs, each tick ── events with sequences below 0, so that every real event wins

A label has ended if it is missing from two pages and for a minute. If another label has taken its
place, the new holder began when its label was first seen. On a shared GPU, labels take turns: one
of them returns, or a third appears within the minute. Then all of them hold the GPU until they have
been missing for TURNS_MS, and their run times are not learnt.

A job ends when it was last seen on a GPU. Labels do not say how it ended, so it counts as finished.
If a job was present on its exporter's first page, its start is unknown and its run time is not
learnt.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Finished, JobEvent, Preempted, Resized, Started, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.stateful import Dump, Stateful
from fleetcast.fleet.tellers import UNSEEN_START
from fleetcast.ingest.gpu_labels import JobLabel, ObservedJobLabels
from fleetcast.ingest.lifecycle import ENDED, LABELS, RESIZED, STARTED, SUBMITTED

GONE_MS = 60_000
GONE_PAGES = 2
TURNS_MS = 600_000
SILENT_MS = 1_800_000  # an exporter that is away so long holds nothing any more


class LabelHold(msgspec.Struct, array_like=True):
    """A job that the labels of a GPU name, and the GPU (NODE/INDEX).

    seen_ms: the time of the last page with the label. missed: the number of pages since then. unseen_start:
    the label was on the exporter's first page, so its start is unknown. shared: labels of several jobs take
    turns on the GPU.
    """

    gpu: str
    label: JobLabel
    began_ms: int
    seen_ms: int
    missed: int = 0
    unseen_start: bool = False
    shared: bool = False


class LabelledGpus(Stateful):
    """The jobs that hold one pipeline's GPUs, according to the GPUs' labels."""

    def __init__(self, entities: Entities) -> None:
        self._entities = entities
        self._holds: dict[int, dict[JobLabel, LabelHold]] = {}  # by row of the GPU
        self._next: dict[int, LabelHold] = {}  # the label that seems to follow on a GPU
        self._restored: list[LabelHold] = []
        self._seen: set[int] = set()
        self._newest_ms: dict[int, int] = {}  # of GPUs with labels
        self._shared: set[int] = set()
        self._divided: set[int] = set()
        self._began_ms: int | None = None

    def apply_labels(self, sight: ObservedJobLabels) -> None:
        """Apply the labels of one page or request.

        A page older than a GPU's last one does not change that GPU.
        """
        if self._restored:
            self._place_restored_holds()
        if sight.divided:
            self._divided.update(sight.divided)
        if sight.jobs or self._holds:
            for gpu in sight.gpus:
                labels = sight.jobs.get(gpu, ())
                if labels or gpu in self._holds:
                    self._update_gpu(gpu, labels, sight.time_ms)
        self._seen.update(sight.gpus)

    def _update_gpu(self, gpu: int, labels: Sequence[JobLabel], time_ms: int) -> None:
        if time_ms <= self._newest_ms.get(gpu, -1):
            return
        self._newest_ms[gpu] = time_ms
        holds = self._holds.setdefault(gpu, {})
        if holds and gpu not in self._shared and len(labels) == 1 and labels[0] not in holds:
            self._record_follower(gpu, holds, labels[0], time_ms)
        else:
            if len(labels) > 1 or (labels and gpu in self._next):
                self._share_gpu(gpu, holds)
            for label in sorted(labels, key=_make_sort_key):
                hold = holds.get(label) or holds.setdefault(label, self._make_hold(gpu, label, time_ms))
                hold.seen_ms, hold.missed = time_ms, 0
        for label, hold in list(holds.items()):
            if label not in labels:
                hold.missed += 1
                gone_ms = TURNS_MS if gpu in self._shared else GONE_MS
                if hold.missed >= GONE_PAGES and time_ms - hold.seen_ms >= gone_ms:
                    del holds[label]
        if not holds and gpu in self._next:
            follower = self._next.pop(gpu)
            holds[follower.label] = follower
        if len(holds) <= 1:
            self._shared.discard(gpu)
        if not holds:
            del self._holds[gpu]

    def _make_hold(self, gpu: int, label: JobLabel, time_ms: int) -> LabelHold:
        name, shared = self._entities[EntityKind.GPU].names[gpu], gpu in self._shared
        return LabelHold(name, label, time_ms, time_ms, 0, gpu not in self._seen, shared)

    def _record_follower(self, gpu: int, holds: dict[JobLabel, LabelHold], label: JobLabel, time_ms: int) -> None:
        """Record a label that replaces the label of the GPU's holder.

        If it is the third label within a minute, all three share the GPU.
        """
        follower = self._next.get(gpu)
        if follower is None:
            self._next[gpu] = self._make_hold(gpu, label, time_ms)
        elif follower.label == label:
            follower.seen_ms = time_ms
        else:
            self._share_gpu(gpu, holds)
            holds[label] = self._make_hold(gpu, label, time_ms)

    def _share_gpu(self, gpu: int, holds: dict[JobLabel, LabelHold]) -> None:
        """Mark a GPU as shared by all labels that took turns on it."""
        self._shared.add(gpu)
        if (follower := self._next.pop(gpu, None)) is not None:
            holds.setdefault(follower.label, follower)
        for hold in holds.values():
            hold.shared = True

    def list_current_holds(self, now_ms: int) -> list[LabelHold]:
        """Return all current holds. Drops the holds of exporters that have been silent for SILENT_MS."""
        if self._restored:
            self._place_restored_holds()
        if self._began_ms is None:
            self._began_ms = now_ms
        silent_ms = now_ms - SILENT_MS
        if self._began_ms <= silent_ms:  # silence counts only while somebody listens
            for gpu in [gpu for gpu, holds in self._holds.items() if _find_newest_ms(holds) <= silent_ms]:
                del self._holds[gpu]
                self._next.pop(gpu, None)
                self._shared.discard(gpu)
        return self._flatten_holds()

    def count_gpus(self) -> dict[str, int]:
        """Return how many GPUs are labelled, how many of these are shared, and how many GPUs are divided."""
        return {"labelled": len(self._holds), "shared": len(self._shared), "divided": len(self._divided)}

    def _flatten_holds(self) -> list[LabelHold]:
        return [hold for holds in self._holds.values() for hold in holds.values()]

    def _place_restored_holds(self) -> None:
        """Find the GPU rows of holds that were restored from a snapshot. Holds of unknown GPUs are dropped."""
        rows = {name: row for row, name in enumerate(self._entities[EntityKind.GPU].names)}
        for hold in self._restored:
            if hold.gpu in rows:
                gpu = rows[hold.gpu]
                self._holds.setdefault(gpu, {})[hold.label] = hold
                self._newest_ms[gpu] = max(hold.seen_ms, self._newest_ms.get(gpu, 0))
                if hold.shared:
                    self._shared.add(gpu)
        self._restored = []

    def dump(self) -> Dump:
        return msgspec.to_builtins([*self._restored, *self._flatten_holds()]), {}

    def load(self, about: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._restored = msgspec.convert(about, list[LabelHold])

    def shift_times(self, by_ms: int) -> None:
        for hold in (*self._restored, *self._flatten_holds(), *self._next.values()):
            hold.began_ms += by_ms
            hold.seen_ms += by_ms
        self._newest_ms = {gpu: time_ms + by_ms for gpu, time_ms in self._newest_ms.items()}


def _find_newest_ms(holds: Mapping[JobLabel, LabelHold]) -> int:
    return max(hold.seen_ms for hold in holds.values())


def _make_sort_key(label: JobLabel) -> tuple[str, str]:
    return label.job, label.pod


class LabelledJob(msgspec.Struct, array_like=True):
    """A job that only labels report: its current attempt, its GPUs, and when it was last seen."""

    attempt: int
    ranks: tuple[RankPlacement, ...]
    seen_ms: int
    resizes: int = 0


class LabelJobs(Stateful):
    """The jobs that the labels of all pipelines name, without the jobs that real events report."""

    def __init__(self) -> None:
        self._tracks: dict[str, LabelledJob] = {}
        self._explained: set[str] = set()  # jobs whose holds real events explain, as long as these last

    def make_events(self, holds: Iterable[LabelHold], jobs: JobTable, now_ms: int) -> list[JobEvent]:
        """Return the events of all changes since the last call. A repeated label is not a change."""
        found: dict[str, list[LabelHold]] = defaultdict(list)
        for hold in holds:
            found[hold.label.job].append(hold)
        if not found and not self._tracks:
            return []
        self._explained &= found.keys()
        real = _find_reported_jobs(jobs) if found else {}
        events: list[JobEvent] = []
        for job, members in sorted(found.items()):
            if job in self._explained or _is_covered_by_events(job, members, jobs, real):
                self._explained.add(job)
                events += self._end_own_attempt(job, jobs, now_ms)
            else:
                events += self._update_attempt(job, members, jobs, now_ms)
        for job in [job for job in self._tracks if job not in found]:
            track = self._tracks.pop(job)
            if not _is_reported(jobs.get(job, track.attempt)):
                events.append(Finished(**_make_event_identity(job, track.attempt, ENDED, track.seen_ms)))
        return events

    def _end_own_attempt(self, job: str, jobs: JobTable, now_ms: int) -> Iterator[JobEvent]:
        """End our own attempt of a job that real events now report, unless they report the same attempt."""
        track = self._tracks.pop(job, None)
        if track is not None and not _is_reported(jobs.get(job, track.attempt)):
            yield Preempted(
                **_make_event_identity(job, track.attempt, ENDED, now_ms), by="events", reason="named by job events"
            )

    def _update_attempt(
        self, job: str, members: Sequence[LabelHold], jobs: JobTable, now_ms: int
    ) -> Iterator[JobEvent]:
        ranks, seen_ms = _make_ranks(members), max(hold.seen_ms for hold in members)
        track = self._tracks.get(job)
        if track is None:
            known = jobs.get(job)
            goes_on = known is not None and known.over_ms is None
            number = 1 if known is None else known.attempt if goes_on else known.attempt + 1
            self._tracks[job] = LabelledJob(number, ranks, seen_ms)
            yield from _make_start_events(job, number, members, ranks)
            return
        track.seen_ms = seen_ms
        if ranks != track.ranks:
            track.ranks, track.resizes = ranks, track.resizes + 1
            yield Resized(**_make_event_identity(job, track.attempt, RESIZED + track.resizes, now_ms), ranks=ranks)

    def dump(self) -> Dump:
        return {"tracks": msgspec.to_builtins(self._tracks), "explained": sorted(self._explained)}, {}

    def load(self, about: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._tracks = msgspec.convert(about["tracks"], dict[str, LabelledJob])
        self._explained = set(about["explained"])


def _make_start_events(
    job: str, number: int, members: Sequence[LabelHold], ranks: tuple[RankPlacement, ...]
) -> Iterator[Submitted | Started]:
    first = min(members, key=lambda hold: (hold.began_ms, hold.gpu))
    label, began_ms = first.label, first.began_ms
    unseen = all(hold.unseen_start for hold in members) or any(hold.shared for hold in members)
    yield Submitted(
        **_make_event_identity(job, number, SUBMITTED, began_ms),
        queue=label.queue,
        user=label.user,
        name=job.rpartition("/")[2] if label.pod else "",
        class_=label.class_,
        gang=len(ranks),
        gpus_per_node=max(len(rank.gpus) for rank in ranks),
        labels=UNSEEN_START if unseen else {},
    )
    yield Started(**_make_event_identity(job, number, STARTED, began_ms), ranks=ranks)


def _make_event_identity(job: str, attempt: int, sequence: int, time_ms: int) -> dict[str, Any]:
    """Return the fields that identify an event made from labels.

    The same fact always has the same identity, and every real event has a later sequence.
    """
    return {"job": job, "attempt": attempt, "sequence": LABELS + sequence, "time_ms": time_ms}


def _make_ranks(members: Iterable[LabelHold]) -> tuple[RankPlacement, ...]:
    """Return one rank for each node, in the order of node names."""
    gpus: dict[str, list[int]] = defaultdict(list)
    for hold in members:
        node, _, index = hold.gpu.rpartition("/")
        gpus[node].append(int(index))
    return tuple(
        RankPlacement(rank, node, tuple(sorted(held))) for rank, (node, held) in enumerate(sorted(gpus.items()))
    )


def _is_reported(attempt: JobAttempt | None) -> bool:
    return attempt is not None and attempt.source == "events"


def _find_reported_jobs(jobs: JobTable) -> dict[str, list[str]]:
    """Return node → the jobs that run on it according to real events."""
    found: dict[str, list[str]] = defaultdict(list)
    for attempt in jobs.list_running():
        for node in attempt.hosts if attempt.source == "events" else ():
            found[node].append(attempt.job)
    return found


def _is_covered_by_events(
    job: str, members: Sequence[LabelHold], jobs: JobTable, real: Mapping[str, Sequence[str]]
) -> bool:
    """Return whether real events report the job, or report a job of which it is a part.

    It is a part if its pods' names begin with the name of a job on its nodes. For example, a JobSet's
    `set-workers` is a part of `set`.
    """
    if _is_reported(jobs.get(job)):
        return True
    pods = f"{job.rpartition('/')[0]}/{members[0].label.pod}" if members[0].label.pod else job
    return any(pods.startswith(f"{other}-") for hold in members for other in real.get(hold.gpu.rpartition("/")[0], ()))
