"""SimulatedJobs: a simulated fleet whose jobs start and end. It yields training data for node risk."""

from collections.abc import Iterator
from typing import Literal, cast

import numpy as np

from fleetcast.fleet.events import Checkpoint, Failed, Finished, JobEvent, Phase, PhaseName, Started, Step, Submitted
from fleetcast.fleet.requests import Gang, RankPlacement
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.topology.load import parse_topology
from fleetcast.simulator.faults.faults import FaultSettings
from fleetcast.simulator.faults.magnitudes import FAULT_KINDS
from fleetcast.simulator.hardware.cluster import FleetSpec, SimulatedFleet
from fleetcast.simulator.hardware.workload import draw_job_profile
from fleetcast.training.replay.dataset import ExporterPage, LabelledFault

JOB_GPUS = (1, 2, 4, 8, 8, 16, 16, 32, 64)
MEDIAN_RUN_S = 2400.0
FULL = 0.9  # share of GPUs that jobs are started up to
STEP_GPUS = 8  # jobs from this size on report steps


def make_frequent_fault_settings() -> FaultSettings:
    """Return settings with faults that are more frequent and shorter than real ones, and with benign decoys.

    With these settings, a run of a few hours has many faults.
    """
    return FaultSettings(
        rates=dict.fromkeys(FAULT_KINDS, 400.0),  # per 1,000 node-days and kind
        median_s=dict.fromkeys(FAULT_KINDS, 2400.0),
        decoy_every_s=300.0,
        precursor_s=(300.0, 2400.0),
        only_busy=False,
    )


class SimulatedJobs:
    """A simulated fleet with jobs that start and end.

    A job starts if there is room, runs for a lognormal time, and fails if a fault kills it.
    """

    def __init__(self, seed: int, nodes: int, settings: FaultSettings | None = None) -> None:
        self.spec = FleetSpec(nodes=nodes)
        self.fleet = SimulatedFleet(self.spec, seed, settings or make_frequent_fault_settings())
        self.topology = Topology.build(parse_topology(self.spec.format_topology_toml()))
        self._rng = np.random.default_rng([seed, 11])
        self._ends_ms: dict[str, int] = {}
        self._ranks: dict[str, tuple[RankPlacement, ...]] = {}
        self._sequence: dict[str, int] = {}
        self._phases: dict[str, str] = {}
        self._began = 0

    def advance_to(self, now_ms: int) -> list[JobEvent]:
        """Advance the fleet to `now_ms`, and return the events of its jobs."""
        self.fleet.advance(now_ms)
        events: list[JobEvent] = []
        for job, _, node, message in self.fleet.pop_failed_jobs():
            sequence = self._draw_next_sequence(job)
            events.append(
                Failed(job=job, sequence=sequence, time_ms=now_ms, category="hardware", node=node, message=message)
            )
            self._drop_job(job)
        for job in [job for job, end_ms in self._ends_ms.items() if now_ms >= end_ms]:
            self.fleet.stop_job(job, now_ms)
            events.append(Finished(job=job, sequence=self._draw_next_sequence(job), time_ms=now_ms))
            self._drop_job(job)
        events += self._start_jobs(now_ms)
        return events + self._make_step_events(now_ms)

    def read_pages(self) -> Iterator[ExporterPage]:
        """Yield the present page of every exporter."""
        for node, exporter in self.fleet.list_targets():
            answers = self.fleet.is_answering(node, exporter)
            body = self.fleet.render_page(node, exporter) if answers else None
            yield ExporterPage(
                node, exporter, body, 0.02 + (self.fleet.get_delay_s(node) if exporter == "dcgm" else 0.0)
            )

    def list_faults(self) -> list[LabelledFault]:
        """Return the true faults so far, without benign decoys."""
        return [
            LabelledFault(row.kind, row.node, row.start_ms, row.end_ms, row.visible)
            for row in self.fleet.faults.list_records()
            if not row.benign
        ]

    def _make_phase_events(self, job: str, now_ms: int) -> list[JobEvent]:
        phase, before = self.fleet.get_phase(job), self._phases.get(job, "")
        if phase == before or not phase:
            return []
        self._phases[job] = phase
        events: list[JobEvent] = [
            Phase(job=job, sequence=self._draw_next_sequence(job), time_ms=now_ms, name=cast(PhaseName, phase))
        ]
        for at, edge in ((phase, "begin"), (before, "end")):
            if at == "checkpoint":
                edge = cast(Literal["begin", "end"], edge)
                events.append(Checkpoint(job=job, sequence=self._draw_next_sequence(job), time_ms=now_ms, edge=edge))
        return events

    def _draw_next_sequence(self, job: str) -> int:
        self._sequence[job] = self._sequence.get(job, -1) + 1
        return self._sequence[job]

    def _drop_job(self, job: str) -> None:
        self._ends_ms.pop(job, None)
        self._ranks.pop(job, None)
        self._phases.pop(job, None)

    def _start_jobs(self, now_ms: int) -> list[JobEvent]:
        events: list[JobEvent] = []
        slot = self.fleet.gangs.slot
        while (slot > 0).mean() < FULL:
            gpus = int(self._rng.choice(JOB_GPUS))
            ranks = self._find_room(gpus)
            if ranks is None:
                break
            self._began += 1
            job = f"job-{self._began:05d}"
            each = min(gpus, self.spec.gpus)
            profile = draw_job_profile(job, gpus)
            self.fleet.start_job(job, 1, ranks, profile, now_ms)
            self._ranks[job] = ranks
            self._ends_ms[job] = now_ms + int(MEDIAN_RUN_S * self._rng.lognormal(0.0, 0.8) * 1000)
            gang = Gang(len(ranks), len(ranks))
            sequence = self._draw_next_sequence(job)
            events.append(Submitted(job=job, sequence=sequence, time_ms=now_ms, gang=gang, gpus_per_node=each))
            events.append(Started(job=job, sequence=self._draw_next_sequence(job), time_ms=now_ms, ranks=ranks))
        return events

    def _find_room(self, gpus: int) -> tuple[RankPlacement, ...] | None:
        """Return free GPUs for a job as placements of its ranks, or None if there is no room.

        A large job gets whole nodes, a small one the fullest node with room.
        """
        free = self.fleet.gangs.slot == 0
        if gpus < self.spec.gpus:
            count = free.sum(axis=1)
            fits = np.flatnonzero(count >= gpus)
            if not len(fits):
                return None
            row = int(fits[np.argmin(count[fits])])
            picked = np.flatnonzero(free[row])[:gpus]
            return (RankPlacement(0, self.fleet.names[row], tuple(picked.tolist())),)
        whole = np.flatnonzero(free.all(axis=1))
        members = gpus // self.spec.gpus
        if len(whole) < members:
            return None
        rows = self._rng.choice(whole, members, replace=False).tolist()
        every = tuple(range(self.spec.gpus))
        return tuple(RankPlacement(rank, self.fleet.names[row], every) for rank, row in enumerate(rows))

    def _make_step_events(self, now_ms: int) -> list[JobEvent]:
        """Return phases, checkpoints and steps of the larger jobs, as a launcher reports them."""
        events: list[JobEvent] = []
        for job, ranks in self._ranks.items():
            if sum(len(rank.gpus) for rank in ranks) < STEP_GPUS:
                continue
            events += self._make_phase_events(job, now_ms)
            seconds = self.fleet.draw_step_time_s(job)
            if np.isfinite(seconds):
                sequence = self._draw_next_sequence(job)
                events.append(
                    Step(job=job, sequence=sequence, time_ms=now_ms, step=sequence, duration_s=round(seconds, 4))
                )
        return events
