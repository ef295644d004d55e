"""A fast simulation of past weeks without telemetry.

It gives the fleet a history, running jobs and a queue.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetcast.fleet.events import Finished, JobEvent, Queued, Started, Submitted
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import Level, Topology
from fleetcast.simulator.days.backfill import BackfilledJob, BackfillQueue, GpuPool
from fleetcast.simulator.days.traces import WEEK_MS, JobTrace, TraceJob


@dataclass(frozen=True, slots=True)
class OngoingJob:
    """A job that runs at the start, with its place, its start time and its remaining run time without disturbance."""

    job: TraceJob
    started_ms: int
    remaining_s: float
    ranks: tuple[RankPlacement, ...]


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """The result of the simulated past.

    history: events of jobs that ended before the start, by time. queue: waiting jobs by arrival.
    cluster: the scheduler's state. Callers must copy it before they change it.
    """

    start_ms: int
    history: tuple[JobEvent, ...]
    ongoing: tuple[OngoingJob, ...]
    queue: tuple[TraceJob, ...]
    cluster: BackfillQueue | None = None

    @property
    def running_gpus(self) -> int:
        return sum(row.job.gpus for row in self.ongoing)

    @property
    def queued_gpus(self) -> int:
        return sum(job.gpus for job in self.queue)


def fast_forward_trace(trace: JobTrace, topology: Topology, *, weeks: int = 4) -> TraceReplay:
    """Simulate the trace up to `trace.start_ms` on the nodes of `topology`.

    Only jobs that reach into the last `weeks` are simulated.
    """
    begin_ms = trace.start_ms - weeks * WEEK_MS
    reaches = trace.submit_ms + (trace.run_s * 1000).astype(np.int64) >= begin_ms
    jobs = trace.select_jobs(reaches & (trace.submit_ms < trace.start_ms))
    cluster = BackfillQueue(_make_free_pool(topology))
    ended = _simulate_jobs(cluster, jobs, trace.start_ms)
    names = topology.names
    history = [event for row in ended for event in _make_past_events(row, names, cluster.gpus_per_node)]
    history.sort(key=lambda event: event.time_ms)
    ongoing = tuple(
        OngoingJob(row.job, row.started_ms, (row.end_ms - trace.start_ms) / 1000, make_ranks(row, names))
        for row in cluster.running.values()
    )
    return TraceReplay(trace.start_ms, tuple(history), ongoing, tuple(cluster.queue), cluster)


def _make_free_pool(topology: Topology) -> GpuPool:
    width = int(topology.gpus.max(initial=1))
    free = np.arange(width)[None, :] < topology.gpus[:, None]
    return GpuPool(free, topology.domain[Level.RACK])


def _simulate_jobs(cluster: BackfillQueue, jobs: Sequence[TraceJob], stop_ms: int) -> list[BackfilledJob]:
    """Simulate arrivals and ends in order of time, up to `stop_ms`.

    Returns the jobs that ended, in order of their ends.
    """
    ends: list[tuple[int, str]] = []
    ended: list[BackfilledJob] = []
    arrivals = iter(jobs)
    job = next(arrivals, None)
    while True:
        arrives_ms = job.submit_ms if job else stop_ms
        now_ms = min(arrives_ms, ends[0][0] if ends else stop_ms)
        if now_ms >= stop_ms:
            return ended
        while ends and ends[0][0] <= now_ms:
            ended.append(cluster.end_job(heapq.heappop(ends)[1]))
        while job and job.submit_ms <= now_ms:
            cluster.queue.append(job)
            job = next(arrivals, None)
        for row in cluster.start_ready_jobs(now_ms):
            heapq.heappush(ends, (row.end_ms, row.job.job))


def make_ranks(row: BackfilledJob, names: Sequence[str]) -> tuple[RankPlacement, ...]:
    """Return the members of a running job as ranks with node names."""
    return tuple(RankPlacement(rank, names[node], gpus) for rank, (node, gpus) in enumerate(row.held))


def _make_past_events(row: BackfilledJob, names: Sequence[str], gpus_per_node: int) -> tuple[JobEvent, ...]:
    ranks = make_ranks(row, names)
    return (
        *make_opening_events(row.job, gpus_per_node, started_ms=row.started_ms, ranks=ranks),
        _make_finished_event(row),
    )


def _make_finished_event(row: BackfilledJob) -> Finished:
    return Finished(job=row.job.job, sequence=2, time_ms=row.end_ms)


def make_opening_events(
    job: TraceJob,
    gpus_per_node: int,
    *,
    started_ms: int | None = None,
    ranks: tuple[RankPlacement, ...] = (),
    **facts: Any,
) -> tuple[JobEvent, ...]:
    """Return the first two events of a job: `submitted`, then `started` or, if it still waits, `queued`.

    Their sequence numbers are 0 and 1. facts: further fields of `submitted`.
    """
    members, each = job.compute_gang_shape(gpus_per_node)
    submitted = Submitted(
        job=job.job,
        sequence=0,
        time_ms=job.submit_ms,
        queue=job.queue,
        user=job.user,
        class_=job.class_,
        gang=job.gang or members,
        gpus_per_node=each,
        pool=job.pool,
        **facts,
    )
    if started_ms is None:
        return submitted, Queued(job=job.job, sequence=1, time_ms=job.submit_ms, reason="waits for GPUs")
    return submitted, Started(job=job.job, sequence=1, time_ms=started_ms, ranks=ranks)
