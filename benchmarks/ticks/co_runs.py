"""The part of a tick that observes which jobs share hardware, and how their paces change.

There are JOBS running jobs. A tenth of them share GPUs with another job. Half are gangs of two nodes that share
adapters and rails with others. The rest have single GPUs below common PCIe switches. Each job has
MAX_STEPS steps.

    tick     no job is due, because a job's steps are evaluated only once a minute
    minute   every job is due
    change   one job in fifty ended, and as many began
    learn    the speeds are learned from the largest number of stored co-runs, all on one kind of hardware

All runs use one process and one core. `python -m fleetcast.benchmarks.ticks.working_tick` measures the rest of a
tick, and the board sections about co-runs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import measure
from fleetcast.features.co_runs import MOST_CO_RUNS, POLL_MS, CoRuns
from fleetcast.features.sharing import Wiring
from fleetcast.fleet.events import Started, Step, StepParts, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import Device, Level, NodeSpec, Topology
from fleetcast.models.jobs.interference import LOADS, Pairs, fit_residuals

JOBS = 2_500
GPUS_PER_NODE = 8
REPEATS = 5
MAX_STEPS = 16
STEP_MS = 1_000
T0 = 1_789_000_000_000


def run(sizes: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """Yield one record for each case. The size of a fleet does not matter here."""
    fleet = _Fleet()
    for name, work in (("tick", fleet.run_tick), ("minute", fleet.run_minute), ("change", fleet.replace_jobs)):
        yield measure("co_runs", name, {"jobs": JOBS}, work, "ms", repeats=REPEATS)
    pairs, residual = _draw_co_runs(MOST_CO_RUNS)

    def learn_once() -> int:
        return len(fit_residuals(pairs, residual).errors)

    yield measure("co_runs", "learn", {"co_runs": MOST_CO_RUNS}, learn_once, "ms", repeats=REPEATS)


class _Fleet:
    """A fleet of running jobs, and the observer of their co-runs."""

    def __init__(self) -> None:
        self.table, self.co_runs, self.now_ms = JobTable(), CoRuns(), T0
        self.nodes, self.begun = JOBS // 2, 0
        switches = tuple(Device(f"ib{n}", (2 * n, 2 * n + 1), n) for n in range(GPUS_PER_NODE // 2))
        domains = [{Level.RAIL_GROUP: f"rg{row // 32}"} for row in range(self.nodes)]
        nodes = [NodeSpec(f"n{row}", GPUS_PER_NODE, domains=of, devices=switches) for row, of in enumerate(domains)]
        self.wiring = Wiring(Topology.build(nodes))
        for _ in range(JOBS):
            self._begin_job()
        self.running = self.table.list_running()
        self._observe_co_runs()
        self.now_ms += MAX_STEPS * STEP_MS
        self._observe_co_runs()

    def run_tick(self) -> int:
        self.now_ms += 1
        return self._observe_co_runs()

    def run_minute(self) -> int:
        self.now_ms += POLL_MS
        return self._observe_co_runs()

    def replace_jobs(self) -> int:
        """Replace some running jobs with new ones, in the list of running jobs only.

        The old jobs get no end events, because the benchmark `events` measures the cost of events.
        """
        few = JOBS // 50
        for _ in range(few):
            self._begin_job()
        begun = self.table.list_running()[-few:]
        self.running = [*self.running[few:], *begun]
        return self._observe_co_runs()

    def _observe_co_runs(self) -> int:
        loads = np.full((len(self.running), len(LOADS)), 0.5)
        self.co_runs.observe(self.running, self.co_runs.keys_of(self.running), (), loads, self.now_ms, self.wiring)
        assert len(self.running) == JOBS
        return len(self.running)

    def _begin_job(self) -> JobAttempt:
        number, self.begun = self.begun, self.begun + 1
        job, place = f"j{number}", number - number % 10 if number % 10 == 1 else number  # two of ten share a GPU
        node, gpu = place % self.nodes, place // self.nodes % 4
        ranks: tuple[RankPlacement, ...] = (RankPlacement(0, f"n{node}", (gpu,)),)
        if number % 2:
            ranks += (RankPlacement(1, f"n{(node + 1) % self.nodes}", (gpu + 4,)),)
        self.table.apply(Submitted(job=job, sequence=0, time_ms=T0, user=f"u{number % 50}", name=f"net-{number % 400}"))
        self.table.apply(Started(job=job, sequence=1, time_ms=T0, ranks=ranks))
        for step in range(MAX_STEPS):
            parts, at_ms = StepParts(compute=0.7, communication=0.3), T0 + (step + 1) * STEP_MS
            step_event = Step(job=job, sequence=2 + step, time_ms=at_ms, step=step, duration_s=1.0, parts=parts)
            self.table.apply(step_event)
        attempt = self.table.get(job)
        assert attempt is not None
        return attempt


def _draw_co_runs(count: int) -> tuple[Pairs, np.ndarray]:
    """Draw co-runs of jobs of 40 kinds, and (co-run,) the errors of the prior speeds."""
    rng = np.random.default_rng(0)
    keys, loads = rng.integers(1, 200, (count, 2)), rng.random((count, 2, len(LOADS)))
    rows = [(own, other, (a, a % 40 + 1), (b, b % 40 + 1)) for (own, other), (a, b) in zip(loads, keys, strict=True)]
    return Pairs.from_rows(rows), rng.normal(0.0, 0.05, count)
