"""Trimaran's and Volcano's questions over HTTP: always an answer, each node in it, none preferred once it is stale."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import yaml

from fleetcast.fleet.clock import ManualClock
from fleetcast.service.api.app import create_app
from fleetcast.service.api.routes import adapters
from fleetcast.service.board.board import BoardWriter, Section
from fleetcast.service.config import Config
from tests.service.api_world import NODES, NOW_MS, Client, config, publish, sections

WATCHER = "/v1/adapters/trimaran/watcher"
STALE_S = 61.0
EXAMPLES = Path(__file__).parents[3] / "examples"


def loads(as_of_ms: int = NOW_MS, busy: tuple[float, ...] = (0.1, 0.9)) -> Section:
    """n001 is quiet, n002 is busy, of n003 the section does not know yet."""
    told = np.full((2, 3, 2), np.nan, np.float32)
    told[:, 0] = busy
    return Section("node.load", told, as_of_ms)


@dataclass
class World:
    client: Client
    board: BoardWriter
    clock: ManualClock

    def watched(self) -> dict[str, float]:
        """The series that Trimaran scores by."""
        response = self.client.get(WATCHER)
        assert response.status_code == 200, response.text
        rows = response.json()["data"]["NodeMetricsMap"]
        return {node: row["metrics"][0]["value"] for node, row in rows.items()}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    board, clock = publish(tmp_path), ManualClock(NOW_MS + 1_000)
    board.publish([*sections(), loads()], NOW_MS)
    with Client(create_app(config(tmp_path), clock)) as client:
        client.app.state.context.cache._hold_s = 0.0
        yield World(client, board, clock)


def test_every_node_of_the_board_is_there(world: World) -> None:
    assert world.watched() == {"n001": 10.0, "n002": 90.0, "n003": 50.0}
    assert world.client.get(WATCHER).json()["window"]["end"] == NOW_MS // 1000


def test_a_new_board_is_another_answer(world: World) -> None:
    world.watched()
    world.board.publish([loads(NOW_MS + 500, (0.8, 0.2))], NOW_MS + 500)
    assert world.watched() == {"n001": 80.0, "n002": 20.0, "n003": 50.0}


def test_a_stale_board_prefers_no_node_and_leaves_none_out(world: World) -> None:
    world.clock.advance(STALE_S)
    assert world.watched() == dict.fromkeys(NODES, 50.0)


@pytest.mark.parametrize("parts", [[], sections()], ids=["no board", "a first board without loads"])
def test_without_a_forecast_there_is_an_answer_that_prefers_nobody(tmp_path: Path, parts: list[Section]) -> None:
    if parts:
        publish(tmp_path)
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
        world = World(client, BoardWriter(tmp_path / "board"), ManualClock(NOW_MS))
        assert world.watched() == (dict.fromkeys(NODES, 50.0) if parts else {})


def test_volcano_gets_a_score_for_each_node_and_no_veto_from_a_stale_board(world: World) -> None:
    def ask(verb: str, body: Any) -> Any:
        response = world.client.post(f"/v1/adapters/volcano/{verb}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    nodes = {"task": {}, "nodes": [{"Name": name} for name in (*NODES, "stranger")]}
    job = {"job": {"PodGroup": {"Spec": {"MinResources": {"nvidia.com/gpu": "100000"}}}}}
    world.clock.advance(STALE_S)
    assert ask("prioritize", nodes)["nodeScore"] == dict.fromkeys([*NODES, "stranger"], 50.0)
    assert ask("enqueueable", job) == {"status": 0}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"nodes": [{"Name": 1}]}', b"\xff", b"[" * 5000])
def test_garbage_of_volcano_is_a_clear_4xx(world: World, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = world.client.post("/v1/adapters/volcano/prioritize", content=body, headers=headers)
    assert response.status_code in (400, 422), response.text
    assert response.json()["detail"]


def paths(prefix: str) -> set[str]:
    return {row.path for row in adapters.ROWS if row.path.startswith(prefix)}


def test_the_examples_name_our_routes() -> None:
    trimaran = yaml.safe_load((EXAMPLES / "trimaran.yaml").read_text(encoding="utf-8"))
    (profile,) = trimaran["profiles"]
    address = profile["pluginConfig"][0]["args"]["watcherAddress"]
    volcano = yaml.safe_load((EXAMPLES / "volcano.yaml").read_text(encoding="utf-8"))
    (told,) = (plugin["arguments"] for tier in volcano["tiers"] for plugin in tier["plugins"] if "arguments" in plugin)
    prefix = told["extender.urlPrefix"]
    asked = {f"{urlsplit(prefix).path}/{told[f'extender.{verb}Verb']}" for verb in ("prioritize", "jobEnqueueable")}
    assert {f"{urlsplit(address).path}/watcher"} == paths("/v1/adapters/trimaran")
    assert asked == paths("/v1/adapters/volcano")
    assert told["extender.ignorable"] is True
    assert urlsplit(address).port == urlsplit(prefix).port == Config().api.port
