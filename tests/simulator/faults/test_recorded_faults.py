"""Faults in recorded runs: what was recorded stands but for what a fault would change."""

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Finished, Started
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind
from fleetcast.simulator.faults.fault_file import FaultFile, RecordedTable
from fleetcast.simulator.faults.recorded_faults import ROW, RecordingPlayer, inject_faults
from fleetcast.simulator.hardware.h100 import FOLDER, load_recorded_fleet
from fleetcast.training.sets.fault_runs import read_fault_runs
from tests.simulator.small_recordings import COLUMNS, write_recording

DATA = Path(os.environ.get("FLEETCAST_DATA", "../shared/data"))
HEALTHY = FaultFile(recorded=RecordedTable(loops=2, every_s=0.0, decoy_every_s=0.0))


def record(data: Path, seconds: int = 60) -> None:
    """A training run on three GPUs: 500 W plus the second's last digit, 60 degrees, SM active 0.6."""
    rows = [
        f"{1000 + second}.0,steady,{gpu},H100,{500 + second % 10},60,1000,81559,90,40,0.6,0.2,0.3,0,10,20,3e9,4e9,"
        f"4,{500_000 * second}"
        for second in range(seconds)
        for gpu in range(3)
    ]
    write_recording(data / FOLDER, "t1_telemetry.csv.gz", [COLUMNS, *rows])


def player(data: Path, kind: str, gpu: int | None, **magnitudes: float) -> RecordingPlayer:
    """30 s into a fault that begins at second 10."""
    made = RecordingPlayer(list(load_recorded_fleet(data).runs.values()), HEALTHY)
    made.plan.inject(kind, "t1", gpu, 10_000, end_ms=10**9, **magnitudes)
    for second in range(41):
        made.advance(second * 1000)
    return made


def gpu(made: RecordingPlayer, column: str) -> list[float]:
    """Of the three GPUs, as the page would say it."""
    return made.gpu[ROW[column], 0, :3].tolist()


def test_without_faults_the_recording_is_what_is_read(tmp_path: Path) -> None:
    record(tmp_path)
    inject_faults(HEALTHY, tmp_path, tmp_path / "out")
    (run,) = read_fault_runs(tmp_path / "out")
    assert run.truth == ()
    assert run.interval_s == 1.0
    entities, power, events = Entities(), [], []
    for round_ in run.read_rounds(entities):
        batch = next(one for one in round_.batches if one.kind is EntityKind.GPU)
        power += batch.value[batch.metric == find_metric_row(EntityKind.GPU, "power_w")].tolist()
        events += round_.events
    assert power == np.repeat(500 + np.arange(len(power) // 3) % 60 % 10, 3).tolist()
    assert [(type(event), event.attempt) for event in events if isinstance(event, (Started, Finished))] == [
        (Started, 1),
        (Finished, 1),
        (Started, 2),
    ]


def test_a_throttled_gpu_is_hot_and_its_peers_wait_at_full_utilisation(tmp_path: Path) -> None:
    record(tmp_path)
    made = player(tmp_path, "thermal_throttle", 1, tau_s=5.0, hard=True, hard_ratio=0.4, hot_c=88.0)
    assert gpu(made, "DEV_GPU_TEMP")[1] == pytest.approx(88.0)
    assert gpu(made, "DEV_GPU_TEMP")[0] < 60
    assert int(gpu(made, "DEV_CLOCKS_EVENT_REASONS")[1]) & 64
    assert not int(gpu(made, "DEV_CLOCKS_EVENT_REASONS")[0]) & 64
    assert gpu(made, "DEV_GPU_UTIL") == [99, 99, 99]
    factor = 0.75 / 0.4 + 0.25
    assert made.factor[1] == pytest.approx(factor)
    assert gpu(made, "PROF_SM_ACTIVE")[0] == pytest.approx(0.6 / factor)
    assert gpu(made, "PROF_SM_ACTIVE")[1] > 2 * gpu(made, "PROF_SM_ACTIVE")[0]  # it works all the time, the others wait
    assert gpu(made, "DEV_POWER_USAGE")[1] < gpu(made, "DEV_POWER_USAGE")[0] < 400


def test_a_gpu_off_the_bus_leaves_the_others_spinning(tmp_path: Path) -> None:
    record(tmp_path)
    made = player(tmp_path, "gpu_off_bus", 2, warns_s=0.0)
    assert made.effects.present[0, :3].tolist() == [True, True, False]
    assert gpu(made, "DEV_GPU_UTIL")[:2] == [100, 100]
    assert gpu(made, "PROF_PIPE_TENSOR_ACTIVE")[:2] == [0, 0]
    assert gpu(made, "DEV_POWER_USAGE")[0] == pytest.approx(118, abs=3)


def test_energy_stays_in_step_with_the_power(tmp_path: Path) -> None:
    record(tmp_path)
    made = player(tmp_path, "power_brake", None, ratio=0.5)
    before = gpu(made, "DEV_TOTAL_ENERGY_CONSUMPTION")[0]
    made.advance(41_000)
    grown_w = (gpu(made, "DEV_TOTAL_ENERGY_CONSUMPTION")[0] - before) / 1000
    assert grown_w == pytest.approx(gpu(made, "DEV_POWER_USAGE")[0], abs=5)


@pytest.mark.skipif(not (DATA / FOLDER).exists(), reason="needs the public recordings in FLEETCAST_DATA")
def test_faults_and_decoys_come_to_the_public_recordings(tmp_path: Path) -> None:
    table = msgspec.structs.replace(FaultFile().recorded, loops=1, interval_s=5.0, every_s=60.0, decoy_every_s=120.0)
    inject_faults(FaultFile(recorded=table), DATA, tmp_path)
    (run,) = read_fault_runs(tmp_path)
    faults = [row for row in run.truth if not row.benign]
    assert len({row.kind for row in faults}) >= 5
    assert sum(row.visible for row in faults) >= len(faults) / 2
    assert any(row.benign for row in run.truth)
    assert all(row.slowdown > 1.5 for row in faults if row.kind == "power_brake" and row.visible)
