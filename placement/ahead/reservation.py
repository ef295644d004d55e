"""The reservation of the queue's head: the probability that it holds, and the GPUs that are free until then.

This module also estimates when running jobs release their GPUs.
"""

from dataclasses import dataclass

import numpy as np

from fleetcast.placement.ahead.paths import Timelines
from fleetcast.placement.ahead.start_time import (
    Quantiles,
    StartBasis,
    choose_start_basis,
    compute_quantiles_ms,
    describe_unknown_jobs,
    is_behind_unknown,
)
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.queue import Reservation
from fleetcast.placement.plan.timeline import Basis

MOST_RELEASES = 100
ROUNDING_S = 1.0  # shadow times are whole ms, sampled ones float32 seconds


@dataclass(frozen=True, slots=True)
class FreeWindow:
    """Free GPUs, and the time until which other jobs may use them without delaying the head of the queue.

    nodes: the number of nodes that the GPUs are on. until_ms: None if the GPUs are free without a time
    limit.
    """

    gpus: int
    nodes: int
    until_ms: int | None


@dataclass(frozen=True, slots=True)
class JobRelease:
    """A running job, and when it is expected to end and to release its GPUs.

    ends_ms: p10, p50 and p90. None if its run time is unknown. by: the basis of its run time.
    """

    job: str
    gpus: int
    nodes: int
    ends_ms: Quantiles | None
    by: Basis = "runs"


@dataclass(frozen=True, slots=True)
class HeadReservation:
    """The reservation of the queue's head, as shown to people.

    idle_gpus: GPUs that are free already, and reserved for the head. holds_p: the probability that the
    head starts by its shadow time. It is None if unknown, and `reason` says why. by: the basis of
    holds_p. basis: the basis of the shadow time. The basis is "prior" if the head waits for a job of unknown
    run time. The plan then assumes that this job runs for a day.
    """

    request_id: str
    shadow_ms: int
    waits_for: str
    gpus: int
    idle_gpus: int
    holds_p: float | None
    by: StartBasis | None = None
    basis: Basis = "runs"
    reason: str = ""


def describe_reservation(reservation: Reservation, view: ClusterView, timelines: Timelines | None) -> HeadReservation:
    """Return the head's reservation with its probability and the basis of its times, as shown to people."""
    known = compute_hold_probability(reservation, timelines) if timelines is not None else None
    return HeadReservation(
        request_id=reservation.entry.request.request_id,
        shadow_ms=reservation.shadow_ms,
        waits_for=reservation.blocker,
        gpus=int(reservation.gpus.sum()),
        idle_gpus=int((reservation.gpus & view.free).sum()),
        holds_p=known,
        by=_find_start_basis(reservation, timelines) if timelines is not None and known is not None else None,
        basis=_find_shadow_basis(reservation, timelines) if timelines is not None else "prior",
        reason="" if known is not None else _explain_unknown_probability(reservation, timelines),
    )


def _explain_unknown_probability(reservation: Reservation, timelines: Timelines | None) -> str:
    """Return the reason why the probability of a reservation is unknown."""
    if timelines is None or reservation.entry.request.request_id not in timelines.starts_s:
        return "no futures with this request have been sampled yet"
    return describe_unknown_jobs(timelines)


def _find_start_basis(reservation: Reservation, timelines: Timelines) -> StartBasis:
    start_s = timelines.starts_s[reservation.entry.request.request_id]
    return choose_start_basis(compute_quantiles_ms(start_s, timelines.now_ms), timelines, timelines.now_ms)


def _find_shadow_basis(reservation: Reservation, timelines: Timelines) -> Basis:
    """Return the basis of the planned end of the job that the head waits for."""
    row = timelines.now.running.find_run(reservation.blocker, timelines.now_ms)
    return timelines.run_times.find_basis(row.gpus, row.limit_s, row.compute_age_s(timelines.now_ms))


def compute_hold_probability(reservation: Reservation, timelines: Timelines) -> float | None:
    """Return the share of sampled futures in which the head starts by its shadow time.

    Returns None if the futures do not include the head, or if it waits for jobs whose run time is
    unknown.
    """
    start_s = timelines.starts_s.get(reservation.entry.request.request_id)
    if start_s is None or is_behind_unknown(reservation.entry.request, start_s, timelines):
        return None
    by_s = (reservation.shadow_ms - timelines.now_ms) / 1000
    return float((start_s <= by_s + ROUNDING_S).mean())


def find_free_windows(view: ClusterView, reservation: Reservation | None) -> tuple[FreeWindow, ...]:
    """Return the free windows that have GPUs.

    The first has the unreserved GPUs. The second has the GPUs that are reserved for the head. They are free
    until the shadow time.
    """
    reserved = view.free & reservation.gpus if reservation is not None else np.zeros_like(view.free)
    is_open = view.is_open
    found = []
    for mask, until_ms in ((view.free & ~reserved, None), (reserved, reservation.shadow_ms if reservation else None)):
        by_node = np.count_nonzero(mask[is_open], axis=1)
        if by_node.any():
            found.append(FreeWindow(int(by_node.sum()), int(np.count_nonzero(by_node)), until_ms))
    return tuple(found)


def estimate_job_releases(timelines: Timelines) -> tuple[JobRelease, ...]:
    """Estimate when running jobs end, the smallest median first. Returns at most `MOST_RELEASES`."""
    view, ends_s = timelines.view, timelines.list_running_ends()
    running = [job for job in view.jobs if job in ends_s]
    index = {job: number for number, job in enumerate(view.jobs)}
    soonest = sorted(running, key=lambda job: (float(np.median(ends_s[job])), job))[:MOST_RELEASES]
    found = []
    for job in soonest:
        by_node = np.count_nonzero(view.holders == index[job], axis=1)
        basis = timelines.basis.get(job, "prior")
        ends_ms = None if basis == "prior" else compute_quantiles_ms(ends_s[job], timelines.now_ms, timelines.now_ms)
        found.append(JobRelease(job, int(by_node.sum()), int(np.count_nonzero(by_node)), ends_ms, basis))
    return tuple(found)
