import os
from pathlib import Path

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.topology import Device
from fleetcast.ingest.topology.host_wiring import is_nccl_xml, is_topo_matrix, parse_nccl_xml, parse_topo_matrix
from fleetcast.ingest.topology.load import parse_wiring

DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))
MATRIX = (
    "\tGPU0\tGPU1\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNV18\tPXB\tNODE\tSYS\t0-63\t0\n"
    "GPU1\tNV18\t X \tNODE\tPIX\tSYS\t0-63\t0\n"
    "NIC0\tPXB\tNODE\t X \tNODE\tSYS\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_4\n  NIC2: mlx5_bond_0\n"
)
NCCL = """<system version="1">
  <cpu numaid="0">
    <pci busid="0000:10:00.0" class="0x060400">
      <pci busid="0000:11:00.0" class="0x030200"><gpu dev="1" sm="90"/></pci>
      <pci busid="0000:12:00.0" class="0x020700"><nic><net name="mlx5_9" speed="400000"/></nic></pci>
    </pci>
    <pci busid="0000:20:00.0" class="0x060400">
      <pci busid="0000:21:00.0" class="0x030200"><gpu dev="0" sm="90"/></pci>
      <pci busid="0000:22:00.0" class="0x020700"><nic><net name="mlx5_3" speed="400000"/></nic></pci>
    </pci>
    <nic><net name="eth0" speed="100000"/></nic>
  </cpu>
</system>
"""


def test_the_nearest_adapter_of_a_gpu_is_the_one_at_its_switch() -> None:
    assert parse_topo_matrix(MATRIX) == (
        Device("mlx5_0", (0,), 0),
        Device("mlx5_4", (1,), 1),
        Device("mlx5_bond_0", (), -1),
    )


def test_without_a_legend_adapters_are_numbered_and_underlines_are_ignored() -> None:
    plain = "\x1b[4m" + MATRIX.split("\n\n", 1)[0].replace("Affinity\n", "Affinity\x1b[0m\n", 1)
    assert is_topo_matrix(plain)
    assert [device.name for device in parse_topo_matrix(plain)] == ["mlx5_0", "mlx5_1", "mlx5_2"]


def test_a_virtual_machine_that_hides_its_bus_tells_nothing() -> None:
    text = MATRIX.replace("PXB", "PHB").replace("PIX", "PHB").replace("NODE", "PHB")
    assert {device.gpus for device in parse_topo_matrix(text)} == {()}


def test_a_dump_of_nccl_names_gpus_and_adapters() -> None:
    assert is_nccl_xml(NCCL)
    assert set(parse_nccl_xml(NCCL)) == {Device("mlx5_9", (1,), 1), Device("mlx5_3", (0,), 0), Device("eth0")}


def test_a_template_of_a_cloud_is_numbered_by_bus() -> None:
    text = NCCL
    for inner in ('<gpu dev="0" sm="90"/>', '<gpu dev="1" sm="90"/>', '<nic><net name="eth0" speed="100000"/></nic>'):
        text = text.replace(inner, "")
    for name in ("mlx5_9", "mlx5_3"):
        text = text.replace(f'<nic><net name="{name}" speed="400000"/></nic>', "")
    assert parse_nccl_xml(text) == (Device("mlx5_0", (0,), 0), Device("mlx5_1", (1,), 1))


def test_a_file_of_addresses_alone_is_valid_and_names_no_adapter() -> None:
    text = """<!-- of a cloud -->
<system version="1">
  <cpu numaid="0"><pci busid="0000:00:16.0"/><pci busid="0000:00:17.0"/></cpu>
  <cpu numaid="1"><pci busid="0000:00:1a.0"/></cpu>
</system>"""
    assert parse_wiring(text) == ()


def test_a_device_whose_class_is_left_out_is_what_its_children_say() -> None:
    for pci_class in (' class="0x030200"', ' class="0x020700"'):
        assert pci_class in NCCL
    text = NCCL.replace(' class="0x030200"', "").replace(' class="0x020700"', "")
    assert set(parse_nccl_xml(text)) == {Device("mlx5_9", (1,), 1), Device("mlx5_3", (0,), 0), Device("eth0")}


def test_graphs_of_rings_tell_of_no_adapter() -> None:
    ring = '<channel><net dev="0"/><gpu dev="0"/><gpu dev="1"/></channel>'
    assert parse_wiring(f'<graphs version="1"><graph id="0">{ring}</graph></graphs>') == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<system version="1"><cpu/></system>', "no GPU and no adapter"),
        (
            '<system version="1"><cpu><pci busid="0000:10:00.0" class="0x060400"/></cpu></system>',
            "no GPU and no adapter",
        ),
        ('<system version="1"><cpu>', "not valid XML"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><system version="1"/>', "document type"),
        ("<system>" + "<pci>" * 100, "deeper than"),
        (MATRIX.replace("GPU1\tNV18\t X \tNODE\tPIX\tSYS\t0-63\t0", "GPU1\tNV18"), "GPU1"),
    ],
)
def test_what_is_no_wiring_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_wiring(text)


@pytest.mark.skipif(not (DATA / "placement").is_dir(), reason="needs FLEETCAST_DATA")
def test_files_of_real_hosts() -> None:
    matrix = (DATA / "placement" / "nvidia-smi-topo" / "h100_8gpu_9nic_epyc.txt").read_text()
    assert [(device.gpus, device.rail) for device in parse_topo_matrix(matrix)] == [((k,), k) for k in range(8)] + [
        ((), -1)
    ]
    for name, wanted in (
        ("azure_ndv5-topo.xml", [(gpu,) for gpu in range(8)]),
        ("azure_ndv4-topo.xml", [(gpu,) for gpu in range(8)]),
        ("aws_p4d-24xl-topo.xml", [(0, 1), (2, 3), (4, 5), (6, 7)]),
    ):
        devices = parse_nccl_xml((DATA / "placement" / "nccl-xml" / name).read_text())
        assert [device.gpus for device in devices] == wanted, name


@pytest.mark.skipif(not (DATA / "placement" / "nccl-xml").is_dir(), reason="needs FLEETCAST_DATA")
def test_every_public_xml_is_read() -> None:
    files = sorted((DATA / "placement" / "nccl-xml").glob("*.xml"))
    assert files
    adapters = {path.name: parse_wiring(path.read_text()) for path in files}
    assert None not in adapters.values()
    assert adapters.get("aws_g5.48xl-topo.xml", ()) == ()
