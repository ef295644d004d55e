"""A player of recorded H100 runs in a loop, with the faults and decoys of the simulated fleet.

Faults and decoys change the recorded numbers. The steps of a job take k = (1 - c)/s + c * r times as long.
Here s is the speed of its worst member, c the communication share of a step, and r the slowness of its worst
transfer. Activity, traffic and dynamic power fall by k. Temperatures follow the power with measured time
constants. Jobs of recordings do not die. They stand still while a fault lasts.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import Finished, JobEvent, Started, Submitted
from fleetcast.fleet.requests import Gang, RankPlacement
from fleetcast.fleet.samples import EntityKind
from fleetcast.simulator.faults.effects import REASON_SW_POWER_CAP, ActivityLevels, Effects, HardwareLoad
from fleetcast.simulator.faults.fault_file import FaultFile
from fleetcast.simulator.faults.faults import FaultPlan, FaultSettings
from fleetcast.simulator.faults.magnitudes import FaultKind
from fleetcast.simulator.faults.repairs import RepairReporter
from fleetcast.simulator.hardware import physics
from fleetcast.simulator.hardware.columns import SCRAPE_METRICS, SCRAPE_TAKES_S, Columns, SampleFile
from fleetcast.simulator.hardware.h100 import (
    DCGM_FIELDS,
    NODE_FIELDS,
    RECORDED_PORT_FIELDS,
    RecordedRun,
    load_recorded_fleet,
)
from fleetcast.simulator.hardware.workload import CONTEXT_POWER_W, PHASE_LEVELS, POWER_BY_CLOCK, JobPhase
from fleetcast.simulator.instrument import (
    Say,
    TruthRecorder,
    make_folder,
    parse_start_ms,
    write_events,
    write_truth_file,
)

RECORDED = Path("faults") / "recorded"
FAULTS = ("thermal_throttle", "power_brake", "gpu_off_bus", "cpu_contention", "slow_nic", "ib_flap", "node_lost")
DECOYS = ("power_cap", "checkpoint_stall", "evaluation", "exporter_restart", "phase_change")
GPUS = 8
BUSY_W = 250.0
NETWORKED_BYTES_PER_S = 1e7
FIRST_S = 60.0

Values = NDArray[np.float64]
ROW = {one.name.removeprefix("DCGM_FI_"): row for row, one in enumerate(DCGM_FIELDS)}
_TRAFFIC = [ROW[f"PROF_{name}_BYTES"] for name in ("PCIE_TX", "PCIE_RX")]
_NVLINK = [ROW[f"PROF_{name}_BYTES"] for name in ("NVLINK_TX", "NVLINK_RX")]
_OWN = [ROW[name] for name in ("PROF_SM_ACTIVE", "PROF_PIPE_TENSOR_ACTIVE", "PROF_PIPE_FP16_ACTIVE")]
_MEMORY = [ROW[name] for name in ("PROF_DRAM_ACTIVE", "DEV_MEM_COPY_UTIL")]
_POWER, _TEMP, _ENERGY = ROW["DEV_POWER_USAGE"], ROW["DEV_GPU_TEMP"], ROW["DEV_TOTAL_ENERGY_CONSUMPTION"]
_UTIL, _REASONS = ROW["DEV_GPU_UTIL"], ROW["DEV_CLOCKS_EVENT_REASONS"]


def inject_faults(file: FaultFile, data: Path, out: Path, say: Say = lambda _: None) -> Path:
    """Write the folder `out/faults/recorded/NAME-SEED` like that of a simulated run, and return its path.

    Raises ConfigError.
    """
    runs = list(load_recorded_fleet(data).runs.values())
    folder = make_folder(out / RECORDED, file, file.recorded.interval_s)
    (folder / "topology.toml").write_text(_format_topology([run.node for run in runs]), encoding="utf-8")
    player = RecordingPlayer(runs, file)
    recorder = TruthRecorder(player.plan, player.find_job_and_factor)
    files, repairs = SampleFileSet(folder / "samples", player), RepairReporter(player.plan, player.names)
    start_ms, step_ms = parse_start_ms(file), round(file.recorded.interval_s * 1000)
    with (folder / "events.jsonl").open("wb") as events, (folder / "node_events.jsonl").open("wb") as node_events:
        for number in range(1, player.rounds + 1):
            now_ms = start_ms + number * step_ms
            player.advance(now_ms)
            recorder.record_affected_jobs(now_ms)
            write_events(events, player.pop_due_events(now_ms))
            if file.draw.repairs_told:
                write_events(node_events, repairs.make_due_events(now_ms))
            files.record_step(now_ms)
    files.close()
    return write_truth_file(folder, recorder.make_truths(), say)


def _format_topology(names: list[str]) -> str:
    listed = ", ".join(f'"{name}"' for name in names)
    return (
        '[[rack]]\nname = "r01"\nblock = "b1"\nrail_group = "rg1"\ncluster = "recorded"\npower_domain = "p01"\n'
        f'nodes = [{listed}]\ngpus = {GPUS}\ngpu_model = "H100"\ngpu_memory_gib = 80\ncpus = 128\n'
        'host_memory_gib = 2048\npool = "train"\n'
    )


def make_settings(file: FaultFile) -> FaultSettings:
    """Return fault settings for regular faults of the kinds that recordings can show, each kind in turn."""
    table = file.recorded
    middle_s = float(np.sqrt(table.shortest_s * table.limit_s))
    share = file.draw.precursor_share
    own = [(kind, row) for kind, row in file.kinds.items() if kind in FAULTS and isinstance(row, FaultKind)]
    shares = {kind: row.precursor_share if share < 0 else share for kind, row in own}
    return FaultSettings(
        kinds=FAULTS,
        every_s=table.every_s,
        first_s=FIRST_S,
        decoys=DECOYS,
        decoy_every_s=table.decoy_every_s,
        median_s=dict.fromkeys(FAULTS, middle_s),
        shortest_s=table.shortest_s,
        limit_s=table.limit_s,
        precursor_shares=shares,
        precursor_s=(table.shortest_s / 2, table.shortest_s),
        magnitudes=file.kinds,
    )


class RecordingPlayer:
    """A player of all runs at the same time. It applies the effects of faults to the recorded numbers.

    All nodes of one run belong to one job.
    """

    def __init__(self, runs: list[RecordedRun], file: FaultFile) -> None:
        self.runs, self.table = runs, file.recorded
        self.names = [run.node for run in runs]
        self.jobs = [run.node.split("-node")[0] for run in runs]
        slots = {job: number for number, job in enumerate(dict.fromkeys(self.jobs), start=1)}
        self.slot = np.repeat(np.array([slots[job] for job in self.jobs], np.int32)[:, None], GPUS, axis=1)
        self.plan = FaultPlan(self.names, GPUS, make_settings(file), file.seed)
        self.effects = Effects(len(runs), GPUS)
        self.body = physics.GpuTraits.draw(np.random.default_rng([file.seed, 22]), len(runs), GPUS)
        held = np.array([run.gpus.values.shape[2] if run.gpus else 0 for run in runs])
        self.cells = np.arange(GPUS) < held[:, None]  # (node, GPU) recorded
        self.has_gpus = held > 0
        self.has_ports = np.array([run.ports is not None for run in runs])
        shape = (len(runs), GPUS)
        self.gpu = np.full((len(DCGM_FIELDS), *shape), np.nan)
        self.port = np.full((len(RECORDED_PORT_FIELDS), *shape), np.nan)
        self.power = np.full((1, len(runs)), np.nan)
        self.factor = np.ones(len(slots) + 1)
        self._raw_gpu, self._raw_port = self.gpu.copy(), self.port.copy()
        self._port_rate = np.zeros(shape)
        self._warmer_c, self._saved_mj = np.zeros(shape), np.zeros(shape)
        self._start_ms: int | None = None
        self._last_ms = 0
        self._loop = [-1] * len(runs)

    @property
    def rounds(self) -> int:
        longest_s = max(series.span_s for run in self.runs for series in (run.gpus, run.ports) if series)
        return int(self.table.loops * longest_s / self.table.interval_s)

    def advance(self, now_ms: int) -> None:
        """Read the recordings at `now_ms`, and apply the faults to their numbers."""
        dt_s = self.table.interval_s if self._start_ms is not None else 0.0
        self._start_ms = now_ms if self._start_ms is None else self._start_ms
        self._last_ms = now_ms
        age_s = (now_ms - self._start_ms) / 1000
        before = self._raw_port.copy()
        for row, run in enumerate(self.runs):
            if run.gpus:
                self._raw_gpu[:, row, self.cells[row]] = run.gpus.find_values_at(age_s)
            if run.ports:
                self._raw_port[:, row] = run.ports.find_values_at(age_s)
            if run.power:
                self.power[0, row] = run.power.find_values_at(age_s)[0]
        moved = self._raw_port - before if dt_s else np.zeros_like(before)
        self._port_rate = np.nan_to_num(moved[1] / dt_s) if dt_s else np.zeros(self.slot.shape)
        self.effects.reset()
        self.plan.advance(self.effects, self._make_load(age_s), now_ms, dt_s)
        levels = self._compute_levels()
        self._update_gpus(levels, dt_s)
        self._update_ports(levels, moved)

    def pop_due_events(self, now_ms: int) -> list[JobEvent]:
        """Return the job events since the last call.

        With each loop of its run, a job ends and begins again as its next attempt.
        """
        assert self._start_ms is not None
        events: list[JobEvent] = []
        for job in dict.fromkeys(self.jobs):
            rows = [row for row, name in enumerate(self.jobs) if name == job]
            loop = self._count_loops(rows[0], now_ms)
            if loop == self._loop[rows[0]]:
                continue
            if loop:
                events.append(Finished(job=job, attempt=loop, sequence=2, time_ms=now_ms))
            self._loop[rows[0]] = loop
            attempt, gang = loop + 1, Gang(len(rows), len(rows))
            every = tuple(range(GPUS))
            ranks = tuple(RankPlacement(rank, self.names[row], every) for rank, row in enumerate(rows))
            events += [
                Submitted(job=job, attempt=attempt, sequence=0, time_ms=now_ms, gang=gang, gpus_per_node=GPUS),
                Started(job=job, attempt=attempt, sequence=1, time_ms=now_ms, ranks=ranks),
            ]
        return events

    def find_job_and_factor(self, node: int, unit: int) -> tuple[str, float] | None:
        """Return the job on a node, and the factor by which its steps are longer than recorded."""
        return self.jobs[node], float(self.factor[self.slot[node, 0]])

    def _count_loops(self, row: int, now_ms: int) -> int:
        run = self.runs[row]
        series = run.gpus or run.ports
        assert series is not None
        assert self._start_ms is not None
        return int((now_ms - self._start_ms) / 1000 // series.span_s)

    def _make_load(self, age_s: float) -> HardwareLoad:
        busy = np.nan_to_num(self._raw_gpu[_POWER]) > BUSY_W
        networked = self.has_ports[:, None] & (self._port_rate > NETWORKED_BYTES_PER_S)
        size = np.bincount(self.slot.ravel(), minlength=len(self.factor))
        return HardwareLoad(
            self.slot, busy, networked, np.nan_to_num(self._raw_gpu[_POWER]), size, np.full(len(self.factor), age_s)
        )

    def _compute_levels(self) -> Values:
        """Return (slot, 5) factors of activity, utilisation, NVLink, InfiniBand and PCIe.

        Also updates `factor`.
        """
        effects, slots = self.effects, self.slot.ravel()
        speed, transfer = np.full(len(self.factor), np.inf), np.ones(len(self.factor))
        np.minimum.at(speed, slots, physics.compute_own_speed(effects).ravel())
        sends = self._port_rate > NETWORKED_BYTES_PER_S
        np.maximum.at(transfer, slots, np.where(sends, effects.port_slow, 1.0).ravel())
        share = self.table.communication_share
        self.factor = (1 - share) / np.minimum(speed, 1.0) + share * transfer
        self.factor[np.unique(self.slot[effects.port_down & sends])] *= physics.STALL
        levels = np.ones((len(self.factor), 5))
        for slot, phase in effects.forced_phase.items():
            levels[slot] = PHASE_LEVELS[phase]
        for slot, changed in effects.levels.items():
            levels[slot] *= _list_factors(changed)
        hung = np.unique(self.slot[effects.hung])
        levels[:, [0, 2, 3, 4]] /= self.factor[:, None]
        levels[hung] = PHASE_LEVELS[JobPhase.HUNG]
        return levels

    def _update_gpus(self, levels: Values, dt_s: float) -> None:
        effects, raw = self.effects, self._raw_gpu
        frozen = self.gpu[:, effects.frozen].copy()
        work, util, nvlink, _, pcie = np.moveaxis(levels[self.slot], 2, 0)
        done = work * effects.load
        busy = np.minimum(done / effects.clock_ratio, 1.05)
        self.gpu[:] = raw
        self.gpu[_OWN] *= busy
        self.gpu[_MEMORY] *= done
        self.gpu[_NVLINK] *= nvlink
        self.gpu[_TRAFFIC] *= pcie
        self._update_power(busy)
        self._lower_temperature_and_energy(dt_s)
        spins = (self.factor > 1.1)[self.slot] & (raw[_POWER] > BUSY_W)
        seen = np.where(spins, np.maximum(raw[_UTIL], 99.0), np.clip(raw[_UTIL] * util, 0.0, 100.0))
        pressed = effects.util_drop > 0
        seen = np.where(pressed, np.minimum(seen, raw[_UTIL]) - 100 * effects.util_drop, seen)
        self.gpu[_UTIL] = np.maximum(np.where(util > 9, 100.0, seen), 0.0)
        self.gpu[:, effects.frozen] = frozen

    def _update_power(self, busy: Values) -> None:
        """Update the power and the clock event reasons of each GPU.

        Only the recorded power above that of an idle context falls with the work and the clock. The reasons name the
        cause.
        """
        effects, raw = self.effects, self._raw_gpu
        dynamic = np.maximum(raw[_POWER] - CONTEXT_POWER_W, 0.0) * busy * effects.clock_ratio**POWER_BY_CLOCK
        power = np.minimum(np.minimum(raw[_POWER], CONTEXT_POWER_W) + dynamic, effects.power_limit_w)
        reasons = np.nan_to_num(raw[_REASONS]).astype(np.int64)
        reasons = np.where(power < 0.9 * raw[_POWER], reasons & ~REASON_SW_POWER_CAP, reasons) | effects.reasons
        self.gpu[_POWER] = power
        self.gpu[_REASONS] = np.where(np.isnan(raw[_REASONS]), np.nan, reasons)

    def _lower_temperature_and_energy(self, dt_s: float) -> None:
        """Lower temperature and energy according to the power that faults removed."""
        missing_w = np.nan_to_num(self._raw_gpu[_POWER] - self.gpu[_POWER])
        cooler_c = self.body.resistance_c_per_w * missing_w
        self._warmer_c += (-cooler_c - self._warmer_c) * -np.expm1(-dt_s / self.body.tau_s)
        self._saved_mj += missing_w * dt_s * 1000
        self.gpu[_TEMP] = np.maximum(np.round(self._raw_gpu[_TEMP] + self._warmer_c), self.effects.hot_c)
        self.gpu[_ENERGY] = self._raw_gpu[_ENERGY] - self._saved_mj

    def _update_ports(self, levels: Values, moved: Values) -> None:
        """Increase the port counters by the recorded traffic, multiplied by the share that the job still sends.

        All members of a job send the same share. moved: (field, node, port) recorded growth in this step.
        """
        sent = levels[self.slot][:, :, 3]
        waiting = np.unique(self.slot[self.effects.port_down & (self._port_rate > NETWORKED_BYTES_PER_S)])
        sent = np.where(np.isin(self.slot, waiting) | self.effects.port_down, 0.0, sent)
        first = np.isnan(self.port)
        self.port = np.where(first, self._raw_port, self.port + np.nan_to_num(moved) * sent)


def _list_factors(levels: ActivityLevels) -> tuple[float, ...]:
    return levels.activity, 1.0, levels.traffic, levels.traffic, 1.0


@dataclass(slots=True)
class SampleFileSet:
    """A writer of the three sample files: GPUs, ports and nodes."""

    folder: Path
    player: RecordingPlayer
    rng: np.random.Generator = field(init=False)
    columns: list[Columns] = field(init=False)
    files: list[SampleFile] = field(init=False)
    times: list[int] = field(default_factory=list)
    parts: list[list[tuple[Values, NDArray[np.bool_]]]] = field(default_factory=lambda: [[], [], []])

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([23, len(self.player.names)])
        self.columns = [
            Columns.from_fields(DCGM_FIELDS, {"gpu": "0"}, EntityKind.GPU),
            Columns.from_fields(RECORDED_PORT_FIELDS, {"device": "mlx5_0", "port": "1"}, EntityKind.PORT),
            Columns.from_fields(NODE_FIELDS, {"chip": "platform_power_meter", "sensor": "power1"}, EntityKind.NODE),
        ]
        names = [self.columns[0].names, self.columns[1].names, (*SCRAPE_METRICS, *self.columns[2].names)]
        kinds = (EntityKind.GPU, EntityKind.PORT, EntityKind.NODE)
        self.files = [
            SampleFile(self.folder, kind, self.player.names, own) for kind, own in zip(kinds, names, strict=True)
        ]

    def record_step(self, now_ms: int) -> None:
        player, effects = self.player, self.player.effects
        self.times.append(now_ms)
        up, node_up = player.has_gpus & ~effects.page_down[:, 0], ~effects.page_down[:, 1]
        present = effects.present & up[:, None] & player.cells
        ports = np.repeat((player.has_ports & node_up)[:, None], GPUS, axis=1)
        gpu = self.columns[0].convert(player.gpu.reshape(len(player.gpu), -1))
        port = self.columns[1].convert(player.port.reshape(len(player.port), -1))
        host = self.columns[2].convert(player.power)
        host[:, ~node_up] = np.nan
        late_s = effects.page_delay_s + self.rng.uniform(*SCRAPE_TAKES_S, len(up))
        answers = np.where(player.has_gpus, up, node_up).astype(float)
        counts = np.where(up, present.sum(axis=1), np.nan)
        scrape = np.stack([answers, late_s, counts, np.where(ports[:, 0], GPUS, np.nan)])
        self.parts[0].append((gpu, present.ravel()))
        self.parts[1].append((port, ports.ravel()))
        self.parts[2].append((np.concatenate([scrape, host]), np.ones(len(up), bool)))

    def close(self) -> None:
        for file, parts in zip(self.files, self.parts, strict=True):
            file.write_rounds(self.times, parts)
            file.close()
