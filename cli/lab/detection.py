"""Measurement of the effects of faults, and of how fast the service's own code detects them.

A small simulated fleet runs a gang of two nodes for every fault and decoy. Its exporter pages pass through
the decoder, the store, the features and the scores. `fleetcast simulate day` draws from the result.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fleetcast.fleet.events import Failed, JobEvent, Started, Submitted
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.topology.load import parse_toml_nodes
from fleetcast.models.risk.scores import RISK_KINDS, RiskScores
from fleetcast.simulator.faults.detection import INNOCENT, DetectionTable, Sighting
from fleetcast.simulator.faults.faults import FaultSettings
from fleetcast.simulator.faults.magnitudes import DECOY_KINDS, FAULT_KINDS
from fleetcast.simulator.hardware.cluster import FleetSpec, SimulatedFleet
from fleetcast.simulator.hardware.workload import WorkloadProfile, draw_profile
from fleetcast.training.replay.dataset import ExporterPage, PageObserver

COPIES = 3
DECOY_COPIES = 2
EPOCH_MS = 1_700_000_000_000
SCRAPE_MS = 15_000
STEP_MS = 3_000  # the fleet moves in steps that a short link flap does not slip through
TICK_S = 10.0  # a flag is public at the next tick of the pipeline, at the latest this much later
WARM_UP_ROUNDS = 20
WATCH_ROUNDS = 48
JOB_AGE_MS = 900_000
WATCHDOG_S = 600.0
QUIET_CODES = frozenset({"none", "watch"})
FAIL, SLOW = RISK_KINDS.index("fail"), RISK_KINDS.index("slow")


@dataclass(slots=True)
class _Trial:
    """One trial: a gang of two nodes. The first node has the fault. Times are in ms of fleet time."""

    kind: str
    job: str
    nodes: tuple[str, str]
    profile: WorkloadProfile
    start_ms: int
    before: list[float] = field(default_factory=list)  # step time over the usual one
    during: list[float] = field(default_factory=list)
    hangs: bool = False
    killed_ms: int | None = None
    flagged_ms: list[int] = field(default_factory=list)
    innocent_ms: list[int] = field(default_factory=list)
    p_fail: float = 0.0
    p_slow: float = 0.0

    def make_sighting(self) -> Sighting:
        usual = float(np.mean(self.before)) if self.before else 1.0
        ratio = float(np.mean(self.during)) / usual if self.during else 1.0
        return Sighting(
            self.kind,
            slowdown=round(max(1.0, ratio), 3) if ratio > 1.03 else 1.0,
            kills_s=math.inf if self.killed_ms is None else (self.killed_ms - self.start_ms) / 1000,
            hangs=self.hangs,
            delay_s=(self.flagged_ms[0] - self.start_ms) / 1000 + TICK_S if self.flagged_ms else math.inf,
            p_fail=self.p_fail if self.flagged_ms else math.nan,
            p_slow=self.p_slow if self.flagged_ms else math.nan,
        )


@functools.lru_cache(maxsize=4)
def measure_detection(seed: int, copies: int = COPIES) -> DetectionTable:
    """Return the effects and the detection of every kind of fault, measured with one seed.

    The measurement takes some seconds of CPU. The process caches the result.
    """
    bench = _TrialFleet(seed, copies)
    for number in range(WARM_UP_ROUNDS + WATCH_ROUNDS):
        bench.run_round(EPOCH_MS + (number + 1) * SCRAPE_MS)
    return bench.make_table()


class _TrialFleet:
    """The small fleet with one gang per trial, and the pipeline that observes it."""

    def __init__(self, seed: int, copies: int) -> None:
        kinds = [*(FAULT_KINDS * copies), *(DECOY_KINDS * DECOY_COPIES)]
        spec = FleetSpec(nodes=2 * len(kinds), rack_nodes=12)
        self.rng = np.random.default_rng([seed, 7])
        self.fleet = SimulatedFleet(spec, seed, FaultSettings(watchdog_s=WATCHDOG_S))
        self.topology = Topology.build(parse_toml_nodes(spec.format_topology_toml()))
        self.observer = PageObserver(self.topology, SCRAPE_MS / 1000)
        self.events: list[JobEvent] = []  # since the last round
        self.trials = [self._start_trial(number, kind, spec) for number, kind in enumerate(kinds)]
        self.end_ms = EPOCH_MS + (WARM_UP_ROUNDS + WATCH_ROUNDS) * SCRAPE_MS

    def _start_trial(self, number: int, kind: str, spec: FleetSpec) -> _Trial:
        nodes = spec.names[2 * number], spec.names[2 * number + 1]
        profile = draw_profile(self.rng, 16)
        ranks = tuple(RankPlacement(rank, node, tuple(range(spec.gpus))) for rank, node in enumerate(nodes))
        job, began_ms = f"trial-{number:02d}", EPOCH_MS - JOB_AGE_MS
        self.fleet.start_job(job, 1, ranks, profile, began_ms)
        self.events.append(Submitted(job=job, sequence=0, time_ms=began_ms, gang=2, gpus_per_node=spec.gpus))
        self.events.append(Started(job=job, sequence=1, time_ms=began_ms, ranks=ranks))
        start_ms = EPOCH_MS + WARM_UP_ROUNDS * SCRAPE_MS + int(self.rng.integers(SCRAPE_MS))
        gpu = int(self.rng.integers(profile.ib_ports))
        self.fleet.faults.inject(kind, nodes[0], gpu, start_ms)
        return _Trial(kind, job, nodes, profile, start_ms)

    def run_round(self, now_ms: int) -> None:
        """Advance the fleet, scrape every page, and score."""
        for step_ms in range(now_ms - SCRAPE_MS + STEP_MS, now_ms + 1, STEP_MS):
            self.fleet.advance(step_ms)
            self._end_failed_jobs(step_ms)
        events, self.events = self.events, []
        risk = self.observer.watch.score(self.observer.apply_pages(self._read_pages(), events, now_ms)).risk
        for trial in self.trials:
            self._record_trial(trial, risk, now_ms)

    def _end_failed_jobs(self, now_ms: int) -> None:
        for job, _, node, message in self.fleet.pop_failed_jobs():
            trial = next(trial for trial in self.trials if trial.job == job)
            trial.killed_ms = now_ms
            self.events.append(
                Failed(job=job, sequence=2, time_ms=now_ms, category="unknown", node=node, message=message)
            )

    def _read_pages(self) -> Iterator[ExporterPage]:
        """Yield the present page of every exporter."""
        for node, exporter in self.fleet.list_targets():
            body = self.fleet.render_page(node, exporter) if self.fleet.is_answering(node, exporter) else None
            late_s = self.fleet.get_delay_s(node) + float(self.rng.uniform(0.01, 0.03)) if exporter == "dcgm" else 0.02
            yield ExporterPage(node, exporter, body, late_s)

    def _record_trial(self, trial: _Trial, risk: RiskScores, now_ms: int) -> None:
        step_s = self.fleet.draw_step_time_s(trial.job)
        began = now_ms > trial.start_ms
        trial.hangs = trial.hangs or (began and step_s == math.inf)
        if math.isfinite(step_s) and self.fleet.get_phase(trial.job) == "steady":
            (trial.during if began else trial.before).append(step_s / trial.profile.step_s)
        bad, innocent = (self.observer.watch.entities.find_or_add_node(name) for name in trial.nodes)
        if began and self._is_flagged(risk, bad):
            trial.flagged_ms.append(now_ms)
            trial.p_fail = max(trial.p_fail, float(risk.values[FAIL, 0, bad]))
            trial.p_slow = max(trial.p_slow, float(risk.values[SLOW, 0, bad]))
        if self._is_flagged(risk, innocent):
            trial.innocent_ms.append(now_ms)

    def _is_flagged(self, risk: RiskScores, row: int) -> bool:
        action = risk.actions.get(row)
        return action is not None and action.code not in QUIET_CODES

    def make_table(self) -> DetectionTable:
        faults = {kind: tuple(row.make_sighting() for row in self._find_trials(kind)) for kind in FAULT_KINDS}
        decoys = {
            kind: tuple(_count_flagged_s(row.flagged_ms) for row in self._find_trials(kind)) for kind in DECOY_KINDS
        }
        innocent = tuple(_count_flagged_s(row.innocent_ms) for row in self.trials if row.kind in FAULT_KINDS)
        return DetectionTable(faults, decoys | {INNOCENT: innocent})

    def _find_trials(self, kind: str) -> list[_Trial]:
        return [trial for trial in self.trials if trial.kind == kind]


def _count_flagged_s(flagged_ms: list[int]) -> float:
    return len(flagged_ms) * SCRAPE_MS / 1000
