"""What drivers' lines mean, and when they happened."""

import os
from pathlib import Path

import pytest

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.xids import classify_severity
from fleetcast.ingest.kernel_log.events import SOURCE, KernelReader
from fleetcast.ingest.kernel_log.messages import TELLING, KernelFinding, MessageReader

DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[4] / "shared" / "data")) / "faults" / "xid"
NOW_MS = 1_763_700_000_000


def finding(*lines: str) -> KernelFinding | None:
    reader, found = MessageReader(), None
    for line in lines:
        assert TELLING.search(line.encode()) is not None
        found = reader.read(line)
    return found


@pytest.mark.parametrize(
    ("line", "code", "severity", "device"),
    [
        ("NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', GPU has fallen off the bus.", 79, None, "0000:9b:00"),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", 14, None, "0000:03:00"),
        ("NVRM: Xid (PCI:0009:01:00 GPU-I:02): 94, Contained: SM", 94, None, "0009:01:00"),
        ("NVRM: Xid (PCI:0000:04:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x1)", 149, "fatal", "0000:04:00"),
        ("NVRM: Xid (PCI:0000:04:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x4)", 145, "warning", "0000:04:00"),
        ("NVRM: Xid (PCI:0000:04:00): 31", 31, None, "0000:04:00"),
        ("NVRM: GPU 0000:9B:00.0: GPU has fallen off the bus.", 79, None, "0000:9b:00"),
        ("NVRM: GPU at PCI:0000:9b:00 has fallen off the bus.", 79, None, "0000:9b:00"),
        ("NVRM: a GPU has fallen off the bus", 79, None, ""),
    ],
)
def test_xids_and_lost_gpus(line: str, code: int, severity: str | None, device: str) -> None:
    found = finding(line)
    assert found is not None
    assert (found.type, found.code, found.severity, found.device) == ("xid", code, severity, device)


def test_a_lost_gpu_without_a_number_is_told_over_three_lines() -> None:
    found = finding(
        "NVRM: The NVIDIA GPU 0000:18:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    assert found is not None
    assert (found.code, found.device) == (79, "0000:18:00")


def test_the_recovery_that_the_driver_asks_for_is_the_advice() -> None:
    asked = finding(
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
    )
    assert asked is not None
    assert (asked.severity, asked.advice) == ("fatal", "drain and reset")
    done = finding(
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    )
    assert done is not None
    assert done.severity == "ok"


@pytest.mark.parametrize(
    ("line", "check", "severity", "device"),
    [
        (
            "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            "SXid 20034",
            "fatal",
            "nvswitch0",
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress",
            "SXid 12028",
            "warning",
            "nvswitch3",
        ),
        ("NVRM: GPU 0000:9b:00.0: RmInitAdapter failed! (0x62:0xffff:2351)", "GPU driver", "fatal", "0000:9b:00"),
        (
            "NVRM: knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!",
            "NVLink",
            "warning",
            "",
        ),
        (
            "mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 1): Detected insufficient power on the PCIe slot (27W).",
            "NIC power",
            "warning",
            "0000:5c:00",
        ),
        (
            "mlx5_core 0000:5c:00.1: Port module event[error]: module 0, Cable error, High Temperature",
            "NIC cable",
            "warning",
            "0000:5c:00",
        ),
        ("mlx5_core 0000:41:00.0 enp65s0f0np0: Link down", "NIC link", "warning", "0000:41:00"),
        ("mlx5_core 0000:41:00.0 enp65s0f0np0: Link up", "NIC link", "ok", "0000:41:00"),
        (
            "mlx5_core 0000:41:00.0: poll_health:813:(pid 0): device's health compromised - reached miss count",
            "NIC health",
            "fatal",
            "0000:41:00",
        ),
        (
            "nvidia 0000:9b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
            "PCIe",
            "fatal",
            "0000:9b:00",
        ),
        (
            "pcieport 0000:97:01.0: AER: Uncorrected (Non-Fatal) error received: 0000:97:01.0",
            "PCIe",
            "warning",
            "0000:97:01",
        ),
        ("pcieport 0000:97:01.0: pciehp: Slot(1): Link Down", "PCIe slot", "warning", "0000:97:01"),
    ],
)
def test_switches_cards_and_buses(line: str, check: str, severity: str, device: str) -> None:
    found = finding(line)
    assert found is not None
    assert (found.type, found.check, found.severity, found.device) == ("health", check, severity, device)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.144.03",
        "NVRM: Xid (PCI:0008:06:00): %d, Placeholder message",
        "NVRM: Xid (PCI:0008:06:00): 999999999, no such code",
        "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Data {0x50610002, 0x10100030}",
        "pcieport 0000:97:01.0: PCIe Bus Error: severity=Corrected, type=Physical Layer",
        "mlx5_core 0000:41:00.1: 63.008 Gb/s available PCIe bandwidth (8.0 GT/s PCIe x8 link)",
        "NVRM: NVLink link training completed",
    ],
)
def test_lines_that_say_nothing_of_the_hardware(line: str) -> None:
    assert MessageReader().read(line) is None


def test_a_gpu_that_is_told_lost_twice_is_lost_once() -> None:
    lines = [
        b"[Sun Feb 23 16:24:18 2025] NVRM: Xid (PCI:0000:9b:00): 79, pid=1, GPU has fallen off the bus.",
        b"[Sun Feb 23 16:24:19 2025] NVRM: GPU 0000:9b:00.0: GPU has fallen off the bus.",
    ]
    reader = KernelReader("n1")
    events, bad = reader.read(lines, NOW_MS)
    assert (len(events), bad, reader.repeats) == (1, [], 1)
    again, _ = KernelReader("n1").read(lines, NOW_MS + 60_000)
    assert again[0].sequence == events[0].sequence, "another reader, another time: the same event"


def storm(second: float) -> bytes:
    return b"[%.3f] NVRM: Xid (PCI:0000:9b:00): 31, pid=1, MMU Fault" % second


def test_a_storm_of_one_error_is_an_event_every_five_seconds() -> None:
    reader = KernelReader("n1", boot_ms=1_000_000_000_000.0, last_boot_stamp_ms=0.0)
    events, _ = reader.read([storm(100 + n / 100) for n in range(1000)], NOW_MS)
    assert [event.time_ms for event in events] == [1_000_000_100_000, 1_000_000_105_000]


def test_lines_since_the_boot_are_dated_by_the_newest_of_them() -> None:
    reader = KernelReader("n1")
    events, _ = reader.read([storm(100), b"[  700.000000] something else"], NOW_MS)
    assert events[0].time_ms == NOW_MS - 600_000
    later, _ = reader.read([storm(705)], NOW_MS + 5_500)  # half a second on its way
    assert later[0].time_ms == NOW_MS + 5_000
    rebooted, _ = reader.read([storm(20)], NOW_MS + 100_000)
    assert rebooted[0].time_ms == NOW_MS + 100_000


def test_a_clock_that_is_ahead_is_not_believed() -> None:
    ahead = b"2027-01-01T00:00:00+0000 n1 kernel: NVRM: Xid (PCI:0000:9b:00): 79, gone"
    (event,), _ = KernelReader().read([ahead], NOW_MS)
    assert (event.node, event.time_ms) == ("n1", NOW_MS)


def test_a_line_of_nobody_is_bad_and_the_next_is_read() -> None:
    lines = [b"NVRM: Xid (PCI:0000:9b:00): 79, gone", b"n1 kernel: NVRM: Xid (PCI:0000:9b:00): 79, gone", b"\xff\xfe"]
    events, bad = KernelReader().read(lines, NOW_MS)
    assert [event.node for event in events] == ["n1"]
    assert [error.reason for error in bad] == ["bad_name"]


def test_what_a_node_names_is_not_mixed_with_another() -> None:
    lines = [
        b"a kernel: NVRM: The NVIDIA GPU 0000:18:00.0",
        b"b kernel: NVRM: fallen off the bus and is not responding to commands.",
        b"a kernel: NVRM: fallen off the bus and is not responding to commands.",
    ]
    events, _ = KernelReader().read(lines, NOW_MS)
    assert [(event.node, event.device) for event in events] == [("b", ""), ("a", "0000:18:00")]


@pytest.mark.skipif(not DATA.is_dir(), reason="the public kernel log lines are not here")
def test_the_codes_of_public_lines_are_read() -> None:
    from pyarrow import parquet

    rows = parquet.read_table(DATA / "kernel_log_samples.parquet").to_pylist()
    coded = [row for row in rows if row["xid"] is not None and row["xid"] == row["xid"] and "Data {" not in row["line"]]
    events: list[NodeEvent] = []
    for row in coded:
        found, bad = KernelReader("n1").read([line.encode() for line in row["line"].splitlines()], NOW_MS)
        assert int(row["xid"]) in {event.code for event in found}, row["line"]
        assert not bad
        events += found
    assert {event.source for event in events} == {SOURCE}
    assert {classify_severity(event) for event in events} == {"fatal", "warning", ""}


@pytest.mark.parametrize(
    ("line", "check", "severity"),
    [
        ("amdgpu: 2 uncorrectable hardware errors detected in umc block", "RAS umc", "fatal"),
        ("amdgpu: socket: 0, die: 1, 1 new uncorrectable hardware errors detected in gfx block", "RAS gfx", "fatal"),
        (
            "amdgpu: {7} socket: 0, die: 1, 3 uncorrectable hardware errors detected in total in sdma block",
            "RAS sdma",
            "fatal",
        ),
        (
            "{1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!",
            "RAS ERREVENT_ATHUB_INTERRUPT",
            "fatal",
        ),
        ("amdgpu: GPU reset begin!", "GPU reset", "warning"),
        ("amdgpu: GPU reset succeeded, trying to resume", "GPU reset", "ok"),
        ("amdgpu: GPU reset(3) succeeded!", "GPU reset", "ok"),
        ("amdgpu: GPU reset(3) failed", "GPU reset", "fatal"),
    ],
)
def test_what_amdgpu_says_of_its_gpu(line: str, check: str, severity: str) -> None:
    found = finding(f"amdgpu 0000:C3:00.0: {line}")
    assert found is not None
    assert (found.type, found.check, found.severity, found.device) == ("health", check, severity, "0000:c3:00")


@pytest.mark.parametrize(
    "line",
    [
        "amdgpu: 7 correctable hardware errors detected in umc block",
        "amdgpu: 0 uncorrectable hardware errors detected in umc block",
        "amdgpu: no uncorrectable hardware errors detected in umc block",
        "amdgpu: ring gfx_0.0.0 timeout, signaled seq=1, emitted seq=3",
        "amdgpu: SMU is resumed successfully!",
    ],
)
def test_what_else_amdgpu_says_is_nothing_of_the_hardware(line: str) -> None:
    assert finding(f"amdgpu 0000:c3:00.0: {line}") is None
