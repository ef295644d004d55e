"""One step of an adapter: what goes at once, when it ends early, and what is told of it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fleetcast.schedulers.adapter import Door, Write, WriteOutcome
from fleetcast.schedulers.nodes import CONDITION, LABEL, TAINT, NodeMarks
from fleetcast.service import adapters
from fleetcast.service.config import AdapterConfig
from fleetcast.service.ports import kube_objects
from fleetcast.service.ports.kube_objects import write_by_key
from tests.service.adapters_world import DOORS, PORT, World

MANY = 200  # nodes; far more than may change in a minute


def marks_door(options: dict[str, Any]) -> Door:
    """The marks of nodes, in memory, a node a batch."""
    return Door(NodeMarks("NoSchedule"), PORT, batch=3)


MARKS = AdapterConfig(f"{__name__}:marks_door", name="marks", mode="write")


def marked(band: str) -> dict[str, str]:
    high = band == "high"
    condition = "True HighRisk" if high else "False NoFailureExpected"
    return {CONDITION: condition, LABEL: band, **({TAINT: "high:NoSchedule"} if high else {})}


def test_a_lost_board_takes_all_back_at_once_and_first_what_keeps_others_away(tmp_path: Path) -> None:
    world = World(tmp_path, MARKS)
    PORT.held = {f"n{at:03d}": marked("high" if at % 10 == 9 else "low") for at in range(MANY)}
    status = world.step(after_s=601.0)
    assert status.withdrawn
    assert {values[CONDITION] for values in PORT.held.values()} == {"Unknown NoForecast"}
    assert not any({LABEL, TAINT} & values.keys() for values in PORT.held.values())
    fields = [(write.field, write.seen) for batch in PORT.batches for write in batch]
    assert {field for field, _ in fields[: MANY // 10]} == {TAINT}
    assert set(fields[MANY // 10 : MANY // 5]) == {(CONDITION, "True HighRisk")}


def test_who_is_waited_for_has_no_limit(tmp_path: Path) -> None:
    row = AdapterConfig(f"{DOORS}:awaited_door", name="memory", mode="write")
    world = World(tmp_path, row, writes_per_minute=1, max_share=1.0)
    world.step(0.0, 0.0, 0.0)
    assert world.step(0.9, 0.9, 0.9).held_back == 0
    assert PORT.bands() == {"n1": "high", "n2": "high", "n3": "high"}


@pytest.mark.parametrize("happens", ["withdrawn", "stale", "a newer board", "the end"])
def test_a_step_ends_after_its_batch_when_it_no_longer_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: str
) -> None:
    world = World(tmp_path, MARKS)
    write = PORT.write

    async def meanwhile(batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        monkeypatch.setattr(PORT, "write", write)
        if happens == "withdrawn":
            world.host.records.mark_withdrawn("marks")
        elif happens == "stale":
            world.clock.advance(100.0)
        elif happens == "a newer board":
            world.publish(0.0, 0.0, 0.9, 0.0, 0.0)
        world.host.begin_due_steps(world.reader.latest())
        if happens == "the end":
            for steps in world.host._steps.values():
                steps.end_running_step()
        return await write(batch)

    PORT.held = {f"n{at}": {} for at in range(1, 6)}
    monkeypatch.setattr(PORT, "write", meanwhile)
    world.step(0.9, 0.0, 0.0, 0.0, 0.0)
    assert sum(map(len, PORT.batches)) == 3
    assert PORT.held["n1"] == marked("high")
    world.step()
    left = {name: values for name, values in PORT.held.items() if values}
    if happens == "withdrawn":
        assert left == {}
    elif happens == "a newer board":
        assert left["n3"][LABEL] == "high"
        assert len(left) == 5


def test_a_conflict_while_all_is_taken_back_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "RETRY_S", 0.0)
    world = World(tmp_path)
    world.step(0.9)
    PORT.other = {"n1": {"band": "low"}}
    assert not world.step(after_s=601.0).withdrawn
    PORT.other = {}
    assert world.step(after_s=0.0).withdrawn
    assert PORT.bands() == {}


def test_who_observes_says_what_an_earlier_mode_has_left(tmp_path: Path) -> None:
    world = World(tmp_path, AdapterConfig(f"{DOORS}:memory_door", name="memory"))
    PORT.held = {"n1": {"band": "high"}, "n2": {}}
    assert world.step(0.0, 0.0).error == "1 still hold what it wrote before it observed"
    status = world.step(after_s=601.0)
    assert (status.withdrawn, PORT.bands()) == (False, {"n1": "high"})
    asyncio.run(world.host.withdraw("memory"))
    assert PORT.bands() == {}


def test_what_a_batch_wrote_until_its_time_was_over_is_told_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_objects, "MOST_S", 0.2)

    async def write_object(writes: list[Write]) -> list[WriteOutcome]:
        if writes[0].key == "hangs":
            await asyncio.Event().wait()
        return [WriteOutcome.DONE] * len(writes)

    batch = [Write(key, "label", "high", None, "") for key in ("a", "hangs", "b", "a")]
    found = asyncio.run(write_by_key(batch, write_object))
    assert found == [WriteOutcome.DONE, WriteOutcome.UNREACHABLE, WriteOutcome.DONE, WriteOutcome.DONE]
