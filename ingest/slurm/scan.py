"""The evaluation of one Slurm answer: its new events, and its live and ended jobs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import JobEvent
from fleetcast.ingest.preemptible import list_unread_words
from fleetcast.ingest.slurm.issued import IssuedJob, make_checksums, resequence_corrections
from fleetcast.ingest.slurm.jobs import Site, SlurmJob, encode_checked_event, make_job_events
from fleetcast.ingest.tally import RecordTally, SkipRule

Identity = tuple[str, int, int]
NOTHING: Mapping[str, IssuedJob] = MappingProxyType({})


class JobScan:
    """An evaluation that turns the records of one Slurm answer into events and counts."""

    def __init__(self, site: Site, now_ms: int, last: Mapping[str, IssuedJob] = NOTHING) -> None:
        """Create an empty scan. `last`: job → checksums of the facts issued before."""
        self.site = site
        self.now_ms = now_ms
        self._last = last
        self.prints: dict[str, IssuedJob] = {}  # of the jobs in this answer that are not over
        self.fresh: list[JobEvent] = []
        self.issued: set[Identity] = set()
        self.live: dict[str, int] = {}
        self.attempts: dict[str, int] = {}  # of every job in it, the latest
        self.submitted: dict[str, int] = {}
        self.ended: set[tuple[str, int]] = set()
        self.bad: list[RecordError] = []
        self.unread: list[RecordError] = []  # words in good records
        self.without_gpus = 0
        self.unknown_states: set[str] = set()
        self.read = self.repeated = 0  # records that made events, and those that another record decides

    def add_jobs(self, jobs: Sequence[SlurmJob], issued: set[Identity], *, is_queue: bool = True) -> None:
        """Add the new events of `jobs`, without those whose identities are in `issued`.

        `is_queue`: the records come from slurmctld. Only these records correct all facts that were issued
        before, because the accounts write many facts differently. A record of the accounts only corrects
        the queue of a job that waited in several queues.
        """
        for job in jobs:
            if not job.tasks:
                self.repeated += 1
                continue
            if not (self.site.cpu_jobs or job.has_gpus):
                self.without_gpus += 1
                continue
            try:
                if not (is_queue or job.has_known_state):
                    state = "+".join(job.states)[:80]
                    raise RecordError("unknown_state", f"job {job.id} is {state!r}: expected a state of sacct")
                stated = make_job_events(job, self.site)
                events = {identify_event(event): event for event in self._correct_events(job, stated, is_queue)}
                fresh = [event for key, event in events.items() if key not in issued and key not in self.issued]
                for event in fresh:
                    encode_checked_event(event, self.now_ms)
            except RecordError as error:
                self.bad.append(error.with_traceback(None))
                continue
            self.read += 1
            self._record_job(job)
            if not job.has_known_state:
                self.unknown_states.add("+".join(job.states)[:80])
            self.fresh += fresh
            self.unread += list_unread_words(fresh)
            self.issued.update(events, map(identify_event, stated))

    def _correct_events(self, job: SlurmJob, events: Sequence[JobEvent], is_queue: bool) -> Iterable[JobEvent]:
        """Return a record's events. An event whose facts changed since the last answer gets a later sequence."""
        name = self.site.prefix + job.id
        before, now = self._last.get(name), make_checksums(events)
        if is_queue and now is not None and not job.end_state:
            self.prints[name] = now
        names_queue = before is not None and before.has_several and now is not None and not now.has_several
        return resequence_corrections(events, before, now, self.now_ms) if is_queue or names_queue else events

    def make_tally(self, nodes: int, refused: int) -> RecordTally:
        """Return the tally of all records of a poll. `nodes`: the number of node records that were read."""
        ignored = {SkipRule.NOT_USED: self.without_gpus, SkipRule.REPEATED: self.repeated}
        return RecordTally(self.read + nodes, refused, {rule: count for rule, count in ignored.items() if count})

    def add_counts(self, other: "JobScan") -> None:
        """Add the counts of another answer of the same poll."""
        self.read += other.read
        self.without_gpus += other.without_gpus
        self.repeated += other.repeated

    def keep_unclear_attempts(self, unclear: set[str], live: Mapping[str, int]) -> None:
        """Leave live jobs in their attempts if the answer does not show their state clearly.

        unclear: names of these jobs. live: job → attempt before the answer.
        """
        for name in unclear & live.keys():
            self.live[name] = self.attempts[name] = live[name]

    def _record_job(self, job: SlurmJob) -> None:
        name, attempt = self.site.prefix + job.id, job.attempt or 1
        if attempt >= self.attempts.get(name, 0):
            self.attempts[name] = attempt
            if job.submit_ms is not None:
                self.submitted[name] = job.submit_ms
        if job.end_state:
            self.ended.add((name, attempt))
            if self.live.get(name, attempt + 1) <= attempt:
                del self.live[name]
        elif attempt > self.live.get(name, 0) and (name, attempt) not in self.ended:
            self.live[name] = attempt


def assign_attempt_numbers(
    jobs: Sequence[SlurmJob], prefix: str, scan: JobScan, known: Mapping[str, int]
) -> list[SlurmJob]:
    """Return the accounts' records of each job with attempt numbers, counted back from its latest attempt.

    Use it for accounts without restart counts. A requeue submits the job again, so the record with
    the same time of submission as in the queue belongs to the queue's attempt. A record of an end is
    dropped if the queue still shows this attempt as live.
    """
    by_job: dict[str, list[SlurmJob]] = {}
    for job in jobs:
        by_job.setdefault(job.id, []).append(job)
    numbered: list[SlurmJob] = []
    for number, rows in by_job.items():
        rows.sort(key=lambda row: (row.submit_ms or 0, row.start_ms or 2**62))
        name = prefix + number
        latest = max(len(rows), known.get(name, 1))
        if name in scan.attempts:
            behind = rows[-1].submit_ms is not None and rows[-1].submit_ms < scan.submitted.get(name, 0)
            latest = scan.attempts[name] - behind
        for place, row in enumerate(rows):
            attempt = row.attempt or latest - (len(rows) - 1 - place)
            if attempt >= 1 and not (row.end_state and scan.live.get(name) == attempt):
                numbered.append(replace(row, attempt=attempt))
    return numbered


def identify_event(event: JobEvent) -> Identity:
    return event.job, event.attempt, event.sequence
