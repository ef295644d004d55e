"""The claims of waiting requests: the probability that each holds, and the GPUs that are free until then.

This module also estimates when running jobs release their GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
from fleetcast.placement.plan.profile import Claim
from fleetcast.placement.plan.timeline import Basis

MOST_RELEASES = 100
ROUNDING_S = 1.0  # shadow times are whole ms, sampled ones float32 seconds


@dataclass(frozen=True, slots=True)
class FreeWindow:
    """Free GPUs, and the time until which other jobs may use them without delaying any claim.

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
class RequestReservation:
    """The claim of a waiting request, as shown to people.

    shadow_ms: the start of the claim. waits_for: the job or the window that ends then. idle_gpus: GPUs that are free
    already, and reserved for the request. holds_p: the probability that the request starts by its shadow time. It is
    None if unknown, and `reason` says why. by: the basis of holds_p. basis: the basis of the shadow time. The basis is
    "prior" if the request waits for a job of unknown run time. The plan then assumes that this job runs for a day.
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


def describe_claim(claim: Claim, view: ClusterView, timelines: Timelines | None) -> RequestReservation:
    """Return a claim with its probability and the basis of its times, as shown to people."""
    known = compute_hold_probability(claim, timelines) if timelines is not None else None
    return RequestReservation(
        request_id=claim.request.request_id,
        shadow_ms=claim.start_ms,
        waits_for=claim.blocker,
        gpus=int(claim.gpus.sum()),
        idle_gpus=int((claim.gpus & view.free).sum()),
        holds_p=known,
        by=_find_start_basis(claim, timelines) if timelines is not None and known is not None else None,
        basis=_find_shadow_basis(claim, timelines) if timelines is not None else "prior",
        reason="" if known is not None else _explain_unknown_probability(claim, timelines),
    )


def _explain_unknown_probability(claim: Claim, timelines: Timelines | None) -> str:
    """Return the reason why the probability of a claim is unknown."""
    if timelines is None or claim.request.request_id not in timelines.starts_s:
        return "no futures with this request have been sampled yet"
    return describe_unknown_jobs(timelines)


def _find_start_basis(claim: Claim, timelines: Timelines) -> StartBasis:
    start_s = timelines.starts_s[claim.request.request_id]
    return choose_start_basis(compute_quantiles_ms(start_s, timelines.now_ms), timelines, timelines.now_ms)


def _find_shadow_basis(claim: Claim, timelines: Timelines) -> Basis:
    """Return the basis of the planned end of the job that a claim waits for."""
    row = timelines.now.running.find_run(claim.blocker, timelines.now_ms)
    return timelines.run_times.find_basis(row.gpus, row.limit_s, row.compute_age_s(timelines.now_ms))


def compute_hold_probability(claim: Claim, timelines: Timelines) -> float | None:
    """Return the share of sampled futures in which a request starts by the start of its claim.

    Returns None if the futures do not include the request, or if it waits for jobs whose run time is
    unknown.
    """
    start_s = timelines.starts_s.get(claim.request.request_id)
    if start_s is None or is_behind_unknown(claim.request, start_s, timelines):
        return None
    by_s = (claim.start_ms - timelines.now_ms) / 1000
    return float((start_s <= by_s + ROUNDING_S).mean())


def find_free_windows(view: ClusterView, claims: Sequence[Claim]) -> tuple[FreeWindow, ...]:
    """Return the free windows that have GPUs.

    The first has the GPUs that no request claims. Each other window has the free GPUs whose first claim starts at the
    same time. The soonest comes last.
    """
    unclaimed, masks = view.free, dict[int, NDArray[np.bool_]]()
    for claim in sorted(claims, key=lambda claim: claim.start_ms):
        masks[claim.start_ms] = masks.get(claim.start_ms, np.False_) | (unclaimed & claim.gpus)
        unclaimed = unclaimed & ~claim.gpus
    windows: list[tuple[int | None, NDArray[np.bool_]]] = [(None, unclaimed), *reversed(masks.items())]
    found = []
    for until_ms, mask in windows:
        by_node = np.count_nonzero(mask[view.is_open], axis=1)
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
