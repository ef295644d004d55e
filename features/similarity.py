"""Which jobs are of one kind: by user and name, by user and size, by queue and size. A kind is a 64-bit key.

What is known of jobs is kept and published by these keys, and asked for by them; the most telling one that is known
speaks. A key is a hash, so that a reader of an array of keys needs neither names nor a decoder.
"""

import hashlib
from typing import Literal

from features.run_history import JobShape, RunHistory
from fleet.events import Checkpoint, JobEvent, NodeLost, Phase, Queued, Step
from fleet.jobs import JobAttempt

Kind = Literal["user, name and GPUs", "user and name", "user and GPUs", "user", "queue and GPUs", "GPUs", "all jobs"]


def kinds(shape: JobShape) -> dict[Kind, int]:
    """The keys of a job, the most telling first; without a user or words in its name there are none of these.

    >>> list(kinds(JobShape(name="train-1", queue="batch", gpus=8)))
    ['queue and GPUs', 'GPUs', 'all jobs']
    """
    words, gpus = shape.words, f"{shape.gpus:g}"
    found: dict[Kind, int] = {}
    if shape.user and words:
        found["user, name and GPUs"] = _key("user, name and GPUs", shape.user, words, gpus)
        found["user and name"] = _key("user and name", shape.user, words)
    if shape.user:
        found["user and GPUs"] = _key("user and GPUs", shape.user, gpus)
        found["user"] = _key("user", shape.user)
    found["queue and GPUs"] = _key("queue and GPUs", shape.queue, gpus)
    found["GPUs"] = _key("GPUs", gpus)
    found["all jobs"] = _key("all jobs")
    return found


def shape_of(attempt: JobAttempt) -> JobShape:
    """What is known of an attempt, as at its submission; a job without a name is called by its identity."""
    told = attempt.submission
    if told is None:
        return JobShape(name=attempt.job, queue=attempt.queue, gpus=attempt.gpus, submitted_ms=attempt.started_ms or 0)
    return JobShape(
        user=told.user,
        group=told.group,
        name=told.name or attempt.job,
        queue=attempt.queue,
        class_=told.class_,
        gpus=attempt.gpus,
        cpus=told.cpus,
        limit_s=told.limit_s,
        submitted_ms=told.time_ms,
    )


def tell_history(history: RunHistory, attempt: JobAttempt, event: JobEvent | None = None) -> None:
    """What is known of an attempt; as often as one likes. `event`: only if it may have told something that counts.

    Where nobody tells of its end, and a later attempt runs, it is not known how long it ran.
    """
    if isinstance(event, Step | Phase | Checkpoint | Queued | NodeLost):
        return
    job, number = attempt.job, attempt.attempt
    if attempt.submission is not None or attempt.over_ms is not None:
        history.submitted(job, number, shape_of(attempt))
    if attempt.started_ms is not None:
        history.started(job, number, attempt.started_ms)
    if attempt.over_ms is not None:
        history.ended(job, number, attempt.over_ms, attempt.outcome or "preempted")


def _key(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
