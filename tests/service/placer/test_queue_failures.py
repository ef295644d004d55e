"""Files of queues, plugins and passes that fail: the placer goes on, says so, and comes up again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.placement.queues.tree import QueueTree
from fleetcast.service.placer import queue_file
from tests.service.placer.test_queues import FILE, QueueWorld

HUGE = "[class.c]\npriority = 99999999999999999999\n[queue.a]\nclass = 'c'\n[queue.b]\n"


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = QueueWorld(tmp_path)
    world.board.publish()
    yield world
    world.close()


def failing_tree(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let every pass fail whose tree has a queue of this name, as a fault that no check has found."""
    order = QueueTree.compute_priority

    def fail(self: QueueTree, request: Any) -> int:
        if name in self.row:
            raise OverflowError("Python int too large to convert to C long")
        return order(self, request)

    monkeypatch.setattr(queue_file, "try_tree", lambda tree: None)
    monkeypatch.setattr(QueueTree, "compute_priority", fail)


def fill(world: QueueWorld) -> None:
    """Two requests that wait since the fleet is full."""
    world.beat(jobs={"old": range(16)})
    world.wait("r1", "a")
    world.wait("r2", "a")


def metric(world: QueueWorld, name: str) -> float:
    lines = [line for line in world.ask("GET", "/metrics").splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_a_number_that_no_pass_computes_with_is_refused_by_put_and_by_the_file(world: QueueWorld) -> None:
    problem = world.ask("PUT", "/queues", 422, content=HUGE, headers={"if-match": "*"})
    assert "an integer has 67 bits" in problem["detail"]
    world.rewrite(HUGE)
    fill(world)
    world.step()
    assert "an integer has 67 bits" in world.ask("GET", "/queues")["refused"]
    assert metric(world, "fleetcast_placer_queues_refused") == 1
    assert metric(world, "fleetcast_placer_failures_total") == 0
    world.rewrite(FILE)
    world.step()
    assert world.ask("GET", "/queues")["refused"] == ""
    assert metric(world, "fleetcast_placer_queues_refused") == 0


def test_the_placer_starts_with_the_tree_before_when_the_file_is_bad(world: QueueWorld) -> None:
    before = world.ask("GET", "/queues")["generation"]
    world.rewrite(HUGE)
    for _ in range(2):
        world.restart()
        answer = world.ask("GET", "/queues")
        assert answer["generation"] == before
        assert "an integer has 67 bits" in answer["refused"]
    world.file.unlink()
    world.restart()
    assert world.ask("GET", "/queues")["generation"] == before
    fill(world)
    world.step()
    assert world.order() == ["r1", "r2"]


def test_a_ledger_that_has_no_text_of_a_good_file_leaves_one_line(world: QueueWorld) -> None:
    with world.service.ledger.transaction():
        world.service.ledger.record_marks(queues_text="")
    world.rewrite(HUGE)
    world.restart()
    fill(world)
    world.step()
    answer = world.ask("GET", "/queues")
    assert (answer["generation"], answer["rows"]) == ("", [])
    assert "one line" in world.service.ledger.read_audit_trail(50)[-1]["sentence"] or any(
        "one line" in row["sentence"] for row in world.service.ledger.read_audit_trail(50)
    )
    assert world.order() == ["r1", "r2"]


def test_a_bad_file_that_never_served_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an integer has 67 bits"):
        QueueWorld(tmp_path, HUGE)


def test_the_tree_before_serves_when_the_first_pass_with_another_fails(
    world: QueueWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(world)
    world.step()
    before = world.ask("GET", "/queues")["generation"]
    failing_tree(monkeypatch, "new")
    world.ask("PUT", "/queues", content=f"{FILE}[queue.new]\n", headers={"if-match": "*"})
    world.beat()
    world.step()
    answer = world.ask("GET", "/queues")
    assert answer["generation"] == before
    assert "the first pass with it failed: pass over the queue failed (OverflowError" in answer["refused"]
    assert metric(world, "fleetcast_placer_failures_total") == 1
    world.beat()
    world.step()
    assert world.order() == ["r1", "r2"]
    assert metric(world, "fleetcast_placer_failures_total") == 1
    world.restart()
    assert world.ask("GET", "/queues")["generation"] == before
    problem = world.ask("PUT", "/queues", 422, content=f"{FILE}[queue.new]\n", headers={"if-match": "*"})
    assert "failed with this very file: change it" in problem["detail"]


def test_a_tree_that_fails_without_one_before_leaves_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_tree(monkeypatch, "a")
    world = QueueWorld(tmp_path)
    world.board.publish()
    fill(world)
    world.step()
    world.beat()
    world.step()
    assert world.ask("GET", "/queues")["generation"] == ""
    world.restart()
    world.beat(jobs={})
    world.step()
    assert world.order() == []
    world.close()


def test_a_pass_that_fails_ends_nothing_and_says_so(world: QueueWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world)
    world.step()
    monkeypatch.setattr("fleetcast.service.placer.queue_pass.plan", lambda *_: 1 / 0)
    for _ in range(2):
        world.beat()
        world.step()
    why = "nothing is placed from the queue now: the pass over the queue failed (ZeroDivisionError: division by zero)"
    assert [row["why"] for row in world.ask("GET", "/queue")["rows"]] == [why, why]
    assert metric(world, "fleetcast_placer_failures_total") == 2
    assert world.ask("GET", "/queues")["refused"] == ""
    monkeypatch.undo()
    world.beat(jobs={})
    world.step()
    assert world.order() == []


def test_start_times_that_fail_end_nothing(world: QueueWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world)
    monkeypatch.setattr("fleetcast.service.placer.start_times.sample_timelines", lambda *_: 1 / 0)

    async def run() -> None:
        task = asyncio.create_task(world.starts.run())
        async with asyncio.timeout(20):
            while world.service.failures.last is None:
                await asyncio.sleep(0.01)
        world.starts.stop()
        await task

    asyncio.run(run())
    assert isinstance(world.service.failures.last, ZeroDivisionError)


def broken(*_: object) -> Any:
    raise ZeroDivisionError("a plugin")


def narrow(*_: object) -> Any:
    return [False]


@pytest.mark.parametrize("name", ["broken", "narrow"])
def test_a_filter_that_fails_rejects_and_ends_nothing(world: QueueWorld, name: str) -> None:
    guard = world.service.failures.guard_filter
    world.service.filters = ((name, guard(name, globals()[name])),)
    answer = world.ask("POST", "/placements", json={"request_id": "p", "queue": "a", "gpus_per_node": 8})
    assert (answer["outcome"], answer["rejected"]) == ("refused", {name: 16})
    world.wait("r1", "a")
    world.beat()
    world.step()
    assert world.order() == ["r1"]
    world.service.filters, world.service.scorers = (), (("s", world.service.failures.guard_scorer("s", broken)),)
    world.beat()
    world.step()
    assert world.order() == []
    assert metric(world, "fleetcast_placer_failures_total") > 1


def test_requests_of_a_queue_that_is_removed_are_counted_and_wait_until_it_is_back(world: QueueWorld) -> None:
    world.beat(jobs={"old": range(12), "older": range(12, 16)})
    for number in range(3):
        world.wait(f"b{number}", "b")
    world.wait("a0", "a")
    world.step()
    less = "[queue.a]\n[queue.c]\n"
    for query in ("?dry_run=true", ""):
        change = world.ask("PUT", f"/queues{query}", content=less, headers={"if-match": "*"})
        assert change["stranded"] == {"b": 3}
        assert any("3 waiting requests name queues" in note for note in change["notes"])
    for _ in range(2):
        world.beat(jobs={"older": range(12, 16)})
        world.step()
        assert world.order() == ["b0", "b1", "b2"]
        ladder = world.ask("GET", "/queue/b0/why")["ladder"]
        assert ("gone", "takes no requests any more") in [(step["code"], step["sentence"][10:36]) for step in ladder]
        world.restart()
    back = world.ask("PUT", "/queues", content=FILE, headers={"if-match": "*"})
    assert (back["stranded"], back["added"]) == ({}, ["b", "c/users"])
    world.beat()
    world.step()
    assert world.order() == []


def test_ten_thousand_queues_are_read_beside_other_requests(world: QueueWorld) -> None:
    text = "".join(f"[queue.q{at}]\nweight = 2\nguaranteed = {{gpu = 0.01}}\n" for at in range(9_999))

    async def go(client: Any) -> tuple[Any, int]:
        put = asyncio.create_task(client.put("/queues", content=f"{text}[queue.a]\n", headers={"if-match": "*"}))
        answered = 0
        while not put.done():
            assert (await client.get("/healthz")).status_code == 200
            answered += 1
            await asyncio.sleep(0.001)
        return put.result(), answered

    answer, answered = world.run(go)
    assert (answer.status_code, len(answer.json()["added"])) == (200, 9_999)
    assert answered > 3


@pytest.mark.parametrize("value", ["9" * 400, "-" + "9" * 400, "9" * 5000, "1e400", str(2**64)])
def test_a_number_of_hundreds_of_digits_in_a_query_is_refused(world: QueueWorld, value: str) -> None:
    for path in ("/audit?after=", "/placements?limit=", "/charges?from=", "/charges?to="):
        assert "whole number" in world.ask("GET", f"{path}{value}", 422)["detail"]
