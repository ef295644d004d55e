"""What schedulers say of nodes, beside what exporters count: the inventory of the fleet."""

import json
from pathlib import Path
from typing import Any

import pytest

from fleetcast.clients.kubernetes import Changes, Listing
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Phase, Started, Submitted
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.kubernetes.source import KINDS, KubernetesSource
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.ingest.topology.load import load_topology
from fleetcast.service.pipeline.guarded_source import GuardedSource
from fleetcast.service.pipeline.inventory import FleetInventory
from fleetcast.service.pipeline.tick import find_whole_job
from tests.field.scraped_world import ScrapedWorld
from tests.ingest.small_kubernetes import SmallKubernetes, job, pod, running
from tests.service.bare_world import IDLE, NOW_MS, BareWorld, page

FIELD = Path(__file__).parents[2] / "field"
PAGE = (FIELD / "06-kube-time-slicing-page.prom").read_bytes()
SHARED = FIELD / "06-kube-time-slicing.json"


class KubernetesWorld(BareWorld):
    """A pipeline with the source "kubernetes", whose objects the test gives."""

    def __init__(self, folder: Path, *nodes: dict[str, Any], **more: Any) -> None:
        self.source = KubernetesSource(Entities(), ManualClock(0), {}, server=SmallKubernetes())
        super().__init__(folder, sources=[self.source], **more)
        self.source._clock = self.clock
        self.source.apply_messages([Listing(name, (), "1") for name in KINDS])
        self.put(*nodes)

    def put(self, *nodes: dict[str, Any], kind: str = "ADDED", name: str = "nodes") -> Batch:
        decode = {row.name: row.decode for row in self.source.list_collections()}[name]
        rows = [{**node, "metadata": {"uid": "u", "resourceVersion": "2", **node["metadata"]}} for node in nodes]
        batch = self.source.apply_messages(
            [Changes(name, tuple((kind, decode(json.dumps(row).encode())) for row in rows), "2")]
        )
        self.pipeline.apply_batch(batch)
        return batch


def node(name: str, gpus: int, **labels: str) -> dict[str, Any]:
    capacity = {"cpu": "64", "memory": "64Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    about = {"name": name, "labels": {f"nvidia.com/{key.replace('_', '.')}": value for key, value in labels.items()}}
    return {"metadata": about, "status": {"capacity": capacity}}


def inventory(world: BareWorld) -> dict[str, tuple[int, str]]:
    topology = world.pipeline.state.topology
    return {spec.name: (spec.gpus, spec.gpu_model) for spec in topology.nodes}


def test_of_a_time_sliced_board_one_gpu_is_given_out(tmp_path: Path) -> None:
    world = BareWorld(tmp_path, load_topology(SHARED))
    board = world.run(60, **{"g5-1": PAGE})
    assert world.decide(board, gpus_per_node=8).outcome == "refused"
    assert board.json("doc.fleet")["gpus"]["total"] == 1


def test_an_exporter_wins_over_a_count_of_shares_that_no_label_explains(tmp_path: Path) -> None:
    document = json.loads(SHARED.read_text())
    document["items"][0]["metadata"]["labels"] = {}
    (tmp_path / "nodes.json").write_text(json.dumps(document))
    world = BareWorld(tmp_path / "state", load_topology(tmp_path / "nodes.json"))
    board = world.run(60, **{"g5-1": PAGE})
    assert inventory(world)["g5-1"][0] == 1
    assert world.decide(board, gpus_per_node=2).outcome == "refused"
    reasons = board.json("doc.fleet")["nodes"][0]
    assert "gpus_missing" not in json.dumps(reasons), "eleven shares are no boards that are missing"


def test_an_exporter_wins_over_a_file_and_the_difference_is_missing(tmp_path: Path) -> None:
    world = BareWorld(tmp_path, Topology.build([NodeSpec("g5-1", gpus=4)]))
    world.run(60, **{"g5-1": PAGE})
    assert world.pipeline.state.topology.gpus.tolist() == [1]
    assert world.pipeline.state.topology.stated_gpus.tolist() == [4]


def test_a_site_with_kubernetes_alone_has_an_inventory(tmp_path: Path) -> None:
    labels = {"gpu_product": "NVIDIA-H100-80GB-HBM3", "gpu_count": "8", "gpu_memory": "81559"}
    world = KubernetesWorld(tmp_path, node("a", 8, **labels), node("b", 4), node("cpu-only", 0))
    board = world.tick()
    assert inventory(world) == {"a": (8, "H100"), "b": (4, "")}
    assert board.json("doc.fleet")["gpus"]["total"] == 12
    spec = world.pipeline.state.topology.nodes[0]
    assert (spec.cpus, spec.host_memory_gib, round(spec.gpu_memory_gib)) == (64, 64.0, 80)


def test_nodes_that_come_change_and_go_change_the_inventory(tmp_path: Path) -> None:
    world = KubernetesWorld(tmp_path, node("a", 8))
    world.tick()
    generation = world.pipeline.state.topology.generation
    world.tick()
    assert world.pipeline.state.topology.generation == generation, "no news"
    world.put(node("a", 4), node("b", 2))
    world.tick()
    assert inventory(world) == {"a": (4, ""), "b": (2, "")}
    world.put(node("a", 4), kind="DELETED")
    world.tick()
    assert inventory(world) == {"a": (0, ""), "b": (2, "")}


def test_labels_that_cannot_be_read_are_a_bad_record_and_the_rest_is_read(tmp_path: Path) -> None:
    world = KubernetesWorld(tmp_path)
    batch = world.put(node("a", 8, gpu_count="eight"), node("b", 4))
    assert [error.reason for error in batch.bad] == ["kubernetes_object"]
    assert "'eight' is no count" in batch.bad[0].detail
    world.tick()
    assert inventory(world) == {"b": (4, "")}


def test_a_file_wins_over_the_scheduler_and_the_scheduler_fills_what_it_leaves_out(tmp_path: Path) -> None:
    file = Topology.build([NodeSpec("a", gpus=2, pool="train", domains={Level.RACK: "r1"})])
    stated = node("a", 4, gpu_product="Tesla-T4")
    stated["metadata"]["labels"] |= {"cloud.provider.com/topology-rack": "r9", "topology.kubernetes.io/zone": "z"}
    world = KubernetesWorld(tmp_path, stated, topology=file)
    world.tick()
    (spec,) = world.pipeline.state.topology.nodes
    assert (spec.gpus, spec.gpu_model, spec.pool, spec.cpus) == (2, "T4", "train", 64)
    assert (spec.domains[Level.RACK], spec.domains[Level.CLUSTER]) == ("r1", "z")


def test_the_inventory_survives_a_restart_of_the_source(tmp_path: Path) -> None:
    world = KubernetesWorld(tmp_path, node("a", 8))
    again = KubernetesSource(Entities(), world.clock, {}, server=SmallKubernetes())
    again.seek(json.loads(json.dumps(world.source.position())))
    assert again.nodes() == world.source.nodes()
    assert [*again.nodes()] == ["a"]


def test_a_source_from_outside_that_answers_nonsense_has_no_nodes(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(MemorySource):
        def nodes(self) -> Any:
            return {"a": 8}

    source = GuardedSource(Odd(), Odd)
    assert source.nodes() == {}
    assert "expected a mapping of names to NodeSpec" in source.last_error


def machines(world: BareWorld | ScrapedWorld) -> dict[str, int]:
    topology = world.pipeline.state.topology
    return {name: gpus for name, gpus in zip(topology.names, topology.gpus.tolist(), strict=True) if gpus}


def addressed(name: str, gpus: int, *addresses: tuple[str, str]) -> dict[str, Any]:
    found = node(name, gpus)
    found["status"]["addresses"] = [{"type": kind, "address": address} for kind, address in addresses]
    return found


PAGE_OF_HOST = page("ip-10-0-0-5", [(IDLE, {})] * 4)


def test_telemetry_under_a_host_name_belongs_to_the_kubernetes_node(tmp_path: Path) -> None:
    world = KubernetesWorld(tmp_path, addressed("gpu-1", 4, ("Hostname", "ip-10-0-0-5"), ("InternalIP", "10.0.0.5")))
    world.tick()
    board = world.run(60, **{"10.0.0.5": PAGE_OF_HOST})
    assert machines(world) == {"gpu-1": 4}
    assert world.decide(board, gpus_per_node=4).ranks[0].node == "gpu-1"
    assert "gpus_missing" not in json.dumps(board.json("doc.fleet"))


def test_a_machine_whose_names_are_learnt_after_its_telemetry_is_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://10.0.0.5:9400/metrics"
    world = ScrapedWorld(tmp_path, [url], monkeypatch)
    world.run(60, {url: PAGE_OF_HOST})
    assert machines(world) == {"ip-10-0-0-5": 4}
    spec = NodeSpec("gpu-1", gpus=4, other_names=("ip-10-0-0-5",))
    monkeypatch.setattr("fleetcast.service.pipeline.tick_inputs.merge_source_nodes", lambda _: {"gpu-1": spec})
    world.run(60)
    assert machines(world) == {"gpu-1": 4}


def test_a_topology_file_decides_the_name(tmp_path: Path) -> None:
    file = Topology.build([NodeSpec("ip-10-0-0-5", gpus=4)])
    world = KubernetesWorld(tmp_path, addressed("gpu-1", 4, ("Hostname", "ip-10-0-0-5")), topology=file)
    world.tick()
    assert machines(world) == {"ip-10-0-0-5": 4}


def test_a_name_that_two_nodes_have_stands_for_neither(tmp_path: Path) -> None:
    same = ("Hostname", "worker")
    world = KubernetesWorld(tmp_path, addressed("a", 4, same), addressed("b", 4, same, ("Hostname", "localhost")))
    world.tick()
    table = world.pipeline.state.entities[EntityKind.NODE]
    assert (table.resolve_name("worker"), table.resolve_name("localhost"), table.resolve_name("a")) == (
        "worker",
        "localhost",
        "a",
    )


def test_an_exporter_that_reports_under_its_pod_is_on_the_pods_node(tmp_path: Path) -> None:
    world = KubernetesWorld(tmp_path, node("gpu-1", 4))
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "dcgm-exporter", "uid": "d", "controller": True}
    about = {"name": "dcgm-exporter-6ldbb", "namespace": "gpu", "uid": "p", "ownerReferences": [owner]}
    pod = {"metadata": about, "spec": {"nodeName": "gpu-1"}, "status": {"phase": "Running", "podIP": "10.244.1.7"}}
    world.put(pod, name="pods")
    world.tick()
    told = page("dcgm-exporter-6ldbb", [(IDLE, {})] * 4)
    world.run(30, **{"10.244.1.7": told})
    world.run(30, **{"dcgm-exporter": told})
    assert machines(world) == {"gpu-1": 4}


def test_a_slurm_node_in_a_pod_is_the_node_that_the_pod_is_on(tmp_path: Path) -> None:
    world = KubernetesWorld(tmp_path, node("computeinstance-1", 4))
    owner = {"apiVersion": "slurm.nebius.ai/v1", "kind": "NodeSet", "name": "worker", "uid": "s", "controller": True}
    about = {"name": "worker-0", "namespace": "soperator", "uid": "w", "ownerReferences": [owner]}
    container = {"name": "slurmd", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    spec = {"nodeName": "computeinstance-1", "containers": [container]}
    world.put({"metadata": about, "spec": spec, "status": {"phase": "Running"}}, name="pods")
    world.tick()
    started = Started(job="208", sequence=3, time_ms=NOW_MS, ranks=(RankPlacement(0, "worker-0", (0, 1)),))
    world.pipeline.apply_batch(
        Batch(events=(Submitted(job="208", sequence=1, time_ms=NOW_MS, gpus_per_node=2), started))
    )
    board = world.tick()
    assert [gpu["job"] for gpu in board.json("doc.fleet")["nodes"][0]["gpus"]] == ["208", "208", None, None]
    assert [row.hosts for row in world.pipeline.state.jobs.list_running()] == [("computeinstance-1",)]


def test_nodes_that_kubernetes_withholds_are_rejected_for_their_reason(tmp_path: Path) -> None:
    leaving, maintained, cordoned = node("a", 8), node("b", 8), node("c", 8)
    leaving["spec"] = {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}
    maintained["spec"] = {"taints": [{"key": "example.com/maintenance", "effect": "NoExecute"}]}
    cordoned["spec"] = {"unschedulable": True}
    world = KubernetesWorld(tmp_path, leaving, maintained, cordoned, node("d", 8))
    decision = world.decide(world.tick(), gang=1, gpus_per_node=8)
    assert decision.rejected == {"withheld": 1, "maintenance": 1, "drained": 1}
    assert [rank.node for rank in decision.ranks] == ["d"]
    assert "no telemetry confirmed" in decision.sentence
    world.put(node("a", 8), node("b", 8), node("c", 8))
    world.clock.advance(10)
    assert world.decide(world.tick(), gang=4, gpus_per_node=8).outcome == "placed"


def host_pod(node_name: str, gpus: int) -> dict[str, Any]:
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "c", "uid": "r", "controller": True}
    labels = {"ray.io/cluster": "c", "ray.io/node-type": "worker"}
    about = {"name": "c-worker-0", "namespace": "ml", "uid": "w", "labels": labels, "ownerReferences": [owner]}
    container = {"name": "ray-worker", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {
        "metadata": about,
        "spec": {"nodeName": node_name, "containers": [container]},
        "status": {"phase": "Running"},
    }


def test_gpus_of_a_host_are_not_given_out_while_nothing_reports_its_jobs(tmp_path: Path) -> None:
    world = KubernetesWorld(tmp_path, node("a", 8))
    world.put(host_pod("a", 6), name="pods")
    board = world.tick()
    assert world.decide(board, gpus_per_node=3).outcome == "refused"
    assert world.decide(board, gpus_per_node=2).ranks[0].gpus == (6, 7)
    assert world.pipeline.state.jobs.list_running() == []
    world.put(host_pod("a", 6), name="pods", kind="DELETED")
    assert world.decide(world.tick(), gpus_per_node=8).outcome == "placed"


def test_gpus_of_a_host_are_its_own_schedulers_where_that_reports_them() -> None:
    kubernetes = NodeSpec("a", gpus=8, lent_gpus=8, other_names=("worker-0",), source="kubernetes")
    entities = Entities()
    fleet = FleetInventory(entities, Topology.build([]))
    topology = fleet.refresh(Topology.build([]), {}, None, {"a": kubernetes})
    assert topology.nodes[0].lent_gpus == 8
    topology = fleet.refresh(topology, {}, None, {"a": kubernetes, "worker-0": NodeSpec("worker-0", gpus=8)})
    assert [(spec.name, spec.gpus, spec.lent_gpus) for spec in topology.nodes if spec.gpus] == [("a", 8, 0)]


@pytest.mark.parametrize("first", ["kubernetes", "slurm"])
def test_a_machine_that_two_schedulers_state_under_two_names_is_one(first: str) -> None:
    rows = {
        "kubernetes": NodeSpec("ip-10-0-0-5", gpus=8, other_names=("10.0.0.5",), source="kubernetes"),
        "slurm": NodeSpec("gpu-1", gpus=8, gpu_model="H100", other_names=("10.0.0.5",)),
    }
    stated = {rows[name].name: rows[name] for name in sorted(rows, key=lambda name: name != first)}
    topology = FleetInventory(Entities(), Topology.build([])).refresh(Topology.build([]), {}, None, stated)
    assert [(spec.name, spec.gpus, spec.gpu_model) for spec in topology.nodes] == [(rows[first].name, 8, "H100")]


def test_two_nodes_of_one_source_that_share_an_address_stay_two() -> None:
    specs = [NodeSpec(name, gpus=8, other_names=("10.0.0.5",), source="kubernetes") for name in ("a", "b")]
    stated = {spec.name: spec for spec in specs}
    topology = FleetInventory(Entities(), Topology.build([])).refresh(Topology.build([]), {}, None, stated)
    assert topology.gpus.tolist() == [8, 8]


def test_gpus_of_a_pod_that_never_gets_to_run_are_not_given_out(tmp_path: Path) -> None:
    world = KubernetesWorld(tmp_path, node("a", 8))
    container = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "6"}}}
    states = [{"name": "c", "restartCount": 9, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]
    pod = {
        "metadata": {"name": "p", "namespace": "ml", "uid": "p"},
        "spec": {"nodeName": "a", "containers": [container]},
        "status": {"phase": "Running", "containerStatuses": states},
    }
    world.put(pod, name="pods")
    board = world.tick()
    assert world.decide(board, gpus_per_node=3).outcome == "refused"
    assert world.decide(board, gpus_per_node=2).ranks[0].gpus == (6, 7)
    assert board.json("doc.fleet")["gpus"]["free"] == 2
    world.put(pod, name="pods", kind="DELETED")
    assert world.decide(world.tick(), gpus_per_node=8).outcome == "placed"


def test_gpus_of_a_gang_that_is_not_whole_are_held_once_when_its_training_loop_reports(tmp_path: Path) -> None:
    world = KubernetesWorld(tmp_path, node("a", 12))
    world.put(job("train"), name="jobs")
    world.put(running(pod("train", 0), "a"), pod("train", 1), name="pods")
    assert world.tick().json("doc.fleet")["gpus"]["free"] == 4
    phase = Phase(job="ml/train", sequence=10**15, time_ms=world.clock.now_ms(), name="loading", rank=0, node="a")
    world.pipeline.apply_batch(Batch(events=(phase,)))
    assert world.tick().json("doc.fleet")["gpus"]["free"] == 4


def test_labels_of_another_job_take_nothing_from_the_gpus_of_bound_pods() -> None:
    assert find_whole_job("ml/set-workers", {"ml/set"}) == "ml/set"
    assert find_whole_job("ml/settle", {"ml/set"}) == find_whole_job("other", {"ml/set"}) == ""
