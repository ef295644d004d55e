"""The table of docs/placement.md: what counts as evidence that a GPU is free, at each kind of site."""

from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.events import NodeEvent, Started
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch
from fleetcast.placement.machines.view import Hearing
from fleetcast.service.config import PlacerConfig
from tests.field.scraped_world import INTERVAL_S, ScrapedWorld

FIELD = Path(__file__).parents[2] / "field"
PAGE = (FIELD / "05-idle-gpus-vanish-before.prom").read_bytes().replace(b"dra-1", b"n1")
OTHER = PAGE.replace(b"n1", b"n2")
A, B = "http://10.0.0.1:9400/metrics", "http://10.0.0.2:9400/metrics"
TWO = Topology.build([NodeSpec("n1", gpus=8, gpu_model="H100"), NodeSpec("n2", gpus=8, gpu_model="H100")])
UNCONFIRMED = "; no telemetry confirmed that these GPUs are free"
Patch = pytest.MonkeyPatch


def stamped(page: bytes, time_ms: int) -> bytes:
    """The page with a timestamp on each sample, as a collector prints it."""
    lines = (line if line.startswith(b"#") or not line else line + f" {time_ms}".encode() for line in page.split(b"\n"))
    return b"\n".join(lines)


def fast_clock(world: ScrapedWorld) -> bytes:
    return stamped(OTHER, world.clock.now_ms() + 300_000 + round(INTERVAL_S * 1000))


def test_a_host_of_which_every_sample_is_refused_gets_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    world = ScrapedWorld(tmp_path, [A, B], monkeypatch)
    for _ in range(6):
        world.run(INTERVAL_S, {A: PAGE, B: fast_clock(world)})
    decision = world.decide(gang=2, gpus_per_node=8)
    assert decision.outcome == "refused"
    assert decision.rejected == {"unheard": 1}
    assert "1 of which no exporter has reported a GPU" in decision.sentence


@pytest.mark.parametrize("page", [None, b"", b"nothing 1\n", OTHER.replace(b"} ", b"} NaN #")])
def test_a_host_of_the_topology_that_nothing_was_read_of_gets_nothing(
    tmp_path: Path, monkeypatch: Patch, page: bytes | None
) -> None:
    world = ScrapedWorld(tmp_path, [A, f"{B} n2"], monkeypatch, TWO)
    world.run(90, {A: PAGE, B: page})
    decision = world.decide(gang=1, gpus_per_node=8)
    assert ({rank.node for rank in decision.ranks}, decision.rejected) == ({"n1"}, {"unheard": 1})
    assert UNCONFIRMED not in decision.sentence
    assert decision.nodes == decision.candidates + sum(decision.rejected.values())


def test_no_host_is_a_candidate_before_the_first_page_arrives(tmp_path: Path, monkeypatch: Patch) -> None:
    world = ScrapedWorld(tmp_path, [A, B], monkeypatch, TWO)
    world.run(15, {A: None, B: None})
    assert world.decide(gang=1, gpus_per_node=8).rejected == {"unheard": 2}


@pytest.mark.parametrize(("hangs_s", "rejected"), [(15, {}), (60, {"stale": 1}), (3600, {"stale": 1})])
def test_a_host_whose_exporter_hangs_is_stale_and_is_back_with_its_next_page(
    tmp_path: Path, monkeypatch: Patch, hangs_s: int, rejected: dict[str, int]
) -> None:
    world = ScrapedWorld(tmp_path, [A, B], monkeypatch)
    world.run(90, {A: PAGE, B: OTHER})
    world.run(hangs_s, {B: None}, every_s=min(hangs_s, 60))
    assert world.decide(gang=1, gpus_per_node=8, max_risk=1.0).rejected == rejected
    world.run(15, {B: OTHER})
    assert world.decide(gang=2, gpus_per_node=8, max_risk=1.0).outcome == "placed"


def test_an_operator_may_place_on_hosts_without_telemetry_and_the_answer_says_so(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    world = ScrapedWorld(tmp_path, [A, f"{B} n2"], monkeypatch, TWO, placer=PlacerConfig(unheard="ignore"))
    world.run(90, {A: PAGE, B: None})
    decision = world.decide(gang=2, gpus_per_node=8)
    assert decision.outcome == "placed"
    assert decision.sentence.endswith(UNCONFIRMED)


def started(world: ScrapedWorld, node: str) -> Batch:
    ranks = (RankPlacement(0, node, tuple(range(8))),)
    return Batch(events=(Started(job="j", sequence=1, time_ms=world.clock.now_ms(), ranks=ranks),))


def node_event(world: ScrapedWorld, **about: Any) -> Batch:
    event = NodeEvent(node="n2", source="op", sequence=1, time_ms=world.clock.now_ms(), **about)
    return Batch(node_events=(event,))


def test_at_a_site_of_events_alone_the_scheduler_counts_and_the_answer_says_so(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    world = ScrapedWorld(tmp_path, [], monkeypatch, TWO)
    world.run(15)
    decision = world.decide(gang=2, gpus_per_node=8)
    assert decision.outcome == "placed"
    assert decision.sentence.endswith(UNCONFIRMED)
    world.pipeline.apply_batch(started(world, "n1"))
    world.tick()
    assert world.decide(gang=2, gpus_per_node=8).rejected == {"busy": 1}
    world.pipeline.apply_batch(node_event(world, type="drain"))
    world.tick()
    assert world.decide(gang=1, gpus_per_node=8).rejected == {"busy": 1, "drained": 1}


def test_cpus_alone_ask_for_no_telemetry_of_gpus(tmp_path: Path, monkeypatch: Patch) -> None:
    specs = [NodeSpec("n1", gpus=8), NodeSpec("c1", cpus=64)]
    world = ScrapedWorld(tmp_path, [A], monkeypatch, Topology.build(specs))
    world.run(60, {A: PAGE})
    decision = world.decide(gang=1, gpus_per_node=0, cpus=8)
    assert {rank.node for rank in decision.ranks} == {"c1"}
    assert UNCONFIRMED not in decision.sentence


def test_numbers_on_the_board_keep_their_meaning() -> None:
    assert [(code.name, code.value) for code in Hearing] == [
        ("FRESH", 0),
        ("STALE", 1),
        ("UNHEARD", 2),
        ("UNCONFIRMED", 3),
    ]
