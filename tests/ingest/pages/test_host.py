import os
from pathlib import Path

import pytest

from fleetcast.fleet.samples import EntityKind
from tests.ingest.exporter_pages import Desk

DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))


def test_stolen_and_idle_seconds_are_means_over_the_cpus() -> None:
    values = Desk("n1").decode(
        'node_cpu_seconds_total{cpu="0",mode="idle"} 100',
        'node_cpu_seconds_total{cpu="0",mode="steal"} 3',
        'node_cpu_seconds_total{cpu="0",mode="user"} 7',
        'node_cpu_seconds_total{cpu="1",mode="idle"} 200',
        'node_cpu_seconds_total{cpu="1",mode="steal"} 1',
    )
    assert values == {"cpu_idle_s n1": 150.0, "cpu_steal_s n1": 2.0}


def test_a_page_that_fits_the_last_one_adds_up_the_same_way() -> None:
    desk = Desk("n1")
    lines = ['node_cpu_seconds_total{{cpu="{cpu}",mode="steal"}} {value}', "node_memory_MemAvailable_bytes {value}"]
    first = [lines[0].format(cpu=cpu, value=cpu) for cpu in (0, 1, 2)] + [lines[1].format(value=9)]
    second = [lines[0].format(cpu=cpu, value=cpu + 6) for cpu in (0, 1, 2)] + [lines[1].format(value=8)]
    assert desk.decode(*first) == {"cpu_steal_s n1": 1.0, "memory_available_bytes n1": 9.0}
    assert desk.decode(*second) == {"cpu_steal_s n1": 7.0, "memory_available_bytes n1": 8.0}
    assert desk.decode(*second[1:]) == {"cpu_steal_s n1": 7.5, "memory_available_bytes n1": 8.0}, "a CPU went offline"


def test_a_sum_without_one_of_its_parts_is_no_sum() -> None:
    desk = Desk("n1")
    lines = ('node_disk_read_bytes_total{device="nvme0n1"} 5', 'node_disk_read_bytes_total{device="nvme1n1"} NaN')
    assert desk.decode(*lines) == {}
    assert desk.decode(lines[0]) == {"nvme_read_bytes n1": 5.0}


def test_a_sum_that_lost_a_part_to_a_broken_line_is_left_out_until_the_page_is_whole() -> None:
    desk = Desk("n1")
    lines = [f'node_cpu_seconds_total{{cpu="{cpu}",mode="steal"}} {cpu}' for cpu in range(3)]
    more = "node_memory_MemAvailable_bytes 9"
    assert desk.decode(*lines, more) == {"cpu_steal_s n1": 1.0, "memory_available_bytes n1": 9.0}
    broken = [lines[0], "node_cpu_seconds_total{cpu=", lines[2], more]
    for _ in range(2):
        assert desk.decode(*broken) == {"memory_available_bytes n1": 9.0}
    assert desk.decoder.noted["partial"] == 2
    assert desk.decode(*lines, "no line {") == {"cpu_steal_s n1": 1.0}, "another line is broken, the sum is whole"
    assert desk.decode(*lines[:2]) == {"cpu_steal_s n1": 0.5}, "a CPU went offline"


def test_drives_and_interfaces_that_would_count_twice_do_not_count() -> None:
    values = Desk("n1").decode(
        *(f'node_disk_read_bytes_total{{device="{name}"}} 5' for name in ("nvme0n1", "nvme0n1p1", "md0", "sda")),
        *(
            f'node_network_receive_bytes_total{{device="{name}"}} 7'
            for name in ("lo", "eth0", "ens1f0np0", "ibp26s0", "bond0", "eth0.100", "veth12ab", "docker0", "cni0")
        ),
    )
    assert values == {"nvme_read_bytes n1": 5.0, "net_rx_bytes n1": 21.0}


@pytest.mark.parametrize("device", ["enbond0", "enp1s0f0npf0vf1", "enp1s0f0np0pf0sf88", "bond0", "eth0.100", "veth1"])
def test_bytes_of_bonds_and_representors_count_once(device: str) -> None:
    lines = [f'node_network_receive_bytes_total{{device="{name}"}} 100' for name in ("enp1s0f0np0", device, "eth1")]
    assert Desk("n1").decode(*lines) == {"net_rx_bytes n1": 200.0}


def test_pressure_memory_and_numa_belong_to_the_node() -> None:
    values = Desk("n1").decode(
        "node_pressure_cpu_waiting_seconds_total 14.5",
        "node_pressure_io_waiting_seconds_total 2",
        "node_pressure_memory_waiting_seconds_total 1",
        "node_memory_MemTotal_bytes 1000",
        'node_memory_numa_numa_miss_total{node="0"} 3',
        'node_memory_numa_numa_miss_total{node="1"} 4',
    )
    assert values == {
        "cpu_pressure n1": 14.5,
        "io_pressure n1": 2.0,
        "memory_pressure n1": 1.0,
        "memory_total_bytes n1": 1000.0,
        "numa_misses n1": 7.0,
    }


@pytest.mark.skipif(not (DATA / "telemetry").is_dir(), reason="needs FLEETCAST_DATA")
def test_a_whole_page_of_node_exporter_tells_of_its_host() -> None:
    desk = Desk("host")
    text = (DATA / "telemetry" / "ib-procfs-fixtures" / "node_exporter_e2e_full.prom").read_bytes()
    for _ in range(2):
        values = desk.words(desk.decoder.decode(text, 1000))
        host = {key.split()[0] for key in values if key.endswith(" ".join(desk.names(EntityKind.NODE)))}
        assert {"cpu_steal_s", "cpu_idle_s", "numa_hits", "io_pressure", "nvme_read_bytes"} <= host
