"""What came after the scores: on a node's answer and in the placer's view before the next tick."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.service.answers.risk import HardSignal, UrgentSignals
from fleetcast.service.api.app import create_app
from fleetcast.service.board.board import Board, BoardReader, BoardWriter, Section
from fleetcast.service.board.urgent import compute_node_state, find_struck_nodes
from tests.service import placer_world
from tests.service.api_world import NOW_MS, Client, config, sections


def row(node: str, type: str, taken_ms: int, code: int | None = None) -> HardSignal:
    said = {"sentence": f"{type} on {node}", "taken_ms": taken_ms, "fatal": code == 79}
    return HardSignal(node=node, type=type, code=code, time_ms=taken_ms - 500, **said)


def tell(writer: BoardWriter, *rows: HardSignal) -> None:
    as_of_ms = max(row.taken_ms for row in rows)
    document = msgspec.json.encode(UrgentSignals(as_of_ms, rows))
    writer.publish_urgent([Section("doc.urgent", document, as_of_ms)], as_of_ms)


def newest(folder: Path) -> Board:
    board = BoardReader(folder).latest()
    assert board is not None
    return board


def test_only_what_came_after_the_scores_counts_and_who_is_back_is_not_struck(tmp_path: Path) -> None:
    writer = BoardWriter(tmp_path)
    writer.publish([Section("node.state", np.zeros(3, np.int8), NOW_MS)], NOW_MS)
    assert find_struck_nodes(newest(tmp_path)) == {}
    known, fresh = row("a", "lost", NOW_MS - 1), row("b", "drain", NOW_MS + 5)
    tell(writer, known, fresh, row("c", "lost", NOW_MS + 5), row("c", "returned", NOW_MS + 6))
    assert find_struck_nodes(newest(tmp_path)) == {"b": [fresh]}
    writer.publish([Section("node.state", np.zeros(3, np.int8), NOW_MS + 7)], NOW_MS + 7)
    assert find_struck_nodes(newest(tmp_path)) == {}


@pytest.mark.parametrize(
    ("state", "rows", "expected"),
    [
        ("ok", [row("n", "drain", 1)], "drained"),
        ("degraded", [row("n", "lost", 1), row("n", "xid", 2, 79)], "lost"),
        ("ok", [row("n", "xid", 1, 79)], "degraded"),
        ("ok", [row("n", "xid", 1, 13)], "ok"),
        ("stale", [row("n", "xid", 1, 79)], "stale"),
    ],
)
def test_the_gravest_word_about_a_node_wins(state: str, rows: list[HardSignal], expected: str) -> None:
    assert compute_node_state(state, rows) == expected


@pytest.fixture
def api(tmp_path: Path) -> Iterator[tuple[Client, BoardWriter]]:
    writer = BoardWriter(tmp_path / "board")
    writer.publish([*sections(), Section("node.state", np.zeros(3, np.int8), NOW_MS)], NOW_MS)
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS + 1000))) as client:
        client.app.state.context.cache._hold_s = 0.0
        yield client, writer


def test_a_node_tells_of_a_signal_before_the_next_tick(api: tuple[Client, BoardWriter]) -> None:
    client, writer = api
    before = client.get("/v1/nodes/n002").json()
    tell(writer, row("n002", "drain", NOW_MS + 500))
    after = client.get("/v1/nodes/n002").json()
    assert after == before | {"state": "drained", "urgent": [msgspec.to_builtins(row("n002", "drain", NOW_MS + 500))]}
    assert client.get("/v1/nodes/n001").json() == before | {"node": "n001"}


def test_nothing_is_placed_on_a_node_that_a_signal_struck(tmp_path: Path) -> None:
    world = placer_world.World(tmp_path)
    try:
        world.board.publish()
        at_ms = world.board.as_of_ms + 1
        tell(world.board.writer, row("n01", "lost", at_ms), row("n02", "xid", at_ms, 79), row("n03", "xid", at_ms, 13))
        decision = world.place("a", gang=14, gpus_per_node=8)
        assert {rank["node"] for rank in decision["ranks"]} == {f"n{number:02d}" for number in range(3, 17)}
        assert world.place("b", gang=1)["outcome"] == "refused"
    finally:
        world.close()
