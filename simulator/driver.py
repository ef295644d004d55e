"""The live driver. It acts for all owners of jobs, and uses the product only over HTTP.

First it sends the past (history, running jobs, queue). Then, in fleet time, it submits the trace's jobs
and starts those that the engine places. It reports steps, phases and checkpoints, ends jobs, and resubmits
killed jobs from their checkpoints.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, get_args

import msgspec

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.events import FailureCategory, NodeEvent, StepParts
from fleetcast.fleet.requests import RankPlacement
from fleetcast.simulator.days.replay import TraceReplay, make_opening_events
from fleetcast.simulator.days.traces import TraceJob
from fleetcast.simulator.hardware.workload import WorkloadProfile
from fleetcast.simulator.live_job import LiveJob
from fleetcast.simulator.outbox import Outbox, ProductApi

logger = logging.getLogger(__name__)

TICK_S = 0.25  # wall
POLL_S = 0.5  # wall
INGESTION_POLL_S, INGESTION_LIMIT_S = 0.1, 60.0  # wall
HISTORY_CHUNK = 2000
VISITOR_RUN_S = 1800.0
ONGOING_SEQUENCE = 2  # submitted and started came before
BROKEN_S = 900.0  # of fleet time: so long a job with an agent waits for other nodes
_CATEGORIES = frozenset(get_args(FailureCategory))


class JobHost(Protocol):
    """The interface of the simulated fleet that the driver uses."""

    def start_job(
        self, job: str, attempt: int, ranks: Sequence[RankPlacement], profile: WorkloadProfile, now_ms: int
    ) -> None: ...
    def stop_job(self, job: str, now_ms: int) -> object: ...
    def draw_step_time_s(self, job: str) -> float: ...
    def split_step(self, job: str, step_s: float) -> StepParts | None: ...
    def get_phase(self, job: str) -> str: ...
    def pop_failed_jobs(self) -> list[tuple[str, str, str, str]]: ...
    def is_answering(self, node: str, exporter: str) -> bool: ...


@dataclass(slots=True)
class Counters:
    """Counts of jobs since the driver's start. `running` and `queued` are current numbers."""

    submitted: int = 0
    placed: int = 0
    finished: int = 0
    failed: int = 0
    refused: int = 0
    preempted: int = 0
    resized: int = 0
    running: int = 0
    queued: int = 0


@dataclass(slots=True)
class Driver:
    """The driver of a simulated fleet.

    `arrivals`: the jobs after the start, by time of submission. `profile_of`: a function that returns the load of
    a job on its GPUs. `can_wait`: whether a job whose node was lost waits for another one, before it fails.
    """

    fleet: JobHost
    api: ProductApi
    clock: Clock
    replay: TraceReplay
    arrivals: Iterable[TraceJob]
    profile_of: Callable[[TraceJob], WorkloadProfile]
    gpus_per_node: int = 8
    can_wait: Callable[[LiveJob], bool] = lambda live: False
    counters: Counters = field(default_factory=Counters)
    running: dict[str, LiveJob] = field(default_factory=dict)
    waiting: dict[str, LiveJob] = field(default_factory=dict)  # by request id
    live: asyncio.Event = field(default_factory=asyncio.Event)
    outbox: Outbox = field(init=False)
    _requests: "asyncio.Queue[LiveJob]" = field(default_factory=asyncio.Queue)
    _decided: dict[str, "asyncio.Future[dict[str, Any]]"] = field(default_factory=dict)
    _node_sequence: int = 0
    _lost: set[str] = field(default_factory=set)
    _cursor: int = 0
    _ahead: Iterator[TraceJob] = field(init=False)
    _next: TraceJob | None = field(init=False)

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.api)
        self._ahead = iter(self.arrivals)
        self._next = next(self._ahead, None)

    def start_ongoing_jobs(self) -> None:
        """Start the jobs that the simulated past has left running, with their age."""
        for row in self.replay.ongoing:
            live = self._make_live_job(row.job, row.remaining_s)
            live.sequence, live.last_ms = ONGOING_SEQUENCE, self.replay.start_ms
            live.ranks = row.ranks
            self.fleet.start_job(live.name, 1, row.ranks, live.profile, row.started_ms)
            self.running[live.name] = live
        self.counters.running = len(self.running)

    async def run(self) -> None:
        """Send the past, then run live until the task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.outbox.run())
            await self._send_past_events()
            tasks.create_task(self._post_requests())
            await self._requests.join()
            self.live.set()
            tasks.create_task(self._poll_decisions())
            tasks.create_task(self._advance_forever())

    async def _send_past_events(self) -> None:
        await self.api.wait_until_ready("/healthz")
        history = self.replay.history
        for begin in range(0, len(history), HISTORY_CHUNK):
            await self.outbox.put(*history[begin : begin + HISTORY_CHUNK])
        for row in self.replay.ongoing:
            live = self.running[row.job.job]
            facts = live.make_submission_facts()
            events = make_opening_events(
                row.job, self.gpus_per_node, started_ms=row.started_ms, ranks=row.ranks, **facts
            )
            await self.outbox.put(*events, *live.make_past_checkpoints(row.started_ms, self.replay.start_ms))
        await self.outbox.wait_until_empty()
        logger.info("sent %d events of the past", self.outbox.posted)
        await self.api.wait_until_ready("/readyz")
        await self._wait_for_running_jobs()
        for job in self.replay.queue:
            await self._submit(self._make_live_job(job, job.run_s), job.submit_ms)

    async def _wait_for_running_jobs(self) -> None:
        """Wait until the board shows the running jobs. Otherwise the queue would get their GPUs.

        The product acknowledges events as soon as they are on disk, before the board shows them.
        """
        began = time.monotonic()
        while time.monotonic() - began < INGESTION_LIMIT_S:
            fleet = await self.api.get("/v1/fleet") or {}
            if fleet.get("gpus", {}).get("running", -1) >= self.replay.running_gpus:
                return
            await asyncio.sleep(INGESTION_POLL_S)
        logger.warning("after %.0f s the product does not know every running job, going on", INGESTION_LIMIT_S)

    def _make_live_job(self, job: TraceJob, remaining_s: float) -> LiveJob:
        return LiveJob(job, self.profile_of(job), remaining_s=remaining_s, safe_s=remaining_s)

    async def submit(self, live: LiveJob) -> "asyncio.Future[dict[str, Any]]":
        """Submit a job. The returned future gets the engine's decision."""
        future = self._decided[live.request_id] = asyncio.get_running_loop().create_future()
        await self._submit(live, self.clock.now_ms())
        return future

    async def _submit(self, live: LiveJob, time_ms: int) -> None:
        self.waiting[live.request_id] = live
        self.counters.submitted += 1
        await self.outbox.put(*live.make_submission_events(time_ms, self.gpus_per_node))
        self._requests.put_nowait(live)

    async def _post_requests(self) -> None:
        while True:
            live = await self._requests.get()
            if not await self.api.enqueue(live.make_request(self.gpus_per_node)):
                self._drop_request(live.request_id)
            self._requests.task_done()

    def _drop_request(self, request_id: str) -> None:
        """Forget a request that the engine will never place."""
        if self.waiting.pop(request_id, None) is not None:
            self.counters.refused += 1
        self._decided.pop(request_id, None)

    # Decisions

    async def _poll_decisions(self) -> None:
        while True:
            answer = await self.api.get(f"/v1/placements?after={self._cursor}&limit=500") or {}
            for row in answer.get("rows", ()):
                await self._apply_decision(row)
                self._cursor = max(self._cursor, int(row["cursor"]))
            await asyncio.sleep(POLL_S)

    async def _apply_decision(self, row: dict[str, Any]) -> None:
        request_id = row["request_id"]
        future = self._decided.pop(request_id, None)
        if future is not None and not future.done():
            future.set_result(row)
        if row["outcome"] == "refused":
            self._drop_request(request_id)
        if row["outcome"] != "placed":
            return
        now_ms = self.clock.now_ms()
        expired = 0 < row.get("expires_ms", 0) <= now_ms
        ranks = msgspec.convert(row["ranks"], tuple[RankPlacement, ...])
        live = self.waiting.pop(request_id, None)
        if live is not None and expired:
            await self.resubmit_job(live)
        elif live is not None:
            await self._start_job(live, ranks, now_ms)
        elif not expired and (row.get("job") or request_id) not in self.running:
            await self._start_visitor_job(row, ranks, now_ms)

    async def _start_visitor_job(self, row: dict[str, Any], ranks: tuple[RankPlacement, ...], now_ms: int) -> None:
        """Start a job that another user of the product submitted. It runs for half an hour."""
        gpus = max(1, sum(len(rank.gpus) for rank in ranks))
        job = TraceJob(row.get("job") or row["request_id"], now_ms, VISITOR_RUN_S, gpus, "", "training")
        live = self._make_live_job(job, VISITOR_RUN_S)
        live.attempt = int(row.get("attempt", 1))
        await self.outbox.put(*live.make_submission_events(now_ms, self.gpus_per_node))
        await self._start_job(live, ranks, now_ms)

    async def _start_job(self, live: LiveJob, ranks: tuple[RankPlacement, ...], now_ms: int) -> None:
        self.fleet.start_job(live.name, live.attempt, ranks, live.profile, now_ms)
        self.running[live.name] = live
        self.counters.placed += 1
        await self.outbox.put(live.start_on_ranks(ranks, now_ms))

    # Life of running jobs

    async def _advance_forever(self) -> None:
        while True:
            await self.advance(self.clock.now_ms())
            await asyncio.sleep(TICK_S)

    async def advance(self, now_ms: int) -> None:
        """Submit jobs that have arrived, advance running jobs to `now_ms`, and handle failed jobs."""
        while self._next is not None and self._next.submit_ms <= now_ms:
            await self._submit(self._make_live_job(self._next, self._next.run_s), self._next.submit_ms)
            self._next = next(self._ahead, None)
        for job, category, node, message in self.fleet.pop_failed_jobs():
            await self._handle_job_failure(job, category, node, message, now_ms)
        await self._report_returned_nodes(now_ms)
        for live in list(self.running.values()):
            await self._advance_job(live, now_ms)
        self.counters.running, self.counters.queued = len(self.running), len(self.waiting)

    async def _advance_job(self, live: LiveJob, now_ms: int) -> None:
        if live.broken_ms:
            live.last_ms = now_ms
            if now_ms - live.broken_ms >= BROKEN_S * 1000:
                await self.fail_job(live, "node_lost", "", "no other node came in time")
                await self.resubmit_job(live)
            return
        phase, step_s = self.fleet.get_phase(live.name), self.fleet.draw_step_time_s(live.name)
        end_ms = live.advance_work(phase, step_s, now_ms)
        if end_ms is None:
            events = live.make_due_events(phase, step_s, now_ms, self.fleet.split_step(live.name, step_s))
            if events:
                await self.outbox.put(*events)
            return
        self._stop_job(live, now_ms)
        self.counters.finished += 1
        await self.outbox.put(live.make_finished_event(end_ms))

    def _stop_job(self, live: LiveJob, now_ms: int) -> None:
        self.fleet.stop_job(live.name, now_ms)
        self.running.pop(live.name, None)

    async def _handle_job_failure(self, job: str, category: str, node: str, message: str, now_ms: int) -> None:
        live = self.running.get(job)
        if live is None:
            return
        waits = category == "node_lost" and self.can_wait(live)
        if waits:
            live.broken_ms = now_ms
        else:
            await self.fail_job(live, category, node, message)
        if category == "node_lost" and node not in self._lost:
            self._lost.add(node)
            await self.outbox.put(self._make_node_event(node, "lost", message, now_ms))
        if not waits:
            await self.resubmit_job(live)

    async def _report_returned_nodes(self, now_ms: int) -> None:
        for node in [name for name in self._lost if self.fleet.is_answering(name, "dcgm")]:
            self._lost.remove(node)
            await self.outbox.put(self._make_node_event(node, "returned", "answers again", now_ms))

    async def fail_job(self, live: LiveJob, category: str, node: str, message: str) -> None:
        """Stop a running job, and report it as failed."""
        now_ms = self.clock.now_ms()
        self._stop_job(live, now_ms)
        self.counters.failed += 1
        await self.outbox.put(live.make_failed_event(_normalise_category(category), node, message, now_ms))

    async def preempt_job(self, live: LiveJob, by: str, now_ms: int) -> None:
        """Stop a running job for a request, and submit its next attempt."""
        self.fleet.stop_job(live.name, now_ms)
        await self.report_preemption(live, by, now_ms)
        await self.resubmit_job(live)

    async def report_preemption(self, live: LiveJob, by: str, now_ms: int) -> None:
        """Report a running job as stopped for a request."""
        self.running.pop(live.name, None)
        self.counters.preempted += 1
        await self.outbox.put(live.make_preempted_event(by, now_ms))

    async def resize_job(self, live: LiveJob, ranks: tuple[RankPlacement, ...], pause_s: float, now_ms: int) -> None:
        """Continue a running job on other ranks."""
        event = live.resize_on_ranks(ranks, pause_s, now_ms)
        self.fleet.start_job(live.name, live.attempt, ranks, live.profile, now_ms)
        self.counters.resized += 1
        await self.outbox.put(event)

    async def resubmit_job(self, live: LiveJob) -> None:
        """Submit the next attempt of a job that has stopped."""
        await self._submit(live.make_next_attempt(), self.clock.now_ms())

    def _make_node_event(self, node: str, type: Literal["lost", "returned"], message: str, now_ms: int) -> NodeEvent:
        """Return a node event as a site's own health check would send it."""
        self._node_sequence += 1
        return NodeEvent(
            node=node, source="site", sequence=self._node_sequence, time_ms=now_ms, type=type, message=message
        )

    def make_status(self) -> dict[str, Any]:
        """Return the counters, for the status file."""
        return {
            "jobs": asdict(self.counters),
            "events": {"posted": self.outbox.posted, "rejected": self.outbox.rejected, "retries": self.api.retries},
        }


def _normalise_category(text: str) -> FailureCategory:
    return text if text in _CATEGORIES else "unknown"  # type: ignore[return-value]
