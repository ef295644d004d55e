"""WaitingFleet: a simulated fleet whose jobs wait, to measure how often start times prove right.

A manual clock advances the fleet time. A run needs minutes of CPU. Jobs of the trace arrive, wait,
start and end. The product's own pipeline folds their events. Its own placer places them, and samples
possible futures for the start times. There is no telemetry, and there are no faults, because only the
queue is evaluated.
"""

import heapq
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.cli.lab.first_answers import FirstAnswerTally
from fleetcast.cli.lab.obedient_agents import ObedientAgents
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.events import Finished, JobEvent
from fleetcast.fleet.requests import Decision
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.ingest.topology.load import load_topology
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.service.answers.placements import StartTimesRecord
from fleetcast.service.config import Config, PlacerConfig
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.pipeline.run_times.forecasts import RunForecasts
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.role import QueueWorker
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.placer.start_times import StartTimeSampler
from fleetcast.simulator.days.replay import TraceReplay, fast_forward_trace, make_opening_events
from fleetcast.simulator.days.traces import JobTrace, TraceJob, load_trace
from fleetcast.simulator.hardware.cluster import FleetSpec
from fleetcast.simulator.hardware.workload import draw_job_profile
from fleetcast.simulator.live_job import LiveJob
from fleetcast.simulator.teams import assign_teams, format_queues_toml

STEP_S, TICK_S = 15.0, 60.0  # at least every TICK_S there is a board; after a change, within STEP_S
DEMAND_MS = 1_800_000
DEMO_NODES = 133
WEEKS = 1  # of history that the pipeline is told of
CALLER = "simulation"
RESTART_S = 60.0  # that a stopped job needs to load its checkpoint


class WaitingFleet:
    """A fleet with the jobs of one seed, our pipeline and our placer, in one thread.

    Nodes have eight GPUs, by default 133 of them. teams: whether three teams share the fleet, as in the demo.
    Otherwise all jobs wait in one queue. jobs: a sentence that names the source of the jobs. is_cold: whether
    the pipeline receives no history, as on the first day of a site. reclaims: whether jobs stop for teams that are
    owed GPUs. The circuit breaker then never stays open. first: the record of first answers.
    """

    def __init__(
        self, folder: Path, trace: JobTrace, seed: int, spec: FleetSpec, teams: bool = False, is_cold: bool = False,
        reclaims: bool = False,
    ) -> None:  # fmt: skip
        queues = folder / "queues.toml"
        if teams:
            trace = assign_teams(trace)
            text = format_queues_toml(spec.nodes * spec.gpus, reclaim="act" if reclaims else "off")
            queues.write_text(text, encoding="utf-8")
        spec.write_topology(folder / "topology.toml")
        topology = load_topology(folder / "topology.toml")
        replay = fast_forward_trace(trace, topology, weeks=WEEKS)
        self.jobs = trace.note
        placer = PlacerConfig(queues=str(queues) if teams else "", taken_queue_share=1.0, taken_fleet_share=1.0)
        config = Config(state=str(folder), placer=placer)
        self._seed, self._gpus = seed, spec.gpus
        self.clock = ManualClock(replay.start_ms)
        self._pipeline = Pipeline(config, self.clock, topology, lambda _: [MemorySource()])
        self.service = PlacementService(config, self.clock, Ledger(config.ledger), PlacerMetrics())
        self._worker, self._starts = QueueWorker(self.service), StartTimeSampler(self.service)
        self.agents = ObedientAgents(self.service.actions, self.service.executors) if reclaims else None
        self._ahead = [*replay.queue, *trace.select_jobs(trace.submit_ms >= replay.start_ms)][::-1]
        self._waiting: dict[str, LiveJob] = {}
        self._next_attempts: set[str] = set()  # requests of jobs that have stopped
        self._ends: list[tuple[int, str, LiveJob]] = []
        self._cursor = self._tick_ms = self._demand_ms = self._measure_ms = 0
        self.first = FirstAnswerTally()
        self._replay_past(replace(replay, history=()) if is_cold else replay)

    async def run_for(self, seconds: float, warm_up_s: float = 0.0) -> StartTimesRecord:
        """Simulate the fleet for some seconds, and return how often the issued start times proved right.

        warm_up_s: the seconds before that, in which no start time is issued.
        """
        self._measure_ms = self.clock.now_ms() + round(warm_up_s * 1000)
        until_ms = self._measure_ms + round(seconds * 1000)
        while self.clock.now_ms() < until_ms:
            await self._advance_to(self.clock.now_ms())
            self.clock.advance(STEP_S)
        self.service.ledger.close()
        return self._starts.make_queue_answer([]).record

    def make_kind_summary(self) -> dict[str, dict[str, Any]]:
        """Return kind of request → the accuracy of first answers.

        `payer`: requests for which jobs stopped. `stopped`: the next attempts of these jobs.
        """
        payers = self.agents.payers if self.agents is not None else set[str]()
        kinds = dict.fromkeys(self._next_attempts, "stopped") | dict.fromkeys(payers, "payer")
        return self.first.summarize_kinds(kinds, self.clock.now_ms())

    def _replay_past(self, replay: TraceReplay) -> None:
        self._fold_events(*replay.history)
        for row in replay.ongoing:
            live = self._make_live_job(row.job)
            live.sequence = 2
            self._fold_events(*make_opening_events(row.job, self._gpus, started_ms=row.started_ms, ranks=row.ranks))
            heapq.heappush(self._ends, (replay.start_ms + round(row.remaining_s * 1000), live.name, live))

    def _fold_events(self, *events: JobEvent) -> None:
        self._pipeline.apply_batch(Batch(events=events))

    def _make_live_job(self, job: TraceJob) -> LiveJob:
        return LiveJob(job, draw_job_profile(job.job, job.gpus, job.class_, seed=self._seed), job.run_s, job.run_s)

    async def _advance_to(self, now_ms: int) -> None:
        changes = self._end_jobs(now_ms) + self._stop_jobs(now_ms) + self._submit_jobs(now_ms)
        if changes == 0 and now_ms < self._tick_ms:
            return
        state = self._pipeline.state
        await self._pipeline.capabilities[RunForecasts].forecast(state)
        if now_ms >= self._demand_ms:
            self._demand_ms = now_ms + DEMAND_MS
            await self._pipeline.capabilities[DemandForecasts].forecast(state)
        await self._pipeline.tick()
        await self._worker.run_due_pass()
        self._tick_ms = now_ms if self._start_jobs(now_ms) else now_ms + round(TICK_S * 1000)
        if now_ms < self._measure_ms:
            return
        await self._starts.refresh()
        waiting = {name: live.job.submit_ms for name, live in self._waiting.items()}
        self.first.record_answers(waiting, self.service.backlog.starts, now_ms)

    def _end_jobs(self, now_ms: int) -> int:
        ended = 0
        while self._ends and self._ends[0][0] <= now_ms:
            end_ms, _, live = heapq.heappop(self._ends)
            self._fold_events(live.make_next_event(Finished, end_ms))
            ended += 1
        return ended

    def _stop_jobs(self, now_ms: int) -> int:
        """Stop the jobs whose agents have written a checkpoint for an action, and submit their next attempts."""
        if self.agents is None:
            return 0
        self.service.actions.reset_breaker(now_ms, CALLER)
        running = {live.name: (end_ms, live) for end_ms, _, live in self._ends}
        stopped = self.agents.carry_out_stops([live for _, live in running.values()], now_ms)
        for live in stopped:
            self._fold_events(live.make_preempted_event("placer", now_ms))
            live.safe_s = (running.pop(live.name)[0] - now_ms) / 1000
            following = live.make_next_attempt()
            following.job = replace(live.job, submit_ms=now_ms, run_s=live.safe_s + RESTART_S)
            self._next_attempts.add(following.request_id)
            self._submit_job(following)
        if stopped:
            self._ends = [row for row in self._ends if row[1] in running]
            heapq.heapify(self._ends)
        return len(stopped)

    def _submit_jobs(self, now_ms: int) -> int:
        came = 0
        while self._ahead and self._ahead[-1].submit_ms <= now_ms:
            self._submit_job(self._make_live_job(self._ahead.pop()))
            came += 1
        return came

    def _submit_job(self, live: LiveJob) -> None:
        try:
            self.service.enqueue(live.make_request(self._gpus), CALLER)
        except RequestError:  # larger than its queue may ever be
            return
        self._fold_events(*live.make_submission_events(live.job.submit_ms, self._gpus))
        self._waiting[live.request_id] = live

    def _start_jobs(self, now_ms: int) -> int:
        rows = self.service.ledger.read_decisions_after(self._cursor, 1000)
        for row in rows:
            self._cursor = row.cursor
            decision = msgspec.json.decode(row.reply, type=Decision)
            live = self._waiting.pop(row.request_id, None)
            if live is not None and decision.outcome == "placed":
                self._fold_events(live.start_on_ranks(decision.ranks, now_ms))
                self.first.record_start(row.request_id, live.job.submit_ms, now_ms)
                heapq.heappush(self._ends, (now_ms + round(live.job.run_s * 1000), live.name, live))
        return len(rows)


def make_waiting_fleet(
    folder: Path, data: Path, seed: int, at: str, now_ms: int, teams: bool = False, *,
    nodes: int = DEMO_NODES, hours: float = 0.0, is_cold: bool = False, reclaims: bool = False,
) -> WaitingFleet:  # fmt: skip
    """Build the waiting fleet from the jobs of `fleetcast demo`. Raises ValueError if `at` is not a time.

    hours: for how long a fleet without history has more demand than GPUs.
    """
    spec = FleetSpec(nodes=nodes)
    trace = load_trace(
        data,
        nodes=spec.nodes,
        gpus_per_node=spec.gpus,
        now_ms=now_ms,
        at=at,
        seed=seed,
        rush_h=math.ceil(hours) if is_cold else 0,
    )
    return WaitingFleet(folder, trace, seed, spec, teams, is_cold, reclaims)
