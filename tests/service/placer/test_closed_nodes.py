"""A refusal by a reservation, a maintenance window or a quota names it, and is no wish of the request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.service.placer_world import NODES, World

WINDOWS = """
[queue.a]
[queue.b]
[[reservation]]
name = "mlperf"
queue = "b"
nodes = {rack = "r01"}
from = 2020-05-12T19:30:00Z
to = 2020-05-13T08:00:00Z
[[maintenance]]
name = "fans"
nodes = ["n09", "n10"]
from = 2020-05-12T18:00:00Z
to = 2020-05-13T00:00:00Z
"""
WHOLE = {"gpus_per_node": 8, "gang": 9, "spread": True, "limit_s": 3600}
MLPERF = "held by reservation 'mlperf' for queue 'b' until 2020-05-13 08:00 UTC"
FANS = "held free by maintenance 'fans' until 2020-05-13 00:00 UTC"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = with_queues(tmp_path, WINDOWS)
    yield made
    made.close()


def with_queues(folder: Path, text: str) -> World:
    made = World(folder)
    (folder / "queues.toml").write_text(text)
    placer = msgspec.structs.replace(made.config.placer, queues=str(folder / "queues.toml"))
    made.config = msgspec.structs.replace(made.config, placer=placer)
    made.restart()
    made.board.publish()
    made.service.view.refresh()
    return made


def test_a_refusal_names_the_reservation_its_queue_and_its_end(world: World) -> None:
    refused = world.place("x", queue="a", **WHOLE)
    assert refused["outcome"] == "refused"
    assert refused["rejected"] == {"reservation": 8, "maintenance_window": 2}
    assert f"of 16 nodes: 8 {MLPERF}, 2 {FANS}" in refused["sentence"]
    assert "avoid" not in refused["sentence"]


def test_the_requests_own_list_stays_its_own(world: World) -> None:
    refused = world.place("x", queue="a", avoid_nodes=["n01", "n16"], **WHOLE)
    assert refused["rejected"] == {"avoided": 2, "reservation": 7, "maintenance_window": 2}
    assert f"2 on the request's own list to avoid, 7 {MLPERF}" in refused["sentence"]


def test_the_reservations_own_queue_is_refused_by_maintenance_alone(world: World) -> None:
    refused = world.place("x", queue="b", **{**WHOLE, "gang": 15})
    assert refused["rejected"] == {"maintenance_window": 2}
    assert FANS in refused["sentence"]
    assert "mlperf" not in refused["sentence"]


def test_a_node_of_two_windows_counts_once(tmp_path: Path) -> None:
    more = '[[reservation]]\nname = "z"\nqueue = "b"\nnodes = ["n01", "n11"]\nfrom = 2020-05-12T18:00:00Z\n'
    world = with_queues(tmp_path, f"{WINDOWS}{more}to = 2020-05-14T08:00:00Z\n")
    refused = world.place("x", queue="a", **WHOLE)
    assert refused["rejected"] == {"reservation": 9, "maintenance_window": 2}
    assert f"8 {MLPERF}, 1 held by reservation 'z' for queue 'b' until 2020-05-14 08:00 UTC" in refused["sentence"]
    assert refused["nodes"] == refused["candidates"] + sum(refused["rejected"].values()) == NODES
    world.close()


def test_what_waits_for_a_window_is_placed_beside_it(world: World) -> None:
    placed: dict[str, Any] = world.place("x", queue="a", **{**WHOLE, "gang": 6})
    assert placed["outcome"] == "placed"
    assert all(rank["node"] > "n10" for rank in placed["ranks"])
    assert world.ask("GET", "/placements/x").json()["request_id"] == "x"
    assert world.restart() is None
    assert world.place("x", queue="a", **{**WHOLE, "gang": 6}) == placed, "the ledger has the request as it came"


def test_a_model_beyond_the_quota_is_named(tmp_path: Path) -> None:
    world = with_queues(tmp_path, "[queue.a]\nlimit = {H100 = 4}\n[queue.b]\n")
    refused = world.place("x", queue="a", **{**WHOLE, "gang": 1})
    assert refused["outcome"] == "refused"
    assert "avoid" not in refused["sentence"]
    world.close()
