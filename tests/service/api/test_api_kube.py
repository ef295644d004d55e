"""kube-scheduler's extender over HTTP: from the newest board while it is fresh, and neutral otherwise."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
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

STALE_MS = 61_000
POD = {"metadata": {"name": "p"}, "spec": {"containers": [{"resources": {"requests": {"nvidia.com/gpu": "2"}}}]}}


def rated(as_of_ms: int = NOW_MS, state: tuple[int, ...] = (0, 1, 0)) -> list[Section]:
    """n001 has two GPUs free of four, n002 is drained, of n003 no risk is known."""
    risk = np.full((3, 4, 3), 0.01)
    risk[:, :, 2] = np.nan
    holders = np.array([[0, 0, -1, -1], [-1] * 4, [-1] * 4], np.int32)
    parts: dict[str, Any] = {
        "node.risk": risk,
        "node.state": np.array(state, np.int8),
        "gpu.usable": np.ones((3, 4), bool),
        "gpu.job": holders,
        "risk.reason": json.dumps({"n002": "drained since 14:02 UTC"}).encode(),
    }
    return [Section(name, data, as_of_ms) for name, data in parts.items()]


@dataclass
class World:
    client: Client
    board: BoardWriter
    clock: ManualClock

    def ask(self, verb: str, **more: Any) -> Any:
        body = {"Pod": POD, "Nodes": None, "NodeNames": [*NODES, "stranger"]} | more
        response = self.client.post(f"/v1/adapters/kube/{verb}", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def failed(self) -> dict[str, str]:
        answer: dict[str, str] = self.ask("filter")["FailedAndUnresolvableNodes"]
        return answer

    def scores(self) -> list[int]:
        return [row["Score"] for row in self.ask("prioritize")]

    def urgent(self, at_ms: int, *rows: dict[str, Any]) -> None:
        self.clock.advance((at_ms - self.clock.now_ms()) / 1000)
        document = json.dumps({"as_of_ms": at_ms, "rows": rows}).encode()
        self.board.publish_urgent([Section("doc.urgent", document, at_ms)], at_ms)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    board, clock = publish(tmp_path), ManualClock(NOW_MS + 1_000)
    board.publish([*sections(), *rated()], NOW_MS)
    with Client(create_app(config(tmp_path), clock)) as client:
        client.app.state.context.cache._hold_s = 0.0
        yield World(client, board, clock)


def test_a_fresh_board_speaks(world: World) -> None:
    assert world.failed() == {"n002": "fleetcast: drained since 14:02 UTC"}
    assert world.scores() == [10, 0, 5, 5]
    victims = {name: {"Pods": [{"UID": "u"}], "NumPDBViolations": 0} for name in ("n001", "n002")}
    assert set(world.ask("preempt", NodeNameToMetaVictims=victims)["NodeNameToMetaVictims"]) == {"n001"}
    response = world.client.post("/v1/adapters/kube/prioritize", json={"Pod": POD, "NodeNames": ["n001"]})
    assert (response.headers["age"], response.headers["x-fleetcast-board"]) == ("1", "2")


def test_a_stale_board_says_nothing_and_a_new_one_speaks_again(world: World) -> None:
    world.clock.advance(STALE_MS / 1000)
    assert world.failed() == {}
    assert world.scores() == [5, 5, 5, 5]
    assert "fleetcast_kube_neutral_answers_total 2.0" in world.client.get("/metrics").text
    world.board.publish(rated(NOW_MS + STALE_MS), NOW_MS + STALE_MS)
    assert world.scores() == [10, 0, 5, 5]


@pytest.mark.parametrize("parts", [[], sections()], ids=["no board", "a first board without scores"])
def test_without_a_board_everything_passes(tmp_path: Path, parts: list[Section]) -> None:
    if parts:
        publish(tmp_path)
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
        world = World(client, BoardWriter(tmp_path / "board"), ManualClock(NOW_MS))
        assert world.ask("filter")["NodeNames"] == [*NODES, "stranger"]
        assert world.scores() == [5, 5, 5, 5]


def test_a_hard_signal_counts_before_the_next_scores(world: World) -> None:
    lost = {"node": "n001", "type": "lost", "code": None, "time_ms": NOW_MS + 2_000, "sentence": "lost on n001"}
    xid = {"node": "n003", "type": "xid", "code": 79, "time_ms": NOW_MS + 2_000, "sentence": "XID 79 on GPU 1 of n003"}
    xid |= {"fatal": True}
    soft = xid | {"node": "stranger", "code": 31, "fatal": False}
    world.urgent(NOW_MS + 3_000, lost, xid, soft)
    assert set(world.failed()) == {"n001", "n002", "n003"}
    assert world.failed()["n003"] == "fleetcast: XID 79 on GPU 1 of n003"
    assert world.scores() == [0, 0, 0, 5]
    world.urgent(NOW_MS + 4_000, lost, xid, lost | {"type": "returned", "time_ms": NOW_MS + 3_900})
    assert set(world.failed()) == {"n002", "n003"}
    world.board.publish(rated(NOW_MS + 5_000), NOW_MS + 5_000)  # the scores know best by now
    assert set(world.failed()) == {"n002"}


def test_a_section_that_lags_a_generation_behind_the_names_is_unknown_there(world: World) -> None:
    names = Section("names.node", b"n001\nn002\nn003\nn004", NOW_MS + 1)
    world.board.publish([names], NOW_MS + 1)
    body = {"Pod": POD, "NodeNames": ["n001", "n004"]}
    assert world.client.post("/v1/adapters/kube/prioritize", json=body).json() == [
        {"Host": "n001", "Score": 10},
        {"Host": "n004", "Score": 5},
    ]


def test_bad_bodies_are_problems(world: World) -> None:
    for body, status in ((b"{", 400), (b"[]", 422), (b'{"NodeNames":5}', 422), (b" " * (2**20 + 1), 413)):
        for verb in ("filter", "prioritize", "preempt"):
            response = world.client.post(f"/v1/adapters/kube/{verb}", content=body)
            expected = 200 if (verb, status) == ("preempt", 422) and body != b"[]" else status
            assert response.status_code == expected, (verb, body[:20], response.text)
    assert world.client.get("/v1/adapters/kube/filter").status_code == 405
    assert world.client.post("/v1/adapters/kube/bind").status_code == 404


def test_a_body_that_does_not_come_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "DEADLINE_S", 0.05)

    async def never_whole() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    response = world.client.post("/v1/adapters/kube/filter", content=never_whole())
    assert (response.status_code, response.headers["connection"]) == (408, "close")


def test_the_example_configuration_names_our_routes() -> None:
    text = (Path(__file__).parents[3] / "examples" / "kube-scheduler.yaml").read_text(encoding="utf-8")
    (extender,) = yaml.safe_load(text)["extenders"]
    prefix = urlsplit(extender["urlPrefix"]).path
    asked = {f"{prefix}/{extender[verb]}" for verb in ("filterVerb", "prioritizeVerb", "preemptVerb")}
    assert asked == {row.path for row in adapters.ROWS if row.path.startswith(prefix)}
    assert urlsplit(extender["urlPrefix"]).port == Config().api.port
