"""A start that names no node, or one that nobody knows, frees no GPU: the job may run where it was placed."""

from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.events import Finished, Phase, Started
from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.ledger.ledger import IntentState
from tests.service.placer.test_charged_shares import SharedWorld
from tests.service.placer_world import NOW_MS

EIGHT = tuple(range(8))
ASTRAY: dict[str, Any] = {
    "no node": Started(job="one", sequence=1, time_ms=NOW_MS),
    "upper case": Started(job="one", sequence=1, time_ms=NOW_MS, ranks=(RankPlacement(0, "N01", EIGHT),)),
    "an address": Started(job="one", sequence=1, time_ms=NOW_MS, nodes=("10.0.0.1",)),
    "a phase of its training loop": Phase(job="one", sequence=1, time_ms=NOW_MS, name="evaluation"),
}


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = SharedWorld(tmp_path)
    yield world
    world.close()


def place(world: SharedWorld, name: str) -> dict[str, Any]:
    body = {"request_id": name, "queue": "a", "gpus_per_node": 8}
    found: dict[str, Any] = world.ask("POST", "/placements", json=body)
    return found


def node_of(answer: dict[str, Any]) -> str:
    return str(answer["ranks"][0]["node"]) if answer["ranks"] else ""


@pytest.mark.parametrize("start", ASTRAY.values(), ids=ASTRAY)
def test_its_gpus_are_given_to_nobody_until_it_ends(world: SharedWorld, start: Any) -> None:
    node = node_of(place(world, "one"))
    world.fold(start)
    for _ in range(60):
        world.beat(10_000)
    assert world.service.ledger.read_intent_state("one") is IntentState.ACTIVE
    others = [node_of(place(world, f"other-{number}")) for number in range(20)]
    assert node not in others
    assert sum(map(bool, others)) == 15
    world.fold(Finished(job="one", sequence=9, time_ms=NOW_MS + 600_000))
    world.beat(10_000)
    assert node_of(place(world, "next")) == node
    assert world.service.ledger.read_intent_state("one") is IntentState.ENDED


def test_a_start_that_names_its_nodes_later_is_seen_then(world: SharedWorld) -> None:
    node = node_of(place(world, "one"))
    world.fold(Started(job="one", sequence=1, time_ms=NOW_MS))
    world.beat(10_000)
    world.fold(Started(job="one", sequence=2, time_ms=NOW_MS, ranks=(RankPlacement(0, node, EIGHT),)))
    world.beat(10_000)
    place(world, "next")
    assert world.service.ledger.read_intent_state("one") is IntentState.SEEN
