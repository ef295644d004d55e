"""A simulated fleet, by default 133 nodes of eight H100, with jobs, faults and exporter pages.

All computations are vectorised over all GPUs. Port i of a node serves its GPU i. The order of a step:

    1. counters grow by the rates of the last step (so a page can extrapolate them exactly)
    2. faults write their effects, given the load of the jobs
    3. jobs slow down to their slowest member, stall, hang or die
    4. sensors follow: power, temperature, clocks, activity, traffic, and the next rates
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import StepParts
from fleetcast.fleet.requests import RankPlacement
from fleetcast.simulator.faults.effects import ActivityLevels, Effects, HardwareLoad
from fleetcast.simulator.faults.faults import QUIET, FaultPlan, FaultSettings
from fleetcast.simulator.hardware import physics
from fleetcast.simulator.hardware.gangs import RunningGang, RunningGangs
from fleetcast.simulator.hardware.sensors import Sensors
from fleetcast.simulator.hardware.telemetry import DcgmPage, NodePage
from fleetcast.simulator.hardware.workload import JobPhase, WorkloadProfile

BUSY_W = 250.0
MEMBER_NOISE = 0.005  # of the own part of a rank's step
WAITS_RATIO = 1.05  # a step this much longer than the hardware makes it waited for data or storage
LOADER_SHARE = 0.01  # of the own part of a step, where the loader keeps up
EXPORTERS = ("dcgm", "node")


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """The size and layout of a fleet.

    It has racks of `rack_nodes`, rail groups of `racks_per_rail_group` racks, and `blocks` blocks with an equal
    share of the racks each. The last `own_nodes` nodes are a rack and a pool of their own.
    """

    nodes: int = 133
    gpus: int = 8
    rack_nodes: int = 19
    racks_per_rail_group: int = 2
    blocks: int = 2
    cluster: str = "venus"
    pool: str = "train"
    gpu_model: str = "H100"
    gpu_memory_gib: float = 80.0
    cpus: int = 128
    host_memory_gib: float = 2048.0
    own_nodes: int = 0
    own_pool: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The node names in row order, such as n001."""
        width = max(3, len(str(self.nodes)))
        return tuple(f"n{number:0{width}d}" for number in range(1, self.nodes + 1))

    def format_topology_toml(self) -> str:
        """Return the fleet's topology file as TOML, with one [[rack]] for each rack."""
        shared, each = self.names[: self.nodes - self.own_nodes], self.rack_nodes
        racks = [(shared[at : at + each], self.pool) for at in range(0, len(shared), each)]
        racks += [(self.names[len(shared) :], self.own_pool)] if self.own_nodes else []
        return "\n".join(self._format_rack_toml(row, *rack, len(racks)) for row, rack in enumerate(racks))

    def write_topology(self, path: Path) -> None:
        path.write_text(self.format_topology_toml(), encoding="utf-8")

    def _format_rack_toml(self, rack: int, names: Sequence[str], pool: str, racks: int) -> str:
        listed = ", ".join(f'"{name}"' for name in names)
        return (
            f'[[rack]]\nname = "r{rack + 1:02d}"\nblock = "b{rack * self.blocks // racks + 1}"\n'
            f'rail_group = "rg{rack // self.racks_per_rail_group + 1}"\ncluster = "{self.cluster}"\n'
            f'power_domain = "p{rack + 1:02d}"\nnodes = [{listed}]\ngpus = {self.gpus}\n'
            f'gpu_model = "{self.gpu_model}"\ngpu_memory_gib = {self.gpu_memory_gib:g}\ncpus = {self.cpus}\n'
            f'host_memory_gib = {self.host_memory_gib:g}\npool = "{pool}"\n'
        )


@dataclass(frozen=True, slots=True)
class MemberStep:
    """The time that one rank spends in a step of its job.

    compute_s: its own compute. communication_s: exchanging data and waiting for other ranks. data_s: waiting for
    data or storage.
    """

    rank: int
    node: str
    compute_s: float
    communication_s: float
    data_s: float = 0.0
    load: float = 1.0  # of the step's work, relative to the usual share


FailedJob = tuple[str, str, str, str]  # job, category, node, message


class SimulatedFleet:
    """The state of a simulated fleet. It is not thread-safe: one task must advance it and read its pages."""

    def __init__(self, spec: FleetSpec | None = None, seed: int = 0, settings: FaultSettings = QUIET) -> None:
        self.spec = spec or FleetSpec()
        self.names = self.spec.names
        self.rows = {name: row for row, name in enumerate(self.names)}
        shape = (self.spec.nodes, self.spec.gpus)
        self.gangs = RunningGangs(*shape)
        self.faults = FaultPlan(self.names, self.spec.gpus, settings, seed)
        self.effects = Effects(*shape)
        self.sensors = Sensors(*shape, seed)
        self.time_ms: int | None = None
        self._rng = np.random.default_rng([seed, 4])
        self._factor = np.ones(len(self.gangs.size))
        self._phase = np.zeros(len(self.gangs.size), np.int64)
        self._failed: list[FailedJob] = []
        self._pages = {name: DcgmPage(name, self.spec.gpus) for name in self.names}
        self._node_pages = {name: NodePage(name, self.spec.gpus) for name in self.names}
        self._frozen: dict[str, bytes] = {}

    # Jobs

    def start_job(
        self, job: str, attempt: int, ranks: Sequence[RankPlacement], profile: WorkloadProfile, now_ms: int
    ) -> None:
        """Run a job on its GPUs from `now_ms` on.

        The time may lie in the past, so that the job has already finished loading.
        """
        self.gangs.start(job, attempt, [(rank, self.rows[rank.node]) for rank in ranks], profile, now_ms)

    def stop_job(self, job: str, now_ms: int) -> None:
        """Remove a job from its GPUs. Does nothing if the job no longer runs."""
        self.gangs.stop(job)

    def pop_failed_jobs(self) -> list[FailedJob]:
        """Return (job, category, node, message) of the jobs that faults have killed since the last call.

        They no longer hold GPUs.
        """
        failed, self._failed = self._failed, []
        return failed

    def draw_step_time_s(self, job: str) -> float:
        """Draw the seconds that a step takes now, slowed by the job's worst member.

        The result is inf while the job hangs. It is nan while the job loads, and if it does not run.
        """
        gang = self.gangs.by_job.get(job)
        if gang is None or self.get_phase(job) in ("init", "loading"):
            return math.nan
        return math.inf if self._is_hung(gang) else sum(self._draw_step(gang))

    def _is_hung(self, gang: RunningGang) -> bool:
        return not math.isnan(self.gangs.hung_since_ms[gang.slot])

    def _draw_step(self, gang: RunningGang) -> tuple[float, float]:
        """Draw the seconds of one step, and the extra seconds for which all ranks wait.

        They wait for data, garbage collection or storage. The job must not hang.
        """
        levels = self.effects.levels.get(gang.slot, ActivityLevels())
        step_s = (
            gang.profile.step_s * levels.step * self._find_gang_slowdown(gang) * float(self._rng.lognormal(0.0, 0.01))
        )
        if self.get_phase(gang.job) == "checkpoint":
            return step_s, gang.profile.checkpoint_s
        if self._rng.random() < 0.005:
            return step_s, step_s * (self._rng.uniform(1.5, 3.0) - 1)
        return step_s, 0.0

    def draw_member_steps(self, job: str) -> list[MemberStep]:
        """Draw the present step of a job for each rank. A slow rank computes long, and the others wait for it.

        Returns an empty list if the job makes no steps.
        """
        gang = self.gangs.by_job.get(job)
        if gang is None or self.get_phase(job) in ("init", "loading") or self._is_hung(gang):
            return []
        step_s, data_s = self._draw_step(gang)
        own_s = gang.profile.step_s * self.effects.levels.get(gang.slot, ActivityLevels()).step
        own_s *= 1 - gang.profile.communication_share
        slowest = np.full(int(gang.rank_of.max()) + 1, np.inf)
        np.minimum.at(slowest, gang.rank_of, physics.compute_own_speed(self.effects)[gang.node, gang.gpu])
        heaviest = np.zeros(len(slowest))
        np.maximum.at(heaviest, gang.rank_of, self.effects.load[gang.node, gang.gpu])
        heavy = heaviest.tolist()
        takes_s = np.minimum(own_s / slowest * self._rng.lognormal(0.0, MEMBER_NOISE, len(slowest)), step_s).tolist()
        return [
            MemberStep(row.rank, row.node, takes_s[row.rank], step_s - takes_s[row.rank], data_s, heavy[row.rank])
            for row in gang.ranks
        ]

    def split_step(self, job: str, step_s: float) -> StepParts | None:
        """Divide a step of `step_s` seconds along its critical path. Returns None if the job makes no steps.

        First the slowest rank computes, then all ranks communicate. The time beyond the usual length is waiting for
        data or, in a checkpoint, for storage.
        """
        gang = self.gangs.by_job.get(job)
        if gang is None or not math.isfinite(step_s):
            return None
        usual_s = gang.profile.step_s * self.effects.levels.get(gang.slot, ActivityLevels()).step
        waits_s = max(0.0, step_s - WAITS_RATIO * usual_s * self._find_gang_slowdown(gang))
        slowest = float(physics.compute_own_speed(self.effects)[gang.node, gang.gpu].min())
        own_s = min(usual_s * (1 - gang.profile.communication_share) / slowest, step_s - waits_s)
        loads_s = LOADER_SHARE * own_s
        is_saving = self.get_phase(job) == "checkpoint"
        return StepParts(
            compute=round(own_s - loads_s, 4),
            communication=round(step_s - waits_s - own_s, 4),
            data=round(loads_s + (0.0 if is_saving else waits_s), 4),
            other=round(waits_s if is_saving else 0.0, 4),
        )

    def find_job_slowdown(self, job: str) -> float:
        """Return the factor by which a job's worst member makes its steps longer.

        It is 1 if the job does not run.
        """
        gang = self.gangs.by_job.get(job)
        return 1.0 if gang is None else self._find_gang_slowdown(gang)

    def get_phase(self, job: str) -> str:
        """Return a job's phase by its name in job events.

        It is "init" before the fleet's first step, and "" if the job does not run.
        """
        gang = self.gangs.by_job.get(job)
        if gang is None:
            return ""
        phase = JobPhase(int(self._phase[gang.slot])) if gang.slot < len(self._phase) else JobPhase.EMPTY
        return {JobPhase.EMPTY: "init", JobPhase.HUNG: "steady"}.get(phase, phase.name.lower())

    # Time

    def advance(self, now_ms: int) -> None:
        """Advance the fleet to `now_ms`.

        A time that is not later than the last one changes only the phases of jobs.
        """
        dt_s = 0.0 if self.time_ms is None else max(0, now_ms - self.time_ms) / 1000
        self.time_ms = now_ms if self.time_ms is None else max(self.time_ms, now_ms)
        self.sensors.grow_counters(dt_s)
        self._apply_faults(dt_s)
        self._apply_faults_to_jobs()
        self.sensors.update(self.gangs, self._phase, self._factor, self.effects, self.time_ms, dt_s)

    def render_page(self, node: str, exporter: str, now_ms: int | None = None) -> bytes:
        """Return the exposition text of one exporter.

        Counters are extrapolated to `now_ms`, by default the time of the last step.
        """
        row = self.rows[node]
        ahead_s = 0.0 if now_ms is None or self.time_ms is None else max(0, now_ms - self.time_ms) / 1000
        if exporter == "node":
            return self._node_pages[node].render(*self.sensors.extrapolate_host_values(row, ahead_s))
        if self.effects.frozen[row] and node in self._frozen:
            return self._frozen[node]
        if self.effects.renamed[row] and not self._pages[node].renamed:
            self._pages[node] = DcgmPage(node, self.spec.gpus, renamed=True)
        page = self._pages[node].render(self.sensors.extrapolate_gpu_values(row, ahead_s), self.effects.present[row])
        if self.effects.frozen[row]:
            self._frozen[node] = page
        else:
            self._frozen.pop(node, None)
        return page

    def list_targets(self) -> Iterable[tuple[str, str]]:
        """Return the (node, exporter) pair of every page."""
        return [(name, exporter) for name in self.names for exporter in EXPORTERS]

    def is_answering(self, node: str, exporter: str) -> bool:
        """Return whether this exporter of a node answers requests now."""
        return not self.effects.page_down[self.rows[node], EXPORTERS.index(exporter)]

    def get_delay_s(self, node: str) -> float:
        """Return the present delay of answers from the node's DCGM exporter, in wall seconds."""
        return float(self.effects.page_delay_s[self.rows[node]])

    def _apply_faults(self, dt_s: float) -> None:
        assert self.time_ms is not None
        self.effects.reset()
        phase = self.gangs.compute_phases(self.time_ms)
        load = self._make_load(phase)
        self.faults.advance(self.effects, load, self.time_ms, dt_s)
        for slot, forced in self.effects.forced_phase.items():
            if phase[slot] == JobPhase.STEADY:
                phase[slot] = forced
        self._phase = phase
        self.sensors.apply_effects(self.effects)

    def _make_load(self, phase: NDArray[np.int64]) -> HardwareLoad:
        assert self.time_ms is not None
        works = physics.is_computing(phase)
        hot = works & (self.gangs.get_levels("power_w") > BUSY_W)
        slot = self.gangs.slot
        return HardwareLoad(
            slot=slot,
            busy=hot[slot],
            networked=works[slot] & (physics.compute_port_traffic(self.gangs) > 0),
            asks_w=self.gangs.get_levels("power_w")[slot],
            size=self.gangs.size,
            age_s=self.gangs.compute_age_s(self.time_ms),
        )

    def _apply_faults_to_jobs(self) -> None:
        """Hang, time out and kill jobs according to the faults. Then compute how slow each job is."""
        assert self.time_ms is not None
        for death in self.effects.deaths:
            cells = slice(None) if death.gpu < 0 else death.gpu
            for slot in np.unique(self.gangs.slot[death.node, cells]).tolist():
                self._fail_job(slot, death.category, death.node, death.message)
        for node, gpu in np.argwhere(self.effects.hung & (self.gangs.slot > 0)).tolist():
            self._hang_job(int(self.gangs.slot[node, gpu]), node)
        self._factor = physics.compute_slowdowns(self.gangs, self.effects)

    def _hang_job(self, slot: int, node: int) -> None:
        assert self.time_ms is not None
        since_ms = self.gangs.hung_since_ms[slot]
        if np.isnan(since_ms):
            self.gangs.hung_since_ms[slot] = self.time_ms
            self._phase[slot] = JobPhase.HUNG
        elif self.time_ms - since_ms >= self.faults.settings.watchdog_s * 1000:
            self._fail_job(slot, "hardware", node, "NCCL watchdog: collective timed out")

    def _fail_job(self, slot: int, category: str, node: int, message: str) -> None:
        gang = self.gangs.by_slot.get(slot)
        if gang is not None:
            self.gangs.stop(gang.job)
            self._phase[slot] = JobPhase.EMPTY
            self._failed.append((gang.job, category, self.names[node], message))

    def _find_gang_slowdown(self, gang: RunningGang) -> float:
        return float(self._factor[gang.slot]) if gang.slot < len(self._factor) else 1.0
