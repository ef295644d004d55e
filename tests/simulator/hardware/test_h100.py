"""Recorded runs as exporter pages, from small recordings written here; and from the public ones where they are."""

import gzip
import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleetcast.fleet.errors import ConfigError
from fleetcast.simulator.hardware.h100 import FOLDER, RecordedFleet, load_recorded_fleet
from fleetcast.simulator.run import find_recorded_jobs
from tests.simulator.small_recordings import COLUMNS, record_ports, record_small_runs, write_recording

DATA = Path(os.environ.get("FLEETCAST_DATA", "../shared/data"))


def small_run(data: Path) -> RecordedFleet:
    """Two GPUs and ten seconds, a sample a second; GPU 1 has 100 W more. Power is 100 + the second."""
    rows = [
        f"{1000 + second}.5,steady,{gpu},H100,{100 + second + 100 * gpu},40,1000,81559,90,40,0.5,0.2,0.3,0,10,20,30,40,"
        f"4,{5000 + 100 * second}"
        for second in range(10)
        for gpu in range(2)
    ]
    write_recording(data / FOLDER, "t1_telemetry.csv.gz", [COLUMNS, *rows])
    record_ports(data, "t1")
    return load_recorded_fleet(data)


def read(page: bytes, name: str) -> list[float]:
    return [
        sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name.removesuffix("_total") == name.removesuffix("_total")
    ]


def test_a_recorded_run_is_a_node_with_its_own_pages(tmp_path: Path) -> None:
    fleet = small_run(tmp_path)
    assert list(fleet.list_targets()) == [("t1", "dcgm"), ("t1", "node")]
    fleet.advance(50_000)
    page = fleet.render_page("t1", "dcgm", 53_000)
    assert read(page, "DCGM_FI_DEV_POWER_USAGE") == [103, 203]
    assert read(page, "DCGM_FI_DEV_FB_FREE") == [80_559, 80_559]
    assert b'Hostname="t1"' in page
    assert b"DCGM_FI_DEV_SM_CLOCK" not in page


def test_a_run_starts_over_while_its_counters_go_on(tmp_path: Path) -> None:
    fleet = small_run(tmp_path)
    fleet.advance(0)
    seconds = (0, 5, 9, 12, 21)
    pages = [fleet.render_page("t1", "dcgm", second * 1000) for second in seconds]
    assert [read(page, "DCGM_FI_DEV_POWER_USAGE")[0] for page in pages] == [100, 105, 109, 102, 102]
    energy = [read(page, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")[0] for page in pages]
    assert energy == sorted(energy)
    sent = [
        read(fleet.render_page("t1", "node", second * 1000), "node_infiniband_port_data_transmitted_bytes_total")[3]
        for second in seconds
    ]
    assert sent == [0, 5000, 9000, 11_000, 20_000]


def test_a_value_that_was_not_recorded_stands_as_before(tmp_path: Path) -> None:
    small_run(tmp_path)
    path = tmp_path / FOLDER / "t1_telemetry.csv.gz"
    with gzip.open(path, "rt") as file:
        lines = file.read().splitlines()
    # second 3: GPU 0 lacks the PCIe bytes, which the page shows as whole numbers
    lines[7] = lines[7].replace(",10,20,30,40,", ",,20,30,40,")
    write_recording(tmp_path / FOLDER, path.name, lines)
    fleet = load_recorded_fleet(tmp_path)
    fleet.advance(0)
    assert read(fleet.render_page("t1", "dcgm", 3000), "DCGM_FI_PROF_PCIE_TX_BYTES") == [10, 10]


def test_the_idle_run_is_no_job(tmp_path: Path) -> None:
    record_small_runs(tmp_path)
    fleet = load_recorded_fleet(tmp_path)
    assert fleet.names == ("b1", "t1")
    assert find_recorded_jobs(fleet) == {"t1": ["t1"]}


def test_missing_recordings_are_refused_with_the_place_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FLEETCAST_DATA"):
        load_recorded_fleet(tmp_path)


def test_a_recording_without_a_column_is_refused_by_name(tmp_path: Path) -> None:
    write_recording(tmp_path / FOLDER, "t1_telemetry.csv.gz", ["timestamp,gpu", "1,0"])
    with pytest.raises(ConfigError, match="mem_total_mib"):
        load_recorded_fleet(tmp_path)


@pytest.mark.skipif(not (DATA / FOLDER).exists(), reason="needs the public recordings in FLEETCAST_DATA")
def test_the_public_runs_show_power_and_traffic_as_recorded() -> None:
    fleet = load_recorded_fleet(DATA)
    fleet.advance(0)
    power = read(fleet.render_page("t3", "dcgm", 250_000), "DCGM_FI_DEV_POWER_USAGE")
    assert len(power) == 8
    assert all(600 < watts < 700 for watts in power)
    name = "node_infiniband_port_data_transmitted_bytes_total"
    before, after = (read(fleet.render_page("t11-node0", "node", second * 1000), name) for second in (200, 250))
    assert (sum(after) - sum(before)) / 50 == pytest.approx(56e9, rel=0.1)
