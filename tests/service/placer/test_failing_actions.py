"""Parts that act on running jobs and fail: requests are placed as if these parts were off."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.errors import StaleError
from fleetcast.placement.ahead import stops
from fleetcast.service.placer import failures, recovery
from fleetcast.service.placer.action_follow import ActionFollower
from fleetcast.service.placer.failures import ACTIONS
from fleetcast.service.placer.growth import GrowthAdvisor
from fleetcast.service.placer.reclaim import ReclaimAdvisor
from fleetcast.service.placer.recovery import RecoveryAdvisor
from tests.service.placer.test_act import ActWorld, send_stop
from tests.service.placer.test_reclaim import OLD_S
from tests.service.placer.test_replace_acts import BrokenWorld

PARTS = [
    (RecoveryAdvisor, "record_actions"),
    (ReclaimAdvisor, "make_input"),
    (ReclaimAdvisor, "record_proposal"),
    (GrowthAdvisor, "record_growth"),
    (failures, "propose_reclaim"),
]
SAME = "acting on running jobs failed (ZeroDivisionError: of a gang without members)"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ActWorld]:
    world = ActWorld(tmp_path)
    yield world
    world.close()


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("of a gang without members")


def count_failures(world: ActWorld) -> float:
    line = f'fleetcast_placer_failures_total{{part="{ACTIONS}"}}'
    page: str = world.ask("GET", "/metrics")
    return sum(float(row.rpartition(" ")[2]) for row in page.splitlines() if row.startswith(line))


@pytest.mark.parametrize(("owner", "name"), PARTS, ids=[name for _, name in PARTS])
def test_a_part_that_fails_prevents_no_placement(
    world: ActWorld, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    world.wait_for("p", "owed", 4)
    assert count_failures(world) == 0
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        world.agents_pass_at(OLD_S)
        assert count_failures(world) > 0
        assert world.service.backlog.stalled == ""
        world.end("a")
        world.pass_at(10)
        assert world.placed() == {"p": ["n05", "n06", "n07", "n08"]}
    before = count_failures(world)
    world.pass_at(10)
    assert count_failures(world) == before


def test_a_search_that_fails_says_so_and_the_next_one_sends_the_stop(
    world: ActWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(failures, "propose_reclaim", fail)
        with pytest.raises(AssertionError):
            send_stop(world)
        assert world.states() == {}
        assert world.why("p") == f"stops no job: {SAME}"
    world.agents_pass_at(10)
    assert world.states() == {"a": "sent"}


def test_what_a_part_wrote_before_it_failed_is_not_stored(world: ActWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    send = ReclaimAdvisor._send_set

    def send_and_fail(self: ReclaimAdvisor, *facts: Any) -> None:
        send(self, *facts)
        fail()

    monkeypatch.setattr(ReclaimAdvisor, "_send_set", send_and_fail)
    with pytest.raises(AssertionError):
        send_stop(world)
    assert world.states() == {}
    assert world.service.view.promised_sets.read() == {}


def test_a_gang_whose_search_fails_leaves_recovery_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = BrokenWorld(tmp_path)
    make = recovery.make_broken_gang
    monkeypatch.setattr(
        recovery, "make_broken_gang", lambda jobs, row, view: fail() if row == 0 else make(jobs, row, view)
    )
    assert world.lose(1, 5) == {"other": "sent"}
    assert count_failures(world) > 0
    monkeypatch.undo()
    world.board.lost = (1,)
    world.agents_pass_at(30)
    assert world.states()["big"] == "sent"
    world.close()


def test_while_following_fails_other_gpus_are_given_and_those_of_the_stop_stay_held(
    world: ActWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_stop(world)
    with monkeypatch.context() as patch:
        patch.setattr(ActionFollower, "follow_board", fail)
        world.end("b")
        world.pass_at(10)
        world.end("a")
        world.pass_at(10)
        assert (world.states(), world.placed()) == ({"a": "sent"}, {"p": ["n09", "n10", "n11", "n12"]})
        assert count_failures(world) > 0
    world.pass_at(10)
    world.pass_at(10)
    assert (world.states()["a"], set(world.placed())) == ("seen", {"p", "r"})


@pytest.mark.parametrize(
    "broken", [[(ReclaimAdvisor, "make_input")], [(failures, "propose_reclaim"), (stops, "propose_reclaim")]]
)
def test_start_times_are_sampled_though_the_search_fails(
    world: ActWorld, monkeypatch: pytest.MonkeyPatch, broken: list[tuple[Any, str]]
) -> None:
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    world.wait_for("p", "owed", 4)
    for owner, name in broken:
        monkeypatch.setattr(owner, name, fail)
    world.agents_pass_at(OLD_S)
    before = count_failures(world)
    asyncio.run(world.starts.refresh())
    assert "p" in world.service.backlog.starts
    assert count_failures(world) > before


def test_a_stale_board_is_no_failure_of_a_part(world: ActWorld) -> None:
    with pytest.raises(StaleError), world.service.failures.contain(ACTIONS):
        raise StaleError("the board is old")
    assert count_failures(world) == 0
