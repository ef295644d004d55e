"""A transaction that is rolled back: the placer's memory is then what its ledger on disk says."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet import failpoints
from fleetcast.placement.actions.breaker import BUCKET_MS
from fleetcast.placement.ledger.ledger import Ledger, LedgerError
from fleetcast.placement.ledger.verify import verify_ledger
from tests.service.placer.test_act import ACT_LATE_S, ActWorld
from tests.service.placer.test_queues import HOUR_MS
from tests.service.placer.test_reclaim import OLD_S


class FullDisk:
    """A disk that is full at the nth commit, from 0 on. has_failed: whether that commit was reached."""

    def __init__(self, number: int) -> None:
        self.left, self.has_failed = number, False

    def __enter__(self) -> "FullDisk":
        failpoints.set_hook(self.fail)
        return self

    def __exit__(self, *_: object) -> None:
        failpoints.set_hook(None)

    def fail(self, point: str) -> float:
        if point == "ledger.before_commit":
            self.left -= 1
            if self.left < 0 and not self.has_failed:
                self.has_failed = True
                raise LedgerError("the disk is full")
        return failpoints.KEEP_ALL


def make_world(folder: Path) -> ActWorld:
    """The request p of 4 nodes is owed GPUs. The job a has just written a checkpoint."""
    folder.mkdir()
    world = ActWorld(folder)
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 4), c=("lender", 4))
    world.board.more = {"a": {"checkpoint_ms": world.clock.now_ms() + 1000 * (OLD_S - 10)}}
    world.wait_for("p", "owed", 4)
    world.clock.advance(OLD_S)
    return world


def read_memory(ledger: Ledger) -> tuple[Any, ...]:
    return (
        msgspec.json.decode(msgspec.json.encode(ledger.list_marks())),
        ledger.actions.list_open(),
        ledger.list_active_intents(),
        ledger.list_queue_entries(),
        dict(ledger.charges.list_open_charges()),
        ledger.head,
    )


def check_disk(world: ActWorld) -> None:
    """Check that the placer's memory is what its ledger on disk says."""
    ledger = world.service.ledger
    with ledger.transaction():
        pass  # writes the marks that wait for a transaction
    again = Ledger(ledger.path)
    assert read_memory(ledger) == read_memory(again)
    again.close()


def try_all_commits(folder: Path, begin: Callable[[ActWorld], None], check: Callable[[ActWorld], None]) -> int:
    """Let each commit of the pass after `begin` fail once, in a new world each. `check` follows the next pass.

    Returns how many commits the pass has.
    """
    for number in itertools.count():
        world = make_world(folder / str(number))
        begin(world)
        with FullDisk(number) as disk:
            world.pass_at(0)
        check_disk(world)
        world.pass_at(1)
        check(world)
        world.close()
        assert verify_ledger(world.config.ledger).is_intact
        if not disk.has_failed:
            return number
    raise AssertionError


@pytest.mark.parametrize("step_ms", [0, HOUR_MS])
def test_a_stop_is_sent_and_promised_once_whatever_commit_of_its_pass_fails(tmp_path: Path, step_ms: int) -> None:
    def begin(world: ActWorld) -> None:
        world.clock.time_ms += step_ms
        world.poll("a", "b", "c")

    def check(world: ActWorld) -> None:
        assert world.states() == {"a": "sent"}
        (record,) = world.service.actions.list_open()
        (promised,) = world.service.view.promised_sets.read().values()
        assert (promised.payer, promised.actions, promised.number) == ("p", (record.action_id,), 1)
        assert promised.by_ms == record.action.by_ms
        (taken,) = world.service.actions.switches.breaker.taken
        assert taken.gpus == record.action.gpus

    assert try_all_commits(tmp_path, begin, check) > 3


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_a_clock_that_is_set_moves_all_times_once_whatever_commit_fails(tmp_path: Path, step_ms: int) -> None:
    def begin(world: ActWorld) -> None:
        world.poll("a", "b", "c")
        world.pass_at(0)
        assert world.states() == {"a": "sent"}
        world.clock.time_ms += step_ms

    def check(world: ActWorld) -> None:
        left_ms = 1000 * (ACT_LATE_S - 1)
        control, now_ms = world.service.actions, world.clock.now_ms()
        (record,) = control.list_open()
        (promised,) = world.service.view.promised_sets.read().values()
        assert (control.compute_by_ms(record) - now_ms, promised.by_ms - now_ms) == (left_ms, left_ms)
        (taken,) = control.switches.breaker.taken
        assert 0 <= taken.until_ms - now_ms <= BUCKET_MS
        for charge in world.service.ledger.charges.list_open_charges().values():
            assert charge.started_ms is not None
            assert now_ms - charge.started_ms == 1000 * OLD_S + 1000

    assert try_all_commits(tmp_path, begin, check) > 0
