"""Reservation of the queue's head: how surely it holds, what may run beside it, what becomes free when."""

from dataclasses import dataclass

import numpy as np

from fleet.nodes import NodeState
from placement.paths import Timelines
from placement.queue import Reservation
from placement.start_time import Quantiles, quantiles_ms
from placement.view import ClusterView

MOST_RELEASES = 100
ROUNDING_S = 1.0  # shadow times are whole ms, sampled ones float32 seconds


@dataclass(frozen=True, slots=True)
class FreeWindow:
    """Free GPUs, on how many nodes, and until when a job may use them without delaying the head; None: for good."""

    gpus: int
    nodes: int
    until_ms: int | None


@dataclass(frozen=True, slots=True)
class JobRelease:
    """GPUs that a running job gives back; ends_ms: p10, p50, p90."""

    job: str
    gpus: int
    nodes: int
    ends_ms: Quantiles


@dataclass(frozen=True, slots=True)
class Held:
    """The head's reservation. idle_gpus: free already, and kept for it; holds_p: None until futures were sampled."""

    request_id: str
    shadow_ms: int
    waits_for: str
    gpus: int
    idle_gpus: int
    holds_p: float | None


def held(reservation: Reservation, view: ClusterView, timelines: Timelines | None) -> Held:
    """The reservation for people to read."""
    return Held(
        request_id=reservation.entry.request.request_id,
        shadow_ms=reservation.shadow_ms,
        waits_for=reservation.blocker,
        gpus=int(reservation.gpus.sum()),
        idle_gpus=int((reservation.gpus & view.free).sum()),
        holds_p=holds_p(reservation, timelines) if timelines is not None else None,
    )


def holds_p(reservation: Reservation, timelines: Timelines) -> float | None:
    """The share of futures in which the head starts by its shadow time; None where it is not in them yet."""
    start_s = timelines.starts_s.get(reservation.entry.request.request_id)
    if start_s is None:
        return None
    by_s = (reservation.shadow_ms - timelines.now_ms) / 1000
    return float((start_s <= by_s + ROUNDING_S).mean())


def windows(view: ClusterView, reservation: Reservation | None) -> tuple[FreeWindow, ...]:
    """Unreserved free GPUs, then the head's, which are free until its shadow time."""
    kept = view.free & reservation.gpus if reservation is not None else np.zeros_like(view.free)
    in_service = view.state == NodeState.IN_SERVICE
    found = []
    for mask, until_ms in ((view.free & ~kept, None), (kept, reservation.shadow_ms if reservation else None)):
        by_node = np.count_nonzero(mask[in_service], axis=1)
        if by_node.any():
            found.append(FreeWindow(int(by_node.sum()), int(np.count_nonzero(by_node)), until_ms))
    return tuple(found)


def releases(timelines: Timelines) -> tuple[JobRelease, ...]:
    """When running jobs should end, the soonest half-way first; at most `MOST_RELEASES`."""
    view, ends_s = timelines.view, timelines.running_ends()
    running = [job for job in view.jobs if job in ends_s]
    index = {job: number for number, job in enumerate(view.jobs)}
    soonest = sorted(running, key=lambda job: (float(np.median(ends_s[job])), job))[:MOST_RELEASES]
    found = []
    for job in soonest:
        by_node = np.count_nonzero(view.holders == index[job], axis=1)
        ends_ms = quantiles_ms(ends_s[job], timelines.now_ms, timelines.now_ms)
        found.append(JobRelease(job, int(by_node.sum()), int(np.count_nonzero(by_node)), ends_ms))
    return tuple(found)
