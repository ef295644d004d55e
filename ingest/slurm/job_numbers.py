"""The job behind a Slurm job number.

Slurm reuses numbers after MaxJobId, or if it lost its state. A job is identified by its number and its
submission. The first job of a number is named by the number alone. The name of a later job also has its
submission: `7@1795645000`. A requeue submits the same job again, with a higher restart count. If the record
has no restart count, a job with the same user and name counts as the same job.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from fleetcast.ingest.slurm.jobs import SlurmJob

MAX_NUMBERS = 50_000  # numbers; those seen last
SAME_S = 2  # Slurm moves a submission by a second where a requeue would repeat it
MOST_JOBS = 16  # of one number


class NumberedJob(msgspec.Struct, array_like=True):
    """One of the jobs that had a certain Slurm number.

    suffix: the text after the number in the job's name. first_s, last_s: its first and last submission
    in Unix s. attempt: restarts + 1. user, name: checksums of its user and name, 0 if unknown.
    is_counted: a record has stated its restarts.
    """

    suffix: str
    first_s: int
    last_s: int
    attempt: int = 1
    user: int = 0
    name: int = 0
    is_counted: bool = False

    def is_other_job(self, job: SlurmJob) -> bool:
        """Return whether a record belongs to another job, because its user or name differs."""
        user, name = hash_user_and_name(job)
        return bool((user and self.user and user != self.user) or (name and self.name and name != self.name))

    def has_submission(self, submit_s: int) -> bool:
        return min(abs(submit_s - self.first_s), abs(submit_s - self.last_s)) <= SAME_S


class JobNumbers:
    """The recent jobs of each Slurm number, in order of submission."""

    def __init__(self, known: dict[str, list[NumberedJob]] | None = None) -> None:
        """Create the table from saved state.

        known: number → its jobs in order of submission, or None for none. The table changes it in place.
        """
        self.known = {} if known is None else known

    def name_all_jobs(self, jobs: Iterable[SlurmJob]) -> list[SlurmJob]:
        """Record the jobs of some records, and return the records with the jobs' unique names."""
        return [self.name_job(job) for job in jobs]

    def name_job(self, job: SlurmJob) -> SlurmJob:
        number = parse_job_number(job.id)
        found = self._find_or_add_job(number, job)
        return replace(job, id=job.id + found.suffix) if found.suffix else job

    def find_newest_name(self, name: str) -> str:
        """Return the name of the newest job that has the same Slurm number as `name`."""
        rows = self.known.get(parse_job_number(name))
        return name + rows[-1].suffix if rows else name

    def _find_or_add_job(self, number: str, job: SlurmJob) -> NumberedJob:
        rows = self.known.pop(number, [])
        at = self._find_row(rows, job)
        if at is None:
            submit_s = (job.submit_ms or 0) // 1000
            made = NumberedJob(
                f"@{submit_s}" if rows else "",
                submit_s,
                submit_s,
                job.attempt or 1,
                *hash_user_and_name(job),
                bool(job.attempt),
            )
            rows = sorted((*rows, made), key=lambda row: row.last_s)[-MOST_JOBS:]
            found = made
        else:
            found = _merge_record(rows[at], job)
            rows = [*rows[:at], found, *rows[at + 1 :]]
        self.known[number] = rows
        if len(self.known) > MAX_NUMBERS:
            del self.known[next(iter(self.known))]
        return found

    def _find_row(self, rows: Sequence[NumberedJob], job: SlurmJob) -> int | None:
        """Return the index of the record's job in `rows`, or None if it is a new job.

        rows: the known jobs that have the record's job number.
        """
        if not rows:
            return None
        if job.submit_ms is None:
            return len(rows) - 1
        submit_s, newest = job.submit_ms // 1000, rows[-1]
        same = next((at for at in reversed(range(len(rows))) if rows[at].has_submission(submit_s)), None)
        if same is not None:
            return same
        is_restart = job.attempt is None or job.attempt > 1
        if submit_s < newest.last_s:  # an attempt before the newest one, or a job before it
            is_restart = newest.attempt > 1
        return len(rows) - 1 if is_restart and not newest.is_other_job(job) else None


def _merge_record(row: NumberedJob, job: SlurmJob) -> NumberedJob:
    """Return a job with the facts that a record adds.

    Once a record has stated the restarts, only such records change the attempt.
    """
    user, name = hash_user_and_name(job)
    submit_s, attempt = (job.submit_ms or 0) // 1000, job.attempt or row.attempt
    if job.attempt is None and row.is_counted:
        submit_s = 0
    elif job.attempt is None and submit_s > row.last_s + SAME_S:
        attempt = row.attempt + 1
    return NumberedJob(
        suffix=row.suffix,
        first_s=row.first_s,
        last_s=max(row.last_s, submit_s),
        attempt=max(row.attempt, attempt),
        user=row.user or user,
        name=row.name or name,
        is_counted=row.is_counted or job.attempt is not None,
    )


def hash_user_and_name(job: SlurmJob) -> tuple[int, int]:
    """Return checksums of a record's user and name.

    Different spellings of the name in different kinds of records give the same checksum.
    """
    return _hash_text(job.user), _hash_text("".join(part for part in job.name if part.isascii() and part.isalnum()))


def _hash_text(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) if text else 0


def parse_job_number(name: str) -> str:
    """Return the Slurm number in a job's name. Tasks share the number of their array.

    >>> [parse_job_number(value) for value in ("500_7", "500_rest@1795645000", "13+1", "7@1795645000")]
    ['500', '500', '13+1', '7']
    """
    return parse_slurm_id(name).partition("_")[0]


def parse_slurm_id(name: str) -> str:
    """Return Slurm's own id of a job from its name, without the submission.

    >>> parse_slurm_id("500_7@1795645000")
    '500_7'
    """
    return name.partition("@")[0]
