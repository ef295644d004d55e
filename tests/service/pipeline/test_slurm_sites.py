"""A site with Slurm: its inventory from Slurm alone, and telemetry under other names of the same machines."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.slurm.source import SlurmSource
from fleetcast.service.board.board import Board
from tests.ingest.slurm_outputs import FakeSlurm, node, nodes, old_job, queue
from tests.service.bare_world import BUSY, IDLE, NOW_MS, BareWorld, page

FIELD = Path(__file__).parents[2] / "field"
FIELD_MS = 1_795_650_000_000
NODE_LINES = (
    "NODELIST|STATECOMPLETE|GRES|TIMESTAMP|HOSTNAMES|NODE_ADDR|CPUS|MEMORY|REASON|\n"
    "gpu-1|mixed|gpu:h100:4(S:0-1)|0|ip-10-0-0-5|10.0.0.5|64|524288|none|\n"
)


class SlurmWorld(BareWorld):
    """A pipeline with the source "slurm", whose answers the test gives."""

    def __init__(self, folder: Path, jobs: bytes, rows: bytes, topology: Topology | None = None) -> None:
        self.slurm = FakeSlurm([jobs], [rows])
        self.source = SlurmSource(Entities(), ManualClock(0), {}, client=self.slurm)
        super().__init__(folder, topology, sources=[self.source])
        self.source._clock = self.clock

    def poll(self) -> None:
        state = self.source._state.copy()
        self.pipeline.apply_batch(asyncio.run(self.source._poll(state)))
        self.source._state = state

    def look(self, **pages: bytes) -> Board:
        """Poll and tick, then scrape a page of each node a few times: the first tick joins names."""
        self.poll()
        self.tick()
        return self.run(60, **pages)


def fleet(board: Board) -> dict[str, Any]:
    found: dict[str, Any] = board.json("doc.fleet")
    return found


def inventory(world: BareWorld) -> dict[str, tuple[int, str]]:
    return {spec.name: (spec.gpus, spec.gpu_model) for spec in world.pipeline.state.topology.nodes}


def test_a_site_with_slurm_alone_has_an_inventory(tmp_path: Path) -> None:
    plain = node("login") | {"gres": ""}
    future = node("later", "future")
    world = SlurmWorld(tmp_path, queue(), nodes(node("n1"), node("n2", "mixed"), plain, future))
    board = world.look()
    assert inventory(world) == {"n1": (8, "H100"), "n2": (8, "H100")}
    assert fleet(board)["gpus"]["total"] == 16
    assert world.decide(board, gpus_per_node=8).outcome == "placed"


def test_jobs_of_slurm_hold_gpus_of_the_inventory(tmp_path: Path) -> None:
    held = old_job(7, nodes="n1", gres_detail=["gpu:h100:8(IDX:0-7)"])
    world = SlurmWorld(tmp_path, queue(held), nodes(node("n1", "allocated")))
    board = world.look()
    assert fleet(board)["gpus"]["running"] == 8
    assert world.decide(board, gpus_per_node=1).outcome == "refused"


def test_a_node_that_slurm_keeps_for_maintenance_gets_nothing(tmp_path: Path) -> None:
    world = SlurmWorld(tmp_path, queue(), (FIELD / "26-slurm-maintenance-nodes.json").read_bytes())
    board = world.look()
    decision = world.decide(board, gpus_per_node=8)
    assert ([rank.node for rank in decision.ranks], decision.rejected) == (["g11"], {"maintenance": 1})
    assert {row["node"]: row["state"] for row in fleet(board)["nodes"]}["g10"] == "withheld"


def test_telemetry_of_a_node_joins_it_under_its_host_name(tmp_path: Path) -> None:
    jobs, rows = (FIELD / f"29-slurm-nodename-hostname-{what}.json" for what in ("queue", "nodes"))
    world = SlurmWorld(tmp_path, jobs.read_bytes(), rows.read_bytes())
    world.clock.advance((FIELD_MS - NOW_MS) / 1000)
    board = world.look(**{"10.0.0.5": (FIELD / "29-slurm-nodename-hostname-page.prom").read_bytes()})
    found = fleet(board)
    assert [(row["node"], row["state"]) for row in found["nodes"]] == [("gpu-st-p5-1", "ok")]
    assert (found["gpus"]["total"], found["gpus"]["running"]) == (4, 4)
    assert board.array("gpu.unknown_use").sum() == 0, "the work that telemetry shows is that of Slurm's job"
    assert inventory(world) == {"gpu-st-p5-1": (4, "H100")}


@pytest.mark.parametrize("host", ["ip-10-0-0-5", "ip-10-0-0-5.ec2.internal", "gpu-1", "GPU-1", "Gpu-1.example.com"])
def test_the_text_form_and_longer_names_join_too(tmp_path: Path, host: str) -> None:
    world = SlurmWorld(tmp_path, queue(), NODE_LINES.encode())
    board = world.look(**{host: page(host, [(BUSY, {})] * 4)})
    assert [row["node"] for row in fleet(board)["nodes"]] == ["gpu-1"]
    spec = world.pipeline.state.topology.nodes[0]
    assert (spec.gpus, spec.gpu_model, spec.cpus, spec.host_memory_gib) == (4, "H100", 64, 512.0)


def test_an_address_that_two_nodes_have_joins_nothing(tmp_path: Path) -> None:
    rows = [node(name) | {"hostname": "localhost", "address": "127.0.0.1"} for name in ("n1", "n2")]
    world = SlurmWorld(tmp_path, queue(), nodes(*rows))
    world.look()
    names = world.pipeline.state.entities[EntityKind.NODE]
    assert [names.resolve_name(name) for name in ("localhost", "127.0.0.1", "n1")] == ["localhost", "127.0.0.1", "n1"]


def test_a_file_of_the_topology_and_the_boards_of_an_exporter_win(tmp_path: Path) -> None:
    file = Topology.build([NodeSpec("n1", gpus=8, gpu_model="H200")])
    world = SlurmWorld(tmp_path, queue(), nodes(node("n1"), node("n2")), file)
    world.look(n2=page("n2", [(IDLE, {})] * 7))
    assert inventory(world) == {"n1": (8, "H200"), "n2": (7, "H100")}


def test_what_a_source_says_of_nodes_is_the_same_object_until_it_changes(tmp_path: Path) -> None:
    world = SlurmWorld(tmp_path, queue(), nodes(node("n1")))
    world.poll()
    before = world.source.nodes()
    world.poll()
    assert world.source.nodes() is before
    world.slurm.rows = [nodes(node("n1"), node("n2"))]
    world.poll()
    assert set(world.source.nodes()) == {"n1", "n2"}
