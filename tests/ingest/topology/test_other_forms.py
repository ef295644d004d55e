"""Files as real programs print them: read, or refused as what they are."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.topology import Device, Level
from fleetcast.ingest.topology.host_wiring import count_hosts, is_topo_matrix, parse_nccl_xml, parse_topo_matrix
from fleetcast.ingest.topology.load import load_topology, parse_topology, parse_wiring
from tests.ingest.topology.test_host_wiring import MATRIX, NCCL

FIELD = Path(__file__).parents[2] / "field"
BLOCKS = """
- topology: train
  cluster_default: false
  block:
    block_sizes: [4]
    blocks:
      - block: b1
        nodes: n[01-02]
      - block: b2
        nodes: n[03-04]
- topology: lab
  cluster_default: true
  tree:
    switches:
      - {switch: leaf, nodes: "n04,x1"}
- topology: rest
  cluster_default: false
  flat: true
"""
NODES = """
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Node
  metadata:
    name: n1
    labels: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3, cloud.google.com/gce-topology-block: b7}
  status: {capacity: {cpu: "96", memory: 1Ti, nvidia.com/gpu: "8"}}
"""
PODS = '{"apiVersion": "v1", "kind": "PodList", "items": [{"kind": "Pod", "metadata": {"name": "p"}}]}'


def test_a_matrix_with_spaces_is_read() -> None:
    text = (FIELD / "33-topo-matrix-spaces.txt").read_text()
    assert parse_wiring(text) == tuple(Device(f"mlx5_{nic}", (at,), at) for at, nic in enumerate((0, 1, 4, 5)))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.expandtabs(8),
        lambda text: text.replace("\t", " "),
        lambda text: "\n$ nvidia-smi topo -m\n" + text.expandtabs(10),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\x1b[4m" + text.replace("Affinity\n", "Affinity\x1b[0m\n", 1).expandtabs(8),
    ],
)
def test_a_matrix_is_read_as_terminals_copy_it(change: Callable[[str], str]) -> None:
    assert parse_wiring(change(MATRIX)) == parse_topo_matrix(MATRIX)


def test_old_drivers_name_adapters_in_the_header() -> None:
    text = (
        "\tGPU0\tGPU1\tmlx5_0\tmlx5_2\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tNV12\tPXB\tSYS\t0-63\t0\nGPU1\tNV12\t X \tSYS\tPXB\t64-127\t1\n"
        "mlx5_0\tPXB\tSYS\t X \tSYS\t\t\n"
    )
    for form in (text, text.expandtabs(8)):
        assert parse_wiring(form) == (Device("mlx5_0", (0,), 0), Device("mlx5_2", (1,), 1))


def test_one_gpu_is_a_matrix_too() -> None:
    text = "        GPU0    NIC0    CPU Affinity    NUMA Affinity\nGPU0     X      PIX     0-31    0\n"
    assert parse_wiring(text) == (Device("mlx5_0", (0,), 0),)


def test_a_matrix_with_spaces_that_is_cut_is_refused() -> None:
    text = (FIELD / "33-topo-matrix-spaces.txt").read_text()
    with pytest.raises(ConfigError, match="is the file cut"):
        parse_wiring(text[: text.index("GPU3    NV18    NV18    NV18     X      SYS") + 20])


def test_a_matrix_of_peers_is_refused_as_what_it_is() -> None:
    text = " \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n"
    assert is_topo_matrix(text)
    with pytest.raises(ConfigError, match=r"nvidia-smi topo -p2p: .*nvidia-smi topo -m"):
        parse_wiring(text)


def test_a_tree_of_topology_yaml_is_read() -> None:
    topology = load_topology(FIELD / "35-slurm-topology.yaml")
    assert len(topology) == 8
    assert topology.nodes[5].domains[Level.RACK] == "leaf2"
    assert topology.nodes[0].domains[Level.BLOCK] == "spine"


def test_blocks_and_several_topologies_are_read_the_default_first() -> None:
    nodes = {node.name: node.domains for node in parse_topology(BLOCKS)}
    blocks = {name: domains.get(Level.BLOCK) for name, domains in nodes.items()}
    assert blocks == {"n01": "b1", "n02": "b1", "n03": "b2", "n04": None, "x1": None}
    assert nodes["n04"][Level.RACK] == "leaf"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- topology: a\n  torus3d: {}\n", "topology 'a' has none of `tree`, `block` and `flat`"),
        ("- topology: a\n  flat: true\n", "names no node"),
        ("- topology: a\n  tree:\n    switches: {}\n", r"\[0\].tree.switches: is {}, must be a list of objects"),
        (
            "- topology: a\n  tree:\n    switches:\n    - switch: s\n",
            "switch 's' of 'a' needs either nodes",
        ),
        ("- topology: a\n  tree: {switches: [{switch: s, children: t}]}\n", "names 't', which no line defines"),
        ("- topology: a\n   tree: b\n", "read as YAML: "),
    ],
)
def test_a_wrong_topology_yaml_is_refused_with_the_place(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_topology(text)


def test_what_scontrol_prints_is_read() -> None:
    text = (
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-2]\nSwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[3-4]\n"
        "SwitchName=s2 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=s[0-1]\n"
    )
    assert [node.domains[Level.RACK] for node in parse_topology(text)] == ["s0", "s0", "s1", "s1"]
    blocks = "BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\nBlockName=b2 BlockIndex=1 Nodes=n3 BlockSize=2\n"
    assert [node.domains[Level.BLOCK] for node in parse_topology(blocks)] == ["b1", "b1", "b2"]


def test_nodes_of_kubernetes_are_read_as_yaml_and_alone() -> None:
    (node,) = parse_topology(NODES)
    assert (node.name, node.gpus, node.gpu_model, node.domains[Level.BLOCK]) == ("n1", 8, "H100", "b7")
    (alone,) = parse_topology('{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n2"}, "status": {}}')
    assert alone.name == "n2"


def test_two_hosts_in_one_dump_are_not_one_host() -> None:
    text = (FIELD / "36-nccl-two-hosts.xml").read_text()
    assert count_hosts(text) == 2
    assert [device.name for device in parse_nccl_xml(text)] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert (count_hosts(NCCL), len(parse_nccl_xml(NCCL))) == (1, 3)


def test_two_hosts_of_one_dump_that_differ_are_refused() -> None:
    text = (FIELD / "36-nccl-two-hosts.xml").read_text()
    last = text.rindex('name="mlx5_3"')
    with pytest.raises(ConfigError, match="holds 2 hosts, and those with host_hash 0xaaaa and 0xbbbb are wired"):
        parse_nccl_xml(text[:last] + text[last:].replace("mlx5_3", "mlx5_9"))


def test_two_hosts_have_the_wiring_that_each_has_alone() -> None:
    cpu = NCCL.partition("<cpu")[2].partition("</system>")[0]
    one, two = (f'<cpu host_hash="{name}"{cpu}' for name in ("0x1", "0x2"))
    assert set(parse_nccl_xml(f'<system version="2">{one}{two}</system>')) == set(parse_nccl_xml(NCCL))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NodeName=n1 Arch=x86_64 CPUTot=96\n   Gres=gpu:8\n", "looks like `scontrol show node` or slurm.conf"),
        ("NAME   STATUS   ROLES    AGE   VERSION\nn1     Ready    <none>   5d    v1.31\n", "add -o json"),
        ('CA: n1 mlx5_0:\n   0x1 1 1[  ] ==( 4X  53.125 Gbps Active/  LinkUp)==>  2 3[  ] "s"\n', "`iblinkinfo`"),
        ("CA 'mlx5_0'\n\tCA type: MT4129\n", "looks like `ibstat`"),
        ('Ca\t: 0x1070fd0300 ports 1 "n1 mlx5_0"\n', "`ibhosts`"),
        ("Thu Nov 26 2026\n+-----+\n| NVIDIA-SMI 570.1   Driver Version: 570.1 |\n", "table of `nvidia-smi`"),
        ("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n", "`nvidia-smi -L`"),
        ("0000:0f:00.0 3D controller: NVIDIA Corporation GH100\n", "`lspci`"),
        ('<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology version="2.0"/>', "hwloc's XML"),
        ("<html><body>Not found</body></html>", "a page of HTML"),
        (PODS, "holds a Kubernetes 'Pod'"),
        ('{"apiVersion": "v1", "kind": "ConfigMap", "data": {}}', "it holds a Kubernetes 'ConfigMap', expected nodes"),
        ('{"nodes": [{"name": "n1", "gres": "gpu:8"}], "errors": []}', "it looks like Slurm's nodes as JSON"),
        ('{"meta": {}, "jobs": [], "warnings": []}', "it looks like Slurm's jobs as JSON"),
        ("sinfo:\n- node: {}\nmeta: {}\n", "it looks like `sinfo --json`|read as YAML: expected Slurm's"),
        ("hello world\n", "read as our TOML: not valid TOML: .*; read are our TOML, Slurm's topology.conf"),
        ("name: fleet\nnodes: [n1]\n", "read as YAML: expected Slurm's topology.yaml"),
        ('[[rack]]\nname = "r"\nnodes = "n1"\ngpu = 8\n', "line 4: rack.0..gpu: no such key; did you mean gpus"),
    ],
)
def test_a_file_of_another_kind_is_refused_as_what_it_is(text: str, says: str) -> None:
    assert parse_wiring(text) is None
    with pytest.raises(ConfigError, match=says):
        parse_topology(text)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b"SwitchName=s1 Nodes=n1", mtime=0), "it is gzip: unpack it first"),
        ("SwitchName=s1 Nodes=n1".encode("utf-16"), "it is UTF-16: write it as UTF-8"),
        ("SwitchName=Zürich Nodes=n1".encode("latin-1"), "it is no UTF-8: byte 12 is 0xfc"),
    ],
)
def test_a_file_that_is_no_text_is_refused_as_what_it_is(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "topology.conf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"cannot read topology .*topology.conf: {says}"):
        load_topology(path)
