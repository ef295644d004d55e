import json
from pathlib import Path

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.topology import Level
from fleetcast.ingest.gpus import shorten_model
from fleetcast.ingest.node_names import expand_nodes
from fleetcast.ingest.topology.load import load_topology, make_node_from_labels, parse_topology

TOML = """
[[rack]]
name = "r01"
block = "b1"
rail_group = "rg1"
cluster = "venus"
nodes = "n[001-003]"
gpus = 8
gpu_model = "H100"
gpu_memory_gib = 80
cpus = 128
host_memory_gib = 2048
pool = "train"

[[rack]]
name = "r02"
block = "b1"
nodes = ["n004", "n[006-007]"]
gpus = 4
nvlink_domain = "nvl-2"
"""


def write(folder: Path, text: str, name: str = "topology") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_toml_places_every_node_of_a_range(tmp_path: Path) -> None:
    topology = load_topology(write(tmp_path, TOML))
    assert topology.names == ("n001", "n002", "n003", "n004", "n006", "n007")
    assert topology.gpus.tolist() == [8, 8, 8, 4, 4, 4]
    assert topology.domain[Level.RACK].tolist() == [0, 0, 0, 1, 1, 1]
    assert topology.domain[Level.BLOCK].tolist() == [0] * 6
    assert topology.domain[Level.RAIL_GROUP].tolist() == [0, 0, 0, -1, -1, -1]
    assert topology.nodes[0].gpu_model == "H100"
    assert topology.nodes[0].pool == "train"
    assert topology.placed.all()


def test_a_node_is_its_own_nvlink_domain_unless_told_otherwise(tmp_path: Path) -> None:
    topology = load_topology(write(tmp_path, TOML))
    assert topology.domain[Level.NVLINK_DOMAIN].tolist() == [0, 1, 2, 3, 3, 3]
    assert topology.domain_names[Level.NVLINK_DOMAIN] == ("n001", "n002", "n003", "nvl-2")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[[rack]]\nname = "r1"\nnodes = "n[3-1]"', "'3-1'"),
        ('[[rack]]\nname = "r1"\nnodes = "n[a-b]"', "'a-b'"),
        ('[[rack]]\nname = "r1"\nnodes = "n[1-2"', "'n[1-2'"),
        ('[[rack]]\nname = "r1"\nnodes = "n[1][2]"', "'n[1][2]'"),
        ('[[rack]]\nname = "r1"\nnodes = "a/b"', "'a/b'"),
        ('[[rack]]\nname = "r1"\nnodes = "n1"\ngpus = -1', "gpus = -1"),
        ('[[rack]]\nname = "r1"\nnodes = "n1"\ngpu_memory_gib = inf', "gpu_memory_gib = inf"),
        ('[[rack]]\nname = "r1"\nnodes = "n1"\ngpu_modle = "H100"', "gpu_modle"),
        ('[[rack]]\nname = "r1"\nnodes = "n1,n1"', "'n1' is named twice"),
        ('[[rack]]\nname = "r1"\nnodes = "n[1-9999999]"', "n[1-9999999]"),
        ('[[rack]]\nname = "r1"', "nodes"),
        ("rack = []", "[[rack]]"),
        ("[[rack]", "TOML"),
    ],
)
def test_bad_toml_is_refused_with_the_offending_value(tmp_path: Path, text: str, named: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_topology(path)
    assert named in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_missing_or_binary_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read topology"):
        load_topology(tmp_path / "absent")
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read topology"):
        load_topology(path)


def test_a_slurm_tree_of_three_tiers_gives_racks_blocks_and_a_cluster() -> None:
    nodes = parse_topology(
        """
        # two leaves a spine, two spines under one core
        SwitchName=l1 Nodes=n[1-2]
        SwitchName=l2 Nodes=n[3-4] LinkSpeed=400
        SwitchName=l3 Nodes=n5
        SwitchName=s1 Switches=l[1-2]
        SwitchName=s2 \\
            Switches=l3
        switchname=core switches=s1,s2
        """
    )
    assert [node.name for node in nodes] == ["n1", "n2", "n3", "n4", "n5"]
    assert nodes[2].domains == {
        Level.NVLINK_DOMAIN: "n3",
        Level.RACK: "l2",
        Level.BLOCK: "s1",
        Level.CLUSTER: "core",
    }
    assert nodes[4].domains[Level.BLOCK] == "s2"


def test_a_slurm_tree_of_two_tiers_takes_the_root_as_block_and_cluster() -> None:
    (node,) = parse_topology("SwitchName=leaf Nodes=n1\nSwitchName=top Switches=leaf")
    assert node.domains[Level.RACK] == "leaf"
    assert node.domains[Level.BLOCK] == node.domains[Level.CLUSTER] == "top"


def test_a_slurm_tree_of_four_tiers_knows_rail_groups() -> None:
    (node,) = parse_topology(
        "SwitchName=a Nodes=n1\nSwitchName=b Switches=a\nSwitchName=c Switches=b\nSwitchName=d Switches=c"
    )
    assert [node.domains[level] for level in (Level.RACK, Level.RAIL_GROUP, Level.BLOCK, Level.CLUSTER)] == [*"abcd"]


def test_slurm_blocks_give_blocks() -> None:
    nodes = parse_topology("BlockName=b1 Nodes=n[01-18]\nBlockName=b2 Nodes=n[19-36]\nBlockSizes=18,36\n")
    assert len(nodes) == 36
    assert nodes[0].domains == {Level.NVLINK_DOMAIN: "n01", Level.BLOCK: "b1"}
    assert nodes[35].domains[Level.BLOCK] == "b2"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("SwitchName=a Nodes=n1\nSwitchName=b Nodes=n1", "'n1'"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2", "'a' is named twice"),
        ("SwitchName=a Switches=ghost", "'ghost'"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=l Nodes=n1", None),
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=a,b", "'b' is above itself"),
        ("SwitchName=a", "'a' needs either Nodes or Switches"),
        ("SwitchName=a Nodes=n1 Colour=red", "'colour'"),
        ("SwitchName=a Nodes=n1\nhello", "line 2"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2", "one file"),
        ("BlockName=b1\n", "nodes is missing"),
    ],
)
def test_bad_slurm_topologies_are_refused(text: str, named: str | None) -> None:
    if named is None:  # a cycle that holds no node harms nobody
        assert [node.name for node in parse_topology(text)] == ["n1"]
        return
    with pytest.raises(ConfigError) as raised:
        parse_topology(text)
    assert named in str(raised.value)


def test_kubernetes_nodes_are_placed_by_their_labels() -> None:
    item = {
        "metadata": {
            "name": "gpu-1",
            "labels": {
                "nvidia.com/gpu.clique": "0a1b.32766",
                "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
                "nvidia.com/gpu.memory": "81559",
                "cloud.provider.com/topology-rack": "rack-9",
                "cloud.provider.com/topology-block": "block-2",
                "topology.kubernetes.io/zone": "zone-a",
            },
        },
        "status": {"capacity": {"nvidia.com/gpu": "8", "cpu": "128", "memory": "2113502228Ki"}},
    }
    (node,) = parse_topology(json.dumps({"apiVersion": "v1", "items": [item]}))
    assert node.domains == {
        Level.NVLINK_DOMAIN: "0a1b.32766",
        Level.RACK: "rack-9",
        Level.BLOCK: "block-2",
        Level.CLUSTER: "zone-a",
    }
    assert (node.gpus, node.gpu_model, node.cpus) == (8, "H100", 128)
    assert node.host_memory_gib == pytest.approx(2015.6, abs=0.1)
    assert node.gpu_memory_gib == pytest.approx(79.6, abs=0.1)


def test_fabric_labels_map_leaf_spine_and_core() -> None:
    prefix = "network.topology.nvidia.com"
    labels = {f"{prefix}/{key}": key for key in ("accelerator", "leaf", "spine", "core")}
    domains = make_node_from_labels("n1", labels).domains
    assert domains == {
        Level.NVLINK_DOMAIN: "accelerator",
        Level.RACK: "leaf",
        Level.BLOCK: "spine",
        Level.CLUSTER: "core",
    }


def test_the_clique_wins_over_the_fabric_label() -> None:
    labels = {"network.topology.nvidia.com/accelerator": "other", "nvidia.com/gpu.clique": "clique"}
    assert make_node_from_labels("n1", labels).domains[Level.NVLINK_DOMAIN] == "clique"


@pytest.mark.parametrize(
    "text",
    ['{"n1": 3}', '{"n1": {"nvidia.com/gpu.count": "eight"}}', '{"items": [3]}', '{"items": [{}]}', "{"],
)
def test_bad_labels_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_topology(text)


def test_ranges_keep_their_leading_zeros() -> None:
    assert expand_nodes("n[08-11,20]-ib, x1") == ["n08-ib", "n09-ib", "n10-ib", "n11-ib", "n20-ib", "x1"]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("GRID A100-8C", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GB200", "GB200"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA Tesla T4", "T4"),
        ("NVIDIA-GeForce-RTX-4090", "GeForce RTX 4090"),
        ("", ""),
    ],
)
def test_models_have_one_short_name(name: str, short: str) -> None:
    assert shorten_model(name) == short


RACK = '[[rack]]\nname = "{name}"\nnodes = {nodes}\n{more}\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (RACK.format(name="r", nodes='["a[0-199999]", "b[0-199999]"]', more=""), "more than 200,000 nodes"),
        ("SwitchName=s[0-199999] Nodes=n[0-199999]\n", "more than 200,000 nodes"),
        ("".join(f"BlockName=b{i} Nodes=n{i}-[0-99999]\n" for i in range(3)), "more than 200,000 nodes"),
        (RACK.format(name="r", nodes='"n[0-99999],n99999"', more=""), "'n99999' is named twice"),
        (RACK.format(name="r", nodes='"n1"', more="cpus = 9223372036854775807"), "cpus = 9223372036854775807"),
        (RACK.format(name="r", nodes='"n1"', more='pool = "a\\nb"'), r"'a\\nb' is no name"),
        ("x = " + "[" * 9000, "not valid TOML"),
        ('{"a": ' * 9000, "not valid JSON"),
        ('{"items": [{"metadata": {"name": 7}}]}', "no Kubernetes node"),
        ('{"n1": {"nvidia.com/gpu.count": "99999"}}', "no count of at most 1,024"),
        (
            '{"items": [{"metadata": {"name": "n"}, "status": {"capacity": {"cpu": "1e999"}}}]}',
            "expected 0 to 1,000,000",
        ),
        (
            "SwitchName=s0 Nodes=n0\n" + "".join(f"SwitchName=s{i + 1} Switches=s{i}\n" for i in range(99)),
            "more than 32",
        ),
    ],
)
def test_a_topology_is_refused_before_it_grows_out_of_hand(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_topology(tmp_path / "t")


def test_a_long_line_costs_its_length_and_not_its_square() -> None:
    for text in ("SwitchName=a Nodes=b " + "c" * 200_000, "\n" * 200_000 + "SwitchName", "SwitchName" + " " * 200_000):
        with pytest.raises(ConfigError):
            parse_topology(text)
