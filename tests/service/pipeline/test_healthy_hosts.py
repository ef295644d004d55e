"""Recorded pages and port trees of healthy hosts raise no flag and keep no job away."""

import os
from pathlib import Path

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.ingest.ports.sysfs import SysfsSource
from tests.field.scraped_world import INTERVAL_S, ScrapedWorld

FIELD = Path(__file__).parents[2] / "field"
DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[3] / "../shared/data")) / "telemetry"
PAGE = "http://10.0.0.1:9100/metrics"
recorded = pytest.mark.skipif(not DATA.is_dir(), reason="FLEETCAST_DATA has no telemetry folder")
FOR_S = 900.0
WATCHED = ("frozen_s", "gpu_temp_c")  # a page from a file never changes; some GPUs are warmer than others: early signs


def hosts(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.prom")) if folder.is_dir() else []


def unflagged(world: ScrapedWorld, *watched: str) -> None:
    """Fail if an action asks for more than watching, or if a reason is of another feature than `watched`."""
    nodes = world.nodes()
    assert nodes
    actions = {name: node["action"]["code"] for name, node in nodes.items()}
    assert {name: code for name, code in actions.items() if code not in ("none", "watch")} == {}
    reasons = {
        (name, reason["feature"]): reason["sentence"] for name, node in nodes.items() for reason in node["reasons"]
    }
    assert {key: said for key, said in reasons.items() if key[1] not in watched} == {}


def test_a_storage_port_and_a_port_without_a_cable_are_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ScrapedWorld(tmp_path, [PAGE], monkeypatch)
    world.run(FOR_S, {PAGE: (FIELD / "10-mixed-adapter-speeds.prom").read_bytes()})
    unflagged(world)


@recorded
def test_a_recorded_port_tree_with_a_bond_is_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = ScrapedWorld(tmp_path, [], monkeypatch)
    options = {"paths": [f"h100={DATA / 'ib-sysfs-h100' / 'sys'}"]}
    source = SysfsSource(world.pipeline.state.entities, ManualClock(0), options)
    source._clock = world.clock
    for _ in range(round(FOR_S / INTERVAL_S)):
        world.clock.advance(INTERVAL_S)
        world.pipeline.apply_batch(source._read_trees())
        world.tick()
    assert world.pipeline.state.entities.traits["h100/mlx5_bond_0/1"] == "Ethernet"
    unflagged(world)


@recorded
@pytest.mark.parametrize(
    "folder", sorted(path.name for path in DATA.iterdir() if hosts(path)) if DATA.is_dir() else ["none"]
)
def test_recorded_pages_of_healthy_hosts_are_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    pages = {f"http://10.0.1.{number}:9400/metrics": path for number, path in enumerate(hosts(DATA / folder))}
    world = ScrapedWorld(tmp_path, list(pages), monkeypatch)
    world.run(FOR_S, {url: path.read_bytes() for url, path in pages.items()})
    unflagged(world, *WATCHED)
