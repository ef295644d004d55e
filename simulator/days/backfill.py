"""Simulation of a FIFO queue with EASY backfill over nodes. A month of jobs takes a second or two.

The head of the queue reserves nodes. They are the nodes on which it will start, if the running jobs end
as estimated. A later job may start now if its own estimate ends before the head starts, or if it does not
need those nodes. The estimate is the running p90 of *finished* jobs with the same GPU count. If a GPU count
does not fit, no job with that count is tried again in the same pass.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetcast.simulator.days.traces import TraceJob, choose_gang_shape

FIRST_ESTIMATE_S = 3600.0
SAMPLES_WANTED = 5


@dataclass(slots=True)
class RunTimeSamples:
    """The sorted run times of finished jobs in seconds, by GPU count. The key 0 holds all jobs."""

    by_gpus: dict[int, list[float]] = field(default_factory=dict)

    def add_run_time(self, gpus: int, run_s: float) -> None:
        for key in (gpus, 0):
            insort(self.by_gpus.setdefault(key, []), run_s)

    def estimate_p90_s(self, gpus: int) -> float:
        """Return the p90 run time in seconds of jobs with this GPU count.

        If fewer than five of them have finished, return the p90 of all jobs. If fewer than five jobs of any GPU count
        have finished, return an hour.
        """
        for key in (gpus, 0):
            runs = self.by_gpus.get(key, [])
            if len(runs) >= SAMPLES_WANTED:
                return runs[int(0.9 * (len(runs) - 1))]
        return FIRST_ESTIMATE_S


@dataclass(slots=True)
class BackfilledJob:
    """A running job and its GPUs.

    `held[i]`: (node row, GPU indices) of member i. `end_ms`: the true end. `estimate_s`: the estimated run
    time.
    """

    job: TraceJob
    started_ms: int
    end_ms: int
    estimate_s: float
    held: tuple[tuple[int, tuple[int, ...]], ...]

    def estimate_end_ms(self, now_ms: int) -> int:
        """Return when the job should end, in Unix ms.

        If the estimate has passed, it is doubled until the end lies in the future.
        """
        run_ms = self.estimate_s * 1000
        while self.started_ms + run_ms <= now_ms:
            run_ms *= 2
        return int(self.started_ms + run_ms)


@dataclass(slots=True)
class GpuPool:
    """The free GPUs of a fleet.

    free: (node, gpu) bool. count: (node,) int64, number of free GPUs. rack: (node,) int32, row of the rack.
    """

    free: NDArray[np.bool_]
    rack: NDArray[np.int32]
    count: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.count = self.free.sum(axis=1)

    def occupy(self, nodes: list[int], each: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Occupy `each` GPUs on every listed node, lowest indices first.

        Returns (node row, GPU indices) for each entry of `nodes`.

        A node may be listed twice.
        """
        held = []
        for node in nodes:
            gpus = np.flatnonzero(self.free[node])[:each]
            self.free[node, gpus] = False
            self.count[node] -= each
            held.append((node, tuple(gpus.tolist())))
        return tuple(held)

    def reoccupy(self, held: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        """Occupy again exactly the GPUs that were freed before."""
        for node, gpus in held:
            self.free[node, list(gpus)] = False
            self.count[node] -= len(gpus)

    def release(self, held: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        for node, gpus in held:
            self.free[node, list(gpus)] = True
            self.count[node] += len(gpus)


def choose_nodes(count: NDArray[np.int64], rack: NDArray[np.int32], members: int, each: int) -> list[int] | None:
    """Choose nodes for `members` members with `each` GPUs.

    Returns their rows, or None if there is no room.

    If one rack can hold all members, the tightest such rack is used. Within a rack, the fullest nodes come first.
    """
    room = count // each
    if int(room.sum()) < members:
        return None
    if members == 1:
        return [int(np.argmin(np.where(room > 0, count, np.iinfo(np.int64).max)))]
    of_rack = np.bincount(np.maximum(rack, 0), weights=room)
    holds = of_rack >= members
    if holds.any():
        order = np.lexsort((count, rack != int(np.argmin(np.where(holds, of_rack, np.inf)))))
    else:
        order = np.lexsort((count, -of_rack[np.maximum(rack, 0)]))
    order = order[room[order] > 0]
    return [int(node) for node in np.repeat(order, room[order])[:members]]


Chooser = Callable[[TraceJob, NDArray[np.int64]], list[int] | None]
"""A node for each member of a job, given how many GPUs (n,) it may use on each; None when it does not fit."""


@dataclass(slots=True)
class BackfillQueue:
    """The queue, the running jobs and the run times of a cluster.

    `chooser`: a function that chooses the nodes of a job. It is called for each job for which `choose_nodes`
    finds room. None to use the nodes of `choose_nodes`.
    """

    pool: GpuPool
    queue: list[TraceJob] = field(default_factory=list)
    running: dict[str, BackfilledJob] = field(default_factory=dict)
    run_times: RunTimeSamples = field(default_factory=RunTimeSamples)
    chooser: Chooser | None = None

    @property
    def gpus_per_node(self) -> int:
        return int(self.pool.free.shape[1])

    def end_job(self, job: str) -> BackfilledJob:
        """Remove a finished job from its GPUs, record its run time, and return it."""
        row = self.running.pop(job)
        self.pool.release(row.held)
        self.run_times.add_run_time(row.job.gpus, row.job.run_s)
        return row

    def start_ready_jobs(self, now_ms: int) -> list[BackfilledJob]:
        """Start the head of the queue as long as it fits, then backfill later jobs.

        Returns the started jobs, in order.
        """
        started = []
        while self.queue and (nodes := self._find_nodes(self.queue[0], self.pool.count)) is not None:
            started.append(self._start_job(self.queue.pop(0), nodes, now_ms))
        if len(self.queue) > 1 and bool((self.pool.count > 0).any()):
            started += self._backfill_jobs(now_ms)
        return started

    def _find_nodes(self, job: TraceJob, count: NDArray[np.int64]) -> list[int] | None:
        members, each = choose_gang_shape(job.gpus, self.gpus_per_node)
        nodes = choose_nodes(count, self.pool.rack, members, each)
        return nodes if nodes is None or self.chooser is None else self.chooser(job, count)

    def _start_job(self, job: TraceJob, nodes: list[int], now_ms: int) -> BackfilledJob:
        _, each = choose_gang_shape(job.gpus, self.gpus_per_node)
        end_ms = now_ms + int(job.run_s * 1000)
        row = BackfilledJob(job, now_ms, end_ms, self.run_times.estimate_p90_s(job.gpus), self.pool.occupy(nodes, each))
        self.running[job.job] = row
        return row

    def _backfill_jobs(self, now_ms: int) -> list[BackfilledJob]:
        shadow_ms, spare = self._find_reservation(self.queue[0], now_ms)
        started: list[BackfilledJob] = []
        waiting, hopeless = [self.queue[0]], set[int]()
        for job in self.queue[1:]:
            nodes = None
            if job.gpus not in hopeless:
                ends_before = now_ms + self.run_times.estimate_p90_s(job.gpus) * 1000 <= shadow_ms
                nodes = self._find_nodes(job, self.pool.count if ends_before else np.minimum(self.pool.count, spare))
            if nodes is None:
                hopeless.add(job.gpus)
                waiting.append(job)
                continue
            started.append(self._start_job(job, nodes, now_ms))
            if not ends_before:
                np.subtract.at(spare, nodes, choose_gang_shape(job.gpus, self.gpus_per_node)[1])
        self.queue = waiting
        return started

    def _find_reservation(self, head: TraceJob, now_ms: int) -> tuple[int, NDArray[np.int64]]:
        """Return when the head should fit, in Unix ms, and the GPUs (node,) that are then left free."""
        members, each = choose_gang_shape(head.gpus, self.gpus_per_node)
        count = self.pool.count.copy()
        missing = members - int((count // each).sum())
        for end_ms, row in sorted(
            ((row.estimate_end_ms(now_ms), row) for row in self.running.values()), key=_get_end_ms
        ):
            for node, gpus in row.held:
                missing += int(count[node] // each)
                count[node] += len(gpus)
                missing -= int(count[node] // each)
            if missing <= 0:
                np.subtract.at(count, choose_nodes(count, self.pool.rack, members, each) or [], each)
                return end_ms, count
        return now_ms, np.zeros_like(count)  # it can never fit: nothing may pass it


def _get_end_ms(pair: tuple[int, BackfilledJob]) -> int:
    return pair[0]
