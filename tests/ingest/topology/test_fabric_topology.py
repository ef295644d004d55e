import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.topology import Device, Level
from fleetcast.ingest.topology.fabric_topology import make_fabric_nodes
from fleetcast.ingest.topology.ibnetdiscover import parse_ibnetdiscover
from fleetcast.ingest.topology.load import load_topology, parse_topology
from tests.ingest.topology.test_host_wiring import MATRIX

DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))


def fabric(cables: dict[str, str], speed: str = "4xNDR") -> str:
    """An ibnetdiscover output of two leaves below one spine. cables: "n1 mlx5_0" -> number of its leaf."""
    lines = ["", "switchguid=0xf0(f0)"]
    for leaf in ("1", "2"):
        lines.append(
            f'Switch\t4 "S-00000000000000f{leaf}"\t\t# "MF0;leaf-{leaf}:MQM9701/U1" enhanced port 0 lid {leaf} lmc 0'
        )
        for port, (name, to) in enumerate(cables.items(), 1):
            if to == leaf:
                lines.append(f'[{port}]\t"H-{port:016x}"[1]({port:x}) \t\t# "{name}" lid {10 + port} {speed}')
        lines.append(f'[40]\t"S-00000000000000ff"[{leaf}]\t\t# "MF0;spine-1:MQM9701/U1" lid 9 4xNDR')
    lines.append('Switch\t4 "S-00000000000000ff"\t\t# "MF0;spine-1:MQM9701/U1" enhanced port 0 lid 9 lmc 0')
    for port, (name, to) in enumerate(cables.items(), 1):
        lines.append(f'Ca\t1 "H-{port:016x}"\t\t# "{name}"')
        behind = f'# lid {10 + port} lmc 0 "MF0;leaf-{to}:MQM9701/U1" lid 1 {speed}'
        lines.append(f'[1]({port:x}) \t"S-00000000000000f{to}"[{port}]\t\t{behind}')
    return "\n".join(lines) + "\n"


def test_a_node_at_one_leaf_lies_in_its_rack_below_its_spine() -> None:
    nodes = {node.name: node for node in parse_topology(fabric({"n1 mlx5_0": "1", "n2 mlx5_0": "2"}))}
    assert nodes["n1"].domains == {Level.NVLINK_DOMAIN: "n1", Level.RACK: "leaf-1", Level.BLOCK: "spine-1"}
    assert nodes["n2"].domains[Level.RACK] == "leaf-2"
    assert nodes["n1"].devices == (Device("mlx5_0", bytes_per_s=5e10),)


def test_nodes_that_share_their_leaves_are_a_rail_group_and_a_pulled_cable_changes_nothing() -> None:
    cables = {f"n{node} mlx5_{rail}": str(rail + 1) for node in (1, 2, 3) for rail in (0, 1)}
    del cables["n3 mlx5_1"]
    nodes = {node.name: node for node in parse_topology(fabric(cables))}
    assert nodes["n1"].domains[Level.RAIL_GROUP] == nodes["n2"].domains[Level.RAIL_GROUP] == "leaf-1"
    assert Level.RACK not in nodes["n1"].domains
    assert [device.rail for device in nodes["n2"].devices] == [0, 1]
    assert nodes["n3"].domains[Level.RACK] == "leaf-1", "one leaf is all it is known to have"


def test_adapters_that_do_not_say_whose_they_are_are_no_nodes() -> None:
    text = fabric({"n1 HCA-1": "1", "MT4129 ConnectX7   Mellanox Technologies": "1"})
    assert [node.name for node in parse_topology(text)] == ["n1"]
    with pytest.raises(ConfigError, match="names its host"):
        parse_topology(fabric({"Mellanox Technologies Aggregation Node": "1"}))


def test_the_ports_report_says_the_same() -> None:
    text = (
        "# of the fabric of the first hall\n"
        "CA   134  1 0x01 4x EDR - SW  1719 10 0xf1 ( 'n1 HCA-1' - 'leaf1' )\n"
        "SW  1719  1 0xf1 4x EDR - SW  1516  1 0xf2 ( 'leaf1' - 'spine1' )\n"
        "SW  1719 37 0xf1 4x ???                        'leaf1'\n"
    )
    (node,) = parse_topology(text)
    assert (node.name, node.domains[Level.RACK], node.domains[Level.BLOCK]) == ("n1", "leaf1", "spine1")
    assert node.devices == (Device("mlx5_0", bytes_per_s=12.5e9),)


def test_a_graph_of_netq() -> None:
    def member(name: str, tier: int, kind: str) -> dict[str, object]:
        return {"id": f"id-{name}", "name": name, "tier": tier, "device_type": kind}

    graph = {
        "nodes": [
            {"compounded_nodes": [member("leaf", 1, "switch"), member("spine", 2, "switch")]},
            {"compounded_nodes": [member("n1", -1, "host"), member("n2", -1, "host")]},
        ],
        "links": [
            {"src": "id-leaf", "target": "id-n1"},
            {"src": "id-n2", "target": "id-leaf"},
            {"src": "id-leaf", "target": "id-spine"},
        ],
    }
    nodes = parse_topology(json.dumps([graph]))
    assert [(node.name, node.domains[Level.RACK], node.domains[Level.BLOCK]) for node in nodes] == [
        ("n1", "leaf", "spine"),
        ("n2", "leaf", "spine"),
    ]
    computes = [{"Name": "n1", "DomainUUID": "nvl-7", "GpuIDList": ["a", "b"]}]
    (node,) = parse_topology(json.dumps(computes).replace("[{", "[ \n {"))
    assert (node.gpus, node.domains[Level.NVLINK_DOMAIN]) == (2, "nvl-7")


def test_a_folder_merges_what_its_files_say(tmp_path: Path) -> None:
    (tmp_path / "10-racks.toml").write_text('[[rack]]\nname = "r1"\nnodes = "n[1-2]"\ngpus = 2\ngpu_model = "H100"\n')
    (tmp_path / "20-fabric.txt").write_text(fabric({"n1 mlx5_0": "1", "n1 mlx5_4": "2", "n3 mlx5_0": "1"}, "4xHDR"))
    (tmp_path / "H100.txt").write_text(MATRIX)
    (tmp_path / ".swp").write_text("garbage")
    topology = load_topology(tmp_path)
    assert topology.names == ("n1", "n2", "n3")
    assert topology.nodes[0].domains[Level.RACK] == "r1"
    assert topology.nodes[0].domains[Level.BLOCK] == "spine-1"
    assert topology.find_devices(0)[:2] == (Device("mlx5_0", (0,), 0, 2.5e10), Device("mlx5_4", (1,), 1, 2.5e10))
    assert topology.find_devices(1)[1] == Device("mlx5_4", (1,), 1)
    assert topology.find_devices(2) == (Device("mlx5_0", bytes_per_s=2.5e10),), "no H100, as far as we know"
    later = topology.add_unplaced_nodes(["n9"]).update_gpu_counts({"n9": 2}, {"n9": "H100"})
    assert later.find_devices(3)[0] == Device("mlx5_0", (0,), 0), (
        "a node that only telemetry knows is wired as its model is"
    )


def test_a_wiring_alone_speaks_of_all_nodes(tmp_path: Path) -> None:
    path = tmp_path / "topo.txt"
    path.write_text(MATRIX)
    assert load_topology(path).add_unplaced_nodes(["n1"]).find_devices(0)[0] == Device("mlx5_0", (0,), 0)


def test_a_fault_in_a_folder_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[[rack]]\n")
    with pytest.raises(ConfigError, match=r"a\.toml"):
        load_topology(tmp_path)


@pytest.mark.skipif(not (DATA / "placement").is_dir(), reason="needs FLEETCAST_DATA")
def test_a_real_fabric_of_forty_switches() -> None:
    path = DATA / "placement" / "topograph" / "ibnetdiscover_dgx_ndr_40sw.out.gz"
    with gzip.open(path, "rt") as file:
        nodes = make_fabric_nodes(parse_ibnetdiscover(file.read()))
    assert len(nodes) == 122
    groups = Counter(node.domains[Level.RAIL_GROUP] for node in nodes)
    assert len(groups) == 8
    assert {node.domains[Level.BLOCK] for node in nodes} == {"A10-P1-IBSPINE-01"}
    assert all(device.bytes_per_s == 5e10 for node in nodes for device in node.devices)
    netq = DATA / "placement" / "topograph" / "output" / "netq" / "topologyGraph.json"
    assert len(parse_topology(netq.read_text())) == 8
