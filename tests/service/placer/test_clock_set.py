"""A clock that is set by an hour, and back, takes nothing from anybody."""

from pathlib import Path

import pytest

from tests.service.placer.test_queues import HOUR_MS, QueueWorld

TEXT = "[queue.a]\nguaranteed = {gpu = 64}\ncredits = {rate = 0.5, cap_gpu_h = 1000}\n[queue.b]\n"


@pytest.mark.parametrize("set_ms", [-HOUR_MS, HOUR_MS])
def test_shares_credits_and_charges_stay_whole_when_the_clock_is_set(tmp_path: Path, set_ms: int) -> None:
    world = QueueWorld(tmp_path, TEXT)
    world.board.publish()
    world.wait("a0", "a")
    world.wait("b0", "b", gang=2)
    world.pass_()
    world.beat(HOUR_MS, jobs={"a0": [0], "b0": [1, 2]})
    world.pass_()
    before = {row["queue"]: row for row in world.ask("GET", "/queues")["rows"]}
    for step_ms in (set_ms, 1000, -set_ms, 1000):
        world.clock.time_ms += step_ms
        world.beat(1000)
        world.wait(f"more{world.clock.time_ms}", "b")
        world.pass_()
        rows = {row["queue"]: row for row in world.ask("GET", "/queues")["rows"]}
        assert rows["a"]["banked"] >= before["a"]["banked"]
        assert all(row["decayed"] >= 0 and row["share"] >= 0 for row in rows.values())
        for row in world.ask("GET", f"/charges?from=0&to={2 * world.clock.time_ms}")["rows"]:
            assert all(value is None or value >= 0 for name, value in row.items() if name.endswith("_gpu_s"))
    world.beat(1000, jobs={}, ended=[("a0", 1, world.clock.time_ms), ("b0", 1, world.clock.time_ms)])
    world.pass_()
    closed = [
        charge
        for charge in world.service.ledger.charges.read_charges_between(0, 2 * world.clock.time_ms)
        if charge.outcome
    ]
    assert {charge.request_id for charge in closed} >= {"a0", "b0"}
    assert all(charge.ended_ms is not None and charge.ended_ms >= charge.held_ms for charge in closed)
    world.restart()
    assert {row["queue"] for row in world.ask("GET", "/queues")["rows"]} == {"a", "b"}
    world.close()
