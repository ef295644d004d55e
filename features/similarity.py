"""Keys of kinds of similar jobs: 64-bit hashes under which records are stored.

With hashes, a reader needs neither the names nor a decoder.
"""

import hashlib
from typing import Literal

from fleetcast.features.past_runs import JobShape
from fleetcast.fleet.jobs import JobAttempt

Kind = Literal["user, name and GPUs", "user and name", "user and GPUs", "user", "queue and GPUs", "GPUs", "all jobs"]


def make_kind_keys(shape: JobShape) -> dict[Kind, int]:
    """Return kind → the job's key of that kind, the most specific kind first.

    Kinds by user, or by words of the name, are included only if the job has them.

    >>> list(make_kind_keys(JobShape(name="train-1", queue="batch", gpus=8)))
    ['queue and GPUs', 'GPUs', 'all jobs']
    """
    words, gpus = shape.words, f"{shape.gpus:g}"
    found: dict[Kind, int] = {}
    if shape.user and words:
        found["user, name and GPUs"] = _hash_key("user, name and GPUs", shape.user, words, gpus)
        found["user and name"] = _hash_key("user and name", shape.user, words)
    if shape.user:
        found["user and GPUs"] = _hash_key("user and GPUs", shape.user, gpus)
        found["user"] = _hash_key("user", shape.user)
    found["queue and GPUs"] = _hash_key("queue and GPUs", shape.queue, gpus)
    found["GPUs"] = _hash_key("GPUs", gpus)
    found["all jobs"] = _hash_key("all jobs")
    return found


def make_job_shape(attempt: JobAttempt) -> JobShape:
    """Return the facts of an attempt at its submission. The job's id replaces a missing name."""
    submission = attempt.submission
    if submission is None:
        return JobShape(name=attempt.job, queue=attempt.queue, gpus=attempt.gpus, submitted_ms=attempt.started_ms or 0)
    return JobShape(
        user=submission.user,
        group=submission.group,
        name=submission.name or attempt.job,
        queue=attempt.queue,
        class_=submission.class_,
        gpus=attempt.gpus,
        cpus=submission.cpus,
        limit_s=submission.limit_s,
        submitted_ms=submission.time_ms,
    )


def _hash_key(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
