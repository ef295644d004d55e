"""A simulation that runs a fleet with jobs, faults and decoys for hours, and records the truth.

Its telemetry and events are written to a folder.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.simulator.faults.effects import ActivityLevels
from fleetcast.simulator.faults.fault_file import FaultFile, format_fault_file
from fleetcast.simulator.faults.faults import FaultPlan, Incident
from fleetcast.simulator.faults.repairs import RepairReporter
from fleetcast.simulator.faults.truth import FaultRecord, FaultTruth
from fleetcast.simulator.hardware.cluster import FleetSpec, SimulatedFleet
from fleetcast.simulator.hardware.columns import Recorder
from fleetcast.simulator.tenants import Tenants

SIMULATED = Path("faults") / "simulated"
WARM_UP_S = 1800.0  # nothing goes wrong before
STATE = (
    "heat",
    "previous_s",
    "restarted",
    "dealt_s",
    "phase",
)  # what changes as a shape is applied, or says no strength
Say = Callable[[str], None]


@dataclass(slots=True)
class TruthRecorder:
    """A recorder that adds the affected job and its slowdown to the records of a fault plan.

    find: a function that returns (job, slowdown) by node row and GPU or port (-1: any). It returns None if no job
    runs there.
    """

    plan: FaultPlan
    find: Callable[[int, int], tuple[str, float] | None]
    jobs: dict[str, str] = field(default_factory=dict)
    slowdown: dict[str, float] = field(default_factory=dict)
    seen: dict[str, Incident] = field(default_factory=dict)

    def record_affected_jobs(self, now_ms: int) -> None:
        """Record the affected jobs at `now_ms`. The caller calls it after every advance of the fleet."""
        for incident in self.plan.list_incidents():
            if now_ms < incident.start_ms - incident.lead_ms:
                continue
            self.seen[incident.fault_id] = incident
            found = self.find(incident.node, incident.unit) if now_ms >= incident.start_ms else None
            if found is None:
                continue
            job = self.jobs.setdefault(incident.fault_id, found[0])
            if job == found[0]:
                self.slowdown[incident.fault_id] = max(self.slowdown.get(incident.fault_id, 1.0), found[1])

    def make_truths(self) -> list[FaultTruth]:
        return [self._make_truth(record) for record in sorted(self.plan.list_records(), key=lambda row: row.start_ms)]

    def _make_truth(self, record: FaultRecord) -> FaultTruth:
        incident = self.seen[record.fault_id]
        return FaultTruth(
            **msgspec.structs.asdict(record),
            job=self.jobs.get(record.fault_id),
            precursor=incident.lead_ms > 0,
            lead_s=incident.lead_ms / 1000,
            magnitude=_list_numbers(incident.shape),
            slowdown=round(min(self.slowdown.get(record.fault_id, 1.0), 1e6), 3),
        )


def _list_numbers(shape: Any) -> dict[str, float]:
    """Return name → drawn number of a fault's shape."""
    found: dict[str, float] = {}
    for one in fields(shape):
        value = getattr(shape, one.name)
        if isinstance(value, ActivityLevels):
            found |= _list_numbers(value)
        elif isinstance(value, (bool, int, float)) and one.name not in STATE and np.isfinite(float(value)):
            found[one.name] = round(float(value), 6)
    return found


def simulate_faults(file: FaultFile, out: Path, say: Say = lambda _: None) -> Path:
    """Write the folder `out/faults/simulated/NAME-SEED`, and return its path.

    Raises ConfigError if it exists. The same seed gives the same bytes, except for Parquet's header.
    """
    folder = make_folder(out / SIMULATED, file)
    spec = FleetSpec(nodes=file.fleet.nodes, rack_nodes=file.fleet.rack_nodes, cluster="simulated")
    fleet = SimulatedFleet(spec, file.seed)
    tenants = Tenants(fleet, file.jobs, np.random.default_rng([file.seed, 20]), step_s=file.interval_s)
    recorder = Recorder(fleet, folder / "samples", file.seed, file.fleet.lost_scrapes_share)
    truth_recorder = TruthRecorder(fleet.faults, lambda node, unit: _find_job_and_slowdown(tenants, node, unit))
    spec.write_topology(folder / "topology.toml")
    repairs = RepairReporter(fleet.faults, fleet.names)
    step_ms, start_ms = round(file.interval_s * 1000), parse_start_ms(file)
    rounds = int(file.hours * 3600 / file.interval_s)
    with (folder / "events.jsonl").open("wb") as events, (folder / "node_events.jsonl").open("wb") as node_events:
        for number in range(1, rounds + 1):
            now_ms = start_ms + number * step_ms
            if number == 1 + int(WARM_UP_S / file.interval_s):
                fleet.faults.start_drawing(file.make_settings())
            fleet.advance(now_ms)
            truth_recorder.record_affected_jobs(now_ms)
            write_events(events, tenants.advance_jobs(now_ms))
            if file.draw.repairs_told:
                write_events(node_events, repairs.make_due_events(now_ms))
            recorder.record_scrape(now_ms)
            if number % max(1, rounds // 10) == 0:
                say(f"{number * file.interval_s / 3600:.1f} h of {file.hours:g}")
    recorder.close()
    return write_truth_file(folder, truth_recorder.make_truths(), say)


def parse_start_ms(file: FaultFile) -> int:
    """Return the start of a run in Unix ms. Raises ConfigError if the file states no valid time."""
    try:
        start = datetime.fromisoformat(file.start)
    except ValueError:
        raise ConfigError(f"start = {file.start!r}: expected a time such as 2026-01-05T00:00 (UTC)") from None
    return int((start if start.tzinfo else start.replace(tzinfo=UTC)).timestamp() * 1000)


def make_folder(parent: Path, file: FaultFile, interval_s: float | None = None) -> Path:
    """Create the folder of a run, with the settings in use. Raises ConfigError if it exists already."""
    if interval_s is not None:
        file = msgspec.structs.replace(file, interval_s=interval_s)
    parse_start_ms(file)
    folder = parent / f"{file.name}-{file.seed}"
    if folder.exists():
        raise ConfigError(f"{folder} is there already: choose another --out, --seed or name, or remove it")
    (folder / "samples").mkdir(parents=True)
    (folder / "config.toml").write_text(format_fault_file(file), encoding="utf-8")
    return folder


def write_truth_file(folder: Path, truths: list[FaultTruth], say: Say) -> Path:
    """Write the true faults and decoys to truth.jsonl, report their numbers, and return the folder."""
    (folder / "truth.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in truths))
    faults = [row for row in truths if not row.benign]
    seen = sum(row.visible for row in faults)
    say(f"{folder}: {len(faults)} faults, {seen} of them visible, {len(truths) - len(faults)} decoys")
    return folder


def write_events(file: Any, events: Iterable[JobEvent | NodeEvent]) -> None:
    file.writelines(msgspec.json.encode(event) + b"\n" for event in events)


def _find_job_and_slowdown(tenants: Tenants, node: int, unit: int) -> tuple[str, float] | None:
    job = tenants.find_job_on_gpu(node, unit)
    return None if job is None else (job, tenants.fleet.find_job_slowdown(job))
