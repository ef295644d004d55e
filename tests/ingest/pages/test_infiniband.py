import os
from pathlib import Path

import pytest

from fleetcast.ingest.pages.infiniband import MAX_PORTS_PER_NODE, PORT_READINGS
from tests.ingest.exporter_pages import Desk, page, reasons

DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))
PORT = '{device="mlx5_0",port="1"}'


def test_data_counters_are_bytes_whoever_printed_them() -> None:
    for line in (
        f"node_infiniband_port_data_received_bytes_total{PORT} 4.0e+06",
        f"infiniband_port_rcv_data{PORT} 1000000",
        f"port_rcv_data{PORT} 1000000",
        f"PortRcvData{PORT} 1000000",
        f"node_infiniband_legacy_data_received_bytes_total{PORT} 4000000",
    ):
        assert Desk("n1").decode(line) == {"rx_bytes n1/mlx5_0/1": 4e6}, line


def test_state_and_speed_are_gauges() -> None:
    values = Desk("n1").decode(
        f"node_infiniband_state_id{PORT} 4",
        f"node_infiniband_physical_state_id{PORT} 5",
        f"node_infiniband_rate_bytes_per_second{PORT} 5e+10",
    )
    assert values == {
        "state n1/mlx5_0/1": 4.0,
        "physical_state n1/mlx5_0/1": 5.0,
        "speed_bytes_per_s n1/mlx5_0/1": 5e10,
    }
    assert Desk("n1").decode(f"infiniband_rate{PORT} 400") == {"speed_bytes_per_s n1/mlx5_0/1": 5e10}


@pytest.mark.parametrize(
    ("name", "stuck", "fine"),
    [
        ("node_infiniband_link_downed_total", "255", "254"),
        ("node_infiniband_symbol_error_total", "65535", "65536"),
        ("node_infiniband_port_transmit_wait_total", "4.294967295e+09", "4294967296"),
        ("node_infiniband_excessive_buffer_overrun_errors_total", "15", "14"),
        ("node_infiniband_port_data_received_bytes_total", "17179869180", "17179869184"),
        ("port_rcv_data", "4294967295", "4294967296"),
    ],
)
def test_a_counter_that_sticks_at_its_width_says_nothing(name: str, stuck: str, fine: str) -> None:
    desk = Desk("n1")
    assert desk.decode(f"{name}{PORT} {stuck}") == {}
    assert desk.decoder.noted["blank"] == 1
    assert len(desk.decode(f"{name}{PORT} {fine}")) == 1


def test_the_page_names_its_node_by_uname_wherever_that_stands() -> None:
    desk = Desk("10.0.0.1")
    values = desk.decode(
        f"node_infiniband_link_downed_total{PORT} 1",
        'node_uname_info{domainname="(none)",machine="x86_64",nodename="n042",sysname="Linux"} 1',
    )
    assert values == {"link_downed n042/mlx5_0/1": 1.0}


def test_a_configured_node_is_kept_whatever_uname_says() -> None:
    values = Desk("n1", fixed=True).decode(
        f"node_infiniband_link_downed_total{PORT} 1", 'node_uname_info{nodename="other"} 1'
    )
    assert values == {"link_downed n1/mlx5_0/1": 1.0}


def test_a_target_that_becomes_another_node_is_learnt_anew() -> None:
    desk = Desk("10.0.0.1")
    lines = f"node_infiniband_link_downed_total{PORT} 1", 'node_uname_info{nodename="NODE"} 1'
    for node in ("n1", "n1", "n2"):
        assert desk.decode(*(line.replace("NODE", node) for line in lines)) == {f"link_downed {node}/mlx5_0/1": 1.0}


def test_the_64_bit_counter_of_old_adapters_comes_first_and_once() -> None:
    values = Desk("n1").decode(
        f"node_infiniband_legacy_data_received_bytes_total{PORT} 5e10",
        f"node_infiniband_port_data_received_bytes_total{PORT} 17179869180",
    )
    assert values == {"rx_bytes n1/mlx5_0/1": 5e10}


def test_ports_without_a_device_or_number_are_bad_labels() -> None:
    batch = Desk("n1").decoder.decode(
        page(
            'node_infiniband_state_id{port="1"} 4',
            'node_infiniband_state_id{device="a/b",port="1"} 4',
            'node_infiniband_state_id{device="mlx5_0",port="one"} 4',
            "link_downed 3",
        ),
        1000,
    )
    assert reasons(batch) == ["bad_label"] * 3


def test_ports_of_a_node_are_bounded() -> None:
    desk = Desk("n1")
    lines = (f'node_infiniband_state_id{{device="d{number}",port="1"}} 4' for number in range(MAX_PORTS_PER_NODE + 2))
    assert reasons(desk.decoder.decode(page(*lines), 1000)) == ["too_many_ports"] * 2


def test_cpu_pressure_belongs_to_the_node() -> None:
    assert Desk("n1").decode("node_pressure_cpu_waiting_seconds_total 14.036781") == {"cpu_pressure n1": 14.036781}


def test_the_boards_power_meter_belongs_to_the_node_and_single_rails_do_not() -> None:
    values = Desk("n1").decode(
        'node_hwmon_power_average_watt{chip="platform_power_meter",sensor="power1"} 8100',
        'node_hwmon_power_average_watt{chip="pci0000:00_0000:00:18_3",sensor="power1"} 90',
    )
    assert values == {"bmc_power_w n1": 8100.0}


def test_ports_are_counted() -> None:
    desk = Desk("n1")
    desk.decode(*(f'node_infiniband_state_id{{device="mlx5_{port}",port="1"}} 4' for port in range(8)))
    assert desk.decoder.reported[0].ports == 8


def test_names_agree_with_node_exporters_own_map() -> None:
    path = DATA / "telemetry" / "ib-procfs-fixtures" / "node_exporter_name_map.csv"
    if not path.exists():
        pytest.skip(f"no {path}")
    words = {row.split(",")[0] for row in path.read_text().splitlines()[1:]}
    ours = {name for name in PORT_READINGS if name.startswith("node_infiniband_") and name.endswith("_total")}
    assert ours <= words


def test_a_real_node_exporter_page_decodes_without_a_bad_record() -> None:
    path = DATA / "telemetry" / "ib-procfs-fixtures" / "node_exporter_e2e_full.prom"
    if not path.exists():
        pytest.skip(f"no {path}")
    desk = Desk("n1")
    batch = desk.decoder.decode(path.read_bytes(), 1000)
    assert batch.bad == ()
    assert desk.decoder.reported[0].ports == 3


@pytest.mark.parametrize(
    ("exporter", "sysfs", "metric"),
    [
        ("np_cnp_packets_sent", "np_cnp_sent", "cnp_sent"),
        ("rp_cnp_packets_handled", "rp_cnp_handled", "cnp_handled"),
        ("out_of_sequence_packets_received", "out_of_sequence", "out_of_sequence"),
        ("packet_sequence_errors", "packet_seq_err", "packet_seq_errors"),
        ("local_ack_timeout_errors", "local_ack_timeout_err", "ack_timeouts"),
        ("roce_adp_retransmits", "roce_adp_retrans", "adp_retransmits"),
        ("rnr_nak_retry_packets_received", "rnr_nak_retry_err", "rnr_naks"),
    ],
)
def test_counters_of_the_adapter_never_stick(exporter: str, sysfs: str, metric: str) -> None:
    for line in (f"node_infiniband_{exporter}_total{PORT} 4294967295", f"{sysfs}{PORT} 4294967295"):
        assert Desk("n1").decode(line) == {f"{metric} n1/mlx5_0/1": 4294967295.0}
