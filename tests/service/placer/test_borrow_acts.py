"""Nodes that other jobs leave for a gang that lost some: asked to stop, held for the gang alone, and replaced."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetcast.placement.actions.life import ActionState
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.placement.machines.view import Hearing
from fleetcast.service.config import PlacerConfig
from tests.service.placer.test_act import ACT_LATE_S
from tests.service.placer.test_reclaim import OLD_S
from tests.service.placer.test_replace_acts import BrokenWorld
from tests.service.placer_world import GPUS, NODES

FILE = """
[policy]
reclaim = "act"
preempt_after_s = 0
[class.urgent]
preempts = ["batch"]
[class.batch]
[queue.q]
class = "urgent"
[queue.lent]
class = "batch"
[queue.other]
"""


class BorrowWorld(BrokenWorld):
    """A full fleet: `big` on n01 to n04, the batch jobs a and b in its rack and c in the other one, and `other`."""

    def __init__(self, folder: Path, text: str = FILE) -> None:
        super().__init__(folder, text)
        self.run_job("other", range(12, NODES))
        for name, nodes in {"a": range(4, 6), "b": range(6, 8), "c": range(8, 12)}.items():
            self.run_job(name, nodes)
            self.board.queue_of[name] = "lent"
        self.board.more = {name: {"checkpoint_ms": self.clock.now_ms() + 1000 * (OLD_S - 10)} for name in "ac"}
        self.agents_pass_at(OLD_S)

    def rows(self) -> dict[str, Any]:
        """Return job → its last action."""
        return {row.action.job: row for row in self.service.ledger.actions.read_after(0, 1000)}

    def leave(self, *jobs: str) -> None:
        for job in jobs:
            self.end(job)
        self.agents_pass_at(10)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[BorrowWorld]:
    world = BorrowWorld(tmp_path)
    yield world
    world.close()
    assert verify_ledger(world.config.ledger).is_intact


def test_a_job_stops_for_the_gang_and_its_node_is_held_until_the_gang_runs_on_it(world: BorrowWorld) -> None:
    assert world.lose(1) == {"a": "sent", "big": "proposed"}
    stop, replacement = world.rows()["a"], world.rows()["big"]
    assert (stop.action.kind, stop.action.payer, stop.action.reason.code) == (
        "preempt",
        "recovery of big, attempt 1",
        "class",
    )
    assert (replacement.action.kind, replacement.action.executor) == ("replace", "agents")
    assert replacement.action.after == (stop.action_id,)
    assert world.ask("GET", f"/actions/{replacement.action_id}")["after"] == [stop.action_id]
    assert [place.node for place in replacement.action.places] == ["n05"]
    assert replacement.action.by_ms == stop.action.by_ms + 1000 * ACT_LATE_S
    assert "for the recovery of big, attempt 1: a higher class needs the GPUs" in world.last("a")["sentence"]
    world.reply("a", "accept")
    world.leave("a")
    assert world.states() == {"a": "seen", "big": "sent"}
    for _ in range(2):
        assert (world.try_now(1), world.try_now(2)) == ("placed", "refused"), "n06 is free, and n05 is held"
        world.restart()
        world.pass_at(5)
    world.reply("big", "accept")
    world.run_job("big", (0, 2, 3, 4))
    world.agents_pass_at(10)
    assert world.states()["big"] == "seen"


def test_the_nodes_are_held_from_the_stop_on_and_through_the_restart_of_the_gang(world: BorrowWorld) -> None:
    world.lose(1)
    world.wait_for("r", "lent", 1)
    world.run_job("filler", (5,))
    world.restart()
    world.leave("a", "big")
    assert (world.states(), world.placed()) == ({"a": "seen", "big": "proposed"}, {}), "its attempt has ended"
    body = {"request_id": "again", "job": "big", "attempt": 2, "queue": "q", "gang": 4, "gpus_per_node": GPUS}
    world.ask("POST", "/queue", 202, json=body)
    world.pass_at(10)
    assert world.placed() == {"again": ["n01", "n03", "n04", "n05"]}
    world.board.attempt = 2
    world.run_job("big", (0, 2, 3, 4))
    world.agents_pass_at(10)
    assert (world.rows()["big"].state, world.rows()["big"].why) == ("withdrawn", "its next attempt runs")


@pytest.mark.parametrize("how", ["refuse", "expire", "busy"])
def test_if_the_job_does_not_leave_the_gang_waits_and_asks_no_other_job(world: BorrowWorld, how: str) -> None:
    if how == "busy":
        world.board.hearing = Hearing.FRESH
    world.lose(1)
    if how == "refuse":
        world.reply("a", "refuse", why="no")
    elif how == "busy":
        world.end("a")
        world.board.busy = (4, 5)
    else:
        world.agents_pass_at(ACT_LATE_S + 1)
    world.agents_pass_at(10)
    replaced = [row for row in world.service.ledger.actions.read_after(0, 99) if row.action.after]
    assert [(row.state, row.why) for row in replaced] == [("withdrawn", "a does not leave its nodes")]
    world.agents_pass_at(10)
    assert world.states()["big"] == "proposed"
    assert world.rows()["big"].action.reason.code == "lost_wait"
    assert world.rows().keys() == {"a", "big"}


def test_a_refusal_frees_the_nodes_of_a_gang_whose_attempt_has_ended(world: BorrowWorld) -> None:
    world.lose(1)
    world.end("big")
    world.agents_pass_at(5)
    assert world.try_now(3) == "refused"
    world.reply("a", "refuse", why="no")
    world.agents_pass_at(5)
    assert world.rows()["big"].why == "a does not leave its nodes"
    assert world.try_now(3) == "placed"


def test_one_refusal_withdraws_the_stops_that_have_not_begun(world: BorrowWorld) -> None:
    assert world.lose(1, 2, 3) == {"a": "sent", "b": "sent", "big": "proposed"}
    world.reply("b", "refuse", why="no")
    world.agents_pass_at(5)
    assert (world.rows()["a"].state, world.rows()["b"].state) == ("withdrawn", "refused")


def test_healthy_nodes_or_more_lost_ones_end_the_borrowing(world: BorrowWorld) -> None:
    world.lose(1)
    world.lose()
    assert (world.rows()["a"].state, world.rows()["big"].state) == ("withdrawn", "withdrawn")
    assert world.rows()["big"].why == "its nodes are healthy, or the job has ended"


def test_once_all_jobs_have_left_the_gang_stays_on_a_lost_node_that_is_back(world: BorrowWorld) -> None:
    assert world.lose(1, 2) == {"a": "sent", "big": "proposed"}
    first = world.rows()["big"].action
    world.reply("a", "accept")
    world.lose(1)
    assert world.rows()["big"].action == first, "its nodes are held until all jobs have left"
    world.service.actions.pause(world.clock.now_ms(), "boss")
    world.leave("a")
    assert world.rows()["big"].action == first, "while nothing is sent, its nodes are held, too"
    world.service.actions.resume(world.clock.now_ms(), "boss")
    world.agents_pass_at(10)
    assert world.states() == {"a": "seen", "big": "sent"}
    action = world.rows()["big"].action
    assert (action.reason.code, action.gpus, action.lost_gpus) == ("lost_free", GPUS, GPUS)
    assert [rank.node for rank in action.ranks] == ["n02"]
    (withdrawn,) = (row for row in world.service.ledger.actions.read_after(0, 99) if row.action.after)
    assert withdrawn.why == "other nodes are concerned now"


def test_a_job_that_began_to_stop_leaves_its_nodes_to_the_gang_that_lost_one_more(world: BorrowWorld) -> None:
    world.lose(1)
    world.reply("a", "accept")
    world.lose(1, 2)
    assert world.rows()["big"].action.reason.code == "lost_wait"
    world.leave("a")
    world.agents_pass_at(10)
    assert world.rows()["big"].action.reason.code == "lost_free"
    assert world.states() == {"a": "seen", "big": "sent"}


@pytest.mark.parametrize(
    ("change", "more"),
    [
        (('"act"', '"act"\nact_in = ["q"]'), {}),
        (('"act"', '"act"\nact_in = ["lent"]'), {}),
        (("preempt_after_s = 0", "preempt_after_s = 300"), {}),
        (("", ""), {"big": {"preemptible": False}}),
    ],
)
def test_it_is_only_advice_unless_policy_patience_and_the_owner_allow_it(
    tmp_path: Path, change: tuple[str, str], more: dict[str, Any]
) -> None:
    world = BorrowWorld(tmp_path, FILE.replace(*change))
    world.board.more |= more
    assert world.lose(1) == {"big": "proposed"}
    assert (world.last("big")["executor"], world.rows()["big"].action.reason.code) == ("advice", "lost_borrow")
    if "300" in change[1]:
        world.agents_pass_at(300)
        assert world.states() == {"a": "sent", "big": "proposed"}
    world.close()


class TightWorld(BorrowWorld):
    """The limits of an hour are less than the GPUs of one job."""

    placer = PlacerConfig(taken_queue_share=0.05, taken_fleet_share=0.05)


def test_what_exceeds_the_limits_of_an_hour_is_not_planned(tmp_path: Path) -> None:
    world = TightWorld(tmp_path)
    assert world.lose(1) == {"big": "proposed"}
    assert world.rows()["big"].action.reason.code == "lost_wait"
    assert not world.service.actions.switches.breaker.is_open
    world.close()


def test_a_job_that_ends_soon_by_itself_is_waited_for(tmp_path: Path) -> None:
    world = BorrowWorld(tmp_path, FILE.replace("preempt_after_s = 0", "preempt_after_s = 300"))
    world.board.more["b"] = {"limit_s": OLD_S + 400}
    world.lose(1)
    world.agents_pass_at(270)
    assert world.rows()["big"].action.reason.code == "lost_wait"
    assert world.states() == {"big": "proposed"}
    world.close()


def test_patience_begins_with_the_loss_of_a_node_and_not_with_the_forecast_of_it(tmp_path: Path) -> None:
    world = BorrowWorld(tmp_path, FILE.replace("preempt_after_s = 0", "preempt_after_s = 600"))
    world.board.drained = (1,)
    world.agents_pass_at(30)
    assert world.rows()["big"].action.reason.code == "foreseen_borrow"
    world.agents_pass_at(600)
    world.board.drained = ()
    assert world.lose(1) == {"big": "proposed"}
    assert world.rows()["big"].action.reason.code == "lost_borrow"
    world.agents_pass_at(570)
    assert world.states() == {"big": "proposed"}
    world.agents_pass_at(30)
    assert world.states() == {"a": "sent", "big": "proposed"}
    world.close()


@pytest.mark.parametrize("changes", [1, 25])
def test_patience_counts_from_the_loss_however_often_the_advice_changed(tmp_path: Path, changes: int) -> None:
    world = BorrowWorld(tmp_path, FILE.replace("preempt_after_s = 0", "preempt_after_s = 1200"))
    for number in range(changes):
        world.lose(*((1, 3) if number % 2 else (1,)))
        world.restart()
    advice = [row for row in world.service.ledger.actions.read_after(0, 1000) if row.action.job == "big"]
    assert len(advice) == changes
    since_s = (world.clock.now_ms() - advice[0].life[0].time_ms) / 1000
    world.agents_pass_at(1199 - since_s)
    assert world.states() == {"big": "proposed"}
    world.agents_pass_at(1)
    assert world.states() == {"a": "sent", "big": "proposed"}
    world.close()


def test_patience_begins_anew_with_the_loss_of_a_node_that_was_back(tmp_path: Path) -> None:
    world = BorrowWorld(tmp_path, FILE.replace("preempt_after_s = 0", "preempt_after_s = 600"))
    world.lose(1)
    world.agents_pass_at(300)
    world.lose()
    world.lose(1)
    world.agents_pass_at(500)
    assert world.states() == {"big": "proposed"}
    world.agents_pass_at(100)
    assert world.states() == {"a": "sent", "big": "proposed"}
    world.close()


@pytest.mark.parametrize("set_ms", [-300_000, 900_000])
def test_the_patience_of_a_gang_is_the_same_when_the_clock_is_set(tmp_path: Path, set_ms: int) -> None:
    world = BorrowWorld(tmp_path, FILE.replace("preempt_after_s = 0", "preempt_after_s = 600"))
    world.lose(1)
    world.clock.time_ms += set_ms
    world.agents_pass_at(10)
    assert world.states() == {"big": "proposed"}
    world.agents_pass_at(580)
    assert world.states() == {"big": "proposed"}
    world.agents_pass_at(10)
    assert world.states() == {"a": "sent", "big": "proposed"}
    world.close()


def test_a_failed_borrowing_is_remembered_however_often_the_advice_changed(world: BorrowWorld) -> None:
    world.lose(1)
    world.reply("a", "refuse", why="no")
    world.agents_pass_at(10)
    for _ in range(25):
        world.lose(2)
        world.lose(1)
    assert {job: row.state for job, row in world.rows().items() if row.is_open} == {"big": "proposed"}
    assert world.rows()["big"].action.reason.code == "lost_wait"


def test_a_ledger_that_lost_its_actions_names_no_borrowing(world: BorrowWorld) -> None:
    world.lose(1)
    world.reply("a", "refuse", why="no")
    world.agents_pass_at(10)
    for record in world.service.actions.list_open():
        world.service.ledger.actions.enter(record, ActionState.WITHDRAWN, world.clock.now_ms(), "ada")
    world.close()
    Ledger(world.config.ledger).downgrade(world.clock.now_ms(), "ada")
    world.start()
    world.agents_pass_at(10)
    assert world.states() == {"a": "sent", "big": "proposed"}


def test_only_jobs_of_the_required_domain_leave_their_nodes(world: BorrowWorld) -> None:
    world.end("big")
    world.pass_at(5)
    body = {"request_id": "b2", "job": "big2", "queue": "q", "gang": 4, "gpus_per_node": GPUS}
    assert world.ask("POST", "/placements", json={**body, "topology": {"required": "rack"}})["outcome"] == "placed"
    world.run_job("big2", range(4))
    world.agents_pass_at(5)
    for name in "ab":
        world.board.more[name] = {"preemptible": False}
    world.lose(0)
    assert world.rows()["big2"].action.reason.code == "lost_wait", "c is in the other rack"
    world.board.more["b"] = {}
    world.lose(0)
    assert {job: row.state for job, row in world.rows().items() if row.is_open} == {"b": "sent", "big2": "proposed"}
    assert [place.node for place in world.rows()["big2"].action.places] == ["n07"]


def test_a_fair_queue_keeps_its_guarantee(tmp_path: Path) -> None:
    """The gang's queue gets back what it lost, and no more. A queue within its guarantee gives nothing."""
    text = FILE.replace('class = "urgent"\n[queue.lent]\nclass = "batch"', "guaranteed = {gpu = 64}\n[queue.lent]")
    for guaranteed, state in ((64, "lost_wait"), (56, "lost_wait"), (48, "lost_borrow")):
        folder = tmp_path / str(guaranteed)
        folder.mkdir()
        world = BorrowWorld(folder, text.replace("[queue.lent]", f"[queue.lent]\nguaranteed = {{gpu = {guaranteed}}}"))
        world.lose(1)
        assert world.rows()["big"].action.reason.code == state, guaranteed
        world.close()


def test_two_gangs_do_not_ask_the_same_job(world: BorrowWorld) -> None:
    world.run_job("big", range(2))
    world.run_job("big3", range(2, 4))
    world.board.more = {name: {"checkpoint_ms": world.clock.now_ms() + 1000 * OLD_S} for name in "ab"}
    world.agents_pass_at(OLD_S)
    world.lose(1, 3)
    after = {row.action.job: row.action.after for row in world.rows().values() if row.action.after}
    assert after.keys() == {"big", "big3"}
    assert set(after["big"]).isdisjoint(after["big3"])
    assert {row.action.job for row in world.rows().values() if row.action.kind == "preempt"} == {"a", "b"}


def test_a_gang_that_can_only_move_as_a_whole_restarts_there_like_any_request(world: BorrowWorld) -> None:
    """No action moves it: its nodes are lost anyway, and its next attempt waits as a request that may go anywhere."""
    for name in "abc":
        world.board.more[name] = {"preemptible": False}
    world.end("other")
    world.run_job("fill", range(13, NODES))
    world.end("c")
    world.lose()
    world.lose(0, 1, 2, 3)
    row = world.rows()["big"]
    assert (row.action.reason.code, row.action.executor) == ("lost_elsewhere", "advice")
    world.end("big")
    world.agents_pass_at(10)
    body = {"request_id": "again", "job": "big", "attempt": 2, "queue": "q", "gang": 4, "gpus_per_node": GPUS}
    world.ask("POST", "/queue", 202, json=body)
    world.pass_at(10)
    assert row.action.places == (), "the place is that of the request"
    assert world.placed()["again"] == ["n09", "n10", "n11", "n12"]


def test_a_gang_that_waits_for_nodes_gives_no_members_to_a_request(world: BorrowWorld) -> None:
    gang = {"min": 1, "desired": 4, "step": 1}
    world.board.more |= {name: {"preemptible": False} for name in "bc"}
    world.board.more["big"] = {"gang": gang, "members": 4, "gpus_per_member": GPUS}
    assert world.lose(1) == {"a": "sent", "big": "proposed"}
    world.wait_for("r", "q", 1)
    world.agents_pass_at(200)
    assert world.states() == {"a": "sent", "big": "proposed"}
    world.reply("a", "refuse", why="no")
    world.agents_pass_at(5)
    assert (world.rows()["big"].action.kind, world.rows()["big"].state) == ("shrink", "sent")


@pytest.mark.parametrize("mode", ["off", "advise"])
def test_if_actions_are_no_longer_sent_a_job_that_has_not_begun_goes_on(tmp_path: Path, mode: str) -> None:
    world = BorrowWorld(tmp_path)
    world.lose(1)
    world.rewrite(FILE.replace('"act"', f'"{mode}"'))
    world.restart()
    world.agents_pass_at(5)
    (replaced,) = (row for row in world.service.ledger.actions.read_after(0, 99) if row.action.after)
    assert (world.rows()["a"].state, replaced.state) == ("withdrawn", "withdrawn")
    world.close()
