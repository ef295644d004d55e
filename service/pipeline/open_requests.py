"""The open requests in the placer's ledger, as attempts that join those of job events.

Each waiting job counts once. If its request is in our own queue, the request represents it, even if
events say that it waits. A job with promised GPUs does not wait. Once events say that the job runs or has
ended, its request no longer counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import ASKED_FIELDS, Submitted
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import WHOLE_GPU, RankPlacement
from fleetcast.fleet.tellers import REQUEST_LABEL, REQUESTED
from fleetcast.fleet.wait_reasons import OVER_QUOTA
from fleetcast.placement.ledger.promised import OpenRequest
from fleetcast.service.pipeline.state import EventView

Key = tuple[str, int]  # job, attempt


@dataclass(frozen=True, slots=True)
class OpenView:
    """The waiting and promised requests, each once.

    waiting: attempts in order of arrival, those with requests first. promised: attempts with their promised
    ranks. requests: the requests of the promised attempts, in the same order. requested: all attempts with
    an open request.
    """

    waiting: Sequence[JobAttempt]
    promised: Sequence[JobAttempt] = ()
    requests: Sequence[OpenRequest] = ()
    requested: Sequence[JobAttempt] = ()

    @classmethod
    def from_requests(cls, open_requests: Sequence[OpenRequest], events: EventView) -> "OpenView":
        """Combine the open requests with the attempts that wait according to job events."""
        if not open_requests:
            return cls(events.queued)
        over = {(row.job, row.attempt) for row in (*events.running, *events.ended)}
        stated = {(row.job, row.attempt): row for row in events.queued}
        promises = {row.attempt: row for row in open_requests if row.is_promised and row.attempt not in over}
        waits = {row.attempt: row for row in open_requests if not (row.attempt in over or row.attempt in promises)}
        waiting = [make_attempt_of_request(row, stated.get(key)) for key, row in waits.items()]
        promised = [make_attempt_of_request(row, stated.get(key)) for key, row in promises.items()]
        jobs = {job for job, _ in (*waits, *promises)}
        others = [row for row in events.queued if row.job not in jobs]
        return cls([*waiting, *others], promised, [*promises.values()], [*waiting, *promised])


def drop_held_promises(
    requests: Sequence[OpenRequest], held: NDArray[np.bool_], rows: Mapping[str, int]
) -> Sequence[OpenRequest]:
    """Return the requests without promised GPUs that a job already holds.

    Another job may have started on a promised GPU, and each GPU must count once. Parts of GPUs stay, because
    jobs share these GPUs. held: (n, g) bool, a job holds the GPU. rows: node name → row.
    """
    if not any(request.is_promised for request in requests):
        return requests
    return [replace(request, ranks=_drop_held_gpus(request.ranks, held, rows)) for request in requests]


def _drop_held_gpus(
    ranks: tuple[RankPlacement, ...], held: NDArray[np.bool_], rows: Mapping[str, int]
) -> tuple[RankPlacement, ...]:
    """Return the ranks without GPUs that jobs hold, and without ranks that then have no GPU.

    If no rank has a GPU left, return all ranks without GPUs.
    """
    found = []
    for rank in ranks:
        row = rows.get(rank.node)
        is_whole = row is not None and rank.milli >= WHOLE_GPU
        taken = set(np.flatnonzero(held[row]).tolist()) if is_whole else set()
        found.append(msgspec.structs.replace(rank, gpus=tuple(gpu for gpu in rank.gpus if gpu not in taken)))
    return tuple(rank for rank in found if rank.gpus) or tuple(found)


def make_attempt_of_request(row: OpenRequest, stated: JobAttempt | None) -> JobAttempt:
    """Convert a request into an attempt.

    The wait begins with the request, or with an earlier submission in the job's events.
    """
    request = row.request
    since_ms = row.since_ms if stated is None or stated.submitted_ms is None else min(row.since_ms, stated.submitted_ms)
    has_gpus = not row.is_promised or any(rank.gpus for rank in row.ranks)
    asked = {name: getattr(request, name) for name in ASKED_FIELDS}
    if not has_gpus:
        asked["gpus_per_node"] = 0
    submission = Submitted(
        job=request.job_name,
        attempt=request.attempt,
        sequence=REQUESTED,
        time_ms=since_ms,
        group=stated.submission.group if stated and stated.submission else "",
        labels={REQUEST_LABEL: request.request_id},
        **asked,
    )
    return JobAttempt(
        request.job_name,
        request.attempt,
        submission=submission,
        queued_reason=OVER_QUOTA if row.is_over_quota else stated.queued_reason if stated else "",
        ranks=row.ranks,
        written={"submission": REQUESTED},
    )
