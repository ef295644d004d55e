import math

from fleetcast.cli.lab.detection import measure_detection
from fleetcast.simulator.faults.magnitudes import DECOY_KINDS, FAULT_KINDS


def test_faults_are_measured_on_the_real_path():
    table = measure_detection(3, copies=1)
    assert set(table.faults) == set(FAULT_KINDS)
    assert set(DECOY_KINDS) < set(table.decoys)
    (hot,) = table.faults["thermal_throttle"]
    assert hot.slowdown > 1.1
    assert hot.delay_s < 180
    assert hot.p_slow > 0.5
    (gone,) = table.faults["gpu_off_bus"]
    assert gone.hangs
    assert 500 < gone.kills_s < 700
    assert gone.delay_s < gone.kills_s
    assert gone.p_fail > 0.5


def test_most_kinds_are_seen_and_decoys_hardly_ever():
    table = measure_detection(3, copies=1)
    seen = [math.isfinite(row.delay_s) for rows in table.faults.values() for row in rows]
    assert sum(seen) >= 6
    assert table.false_alarm_share < 0.1
